"""Megatron's state machine (27 scenarios of its own DDP at world 2) and ours, step by step.

``ROWS`` lists every step where we differ and why; all other steps must be the same: outcome, collectives (operation,
elements, dtype, reduction), gradient buffers to the oracle's six decimals, and which groups are in flight or reduced.
``pytest -s`` prints the table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from helpers import RankGroup
from replay import Seen, Sent
from state_machine import OURS, SCENARIOS, SHARDED, SHARDED_SCENARIOS, oracle_scenarios, replay_all
from tabulate import tabulate

DECIMALS = 6e-7
"""Half of the oracle's last decimal, plus the spacing of fp32 numbers up to 2."""

NO_CALL = "no such call"


def reduced(*numels: int, op: str = "all_reduce", dtype: str = "float32", redop: str = "SUM") -> list[Sent]:
    return [Sent(op, numel, dtype, redop) for numel in numels]


def scattered(numel: int = 256, **further: str) -> list[Sent]:
    return reduced(numel, op="reduce_scatter", **further)


class Row(NamedTuple):
    """A step where we differ from Megatron on purpose."""

    scenario: str
    step: str
    why: str
    outcome: str = "ok"
    """How the outcome starts."""
    sent: Sequence[Sent] = ()
    same_as: str = ""
    """Step of the oracle whose buffers ours equal afterwards."""
    of: str = ""
    """Scenario of that step, if another."""
    rest: Any = None
    """Further values."""


PUBLISHED = "without shards .grad is complete when backward returns, as with DDP, so any optimizer works"
IDEMPOTENT = "finish_grad_sync is idempotent in every mode"
NO_REGISTER = "hooks count arrivals in every mode; there is no call to get wrong"
START_ONCE = "a start takes what has not started; nothing is outstanding twice and no handle can be left over"
MISSING = "a gradient that does not come counts as zeros; the group is reduced in finish"
UNUSED = "unused parameters are fine; they keep .grad = None and the optimizer leaves them alone"
NO_HOOK_SWITCH = "waits are always there and cost nothing while parameters are current"
STALE_ONLY = "only stale parameters are gathered; after a step without overlap, or without any step, none are"
FUSED = "nothing is zeroed, so a kernel that adds by itself would add to an old gradient: refused by name"

EACH = (2, 8, 4, 12)
"""Elements of every parameter's bucket, from the head of the model."""

