"""Any order of forwards and backwards gives the gradients of eager training.

The reference runs the same scenario on a plain model for every rank's data and averages the gradients; within 2e-5 per
parameter and step at lr 1e-3 (AdamW turns the rounding of small gradients into more).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import RankGroup, batch, fresh_compiler, max_difference, params_of, seeded, twin
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megabuf_fx as mb

pytestmark = pytest.mark.dist

STEPS = 3
LR = 1e-3
BOUND = 2e-5

Call = Callable[[Tensor], Tensor]
Sync = Callable[[bool], AbstractContextManager[None]]


class Twice(nn.Module):
    """A block used twice in one graph, or across a graph break."""

    def __init__(self, is_broken: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.block = nn.Linear(10, 10)
        self.last = nn.Linear(10, 3)
        self.is_broken = is_broken

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.block(torch.tanh(self.first(x))))
        if self.is_broken:
            torch._dynamo.graph_break()
        result: Tensor = self.last(torch.tanh(self.block(hidden)))
        return result


class Checkpointed(nn.Module):
    """Activation checkpointing inside the compiled region."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.block = nn.Sequential(nn.Linear(10, 10), nn.GELU(), nn.Linear(10, 10))
        self.last = nn.Linear(10, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.block, torch.tanh(self.first(x)), use_reentrant=self.use_reentrant)
        result: Tensor = self.last(hidden)
        return result


def one(call: Call, model: nn.Module, data: Callable[[int], Tensor], sync: Sync) -> None:
    with sync(True):
        call(data(0)).square().mean().backward()


def three_micro_batches(call: Call, model: nn.Module, data: Callable[[int], Tensor], sync: Sync) -> None:
    for micro in range(3):
        with sync(micro == 2):
            call(data(micro)).square().mean().backward()


def dropped_forward(call: Call, model: nn.Module, data: Callable[[int], Tensor], sync: Sync) -> None:
    call(data(1))
    kept = call(data(2))
    with sync(True):
        call(data(0)).square().mean().backward()
    del kept


def no_grad_between(call: Call, model: nn.Module, data: Callable[[int], Tensor], sync: Sync) -> None:
    with torch.no_grad():
        call(data(1))
    one(call, model, data, sync)
    with torch.no_grad():
        call(data(1))


def forwards_then_backwards(call: Call, model: nn.Module, data: Callable[[int], Tensor], sync: Sync) -> None:
    losses = [call(data(micro)).square().mean() for micro in range(3)]
    for micro, loss in enumerate(losses):
        with sync(micro == 2):
            loss.backward()


def forwards_then_backwards_reversed(call: Call, model: nn.Module, data: Callable[[int], Tensor], sync: Sync) -> None:
    losses = [call(data(micro)).square().mean() for micro in range(3)]
    for micro, loss in enumerate(reversed(losses)):
        with sync(micro == 2):
            loss.backward()


def outstanding_forwards_without_no_sync(
    call: Call, model: nn.Module, data: Callable[[int], Tensor], sync: Sync
) -> None:
    """A forward whose backward is still to come keeps its buckets open by itself when sharded; else each backward
    reduces, and averages of averages add up to the same."""
    losses = [call(data(micro)).square().mean() for micro in range(2)]
    for loss in losses:
        loss.backward()


def summed_losses(call: Call, model: nn.Module, data: Callable[[int], Tensor], sync: Sync) -> None:
    with sync(True):
        (call(data(0)).square().mean() + call(data(1)).abs().mean()).backward()


def kept_graph(call: Call, model: nn.Module, data: Callable[[int], Tensor], sync: Sync) -> None:
    out = call(data(0))
    with sync(False):
        out.square().mean().backward(retain_graph=True)
    with sync(True):
        out.abs().mean().backward()


def eager_penalty(call: Call, model: nn.Module, data: Callable[[int], Tensor], sync: Sync) -> None:
    """Weights get gradients from the graph and from eager code in one backward."""
    with sync(True):
        penalty = sum(p.square().sum() for p in model.parameters() if p.dim() == 2)
        (call(data(0)).square().mean() + 0.1 * penalty).backward()


def penalty_and_micro_batches(call: Call, model: nn.Module, data: Callable[[int], Tensor], sync: Sync) -> None:
    for micro in range(2):
        with sync(micro == 1):
            weight = next(model.parameters())
            (call(data(micro)).square().mean() + weight.square().sum()).backward()


