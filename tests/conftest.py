"""Process groups that live for the whole test session."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers import RankGroup, fresh_compiler
from trajectory_numbers import Outcome, check_runs

from megabuf_fx.runtime.ops import live_targets


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankGroup]]:
    """``ranks(world)`` is the session's group of that size."""
    groups: dict[int, RankGroup] = {}

    def get(world: int) -> RankGroup:
        for other, group in groups.items():
            # Two cores: processes of another world would only wait for memory.
            if other != world:
                group.close()
        return groups.setdefault(world, RankGroup(world))

    yield get
    for group in groups.values():
        group.close()


@pytest.fixture(scope="session")
def trajectories(ranks: Callable[[int], RankGroup]) -> Callable[[int, bool], list[dict[str, Outcome]]]:
    """``trajectories(world, compiled)``: by rank, what became of each run of the oracle. Every world is run once."""

    @functools.cache
    def get(world: int, compiled: bool) -> list[dict[str, Outcome]]:
        return ranks(world).run(check_runs, world, compiled, timeout=280)

    return get


@pytest.fixture(scope="session")
def cli_dump(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``cli_dump(name)`` is a dump of ``cli_dumps.STEPS``; each is written once and must not be changed."""
    # Imported here: it needs what the examples need, and most tests do not.
    from cli_dumps import write_dump

    return functools.cache(lambda name: write_dump(name, tmp_path_factory.mktemp(name)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-results", action="store_true", help="write tables in tests/results instead of comparing")


@pytest.fixture
def write_results(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("--write-results"))


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    # A collection takes long once Inductor is imported, so only after tests that attached something.
    if live_targets():
        fresh_compiler()
