"""``runtime/plan.py``: buckets, their order, and what a graph covers. Layouts themselves are in test_layout.py."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megabuf_fx.passes.graph_utils import contiguous_stride
from megabuf_fx.runtime.layout import BufferKey, ParamSpec
from megabuf_fx.runtime.plan import (
    Bucket,
    BucketGroup,
    BucketPlan,
    GraphParam,
    GraphPlan,
    Role,
    plan_buckets,
    plan_graph,
)

FP32, BF16 = torch.float32, torch.bfloat16


def specs(*numels: int, dtypes: Sequence[torch.dtype] = ()) -> list[ParamSpec]:
    return [ParamSpec(f"p{i}", (numel,), dtypes[i] if dtypes else FP32) for i, numel in enumerate(numels)]


def make(params: Sequence[ParamSpec], **options: Any) -> BucketPlan:
    defaults: dict[str, Any] = {"dp_size": 2, "sharded": True, "bucket_size": None, "grad_reduce_in_fp32": False}
    return plan_buckets(params, **{**defaults, **options})


def graph_param(plan: BucketPlan, index: int, handle: int = 0) -> GraphParam:
    buffer, slot = plan.locations[index]
    return GraphParam(
        handle=handle,
        param=index,
        group=plan.group_of_param[index],
        name=plan.params[index].name,
        shape=plan.params[index].shape,
        stride=contiguous_stride(plan.params[index].shape),
        grad_dtype=plan.layouts[buffer].key.grad_dtype,
        buffer=buffer,
        start=slot.start,
        whole_buffer=not plan.aligned,
    )


# plan_buckets


def test_sharded_layout() -> None:
    """Starts are multiples of 64, bucket ends of lcm(dp, 128)."""
    plan = make(specs(10, 200, 70), dp_size=3, bucket_size=100)
    assert (plan.dp_size, plan.sharded, plan.aligned) == (3, True, True)
    assert plan.groups == (
        BucketGroup((Bucket(0, 0, 0, 384, 264 + 64, (2, 1)),)),
        BucketGroup((Bucket(0, 1, 384, 768, 10, (0,)),)),
    )
    assert [(buffer, slot.start, slot.end) for buffer, slot in plan.locations] == [
        (0, 384, 394),
        (0, 128, 328),
        (0, 0, 70),
    ]
    assert plan.group_of_param == (1, 0, 0)
    assert [bucket.numel for group in plan.groups for bucket in group.buckets] == [384, 384]


def test_padding_for_bus_bandwidth() -> None:
    plan = make(specs(10, 20), bucket_size=1, pad_for_high_busbw=True)
    assert [(group.buckets[0].start, group.buckets[0].end) for group in plan.groups] == [(0, 65536), (65536, 131072)]


def test_aligned_layout() -> None:
    """Not sharded: every view may enter a graph, and the number of ranks does not matter."""
    plan = make(specs(10, 200, 70), dp_size=3, sharded=False, bucket_size=100)
    assert (plan.sharded, plan.aligned) == (False, True)
    assert [(slot.start, slot.end) for _, slot in plan.locations] == [(384, 394), (128, 328), (0, 70)]
    assert [(group.buckets[0].start, group.buckets[0].end) for group in plan.groups] == [(0, 384), (384, 448)]
    assert plan.layouts == make(specs(10, 200, 70), dp_size=5, sharded=False, bucket_size=100).layouts


def test_dense_layout() -> None:
    """No padding at all, so that views can be misaligned."""
    plan = make(specs(10, 200, 70), sharded=False, dense=True, bucket_size=100)
    assert (plan.sharded, plan.aligned) == (False, False)
    assert [(slot.start, slot.end) for _, slot in plan.locations] == [(270, 280), (70, 270), (0, 70)]
    assert [(group.buckets[0].start, group.buckets[0].end) for group in plan.groups] == [(0, 270), (270, 280)]
    assert plan.layouts[0].numel == plan.layouts[0].numel_unpadded == 280


def test_sharded_buffers_are_never_dense() -> None:
    assert make(specs(10, 200, 70), dense=True) == make(specs(10, 200, 70))


def test_one_bucket_per_buffer_without_a_size() -> None:
    plan = make(specs(10, 20, 30, dtypes=(FP32, BF16, FP32)))
    assert [group.params for group in plan.groups] == [(1,), (2, 0)]


def test_groups_of_two_buffers_follow_the_backward() -> None:
    """A bucket's place is that of its parameter nearest to the head, whichever buffer it is in.

    definition   p0 bf16   p1 fp32   p2 bf16   p3 fp32   p4 bf16   p5 fp32
    buckets      each parameter its own: order of groups is p5 .. p0
    """
    dtypes = (BF16, FP32) * 3
    plan = make(specs(100, 100, 100, 100, 100, 100, dtypes=dtypes), bucket_size=1)
    assert [group.params for group in plan.groups] == [(5,), (4,), (3,), (2,), (1,), (0,)]
    assert [group.buckets[0].buffer for group in plan.groups] == [1, 0, 1, 0, 1, 0]
    # Buckets of two: the one that holds p1 can leave before the one that waits for p0.
    plan = make(specs(100, 100, 100, 100, 100, 100, dtypes=dtypes), bucket_size=200)
    assert [group.params for group in plan.groups] == [(5, 3), (4, 2), (1,), (0,)]
    # One bucket per buffer: that without p0 first.
    assert [group.params for group in make(specs(1, 1, 1, dtypes=(FP32, BF16, FP32))).groups] == [(1,), (2, 0)]


def test_grad_dtype_decides_the_buffers() -> None:
    params = specs(10, 20, dtypes=(BF16, FP32))
    assert [layout.key for layout in make(params).layouts] == [BufferKey(BF16, BF16), BufferKey(FP32, FP32)]
    wide = make(params, grad_reduce_in_fp32=True)
    assert [layout.key for layout in wide.layouts] == [BufferKey(BF16, FP32), BufferKey(FP32, FP32)]


def test_shared_embedding_is_alone_when_sharded() -> None:
    params = [dataclasses.replace(spec, shared_embedding=spec.name == "p1") for spec in specs(10, 20, 30)]
    assert [group.params for group in make(params).groups] == [(2,), (1,), (0,)]
    assert [group.params for group in make(params, sharded=False).groups] == [(2, 1, 0)]


def test_no_parameters() -> None:
    plan = make([])
    assert (plan.params, plan.layouts, plan.groups, plan.locations, plan.group_of_param) == ((), (), (), (), ())


def test_plans_are_values() -> None:
    plan = make(specs(10, 20), bucket_size=1)
    assert plan == make(specs(10, 20), bucket_size=1)
    assert len({plan, make(specs(10, 20), bucket_size=1)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.dp_size = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "other",
    [
        make(specs(10, 21), bucket_size=1),
        make(specs(20, 10), bucket_size=1),
        make(specs(10, 20, 1), bucket_size=1),
        make([ParamSpec("q0", (10,), FP32), ParamSpec("p1", (20,), FP32)], bucket_size=1),
        make([ParamSpec("p0", (2, 5), FP32), ParamSpec("p1", (20,), FP32)], bucket_size=1),
        make(specs(10, 20, dtypes=(FP32, BF16)), bucket_size=1),
        make(specs(10, 20)),
        make(specs(10, 20), bucket_size=1, dp_size=4),
        make(specs(10, 20), bucket_size=1, sharded=False),
        make(specs(10, 20), bucket_size=1, sharded=False, dense=True),
        make(specs(10, 20), bucket_size=1, pad_for_high_busbw=True),
    ],
)
def test_digest_tells_plans_apart(other: BucketPlan) -> None:
    plan = make(specs(10, 20), bucket_size=1)
    assert plan.digest == make(specs(10, 20), bucket_size=1).digest
    assert plan != other
    assert plan.digest != other.digest


def test_digest_is_made_of_values() -> None:
    """Nothing of this process is in it: no address, and nothing whose order depends on hashes."""
    plan = make(specs(10, 20, dtypes=(FP32, BF16)), bucket_size=1)
    assert len(plan.digest) == 64
    assert int(plan.digest, 16) >= 0
    assert not any(mark in repr(plan) for mark in ("0x", "{", "<"))


PARAMS = st.lists(
    st.builds(
        lambda numel, dtype, shared, fp8, expert: (numel, dtype, shared, fp8, expert),
        st.one_of(st.integers(0, 300), st.sampled_from([64, 128, 5000])),
        st.sampled_from([FP32, BF16, torch.float16]),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=10,
)


@settings(deadline=None, max_examples=100)  # the machines that run this are shared
@given(
    params=PARAMS,
    dp_size=st.integers(1, 8),
    kind=st.sampled_from(["sharded", "aligned", "dense"]),
    bucket_size=st.one_of(st.none(), st.integers(1, 600)),
    fp32=st.booleans(),
)
def test_invariants(
    params: list[tuple[Any, ...]], dp_size: int, kind: str, bucket_size: int | None, fp32: bool
) -> None:
    members = [
        ParamSpec(
            f"p{i}",
            (numel,),
            dtype,
            shared_embedding=shared,
            allreduce=not expert,
            quantized="fp8" if fp8 and dtype is BF16 else None,
        )
        for i, (numel, dtype, shared, fp8, expert) in enumerate(params)
    ]
    options: dict[str, Any] = {
        "dp_size": dp_size,
        "sharded": kind == "sharded",
        "dense": kind == "dense",
        "bucket_size": bucket_size,
        "grad_reduce_in_fp32": fp32,
    }
    plan = make(members, **options)
    # Every parameter is in exactly one bucket, in the slot that its layout gives it.
    assert sorted(param for group in plan.groups for param in group.params) == list(range(len(members)))
    assert len(plan.locations) == len(members)
    for index, (buffer, slot) in enumerate(plan.locations):
        assert slot.end - slot.start == members[index].numel
        (bucket,) = [b for b in plan.groups[plan.group_of_param[index]].buckets if index in b.params]
        assert (bucket.buffer, bucket.index) == (buffer, slot.bucket)
        assert bucket.start <= slot.start <= slot.end <= bucket.end
        assert slot.start % (1 if kind == "dense" else 64) == 0
    for group in plan.groups:
        for bucket in group.buckets:
            assert (bucket.start, bucket.end) == plan.layouts[bucket.buffer].buckets[bucket.index]
            assert list(bucket.params) == sorted(bucket.params, reverse=True)
            divisor = {"sharded": math.lcm(dp_size, 128), "aligned": 64, "dense": 1}[kind]
            assert bucket.numel % divisor == 0
            # A bucket closes once it is full, so without its last parameter it is not.
            if bucket_size is not None and len(bucket.params) > 1:
                last = plan.locations[bucket.params[-2]][1]
                assert last.end - bucket.start < bucket_size
    # Order: each buffer's buckets in turn, and altogether the parameter nearest to the head decides.
    heads = [min(group.params) for group in plan.groups]
    assert heads == sorted(heads, reverse=True)
    for buffer, layout in enumerate(plan.layouts):
        indices = [b.index for group in plan.groups for b in group.buckets if b.buffer == buffer]
        assert indices == list(range(len(layout.buckets)))
    again = make(members, **options)
    assert again == plan
    assert again.digest == plan.digest


# plan_graph


def test_covered_groups_are_those_whose_parameters_are_all_inputs() -> None:
    plan = make(specs(10, 10, 10, 10, 10), bucket_size=74)
    assert [group.params for group in plan.groups] == [(4, 3), (2, 1), (0,)]

    def covered(*params: int) -> tuple[tuple[int, int], ...]:
        return plan_graph([graph_param(plan, index) for index in params], {0: plan}).covered

    assert covered(0, 1, 2, 3, 4) == ((0, 0), (0, 1), (0, 2))
    assert covered(4, 3, 2, 1, 0) == ((0, 0), (0, 1), (0, 2)), "launch order, not input order"
    assert covered(0, 3, 4) == ((0, 0), (0, 2))
    assert covered(1, 3) == ()
    assert covered() == ()


def test_graph_plan_keeps_inputs_and_lists_every_group() -> None:
    plan = make(specs(10, 10, 10, 10, 10), bucket_size=74)
    inputs = [None, graph_param(plan, 3), None, graph_param(plan, 0)]
    found = plan_graph(inputs, {0: plan})
    assert found.inputs == tuple(inputs)
    assert [param.name for param in found.params] == ["p3", "p0"]
    assert found.groups == ((0, 0), (0, 2))
    assert found.covered == ((0, 2),)
    assert found == GraphPlan(tuple(inputs), ((0, 2),))
    assert hash(found) == hash(plan_graph(inputs, {0: plan}))


def test_two_models_in_one_graph() -> None:
    """By handle first: every rank attaches its models in one order."""
    one, two = make(specs(10, 10), bucket_size=1), make(specs(30), bucket_size=1)
    inputs = [graph_param(two, 0, handle=3), graph_param(one, 1, handle=1)]
    found = plan_graph(inputs, {3: two, 1: one})
    assert found.covered == ((1, 0), (3, 0))
    assert found.groups == ((1, 0), (3, 0))


@settings(deadline=None, max_examples=50)
@given(count=st.integers(1, 8), bucket_size=st.integers(1, 400), data=st.data())
def test_covered_and_touched_groups(count: int, bucket_size: int, data: st.DataObject) -> None:
    plan = make(specs(*([50] * count)), bucket_size=bucket_size)
    chosen = data.draw(st.lists(st.integers(0, count - 1), unique=True))
    found = plan_graph([graph_param(plan, index) for index in chosen], {0: plan})
    touched = [i for i, group in enumerate(plan.groups) if set(group.params) & set(chosen)]
    covered = [i for i, group in enumerate(plan.groups) if set(group.params) <= set(chosen)]
    assert found.groups == tuple((0, group) for group in touched)
    assert found.covered == tuple((0, group) for group in covered)


def test_names_of_roles() -> None:
    assert Role(None).name == "untouched"
    assert Role("overwrite").name == "overwrite_local"
    assert Role("overwrite", ((0, 0),)).name == "overwrite_sync"
    assert Role("accumulate").name == "accumulate_local"
    assert Role("accumulate", ((0, 0),)).name == "accumulate_sync"
    assert Role("flagged").name == "flagged_local"
    assert len({Role("overwrite"), Role("overwrite", ()), Role("accumulate")}) == 2