def asked_for_gradients(call: Call, model: nn.Module, data: Callable[[int], Tensor], sync: Sync) -> None:
    """``torch.autograd.grad`` of inputs and of parameters leaves no trace."""
    x = data(1).requires_grad_()
    (grad,) = torch.autograd.grad(call(x).square().mean(), x)
    assert grad.abs().sum() > 0
    grads = torch.autograd.grad(call(data(1)).square().mean(), list(model.parameters()))
    assert all(g is not None for g in grads)
    one(call, model, data, sync)


def asked_between_micro_batches(call: Call, model: nn.Module, data: Callable[[int], Tensor], sync: Sync) -> None:
    with sync(False):
        call(data(0)).square().mean().backward()
    torch.autograd.grad(call(data(2)).square().mean(), list(model.parameters()))
    with sync(True):
        call(data(1)).square().mean().backward()


def backward_of_some_inputs(call: Call, model: nn.Module, data: Callable[[int], Tensor], sync: Sync) -> None:
    with sync(False):
        call(data(0)).square().mean().backward(inputs=[next(model.parameters())])
    with sync(True):
        call(data(1)).square().mean().backward()


def checkpointed_call(call: Call, model: nn.Module, data: Callable[[int], Tensor], sync: Sync) -> None:
    """The compiled model itself is recomputed in backward."""
    with sync(True):
        x = data(0).requires_grad_()
        checkpoint(call, x, use_reentrant=False).square().mean().backward()


SCENARIOS: dict[str, tuple[Callable[..., None], Callable[[], nn.Module]]] = {
    "one": (one, Twice),
    "three_micro_batches": (three_micro_batches, Twice),
    "two_graphs": (one, lambda: Twice(is_broken=True)),
    "two_graphs_micro_batches": (three_micro_batches, lambda: Twice(is_broken=True)),
    "two_graphs_forwards_first": (forwards_then_backwards, lambda: Twice(is_broken=True)),
    "dropped_forward": (dropped_forward, Twice),
    "no_grad_between": (no_grad_between, Twice),
    "forwards_then_backwards": (forwards_then_backwards, Twice),
    "forwards_then_backwards_reversed": (forwards_then_backwards_reversed, Twice),
    "outstanding_forwards_without_no_sync": (outstanding_forwards_without_no_sync, Twice),
    "summed_losses": (summed_losses, Twice),
    "kept_graph": (kept_graph, Twice),
    "eager_penalty": (eager_penalty, Twice),
    "penalty_and_micro_batches": (penalty_and_micro_batches, Twice),
    "asked_for_gradients": (asked_for_gradients, Twice),
    "asked_between_micro_batches": (asked_between_micro_batches, Twice),
    "backward_of_some_inputs": (backward_of_some_inputs, Twice),
    "checkpointed_call": (checkpointed_call, Twice),
    "checkpointed": (one, lambda: Checkpointed(use_reentrant=False)),
    "checkpointed_reentrant": (one, lambda: Checkpointed(use_reentrant=True)),
}

MODES: dict[str, dict[str, Any]] = {
    "sharded": {"overlap_param_gather": True},
    "plain": {"use_distributed_optimizer": False},
}


def reference_gradients(model: nn.Module, scenario: Callable[..., None], step: int, world: int) -> None:
    """Average over ranks of the gradients that the scenario leaves in ``.grad``."""
    for rank in range(world):
        scenario(model, model, lambda micro, r=rank: batch(step, micro, r, 8, 6), lambda last: contextlib.nullcontext())
    for param in model.parameters():
        if param.grad is not None:
            param.grad.div_(world)


def play(rank: int, name: str, mode: str, micro_sync: bool = True) -> str | None:
    """Run one scenario for a few steps; what is wrong, or None."""
    scenario, build = SCENARIOS[name]
    world = dist.get_world_size()
    plain = seeded(build)
    model = twin(plain)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    buf = mb.attach(model, mb.MegabufConfig(bucket_size=100, inner_compiler="aot_eager", **MODES[mode]))
    call = torch.compile(model, backend="megabuf")
    optimizer: Any = (
        mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=LR)
        if buf.plan.sharded
        else torch.optim.AdamW(model.parameters(), lr=LR)
    )
    problem = None
    for step in range(STEPS):
        reference_gradients(plain, scenario, step, world)
        reference.step()
        reference.zero_grad()
        for buffer in buf.buffers.buffers:
            # Nothing may depend on what the buffer held before.
            buffer.grad_data.fill_(float("nan"))
        scenario(
            call,
            model,
            lambda micro, s=step: batch(s, micro, rank, 8, 6),
            lambda last: contextlib.nullcontext() if last else buf.no_sync(),
        )
        optimizer.step()
        optimizer.zero_grad()
        buf.sync_params()
        difference = max_difference(params_of(model), params_of(plain))
        if not difference <= BOUND:
            problem = problem or f"{name} {mode} step {step}: differs by {difference}"
    buf.detach()
    return problem


