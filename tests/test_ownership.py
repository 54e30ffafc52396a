"""Who owns which whole parameter (``runtime/layerwise_layout.py``): by a layout, or dealt without one.

The latter is compared with what Megatron's layer-wise training runs sent.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_layerwise_layout import make_params, property_test, trajectories, trajectory_params

from megabuf_fx.runtime.layerwise_layout import Ownership, ownership_of, ping_pong_ownership
from megabuf_fx.runtime.layout import (
    BufferKey,
    BufferLayout,
    LayoutPolicy,
    ParamSlot,
    compute_buffer_layout,
    group_params_for_buffers,
)
from megabuf_fx.runtime.plan import plan_buckets

BF16, FP32 = torch.bfloat16, torch.float32


def test_ownership() -> None:
    owned = Ownership(3, (4, 9, 2), (2, 0, 2))
    assert owned.by_rank == ((9,), (), (4, 2))
    assert owned.owners == {4: 2, 9: 0, 2: 2}
    assert owned == Ownership(3, (4, 9, 2), (2, 0, 2))
    assert hash(owned) == hash(Ownership(3, (4, 9, 2), (2, 0, 2)))
    assert Ownership(2, (), ()).by_rank == ((), ())
    with pytest.raises(dataclasses.FrozenInstanceError):
        owned.dp_size = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("params", "ranks", "message"),
    [
        ((4, 5), (0,), "2 parameters have 1 owners"),
        ((4, 5), (0, 2), "parameter 5 belongs to rank 2, not one of 2 ranks"),
        ((4, 5), (-1, 1), "parameter 4 belongs to rank -1, not one of 2 ranks"),
        ((4, 5, 4), (0, 1, 1), "parameter 4 has two owners, ranks 0 and 1"),
        ((4, 4), (1, 1), "parameter 4 has two owners, ranks 1 and 1"),
    ],
)
def test_ownership_is_checked(params: tuple[int, ...], ranks: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ownership(2, params, ranks)


def test_a_cut_parameter_has_no_owner() -> None:
    params = make_params([10, 300, 10], is_managed_by_layer_wise_optimizer=False)
    (group,) = group_params_for_buffers(params, grad_reduce_in_fp32=True)
    layout = compute_buffer_layout(group, params, policy=LayoutPolicy.sharded(4), bucket_size=5)
    assert layout.slots[1] == ParamSlot(128, 428, 1)
    assert layout.buckets[1] == (128, 512)
    message = r"parameter 1 at \[128, 428\) of bucket 1 crosses shards of 96 elements from rank 0 to rank 3"
    with pytest.raises(ValueError, match=message):
        ownership_of(layout, 4)
    with pytest.raises(ValueError, match=r"bucket \[512, 640\) does not divide by 7 ranks"):
        ownership_of(layout, 7)


def test_one_element_over_the_boundary_is_a_cut() -> None:
    def layout(*slots: tuple[int, int]) -> BufferLayout:
        key = BufferKey(BF16, FP32)
        members = tuple(range(len(slots)))
        return BufferLayout(key, members, members, tuple(ParamSlot(*slot, 0) for slot in slots), ((0, 256),), (256,))

    assert ownership_of(layout((0, 128), (128, 256)), 2) == Ownership(2, (0, 1), (0, 1))
    with pytest.raises(ValueError, match=r"parameter 1 at \[127, 256\) .* from rank 0 to rank 1"):
        ownership_of(layout((0, 127), (127, 256)), 2)
    with pytest.raises(ValueError, match=r"parameter 0 at \[0, 129\) .* from rank 0 to rank 1"):
        ownership_of(layout((0, 129), (129, 256)), 2)


def test_ordinary_layouts_can_be_owned_where_no_parameter_is_cut() -> None:
    params = make_params([128, 128], is_managed_by_layer_wise_optimizer=False)
    found = plan_buckets(params, dp_size=2, sharded=True, bucket_size=None, grad_reduce_in_fp32=True)
    assert ownership_of(found.layouts[0], 2) == Ownership(2, (0, 1), (1, 0))


def test_ownership_keeps_the_indices_of_specs() -> None:
    params = make_params([128] * 6)
    mixed = [dataclasses.replace(param, dtype=FP32 if i % 2 else BF16) for i, param in enumerate(params)]
    found = plan_buckets(mixed, dp_size=2, sharded=True, bucket_size=None, grad_reduce_in_fp32=False)
    assert [ownership_of(layout, 2).by_rank for layout in found.layouts] == [((0, 4), (2,)), ((1, 5), (3,))]


def test_ping_pong() -> None:
    """The example in Megatron's docstring."""
    owned = ping_pong_ownership(make_params(range(10, 20)), 4)
    assert owned.by_rank == ((0, 7, 8), (1, 6, 9), (2, 5), (3, 4))


