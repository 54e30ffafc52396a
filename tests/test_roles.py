"""``runtime/roles.py``: which variant of a backward runs. Real buffers of a small model, one process, no graphs."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import megabuf_fx as mb
from megabuf_fx.binding import Binding, locate_arguments
from megabuf_fx.runtime.model_buffers import ModelBuffers
from megabuf_fx.runtime.plan import GraphParam, GraphPlan, Role, plan_writes
from megabuf_fx.runtime.roles import UNTOUCHED, choose_role
from megabuf_fx.runtime.step_state import ForwardToken


class Case:
    """A model of three bias-free layers, one per bucket, and a graph that uses the parameters ``names``.

    Group 0 is ``last``, 1 is ``middle``, 2 is ``first``: reverse definition order.
    """

    def __init__(self, *names: str, bucket_size: int = 1, **options: Any) -> None:
        self.model = nn.Sequential()
        for name in ("first", "middle", "last"):
            self.model.add_module(name, nn.Linear(4, 4, bias=False))
        self.handle = mb.attach(self.model, mb.MegabufConfig(bucket_size=bucket_size, **options))
        self.buffers: ModelBuffers = self.handle.buffers
        chosen = names or ("first", "middle", "last")
        params = [self.model.get_submodule(name).weight for name in chosen]
        # One more input than parameters: the batch.
        self.plan: GraphPlan = Binding(locate_arguments([None, *params])).plan
        self.token = self.forward()
        self.poison()

    def forward(self, *groups: int) -> ForwardToken:
        """A forward of this graph, or of one that will write ``groups``."""
        keys = [(self.buffers.handle, group) for group in groups] or self.plan.groups
        token = ForwardToken(keys)
        self.buffers.state.open_forward(token)
        return token

    def poison(self) -> None:
        for main_grad in self.buffers.main_grads:
            main_grad.fill_(torch.nan)

    def role(
        self,
        *,
        writes: Sequence[GraphParam] | None = None,
        has_token: bool = True,
        accumulates: bool = True,
        keeps_graph: bool = False,
    ) -> Role:
        return choose_role(
            self.plan,
            plan_writes(self.plan.params if writes is None else writes),
            {self.buffers.handle: self.buffers},
            token=self.token if has_token else None,
            accumulates=accumulates,
            keeps_graph=keeps_graph,
        )

    def keys(self, *groups: int) -> tuple[tuple[int, int], ...]:
        return tuple((self.buffers.handle, group) for group in groups)

    def zeroed(self) -> list[bool]:
        """Which slots hold zeros; the others still hold NaN."""
        found = [bool((main_grad == 0).all()) for main_grad in self.buffers.main_grads]
        for is_zero, main_grad in zip(found, self.buffers.main_grads):
            assert is_zero or main_grad.isnan().all()
        return found


def test_first_backward_of_a_step_overwrites_and_launches_everything() -> None:
    case = Case()
    assert case.role() == Role("overwrite", case.keys(0, 1, 2))
    assert case.zeroed() == [False] * 3, "overwriting zeroes nothing"
    assert case.buffers.state.written == set(), "choosing is not writing"


def test_a_captured_micro_batch_overwrites_or_accumulates_by_the_flag() -> None:
    case = Case()
    flag = case.buffers.capture.flags.accumulate
    with case.handle.no_sync(), case.buffers.capture.active(is_micro_batch=True):
        assert case.role() == Role("flagged")
        case.buffers.writes.mark_graph_writes({1})
        # Written in this micro-batch by another graph: the others are zeroed, unless an earlier micro-batch has
        # written them.
        assert case.role() == Role("accumulate")
        assert case.zeroed() == [True, False, True]
        for main_grad in case.buffers.main_grads:
            main_grad.fill_(5.0)
        case.buffers.state.written.discard(0)
        flag.fill_(1)
        assert case.role() == Role("accumulate")
        assert all((main_grad == 5).all() for main_grad in case.buffers.main_grads)
    case.handle.zero_grad()
    assert case.role() == Role("overwrite", case.keys(0, 1, 2))


def test_second_micro_batch_accumulates() -> None:
    case = Case()
    with case.handle.no_sync():
        assert case.role() == Role("overwrite")
        for param in range(3):
            case.buffers.writes.mark_graph_writes({param})
        assert case.role() == Role("accumulate")
    assert case.role() == Role("accumulate", case.keys(0, 1, 2))
    assert case.zeroed() == [False] * 3
    case.handle.zero_grad()
    assert case.role() == Role("overwrite", case.keys(0, 1, 2))


def test_partly_written_zeroes_the_rest_and_accumulates() -> None:
    case = Case()
    case.buffers.writes.mark_graph_writes({1})
    assert case.role() == Role("accumulate", case.keys(0, 1, 2))
    assert case.zeroed() == [True, False, True]
    assert case.buffers.state.written == {0, 1, 2}


def test_slots_of_other_graphs_do_not_count() -> None:
    """``last`` was written by another graph; this one writes the others for the first time."""
    case = Case("first", "middle")
    case.buffers.writes.mark_graph_writes({2})
    assert case.role() == Role("overwrite", case.keys(1, 2))
    assert case.zeroed() == [False] * 3


def test_gradients_asked_for_leave_buffers_alone() -> None:
    """``torch.autograd.grad``: also with slots written in part, and after a reduction."""
    case = Case()
    case.buffers.writes.mark_graph_writes({1})
    assert case.role(accumulates=False) is UNTOUCHED
    assert case.zeroed() == [False] * 3
    case.buffers.finish_grad_sync()
    assert case.role(accumulates=False) is UNTOUCHED
    assert Role(None) == UNTOUCHED
    assert UNTOUCHED.name == "untouched"


def test_no_sync_launches_nothing() -> None:
    case = Case()
    with case.handle.no_sync():
        assert case.role() == Role("overwrite")
        with case.handle.no_sync():
            assert case.role() == Role("overwrite")
        assert case.role() == Role("overwrite"), "the outer one is still on"
    assert case.role().launches == case.keys(0, 1, 2)


def test_no_overlap_launches_nothing() -> None:
    case = Case(overlap_grad_reduce=False)
    assert case.role() == Role("overwrite")


def test_kept_graph_launches_nothing() -> None:
    """``retain_graph=True``: it may run again."""
    case = Case()
    assert case.role(keeps_graph=True) == Role("overwrite")
    case.buffers.writes.mark_graph_writes({0})
    assert case.role(keeps_graph=True) == Role("accumulate")
    assert case.zeroed() == [False, True, True]


def test_backward_without_a_forward_of_ours_launches_nothing() -> None:
    """Without a token nobody knows whether another forward waits."""
    assert Case().role(has_token=False) == Role("overwrite")


@pytest.mark.parametrize("group", [0, 1, 2])
def test_another_forward_keeps_its_bucket_open(group: int) -> None:
    case = Case()
    other = case.forward(group)
    rest = [key for key in range(3) if key != group]
    assert case.role() == Role("overwrite", case.keys(*rest))
    case.buffers.state.close_forward(other)
    assert case.role() == Role("overwrite", case.keys(0, 1, 2))


def test_second_forward_of_this_graph_keeps_all_open() -> None:
    case = Case()
    other = case.forward()
    assert case.role() == Role("overwrite")
    # The last of the two launches.
    case.buffers.state.close_forward(case.token)
    case.token = other
    for param in range(3):
        case.buffers.writes.mark_graph_writes({param})
    assert case.role() == Role("accumulate", case.keys(0, 1, 2))


def test_dropped_forward_keeps_nothing_open() -> None:
    case = Case()
    dropped = case.forward()
    assert case.role().launches == ()
    del dropped
    gc.collect()
    assert case.role().launches == case.keys(0, 1, 2)


def test_forward_of_another_model_keeps_nothing_open() -> None:
    case = Case()
    foreign = ForwardToken([(case.buffers.handle + 1, 0)])
    case.buffers.state.open_forward(foreign)
    assert case.role().launches == case.keys(0, 1, 2)


@pytest.mark.parametrize("param", [0, 1, 2])
def test_bucket_with_eager_gradients_is_left_to_the_host(param: int) -> None:
    case = Case()
    case.buffers.state.eager_params.add(param)
    rest = [group for group in range(3) if group != case.buffers.group_of[param]]
    assert case.role() == Role("overwrite", case.keys(*rest))
    case.handle.zero_grad()
    assert case.role().launches == case.keys(*rest), "that is kept from step to step"


def test_group_that_the_graph_does_not_cover_is_left_to_the_host() -> None:
    """Buckets of two: ``last`` and ``middle`` share group 0, of which this graph sees one."""
    case = Case("first", "last", bucket_size=20)
    assert case.buffers.group_of == (1, 0, 0)
    assert case.plan.groups == case.keys(0, 1)
    assert case.role() == Role("overwrite", case.keys(1))


def test_group_without_gradients_is_left_to_the_host() -> None:
    """``middle`` is an input of the graph, but its gradient is None."""
    case = Case()
    writes = [param for param in case.plan.params if param.name != "middle.weight"]
    assert case.role(writes=writes) == Role("overwrite", case.keys(0, 2))
    case.buffers.writes.mark_graph_writes({0})
    assert case.role(writes=writes) == Role("accumulate", case.keys(0, 2))
    assert case.zeroed() == [False, False, True], "only what the graph adds to is zeroed"
    assert case.role(writes=()) == Role("overwrite")


@pytest.mark.parametrize("sharded", [True, False])
def test_writing_a_reduced_group_is_refused(sharded: bool) -> None:
    case = Case("middle", "last", use_distributed_optimizer=sharded)
    case.buffers.writes.enter_backward(1)
    case.buffers.start_grad_sync(0)
    # In the same backward pass it may go on: what comes late is kept aside.
    role = case.role()
    assert (role.write, role.launches) == ("overwrite", case.keys(1))
    case.buffers.writes.enter_backward(2)
    with pytest.raises(RuntimeError, match=r"writes bucket 0 \(last.weight, .*already reduced.*no_sync.*zero_grad"):
        case.role()
    assert case.zeroed() == [False, False, True], "the launch zeroed what was not written, the refusal nothing"
    case.buffers.reset()
    assert case.role() == Role("overwrite", case.keys(0, 1))


def test_reduced_group_of_another_graph_is_no_obstacle() -> None:
    case = Case("first", "middle")
    case.buffers.writes.enter_backward(1)
    case.buffers.start_grad_sync(0)
    case.buffers.writes.enter_backward(2)
    assert case.role() == Role("overwrite", case.keys(1, 2))


def test_finish_grad_sync_refuses_the_next_backward() -> None:
    case = Case()
    case.buffers.writes.enter_backward(1)
    for param in range(3):
        case.buffers.writes.mark_graph_writes({param})
    case.handle.finish_grad_sync()
    case.buffers.writes.enter_backward(2)
    with pytest.raises(RuntimeError, match="already reduced"):
        case.role()


def test_two_models_in_one_graph() -> None:
    """Each model decides for its own buckets; one role serves both, so one written slot makes all accumulate."""
    one, two = Case(), Case()
    params = (*one.model.parameters(), *two.model.parameters())
    plan = Binding(locate_arguments(params)).plan
    models = {case.buffers.handle: case.buffers for case in (one, two)}
    token = ForwardToken(plan.groups)

    def choose() -> Role:
        return choose_role(plan, plan_writes(plan.params), models, token=token, accumulates=True, keeps_graph=False)

    for case in (one, two):
        case.buffers.state.close_forward(case.token)
    assert one.buffers.handle < two.buffers.handle
    assert choose() == Role("overwrite", (*one.keys(0, 1, 2), *two.keys(0, 1, 2)))
    two.buffers.writes.mark_graph_writes({1})
    with one.handle.no_sync():
        assert choose() == Role("accumulate", two.keys(0, 1, 2))
    assert one.zeroed() == [True] * 3
    assert two.zeroed() == [True, False, True]
