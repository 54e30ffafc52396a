"""``runtime/layerwise_layout.py`` against Megatron's results and unit tests, then its invariants. All exact.

Who owns what is in ``test_ownership.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle_data import buffer_key, load, param_specs
from trajectory_models import make_model

from megabuf_fx.runtime.layerwise_layout import (
    Ownership,
    compute_layerwise_layout,
    is_layer_wise,
    ownership_of,
    ping_pong_ownership,
    shard_divisor,
    tag_layer_wise,
)
from megabuf_fx.runtime.layout import (
    BufferKey,
    BufferLayout,
    LayoutPolicy,
    ParamSlot,
    ParamSpec,
    bucket_end_divisor,
    compute_buffer_layout,
    group_params_for_buffers,
)
from megabuf_fx.runtime.packed_layout import halve_layout, misowned_elements
from megabuf_fx.runtime.plan import plan_buckets
from megabuf_fx.runtime.shards import compute_shard_ranges, shard_bounds

BF16, FP32 = torch.bfloat16, torch.float32
ORACLE = load("layouts_layerwise")
EMBEDDING_OR_OUTPUT = frozenset({"embedding.word_embeddings.weight", "output_layer.weight"})
"""Those of the oracle's models; its random ones have none, not even where an embedding is shared."""


def make_params(numels: Sequence[int], shared: Sequence[int] = (), **fields: Any) -> tuple[ParamSpec, ...]:
    """Layer-wise bf16 parameters ``p0, p1, ...``; those at ``shared`` are shared embeddings."""
    fields = {"is_managed_by_layer_wise_optimizer": True, "dtype": BF16, **fields}
    return tuple(
        ParamSpec(f"p{i}", (1, numel), shared_embedding=i in shared, **fields) for i, numel in enumerate(numels)
    )


def plan(
    numels: Sequence[int],
    dp_size: int,
    bucket_size: int | None = None,
    *,
    shared: Sequence[int] = (),
    pad_for_high_busbw: bool = False,
) -> BufferLayout:
    params = make_params(numels, shared)
    (group,) = group_params_for_buffers(params, grad_reduce_in_fp32=True)
    return compute_layerwise_layout(
        group, params, dp_size=dp_size, bucket_size=bucket_size, pad_for_high_busbw=pad_for_high_busbw
    )


def places(layout: BufferLayout) -> list[tuple[int, int]]:
    return [(slot.start, slot.end) for slot in layout.slots]


# Megatron's results


def test_oracle_is_complete() -> None:
    assert len(ORACLE["cases"]) == 276
    tagged = [
        group["key"]["is_managed_by_layer_wise_optimizer"] for case in ORACLE["cases"] for group in case["groups"]
    ]
    assert (tagged.count(True), tagged.count(False)) == (417, 171)


@pytest.mark.parametrize("model", ORACLE["models"])
def test_layouts_equal_megatron(model: str) -> None:
    cases = [case for case in ORACLE["cases"] if case["model"] == model]
    assert cases
    for case in cases:
        params = tagged_params(case)
        assert [param.is_managed_by_layer_wise_optimizer for param in params] == case["tags"], case["id"]
        groups = group_params_for_buffers(params, grad_reduce_in_fp32=case["grad_reduce_in_fp32"])
        assert len(groups) == len(case["groups"]), case["id"]
        for group, expected in zip(groups, case["groups"]):
            dp_size = case["edp"] if group.key.is_expert_parallel else case["dp"]
            options: dict[str, Any] = {"bucket_size": case["bucket_size"]}
            if group.key.is_managed_by_layer_wise_optimizer:
                options |= {"dp_size": dp_size, "pad_for_high_busbw": case["busbw"]}
                layout = compute_layerwise_layout(group, params, **options)
            else:
                options["policy"] = LayoutPolicy.sharded(dp_size, pad_for_high_busbw=case["busbw"])
                layout = compute_buffer_layout(group, params, **options)
            check_layout(layout, expected, f"case {case['id']} ({case['model']}), {group.key}")


