"""Every situation of ``situations*.py`` over worlds, modes and ways, against plain eager training by one process.

Compared after every step: each parameter, within 2e-5, bitwise in a single process where nothing is reordered. Before
every step the gradient buffers are filled with NaN. Counted: Dynamo's graphs, and the reductions of every bucket.

In CI a pairwise cover runs (``ci_cases``): every situation meets every world, every mode, and both ways; every world
meets every mode in both ways, but no situation meets all of these. The slow test runs all of them, and Inductor::

    tests/run.sh --slow tests/test_situation_matrix.py                    # compares with results/situations.md
    tests/run.sh --slow tests/test_situation_matrix.py --write-results    # writes it
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from helpers import RankError, RankGroup, fresh_compiler
from pair import BOUND, MODES, Pair
from situations import Case, Side, Situation
from situations_graphs import GRAPHS
from situations_loops import LOOPS
from situations_params import PARAMS
from tabulate import tabulate
from torch._dynamo.utils import counters

pytestmark = pytest.mark.dist

SITUATIONS: dict[str, Situation] = {**GRAPHS, **LOOPS, **PARAMS}
WORLDS = (1, 2, 3, 4)
ALL_MODES = (*MODES, "plain dense")
CI_WAYS = ("aot_eager", "eager path")
"""Compiled, and attached without ``torch.compile``."""
TABLE = Path(__file__).parent / "results" / "situations.md"


class Outcome(NamedTuple):
    """What one rank saw of one case."""

    case: Case
    answer: str
    """``equal``, ``refused: ...`` as expected, or ``FAILED: ...``."""
    difference: float = 0.0
    graphs: int = 0
    seconds: float = 0.0


# Choice of cases


def pairwise_cover(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with one value of each axis, so that any two values of different axes meet in a row.

    Greedy: the row with the most pairs that have not met; among equals the one whose pairs and triples met least.
    """
    met: Counter[tuple[tuple[int, Any], ...]] = Counter()
    left = {
        ((i, left), (j, right))
        for (i, first), (j, second) in itertools.combinations(enumerate(axes), 2)
        for left in first
        for right in second
    }
    rows = []

    def gain(row: tuple[Any, ...]) -> tuple[int, int]:
        cells = tuple(enumerate(row))
        new = sum(pair in left for pair in itertools.combinations(cells, 2))
        return new, -sum(met[group] for size in (2, 3) for group in itertools.combinations(cells[-3:], size))

    # The first axis is by far the longest: its values one after the other keep the search short.
    for value in axes[0]:
        while any(pair[0] == (0, value) for pair in left):
            row = max(((value, *rest) for rest in itertools.product(*axes[1:])), key=gain)
            cells = tuple(enumerate(row))
            left.difference_update(itertools.combinations(cells, 2))
            met.update(group for size in (2, 3) for group in itertools.combinations(cells[-3:], size))
            rows.append(row)
    while left:
        row = max(itertools.product(*axes), key=gain)
        left.difference_update(itertools.combinations(tuple(enumerate(row)), 2))
        rows.append(row)
    return rows


def ci_cases() -> list[Case]:
    return [Case(*row) for row in pairwise_cover(list(SITUATIONS), WORLDS, ALL_MODES, CI_WAYS)]


def all_cases() -> list[Case]:
    cases = [Case(*row) for row in itertools.product(SITUATIONS, WORLDS, ALL_MODES, CI_WAYS)]
    return cases + [Case(*row, "inductor") for row in itertools.product(SITUATIONS, (1, 2), ALL_MODES)]


# One case


