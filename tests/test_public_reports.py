"""Recipes made from public bug reports (V01 to V23), the part about what happens within a step: V05, V09-V12 and V18.
The others are in ``test_public_reports_backward.py``, ``..._copies.py``, ``..._optimizer.py`` and ``..._params.py``.

Expected is plain eager training by one process on the whole batch, at most 2e-5 away in every parameter after every
step; sharded or not, gathers overlapped or not, compiled with ``aot_eager``. Each list of cases says its recipe.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import RankGroup, batch, params_of, twin
from pair import MODES, Pair, SmallMlp, check_on, count_reductions, recorded_collectives, run_cases, square_loss, tokens
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.dist

Ranks = Callable[[int], RankGroup]


# V05


class FakeQuantized(SmallMlp):
    """Weights are rounded to 1/64 in forward; gradients go straight through."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.fc1, self.fc2):
            weight = layer.weight + ((layer.weight * 64).round() / 64 - layer.weight).detach()
            x = torch.tanh(F.linear(x, weight, layer.bias))
        return x


def forced_sync(mode: str) -> list[str]:
    pair = Pair(FakeQuantized, mode, lr=0.1)
    pair.buf.sync_params()
    for step in range(5):
        pair.step(square_loss, step)
        for _ in range({0: 1, 2: 2}.get(step, 0)):
            pair.buf.sync_params()
            once = params_of(pair.model)
            pair.buf.sync_params()
            same = all(torch.equal(value, once[name]) for name, value in params_of(pair.model).items())
            pair.expect(same, f"step {step}: another sync_params changed a weight")
            pair.check()
    return pair.finish()


def forced_sync_cases(rank: int) -> list[str]:
    """V05: forced synchronization of parameters, also twice in a row, changes no weight.

    There is no buffer shared by gathers and gradients (fp8) yet. Where the recipe reads a zero ``main_grad`` before
    each backward, ours is never zeroed: it holds NaN there (``Pair.poison``), and the first backward overwrites it.
    """
    return run_cases({mode: partial(forced_sync, mode) for mode in MODES})


# V09


class Mlp583(SmallMlp):
    def __init__(self) -> None:
        super().__init__(5, 8, 3)


def loss_583(model: Any, step: int, micro: int, rank: int) -> Tensor:
    result: Tensor = model(batch(step, micro, rank, 4, 5)).square().mean()
    return result


def accumulation(mode: str) -> list[str]:
    pair = Pair(Mlp583, mode, attach={"bucket_size": 16}, lr=0.1)

    def one_step(step: int, is_forward_inside: bool) -> None:
        pair.reference_backward(loss_583, step, 4)
        pair.poison()
        for micro in range(4):
            accumulates = pair.accumulating(micro < 3)
            if is_forward_inside:
                with accumulates:
                    (loss_583(pair.call, step, micro, pair.rank) / 4).backward()
            else:
                value = loss_583(pair.call, step, micro, pair.rank) / 4
                with accumulates:
                    value.backward()
        pair.check()
        pair.update(step)

    one_step(0, True)
    for is_forward_inside in (True, False):
        with recorded_collectives() as collectives:
            for step in range(1, 4):
                one_step(step, is_forward_inside)
        problem = count_reductions(pair, collectives, steps=3) if pair.world > 1 else None
        pair.expect(problem is None, f"forward inside {is_forward_inside}: {problem}")
    return pair.finish()


