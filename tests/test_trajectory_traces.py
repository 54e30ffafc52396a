"""What is sent in a training run is what Megatron-LM sends: the collectives of the first two steps, one by one.

Same operations, sizes, dtypes and averaging, in the same order and the same part of the step, as recorded on rank 0 in
``oracle/trajectory.json.gz``; all other ranks send as rank 0 does. A reduce-scatter may be made of messages and a local
sum, here as in Megatron (``reduce_scatter_fp32acc``). Deliberate differences, all of which are asserted:

* Megatron starts no reduction inside the first backward, and gathers parameters in the first forward. Compiled graphs
  know from the beginning what is complete, and ``attach`` has made parameters equal, so nothing is gathered before the
  first update. The eager path waits for the first step as Megatron does.
* Where gradients appear in ``.grad`` (without sharding), the backward ends with the reduction, also without overlap.
* Dense and expert buckets are reduced by their position in the model from the first step on; Megatron does so from the
  second on, and dense first in the first.
* Nothing blocks when it is asked for: Megatron's synchronous collectives (without overlap) are awaited directly after
  they were asked for. With several optimizer instances Megatron sends both reductions of a bucket from one stream; here
  a thread sends the second one, so the order is compared within each of the two groups of ranks.
* A model with experts gathers every bucket once per step. Without overlap Megatron gathers twice, because each of its
  two optimizers gathers all.
* The norm of shards is summed in one number per clipping, and once, after the first step, the ranks compare what they
  have seen of late gradients. Both are left out of the comparison, and nothing else is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from helpers import RankGroup
from oracle_data import load
from trajectory_numbers import Outcome
from trajectory_runs import Run, Sent, covered_runs, train, uses_torch_optimizer

Trajectories = Callable[[int, bool], list[dict[str, Outcome]]]
OWN = ("reduce_scalar", "all_gather_object")
"""What Megatron has no word for."""


def megatron_trace(trace: list[list[Any]]) -> list[Sent]:
    """Collectives of one step; ``trace`` is the oracle's."""
    sent, phase = [], ""
    for entry in trace:
        if entry[0] in ("fwd", "bwd"):
            phase = f"{entry[0]} {entry[1]}"
        elif entry[0] in ("finalize", "optstep"):
            phase = entry[0]
        elif entry[0] == "coll":
            _, op, numel, dtype, _, redop = entry
            sent.append(Sent(phase, op.removesuffix("_fp32acc"), numel, dtype, redop == "AVG"))
    return sent


def expected_trace(oracle: Run, step: int, compiled: bool) -> list[Sent]:
    """Megatron's collectives of a step with the deliberate differences."""
    config = oracle["config"]
    sent = megatron_trace(oracle[f"trace_step{step}_rank0"])
    if config["overlap"] and step == 0:
        sent = [one for one in sent if one.op != "all_gather"]
    is_early = config["overlap"] and compiled
    publishes_grad = not config["dist_opt"] and (config["param_dtype"] == "fp32" or not config["g32"])
    if is_early or publishes_grad:
        backward = f"bwd {config['nmb'] - 1}"
        sent = [one._replace(phase=backward) if one.phase == "finalize" else one for one in sent]
    if "ep" in config and step == 0:
        # One bucket of each kind, and the dense one has the first layer.
        sent.reverse()
    return sent


def problems_of(oracle: Run, step: int, compiled: bool, sent: list[Sent]) -> list[str]:
    """In what one step differs from what is expected."""
    config = oracle["config"]
    expected = expected_trace(oracle, step, compiled)
    found = [one for one in sent if one.op not in OWN]
    own = Counter(one.op for one in sent if one.op in OWN)
    # Between instances and inside each.
    comparisons = 2 if config.get("instances", 1) > 1 else 1
    wanted_own = Counter(all_gather_object=comparisons * (step == 0), reduce_scalar=int(not has_whole_norm(config)))
    problems = [] if own == wanted_own else [f"besides it sends {own}, expected {wanted_own}"]
    if config.get("instances", 1) > 1:
        # Which thread is first is open.
        for op in ("reduce_scatter", "all_gather"):
            problems += difference([one for one in found if one.op == op], [one for one in expected if one.op == op])
        expected = [one._replace(phase="") for one in expected if one.op == "all_reduce"]
        found = [one._replace(phase="") for one in found if one.op == "all_reduce"]
    return problems + difference(found, expected)


def has_whole_norm(config: dict[str, Any]) -> bool:
    """Every rank has all gradients, so it has their norm."""
    return uses_torch_optimizer(config) or (not config["dist_opt"] and "ep" not in config)


def difference(found: list[Sent], expected: list[Sent]) -> list[str]:
    return [] if found == expected else [f"sends {found}, expected {expected}"]


def test_traces_tell_enough() -> None:
    traces = [
        run[f"trace_step{step}_rank0"]
        for run in covered_runs(layer_wise=False)
        for step in range(min(run["config"]["steps"], 2))
    ]
    assert len(traces) == 192
    assert sum(len(megatron_trace(trace)) for trace in traces) == 806


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager_path"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_sends_what_megatron_sends(trajectories: Trajectories, world: int, compiled: bool) -> None:
    answers = trajectories(world, compiled)
    runs = {run["id"]: run for run in covered_runs(layer_wise=False)}
    problems = [
        f"{name} step {step} rank {rank}: {problem}"
        for rank, answer in enumerate(answers)
        for name, outcome in answer.items()
        if name.removesuffix("_fused") in runs
        for step, sent in enumerate(outcome.sent)
        for problem in problems_of(runs[name.removesuffix("_fused")], step, compiled, sent)
    ]
    assert not problems, "\n".join(problems)
    steps = [len(outcome.sent) for outcome in answers[0].values()]
    assert len(steps) >= {1: 30, 2: 36, 4: 39}[world]
    assert set(steps) == {1, 2}


def gathers_without_overlap(rank: int) -> list[list[tuple[str, int]]]:
    """Bucket collectives of each step of a run with experts, all of them at the end of the step."""
    (oracle,) = (run for run in covered_runs(layer_wise=False) if run["id"] == "w2_expert_fp32_ep2_distopt")
    observed = train(rank, {**oracle, "config": {**oracle["config"], "overlap": False}}, compiled=False)
    return [[(one.op, one.numel) for one in sent if one.op not in OWN] for sent in observed.sent]


@pytest.mark.dist
def test_experts_are_gathered_once(ranks: Callable[[int], RankGroup]) -> None:
    """Megatron's trace of the same buckets, whose two optimizers both gather all of them."""
    results = [entry["result"] for entry in load("state_machine")["extra"] if isinstance(entry["result"], list)]
    (theirs,) = (result[1] for result in results if str(result[0]).startswith("MoE (dense + expert"))
    assert theirs == [["all_gather", 640]] * 4
    for steps in ranks(2).run(gathers_without_overlap):
        assert steps == [[("reduce_scatter", 640)] * 2 + [("all_gather", 640)] * 2] * 5