def play_all(rank: int, mode: str) -> list[str]:
    problems = []
    for name in SCENARIOS:
        problem = play(rank, name, mode)
        if problem:
            problems.append(problem)
        fresh_compiler()
    return problems


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world", [1, 2])
def test_scenarios_equal_eager(ranks: Callable[[int], RankGroup], world: int, mode: str) -> None:
    for problems in ranks(world).run(play_all, mode, timeout=200):
        assert not problems, "\n".join(problems)


class Branches(nn.Module):
    """A trunk, and branches of which a call uses one; the spare one never."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 7)
        self.left = nn.Linear(7, 5)
        self.spare = nn.Linear(7, 5)
        self.right = nn.Linear(7, 5)

    def forward(self, x: Tensor, branch: int = 0) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        result: Tensor = self.left(hidden) if branch == 0 else self.right(hidden)
        return result


def branch_of(pattern: str, step: int, rank: int) -> int:
    if pattern == "never":
        return 0
    return (step % 2) if pattern == "alternating" else (step + rank) % 2


def train_branches(rank: int, pattern: str, mode: str, optimizer_class: type) -> str | None:
    """AdamW with strong decay: a parameter without gradient must not move, nor count the step."""
    world = dist.get_world_size()
    plain = seeded(Branches)
    model = twin(plain)
    options: dict[str, Any] = {"lr": LR, "weight_decay": 0.3}
    reference = optimizer_class(plain.parameters(), **options)
    buf = mb.attach(model, mb.MegabufConfig(bucket_size=60, inner_compiler="aot_eager", **MODES[mode]))
    call = torch.compile(model, backend="megabuf")
    optimizer: Any = (
        mb.DistributedOptimizer(model.parameters(), optimizer_class, **options)
        if buf.plan.sharded
        else optimizer_class(model.parameters(), **options)
    )
    problem = None
    for step in range(5):
        for r in range(world):
            plain(batch(step, 0, r, 8, 6), branch_of(pattern, step, r)).square().mean().backward()
        for param in plain.parameters():
            if param.grad is not None:
                param.grad.div_(world)
        reference.step()
        reference.zero_grad()
        for buffer in buf.buffers.buffers:
            buffer.grad_data.fill_(float("nan"))
        call(batch(step, 0, rank, 8, 6), branch_of(pattern, step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        buf.sync_params()
        difference = max_difference(params_of(model), params_of(plain))
        if not difference <= BOUND:
            problem = problem or f"{pattern} {mode} step {step}: differs by {difference}"
    start = seeded(Branches)
    if any(not torch.equal(model.get_parameter(n), start.get_parameter(n)) for n in ("spare.weight", "spare.bias")):
        problem = problem or f"{pattern} {mode}: an unused parameter moved"
    counted = optimizer.inner.state if buf.plan.sharded else optimizer.state
    elements = sum(t.numel() for t in counted)
    unused = sum(model.get_parameter(name).numel() for name in ("spare.weight", "spare.bias"))
    if not buf.plan.sharded and elements > sum(p.numel() for p in model.parameters()) - unused:
        problem = problem or f"{pattern} {mode}: an unused parameter has optimizer state"
    buf.detach()
    return problem


def train_all_branches(rank: int) -> list[str]:
    problems = []
    for pattern in ("never", "alternating", "by_rank"):
        for mode in MODES:
            for optimizer_class in (torch.optim.AdamW, torch.optim.SGD):
                problem = train_branches(rank, pattern, mode, optimizer_class)
                if problem:
                    problems.append(f"{optimizer_class.__name__}: {problem}")
                fresh_compiler()
    return problems


@pytest.mark.parametrize("world", [1, 2])
def test_unused_parameters_are_left_alone(ranks: Callable[[int], RankGroup], world: int) -> None:
    """Never used, used in some steps, used by some ranks: what any rank used is updated, the rest does not move."""
    for problems in ranks(world).run(train_all_branches, timeout=150):
        assert not problems, "\n".join(problems)