def tagged_params(case: dict[str, Any]) -> tuple[ParamSpec, ...]:
    params = param_specs(ORACLE["models"][case["model"]])
    if case["tagging"] == "rule":
        return tag_layer_wise(params, embedding_or_output=EMBEDDING_OR_OUTPUT)
    assert case["tagging"] == "all"
    return tuple(dataclasses.replace(param, is_managed_by_layer_wise_optimizer=True) for param in params)


def check_layout(layout: BufferLayout, expected: dict[str, Any], where: str) -> None:
    assert layout.key == buffer_key(expected["key"]), where
    assert list(layout.params) == expected["params"], where
    assert list(layout.param_indices) == expected["param_indices"], where
    assert [[slot.start, slot.end, slot.bucket] for slot in layout.slots] == expected["map"], where
    assert [list(bucket) for bucket in layout.buckets] == expected["buckets"], where
    assert list(layout.unpadded) == expected["unpadded"], where
    assert layout.numel == expected["numel"], where
    assert layout.numel_unpadded == expected["numel_unpadded"], where
    # Order of Megatron's map = order in the buffer (no parameter is empty here).
    by_start = [param for param, _ in sorted(zip(layout.params, layout.slots), key=lambda item: item[1].start)]
    order = expected["map_order"]
    assert by_start == (list(reversed(layout.params)) if order == "reversed" else order), where


def test_plans_have_the_layouts_of_megatron() -> None:
    """Tagged buffers keep parameters whole, others are the distributed optimizer's, experts have their own ranks."""
    for case in ORACLE["cases"]:
        found = plan_buckets(
            tagged_params(case),
            dp_size=case["dp"],
            expert_dp_size=case["edp"],
            sharded=True,
            bucket_size=case["bucket_size"],
            grad_reduce_in_fp32=case["grad_reduce_in_fp32"],
            pad_for_high_busbw=case["busbw"],
        )
        assert len(found.layouts) == len(case["groups"])
        for layout, expected in zip(found.layouts, case["groups"]):
            check_layout(layout, expected, f"case {case['id']} ({case['model']}), {layout.key}")


def trajectories(kind: str) -> list[dict[str, Any]]:
    runs = [run for run in load("trajectory")["runs"] if run["config"].get("layerwise") == kind]
    assert len(runs) == 8
    return runs


def trajectory_params(model: str) -> tuple[ParamSpec, ...]:
    """All tagged, as in those runs."""
    return tuple(
        ParamSpec(
            name,
            tuple(param.shape),
            BF16,
            shared_embedding=getattr(param, "shared_embedding", False),
            is_managed_by_layer_wise_optimizer=True,
        )
        for name, param in make_model(model).named_parameters()
    )


@pytest.mark.parametrize("run", trajectories("layout"), ids=lambda run: str(run["id"]))
def test_training_runs_of_megatron_have_this_layout(run: dict[str, Any]) -> None:
    config, world = run["config"], len(run["loss_per_rank"])
    params = trajectory_params(config["model"])
    found = plan_buckets(
        params,
        dp_size=world,
        sharded=True,
        bucket_size=config["bucket_size"] if config["overlap"] else None,
        grad_reduce_in_fp32=config["g32"],
    )
    (layout,), (expected,) = found.layouts, run["layout"]["dense"]
    slots = {
        params[index].name: [slot.start, slot.end, slot.bucket] for index, slot in zip(layout.params, layout.slots)
    }
    assert slots == expected["map"]
    assert [list(bucket) for bucket in layout.buckets] == expected["buckets"]
    assert (layout.numel, layout.numel_unpadded) == (expected["numel"], expected["numel_unpadded"])
    # Parameters are gathered in reverse of the groups: the head of the model first.
    gathered = [event[2] for event in run["trace_step1_rank0"] if event[:2] == ["coll", "all_gather"]]
    planned = [sum(bucket.numel for bucket in group.buckets) for group in found.groups]
    assert gathered == (planned[::-1] if config["overlap"] else planned)


