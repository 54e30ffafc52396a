"""Tensor-parallel training against the same model in one process; norms, skipped steps and captures over axes.

Every parameter is within 2e-5 after every step, norms before clipping within 1e-5. The collectives of the layers are
functional ones inside autograd functions, compiled into the graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import RankGroup, batch, fresh_compiler, max_difference, params_of, seeded
from parallel_models import WIDTH, Flagged, TensorParallel, attach_in, place
from torch import Tensor, nn

import megabuf_fx as mb

pytestmark = pytest.mark.dist

STEPS, SEQUENCE, MAX_NORM = 3, 8, 0.5
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
TP_MODES: dict[str, dict[str, Any]] = {
    "sharded": {},
    "overlap": {"overlap_param_gather": True},
    "plain": {"use_distributed_optimizer": False},
}


def train_tensor_parallel(rank: int, mode: str, is_compiled: bool) -> str | None:
    at = place(rank, "tp")
    whole: Any = seeded(TensorParallel)
    reference = torch.optim.AdamW(whole.parameters(), **ADAMW)
    model: Any = TensorParallel(at.groups.tp)
    model.load_state_dict(model.cut(params_of(whole)))
    model.mark()
    config = mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=60, **TP_MODES[mode])
    handle = mb.attach(model, config, process_group=at.dp)
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, groups=at.groups, **ADAMW)
    call = torch.compile(model, backend="megabuf") if is_compiled else model
    for step in range(STEPS):
        for dp_rank in range(at.dp_size):
            for micro in range(2):
                loss = whole(batch(step, micro, dp_rank, SEQUENCE, WIDTH)).square().mean()
                (loss / (2 * at.dp_size)).backward()
        expected = nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
        reference.step()
        reference.zero_grad()
        with handle.no_sync():
            parts = [batch(step, micro, at.dp_rank, SEQUENCE, WIDTH).chunk(2)[at.axis_rank] for micro in range(2)]
            (call(parts[0]).square().mean() / 2).backward()
        (call(parts[1]).square().mean() / 2).backward()
        mb.finalize_model_grads(handle, groups=at.groups, sum_over_tp=("*q_layernorm*",))
        norm = optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if not torch.allclose(norm, expected, rtol=1e-5):
            return f"step {step}: norm {norm}, expected {expected}"
        if mode != "overlap" or step + 1 == STEPS:
            handle.sync_params()
            difference = max_difference(params_of(model), model.cut(params_of(whole)))
            if not difference <= 2e-5:
                return f"step {step}: differs by {difference}"
    handle.detach()
    return None


Cases = Sequence[tuple[str, bool]]


def train_all(rank: int, cases: Cases) -> list[str]:
    problems = []
    for mode, is_compiled in cases:
        text = train_tensor_parallel(rank, mode, is_compiled)
        problems += [f"{mode} {is_compiled=}: {text}"] if text else []
        fresh_compiler()
    return problems


def check_training(group: RankGroup, cases: Cases) -> None:
    for problems in group.run(train_all, cases, timeout=120):
        assert not problems, "\n".join(problems)


def test_two_replicas_equal_one_process(ranks: Callable[[int], RankGroup]) -> None:
    check_training(ranks(4), [("sharded", True), ("overlap", True), ("plain", False), ("overlap", False)])


# Norms and skipped steps over axes


def norms(rank: int, norm_type: float) -> list[float]:
    """Gradients are ``rank + 1`` in 140 elements: cut, copied over ``tp``; shared, copied over ``pp``."""
    found = []
    for axis, flags in (
        ("tp", ("tensor_model_parallel",)),
        ("tp", ()),
        ("pp", ("shared",)),
        ("pp", ("pipeline_parallel", "shared_embedding")),
        ("pp", ()),
    ):
        at = place(rank, axis)
        chunks = [Flagged(*flags) for _ in range(2)]
        handles = [attach_in(chunk, at) for chunk in chunks]
        optimizers = [
            mb.DistributedOptimizer(c.parameters(), torch.optim.SGD, lr=1.0, groups=at.groups) for c in chunks
        ]
        for chunk in chunks:
            chunk.backward(rank + 1)
        total = mb.clip_grad_norm_(optimizers, 1.0, norm_type)
        found.append(total.item())
        again = mb.clip_grad_norm_(optimizers, 1.0, norm_type)
        assert abs(again.item() - 1.0) < 1e-4
        for handle in handles:
            handle.detach()
    return found


def test_norms_count_copies_once(ranks: Callable[[int], RankGroup]) -> None:
    """Data-parallel averages are 2 and 3 on the two axis ranks; two chunks on each."""
    first, second = 70 * 2.0**2, 70 * 3.0**2
    squares = [
        2 * (first + first + second),
        2 * (first + first),
        2 * (first + second),
        2 * (first + second) + first,
        4 * (first + second),
    ]
    for found in ranks(4).run(norms, 2.0):
        assert found == pytest.approx([square**0.5 for square in squares], rel=1e-5)
    for found in ranks(4).run(norms, float("inf")):
        assert found == [3.0, 2.0, 3.0, 3.0, 3.0]


def test_one_replica_equals_one_process(ranks: Callable[[int], RankGroup]) -> None:
    check_training(ranks(2), [("sharded", True), ("plain", True), ("sharded", False)])


def skipped(rank: int) -> tuple[int, float]:
    """One rank of the model has an Inf."""
    at = place(rank, "tp")
    model = Flagged()
    handle = attach_in(model, at)
    options: dict[str, Any] = {"max_skipped_steps": 3, "groups": at.groups, "lr": 1.0}
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.SGD, **options)
    model.backward(float("inf") if rank == 1 else 1.0)
    optimizer.step()
    optimizer.zero_grad()
    handle.detach()
    return optimizer.skipped_steps, model.ordinary.abs().max().item()


def test_a_step_is_skipped_on_all_axes(ranks: Callable[[int], RankGroup]) -> None:
    assert ranks(2).run(skipped) == [(1, 0.0)] * 2


def captured(rank: int) -> float:
    """The largest difference of three captured steps from three ordinary ones, over all parameters."""
    at = place(rank, "tp")
    results = []
    for is_captured in (False, True):
        model: Any = seeded(lambda: TensorParallel(at.groups.tp))
        model.mark()
        config = mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=60)
        handle = mb.attach(model, config, process_group=at.dp)
        call = torch.compile(model, backend="megabuf")
        options: dict[str, Any] = {"lr": 1e-2, "fused": True, "groups": at.groups}
        optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, **options)

        def step(x: Tensor, call: Any = call, handle: Any = handle, optimizer: Any = optimizer) -> None:
            call(x).square().mean().backward()
            mb.finalize_model_grads(handle, groups=at.groups, sum_over_tp=("*q_layernorm*",))
            optimizer.clip_grad_norm_(MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()

        run: Any = step
        if is_captured:
            run = mb.capture_step(step, torch.zeros(SEQUENCE // 2, WIDTH), optimizer=optimizer)
        for number in range(3):
            run(batch(number, 0, rank, SEQUENCE // 2, WIDTH))
        results.append(params_of(model))
        handle.detach()
        fresh_compiler()
    return max_difference(*results)


def test_captured_steps(ranks: Callable[[int], RankGroup]) -> None:
    """Bitwise: the same ops in the same order."""
    assert ranks(2).run(captured, timeout=120) == [0.0, 0.0]
