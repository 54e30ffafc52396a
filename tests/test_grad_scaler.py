"""``torch.amp.GradScaler`` as it is, in every mode: all ranks skip the same steps and change the scale alike.

The reference is one eager process whose losses are the averages over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Mlp, RankGroup, batch, fresh_compiler, max_difference, params_of, seeded, twin
from torch import Tensor, nn

import megabuf_fx as mb

pytestmark = pytest.mark.dist

LR = 1e-2
MODES: dict[str, dict[str, Any]] = {
    "sharded": {},
    "sharded_overlap": {"overlap_param_gather": True},
    "plain": {"use_distributed_optimizer": False},
}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    # A fused optimizer takes scale and found_inf itself when it is used directly.
    "AdamW": (torch.optim.AdamW, {"fused": True}),
}

Loss = Callable[[int], Tensor]
"""``loss(step)`` of this rank or, for the reference, of all."""


def scaled_steps(model: nn.Module, optimizer: Any, loss: Loss, *, unscales: bool) -> list[float]:
    """Four steps, the second with an infinite gradient; the scale after each."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scales = []
    for step in range(4):
        scaler.scale(loss(step)).backward()
        if unscales:
            scaler.unscale_(optimizer)
            if isinstance(optimizer, mb.DistributedOptimizer):
                optimizer.clip_grad_norm_(0.1)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def loss_of(call: Any, step: int, rank: int, world: int) -> Tensor:
    loss: Tensor = call(batch(step, 0, rank, 8, 13)).square().mean()
    # One rank alone overflows, and its gradients reach the shards of others only.
    return loss * float("inf") if step == 1 and rank == world - 1 else loss


def train(rank: int, world: int, mode: str, optimizer_name: str, unscales: bool) -> str | None:
    plain = seeded(Mlp)
    model = twin(plain)
    optimizer_class, options = OPTIMIZERS[optimizer_name]
    buf = mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=300, **MODES[mode]))
    call = torch.compile(model, backend="megabuf")
    make: Any = mb.DistributedOptimizer if buf.plan.sharded else lambda params, kind, **rest: kind(params, **rest)
    optimizer = make(model.parameters(), optimizer_class, lr=LR, **options)
    reference = optimizer_class(plain.parameters(), lr=LR, **options)

    def whole_loss(step: int) -> Tensor:
        return torch.stack([loss_of(plain, step, r, world) for r in range(world)]).mean()

    expected = scaled_steps(plain, reference, whole_loss, unscales=unscales)
    found = scaled_steps(model, optimizer, lambda step: loss_of(call, step, rank, world), unscales=unscales)
    buf.sync_params()
    difference = max_difference(params_of(model), params_of(plain))
    buf.detach()
    if expected != [8.0, 4.0, 4.0, 8.0] or found != expected:
        return f"scales {found}, expected {expected}"
    return None if difference <= 2e-5 else f"parameters differ by {difference}"


def train_all(rank: int, world: int) -> list[str]:
    problems = []
    for mode in MODES:
        for name in OPTIMIZERS:
            for unscales in (False, True):
                problem = train(rank, world, mode, name, unscales)
                if problem:
                    problems.append(f"{mode}, {name}, unscale_ {unscales}: {problem}")
                fresh_compiler()
    return problems


@pytest.mark.parametrize("world", [1, 2, 3])
def test_grad_scaler(ranks: Callable[[int], RankGroup], world: int) -> None:
    for problems in ranks(world).run(train_all, world):
        assert not problems, "\n".join(problems)


def test_gradients_are_unscaled_once() -> None:
    model = seeded(Mlp)
    buf = mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager"))
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.SGD, lr=LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(batch(0, 0, 0, 8, 13)).square().mean()).backward()
    scaler.unscale_(optimizer)
    first, second = optimizer.clip_grad_norm_(1e9), optimizer.clip_grad_norm_(1e9)
    plain = seeded(Mlp)
    plain(batch(0, 0, 0, 8, 13)).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    torch.testing.assert_close(first, expected)
    assert first == second
    buf.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_survives_into_the_next_step(dtype: torch.dtype) -> None:
    """A skipped step, then the handle's own ``zero_grad``: neither its clipping nor its Inf reaches the next one."""
    model = nn.Linear(4, 1, bias=False).to(dtype)
    buf = mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager"))
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    model(torch.full((1, 4), 100.0, dtype=dtype)).sum().backward()
    model.weight.main_grad[0, 0] = float("inf")  # type: ignore[attr-defined]
    probe = optimizer.param_groups[0]["params"][-1]
    assert probe.grad.isinf().all()
    optimizer.clip_grad_norm_(1e-3)
    buf.zero_grad()
    before = model.weight.detach().float().clone()
    model(torch.full((1, 4), 1.0, dtype=dtype)).sum().backward()
    assert probe.grad == 1.0
    optimizer.step()
    torch.testing.assert_close(before - model.weight.detach().float(), torch.ones(1, 4), atol=8e-3, rtol=0.0)


def test_the_probe_is_no_parameter_of_the_model() -> None:
    model = seeded(Mlp)
    mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager"))
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.SGD, lr=LR)
    *params, probe = optimizer.param_groups[0]["params"]
    assert all(param is own for param, own in zip(params, model.parameters(), strict=True))
    assert type(probe).__name__ == "ScalerProbe"
    assert not probe.requires_grad
    assert len(optimizer.param_groups) == 1
