"""``runtime/layout.py`` against Megatron's results, then its invariants on random parameter lists. All exact."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_data import buffer_key, load, param_specs

from megabuf_fx.runtime.layout import (
    DEFAULT_BUCKET_SIZE,
    BufferKey,
    BufferLayout,
    LayoutPolicy,
    ParamGroup,
    ParamSlot,
    ParamSpec,
    bucket_end_divisor,
    compute_buffer_layout,
    group_params_for_buffers,
    pad_to_divisor,
    resolve_bucket_size,
)

KEY = BufferKey(torch.bfloat16, torch.float32)


def make_params(numels: Sequence[int], shared: Sequence[int] = ()) -> tuple[ParamSpec, ...]:
    """One-dimensional bf16 parameters ``p0, p1, ...``; those at ``shared`` are shared embeddings."""
    return tuple(ParamSpec(f"p{i}", (n,), torch.bfloat16, shared_embedding=i in shared) for i, n in enumerate(numels))


def plan(params: Sequence[ParamSpec], policy: LayoutPolicy, bucket_size: int | None) -> BufferLayout:
    (group,) = group_params_for_buffers(params, grad_reduce_in_fp32=True)
    return compute_buffer_layout(group, params, policy=policy, bucket_size=bucket_size)


# Megatron's results


@pytest.mark.parametrize("model", load("layouts")["models"])
def test_layouts_equal_megatron(model: str) -> None:
    params = param_specs(load("layouts")["models"][model])
    for case in load("layouts")["cases"]:
        if case["model"] == model:
            check_case(case, params)


def check_case(case: dict[str, Any], params: Sequence[ParamSpec]) -> None:
    groups = group_params_for_buffers(params, grad_reduce_in_fp32=case["grad_reduce_in_fp32"])
    assert len(groups) == len(case["groups"]), f"case {case['id']}"
    for group, expected in zip(groups, case["groups"]):
        where = f"case {case['id']} ({case['model']}), {group.key}"
        policy = LayoutPolicy.dense()
        if case["dist_opt"]:
            dp_size = case["edp"] if group.key.is_expert_parallel else case["dp"]
            policy = LayoutPolicy.sharded(dp_size, pad_for_high_busbw=case["busbw"])
        layout = compute_buffer_layout(group, params, policy=policy, bucket_size=case["bucket_size"])

        assert layout.key == group.key == buffer_key(expected["key"]), where
        assert list(layout.params) == list(group.params) == expected["params"], where
        assert list(layout.param_indices) == list(group.param_indices) == expected["param_indices"], where
        assert [[slot.start, slot.end, slot.bucket] for slot in layout.slots] == expected["map"], where
        assert [list(bucket) for bucket in layout.buckets] == expected["buckets"], where
        assert list(layout.unpadded) == expected["unpadded"], where
        assert layout.numel == expected["numel"], where
        assert layout.numel_unpadded == expected["numel_unpadded"], where
        # Order of Megatron's map = order in the buffer = reverse definition order (no parameter is empty here).
        assert expected["map_order"] == "reversed", where
        buffer_order = sorted(range(len(layout.slots)), key=lambda i: layout.slots[i].start)
        assert buffer_order == list(reversed(range(len(layout.slots)))), where


def test_layouts_oracle_is_complete() -> None:
    data = load("layouts")
    assert len(data["cases"]) == 804
    assert {case["model"] for case in data["cases"]} <= data["models"].keys()


def test_grouping_equals_megatron() -> None:
    cases = load("grouping")["group_params_for_buffers"]
    assert len(cases) == 120
    for number, case in enumerate(cases):
        groups = group_params_for_buffers(param_specs(case["params"]), grad_reduce_in_fp32=case["grad_reduce_in_fp32"])
        expected = tuple(
            ParamGroup(buffer_key(group["key"]), tuple(group["params"]), tuple(group["param_indices"]))
            for group in case["groups"]
        )
        assert groups == expected, f"case {number}"


def test_quantized_parameters_share_the_counter_of_their_logical_dtype() -> None:
    params = (
        ParamSpec("a", (4,), torch.bfloat16),
        ParamSpec("b", (4,), torch.bfloat16, quantized="fp8"),
        ParamSpec("c", (4,), torch.bfloat16),
        ParamSpec("d", (4,), torch.bfloat16, quantized="nvfp4"),
    )
    assert group_params_for_buffers(params, grad_reduce_in_fp32=False) == (
        ParamGroup(BufferKey(torch.bfloat16, torch.bfloat16), (0, 2), (0, 2)),
        ParamGroup(BufferKey(torch.uint8, torch.bfloat16), (1, 3), (1, 3)),
    )


def test_bucket_size_equals_megatron() -> None:
    # Fields that do not apply to ``resolve_bucket_size``:
    # * pp_rank, disable_bucketing: pipeline stages and model chunks are not known here. Megatron resolves the size,
    #   leaves it in the config (``ddp_config_bucket_size_after``) and only then overrides it with None
    #   (``ddp_bucket_size``), so the former is comparable in every row and the latter where nothing overrides.
    # * dp_cp: the default comes from the group that is passed as ``dp_size``; Megatron's DDP passes dp, its training
    #   script dp_cp.
    # * num_dense_groups, num_expert_groups: of ``partition_buckets``.
    # * num_buckets: Megatron's DDP ignores it, see the next test.
    rows = [row for row in load("grouping")["bucket_size_resolution"] if "num_buckets" not in row]
    assert len(rows) == 128
    for row in rows:
        size = resolve_bucket_size(
            bucket_size=row["bucket_size_in"],
            num_buckets=None,
            numel=10**12,
            dp_size=row["dp"],
            overlap_grad_reduce=row["overlap_grad_reduce"],
        )
        assert size == row["ddp_config_bucket_size_after"], row
        if row["pp_rank"] == 0 and not row["disable_bucketing"]:
            assert size == row["ddp_bucket_size"], row


@pytest.mark.parametrize(
    ("bucket_size", "num_buckets", "overlap", "expected"),
    [
        (None, 3, True, 333),
        (None, 5000, True, 1),  # more buckets than elements: a threshold of 0 would mean nothing
        (None, 3, False, None),
        (70, 3, True, 70),
        (None, None, True, DEFAULT_BUCKET_SIZE),
    ],
)
def test_num_buckets_follows_the_training_script(
    bucket_size: int | None, num_buckets: int | None, overlap: bool, expected: int | None
) -> None:
    """``num_parameters // num_buckets`` (semantics 2.7), unlike Megatron's DDP, which takes the default."""
    size = resolve_bucket_size(
        bucket_size=bucket_size, num_buckets=num_buckets, numel=1000, dp_size=4, overlap_grad_reduce=overlap
    )
    assert size == expected


