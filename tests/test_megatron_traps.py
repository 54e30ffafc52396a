"""Combinations that Megatron accepts and then breaks on (semantics sections 6-10, 16, 17 and 19), and what we do.

``TRAPS`` is the list: each one is refused when the config is made, or works and names the test that shows it.
``pytest -s`` prints it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers import RankGroup
from named_tests import find_test
from replay import Two, recorded
from tabulate import tabulate
from torch import Tensor, nn

import megabuf_fx as mb


class Trap(NamedTuple):
    combination: str
    megatron: str
    ours: str
    test: str = ""
    """Where it works."""
    options: dict[str, Any] | None = None
    """Refused, with a message that contains ``ours``."""


TRAPS = [
    Trap(
        "overlap_param_gather without overlap_grad_reduce",
        "accepted (its command line refuses)",
        "overlap_param_gather=True needs overlap_grad_reduce=True",
        options={"overlap_param_gather": True, "overlap_grad_reduce": False},
    ),
    Trap(
        "overlap_param_gather without the distributed optimizer",
        "accepted; buffers have no parameters to gather",
        "overlap_param_gather=True needs use_distributed_optimizer=True",
        options={"overlap_param_gather": True, "use_distributed_optimizer": False},
    ),
    Trap(
        "reduce_scatter_with_fp32_accumulation without the distributed optimizer",
        "ignored, or with overlap an assert after the all-reduce was sent",
        "reduce_scatter_with_fp32_accumulation=True needs use_distributed_optimizer=True",
        options={"reduce_scatter_with_fp32_accumulation": True, "use_distributed_optimizer": False},
    ),
    Trap(
        "align_param_gather without a schedule that starts gathers",
        "silently off",
        "align_param_gather=True needs overlap_param_gather=True",
        options={"align_param_gather": True},
    ),
    Trap(
        "align_param_gather with a schedule that starts nothing",
        "(off)",
        "works: a forward starts what it needs",
        "test_param_sync.py::test_align_leaves_starting_to_the_caller",
    ),
    Trap(
        "reduce_scatter_with_fp32_accumulation, average_in_collective",
        "assert at the first reduction",
        "works",
        "test_state_machine.py::test_scenario",
    ),
    Trap(
        "reduce_scatter_with_fp32_accumulation in one of two models",
        "the other model uses it, too",
        "works",
        "test_state_machine.py::test_scenario",
    ),
    Trap(
        "reduce_scatter_with_fp32_accumulation, disable_bucketing, several buckets",
        "assert at the first reduction (with overlap)",
        "works",
        "test_megatron_traps.py::test_one_group_of_several_buckets_with_fp32_accumulation",
    ),
    Trap(
        "average_in_collective with experts, (dp, edp) = (33, 11) and others",
        "assert without message",
        "works, in rationals",
        "test_grouping.py::test_every_size_averages_exactly",
    ),
    Trap(
        "finish_grad_sync twice, without overlap",
        "scales and reduces again",
        "works: idempotent",
        "test_state_machine.py::test_scenario",
    ),
    Trap(
        "start_grad_sync after finish_grad_sync",
        "reduces again and leaves a handle that stops the next step",
        "works: nothing to start",
        "test_state_machine.py::test_scenario",
    ),
    Trap(
        "start_grad_sync twice, several instances",
        "reduces twice in the first step",
        "works: starts once",
        "test_state_machine_extra.py::test_instances_start_once",
    ),
    Trap(
        "a missing gradient, several instances",
        "nothing is reduced, no error",
        "works: zeros, reduced in finish",
        "test_state_machine_extra.py::test_instances_reduce_missing_gradients",
    ),
    Trap(
        "force_all_reduce, several instances",
        "only this rank's shard is complete",
        "works: all is complete",
        "test_state_machine_extra.py::test_instances_with_force_all_reduce_have_complete_gradients",
    ),
    Trap(
        "finish_grad_sync(force_all_reduce=True) after hooks have reduce-scattered",
        "the argument is ignored",
        "an error that says what to set",
        "test_state_machine.py::test_scenario",
    ),
    Trap(
        "a parameter that is never used, in a bucket with others",
        "assert without message at the second step",
        "works, and the optimizer leaves it alone",
        "test_host_state.py::test_unused_parameters_are_left_alone",
    ),
    Trap(
        "a parameter unused in a later step",
        "assert in finish_grad_sync",
        "works: zeros, reduced in finish",
        "test_state_machine.py::test_scenario",
    ),
    Trap(
        "a backward more than in the first step",
        "writes into a buffer that is being sent",
        "an error that says what to do",
        "test_state_machine.py::test_scenario",
    ),
    Trap(
        "dense and expert optimizers, no overlap",
        "every buffer is gathered twice",
        "works: once",
        "test_state_machine_extra.py::test_expert_buffers_are_gathered_once",
    ),
    Trap(
        "a NaN on one rank, check_for_nan_in_grad",
        "that rank raises, the others wait for it",
        "works: all ranks raise",
        "test_state_machine.py::test_scenario",
    ),
    Trap(
        "fp32 local accumulation, backward before the first zero_grad_buffer",
        "adds to uninitialised memory",
        "works: the first gradient overwrites",
        "test_megatron_traps.py::test_first_gradient_overwrites_whatever_was_there",
    ),
    Trap(
        "one config for two models",
        "changed by the first (bucket_size)",
        "works: never changed",
        "test_megatron_traps.py::test_config_serves_two_models",
    ),
    Trap(
        "num_buckets without Megatron's training script",
        "ignored",
        "works",
        "test_grouping.py::test_num_buckets_is_honoured",
    ),
    Trap(
        "no_sync inside no_sync",
        "the inner one ends the outer one",
        "works: counted",
        "test_megatron_traps.py::test_no_sync_nests",
    ),
    Trap(
        "overlap_param_gather, a forward before the first step",
        "gathers, so ranks that differ get mixtures of their shards",
        "works: nothing to gather yet",
        "test_megatron_traps.py::test_nothing_is_gathered_before_the_first_step",
    ),
    Trap(
        "copies on several stages that lie elsewhere in their buckets, with shards",
        "adds what is reduced to what is not",
        "an error that says what to do",
        "test_finalize_refusals.py::test_copies_that_shards_cut_differently",
    ),
    Trap(
        "finalize_model_grads twice in a step",
        "sums over other axes twice",
        "an error",
        "test_finalize_refusals.py::test_twice_in_a_step_is_refused",
    ),
    Trap(
        "num_tokens without calculate_per_token_loss",
        "divides averages by tokens",
        "an error that says what to set",
        "test_finalize_refusals.py::test_groups_are_those_of_attach",
    ),
    Trap(
        "start_param_sync while a forward will start gathers itself",
        "a warning per bucket group",
        "works: started once",
        "test_state_machine.py::test_scenario",
    ),
]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.combination)
def test_refused_or_tested(trap: Trap) -> None:
    assert (trap.options is None) == bool(trap.test)
    if trap.options is None:
        find_test(trap.test)
    else:
        with pytest.raises(ValueError, match=trap.ours):
            mb.MegabufConfig(**trap.options)


def test_print_the_list() -> None:
    lines = [[t.combination, t.megatron, f"refused: {t.ours}" if t.options else t.ours, t.test] for t in TRAPS]
    print("\n" + tabulate(lines, headers=["combination", "Megatron", "here", "test"], maxcolwidths=[35, 35, 35, 40]))


# Tests of what works and has no better place


class Mixed(nn.Module):
    """bf16 and fp32 parameters: two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(3, 4, dtype=torch.bfloat16)
        self.high = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.high(self.low(x.bfloat16()).float())
        return result


