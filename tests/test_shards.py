"""``runtime/shards.py`` against Megatron's range maps, then that shards tile parameters. All exact."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_data import buffer_key, load, param_specs

from megabuf_fx.runtime.layout import (
    BufferLayout,
    LayoutPolicy,
    ParamSpec,
    compute_buffer_layout,
    group_params_for_buffers,
)
from megabuf_fx.runtime.shards import ShardRange, compute_shard_ranges, shard_bounds

CASES: list[dict[str, Any]] = load("shard_ranges")["cases"]


def make_row(owned: ShardRange) -> list[int]:
    """The columns of the oracle's ``row``: Megatron keeps start and end of every range."""
    row = [owned.bucket, owned.param]
    for start in (owned.start, owned.bucket_start, owned.shard_start, owned.param_start):
        row += [start, start + owned.numel]
    return row


def make_layouts(case: dict[str, Any]) -> list[BufferLayout]:
    entries = case["params"]
    params = param_specs(load("layouts")["models"][case["model"]] if entries is None else entries)
    fp32 = {buffer["key"]["grad_dtype"] == "fp32" for buffer in case["buffers"]}
    assert len(fp32) == 1
    layouts = []
    for group in group_params_for_buffers(params, grad_reduce_in_fp32=fp32.pop()):
        dp_size = case["edp"] if group.key.is_expert_parallel else case["dp"]
        policy = LayoutPolicy.sharded(dp_size, pad_for_high_busbw=case["busbw"])
        layouts.append(compute_buffer_layout(group, params, policy=policy, bucket_size=case["bucket_size"]))
    return layouts


@pytest.mark.parametrize("case", CASES, ids=[f"{case['id']}-{case['model']}" for case in CASES])
def test_ranges_equal_megatron(case: dict[str, Any]) -> None:
    layouts = make_layouts(case)
    assert [layout.key for layout in layouts] == [buffer_key(buffer["key"]) for buffer in case["buffers"]]
    for layout, buffer in zip(layouts, case["buffers"]):
        slots = {str(param): [slot.start, slot.end, slot.bucket] for param, slot in zip(layout.params, layout.slots)}
        assert slots == buffer["map"], layout.key
        assert [list(bucket) for bucket in layout.buckets] == buffer["buckets"], layout.key
        assert len(buffer["ranks"]) == buffer["dp"], layout.key
        for rank, rows in enumerate(buffer["ranks"]):
            ranges = compute_shard_ranges(layout, dp_size=buffer["dp"], dp_rank=rank)
            assert [make_row(owned) for owned in ranges] == rows, f"rank {rank}, {layout.key}"


def test_oracle_is_complete() -> None:
    assert load("shard_ranges")["row"] == [
        "bucket",
        "param",
        "gbuf_world.start",
        "gbuf_world.end",
        "gbuf_world_in_bucket.start",
        "gbuf_world_in_bucket.end",
        "gbuf_local.start",
        "gbuf_local.end",
        "param.start",
        "param.end",
    ]
    assert len(CASES) == 79
    assert sum(len(rows) for case in CASES for buffer in case["buffers"] for rows in buffer["ranks"]) == 3974


def plan(numels: Sequence[int], policy: LayoutPolicy, bucket_size: int | None = None) -> BufferLayout:
    params = [ParamSpec(f"p{i}", (numel,), torch.bfloat16) for i, numel in enumerate(numels)]
    (group,) = group_params_for_buffers(params, grad_reduce_in_fp32=True)
    return compute_buffer_layout(group, params, policy=policy, bucket_size=bucket_size)


def test_shard_bounds() -> None:
    assert [shard_bounds((128, 512), 3, rank) for rank in range(3)] == [(128, 256), (256, 384), (384, 512)]


def test_indivisible_bucket() -> None:
    with pytest.raises(ValueError, match=r"bucket \[128, 256\) does not divide by 3 ranks"):
        shard_bounds((128, 256), 3, 0)
    layout = plan([6, 4], LayoutPolicy.dense())
    assert compute_shard_ranges(layout, dp_size=5, dp_rank=0) == (ShardRange(0, 1, 0, 2, 0, 0, 0),)
    for rank in range(4):
        with pytest.raises(ValueError, match=r"bucket \[0, 10\) does not divide by 4 ranks"):
            compute_shard_ranges(layout, dp_size=4, dp_rank=rank)


def test_rank_that_owns_only_padding_has_no_ranges() -> None:
    layout = plan([10], LayoutPolicy.sharded(2))
    assert layout.buckets == ((0, 128),)
    assert compute_shard_ranges(layout, dp_size=2, dp_rank=0) == (ShardRange(0, 0, 0, 10, 0, 0, 0),)
    assert compute_shard_ranges(layout, dp_size=2, dp_rank=1) == ()


@settings(deadline=None)  # the machines that run this are shared
@given(
    numels=st.lists(
        st.one_of(st.sampled_from([0, 1, 64, 65]), st.integers(0, 3000), st.integers(2**53 - 1, 2**53 + 99)),
        min_size=1,
        max_size=10,
    ),
    dp_size=st.one_of(st.integers(1, 9), st.sampled_from([16, 24, 64])),
    bucket_size=st.one_of(st.none(), st.integers(1, 4000)),
    busbw=st.booleans(),
)
def test_ranks_tile_every_parameter(numels: list[int], dp_size: int, bucket_size: int | None, busbw: bool) -> None:
    layout = plan(numels, LayoutPolicy.sharded(dp_size, pad_for_high_busbw=busbw), bucket_size)
    pieces: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for rank in range(dp_size):
        ranges = compute_shard_ranges(layout, dp_size=dp_size, dp_rank=rank)
        # By bucket and in buffer order, which is one order.
        assert list(ranges) == sorted(ranges, key=lambda owned: owned.start)
        for owned in ranges:
            slot = layout.slots[owned.param]
            shard_start, shard_end = shard_bounds(layout.buckets[owned.bucket], dp_size, rank)
            assert owned.bucket == slot.bucket
            assert shard_start <= owned.start < owned.end <= shard_end
            assert slot.start <= owned.start < owned.end <= slot.end  # no padding
            assert owned.start - owned.bucket_start == layout.buckets[owned.bucket][0]
            assert owned.start - owned.shard_start == shard_start
            assert owned.start - owned.param_start == slot.start
            pieces[owned.param].append((owned.param_start, owned.param_start + owned.numel))
    for param, numel in enumerate(numels):
        position = 0
        for start, end in pieces[param]:  # in order of rank
            assert start == position
            position = end
        assert position == numel
