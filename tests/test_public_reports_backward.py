"""Recipes from public reports, the part about backward passes that are not one plain call: V13-V15 and V17;
see ``test_public_reports.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import RankGroup, batch, error_text, params_of
from pair import MODES, Pair, SmallMlp, check_on, count_reductions, recorded_collectives, run_cases, square_loss
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.dist

Ranks = Callable[[int], RankGroup]


# V13


def second_derivative(mode: str, is_kept: bool) -> list[str]:
    pair = Pair(SmallMlp, mode, lr=0.1)
    pair.step(square_loss, 0)
    before = {name: grad.clone() for name, grad in pair.main_grads().items()}
    x = batch(0, 0, 0, 4, 6).requires_grad_()
    out = pair.call(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    text = error_text(lambda: grad.square().sum().backward())
    pair.expect("double backward" in text, f"unclear error: {text}")
    pair.expect(not x.grad and all(p.grad is None for p in pair.model.parameters()), "a gradient was left behind")
    for name, found in pair.main_grads().items():
        pair.expect(torch.equal(found, before[name]), f"main_grad of {name} has changed")
    if not is_kept:
        del out, grad
    for step in (1, 2):
        pair.step(square_loss, step)
    return pair.finish()


def second_derivative_cases(rank: int) -> list[str]:
    """V13: a second derivative is a clear error that changes nothing; normal steps work afterwards, whether the graph
    of the first derivative is still held or not."""
    return run_cases({f"{m} kept {k}": partial(second_derivative, m, k) for m in MODES for k in (False, True)})


# V14


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 7)
        self.left = nn.Linear(7, 3)
        self.right = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return self.left(hidden), self.right(hidden)


def head_losses(model: Any, step: int, rank: int) -> tuple[Tensor, Tensor]:
    left, right = model(batch(step, 0, rank, 4, 6))
    return left.square().mean(), right.abs().mean()


def two_backwards(mode: str, is_first_in_no_sync: bool) -> list[str]:
    pair = Pair(TwoHeads, mode, attach={"bucket_size": 16}, lr=0.1)

    def both(model: Any, step: int, micro: int, rank: int) -> Tensor:
        left, right = head_losses(model, step, rank)
        return left + right

    for step in range(3):
        pair.reference_backward(both, step)
        pair.poison()
        left, right = head_losses(pair.call, step, pair.rank)
        pair.check()
        with pair.accumulating(is_first_in_no_sync):
            left.backward(retain_graph=True)
        right.backward()
        pair.update(step)
    return pair.finish()


def two_backward_cases(rank: int) -> list[str]:
    """V14: two backward calls on one forward equal the sum of the losses, with and without no_sync for the first."""
    kinds = {"": False, " no_sync": True}
    return run_cases({mode + k: partial(two_backwards, mode, kinds[k]) for mode in MODES for k in kinds})


# V15


class ProductAndSums(torch.autograd.Function):
    """``a * b + 2 * a + b``"""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b + 2 * a + b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return grad * (b + 2), grad * (a + 1)


class OneSided(torch.autograd.Function):
    """``a * b``, whose second input gets no gradient."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(b)
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (b,) = ctx.saved_tensors
        return grad * b, None


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = grad.clone()
        dist.all_reduce(total)
        return total


class CustomFunctions(SmallMlp):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.gain = nn.Parameter(torch.rand(7))

    def hidden(self, x: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.fc1(x)) * self.gain
        return result

    def head(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.fc2(hidden)
        return result

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.fc1(x))
        if self.kind == "two places":
            return self.head(hidden * ProductAndSums.apply(self.gain, self.gain))  # type: ignore[no-untyped-call]
        if self.kind == "none":
            return self.head(OneSided.apply(hidden, self.gain))  # type: ignore[no-untyped-call]
        return self.head(SumOverRanks.apply(self.hidden(x)))  # type: ignore[no-untyped-call]


def custom_functions(mode: str, kind: str) -> list[str]:
    # Decay tells a gradient that is None from one of zeros.
    pair = Pair(partial(CustomFunctions, kind), mode, attach={"bucket_size": 16}, lr=0.1, weight_decay=0.1)
    for step in range(3):
        if kind == "all_reduce":
            # One process has all ranks' parts at once.
            parts = [batch(step, 0, rank, 4, 6) for rank in range(pair.world)]
            total = torch.stack([pair.plain.hidden(part) for part in parts]).sum(0)
            pair.plain.head(total).square().mean().backward()
        else:
            pair.reference_backward(square_loss, step)
        pair.backward(square_loss, step)
        pair.update(step)
    return pair.finish()


def custom_function_cases(rank: int) -> list[str]:
    """V15: custom autograd functions: one weight in two places, None for an input, collectives in both directions."""
    kinds = ("two places", "none", "all_reduce")
    return run_cases({f"{mode} {kind}": partial(custom_functions, mode, kind) for mode in MODES for kind in kinds})


# V17


class Checkpointed(nn.Module):
    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)) for _ in range(3))
        self.order = order
        self.is_checkpointed = True

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            block = self.blocks[index]
            if self.is_checkpointed and index < 2:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x


def checkpointing(mode: str, order: tuple[int, ...]) -> list[str]:
    pair = Pair(partial(Checkpointed, order), mode, attach={"bucket_size": 48}, lr=0.1)
    pair.plain.is_checkpointed = False
    start = params_of(pair.model)
    for micros in (1, 2):
        pair.step(square_loss, 0, micros)
        with recorded_collectives() as collectives:
            for step in range(1, 4):
                pair.step(square_loss, step, micros)
        problem = count_reductions(pair, collectives, steps=3)
        pair.expect(problem is None, f"{micros} micro-batches: {problem}")
    pair.check()
    for name, value in params_of(pair.model).items():
        pair.expect(bool((value != start[name]).all()), f"{name} got a gradient that is exactly zero")
    return pair.finish()


def checkpointing_cases(rank: int) -> list[str]:
    """V17: non-reentrant activation checkpointing, also of a block used twice, reduces every bucket once."""
    orders = {"once": (0, 1, 2), "twice": (0, 1, 0, 2)}
    return run_cases({f"{mode} {o}": partial(checkpointing, mode, orders[o]) for mode in MODES for o in orders})


RECIPES = [
    (1, second_derivative_cases),
    (2, two_backward_cases),
    (2, custom_function_cases),
    (2, checkpointing_cases),
]


@pytest.mark.parametrize(("world", "cases"), RECIPES, ids=[f"{cases.__name__}-{world}" for world, cases in RECIPES])
def test_recipe(ranks: Ranks, world: int, cases: Callable[[int], list[str]]) -> None:
    check_on(world, ranks, cases)
