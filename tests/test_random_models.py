"""Random models and loops against eager training; a failure is shrunk and printed as a script.

CI runs a few seeds; ``tests/run.sh --slow tests/test_random_models.py`` runs 200.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from helpers import RankError, RankGroup
from random_models import Spec, as_script, check_specs, random_spec, simpler

pytestmark = pytest.mark.dist


def problem_of(group: RankGroup, spec: Spec) -> str | None:
    """The problem on the first rank that has one; a hang or a crash is one, too."""
    try:
        answers = group.run(check_specs, [spec], timeout=30)
    except RankError as error:
        return str(error)
    return next((answer[0] for answer in answers if answer[0] is not None), None)


def kind_of(problem: str | None) -> str | None:
    """The problem without its numbers: the error's type, or that parameters differ."""
    return None if problem is None else re.sub(r"[\d.e-]+", "", problem)[:40]


def shrink(group: RankGroup, spec: Spec) -> Spec:
    """A smallest spec, by one thing less at a time, that still fails in the same way."""
    kind = kind_of(problem_of(group, spec))
    while True:
        smaller = next((s for s in simpler(spec) if kind_of(problem_of(group, s)) == kind), None)
        if smaller is None:
            return spec
        spec = smaller


def check(group: RankGroup, seeds: range) -> None:
    specs = [random_spec(seed) for seed in seeds]
    print(f"world {group.world}, seeds {seeds.start} to {seeds.stop - 1}")
    for start in range(0, len(specs), 10):
        some = specs[start : start + 10]
        try:
            answers = group.run(check_specs, some, timeout=120)
            failed = [spec for spec, *problems in zip(some, *answers) if any(p is not None for p in problems)]
        except RankError:
            failed = [spec for spec in some if problem_of(group, spec) is not None]
        if failed:
            smallest = shrink(group, failed[0])
            pytest.fail(f"{problem_of(group, smallest)}\n{as_script(smallest, group.world)}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", [1, 2])
def test_a_few_random_models(ranks: Callable[[int], RankGroup], world: int) -> None:
    check(ranks(world), range(world * 1000, world * 1000 + 12))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_200_random_models(ranks: Callable[[int], RankGroup], world: int) -> None:
    check(ranks(world), range(world * 10_000, world * 10_000 + {1: 80, 2: 80, 3: 40}[world]))


def test_a_planted_error_is_found_and_shrunk(ranks: Callable[[int], RankGroup]) -> None:
    """The check can fail, and ends at a smallest spec: here every spec of a mode that does not exist."""
    spec = Spec(1, ("linear", "norm", "break", "linear", "linear"), mode="missing mode", micro_batches=3)
    group = ranks(1)
    problem = problem_of(group, spec)
    assert problem is not None
    assert "KeyError: 'missing mode'" in problem
    smallest = shrink(group, spec)
    assert smallest == Spec(1, ("linear",), mode="missing mode")
    assert "Spec(seed=1" in as_script(smallest, 1)


def test_seeds_repeat() -> None:
    assert random_spec(7) == random_spec(7)
    assert len({random_spec(seed) for seed in range(50)}) == 50
