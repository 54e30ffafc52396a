"""``runtime/step_state.py``: what the host knows of a step. No tensors anywhere."""

from __future__ import annotations

import gc

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megabuf_fx.runtime.layout import ParamSpec
from megabuf_fx.runtime.plan import BucketPlan, plan_buckets
from megabuf_fx.runtime.step_state import ForwardToken, StepState


def make_plan(count: int = 5, bucket_size: int = 200) -> BucketPlan:
    """Parameters of 100 elements, two to a bucket: group 0 holds the last two."""
    specs = [ParamSpec(f"p{i}", (100,), torch.float32) for i in range(count)]
    return plan_buckets(specs, dp_size=1, sharded=True, bucket_size=bucket_size, grad_reduce_in_fp32=False)


def test_new_state() -> None:
    state = StepState(make_plan())
    assert [group.params for group in state.plan.groups] == [(4, 3), (2, 1), (0,)]
    assert state.written == set()
    assert not state.is_unsynced
    assert state.eager_params == set()
    assert not any(state.is_complete(group, by_count=False) for group in range(3))
    assert not state.is_awaited((0, 0))


def test_group_is_complete_when_all_its_parameters_have_arrived() -> None:
    state = StepState(make_plan())
    state.mark_arrived(4)
    assert not state.is_complete(0, by_count=False)
    state.mark_arrived(4)
    assert not state.is_complete(0, by_count=False), "a parameter counts once, however often its node runs"
    state.mark_arrived(3)
    assert [state.is_complete(group, by_count=False) for group in range(3)] == [True, False, False]
    state.mark_arrived(0)
    assert [state.is_complete(group, by_count=False) for group in range(3)] == [True, False, True]


def test_reset_forgets_the_step_and_keeps_what_was_learned() -> None:
    state = StepState(make_plan())
    token = ForwardToken([(0, 1)])
    state.open_forward(token)
    state.eager_params.add(2)
    state.written.add(1)
    state.is_unsynced = True
    for param in range(5):
        state.mark_arrived(param)
    state.reset()
    assert state.written == set()
    assert not state.is_unsynced
    assert not any(state.is_complete(group, by_count=False) for group in range(3))
    assert state.eager_params == {2}
    assert state.is_awaited((0, 1)), "the backward of that forward can still come"


def test_reopen_keeps_what_is_written() -> None:
    state = StepState(make_plan())
    state.written.add(1)
    state.is_unsynced = True
    for param in (3, 4):
        state.mark_arrived(param)
    state.reopen()
    assert state.written == {1}
    assert state.is_unsynced
    assert not state.is_complete(0, by_count=False)
    state.mark_arrived(3)
    state.mark_arrived(4)
    assert state.is_complete(0, by_count=False)


def test_forwards_are_awaited_by_group_and_by_model() -> None:
    state = StepState(make_plan())
    first, second = ForwardToken([(0, 0), (0, 1)]), ForwardToken([(0, 1), (3, 2)])
    state.open_forward(first)
    state.open_forward(second)
    assert [state.is_awaited((0, group)) for group in range(3)] == [True, True, False]
    assert state.is_awaited((3, 2))
    # Seen from the backward of the first one: only the second can still come.
    assert state.awaited(besides=first) == {(0, 1), (3, 2)}
    assert state.awaited(besides=second) == {(0, 0), (0, 1)}
    state.close_forward(first)
    assert not state.is_awaited((0, 0))
    assert state.is_awaited((0, 1))
    state.close_forward(second)
    assert not state.is_awaited((0, 1))
    state.close_forward(second)  # closing again is harmless


def test_dropped_forward_is_not_awaited() -> None:
    """The token hangs on the autograd node; when the result is dropped, both go."""
    state = StepState(make_plan())
    token = ForwardToken([(0, 0)])
    state.open_forward(token)
    state.open_forward(ForwardToken([(0, 1)]))
    gc.collect()
    assert state.is_awaited((0, 0))
    assert not state.is_awaited((0, 1))
    del token
    gc.collect()
    assert not state.is_awaited((0, 0))


def test_tokens_with_equal_groups_are_different_forwards() -> None:
    state = StepState(make_plan())
    first, second = ForwardToken([(0, 0)]), ForwardToken([(0, 0)])
    state.open_forward(first)
    state.open_forward(second)
    state.open_forward(second)
    assert first.groups == second.groups == frozenset({(0, 0)})
    assert state.awaited(besides=first) == {(0, 0)}
    state.close_forward(second)
    assert state.awaited(besides=first) == set()
    assert state.is_awaited((0, 0))


@settings(deadline=None, max_examples=50)  # the machines that run this are shared
@given(count=st.integers(1, 8), bucket_size=st.integers(1, 500), data=st.data())
def test_complete_means_that_all_have_arrived(count: int, bucket_size: int, data: st.DataObject) -> None:
    plan = make_plan(count, bucket_size)
    state = StepState(plan)
    arrived: set[int] = set()
    actions = st.lists(st.one_of(st.integers(0, count - 1), st.sampled_from(["reset", "reopen"])), max_size=20)
    for action in data.draw(actions):
        if isinstance(action, int):
            state.mark_arrived(action)
            arrived.add(action)
        else:
            getattr(state, action)()
            arrived.clear()
        for group, members in enumerate(plan.groups):
            assert state.is_complete(group, by_count=False) == (set(members.params) <= arrived)
