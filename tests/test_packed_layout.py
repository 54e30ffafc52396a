"""``runtime/packed_layout.py``: Megatron's rule against its results, then that ours loses no update. All exact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_data import load, param_specs

from megabuf_fx.runtime.layout import (
    BufferKey,
    BufferLayout,
    LayoutPolicy,
    ParamGroup,
    ParamSlot,
    ParamSpec,
    bucket_end_divisor,
    compute_buffer_layout,
)
from megabuf_fx.runtime.packed_layout import PackedLayout, halve_layout, megatron_packed_layout, misowned_elements
from megabuf_fx.runtime.plan import plan_buckets
from megabuf_fx.runtime.shards import shard_bounds

KEY = BufferKey(torch.uint8, torch.bfloat16)


def make_params(numels: Sequence[int], shared: Sequence[int] = ()) -> tuple[ParamSpec, ...]:
    """NVFP4 parameters ``p0, p1, ...``; those at ``shared`` are shared embeddings."""
    return tuple(
        ParamSpec(f"p{i}", (n,), torch.bfloat16, shared_embedding=i in shared, quantized="nvfp4")
        for i, n in enumerate(numels)
    )


def plan(params: Sequence[ParamSpec], policy: LayoutPolicy, bucket_size: int | None = None) -> BufferLayout:
    """One buffer of all parameters. The oracle has unquantized ones among them, which Megatron's rule knows."""
    indices = tuple(range(len(params)))
    return compute_buffer_layout(ParamGroup(KEY, indices, indices), params, policy=policy, bucket_size=bucket_size)


def plan_both(
    numels: Sequence[int], dp_size: int, *, busbw: bool = False, bucket_size: int | None = None
) -> tuple[BufferLayout, PackedLayout]:
    """Megatron's full layout and its packed one."""
    params, policy = make_params(numels), LayoutPolicy.sharded(dp_size, pad_for_high_busbw=busbw)
    layout = plan(params, policy, bucket_size)
    return layout, megatron_packed_layout(layout, params, policy=policy)


# Megatron's results


def test_megatron_rule_equals_megatron() -> None:
    cases: list[dict[str, Any]] = load("layouts_nvfp4")["cases"]
    assert len(cases) == 200
    for case in cases:
        where = f"case {case['id']}"
        params = param_specs(case["params"])
        policy = LayoutPolicy.dense()
        if case["dist_opt"]:
            policy = LayoutPolicy.sharded(case["dp"], pad_for_high_busbw=case["busbw"])
            # Our divisor is Megatron's here, so a buffer of ours has its full layout.
            assert LayoutPolicy.sharded(case["dp"], pad_for_high_busbw=case["busbw"], packed=True) == policy, where
        layout = plan(params, policy, case["bucket_size"])
        assert [[slot.start, slot.end, slot.bucket] for slot in layout.slots] == case["map"], where
        assert [list(bucket) for bucket in layout.buckets] == case["buckets"], where
        assert list(layout.unpadded) == case["unpadded"], where

        packed = megatron_packed_layout(layout, params, policy=policy)
        assert [[slot.start, slot.end, slot.bucket] for slot in packed.slots] == case["packed_map"], where
        assert [list(bucket) for bucket in packed.buckets] == case["packed_buckets"], where
        assert packed.numel_unpadded == case["packed_numel_unpadded"], where


MISOWNED = [
    # Numels, dp_size, busbw, full elements, packed bytes, misowned elements: reference/quantized_buffers, section 3.5.
    ([4096, 3072, 1024], 2, False, 8192, 4096, 0),
    ([4096], 3, False, 4224, 2304, 384),
    ([65536], 2, True, 65536, 65536, 32768),
    ([4352], 256, False, 4352, 2304, 4199),
    ([16777216], 256, False, 16777216, 8388608, 0),
    ([196608], 8, True, 196608, 131072, 147456),
    ([2359296], 24, False, 2359296, 1179648, 0),
    ([16777216, 16777216, 16777216, 45088768], 8, False, 95420416, 47710208, 0),
]


@pytest.mark.parametrize(("numels", "dp_size", "busbw", "numel", "nbytes", "misowned"), MISOWNED)
def test_what_megatron_rule_loses(
    numels: Sequence[int], dp_size: int, busbw: bool, numel: int, nbytes: int, misowned: int
) -> None:
    layout, packed = plan_both(numels, dp_size, busbw=busbw)
    assert (layout.numel, packed.numel) == (numel, nbytes)
    assert misowned_elements(layout, packed, dp_size=dp_size) == misowned


