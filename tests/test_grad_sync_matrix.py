"""Gradients after the reduction, for every combination of flags (Megatron ``test_grad_sync.py`` and its expert twin).

Every rank has gradients of 1, so the average is 1 wherever it is complete; the part of a shard-owner elsewhere keeps
this rank's own, scaled gradient. Values are exact: sizes are powers of two.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers import RankGroup
from replay import Sent, Two, recorded
from torch import Tensor, nn

import megabuf_fx as mb


class Case(NamedTuple):
    sharded: bool
    overlap: bool
    average: bool
    instances: int


CASES = [Case(*flags) for flags in itertools.product((True, False), (True, False), (True, False), (1, 2))]


def config_of(case: Case) -> mb.MegabufConfig:
    return mb.MegabufConfig(
        use_distributed_optimizer=case.sharded,
        overlap_grad_reduce=case.overlap,
        average_in_collective=case.average,
        num_distributed_optimizer_instances=case.instances,
    )


class Result(NamedTuple):
    early: list[Sent]
    """Sent before every parameter had its gradient, in the second step."""
    sent: list[Sent]
    """In the whole second step."""
    first: float
    """First element of the buffer, in the first rank's shard."""
    last: float
    """An element in the last rank's shard."""
    forced: list[Sent]
    """Sent by a step with ``force_all_reduce``."""
    forced_values: set[float]
    """All gradients after it."""


def backward(model: nn.Module, value: float = 1.0) -> None:
    (torch.stack([param.sum() for param in model.parameters()]).sum() * value).backward()


def run_case(case: Case) -> Result:
    model = Two()
    buf = mb.attach(model, config_of(case))
    (buffer,) = buf.buffers.buffers
    with recorded() as sent:
        backward(model)
        buf.finish_grad_sync()
        buf.zero_grad()
        sent.clear()
        with buf.no_sync():
            backward(model.l2, 0.5)
        early = list(sent)
        backward(model.l1)
        backward(model.l2, 0.5)
        buf.finish_grad_sync()
        everything = list(sent)
        # The weight of l1 is last and ends in the last shard.
        first, last = buffer.grad_data[0].item(), main_grad(model.l1.weight).flatten()[-1].item()
        buf.zero_grad()
        buf.force_all_reduce = True
        sent.clear()
        backward(model)
        buf.finish_grad_sync()
    values = {value for param in model.parameters() for value in main_grad(param).flatten().tolist()}
    result = Result(early, everything, first, last, list(sent), values)
    buf.detach()
    return result


def main_grad(param: Tensor) -> Tensor:
    found: Tensor = param.main_grad  # type: ignore[attr-defined]
    return found


def run_cases(rank: int, world: int) -> dict[Case, Result]:
    """Four ranks, where an instance has two, repeat the sharded cases only."""
    return {case: run_case(case) for case in CASES if case.sharded or (case.instances == 1 and world == 2)}


def check(case: Case, result: Result, rank: int, world: int) -> None:
    own = 1.0 if case.average else 1 / world
    size = world // case.instances
    position = rank % size
    assert result.early == []
    if case.sharded:
        assert result.first == (1.0 if position == 0 else own)
        assert result.last == (1.0 if position == size - 1 else own)
    else:
        assert result.first == result.last == 1.0
    # Single-rank groups send nothing.
    reduce = "reduce_scatter" if case.sharded else "all_reduce"
    across = ["all_reduce"] if case.instances > 1 else []
    launches = 1 if case.sharded else len(result.sent)
    assert [call.op for call in result.sent] == ([reduce] if size > 1 else []) * launches + across
    assert [call.op for call in result.forced] == (["all_reduce"] if size > 1 else []) + across
    assert {call.redop for call in [*result.sent, *result.forced]} == {"AVG" if case.average else "SUM"}
    assert result.forced_values == {1.0}


class Found(NamedTuple):
    """Results of every rank of one world."""

    world: int
    dense: list[dict[Case, Result]]
    experts: list[dict[ExpertCase, ExpertResult]]


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest, ranks: Callable[[int], RankGroup]) -> Found:
    world = request.param
    dense, experts = (ranks(world).run(function, world, timeout=180) for function in (run_cases, expert_cases))
    return Found(world, dense, experts)


