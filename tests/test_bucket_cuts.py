"""``choose_cuts`` against all partitions, and its time for many parameters."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabuf_fx.bucket_cuts import CutCosts, choose_cuts
from megabuf_fx.runtime.layout import pad_to_divisor


def cost_of(
    cuts: Sequence[int], sizes: Sequence[int], ready: Sequence[float], costs: CutCosts, end_us: float
) -> tuple[float, int]:
    """Value and number of buckets, by playing the link from the first bucket to the last."""
    free = 0.0
    for start, stop in itertools.pairwise((0, *cuts)):
        end = 0
        for size in sizes[start:stop]:
            end = pad_to_divisor(end, costs.alignment) + size
        free = max(free, *ready[:stop]) + costs.fixed_us + costs.element_us * pad_to_divisor(end, costs.divisor)
    return max(free, end_us) + len(cuts) * costs.bucket_us, len(cuts)


def best_of_all(
    sizes: Sequence[int],
    ready: Sequence[float],
    costs: CutCosts,
    end_us: float,
    apart: Collection[int],
    largest: int | None,
) -> tuple[float, int]:
    count = len(sizes)
    forced = {cut for place in apart for cut in (place, place + 1)} - {0, count}
    inner = [(*cuts, count) for n in range(count) for cuts in itertools.combinations(range(1, count), n)]
    return min(
        cost_of(cuts, sizes, ready, costs, end_us)
        for cuts in inner
        if forced <= set(cuts) and are_small(cuts, sizes, costs, largest)
    )


def are_small(cuts: Sequence[int], sizes: Sequence[int], costs: CutCosts, largest: int | None) -> bool:
    """Whether no bucket of several parameters has more than ``largest`` elements, padding of starts included."""
    for start, stop in itertools.pairwise((0, *cuts)):
        end = 0
        for size in sizes[start:stop]:
            end = pad_to_divisor(end, costs.alignment) + size
        if largest is not None and stop - start > 1 and end > largest:
            return False
    return True


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[float], CutCosts, float, list[int], int | None]:
    """Whole numbers and quarters, so that sums of floats are exact."""
    count = draw(st.integers(1, 9))
    sizes = draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    ready = [float(x) for x in draw(st.lists(st.integers(0, 200), min_size=count, max_size=count))]
    alignment = draw(st.sampled_from([1, 4]))
    costs = CutCosts(
        alignment=alignment,
        divisor=alignment * draw(st.sampled_from([1, 3, 16])),
        fixed_us=draw(st.sampled_from([0, 1, 5, 40])),
        element_us=draw(st.sampled_from([0, 0.25, 1, 3])),
        bucket_us=draw(st.sampled_from([0, 0, 2, 20])),
    )
    apart = draw(st.lists(st.integers(0, count - 1), max_size=2, unique=True))
    largest = draw(st.sampled_from([None, None, 0, 25, 60]))
    return (
        sizes,
        sorted(ready) if draw(st.booleans()) else ready,
        costs,
        draw(st.sampled_from([0, 150])),
        apart,
        largest,
    )


@settings(max_examples=400, deadline=None)
@given(problems())
def test_best_of_all_partitions(
    problem: tuple[list[int], list[float], CutCosts, float, list[int], int | None],
) -> None:
    sizes, ready, costs, end_us, apart, largest = problem
    cuts = choose_cuts(sizes, ready, costs, end_us=end_us, apart=apart, largest=largest)
    assert list(cuts) == sorted(set(cuts))
    assert cuts[-1] == len(sizes)
    assert {cut for place in apart for cut in (place, place + 1)} <= {0, *cuts}
    assert are_small(cuts, sizes, costs, largest)
    assert cost_of(cuts, sizes, ready, costs, end_us) == best_of_all(sizes, ready, costs, end_us, apart, largest)
    assert choose_cuts(sizes, ready, costs, end_us=end_us, apart=apart, largest=largest) == cuts


def test_worked_example() -> None:
    """Gradients of 5 elements at 10, 20, 30, 40; a reduction takes 8 and 1 per element."""
    sizes, ready, costs = [5] * 4, [10.0, 20, 30, 40], CutCosts(1, 1, fixed_us=8, element_us=1)
    # Two and two: 20 to 38, then 40 to 58.
    assert choose_cuts(sizes, ready, costs) == (2, 4)
    # One by one the link falls behind, all in one starts late; three buckets can end at 58, too, but two are fewer.
    assert [cost_of(cuts, sizes, ready, costs, 0)[0] for cuts in ((1, 2, 3, 4), (4,), (1, 2, 4))] == [62, 68, 58]


def test_one_bucket_where_nothing_is_gained() -> None:
    costs = CutCosts(1, 1, fixed_us=1, element_us=1)
    assert choose_cuts([5, 5, 5], [7, 7, 7], costs) == (3,)
    # Everything is over before the backward is.
    assert choose_cuts([5, 5, 5], [1, 2, 3], costs, end_us=1000) == (3,)
    assert choose_cuts([], [], costs) == ()


def test_lengths_differ() -> None:
    with pytest.raises(ValueError, match="2 sizes but 1 times"):
        choose_cuts([1, 2], [1.0], CutCosts(1, 1, 0, 0))


@pytest.mark.parametrize(
    ("fixed_us", "compute_us"), [(50.0, 0.5), (50.0, 1.2), (0.0, 1.0)], ids=["link", "device", "no_latency"]
)
def test_ten_thousand_parameters(fixed_us: float, compute_us: float) -> None:
    """Seconds, not minutes, and no worse than any fixed size."""
    sizes = [(64, 4096 * 1024, 4096 * 4096, 1024)[place * 7 % 4] for place in range(10_000)]
    costs = CutCosts(64, 128 * 8, fixed_us=fixed_us, element_us=1e-4, bucket_us=fixed_us)
    ready = list(itertools.accumulate(size * compute_us * 1e-4 for size in sizes))
    began = time.perf_counter()
    cuts = choose_cuts(sizes, ready, costs, end_us=ready[-1])
    assert time.perf_counter() - began < 30
    found = _fast_cost(cuts, sizes, ready, costs)
    for threshold in (10**7, 10**8, 10**9, 10**10):
        fixed, held = [], 0
        for place, size in enumerate(sizes):
            held += size
            if held >= threshold or place + 1 == len(sizes):
                fixed.append(place + 1)
                held = 0
        assert found <= _fast_cost(fixed, sizes, ready, costs) * (1 + 1e-9)


def _fast_cost(cuts: Sequence[int], sizes: Sequence[int], ready: Sequence[float], costs: CutCosts) -> float:
    """For ``ready`` in ascending order and sizes that are multiples of the alignment."""
    free = 0.0
    for start, stop in itertools.pairwise((0, *cuts)):
        numel = pad_to_divisor(sum(sizes[start:stop]), costs.divisor)
        free = max(free, ready[stop - 1]) + costs.fixed_us + costs.element_us * numel
    return free + len(cuts) * costs.bucket_us
