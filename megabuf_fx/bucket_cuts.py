"""Where to cut one buffer into buckets so that the last reduction ends early: dynamic programming, in plain numbers.

    backward   |----- p0 ----|-- p1 --|--- p2 ---|------- p3 -------|
    link                              |== p0 p1 ==|    |==== p2 ====|== p3 ==|
                                                                    |exposed |

[Note: why the recurrence is exact]
Parameters ``0 .. n - 1`` are in buffer order. A bucket ``[i, j)`` is sent when its last gradient is there, at
``R(j) = max(ready[:j])`` (launches keep their order), and when the link is free. So the earliest end of everything up
to ``j``, in at most ``k`` buckets, is

    f(k, j) = min over i < j of max(f(k - 1, i), R(j)) + T(i, j),      T(i, j) = fixed + padded size * time per element

``R`` and ``T`` do not depend on how ``[0, i)`` was cut, and the expression never falls when ``f(k - 1, i)`` rises; so
an earliest prefix is always part of an earliest whole, and the end is all that must be known of a prefix. Padding is in
``T``: starts of buckets are aligned, so the size of a bucket follows from ``i`` and ``j`` alone.

[Note: few candidates]
Dropping the last parameters of a schedule makes nothing later, so ``f`` does not fall with ``j``. Starts that a limit
on sizes, or a parameter apart, leaves are those from some place on, and that place does not fall with ``j`` either.
Prefixes that have been sent at ``R(j)`` are therefore those up to some ``m``, and of them ``i = m`` leaves least to
send. Beyond ``m`` the link is never idle, and then ``f(i) - size of [0, i) * time per element`` does not fall either:
the first is the best. Two candidates remain. Padding blurs the second argument by at most one bucket's padding, so the
search goes on until that cannot help, at most over ``NEAR`` places; further away two cuts can differ by the rounding of
their ends only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megabuf_fx.runtime.layout import pad_to_divisor

NEAR = 8
MAX_BUCKETS = 256
MAX_CELLS = 500_000
"""Numbers of buckets that are tried for a buffer, and that number times its parameters; beyond, the earliest end counts
and not how many buckets it takes."""
_TIE = 1e-9
"""Relative difference of times that are equal but for the rounding of floats."""


@dataclass(frozen=True, slots=True)
class CutCosts:
    """What decides about cuts, beside sizes and times of gradients."""

    alignment: int
    """Divisor of parameter starts, in elements."""
    divisor: int
    """Divisor of bucket ends, in elements; a multiple of ``alignment``."""
    fixed_us: float
    """Time of a reduction of nothing."""
    element_us: float
    """Time that each element adds to it."""
    bucket_us: float = 0.0
    """What every bucket costs elsewhere, whenever it is sent: the latency of its gather."""


def choose_cuts(
    sizes: Sequence[int],
    ready: Sequence[float],
    costs: CutCosts,
    *,
    end_us: float = 0.0,
    apart: Collection[int] = (),
    largest: int | None = None,
) -> tuple[int, ...]:
    """Cut ``len(sizes)`` parameters into buckets; where they end, the last one included.

    ``sizes`` are elements, ``ready`` microseconds at which gradients are complete, both in buffer order. Minimal is
    ``max(end of the last reduction, end_us) + buckets * bucket_us``; of equal ones the fewest buckets are taken. The
    parameters in ``apart`` get buckets of their own; a bucket of several parameters has at most ``largest`` elements.

    Raises:
        ValueError: lengths differ.
    """
    if len(sizes) != len(ready):
        raise ValueError(f"{len(sizes)} sizes but {len(ready)} times")
    if not sizes:
        return ()
    problem = _Problem(sizes, ready, costs, apart, largest)

    def value(finish: float, buckets: int) -> float:
        return max(finish, end_us) + buckets * costs.bucket_us

    # With itself as predecessor: any number of buckets, the earliest end there is.
    earliest = [0.0] * (problem.count + 1)
    fallback = _backtrack([problem.add_bucket(earliest, earliest)] * problem.count)
    best, best_cuts = math.inf, fallback
    previous = [0.0] + [math.inf] * problem.count
    choices: list[list[int]] = []
    for buckets in range(1, problem.most + 1):
        current = [0.0] * (problem.count + 1)
        choices.append(problem.add_bucket(previous, current))
        found = value(current[-1], buckets)
        if found < best * (1 - _TIE):
            best, best_cuts = found, _backtrack(choices)
        if best <= value(earliest[-1], buckets + 1) * (1 + _TIE):
            return best_cuts
        previous = current
    return best_cuts if best <= value(earliest[-1], len(fallback)) * (1 + _TIE) else fallback


def _backtrack(choices: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The ends of buckets: ``choices[k][end]`` is where the last of at most ``k + 1`` buckets begins."""
    ends = [len(choices[0]) - 1]
    for places in reversed(choices):
        ends.append(places[ends[-1]])
        if not ends[-1]:
            break
    return tuple(reversed(ends[:-1]))


class _Problem:
    """Sizes and times as running sums."""

    def __init__(
        self,
        sizes: Sequence[int],
        ready: Sequence[float],
        costs: CutCosts,
        apart: Collection[int],
        largest: int | None,
    ) -> None:
        self.count = len(sizes)
        self._costs = costs
        self._ready = [0.0, *itertools.accumulate(ready, max)]
        padded = [pad_to_divisor(size, costs.alignment) for size in sizes]
        self._starts = [0, *itertools.accumulate(padded)]
        self._ends = [0, *(start + size for start, size in zip(self._starts, sizes))]
        forced = sorted({cut for place in apart for cut in (place, place + 1)} - {0, self.count})
        self.most = min(self.count, max(len(forced) + 1, min(MAX_BUCKETS, MAX_CELLS // self.count)))
        self._first = self._first_starts(forced, math.inf if largest is None else largest)
        self._blur = (costs.divisor + costs.alignment - 2) * costs.element_us

    def _first_starts(self, forced: Sequence[int], largest: float) -> list[int]:
        """For each end, the first start of a bucket that skips no forced cut and is not too large."""
        found, passed, start = [0], 0, 0
        for end in range(1, self.count + 1):
            while passed < len(forced) and forced[passed] < end:
                passed += 1
            start = max(start, forced[passed - 1] if passed else 0)
            while start + 1 < end and self._ends[end] - self._starts[start] > largest:
                start += 1
            found.append(start)
        return found

    def add_bucket(self, previous: Sequence[float], current: list[float]) -> list[int]:
        """Fill ``current`` with earliest ends that use one bucket more than ``previous``; where that bucket starts.

        See [Note: few candidates].
        """
        fixed, element, divisor, blur = self._costs.fixed_us, self._costs.element_us, self._costs.divisor, self._blur
        starts = self._starts
        places = [0] * (self.count + 1)
        sent = 0
        for end in range(1, self.count + 1):
            ready, stop, first = self._ready[end], self._ends[end], self._first[end]
            while sent + 1 < end and previous[sent + 1] <= ready:
                sent += 1
            place = max(sent, first)
            best = math.inf
            for start in range(place, min(end, place + NEAR + 2)):
                since = previous[start] if previous[start] > ready else ready
                numel = stop - starts[start]
                if since + fixed + numel * element - (blur if start > sent else 0.0) >= best:
                    break
                time = since + fixed + -(-numel // divisor) * divisor * element
                if time < best:
                    best, place = time, start
            current[end], places[end] = best, place
        return places