# Units


@pytest.mark.parametrize(
    ("value", "divisor", "expected"),
    [
        (0, 64, 0),
        (1, 64, 64),
        (63, 64, 64),
        (64, 64, 64),
        (65, 64, 128),
        (7, 1, 7),
        (2**53 + 1, 2, 2**53 + 2),  # as floats, both are 2**53
        (3 * 2**60 + 1, 3, 3 * 2**60 + 3),
    ],
)
def test_pad_to_divisor(value: int, divisor: int, expected: int) -> None:
    assert pad_to_divisor(value, divisor) == expected


@pytest.mark.parametrize(
    ("dp_size", "busbw", "expected"),
    [
        (1, False, 128),
        (3, False, 384),
        (64, False, 128),
        (100, False, 3200),
        (256, False, 256),
        (1, True, 2**16),
        (3, True, 3 * 2**16),
        (2**17, True, 2**17),
    ],
)
def test_bucket_end_divisor(dp_size: int, busbw: bool, expected: int) -> None:
    assert bucket_end_divisor(dp_size, pad_for_high_busbw=busbw) == expected


def test_scalar_has_one_element() -> None:
    assert ParamSpec("scale", (), torch.float32).numel == 1


def test_no_parameters() -> None:
    assert group_params_for_buffers((), grad_reduce_in_fp32=True) == ()
    layout = compute_buffer_layout(ParamGroup(KEY, (), ()), (), policy=LayoutPolicy.sharded(4), bucket_size=None)
    assert (layout.buckets, layout.numel, layout.numel_unpadded) == ((), 0, 0)


def test_padding_before_a_shared_embedding_counts_as_unpadded() -> None:
    """Megatron pads the start, then closes the bucket there: 64 elements for a parameter of 10."""
    layout = plan(make_params([5, 200, 10], shared=[1]), LayoutPolicy.sharded(2), None)
    assert layout.buckets == ((0, 128), (128, 384), (384, 512))
    assert layout.slots == (ParamSlot(384, 389, 2), ParamSlot(128, 328, 1), ParamSlot(0, 10, 0))
    assert layout.unpadded == (64, 200, 5)


def test_shared_embedding_is_ordinary_without_sharding() -> None:
    layout = plan(make_params([5, 200, 10], shared=[1]), LayoutPolicy.dense(), None)
    assert layout.buckets == ((0, 215),)
    assert layout.unpadded == (215,)