def forgotten_end(mode: str) -> list[str]:
    """``no_sync`` also around the last micro-batch."""
    pair = Pair(Mlp583, mode, attach={"bucket_size": 16}, lr=0.1)
    pair.step(loss_583, 0)
    pair.reference_backward(loss_583, 1, 4)
    for micro in range(4):
        with pair.buf.no_sync():
            (loss_583(pair.call, 1, micro, pair.rank) / 4).backward()
    pair.check()
    start = params_of(pair.model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            pair.optimizer.step()
        except RuntimeError as error:
            pair.expect("not reduced" in str(error), f"unclear error: {error}")
            same = all(torch.equal(value, start[name]) for name, value in params_of(pair.model).items())
            pair.expect(same, "the refused step moved parameters")
        else:
            text = "".join(str(warning.message) for warning in caught)
            # A single process has nothing to synchronize.
            pair.expect("no_sync" in text or pair.world == 1, "unsynchronized gradients were applied without a word")
            pair.forget()
            pair.buf.detach()
            return pair.problems
    pair.buf.finish_grad_sync()
    pair.update(1)
    return pair.finish()


def accumulation_cases(rank: int) -> list[str]:
    """V09: (a) forward and backward inside no_sync, (b) only backward; one reduction per bucket and step; (c) no_sync
    around the last micro-batch too is an error at step."""
    return run_cases(
        {
            **{f"{mode} a, b": partial(accumulation, mode) for mode in MODES},
            **{f"{mode} c": partial(forgotten_end, mode) for mode in MODES},
        }
    )


# V10


def replays(mode: str) -> list[str]:
    pair = Pair(SmallMlp, mode, lr=0.1)
    static = torch.empty(4, 6)
    pointers = {name: grad.data_ptr() for name, grad in pair.main_grads().items()}

    def replay(data: Tensor) -> None:
        static.copy_(data)
        with pair.buf.no_sync():
            pair.call(static).square().mean().backward()

    for step in range(2):
        pair.poison()
        sums: dict[str, Tensor] = {}
        for micro in range(3):
            (square_loss(pair.plain, step, micro, pair.rank) / pair.world).backward()
        for name, param in pair.plain.named_parameters():
            sums[name] = param.grad.clone() * pair.world
        for rank in set(range(pair.world)) - {pair.rank}:
            for micro in range(3):
                (square_loss(pair.plain, step, micro, rank) / pair.world).backward()
        for micro in range(3):
            replay(batch(step, micro, pair.rank, 4, 6))
        for name, grad in pair.main_grads().items():
            miss = (grad - sums[name]).abs().max().item()
            pair.expect(miss <= 1e-6, f"step {step}: main_grad of {name} misses the sum of replays by {miss:.2g}")
        pair.check()
        pair.buf.finish_grad_sync()
        pair.update(step)
        found = {name: grad.data_ptr() for name, grad in pair.main_grads().items()}
        pair.expect(found == pointers, f"step {step}: main_grad has moved")
    return pair.finish()


def replay_cases(rank: int) -> list[str]:
    """V10: ``main_grad`` is the sum over micro-batches that reuse one input tensor, and never moves.

    CUDA-graph modes are refused for now (``test_backend.py``), so nothing is captured here.
    """
    return run_cases({mode: partial(replays, mode) for mode in MODES})


# V11


def dropped_forwards(mode: str) -> list[str]:
    pair = Pair(SmallMlp, mode, lr=0.1)
    for step in range(2):
        before = {name: grad.clone() for name, grad in pair.main_grads().items()}
        with recorded_collectives() as collectives:
            for micro in range(3):
                square_loss(pair.call, step, micro + 1, pair.rank)
        for name, grad in pair.main_grads().items():
            pair.expect(torch.equal(grad, before[name]), f"step {step}: a forward wrote main_grad of {name}")
        reductions = [name for name, _ in collectives if "reduce" in name]
        pair.expect(not reductions, f"step {step}: a forward started {reductions}")
        pair.step(square_loss, step)
    problems = pair.finish()
    if dist.is_initialized():
        dist.barrier()
    return problems


def dropped_forward_cases(rank: int) -> list[str]:
    """V11: forwards in train mode whose results are dropped write no gradient and start no reduction."""
    return run_cases({mode: partial(dropped_forwards, mode) for mode in MODES})


# V12


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.out = nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.out(self.emb(ids).mean(1))
        return result


def pooled_loss(model: Any, step: int, micro: int, rank: int) -> Tensor:
    ids = tokens(step, micro, rank, 4, step + 3, high=11)
    return F.cross_entropy(model(ids), ids[:, 0])


def many_lengths(mode: str, is_dynamic: bool) -> Iterator[str]:
    with torch._dynamo.config.patch(recompile_limit=3):
        pair = Pair(Pooled, mode, compile={"dynamic": is_dynamic}, lr=0.1)
        counters.clear()
        for step in range(12):
            pair.step(pooled_loss, step)
            with torch.no_grad():
                pooled_loss(pair.call, step, 1, pair.rank)
            pair.check()
        graphs = counters["stats"]["unique_graphs"]
        limit = 4 if is_dynamic else 8
        pair.expect(graphs < limit, f"{graphs} graphs were traced")
        yield from pair.finish()


def many_length_cases(rank: int) -> list[str]:
    """V12: lengths 3..14 with a no_grad forward between steps trace fewer than 4 graphs when dynamic; past the
    recompile limit the rest runs eagerly with equal results."""
    kinds = {"dynamic": True, "past the limit": False}
    return run_cases({f"{mode} {kind}": partial(many_lengths, mode, kinds[kind]) for mode in MODES for kind in kinds})


# V18


class WithDecode(SmallMlp):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(7)

    def decode(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.fc2(torch.tanh(hidden))
        return result

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.norm(self.fc1(x)))


def past_the_wrapper(mode: str) -> list[str]:
    pair = Pair(WithDecode, mode, attach={"bucket_size": 16}, lr=0.1)

    def decoded(model: Any, step: int, micro: int, rank: int) -> Tensor:
        result: Tensor = model.decode(batch(step, micro, rank, 4, 7)).square().mean()
        return result

    for step, call in enumerate((pair.model, pair.model, pair.call)):
        pair.reference_backward(decoded, step)
        pair.poison()
        decoded(call, step, 0, pair.rank).backward()
        pair.check()
        pair.update(step)
    return pair.finish()


def batch_norm(mode: str) -> list[str]:
    pair = Pair(WithDecode, mode, attach={"bucket_size": 16}, lr=0.1)
    ddp = DistributedDataParallel(twin(pair.plain), broadcast_buffers=False)
    other = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        square_loss(ddp, step, 0, pair.rank).backward()
        other.step()
        other.zero_grad()
        square_loss(pair.call, step, 0, pair.rank).backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        pair.buf.sync_params()
        pair.compare(params_of(pair.model), params_of(ddp.module), f"step {step}")
        pair.compare(dict(pair.model.named_buffers()), dict(ddp.module.named_buffers()), f"buffers of step {step}")
    return pair.finish()


def past_the_wrapper_cases(rank: int) -> list[str]:
    """V18: (a) a loss computed by a method of the inner module trains as any other; (b) module buffers are broadcast
    once in attach (``init_sync``), as with DDP's ``broadcast_buffers=False``: every rank keeps its own statistics."""
    kinds: dict[str, Callable[[str], list[str]]] = {"decode": past_the_wrapper, "batch norm": batch_norm}
    return run_cases({f"{mode} {kind}": partial(kinds[kind], mode) for mode in MODES for kind in kinds})


RECIPES = [
    (1, accumulation_cases),
    (1, dropped_forward_cases),
    (2, forced_sync_cases),
    (2, accumulation_cases),
    (2, replay_cases),
    (2, dropped_forward_cases),
    (2, many_length_cases),
    (2, past_the_wrapper_cases),
]


@pytest.mark.parametrize(("world", "cases"), RECIPES, ids=[f"{cases.__name__}-{world}" for world, cases in RECIPES])
def test_recipe(ranks: Ranks, world: int, cases: Callable[[int], list[str]]) -> None:
    check_on(world, ranks, cases)