class Training:
    """One situation under one setting, on one rank."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case = case
        self.situation = SITUATIONS[case.situation]
        self.rank = rank
        attach: dict[str, Any] = {"bucket_size": self.situation.bucket_size}
        if case.way == "inductor":
            attach["inner_compiler"] = "inductor"
        if case.mode == "plain dense":
            attach["dense_layout"] = True
        self.pairs = [
            Pair(
                build,
                case.mode.split()[0],
                optimizer=self.situation.optimizer,
                attach=attach,
                before_attach=self.situation.before_attach,
                bound=self._bound(),
                **self.situation.options,
            )
            for build in self.situation.builds
        ]
        plains, models = [pair.plain for pair in self.pairs], [pair.model for pair in self.pairs]
        calls = models if case.way == "eager path" else [self.situation.compile(model) for model in models]
        self.plain = Side(case, plains, plains, [pair.reference for pair in self.pairs], [])
        handles = [pair.buf for pair in self.pairs]
        self.ours = Side(case, models, calls, [pair.optimizer for pair in self.pairs], handles, rank=rank)
        self.ours.launched = [record_launches(handle) for handle in handles]

    def _bound(self) -> float:
        if self.case.way == "inductor" and self.situation.inductor_bound is not None:
            return self.situation.inductor_bound
        # Without alignment, CPU products round by where they write; Inductor fuses.
        is_exact = self.situation.is_exact and self.case.mode != "plain dense" and self.case.way != "inductor"
        return 0.0 if is_exact and self.case.world == 1 else self.situation.bound

    def run(self) -> Iterable[str]:
        """All problems."""
        self.situation.begin(self.plain)
        self.situation.begin(self.ours)
        for step in range(self.situation.steps):
            yield from self._step(step)
        for pair in self.pairs:
            pair.check()
            if self.situation.check is not None:
                yield from self.situation.check(pair, self.plain, self.ours)
            yield from pair.problems
        found, expected = counters["stats"]["unique_graphs"], self._graphs()
        if found != expected:
            yield f"{found} graphs, expected {expected}"

    def _step(self, step: int) -> Iterable[str]:
        self.plain.step = self.ours.step = step
        for rank in range(self.case.world):
            self.plain.rank = rank
            self.situation.step(self.plain)
        for pair in self.pairs:
            for param in pair.plain.parameters():
                if param.grad is not None:
                    param.grad.div_(self.case.world)
            pair.poison()
        self.situation.step(self.ours)
        updated = self.situation.updated(step)
        for index in updated:
            self.pairs[index].check()
            self.pairs[index].update(step)
        for index in set(range(len(self.pairs))).difference(updated):
            self.plain.optimizers[index].zero_grad()
            self.ours.optimizers[index].zero_grad()
        for index, (launched, handle) in enumerate(zip(self.ours.launched, self.ours.handles)):
            reductions = self.situation.reductions
            times = 0 if index not in updated else reductions(self.case, step) if callable(reductions) else reductions
            expected = list(range(len(handle.plan.groups))) * times
            if launched != expected:
                yield f"step {step}: reductions of bucket groups {launched}, expected {expected}"
            launched.clear()
        self.situation.after(self.plain)
        self.situation.after(self.ours)

    def _graphs(self) -> int:
        if self.case.way == "eager path":
            return 0
        graphs = self.situation.graphs
        return graphs(self.case, self.rank) if callable(graphs) else graphs

    def close(self) -> None:
        for pair in self.pairs:
            pair.buf.detach()


def record_launches(buf: Any) -> list[int]:
    """The list to which every reduction from now on adds its bucket group."""
    launched: list[int] = []
    original = buf.buffers.reducer._launch

    def recorded(group: int, *, scaled: bool) -> None:
        launched.append(group)
        original(group, scaled=scaled)

    buf.buffers.reducer._launch = recorded
    return launched


def run_case(case: Case, rank: int) -> Outcome:
    situation = SITUATIONS[case.situation]
    is_refused = situation.is_refused(case)
    counters.clear()
    begin = time.perf_counter()
    answer, difference = "equal", 0.0
    training: Training | None = None
    try:
        training = Training(case, rank)
        problems = list(training.run())
        difference = max(pair.difference for pair in training.pairs)
        if is_refused:
            problems.append("was not refused")
        if problems:
            answer = "FAILED: " + "; ".join(problems)
    except Exception as error:
        if is_refused and situation.refused in str(error):
            answer = f"refused: {type(error).__name__} '{situation.refused}'"
        else:
            answer = f"FAILED: {traceback.format_exc()}"
    graphs = counters["stats"]["unique_graphs"]
    if training is not None:
        # After a failure ranks may stand at different places.
        with contextlib.suppress(Exception):
            training.close()
    if case.way != "eager path":
        # Without compiled code nothing needs a collection, which takes long.
        fresh_compiler()
    return Outcome(case, answer, difference, graphs, time.perf_counter() - begin)


def run_cases(rank: int, cases: Sequence[Case]) -> list[Outcome]:
    assert all(case.world == (dist.get_world_size() if dist.is_initialized() else 1) for case in cases)
    # What is alive by now stays; without that, collections are most of the time.
    gc.collect()
    gc.freeze()
    try:
        return [run_case(case, rank) for case in cases]
    finally:
        gc.unfreeze()


def run_on(ranks: Callable[[int], RankGroup], world: int, cases: Sequence[Case], timeout: float) -> list[list[Outcome]]:
    """Outcomes by rank; a single process needs no group."""
    return [run_cases(0, cases)] if world == 1 else ranks(world).run(run_cases, cases, timeout=timeout)


def failures(results: Iterable[Sequence[Outcome]]) -> list[str]:
    return [
        f"rank {rank}, {outcome.case}: {outcome.answer}"
        for rank, outcomes in enumerate(results)
        for outcome in outcomes
        if outcome.answer.startswith("FAILED")
    ]


# Tests


def test_pairwise_cover() -> None:
    axes = (range(9), "abcd", "efg", "hi")
    rows = pairwise_cover(*axes)
    for (i, first), (j, second) in itertools.combinations(enumerate(axes), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(first, second))
    # Fewer than the product of the two longest axes cannot do; greedy is not always there.
    assert 9 * 4 <= len(rows) <= 9 * 4 + 2


def test_cover_of_situations() -> None:
    """What the docstring of this file says."""
    cases = ci_cases()
    for name in SITUATIONS:
        mine = [case for case in cases if case.situation == name]
        assert {case.world for case in mine} == set(WORLDS)
        assert {case.mode for case in mine} == set(ALL_MODES)
        assert {case.way for case in mine} == set(CI_WAYS)
    assert {case[1:] for case in cases} == set(itertools.product(WORLDS, ALL_MODES, CI_WAYS))


@pytest.mark.parametrize("world", WORLDS)
def test_cover_equals_eager(ranks: Callable[[int], RankGroup], world: int) -> None:
    problems = failures(run_on(ranks, world, [case for case in ci_cases() if case.world == world], timeout=240))
    assert not problems, "\n".join(problems)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_matrix_equals_eager(ranks: Callable[[int], RankGroup], write_results: bool) -> None:
    outcomes: list[Outcome] = []
    problems: list[str] = []
    for world in WORLDS:
        for name in SITUATIONS:
            cases = [case for case in all_cases() if case.world == world and case.situation == name]
            try:
                # One call for each situation, so that a hang costs the others nothing.
                results = run_on(ranks, world, cases, timeout=200)
            except RankError as error:
                results = [[Outcome(case, f"FAILED: {error}") for case in cases]]
            problems += failures(results)
            # Ranks that disagree have failed; otherwise the first speaks for all.
            outcomes += results[0]
    table = tabulate(rows_of(outcomes), headers="keys", tablefmt="github") + "\n"
    print("", table, timings(outcomes), sep="\n")
    if write_results:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(HEADER + table)
    assert not problems, "\n".join(problems)
    assert TABLE.read_text() == HEADER + table, f"{TABLE} is not of this run; write it with --write-results"


HEADER = f"""# Situations