@pytest.mark.parametrize(("numels", "dp_size", "busbw"), [row[:3] for row in MISOWNED])
def test_ours_loses_nothing_there(numels: Sequence[int], dp_size: int, busbw: bool) -> None:
    layout = plan(make_params(numels), LayoutPolicy.sharded(dp_size, pad_for_high_busbw=busbw, packed=True))
    packed = halve_layout(layout)
    assert 2 * packed.numel == layout.numel
    assert misowned_elements(layout, packed, dp_size=dp_size) == 0


def update_and_gather(layout: BufferLayout, packed: PackedLayout, dp_size: int) -> bytes:
    """The one parameter's bytes after a step: 0 where they are old, ``1 + rank`` where that rank's update arrived."""
    (full,), (half,) = layout.slots, packed.slots
    gathered = bytearray()
    for rank in range(dp_size):
        storage = bytearray(packed.numel)
        start, end = shard_bounds(layout.buckets[0], dp_size, rank)
        for element in range(max(start, full.start), min(end, full.end)):
            storage[half.start + (element - full.start) // 2] = 1 + rank
        start, end = shard_bounds(packed.buckets[0], dp_size, rank)
        gathered += storage[start:end]
    return bytes(gathered[half.start : half.end])


def test_half_a_tensor_never_receives_the_update_of_rank_1() -> None:
    """65536 elements fill the full bucket, but their 32768 bytes only rank 0's half of the packed one."""
    layout, packed = plan_both([65536], 2, busbw=True)
    assert (layout.buckets, packed.buckets) == (((0, 65536),), ((0, 65536),))
    assert packed.slots == (ParamSlot(0, 32768, 0),)
    assert misowned_elements(layout, packed, dp_size=2) == 32768
    assert update_and_gather(layout, packed, 2) == b"\1" * 16384 + b"\0" * 16384

    layout = plan(make_params([65536]), LayoutPolicy.sharded(2, pad_for_high_busbw=True, packed=True))
    packed = halve_layout(layout)
    assert (layout.buckets, packed.buckets) == (((0, 65536),), ((0, 32768),))
    assert packed.slots == (ParamSlot(0, 32768, 0),)
    assert misowned_elements(layout, packed, dp_size=2) == 0
    assert update_and_gather(layout, packed, 2) == b"\1" * 16384 + b"\2" * 16384


def test_fp8_beside_nvfp4_has_a_byte_per_element() -> None:
    policy = LayoutPolicy.sharded(2)
    params = (*make_params([256]), ParamSpec("w8", (256,), torch.bfloat16, quantized="fp8"))
    layout = plan(params, policy)
    packed = megatron_packed_layout(layout, params, policy=policy)
    assert layout.slots == (ParamSlot(256, 512, 0), ParamSlot(0, 256, 0))  # shards of 256 elements
    assert packed.slots == (ParamSlot(256, 384, 0), ParamSlot(0, 256, 0))  # shards of 192 bytes
    # Rank 1 owns and sends all of p0, and sends the last 64 bytes of w8, which rank 0 owns.
    assert misowned_elements(layout, packed, dp_size=2) == 64


# Units


@pytest.mark.parametrize(
    ("dp_size", "busbw", "expected", "megatron"),
    [
        (1, False, 128, 128),
        (3, False, 384, 384),
        (64, False, 128, 128),
        (100, False, 3200, 3200),
        (128, False, 256, 128),
        (384, False, 768, 384),
        (256, True, 2**16, 2**16),
        (2**16, True, 2**17, 2**16),
    ],
)
def test_packed_divisor(dp_size: int, busbw: bool, expected: int, megatron: int) -> None:
    assert bucket_end_divisor(dp_size, pad_for_high_busbw=busbw, packed=True) == expected
    assert bucket_end_divisor(dp_size, pad_for_high_busbw=busbw) == megatron


@pytest.mark.parametrize(("sharded", "nvfp4_end", "plain_end"), [(True, 512, 256), (False, 256, 64)])
def test_plans_pad_the_buffer_of_nvfp4_parameters_only(sharded: bool, nvfp4_end: int, plain_end: int) -> None:
    params = (
        ParamSpec("norm", (16,), torch.bfloat16),
        ParamSpec("weight", (16, 16), torch.bfloat16, quantized="nvfp4"),
    )
    layouts = plan_buckets(params, dp_size=256, sharded=sharded, bucket_size=None, grad_reduce_in_fp32=False).layouts
    assert {layout.key.param_dtype: layout.numel for layout in layouts} == {
        torch.uint8: nvfp4_end,
        torch.bfloat16: plain_end,
    }


@pytest.mark.parametrize("quantized", ["fp8", "mxfp8"])
def test_plans_pad_one_byte_per_element_as_megatron(quantized: Any) -> None:
    params = (ParamSpec("weight", (16, 16), torch.bfloat16, quantized=quantized),)
    (layout,) = plan_buckets(params, dp_size=256, sharded=True, bucket_size=None, grad_reduce_in_fp32=False).layouts
    assert (layout.key.param_dtype, layout.numel) == (torch.uint8, 256)


def test_halves_of_a_layout() -> None:
    params = make_params([256, 512, 768], shared=[1])
    packed = halve_layout(plan(params, LayoutPolicy.sharded(3, packed=True)))
    assert packed.buckets == ((0, 384), (384, 768), (768, 960))
    assert packed.slots == (ParamSlot(768, 896, 2), ParamSlot(384, 640, 1), ParamSlot(0, 384, 0))
    assert packed.unpadded == (384, 256, 128)
    assert (packed.numel, packed.numel_unpadded) == (960, 768)


def test_no_parameters() -> None:
    layout = plan((), LayoutPolicy.sharded(4, packed=True))
    for packed in (halve_layout(layout), megatron_packed_layout(layout, (), policy=LayoutPolicy.sharded(4))):
        assert packed == PackedLayout((), (), (), ())
        assert (packed.numel, packed.numel_unpadded) == (0, 0)
        assert misowned_elements(layout, packed, dp_size=4) == 0


# Errors


def test_halves_reject_an_odd_parameter() -> None:
    layout = plan(make_params([15, 64]), LayoutPolicy.sharded(2, packed=True))
    with pytest.raises(ValueError, match=r"parameter 0 has an odd position among \(64, 79\)"):
        halve_layout(layout)


@pytest.mark.parametrize(("end", "unpadded"), [(65, 64), (66, 63)])
def test_halves_reject_an_odd_bucket(end: int, unpadded: int) -> None:
    layout = BufferLayout(KEY, (0,), (0,), (ParamSlot(0, 64, 0),), ((0, end),), (unpadded,))
    with pytest.raises(ValueError, match=rf"bucket 0 has an odd position among \(0, {end}, {unpadded}\)"):
        halve_layout(layout)


def test_halves_of_megatron_padding_do_not_divide() -> None:
    """What ``packed=True`` is for: with 256 ranks, 4352 elements are 17 per rank."""
    layout = plan(make_params([4352]), LayoutPolicy.sharded(256))
    with pytest.raises(ValueError, match=r"bucket \[0, 2176\) does not divide by 256 ranks"):
        misowned_elements(layout, halve_layout(layout), dp_size=256)


def test_megatron_rule_rejects_an_odd_parameter() -> None:
    params, policy = make_params([64, 15]), LayoutPolicy.sharded(2)
    with pytest.raises(ValueError, match=r"NVFP4 parameter p1 has 15 elements; packing needs an even number"):
        megatron_packed_layout(plan(params, policy), params, policy=policy)


def test_megatron_rule_rejects_an_empty_bucket() -> None:
    layout = BufferLayout(KEY, (0,), (0,), (ParamSlot(128, 192, 1),), ((0, 128), (128, 256)), (0, 64))
    with pytest.raises(ValueError, match=r"buckets \[0\] have no parameter"):
        megatron_packed_layout(layout, make_params([64]), policy=LayoutPolicy.sharded(2))


def test_packed_layout_rejects_what_does_not_tile() -> None:
    with pytest.raises(ValueError, match=r"bucket 1 covers \[192, 256\) but must start at 128"):
        PackedLayout((4,), (ParamSlot(0, 64, 0),), ((0, 128), (192, 256)), (64, 0))
    with pytest.raises(ValueError, match=r"parameter 4 at .* leaves its bucket \[0, 128\)"):
        PackedLayout((4,), (ParamSlot(64, 129, 0),), ((0, 128),), (129,))
    with pytest.raises(ValueError, match=r"parameter 4 at .*start=63, end=100.* overlaps parameter 7 at .*end=64"):
        PackedLayout((4, 7), (ParamSlot(63, 100, 0), ParamSlot(0, 64, 0)), ((0, 128),), (100,))
    with pytest.raises(ValueError, match="2 params, 1 slots, 1 buckets"):
        PackedLayout((4, 7), (ParamSlot(0, 64, 0),), ((0, 128),), (64,))


def test_misowned_rejects_layouts_of_different_buffers() -> None:
    layout = plan(make_params([256, 256]), LayoutPolicy.sharded(2, packed=True))
    one = halve_layout(plan(make_params([512]), LayoutPolicy.sharded(2, packed=True)))
    with pytest.raises(ValueError, match=r"full layout has parameters \(0, 1\), the packed one \(0,\)"):
        misowned_elements(layout, one, dp_size=2)
    other = halve_layout(plan(make_params([256, 128]), LayoutPolicy.sharded(2, packed=True)))
    with pytest.raises(ValueError, match="parameter 1 has 256 elements in 64 bytes; expected one or two per byte"):
        misowned_elements(layout, other, dp_size=2)


# Properties


DP_SIZES = st.one_of(st.integers(1, 17), st.sampled_from([24, 48, 64, 100, 128, 256, 384, 1000, 1024]))
MATRICES = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 300)).map(lambda rows_columns: math.prod(rows_columns) * 256),
    min_size=1,
    max_size=6,
)
"""Numels of weights whose dims are multiples of 16, the block of an NVFP4 scale."""