# Tags


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("fc.weight", (3, 5), True),
        ("fc.weight", (1, 5), True),
        ("fc.weight", (3, 0), True),
        ("embedding.weight", (3, 5), False),
        ("head.weight", (3, 5), False),
        ("fc.bias", (5,), False),
        ("scale", (), False),
        ("conv.weight", (3, 5, 2, 2), False),
        ("experts.weight", (8, 3, 5), False),
    ],
)
def test_matrices_but_embeddings_and_outputs_are_layer_wise(name: str, shape: tuple[int, ...], expected: bool) -> None:
    names = frozenset({"embedding.weight", "head.weight", "frozen.weight"})
    param = ParamSpec(name, shape, BF16)
    assert is_layer_wise(param, embedding_or_output=names) is expected
    (tagged,) = tag_layer_wise([param], embedding_or_output=names)
    assert tagged == dataclasses.replace(param, is_managed_by_layer_wise_optimizer=expected)


def test_tags_keep_everything_else_and_replace_older_tags() -> None:
    param = ParamSpec("p", (4,), FP32, True, False, None, True)
    assert tag_layer_wise([param], embedding_or_output=set()) == (ParamSpec("p", (4,), FP32, True, False, None, False),)
    assert tag_layer_wise([], embedding_or_output=set()) == ()


# Megatron's unit tests (test_layer_wise_param_layout.py, semantics section 20)


@pytest.mark.parametrize("busbw", [False, True])
@pytest.mark.parametrize("dp_size", [1, 2, 4, 8])
def test_shard_divisor_divides_buckets(dp_size: int, busbw: bool) -> None:
    divisor = shard_divisor(dp_size, pad_for_high_busbw=busbw)
    assert divisor % 64 == 0
    assert dp_size * divisor % bucket_end_divisor(dp_size, pad_for_high_busbw=busbw) == 0


@pytest.mark.parametrize(
    ("dp_size", "busbw", "expected"),
    [(1, False, 128), (2, False, 64), (3, False, 128), (256, False, 64), (4, True, 2**14), (3, True, 2**16)],
)
def test_shard_divisor(dp_size: int, busbw: bool, expected: int) -> None:
    assert shard_divisor(dp_size, pad_for_high_busbw=busbw) == expected


def test_equal_parameters_are_spread_evenly() -> None:
    assert ownership_of(plan([256] * 8, 4), 4).by_rank == ((3, 7), (2, 6), (1, 5), (0, 4))
    assert plan([256] * 8, 4).numel == 8 * 256


def test_the_first_shard_takes_the_fifth_of_four_ranks() -> None:
    assert ownership_of(plan([256] * 5, 4), 4).by_rank == ((0, 4), (3,), (2,), (1,))


def test_no_parameter_is_cut() -> None:
    layout = plan([100, 200, 100, 200, 100], 2)
    assert ownership_of(layout, 2).by_rank == ((0, 3, 4), (1, 2))
    assert places(layout) == [(384, 484), (512, 712), (768, 868), (0, 200), (256, 356)]


def test_equal_sizes_share_a_bucket() -> None:
    layout = plan([256, 64] * 4, 4)
    assert len(layout.buckets) == 1
    assert ownership_of(layout, 4).by_rank == ((6, 7), (4, 5), (2, 3), (0, 1))


def test_small_parameters_fill_the_shards_beside_a_big_one() -> None:
    layout = plan([128, 128, 128, 1024], 4)
    assert layout.buckets == ((0, 4096),)
    assert ownership_of(layout, 4).by_rank == ((3,), (2,), (1,), (0,))


def test_shared_embedding_is_alone_in_the_first_shard() -> None:
    layout = plan([128] * 5, 2, shared=[0])
    assert layout.buckets == ((0, 512), (512, 768))
    assert [slot.bucket for slot in layout.slots] == [1, 0, 0, 0, 0]
    assert layout.slots[0] == ParamSlot(512, 640, 1)