def test_aligned_policy_aligns_odd_sizes() -> None:
    layout = plan(make_params([1, 63, 65, 13, 37, 129], shared=[2]), LayoutPolicy.aligned(), 100)
    # Buffer order: 129 | 37 13 65 | 63 1. The gap after 37 counts, yet 64 + 13 do not reach the threshold.
    assert layout.buckets == ((0, 192), (192, 448), (448, 576))
    assert layout.unpadded == (129, 128 + 65, 64 + 1)
    assert all(slot.start % 64 == 0 for slot in layout.slots)
    assert all(end % 64 == 0 for _, end in layout.buckets)


# Errors


def make_layout(
    *,
    slots: Sequence[ParamSlot] = (ParamSlot(64, 100, 0), ParamSlot(0, 64, 0)),
    buckets: Sequence[tuple[int, int]] = ((0, 128),),
    unpadded: Sequence[int] = (100,),
) -> BufferLayout:
    """A layout of the parameters 4 and 7, valid unless told otherwise."""
    return BufferLayout(KEY, (4, 7), (0, 1), tuple(slots), tuple(buckets), tuple(unpadded))


def test_layout_accepts_valid() -> None:
    assert make_layout().numel == 128


def test_layout_rejects_overlap_and_names_both_parameters() -> None:
    with pytest.raises(ValueError, match=r"parameter 4 at .*start=63, end=100.* overlaps parameter 7 at .*end=64"):
        make_layout(slots=[ParamSlot(63, 100, 0), ParamSlot(0, 64, 0)])


def test_layout_rejects_empty_parameter_inside_another() -> None:
    with pytest.raises(ValueError, match=r"parameter 4 at .* overlaps parameter 7 at"):
        make_layout(slots=[ParamSlot(5, 5, 0), ParamSlot(0, 64, 0)])