def single_group(rank: int) -> tuple[int, list[str], list[float]]:
    """Two steps, so that hooks start the second. Groups, operations, and the first element of what this rank owns."""
    config = mb.MegabufConfig(disable_bucketing=True, reduce_scatter_with_fp32_accumulation=True)
    model = Mixed()
    buf = mb.attach(model, config)
    with recorded() as sent:
        for _ in range(2):
            buf.zero_grad()
            sent.clear()
            sum(param.float().sum() * (rank + 1) for param in model.parameters()).backward()  # type: ignore[union-attr]
            buf.finish_grad_sync()
    owned = [
        shard[shard != 0].unique().tolist()
        for group in buf.plan.groups
        for shard in map(buf.buffers.reducer.grad_shard, group.buckets)
    ]
    buf.detach()
    return len(buf.plan.groups), [call.op for call in sent], [value for values in owned for value in values]


@pytest.mark.dist
def test_one_group_of_several_buckets_with_fp32_accumulation(ranks: Callable[[int], RankGroup]) -> None:
    for groups, ops, owned in ranks(2).run(single_group):
        assert groups == 1
        assert sorted(ops) == ["reduce_scatter", "reduce_scatter_fp32acc"]
        assert set(owned) == {1.5}


def ranks_that_differ(rank: int) -> tuple[int, bool]:
    """Gathers of a forward before any step, and whether parameters are still this rank's own."""
    model = Two()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(rank)
    buf = mb.attach(model, mb.MegabufConfig(init_sync=False, overlap_param_gather=True))
    with recorded() as sent:
        model(torch.ones(1, 3))
    is_own = all(bool((param == rank).all()) for param in model.parameters())
    buf.detach()
    return len(sent), is_own


@pytest.mark.dist
def test_nothing_is_gathered_before_the_first_step(ranks: Callable[[int], RankGroup]) -> None:
    assert ranks(2).run(ranks_that_differ) == [(0, True)] * 2


def test_first_gradient_overwrites_whatever_was_there() -> None:
    model = Two(dtype=torch.bfloat16)
    buf = mb.attach(model, mb.MegabufConfig(param_name_patterns_for_fp32_local_accumulation=("all",)))
    for param in model.parameters():
        param.main_grad.fill_(float("nan"))  # type: ignore[attr-defined]
    sum(param.float().sum() for param in model.parameters()).backward()  # type: ignore[union-attr]
    buf.finish_grad_sync()
    assert all((param.main_grad == 1).all() for param in model.parameters())  # type: ignore[attr-defined]


def test_config_serves_two_models() -> None:
    config = mb.MegabufConfig(overlap_grad_reduce=False, bucket_size=7, disable_bucketing=True)
    before = repr(config)
    for _ in range(2):
        buf = mb.attach(Two(), config)
        assert repr(config) == repr(buf.config) == before
        assert len(buf.plan.groups) == 1


def nested_no_sync(rank: int) -> list[int]:
    """Reductions after each of three backwards of a later step, two of them under ``no_sync``."""
    model = Two()
    buf = mb.attach(model, mb.MegabufConfig())

    def backward() -> None:
        model(torch.ones(1, 3)).sum().backward()

    with recorded() as sent:
        backward()
        buf.finish_grad_sync()
        buf.zero_grad()
        sent.clear()
        counts = []
        with buf.no_sync():
            with buf.no_sync():
                backward()
            counts.append(len(sent))
            backward()
            counts.append(len(sent))
        backward()
        counts.append(len(sent))
    buf.detach()
    return counts


@pytest.mark.dist
def test_no_sync_nests(ranks: Callable[[int], RankGroup]) -> None:
    assert ranks(2).run(nested_no_sync) == [[0, 0, 1]] * 2