@pytest.mark.parametrize("dp_size", [2, 4, 8])
def test_shared_embedding_fits_into_one_shard_of_many_ranks(dp_size: int) -> None:
    layout = plan([1024], dp_size, shared=[0])
    assert layout.buckets == ((0, dp_size * 1024),)
    assert ownership_of(layout, dp_size).by_rank == ((0,), *[()] * (dp_size - 1))


def test_shared_embeddings_close_the_bucket_before_and_start_another() -> None:
    """The size that was reached before an embedding does not count after it, nor does the largest parameter."""
    layout = plan([64, 128, 128, 64, 128, 1280], 2, 256, shared=[3])
    assert [slot.bucket for slot in layout.slots] == [3, 2, 2, 1, 0, 0]
    assert plan([64, 64], 1, shared=[0, 1]).buckets == ((0, 128), (128, 256))


def test_bucket_size_cuts_buckets() -> None:
    layout = plan([256] * 8, 2, 2 * 256)
    assert layout.buckets == ((0, 512), (512, 1024), (1024, 1536), (1536, 2048))
    assert [slot.bucket for slot in layout.slots] == [3, 3, 2, 2, 1, 1, 0, 0]


@pytest.mark.parametrize("dp_size", [2, 4, 8])
def test_buckets_divide_by_the_ranks(dp_size: int) -> None:
    layout = plan([333] * 2 * dp_size, dp_size)
    assert layout.buckets == ((0, dp_size * 768),)  # 333 at 384 ends at 717
    assert layout.unpadded == (2 * dp_size * 333,)


def test_bucket_ends_are_aligned() -> None:
    assert plan([333] * 8, 4, 700).buckets == ((0, 1536), (1536, 3072))
    assert plan([333] * 8, 4, 700, pad_for_high_busbw=True).buckets == ((0, 2**16), (2**16, 2**17))


def test_equal_sizes_of_a_shard_are_in_reverse_definition_order() -> None:
    layout = plan([128] * 6, 2)
    assert places(layout) == [(640, 768), (256, 384), (512, 640), (128, 256), (384, 512), (0, 128)]


def test_one_rank_has_everything() -> None:
    layout = plan([100] * 5, 1)
    assert places(layout) == [(512, 612), (384, 484), (256, 356), (128, 228), (0, 100)]
    assert ownership_of(layout, 1).by_rank == ((0, 1, 2, 3, 4),)


def test_one_parameter_leaves_shards_empty() -> None:
    layout = plan([512], 4)
    assert (layout.buckets, layout.unpadded) == (((0, 2048),), (512,))
    assert ownership_of(layout, 4).by_rank == ((0,), (), (), ())


def test_all_parameters_are_there() -> None:
    layout = plan([64, 128, 256, 64, 128, 256, 64], 4)
    assert [end - start for start, end in places(layout)] == [64, 128, 256, 64, 128, 256, 64]


def test_buffers_of_experts_are_apart() -> None:
    """Each has positions from 0 and ranks of its own."""
    params = (*make_params([256, 256]), *make_params([256], allreduce=False), *make_params([256], dtype=FP32))
    found = plan_buckets(params, dp_size=4, expert_dp_size=2, sharded=True, bucket_size=None, grad_reduce_in_fp32=True)
    assert [layout.key for layout in found.layouts] == [
        BufferKey(BF16, FP32, False, True),
        BufferKey(BF16, FP32, True, True),
        BufferKey(FP32, FP32, False, True),
    ]
    assert [layout.buckets for layout in found.layouts] == [((0, 1024),), ((0, 512),), ((0, 1024),)]


# Units


def test_largest_come_first_and_ends_are_not_padded_before_they_are_compared() -> None:
    """Rank 0 ends at 65 and rank 1 at 66, so rank 0 takes the third, though both would start it at 128."""
    layout = plan([1, 65, 66], 2)
    assert places(layout) == [(320, 321), (192, 257), (0, 66)]
    assert layout.buckets == ((0, 384),)