@pytest.mark.parametrize(
    "slot",
    [
        ParamSlot(64, 129, 0),  # past the end
        ParamSlot(64, 100, 1),  # in the other bucket
        ParamSlot(100, 64, 0),  # negative size
        ParamSlot(-1, 0, 0),
    ],
)
def test_layout_rejects_parameter_outside_its_bucket(slot: ParamSlot) -> None:
    with pytest.raises(ValueError, match=r"parameter 4 at .* leaves its bucket \[(0, 128|128, 256)\)"):
        make_layout(slots=[slot, ParamSlot(0, 64, 0)], buckets=[(0, 128), (128, 256)], unpadded=[100, 0])


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ([(64, 128)], r"bucket 0 covers \[64, 128\) but must start at 0"),
        ([(0, 128), (192, 256)], r"bucket 1 covers \[192, 256\) but must start at 128"),
        ([(0, 128), (64, 256)], r"bucket 1 covers \[64, 256\) but must start at 128"),
        ([(0, 128), (128, 64)], r"bucket 1 covers \[128, 64\)"),
    ],
)
def test_layout_rejects_buckets_that_do_not_tile(buckets: Sequence[tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_layout(buckets=buckets, unpadded=[0] * len(buckets))


def test_layout_rejects_unequal_lengths() -> None:
    with pytest.raises(ValueError, match="2 params, 1 slots, 1 buckets"):
        make_layout(slots=[ParamSlot(0, 64, 0)])
    with pytest.raises(ValueError, match="2 params, 2 slots, 1 buckets"):
        make_layout(unpadded=[50, 50])


# Properties


@dataclass(frozen=True)
class Planned:
    """A layout and what it was made from."""

    params: tuple[ParamSpec, ...]
    policy: LayoutPolicy
    dp_size: int
    bucket_size: int | None
    layout: BufferLayout

    def members(self, bucket: int) -> list[int]:
        """Parameters of the bucket, in buffer order."""
        return [i for i in reversed(range(len(self.params))) if self.layout.slots[i].bucket == bucket]

    def is_isolated(self, param: int) -> bool:
        return self.policy.isolate_shared_embedding and self.params[param].shared_embedding


NUMELS = st.one_of(
    st.sampled_from([0, 1, 63, 64, 65, 128]),
    st.integers(0, 5000),
    st.integers(2**53 - 1, 2**53 + 1000),  # not representable as a float
)
BUCKET_SIZES = st.one_of(st.none(), st.integers(1, 10_000), st.integers(2**53, 2**54))
DP_SIZES = st.one_of(st.integers(1, 17), st.sampled_from([24, 48, 64, 100, 1000, 1024]))


@st.composite
def planned(draw: st.DrawFn) -> Planned:
    numels = draw(st.lists(NUMELS, min_size=1, max_size=14))
    shared = draw(st.sets(st.integers(0, len(numels) - 1), max_size=2))
    params = make_params(numels, sorted(shared))
    dp_size = draw(DP_SIZES)
    sharded = LayoutPolicy.sharded(dp_size, pad_for_high_busbw=draw(st.booleans()))
    # Most of the rules are those of the sharded layout.
    policy = draw(st.sampled_from([sharded, sharded, LayoutPolicy.dense(), LayoutPolicy.aligned()]))
    bucket_size = draw(BUCKET_SIZES)
    return Planned(params, policy, dp_size, bucket_size, plan(params, policy, bucket_size))


# No deadline: the machines that run this are shared.
property_test = settings(deadline=None)


@property_test
@given(planned())
def test_parameters_lie_in_reverse_order_without_overlap(case: Planned) -> None:
    slots = case.layout.slots[::-1]
    for slot, following in itertools.pairwise(slots):
        assert slot.end <= following.start
        assert slot.bucket <= following.bucket <= slot.bucket + 1
    for slot in slots:
        start, end = case.layout.buckets[slot.bucket]
        assert start <= slot.start <= slot.end <= end
    assert (slots[0].bucket, slots[-1].bucket) == (0, len(case.layout.buckets) - 1)


@property_test
@given(planned())
def test_sizes_are_exact(case: Planned) -> None:
    assert [slot.end - slot.start for slot in case.layout.slots] == [param.numel for param in case.params]


@property_test
@given(planned())
def test_bucket_ends_divide(case: Planned) -> None:
    for _, end in case.layout.buckets:
        assert end % case.policy.bucket_divisor == 0
        if case.policy == LayoutPolicy.aligned():
            assert end % 64 == 0
        elif case.policy != LayoutPolicy.dense():
            assert end % case.dp_size == 0
            assert end % 128 == 0


@property_test
@given(planned())
def test_padding_is_least(case: Planned) -> None:
    """Nothing but the alignment separates neighbours, so the positions above are the only ones."""
    align = 1 if case.policy == LayoutPolicy.dense() else 64
    for bucket, (position, bucket_end) in enumerate(case.layout.buckets):
        for param in case.members(bucket):
            slot = case.layout.slots[param]
            assert slot.start % align == 0
            assert 0 <= slot.start - position < align
            position = slot.end
        assert 0 <= bucket_end - position < case.policy.bucket_divisor


@property_test
@given(planned())
def test_bucket_closes_once_it_reaches_the_threshold(case: Planned) -> None:
    threshold = math.inf if case.bucket_size is None else case.bucket_size
    last = len(case.layout.buckets) - 1
    for bucket, (start, _) in enumerate(case.layout.buckets):
        filled = [case.layout.slots[param].end - start for param in case.members(bucket)]
        assert all(numel < threshold for numel in filled[:-1])  # else it would have closed before
        is_isolated = case.is_isolated(case.members(bucket)[0])
        is_before_isolated = bucket < last and case.is_isolated(case.members(bucket + 1)[0])
        if bucket < last and not is_isolated and not is_before_isolated:
            assert filled[-1] >= threshold


@property_test
@given(planned())
def test_shared_embedding_is_alone(case: Planned) -> None:
    for param, slot in enumerate(case.layout.slots):
        if case.is_isolated(param):
            assert case.members(slot.bucket) == [param]
    if case.bucket_size is None:  # "one bucket" means one before, one of, and one after every embedding
        assert len(case.layout.buckets) <= 1 + 2 * sum(map(case.is_isolated, range(len(case.params))))


@property_test
@given(planned())
def test_unpadded_ends_with_the_last_parameter(case: Planned) -> None:
    for bucket, (start, _) in enumerate(case.layout.buckets):
        end = case.layout.slots[case.members(bucket)[-1]].end
        last = len(case.layout.buckets) - 1
        is_threshold_reached = case.bucket_size is not None and end - start >= case.bucket_size
        if bucket < last and case.is_isolated(case.members(bucket + 1)[0]):
            closed_itself = is_threshold_reached or case.is_isolated(case.members(bucket)[0])
            end = end if closed_itself else pad_to_divisor(end, 64)
        assert case.layout.unpadded[bucket] == end - start
    if case.policy == LayoutPolicy.dense():
        assert case.layout.numel == case.layout.numel_unpadded == sum(param.numel for param in case.params)


@property_test
@given(planned())
def test_same_input_gives_equal_and_hashable_plans(case: Planned) -> None:
    again = plan(case.params, case.policy, case.bucket_size)
    assert again == case.layout
    assert hash(again) == hash(case.layout)