# No deadline: the machines that run this are shared.
property_test = settings(deadline=None)


@property_test
@given(
    numels=MATRICES,
    shared=st.sets(st.integers(0, 5), max_size=2),
    dp_size=DP_SIZES,
    busbw=st.booleans(),
    bucket_size=st.one_of(st.none(), st.integers(1, 20_000_000)),
)
def test_ours_never_loses_an_update(
    numels: Sequence[int], shared: set[int], dp_size: int, busbw: bool, bucket_size: int | None
) -> None:
    policy = LayoutPolicy.sharded(dp_size, pad_for_high_busbw=busbw, packed=True)
    layout = plan(make_params(numels, sorted(shared)), policy, bucket_size)
    packed = halve_layout(layout)
    assert misowned_elements(layout, packed, dp_size=dp_size) == 0
    for full, half in zip(layout.buckets, packed.buckets, strict=True):
        for rank in {0, dp_size // 2, dp_size - 1}:
            elements, nbytes = shard_bounds(full, dp_size, rank), shard_bounds(half, dp_size, rank)
            assert elements == (2 * nbytes[0], 2 * nbytes[1])
    for slot, numel in zip(packed.slots, numels, strict=True):
        assert 2 * (slot.end - slot.start) == numel
        assert slot.start % 32 == 0
    megatron = bucket_end_divisor(dp_size, pad_for_high_busbw=busbw)
    is_more = dp_size % (2**16 if busbw else 128) == 0
    assert policy.bucket_divisor == (2 * megatron if is_more else megatron)


@property_test
@given(
    numels=st.lists(st.integers(0, 300).map(lambda half: 2 * half), min_size=1, max_size=5),
    dp_size=DP_SIZES,
    bucket_size=st.one_of(st.none(), st.integers(1, 600)),
)
def test_misowned_equals_the_count_one_by_one(numels: Sequence[int], dp_size: int, bucket_size: int | None) -> None:
    layout, packed = plan_both(numels, dp_size, bucket_size=bucket_size)
    count = 0
    for full, half in zip(layout.slots, packed.slots, strict=True):
        start, end = layout.buckets[full.bucket]
        packed_start, packed_end = packed.buckets[half.bucket]
        for element in range(full.end - full.start):
            # A bucket that holds an element has shards of at least one.
            owner = (full.start + element - start) // ((end - start) // dp_size)
            sender = (half.start + element // 2 - packed_start) // ((packed_end - packed_start) // dp_size)
            count += owner != sender
    assert misowned_elements(layout, packed, dp_size=dp_size) == count