def test_nine_tenths_of_a_full_bucket_close_it() -> None:
    """Eight ranks and a parameter of 100: 720 elements close the bucket where the size alone would have at 10."""
    sizes = [1, 1, *[100] * 6, 20, 100]  # reversed: 100 20 100 ... is 720 with the last 100
    assert [slot.bucket for slot in plan(sizes, 8, 10).slots] == [1, 1, *[0] * 8]
    assert [slot.bucket for slot in plan([1, *sizes[1:8], 19, 100], 8, 10).slots] == [1, 0, *[0] * 8]
    assert len(plan(sizes, 8).buckets) == 1


def test_the_largest_parameter_is_that_of_the_bucket() -> None:
    assert [slot.bucket for slot in plan([10, 10, 1000], 2, 15).slots] == [0, 0, 0]  # 1800 would do
    assert [slot.bucket for slot in plan([10, 10, 1000, 1000], 2, 15).slots] == [1, 1, 0, 0]


@settings(deadline=None, max_examples=1000)
@given(st.one_of(st.integers(0, 2**50 - 1), st.integers(0, 2**46).map(lambda tenth: 10 * tenth)))
@example(2**50 - 1)
def test_nine_tenths_equal_megatrons_floats(full: int) -> None:
    assert int(full * 0.9) == full * 9 // 10


