"""Random parameters, flags and world sizes: plans keep their invariants, and sharding changes nothing but the place.

Training is compared bitwise with plain ``torch.optim`` on whole parameters: losses are linear, so gradients are known
numbers, sums of two ranks have one order, and elementwise updates do not care where a shard begins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import RankGroup
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import megabuf_fx as mb
from megabuf_fx.runtime.layout import ParamSpec
from megabuf_fx.runtime.plan import BucketPlan, plan_buckets

FP32, BF16 = torch.float32, torch.bfloat16

# Plans. Flags of one buffer are in test_layout.py, of several buffers without experts in test_plan.py.

SPECS = st.lists(
    st.builds(
        lambda numel, dtype, is_shared, is_expert, is_fp8: ParamSpec(
            f"{numel}",
            (numel,),
            dtype,
            shared_embedding=is_shared,
            allreduce=not is_expert,
            quantized="fp8" if is_fp8 and dtype is BF16 else None,
        ),
        st.one_of(st.integers(1, 300), st.sampled_from([64, 128, 5000])),
        st.sampled_from([FP32, BF16]),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=150)  # the machines that run this are shared
@given(
    specs=SPECS,
    expert_dp_size=st.integers(1, 5),
    expert_parallel=st.integers(1, 4),
    bucket_size=st.one_of(st.none(), st.integers(1, 600)),
    fp32=st.booleans(),
    busbw=st.booleans(),
    single=st.booleans(),
    fp32_accumulation=st.booleans(),
)
def test_plans(
    specs: list[ParamSpec],
    expert_dp_size: int,
    expert_parallel: int,
    bucket_size: int | None,
    fp32: bool,
    busbw: bool,
    single: bool,
    fp32_accumulation: bool,
) -> None:
    dp_size = expert_dp_size * expert_parallel
    plan = plan_buckets(
        specs,
        dp_size=dp_size,
        expert_dp_size=expert_dp_size,
        sharded=True,
        bucket_size=bucket_size,
        grad_reduce_in_fp32=fp32,
        pad_for_high_busbw=busbw,
        force_single_bucket_group=single,
        reduce_scatter_with_fp32_accumulation=fp32_accumulation,
    )
    check_membership(plan)
    for layout in plan.layouts:
        divisor = math.lcm(expert_dp_size if layout.key.is_expert_parallel else dp_size, 2**16 if busbw else 128)
        position = 0
        for start, end in layout.buckets:
            assert start == position < end
            assert end % divisor == 0
            position = end
        assert layout.numel - layout.numel_unpadded < divisor * len(layout.buckets)
    check_groups(plan, single=single, fp32_accumulation=fp32_accumulation)


def check_membership(plan: BucketPlan) -> None:
    """Every parameter has one place, in one bucket of one group, and nothing overlaps."""
    assert sorted(param for group in plan.groups for param in group.params) == list(range(len(plan.params)))
    places = sorted((buffer, slot.start, slot.end) for buffer, slot in plan.locations)
    assert len(places) == len(plan.params)
    for left, right in itertools.pairwise(places):
        assert left[0] != right[0] or left[2] <= right[1]
    buckets = [(bucket.buffer, bucket.index) for group in plan.groups for bucket in group.buckets]
    assert sorted(buckets) == [(n, i) for n, layout in enumerate(plan.layouts) for i in range(len(layout.buckets))]


def check_groups(plan: BucketPlan, *, single: bool, fp32_accumulation: bool) -> None:
    keys = [[plan.layouts[bucket.buffer].key for bucket in group.buckets] for group in plan.groups]
    # One process group per bucket group.
    assert all(len({key.is_expert_parallel for key in members}) == 1 for members in keys)
    if single:
        assert len(plan.groups) == len({layout.key.is_expert_parallel for layout in plan.layouts})
    elif fp32_accumulation or all(layout.key.param_dtype != torch.uint8 for layout in plan.layouts):
        assert all(len(group.buckets) == 1 for group in plan.groups)
    heads = [min(group.params) for group in plan.groups]
    assert heads == sorted(heads, reverse=True)


# Training


@dataclass(frozen=True)
class Case:
    """A model of flat parameters, the flags, and what each step uses."""

    numels: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    adamw: bool
    micros: int
    used: tuple[tuple[tuple[bool, ...], ...], ...]
    """By step and rank, which parameters get a gradient."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    numels = draw(st.lists(st.one_of(st.integers(1, 200), st.sampled_from([64, 128, 1000])), min_size=1, max_size=6))
    sharded, overlap = draw(st.booleans()), draw(st.booleans())
    options: dict[str, Any] = {
        "use_distributed_optimizer": sharded,
        "overlap_grad_reduce": overlap,
        "dense_layout": not sharded and draw(st.booleans()),
        "overlap_param_gather": sharded and overlap and draw(st.booleans()),
        "bucket_size": draw(st.one_of(st.none(), st.integers(1, 300))),
        "disable_bucketing": draw(st.booleans()),
        "average_in_collective": draw(st.booleans()),
        "pad_buckets_for_high_nccl_busbw": draw(st.booleans()),
    }
    steps = draw(st.integers(1, 3))
    some = st.tuples(*(st.booleans() for _ in numels)).filter(any)
    used = st.one_of(st.just((True,) * len(numels)), some)
    return Case(
        numels=tuple(numels),
        options=tuple(options.items()),
        adamw=draw(st.booleans()),
        micros=draw(st.integers(1, 3)),
        used=tuple((draw(used), draw(used)) for _ in range(steps)),
    )


