"""Process groups that live for the whole test session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import RankGroup, fresh_compiler

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
