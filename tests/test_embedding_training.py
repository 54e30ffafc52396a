"""Training with embeddings whose gradients are added into ``main_grad`` row by row, against eager training.

An embedding alone with one micro-batch: bitwise. Otherwise rows are added to a product or to earlier micro-batches, so
sums of fp32 are rounded in another order: within 1e-6 per step of SGD at lr 0.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_runs import Run, differences
from embedding_models import VOCAB, Everything, Single, Tied, TiedTwice, Twice, tokens
from helpers import RankGroup, fresh_compiler, max_difference, params_of, seeded, twin
from torch import Tensor, nn

import megabuf_fx as mb

STEPS = 4
LR = 0.1
BOUND = STEPS * 1e-6

BUILDS: dict[str, Callable[[], nn.Module]] = {
    "single": Single,
    "padding": lambda: Single(padding_idx=2),
    "tied": Tied,
    "twice": Twice,
    "tied_twice": TiedTwice,
    "everything": Everything,
}
MODES: dict[str, dict[str, Any]] = {
    "sharded": {"overlap_param_gather": True},
    "dense": {"use_distributed_optimizer": False, "dense_layout": True},
}


def train_reference(model: nn.Module, micro_batches: int, world: int) -> dict[str, Tensor]:
    """One process that sees the batches of all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    for step in range(STEPS):
        for micro in range(micro_batches):
            for rank in range(world):
                (model(tokens(step, micro, rank)).square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return params_of(model)


def train(model: nn.Module, micro_batches: int, rank: int, options: dict[str, Any]) -> dict[str, Tensor]:
    buf = mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager", **options))
    call = torch.compile(model, backend="megabuf")
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.SGD, lr=LR, momentum=0.9)
    for step in range(STEPS):
        for micro in range(micro_batches):
            with buf.no_sync() if micro + 1 < micro_batches else contextlib.nullcontext():
                call(tokens(step, micro, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    buf.sync_params()
    result = params_of(model)
    buf.detach()
    fresh_compiler()
    return result


def compare(rank: int, name: str, micro_batches: int, world: int, options: dict[str, Any]) -> float:
    model = seeded(BUILDS[name])
    reference = train_reference(twin(model), micro_batches, world)
    return max_difference(train(model, micro_batches, rank, options), reference)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", BUILDS)
def test_equals_eager(name: str, micro_batches: int) -> None:
    is_exact = name in ("single", "padding") and micro_batches == 1
    for mode, options in MODES.items():
        difference = compare(0, name, micro_batches, 1, options)
        assert difference <= (0.0 if is_exact else BOUND), (mode, difference)


def compare_modes(rank: int, world: int) -> dict[str, float]:
    return {mode: compare(rank, "everything", 2, world, options) for mode, options in MODES.items()}


@pytest.mark.dist
def test_equals_eager_on_two_ranks(ranks: Callable[[int], RankGroup]) -> None:
    for found in ranks(2).run(compare_modes, 2, timeout=120):
        for mode, difference in found.items():
            assert difference <= BOUND, (mode, difference)


class Spoken(Everything):
    """Tokens from numbers, as captured runs have batches of floats."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x[:, :8].abs() * 3).long().clamp(max=VOCAB - 1))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_replays_equal_steps(micro_batches: int) -> None:
    """The op is a device op: a captured step holds it, and a replay gives the bits of an ordinary step."""
    run = Run("sharded", build=Spoken, is_compiled=True, micro_batches=micro_batches)
    run.train(run.step, range(90, 92))
    start = run.state()
    run.train(run.step, range(5))
    trained = run.state()
    run.restore(start)
    captured = run.capture()
    run.train(captured, range(5))
    assert not differences(run.state(), trained)
    assert differences(trained, start)
    run.buf.detach()
    fresh_compiler()
