"""When updated parameters are gathered: order, number in flight, who starts, and that nothing stale is ever read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import Mlp, RankGroup, batch, error_text, fresh_compiler, max_difference, params_of, seeded, twin
from torch import Tensor, nn

import megabuf_fx as mb
from megabuf_fx.runtime.bucket_groups import ParamGatherer, ParamPhase
from megabuf_fx.runtime.buffers import ParamGradBuffer
from megabuf_fx.runtime.collectives import LocalComm, PendingWork
from megabuf_fx.runtime.layout import ParamSpec
from megabuf_fx.runtime.ops import register_target
from megabuf_fx.runtime.plan import BucketPlan, plan_buckets

LR = 1e-2


class RecordingComm(LocalComm):
    """One rank; writes down when a gather starts and ends."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.target: Any = None

    def all_gather(self, full: Tensor, shard: Tensor) -> PendingWork:
        name = str(int(full[0]))
        self.events.append(f"start {name}")
        return PendingWork(lambda: self.events.append(f"wait {name}"), (full, shard))


def make_gatherer(prefetch: int | None) -> tuple[ParamGatherer, RecordingComm, BucketPlan]:
    """Four bucket groups, whose parameters hold the group's number; all stale."""
    specs = [ParamSpec(f"p{i}", (4,), torch.float32) for i in range(4)]
    plan = plan_buckets(specs, dp_size=1, sharded=True, bucket_size=4, grad_reduce_in_fp32=False)
    params = [nn.Parameter(torch.full((4,), float(plan.group_of_param[i]))) for i in range(4)]
    buffers = [ParamGradBuffer(layout, params, device=torch.device("cpu"), sharded=True) for layout in plan.layouts]
    comm = RecordingComm()
    # What the ops find; registered weakly, so somebody must hold it.
    comm.target = mock.Mock()
    gatherer = ParamGatherer(plan, buffers, [comm], handle=register_target(comm.target), prefetch=prefetch)
    comm.target.start_gather, comm.target.wait_gather = gatherer.start_gather, gatherer.wait_gather
    gatherer.mark_stale()
    return gatherer, comm, plan


@pytest.mark.parametrize(
    ("prefetch", "expected"),
    [
        (None, "start 3, start 2, start 1, start 0, wait 3, wait 2, wait 1, wait 0"),
        (0, "start 3, wait 3, start 2, wait 2, start 1, wait 1, start 0, wait 0"),
        # Megatron's chain: one group ahead.
        (1, "start 3, start 2, wait 3, start 1, wait 2, start 0, wait 1, wait 0"),
        (2, "start 3, start 2, start 1, wait 3, start 0, wait 2, wait 1, wait 0"),
    ],
)
def test_prefetch_bounds_the_gathers_in_flight(prefetch: int | None, expected: str) -> None:
    gatherer, comm, _ = make_gatherer(prefetch)
    gatherer.start_ahead()
    for group in (3, 2, 1, 0):
        gatherer.wait(group)
    assert ", ".join(comm.events) == expected
    assert gatherer.is_current


@pytest.mark.parametrize("prefetch", [None, 0, 1])
def test_predecessors_start_first_whatever_is_read_first(prefetch: int | None) -> None:
    """So that the order of gathers is the same on every rank."""
    gatherer, comm, _ = make_gatherer(prefetch)
    gatherer.wait(1)
    gatherer.start_all()
    assert [event for event in comm.events if event.startswith("start")] == [f"start {g}" for g in (3, 2, 1, 0)]
    assert gatherer.phases[1] is ParamPhase.CURRENT
    assert gatherer.phases[3] is ParamPhase.GATHERING


def test_writing_shards_while_they_are_sent_is_refused() -> None:
    gatherer, _, _ = make_gatherer(None)
    gatherer.start_all()
    assert error_text(gatherer.mark_stale).startswith("RuntimeError: parameters were updated while")


VARIANTS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "prefetch 0": {"param_gather_prefetch": 0},
    "prefetch 1": {"param_gather_prefetch": 1},
    "aligned, dispatched by the caller": {"align_param_gather": True},
    "aligned, never dispatched": {"align_param_gather": True},
    "with optimizer step": {"overlap_param_gather_with_optimizer_step": True},
    "nan": {"debug_nan_stale_params": True},
}


def prepare(variant: str) -> tuple[Any, mb.MegabufHandle, Any, Any]:
    model = seeded(Mlp)
    config = mb.MegabufConfig(
        inner_compiler="aot_eager", bucket_size=300, overlap_param_gather=True, **VARIANTS[variant]
    )
    buf = mb.attach(model, config)
    call = torch.compile(model, backend="megabuf")
    return model, buf, call, mb.DistributedOptimizer(model.parameters(), torch.optim.SGD, lr=LR, momentum=0.9)