def test_nine_tenths_equal_megatrons_floats_at_the_ends() -> None:
    for full in (*range(100_000), *range(2**50 - 100_000, 2**50)):
        assert int(full * 0.9) == full * 9 // 10
    # Past that, floats jump over the bound; no buffer has as many elements.
    assert any(int(full * 0.9) != full * 9 // 10 for full in range(2**51, 2**51 + 100))


def test_parameters_without_elements() -> None:
    layout = plan([0, 128, 0], 1)
    assert places(layout) == [(128, 128), (0, 128), (128, 128)]
    assert ownership_of(layout, 1).by_rank == ((0, 1, 2),)
    empty = plan([0, 0], 4, 1)
    assert (empty.buckets, empty.unpadded) == (((0, 0),), (0,))
    assert ownership_of(empty, 4).by_rank == ((0, 1), (), (), ())


def test_not_sharded_buffers_are_ordinary() -> None:
    """Gradients are reduced everywhere and whole parameters sent from their owners, so nothing is placed for them."""
    params = make_params([100, 200, 300])
    options: dict[str, Any] = {"dp_size": 2, "sharded": False, "bucket_size": None, "grad_reduce_in_fp32": True}
    (group,) = group_params_for_buffers(params, grad_reduce_in_fp32=True)
    for dense in (False, True):
        policy = LayoutPolicy.dense() if dense else LayoutPolicy.aligned()
        (layout,) = plan_buckets(params, dense=dense, **options).layouts
        assert layout == compute_buffer_layout(group, params, policy=policy, bucket_size=None)


def test_shards_list_parameters_by_position() -> None:
    """Not in reverse definition order: neighbours are joined into runs, which would be other parameters."""
    layout = plan([300, 100, 200], 1)
    ranges = compute_shard_ranges(layout, dp_size=1, dp_rank=0)
    assert [(owned.param, owned.start) for owned in ranges] == [(0, 0), (2, 320), (1, 576)]


def test_wrong_group_is_refused() -> None:
    params = make_params([4], is_managed_by_layer_wise_optimizer=False)
    (group,) = group_params_for_buffers(params, grad_reduce_in_fp32=True)
    with pytest.raises(ValueError, match=r"is_managed_by_layer_wise_optimizer=False.* is not managed by a layer-wise"):
        compute_layerwise_layout(group, params, dp_size=2, bucket_size=None)


@pytest.mark.parametrize("dp_size", [0, -1])
def test_no_rank_is_refused(dp_size: int) -> None:
    message = f"{dp_size} ranks cannot own parameters"
    with pytest.raises(ValueError, match=message):
        plan([4], dp_size)
    with pytest.raises(ValueError, match=message):
        ping_pong_ownership(make_params([4]), dp_size)
    with pytest.raises(ValueError, match=message):
        Ownership(dp_size, (), ())


# Properties


@dataclasses.dataclass(frozen=True)
class Planned:
    """A layout and what it was made from."""

    numels: tuple[int, ...]
    shared: tuple[int, ...]
    dp_size: int
    bucket_size: int | None
    busbw: bool
    layout: BufferLayout

    @property
    def members(self) -> list[list[int]]:
        """Parameters of each bucket, in reverse definition order."""
        buckets = [slot.bucket for slot in self.layout.slots]
        return [
            [i for i in reversed(range(len(buckets))) if buckets[i] == bucket]
            for bucket in range(len(self.layout.buckets))
        ]


@st.composite
def planned(draw: st.DrawFn) -> Planned:
    numel = st.one_of(st.integers(0, 300), st.sampled_from([64, 128, 5000]), st.integers(2**53, 2**53 + 99))
    numels = tuple(draw(st.lists(numel, max_size=24)))
    shared = tuple(i for i in range(len(numels)) if draw(st.integers(0, 9)) == 0)
    dp_size = draw(st.one_of(st.integers(1, 9), st.sampled_from([16, 24, 128, 192])))
    bucket_size = draw(st.one_of(st.none(), st.integers(1, 3000)))
    busbw = draw(st.booleans())
    params = make_params(numels, shared)
    layout = (
        plan(numels, dp_size, bucket_size, shared=shared, pad_for_high_busbw=busbw)
        if params
        else BufferLayout(BufferKey(BF16, FP32, False, True), (), (), (), (), ())
    )
    return Planned(numels, shared, dp_size, bucket_size, busbw, layout)


property_test = settings(deadline=None, max_examples=200)  # the machines that run this are shared


@property_test
@given(planned())
def test_every_parameter_is_inside_one_shard(case: Planned) -> None:
    owned = ownership_of(case.layout, case.dp_size)  # which refuses a cut one
    assert owned.params == case.layout.params
    for param, slot in enumerate(case.layout.slots):
        start, end = shard_bounds(case.layout.buckets[slot.bucket], case.dp_size, owned.owners[param])
        assert slot.end - slot.start == case.numels[param]
        if case.numels[param]:
            assert start <= slot.start < slot.end <= end
    for rank, mine in enumerate(owned.by_rank):
        ranges = compute_shard_ranges(case.layout, dp_size=case.dp_size, dp_rank=rank)
        assert list(ranges) == sorted(ranges, key=lambda piece: piece.start)
        assert sorted(piece.param for piece in ranges) == [param for param in mine if case.numels[param]]
        assert all(piece.numel == case.numels[piece.param] for piece in ranges)


@property_test
@given(planned())
def test_buckets_tile_and_everything_is_aligned(case: Planned) -> None:
    position = 0
    for start, end in case.layout.buckets:
        assert start == position <= end
        assert (end - start) % case.dp_size == 0
        assert (end - start) // case.dp_size % 64 == 0
        assert end % bucket_end_divisor(case.dp_size, pad_for_high_busbw=case.busbw) == 0
        position = end
    assert case.layout.numel == position
    assert all(slot.start % 64 == 0 for slot in case.layout.slots)
    by_place = sorted(case.layout.slots, key=lambda slot: (slot.start, slot.end))
    assert all(left.end <= right.start for left, right in itertools.pairwise(by_place))
    assert case.layout.unpadded == tuple(sum(case.numels[i] for i in members) for members in case.members)


@property_test
@given(planned())
def test_buckets_follow_the_backward(case: Planned) -> None:
    """Runs of reverse definition order; each closes with the parameter that reaches the bound, or at an embedding."""
    assert [i for members in case.members for i in members] == list(reversed(range(len(case.numels))))
    for bucket, members in enumerate(case.members):
        if set(members) & set(case.shared):
            assert len(members) == 1
            continue

        def is_reached(run: Sequence[int], case: Planned = case) -> bool:
            full = case.dp_size * max(case.numels[i] for i in run)
            numel = sum(case.numels[i] for i in run)
            return case.bucket_size is not None and numel >= case.bucket_size and 10 * (numel + 1) > 9 * full

        assert not any(is_reached(members[:count]) for count in range(1, len(members)))
        following = case.members[bucket + 1] if bucket + 1 < len(case.members) else None
        if following and following[0] not in case.shared:
            assert is_reached(members)


@property_test
@given(planned())
def test_shards_are_balanced_and_packed(case: Planned) -> None:
    """The fullest shard was the least filled when its last and smallest parameter came, so it leads by that at most."""
    owned = ownership_of(case.layout, case.dp_size).owners
    divisor = shard_divisor(case.dp_size, pad_for_high_busbw=case.busbw)
    for (start, end), members in zip(case.layout.buckets, case.members):
        shard = (end - start) // case.dp_size
        filled, last = [0] * case.dp_size, [0] * case.dp_size
        sized = [i for i in members if case.numels[i]]
        for i in sorted(sized, key=lambda i: case.layout.slots[i].start):
            slot, rank = case.layout.slots[i], owned[i]
            offset = slot.start - start - rank * shard
            assert 0 <= offset - filled[rank] < 64  # nothing but alignment between neighbours
            assert not last[rank] or case.numels[i] <= last[rank]  # largest first
            filled[rank], last[rank] = offset + case.numels[i], case.numels[i]
        fullest = max(filled)
        if sized:
            assert fullest - min(filled) < 64 + last[filled.index(fullest)]
        if len(sized) == len(members):  # a parameter without elements can push the end to the next multiple of 64
            assert 0 <= shard - fullest < divisor


@property_test
@given(planned())
def test_plans_of_layer_wise_buffers(case: Planned) -> None:
    """Beside an ordinary buffer: groups still go by the parameter nearest to the head, and digests agree."""
    layer_wise = make_params(case.numels, case.shared)
    params = [
        param
        for pair in zip(layer_wise, make_params([70] * len(layer_wise), is_managed_by_layer_wise_optimizer=False))
        for param in pair
    ]
    options: dict[str, Any] = {
        "dp_size": case.dp_size,
        "sharded": True,
        "bucket_size": case.bucket_size,
        "grad_reduce_in_fp32": True,
        "pad_for_high_busbw": case.busbw,
    }
    found = plan_buckets(params, **options)
    assert found == plan_buckets(params, **options)
    assert found.digest == plan_buckets(params, **options).digest
    heads = [min(group.params) for group in found.groups]
    assert heads == sorted(heads, reverse=True)
    assert sorted(param for group in found.groups for param in group.params) == list(range(len(params)))
    if params:
        mine, other = found.layouts
        assert mine.params == tuple(range(0, len(params), 2))
        assert (mine.slots, mine.buckets) == (case.layout.slots, case.layout.buckets)
        assert not other.key.is_managed_by_layer_wise_optimizer
    for group in found.groups:
        for bucket in group.buckets:
            assert list(bucket.params) == sorted(bucket.params, reverse=True)
    for buffer in range(len(found.layouts)):
        indices = [b.index for group in found.groups for b in group.buckets if b.buffer == buffer]
        assert indices == list(range(len(found.layouts[buffer].buckets)))


@property_test
@given(
    rows=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    dp_size=st.one_of(st.integers(1, 9), st.sampled_from([128, 256])),
    bucket_size=st.one_of(st.none(), st.integers(1, 3000)),
)
def test_packed_buffers_lose_no_update(rows: list[int], dp_size: int, bucket_size: int | None) -> None:
    """Half of a shard of elements is a shard of bytes, whatever the number of ranks."""
    params = make_params([16 * count for count in rows], quantized="nvfp4")
    found = plan_buckets(params, dp_size=dp_size, sharded=True, bucket_size=bucket_size, grad_reduce_in_fp32=True)
    (layout,) = found.layouts
    assert misowned_elements(layout, halve_layout(layout), dp_size=dp_size) == 0