ROWS = [
    *(
        row
        for step in ("iter0", "iter1")
        for row in (
            Row("no_sync_accumulation_allreduce", f"{step} last microbatch", PUBLISHED, sent=reduced(*EACH)),
            Row("no_sync_accumulation_allreduce", f"{step} finish", PUBLISHED, same_as=f"{step} finish"),
        )
    ),
    Row("finish_before_ready", "2 of 4 params registered, finish", MISSING, sent=reduced(26)),
    Row(
        "finish_before_ready",
        "register same param again after dispatch",
        "without shards a second backward adds to averages and averages again",
        sent=reduced(26),
    ),
    Row("non_overlap_not_idempotent_distopt0", "finish 2 (re-reduces)", IDEMPOTENT, same_as="finish 1"),
    Row("non_overlap_not_idempotent_distopt0", "register_grad_ready", NO_REGISTER, NO_CALL),
    Row("non_overlap_not_idempotent_distopt1", "finish 2 (re-reduces)", IDEMPOTENT, same_as="finish 1"),
    Row("non_overlap_not_idempotent_distopt1", "register_grad_ready", NO_REGISTER, NO_CALL),
    Row("start_twice", "start again (not first batch)", START_ONCE, same_as="finish"),
    Row("start_twice", "start after finish, same iteration", START_ONCE, same_as="finish"),
    Row(
        "start_twice",
        "finish after that (finished flag already set: handle left pending)",
        START_ONCE,
        same_as="finish",
    ),
    Row("start_twice", "start in the next iteration", START_ONCE, sent=reduced(26), same_as="finish"),
    Row("unused_parameter_single_bucket", "zero_grad_buffer", UNUSED),
    Row("missing_grad_second_iteration", "backward touching only l1 in 2nd iteration", PUBLISHED, sent=reduced(26)),
    Row("missing_grad_second_iteration", "finish", MISSING),
    *(
        Row("golden_count_two", step, "without shards every backward outside no_sync ends reduced", sent=reduced(26))
        for step in ("after first of two backwards", "after second")
    ),
    Row("param_sync_non_overlap", "finish_param_sync without overlap_param_gather", NO_HOOK_SWITCH, NO_CALL),
    Row("param_sync_non_overlap", "start_param_sync (sync)", STALE_ONLY),
    Row("param_sync_non_overlap", "enable_forward_pre_hook without overlap", NO_HOOK_SWITCH, NO_CALL),
    Row("param_sync_non_overlap", "disable_forward_pre_hook without overlap", NO_HOOK_SWITCH, NO_CALL),
    Row("param_sync_without_distopt", "start_param_sync", "without shards parameters are always current: a no-op"),
    Row("param_sync_overlap", "start_param_sync again while pending", START_ONCE),
    Row("param_sync_overlap", "start_param_sync(force_sync=True) idle: gathers synchronously", STALE_ONLY),
    *(
        Row("param_sync_overlap", step, NO_HOOK_SWITCH, NO_CALL)
        for step in ("enable hooks twice", "disable hooks(param_sync=False)", "disable hooks again", "enable hooks")
    ),
    Row(
        "check_for_nan",
        "nan",
        "found on rank 0 alone, raised on all ranks after the reduction, with parameter and bucket",
        "RuntimeError: found NaN or Inf in local gradients before their reduction: 'l2.bias' (bucket 0, NaN, ",
        reduced(26),
    ),
    Row(
        "fp32_accumulation_flag_leaks_process_wide",
        "module-level reduce-scatter replaced",
        "the transport is an object that one buffer uses",
        rest=[False],
    ),
    Row(
        "fp32_accumulation_flag_leaks_process_wide",
        "a later DDP without the flag uses",
        "the transport is an object that one buffer uses",
        sent=scattered(dtype="bfloat16"),
        rest=[["reduce_scatter"]],
    ),
    Row(
        "fp32_accumulation_with_average_in_collective",
        "finish_grad_sync",
        "the local sum divides before it rounds",
        sent=reduced(256, op="reduce_scatter_fp32acc", dtype="bfloat16", redop="AVG"),
    ),
    Row("zero_grad_buffer_flag", "default impl", "zero_grad leaves foreign flags alone; " + FUSED, rest=[[True] * 4]),
    Row("zero_grad_buffer_flag", "cuda_graph_impl='local'", "as above", rest=[[True] * 4]),
    *(
        Row("fused_wgrad_flags", step, FUSED, "NotImplementedError: a fused kernel added the gradient of 'l2.bias'")
        for step in (
            "grad_added_to_main_grad=True: add skipped, main_grad abs sum",
            "plus zero_out_wgrad=True: add performed",
        )
    ),
    Row("fused_wgrad_flags", "param.grad after backward", PUBLISHED, sent=reduced(26), rest=[[False] * 4]),
    # With shards .grad stays None and finish_grad_sync is the caller's, as in Megatron.
    Row(SHARDED + "finish_before_ready", "2 of 4 params registered, finish", MISSING, sent=scattered()),
    Row(
        SHARDED + "finish_before_ready",
        "register same param again after dispatch",
        "a bucket that was reduce-scattered cannot take another gradient: refused",
        "RuntimeError: backward writes bucket 0 (l2.bias, l2.weight, l1.bias, ...) whose gradients were already",
    ),
    Row(SHARDED + "start_twice", "start (first batch)", "shards", sent=scattered()),
    Row(SHARDED + "start_twice", "start (not first batch)", "shards", sent=scattered()),
    Row(SHARDED + "start_twice", "start again (not first batch)", START_ONCE),
    *(
        Row(SHARDED + "start_twice", step, START_ONCE, same_as="finish 1", of="non_overlap_not_idempotent_distopt1")
        for step in (
            "finish in first batch",
            "finish",
            "start after finish, same iteration",
            "finish after that (finished flag already set: handle left pending)",
            "zero_grad_buffer",
        )
    ),
    Row(SHARDED + "start_twice", "start in the next iteration", START_ONCE, sent=scattered()),
    Row(SHARDED + "missing_grad_second_iteration", "finish", MISSING, sent=scattered()),
    Row(SHARDED + "golden_count_two", "after second", "shards", sent=scattered()),
    Row(
        SHARDED + "check_for_nan",
        "nan",
        "as without shards",
        "RuntimeError: found NaN or Inf in local gradients before their reduction: 'l2.bias' (bucket 0, NaN, ",
        scattered(),
    ),
    # Situations that the oracle does not have.
    Row(
        "one pass more than the golden count",
        "after first",
        "the counts of the first step are reached",
        sent=scattered(),
    ),
    Row(
        "one pass more than the golden count",
        "after an extra one",
        "Megatron adds to a buffer that is being sent; refused, with what to do",
        "RuntimeError: backward writes bucket 0 (l2.bias, l2.weight, l1.bias, ...) whose gradients were already "
        "reduced. Run all micro-batches but the last inside `with buf.no_sync()`",
    ),
    Row("one pass more than the golden count", "next step", "zero_grad makes all well", sent=scattered()),
    Row(
        "force_all_reduce after a reduce-scatter",
        "finish(force_all_reduce=True) after the hooks",
        "Megatron says nothing and gives this rank's shard only",
        "RuntimeError: finish_grad_sync(force_all_reduce=True), but bucket 0 was already reduce-scattered inside the "
        "backward; set buf.force_all_reduce = True before the backward",
        scattered(),
    ),
    Row(
        "force_all_reduce after a reduce-scatter",
        "the property, before the backward",
        "what that error recommends",
        sent=reduced(256),
    ),
]


