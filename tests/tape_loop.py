"""A small training loop without our buffers, and what the tape says of its step; see ``test_tape.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from helpers import batch
from torch import Tensor, nn

from megabuf_fx.tape import Tape, Violation, diff

RECORDINGS, REPLAYS = 2, 4
"""Iterations. The second recording is replayed, and the host has changed between the two."""


class Loop:
    """A small model, all that its step may use, and what the host does around the step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight = torch.randn(5, 6).requires_grad_()
        self.grad = torch.zeros(5, 6)
        self.exp_avg, self.exp_avg_sq = torch.zeros(5, 6), torch.zeros(5, 6)
        self.updates = torch.zeros(())
        self.x = torch.zeros(8, 6)
        self.loss = torch.zeros(())
        self.lr = torch.zeros((), dtype=torch.float64)
        self.flag: Tensor | None = torch.zeros((), dtype=torch.int32)
        self.indices = torch.tensor([3, 0, 3, 1])
        self.norm = nn.BatchNorm1d(6)
        self.undeclared = {"matrix": torch.ones(5, 6), "number": torch.tensor(0.5)}
        self.batches = [batch(iteration, 1, 0, 8, 6) for iteration in range(RECORDINGS + REPLAYS)]
        self.kept: Tensor | None = None
        self.iteration = 0

    def statics(self) -> Mapping[str, Tensor]:
        named = {name: value for name, value in vars(self).items() if isinstance(value, Tensor) and name != "kept"}
        return {**named, **{f"norm.{name}": value for name, value in self.norm.state_dict(keep_vars=True).items()}}

    def begin(self, iteration: int) -> None:
        """Between steps: data, a schedule, and a seed, so that eager steps and replays draw the same numbers."""
        self.iteration = iteration
        self.x.copy_(batch(iteration, 0, 0, 8, 6))
        self.lr.fill_(0.1 / (iteration + 1))
        if self.flag is not None:
            self.flag.fill_(iteration % 2)
        torch.manual_seed(iteration)

    def gradient(self, x: Tensor | None = None) -> Tensor:
        """A new tensor. Also leaves the loss in its place."""
        loss = torch.tanh((self.x if x is None else x) @ self.weight.t()).square().mean()
        self.loss.copy_(loss.detach())
        (grad,) = torch.autograd.grad(loss, [self.weight])
        return grad

    def update(self, grad: Tensor) -> None:
        with torch.no_grad():
            self.weight.sub_(self.lr * grad)


Step = Callable[[Loop], object]


class Finding(NamedTuple):
    """What the tape says of a step."""

    violations: list[Violation]
    difference: str | None
    wrong: list[int]
    """Replays that gave other numbers than the eager step."""

    def mechanisms(self) -> set[str]:
        found = {"violation": self.violations, "difference": self.difference, "replay": self.wrong}
        return {name for name, value in found.items() if value}


def examine(step: Step) -> Finding:
    """Record ``step`` in two iterations and replay the second recording, next to a twin that runs eagerly."""
    recorded, eager = Loop(), Loop()
    tapes = []
    for iteration in range(RECORDINGS):
        eager.begin(iteration)
        step(eager)
        recorded.begin(iteration)
        tapes.append(Tape(recorded.statics))
        with tapes[-1]:
            step(recorded)
    wrong = []
    for replay in range(REPLAYS):
        eager.begin(RECORDINGS + replay)
        step(eager)
        recorded.begin(RECORDINGS + replay)
        try:
            tapes[-1].replay()
        except RuntimeError:  # a step that moves memory may be impossible to replay
            wrong.append(replay)
            continue
        if not is_equal(recorded.statics(), eager.statics()):
            wrong.append(replay)
    return Finding([violation for tape in tapes for violation in tape.violations], diff(*tapes), wrong)


def is_equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