def one_step(call: Any, optimizer: Any, step: int, rank: int) -> None:
    call(batch(step, 0, rank, 8, 13)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(rank: int, world: int, variant: str, is_compiled: bool) -> list[str]:
    plain = seeded(Mlp)
    model, buf, call, optimizer = prepare(variant)
    if not is_compiled:
        call = model
    reference = torch.optim.SGD(plain.parameters(), lr=LR, momentum=0.9)
    gatherer = buf.buffers.gatherer
    assert gatherer is not None
    problems = []
    for step in range(4):
        torch.stack([plain(batch(step, 0, r, 8, 13)).square().mean() for r in range(world)]).mean().backward()
        reference.step()
        reference.zero_grad()
        one_step(call, optimizer, step, rank)
        expected = ParamPhase.GATHERING if variant == "with optimizer step" else ParamPhase.STALE
        if set(gatherer.phases) != {expected}:
            problems.append(f"after step {step}: {gatherer.phases}")
        if variant == "nan" and not any(param.isnan().any() for param in model.parameters()):
            problems.append("a read without sync_params shows nothing")
        if variant == "aligned, dispatched by the caller":
            buf.start_param_sync()
    # An evaluation is never stale either.
    with torch.no_grad():
        if not torch.allclose(call(batch(9, 0, 0, 8, 13)), plain(batch(9, 0, 0, 8, 13)), atol=2e-5):
            problems.append("evaluation differs")
    buf.start_param_sync(force_sync=True)
    difference = max_difference(params_of(model), params_of(plain))
    if not difference <= 2e-5:
        problems.append(f"parameters differ by {difference}")
    buf.detach()
    return [f"{variant}, compiled {is_compiled}: {problem}" for problem in problems]


def train_variants(rank: int, world: int) -> list[str]:
    problems = []
    for variant in VARIANTS:
        for is_compiled in (True, False):
            problems += train(rank, world, variant, is_compiled)
            fresh_compiler()
    return problems


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 3])
def test_variants_equal_eager(ranks: Callable[[int], RankGroup], world: int) -> None:
    for problems in ranks(world).run(train_variants, world):
        assert not problems, "\n".join(problems)


def aligned_forward(rank: int) -> list[str]:
    """What has started when the forward begins: nothing, as the caller has not asked for it."""
    _, buf, call, optimizer = prepare("aligned, never dispatched")
    one_step(call, optimizer, 0, rank)
    gatherer = buf.buffers.gatherer
    assert gatherer is not None
    buf.buffers.before_forward(in_backward=False)
    found = [phase.value for phase in gatherer.phases]
    buf.detach()
    return sorted(set(found))


@pytest.mark.dist
def test_align_leaves_starting_to_the_caller(ranks: Callable[[int], RankGroup]) -> None:
    assert ranks(2).run(aligned_forward) == [["stale"]] * 2


def copies(rank: int) -> list[str]:
    """Deep copies and state dicts taken between ``step`` and the next forward."""
    problems = []
    model, buf, call, optimizer = prepare("nan")
    one_step(call, optimizer, 0, rank)
    copied = copy.deepcopy({"nested": [model]})["nested"][0]
    if any(param.isnan().any() for param in copied.parameters()):
        problems.append("the copy is stale")
    if "__deepcopy__" in vars(copied) or hasattr(copied.fc1.weight, "main_grad"):
        problems.append("the copy is not a plain model")
    twin(copied)
    one_step(call, optimizer, 1, rank)
    if any(value.isnan().any() for value in model.state_dict().values()):
        problems.append("state_dict is stale")
    if max_difference(params_of(model), params_of(copied)) == 0.0:
        problems.append("the copy follows the model")
    buf.detach()
    if "__deepcopy__" in vars(model):
        problems.append("detach left the copy hook")
    return problems


@pytest.mark.dist
def test_copies_are_never_stale(ranks: Callable[[int], RankGroup]) -> None:
    assert ranks(2).run(copies) == [[], []]


def test_start_param_sync_without_shards_does_nothing() -> None:
    """Megatron asserts; there is nothing to gather."""
    model = seeded(Mlp)
    buf = mb.attach(model, mb.MegabufConfig(use_distributed_optimizer=False))
    before = params_of(model)
    buf.start_param_sync()
    buf.start_param_sync(force_sync=True)
    assert max_difference(params_of(model), before) == 0.0