@pytest.fixture(scope="module")
def replayed(ranks: Callable[[int], RankGroup]) -> list[dict[str, list[Seen]]]:
    return ranks(2).run(replay_all, timeout=180)


class Step(NamedTuple):
    """A step of the oracle."""

    label: str
    outcome: str
    sent: list[Sent] | None
    """None where the oracle does not say."""
    buffers: list[list[float]] | None
    phases: list[str] | None
    rest: list[Any]


def parse(step: list[Any]) -> Step:
    label, *values = step
    outcome, sent, buffers, phases = "ok", None, None, None
    rest: list[Any] = []
    for value in values:
        if isinstance(value, str) and ("Error" in value or value == "ok"):
            outcome = value
        elif isinstance(value, list) and all(isinstance(item, list) and item[0] == "coll" for item in value):
            sent = [Sent(op, numel, dtype, redop) for _, op, numel, dtype, _, redop in value]
        elif isinstance(value, list) and all(isinstance(item, dict) and "rle" in item for item in value):
            buffers = [[x for x, count in item["rle"] for _ in range(count)] for item in value]
        elif isinstance(value, list) and all(isinstance(item, dict) and "golden" in item for item in value):
            phases = ["reduced" if g["finished"] else "reducing" if g["handle"] else "open" for g in value]
        else:
            rest.append(value)
    return Step(label, outcome, sent, buffers, phases, rest)


def oracle_steps(name: str, rank: int) -> list[Step]:
    scenario = oracle_scenarios()[name.removeprefix(SHARDED)]
    steps = scenario["steps_rank0"] if rank == 0 else scenario.get("steps_rank1") or scenario["steps_rank0"]
    return [parse(step) for step in steps]