class Flat(nn.Module):
    """Its outputs' gradients are the inputs."""

    def __init__(self, numels: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.flat = nn.ParameterList(torch.randn(numel) for numel in numels)

    def forward(self, factors: dict[int, Tensor]) -> Tensor:
        return torch.stack([(self.flat[index] * factor).sum() for index, factor in factors.items()]).sum()


def gradients(case: Case, step: int, micro: int, rank: int) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(step * 1000 + micro * 10 + rank)
    drawn = [torch.randn(numel, generator=generator) for numel in case.numels]
    return {index: grad for index, grad in enumerate(drawn) if case.used[step][rank][index]}


def largest_difference(rank: int, case: Case) -> float:
    """Of any parameter after the steps of ``case``, here and with torch alone."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    model, plain = Flat(case.numels), Flat(case.numels)
    buf = mb.attach(model, mb.MegabufConfig(**dict(case.options)))
    kind = torch.optim.AdamW if case.adamw else torch.optim.SGD
    further: dict[str, Any] = {"weight_decay": 0.1} | ({} if case.adamw else {"momentum": 0.9})
    optimizer = mb.DistributedOptimizer(model.parameters(), kind, lr=0.1, **further)
    reference = kind(plain.parameters(), lr=0.1, **further)
    for step in range(len(case.used)):
        for micro in range(case.micros):
            loss = model(gradients(case, step, micro, rank))
            if micro + 1 < case.micros:
                with buf.no_sync():
                    loss.backward()
            else:
                loss.backward()
        for index, param in enumerate(plain.flat):
            param.grad = expected_gradient(case, step, index, world)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    buf.sync_params()
    pairs = zip(model.flat, plain.flat)
    result: float = max((left.detach() - right.detach()).abs().max().item() for left, right in pairs)
    buf.detach()
    return result


def expected_gradient(case: Case, step: int, index: int, world: int) -> Tensor | None:
    """The average of all ranks' sums; None where no rank has one."""
    users = [rank for rank in range(world) if case.used[step][rank][index]]
    if not users:
        return None
    total = torch.zeros(case.numels[index])
    for rank in users:
        own = gradients(case, step, 0, rank)[index]
        for micro in range(1, case.micros):
            own = own + gradients(case, step, micro, rank)[index]
        total += own / world
    return total


@settings(deadline=None, max_examples=40)
@given(case=cases())
def test_one_rank_equals_torch(case: Case) -> None:
    assert largest_difference(0, case) == 0.0


@pytest.mark.dist
@settings(deadline=None, max_examples=8, derandomize=True, database=None)  # every example is a step on two processes
@given(case=cases())
def test_two_ranks_equal_torch(ranks: Callable[[int], RankGroup], case: Case) -> None:
    assert ranks(2).run(largest_difference, case) == [0.0, 0.0]