def test_ping_pong_sorts_by_size_and_keeps_the_order_of_equals() -> None:
    params = make_params([30, 10, 20, 10, 30, 10])
    assert ping_pong_ownership(params, 2) == Ownership(2, (1, 3, 5, 2, 0, 4), (0, 1, 1, 0, 0, 1))
    assert ping_pong_ownership(params, 2, members=[5, 4, 3]).params == (5, 3, 4)


def test_ping_pong_turns_back_again() -> None:
    assert ping_pong_ownership(make_params([1] * 7), 2).ranks == (0, 1, 1, 0, 0, 1, 1)
    assert ping_pong_ownership(make_params([1] * 3), 1).ranks == (0, 0, 0)


def test_ping_pong_deals_experts_apart() -> None:
    params = [dataclasses.replace(param, allreduce=i % 2 == 0) for i, param in enumerate(make_params(range(1, 9)))]
    assert ping_pong_ownership(params, 3).by_rank == ((0,), (2,), (4, 6))
    assert ping_pong_ownership(params, 2, is_expert=True).by_rank == ((1, 7), (3, 5))
    assert ping_pong_ownership(params, 2, is_expert=True, members=[0, 5]).by_rank == ((5,), ())


def test_ping_pong_refuses_a_parameter_twice() -> None:
    with pytest.raises(ValueError, match="parameter 0 has two owners, ranks 0 and 1"):
        ping_pong_ownership(make_params([4]), 2, members=[0, 0])


@property_test
@given(
    numels=st.lists(st.integers(0, 300), max_size=30),
    dp_size=st.integers(1, 9),
    experts=st.sets(st.integers(0, 29)),
)
def test_ping_pong_deals_every_parameter_once(numels: list[int], dp_size: int, experts: set[int]) -> None:
    params = [dataclasses.replace(p, allreduce=i not in experts) for i, p in enumerate(make_params(numels))]
    dealt = [ping_pong_ownership(params, dp_size, is_expert=is_expert) for is_expert in (False, True)]
    assert sorted(i for owned in dealt for i in owned.params) == list(range(len(params)))
    for is_expert, owned in zip((False, True), dealt):
        assert all(params[i].allreduce != is_expert for i in owned.params)
        counts = [len(mine) for mine in owned.by_rank]
        assert max(counts) - min(counts) <= 1
        # There and back evens out all but the range of the sizes dealt; the last turn can end before it has come back.
        loads = [sum(numels[i] for i in mine) for mine in owned.by_rank]
        assert max(loads) - min(loads) <= 2 * max((numels[i] for i in owned.params), default=0)


@pytest.mark.parametrize("run", trajectories("legacy"), ids=lambda run: str(run["id"]))
def test_training_runs_of_megatron_have_this_ping_pong(run: dict[str, Any]) -> None:
    """Without a layout each rank sends what it owns: of every bucket in turn, or of all at once."""
    config, world = run["config"], len(run["loss_per_rank"])
    params = trajectory_params(config["model"])
    owned = ping_pong_ownership(params, world).by_rank
    found = plan_buckets(
        params,
        dp_size=world,
        sharded=False,
        dense=True,
        bucket_size=config["bucket_size"] if config["overlap"] else None,
        grad_reduce_in_fp32=config["g32"],
    )
    sent = [
        [sum(params[index].numel for index in mine if index in group.params) for mine in owned]
        for group in reversed(found.groups)
    ]
    assert sent == [event[2] for event in run["trace_step1_rank0"] if event[:2] == ["coll", "all_gather_v"]]