def check_buffers(seen: Seen, expected: list[list[float]]) -> None:
    """Padding is scaled in the oracle's fills and zero in ours."""
    assert len(seen.buffers) == len(expected)
    for found, wanted, is_padding in zip(seen.buffers, expected, seen.is_padding):
        assert len(found) == len(wanted)
        assert all(x == 0 for x, skip in zip(found, is_padding) if skip)
        assert all(abs(x - y) <= DECIMALS for x, y, skip in zip(found, wanted, is_padding) if not skip)


def check_same(seen: Seen, step: Step, *, phases: bool) -> None:
    if step.outcome == "ok":
        assert seen.outcome == "ok"
    else:
        assert seen.outcome.split(":")[0] == step.outcome.split(":")[0]
    if step.sent is not None:
        assert seen.sent == step.sent
    if step.buffers is not None:
        check_buffers(seen, step.buffers)
    if phases and seen.phases is not None and step.phases is not None:
        assert seen.phases == step.phases
    if seen.rest is not None:
        assert seen.rest == step.rest[: len(seen.rest)]


def check_row(seen: Seen, row: Row, rank: int) -> None:
    assert seen.outcome.startswith(row.outcome) if row.outcome != "ok" else seen.outcome == "ok"
    assert seen.sent == list(row.sent)
    if row.same_as:
        (step,) = [step for step in oracle_steps(row.of or row.scenario, rank) if step.label == row.same_as]
        assert step.buffers is not None
        check_buffers(seen, step.buffers)
    if row.rest is not None:
        assert seen.rest == row.rest


# param_sync_overlap: gradients are reduced by the step that makes parameters stale, which the oracle does not take.
WITHOUT_PHASES = {"param_sync_overlap"}


def row_of(name: str, label: str) -> Row | None:
    rows = [row for row in ROWS if (row.scenario, row.step) == (name, label)]
    assert len(rows) <= 1
    return rows[0] if rows else None


@pytest.mark.dist
@pytest.mark.parametrize("name", [*SCENARIOS, *(SHARDED + name for name in SHARDED_SCENARIOS), *OURS])
def test_scenario(replayed: list[dict[str, list[Seen]]], name: str) -> None:
    for rank, by_name in enumerate(replayed):
        steps = oracle_steps(name, rank) if name not in OURS else []
        if steps:
            assert [seen.label for seen in by_name[name]] == [step.label for step in steps]
        for seen, step in itertools.zip_longest(by_name[name], steps):
            row = row_of(name, seen.label)
            if row is not None:
                check_row(seen, row, rank)
            else:
                check_same(seen, step, phases=name not in WITHOUT_PHASES)


def test_every_scenario_of_the_oracle_is_replayed() -> None:
    assert SCENARIOS.keys() == oracle_scenarios().keys()
    assert len(SCENARIOS) == 27
    known = {SHARDED + name for name in SHARDED_SCENARIOS} | SCENARIOS.keys() | OURS.keys()
    assert {row.scenario for row in ROWS} <= known
    for row in ROWS:
        if row.scenario not in OURS:
            assert row.step in {step.label for step in oracle_steps(row.scenario, 0)}, row


def test_print_the_table() -> None:
    lines = []
    for name in [*SCENARIOS, *(SHARDED + name for name in SHARDED_SCENARIOS), *OURS]:
        differing = [row for row in ROWS if row.scenario == name]
        lines += [[name, row.step, _ours(row), row.why] for row in differing] or [[name, "every step", "same", ""]]
    assert {line[0] for line in lines} >= SCENARIOS.keys()
    print("\n" + tabulate(lines, headers=["scenario", "step", "ours", "why"], maxcolwidths=[30, 30, 40, 50]))


def _ours(row: Row) -> str:
    sent = ", ".join(f"{sent.op} {sent.numel}" for sent in row.sent) or "nothing sent"
    return f"{row.outcome}; {sent}" if row.rest is None else f"{row.outcome}; {sent}; {row.rest}"
