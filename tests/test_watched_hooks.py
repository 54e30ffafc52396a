"""``watched_hooks.py``: changed hooks of compiled modules are found, also by the short look."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megabuf_fx.watched_hooks import WatchedHooks

REGISTER: dict[str, Callable[[nn.Module], Any]] = {
    "forward pre": lambda module: module.register_forward_pre_hook(lambda *unused: None),
    "forward": lambda module: module.register_forward_hook(lambda *unused: None),
    "backward pre": lambda module: module.register_full_backward_pre_hook(lambda *unused: None),
    "backward": lambda module: module.register_full_backward_hook(lambda *unused: None),
}


class Graph:
    """Stands for a compiled graph; can be referred to weakly."""


def watched() -> tuple[WatchedHooks, list[nn.Module], Graph]:
    modules: list[nn.Module] = [nn.Linear(2, 2) for _ in range(3)]
    REGISTER["forward"](modules[0])
    hooks, graph = WatchedHooks(), Graph()
    hooks.watch(graph, modules)
    assert hooks.find_changed() is None
    return hooks, modules, graph


@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("place", [0, 1])
def test_hooks_that_are_added_are_found(kind: str, place: int) -> None:
    hooks, modules, _graph = watched()
    handle = REGISTER[kind](modules[place])
    assert hooks.find_changed() is modules[place]
    assert hooks.find_changed() is modules[place], "until it is gone"
    handle.remove()
    assert hooks.find_changed() is None


@pytest.mark.parametrize("kind", REGISTER)
def test_hooks_that_are_removed_are_found(kind: str) -> None:
    hooks, modules, graph = watched()
    handle = REGISTER[kind](modules[2])
    hooks.watch(graph, modules)
    assert hooks.find_changed() is None
    handle.remove()
    assert hooks.find_changed() is modules[2]


def test_hooks_of_others_are_not_looked_for() -> None:
    hooks, modules, _graph = watched()
    other = nn.Linear(2, 2)
    REGISTER["forward"](other)
    torch.zeros(1, requires_grad=True).register_hook(lambda grad: grad)
    assert hooks.find_changed() is None
    REGISTER["forward"](modules[1])
    assert hooks.find_changed() is modules[1], "after a whole look"


def test_a_module_compiled_anew_counts_with_its_hooks_of_now() -> None:
    hooks, modules, _graph = watched()
    REGISTER["forward"](modules[1])
    again = Graph()
    hooks.watch(again, [modules[1]])
    assert hooks.find_changed() is None


def test_graphs_that_are_gone_are_forgotten() -> None:
    hooks, modules, graph = watched()
    REGISTER["forward"](modules[1])
    del graph
    gc.collect()
    assert hooks.find_changed() is None