@pytest.mark.dist
def test_every_combination(found: Found) -> None:
    for rank, results in enumerate(found.dense):
        assert len(results) == (12 if found.world == 2 else 8)
        for case, result in results.items():
            check(case, result, rank, found.world)


@pytest.mark.parametrize("case", [case for case in CASES if not case.sharded and case.instances > 1])
def test_instances_need_shards(case: Case) -> None:
    with pytest.raises(ValueError, match="num_distributed_optimizer_instances=2 needs use_distributed_optimizer=True"):
        config_of(case)


# Experts


class DenseAndExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # 320 elements, so that even a quarter of a bucket is not all padding.
        self.dense = nn.Linear(16, 16)
        self.expert = nn.Linear(16, 16)
        for param in self.expert.parameters():
            param.allreduce = False  # type: ignore[attr-defined]


class ExpertCase(NamedTuple):
    expert_parallel: int
    sharded: bool
    overlap: bool
    average: bool
    instances: int


class ExpertResult(NamedTuple):
    dense: list[float]
    """First element in every rank's shard of the dense bucket."""
    expert: list[float]
    starts: list[int]
    """First element of every buffer's index space."""


def expert_case(world: int, case: ExpertCase, group: dist.ProcessGroup) -> ExpertResult:
    model = DenseAndExpert()
    config = config_of(Case(case.sharded, case.overlap, case.average, case.instances))
    buf = mb.attach(model, config, expert_process_group=group)
    for _ in range(2):
        buf.zero_grad()
        # An expert gets the tokens of all ranks that share it: as many times the gradient.
        dense = torch.stack([param.sum() for param in model.dense.parameters()]).sum()
        expert = torch.stack([param.sum() for param in model.expert.parameters()]).sum()
        (dense + case.expert_parallel * expert).backward()
        buf.finish_grad_sync()
    first = {}
    for layout, buffer in zip(buf.plan.layouts, buf.buffers.buffers):
        shards = (group.size() if layout.key.is_expert_parallel else world) // case.instances if case.sharded else 1
        parts = buffer.grad_data.chunk(shards)
        values = [part[part != 0].unique().tolist() for part in parts]
        first[layout.key.is_expert_parallel] = [value for (value,) in values]
    result = ExpertResult(
        first[False], first[True], [min(s.start for s in layout.slots) for layout in buf.plan.layouts]
    )
    buf.detach()
    return result


def expert_cases(rank: int, world: int) -> dict[ExpertCase, ExpertResult]:
    found = {}
    for expert_parallel in (1, 2):
        # Ranks with the same experts; experts change from rank to rank.
        groups = [dist.new_group(list(range(k, world, expert_parallel))) for k in range(expert_parallel)]
        for flags in CASES:
            case = ExpertCase(expert_parallel, *flags)
            is_possible = world // expert_parallel % case.instances == 0 and (case.sharded or case.instances == 1)
            if is_possible and (world == 2 or case.overlap):
                found[case] = expert_case(world, case, groups[rank % expert_parallel])
    return found


@pytest.mark.dist
def test_experts(found: Found) -> None:
    """Experts of ``ep`` ranks get gradients of ``ep`` and end at 1, with a factor of 1 / dp as dense ones."""
    for rank, results in enumerate(found.experts):
        assert len(results) == (20 if found.world == 2 else 12)
        for case, result in results.items():
            assert result.starts == [0, 0]
            edp = found.world // case.expert_parallel
            for values, size, position in (
                (result.dense, found.world, rank),
                (result.expert, edp, rank // case.expert_parallel),
            ):
                check_shards(values, case, size, position)


def check_shards(values: list[float], case: ExpertCase, size: int, position: int) -> None:
    """``size`` ranks share the bucket, ``position`` is this one's. What it does not own is its own scaled gradient, of
    experts ep / dp = 1 / edp."""
    if not case.sharded:
        assert values == [1.0]
        return
    shards = size // case.instances
    own = 1.0 if case.average else 1 / size
    assert values == [1.0 if shard == position % shards else own for shard in range(shards)], case
