"""What a situation is: a model or loop that breaks a simple assumption, as a value that ``test_situation_matrix.py``
runs over worlds, modes and ways.

``situations_graphs.py`` has those that differ in how the model compiles, ``situations_loops.py`` in their loop, and
``situations_params.py`` in their parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from helpers import batch
from pair import Pair, SmallMlp
from torch import Tensor, nn

SGD: Mapping[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
ADAMW: Mapping[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}


class Case(NamedTuple):
    """A situation under one setting."""

    situation: str
    world: int
    mode: str
    way: str


@dataclass
class Side:
    """One of the two runs, as the functions of a situation see it: plain training, which takes the place of every rank
    in turn, or this rank's training with buffers."""

    case: Case
    models: Sequence[Any]
    calls: Sequence[Any]
    """What is called in a model's place: its compiled form, where there is one."""
    optimizers: Sequence[Any]
    handles: Sequence[Any]
    """Empty on the plain side."""
    launched: Sequence[list[int]] = ()
    """For each handle the bucket groups reduced so far in this step."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What lives as long as the run: a schedule, a teacher."""
    step: int = 0
    rank: int = 0

    @property
    def is_plain(self) -> bool:
        return not self.handles

    @property
    def model(self) -> Any:
        return self.models[0]

    @property
    def call(self) -> Any:
        return self.calls[0]

    def data(self, micro: int = 0, *shape: int) -> Tensor:
        return batch(self.step, micro, self.rank, *(shape or (4, 6)))

    def loss(self, micro: int = 0) -> Tensor:
        result: Tensor = self.call(self.data(micro)).square().mean()
        return result

    @contextlib.contextmanager
    def sync(self, is_last: bool) -> Iterator[None]:
        """Around a backward: whether gradients are reduced after it."""
        with contextlib.ExitStack() as stack:
            for handle in () if is_last else self.handles:
                stack.enter_context(handle.no_sync())
            yield

    def sync_params(self) -> None:
        """Before parameters are read by hand."""
        for handle in self.handles:
            handle.sync_params()


def one(side: Side) -> None:
    side.loss().backward()


def nothing(side: Side) -> None:
    return None


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="megabuf")


def first_model(step: int) -> Sequence[int]:
    return (0,)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What is unusual, and what is expected. Everything not said is one small compiled model, trained with SGD."""

    builds: Sequence[Callable[[], nn.Module]] = (SmallMlp,)
    before_attach: Callable[[Any], object] | None = None
    compile: Callable[[nn.Module], Any] = compiled
    """The call of a model; on the eager path that is the model itself."""
    begin: Callable[[Side], object] = nothing
    step: Callable[[Side], object] = one
    """Forwards and backwards of one step; a mean over ranks is what the plain side makes of its gradients."""
    updated: Callable[[int], Sequence[int]] = first_model
    """Models that step ``step`` updates; the others must have no reduction."""
    after: Callable[[Side], object] = nothing
    """After the optimizer step."""
    check: Callable[[Pair, Side, Side], Iterator[str]] | None = None
    """Problems of the finished run that parameters do not show, from ``(pair, plain side, our side)``."""
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    options: Mapping[str, Any] = field(default_factory=lambda: SGD)
    steps: int = 4
    bucket_size: int = 30
    graphs: int | Callable[[Case, int], int] = 1
    """Graphs that Dynamo compiles in the whole run, or a function of case and rank; none on the eager path."""
    reductions: int | Callable[[Case, int], int] = 1
    """Collectives of gradients per bucket in a step, or a function of case and step."""
    bound: float = 2e-5
    inductor_bound: float | None = None
    is_exact: bool = True
    """Whether a single process and equal kernels leave no rounding: then parameters are bitwise equal."""
    refused: str = ""
    """Part of the error that every rank raises instead."""
    is_refused: Callable[[Case], bool] = lambda case: False


def is_sharded(case: Case) -> bool:
    return not case.mode.startswith("plain")
