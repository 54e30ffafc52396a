"""What watches over a long run: ranks that come apart, steps that are not taken."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import Mlp, RankGroup, batch, error_text, fresh_compiler, max_difference, params_of, seeded
from torch import Tensor

import megabuf_fx as mb
from megabuf_fx.runtime.drift import digest

MODES: dict[str, dict[str, Any]] = {
    "sharded": {},
    "overlap": {"overlap_param_gather": True},
    "plain": {"use_distributed_optimizer": False},
}


def prepare(mode: str, **config: Any) -> tuple[Any, mb.MegabufHandle, Any, Any]:
    model = seeded(Mlp)
    buf = mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=300, **{**MODES[mode], **config}))
    call = torch.compile(model, backend="megabuf")
    if buf.plan.sharded:
        return model, buf, call, mb.DistributedOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
    return model, buf, call, torch.optim.SGD(model.parameters(), lr=0.01)


def step(call: Any, optimizer: Any, number: int, rank: int) -> None:
    call(batch(number, 0, rank, 8, 13)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def drifting(rank: int, mode: str) -> list[str]:
    """What the third step says, after one bit of one weight of the last rank has changed in the second."""
    model, buf, call, optimizer = prepare(mode, check_for_drift_every=3)
    step(call, optimizer, 0, rank)
    buf.sync_params()
    if rank == dist.get_world_size() - 1:
        with torch.no_grad():
            model.fc2.weight.view(torch.int32)[3, 4] ^= 1
    if mode != "plain":
        # Sharded, the next gather would carry the owner's bits to all, so the harm is done just before the check.
        step(call, optimizer, 1, rank)
        buf.sync_params()
        if rank == dist.get_world_size() - 1:
            with torch.no_grad():
                model.fc2.weight.view(torch.int32)[3, 4] ^= 1
    else:
        step(call, optimizer, 1, rank)
    text = error_text(lambda: step(call, optimizer, 2, rank))
    buf.detach()
    return [text]


def steady(rank: int, mode: str) -> list[str]:
    _, buf, call, optimizer = prepare(mode, check_for_drift_every=1)
    for number in range(3):
        step(call, optimizer, number, rank)
    buf.detach()
    return []


def all_modes(rank: int, function: Callable[[int, str], list[str]]) -> dict[str, list[str]]:
    answers = {}
    for mode in MODES:
        answers[mode] = function(rank, mode)
        fresh_compiler()
    return answers


@pytest.mark.dist
def test_ranks_that_have_come_apart_are_named(ranks: Callable[[int], RankGroup]) -> None:
    for answers in ranks(3).run(all_modes, drifting):
        for mode, (text,) in answers.items():
            assert text.startswith("RuntimeError: ranks have come apart after 3 steps: parameter 'fc2.weight'"), mode
            assert "of rank(s) 2 differ from the others" in text


@pytest.mark.dist
def test_equal_ranks_pass(ranks: Callable[[int], RankGroup]) -> None:
    assert ranks(3).run(all_modes, steady) == [{mode: [] for mode in MODES}] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_digest_depends_on_every_bit_and_place(dtype: torch.dtype) -> None:
    tensor = torch.randn(2**20 + 5, dtype=torch.float32).to(dtype)
    seen = {int(digest(tensor))}
    for position in (0, 1, 2**20 - 1, 2**20, 2**20 + 4):
        changed = tensor.clone()
        changed[position] = changed[position] * 2 + 1
        seen.add(int(digest(changed)))
    for position, bit in ((0, 0), (7, 15), (2**20, 0)):
        changed = tensor.clone()
        bits = changed.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
        bits[position] ^= torch.tensor(1, dtype=bits.dtype) << bit
        seen.add(int(digest(changed)))
    swapped = tensor.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    seen.add(int(digest(swapped)))
    assert len(seen) == 10
    assert int(digest(tensor)) == int(digest(tensor.clone()))


class Skipping:
    """One run with NaN on one rank in some steps."""

    def __init__(self, rank: int, limit: int, *, bad_steps: tuple[int, ...]) -> None:
        self.rank = rank
        self.bad_steps = bad_steps
        self.model: Any = seeded(Mlp)
        self.buf = mb.attach(self.model, mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=300))
        self.call = torch.compile(self.model, backend="megabuf")
        self.optimizer = mb.DistributedOptimizer(
            self.model.parameters(), torch.optim.AdamW, lr=0.01, max_skipped_steps=limit
        )

    def step(self, number: int) -> Tensor:
        """One step; how far the parameters moved."""
        before = params_of(self.model)
        loss = self.call(batch(number, 0, self.rank, 8, 13)).square().mean()
        if number in self.bad_steps and self.rank == 1:
            loss = loss * float("nan")
        loss.backward()
        self.optimizer.clip_grad_norm_(1.0)
        try:
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad()
        return torch.tensor(max_difference(params_of(self.model), before))


def skip_some(rank: int) -> list[bool]:
    run = Skipping(rank, 2, bad_steps=(1, 3))
    moved = [bool(run.step(number) > 0) for number in range(5)]
    assert run.optimizer.skipped_steps == 2
    run.buf.detach()
    return moved


def skip_too_many(rank: int) -> str:
    run = Skipping(rank, 2, bad_steps=(1, 2))
    run.step(0)
    run.step(1)
    text = error_text(lambda: run.step(2))
    run.step(3)
    run.buf.detach()
    return text


@pytest.mark.dist
def test_a_step_with_nan_is_skipped_on_all_ranks(ranks: Callable[[int], RankGroup]) -> None:
    assert ranks(2).run(skip_some) == [[True, False, True, False, True]] * 2


@pytest.mark.dist
def test_too_many_in_a_row_are_an_error_that_names_parameters(ranks: Callable[[int], RankGroup]) -> None:
    for text in ranks(2).run(skip_too_many):
        assert text.startswith("RuntimeError: 2 steps in a row had NaN or Inf in the gradients, the last in 'fc3.bias'")


def test_skips_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = seeded(Mlp)
    mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager"))
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, max_skipped_steps=3)
    (model(batch(0, 0, 0, 8, 13)).square().mean() * float("inf")).backward()
    with caplog.at_level(logging.WARNING, "megabuf_fx"):
        optimizer.step()
    assert "skipped a step with NaN or Inf in the gradients, 1 in this run" in caplog.text