Written by `tests/run.sh --slow tests/test_situation_matrix.py --write-results`; see there what is compared. Worlds
{", ".join(map(str, WORLDS))} (Inductor: 1 and 2) in modes {", ".join(ALL_MODES)}.
`equal`: every parameter within {BOUND} of eager training after every step, or the bound that the situation states.

"""


def rows_of(outcomes: Sequence[Outcome]) -> list[dict[str, str]]:
    rows = []
    for name in SITUATIONS:
        mine = [outcome for outcome in outcomes if outcome.case.situation == name]
        compiled = {outcome.graphs for outcome in mine if outcome.case.way != "eager path"}
        row = {"situation": name, "graphs": " or ".join(map(str, sorted(compiled)))}
        for way in (*CI_WAYS, "inductor"):
            modes: dict[str, set[str]] = {}
            for outcome in mine:
                if outcome.case.way == way:
                    modes.setdefault(outcome.answer.split("\n")[0][:100], set()).add(outcome.case.mode)
            where = {answer: [mode for mode in ALL_MODES if mode in found] for answer, found in modes.items()}
            is_split = len(where) > 1
            row[way] = "; ".join(a + (f" ({', '.join(found)})" if is_split else "") for a, found in where.items())
        rows.append(row)
    return rows


def timings(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for way, world in itertools.product((*CI_WAYS, "inductor"), WORLDS):
        mine = [outcome for outcome in outcomes if outcome.case.way == way and outcome.case.world == world]
        if mine:
            seconds = sum(outcome.seconds for outcome in mine)
            worst = max(mine, key=lambda outcome: outcome.difference)
            rows.append((way, world, len(mine), round(seconds, 1), f"{worst.difference:.1e}", worst.case.situation))
    return tabulate(rows, headers=("way", "world", "cases", "seconds", "largest difference", "of"))
