"""``schedule.py``: small steps whose times can be worked out by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from megabuf_fx.cli.dump_files import Boundary, BucketGroup, Key, Node, RecordedStep, Span, Variant
from megabuf_fx.cli.schedule import (
    Schedule,
    calibrate,
    fold_module,
    measured,
    median_exposed,
    phases_of,
    predict,
    transfer_time,
    typical_step,
)
from megabuf_fx.cost_model import Device, Link

DEVICE = Device(tflops=1, memory_gbs=1, op_us=10)
LINK = Link(gbps=8e-3, alpha_us=2)
"""One byte per microsecond."""


def group(index: int, nbytes: int = 40, **changes: Any) -> BucketGroup:
    """Two ranks: a message carries half of it, 20 + 2 microseconds."""
    made = BucketGroup(
        key=(0, index),
        params=(f"p{index}",),
        sizes=(nbytes // 4,),
        numel=nbytes // 4,
        grad_nbytes=nbytes,
        param_nbytes=nbytes,
        grad_dtype="float32",
        param_dtype="float32",
        ranks=2,
        sharded=True,
        has_early_gather=True,
        prefetch=None,
        is_scaled=False,
        is_summed_here=False,
    )
    return dataclasses.replace(made, **changes)


def node(kind: str, key: Key | None = None, *, module: str = "m") -> Node:
    return Node("n", "op", (), kind, 0, 0, module, "", (), key, ())


def variant(kind: str, *nodes: Node, graph: int = 0) -> Variant:
    boundaries = tuple(
        Boundary(n.group, "n", "op", "", scaled=False) for n in nodes if n.kind == "launch" and n.group is not None
    )
    return Variant(graph, kind, kind, "aot_eager", nodes, (), boundaries)


def step(forward: Sequence[Node], backward: Sequence[Node], *groups: BucketGroup) -> Schedule:
    variants = [variant("forward", *forward), variant("backward_overwrite_sync", *backward)]
    phases = phases_of(variants, micro_batches=1)
    return predict(phases, {g.key: g for g in groups}, device=DEVICE, link=LINK)


COMPUTE = node("compute")


def times(schedule: Schedule, direction: str) -> list[tuple[int, float, float, float, float | None, float]]:
    return [
        (t.key[1], t.launch, t.begin, t.end, t.need, t.exposed) for t in schedule.transfers if t.direction == direction
    ]


def test_gathers_come_one_after_the_other_and_block_their_first_use() -> None:
    forward = [node("wait", (0, 1)), COMPUTE, node("wait", (0, 0)), COMPUTE, COMPUTE]
    schedule = step(forward, [], group(0), group(1))
    assert times(schedule, "gather") == [(1, 0, 0, 22, 0, 22), (0, 0, 22, 44, 32, 12)]
    assert [t.why for t in schedule.transfers[:2]] == [
        "nothing to compute after its launch",
        "the link was gathering bucket 1 until 22.0 us",
    ]


def test_reductions_hide_behind_the_rest_of_the_backward() -> None:
    backward = [COMPUTE, node("launch", (0, 0)), COMPUTE, COMPUTE, COMPUTE, node("launch", (0, 1))]
    schedule = step([], backward, group(0, has_early_gather=False), group(1, has_early_gather=False))
    assert times(schedule, "reduce") == [(0, 10, 10, 32, 40, 0), (1, 40, 40, 62, 40, 22)]
    assert schedule.transfers[0].why == "hidden, 8.0 us to spare"
    assert schedule.transfers[0].hidden_ops == 3
    # Without an early gather both are gathered inside step, and all of it shows.
    assert times(schedule, "gather") == [(1, 62, 62, 84, 62, 22), (0, 62, 84, 106, 84, 22)]
    assert (schedule.end, schedule.busy, schedule.exposed) == (106, 40, 66)


def test_a_bucket_never_overtakes_its_predecessor() -> None:
    backward = [node("launch", (0, 1)), COMPUTE, node("launch", (0, 0))]
    schedule = step([], backward, group(0, has_early_gather=False), group(1, has_early_gather=False))
    assert [entry[:4] for entry in times(schedule, "reduce")] == [(0, 10, 10, 32), (1, 0, 32, 54)]


def test_what_no_graph_launches_is_left_to_the_host() -> None:
    schedule = step([], [COMPUTE], group(0, has_early_gather=False))
    (transfer,) = [t for t in schedule.transfers if t.direction == "reduce"]
    assert (transfer.trigger, transfer.launch, transfer.exposed) == ("host, after backward", 10, 22)


def test_scaling_summing_and_launching_take_time() -> None:
    """Memory moves ten bytes per microsecond: 8 us to scale 40 bytes, 6 us to sum two halves into one."""
    backward = [COMPUTE, node("launch", (0, 0)), COMPUTE, COMPUTE, COMPUTE]
    slow = dataclasses.replace(DEVICE, memory_gbs=0.01)
    phases = phases_of([variant("forward"), variant("backward_overwrite_sync", *backward)], micro_batches=1)
    link = dataclasses.replace(LINK, launch_us=1.0)
    one = group(0, is_scaled=True, is_summed_here=True, has_early_gather=False, sharded=False)
    schedule = predict(phases, {one.key: one}, device=slow, link=link)
    assert times(schedule, "reduce")[0] == pytest.approx((0, 10, 18, 62, 49, 19))
    hidden = predict(phases, {one.key: one}, device=slow, link=dataclasses.replace(link, gbps=1e9, alpha_us=0))
    assert hidden.transfers[0].why == "arrived in time; its sum on this rank"
    assert hidden.exposed == pytest.approx(6)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, 22), ({"sharded": False}, 44), ({"ranks": 1}, 0), ({"ranks": 4}, 36)],
    ids=["reduce-scatter", "all-reduce", "alone", "four ranks"],
)
def test_link(changes: dict[str, Any], expected: float) -> None:
    assert transfer_time(LINK, group(0, **changes), "reduce") == pytest.approx(expected)


@pytest.mark.parametrize(("prefetch", "launched"), [(None, [0, 0, 0]), (1, [0, 0, 22]), (0, [0, 22, 44])])
def test_prefetch_bounds_gathers_in_flight(prefetch: int | None, launched: list[float]) -> None:
    forward = [node("wait", (0, index)) for index in (2, 1, 0)]
    schedule = step(forward, [], *(group(index, prefetch=prefetch) for index in range(3)))
    assert [entry[1] for entry in times(schedule, "gather")] == launched


def test_phases_of_several_micro_batches_and_graphs() -> None:
    variants = [
        *(variant("forward", graph=graph) for graph in (0, 1)),
        *(variant("backward_overwrite_local", graph=graph) for graph in (0, 1)),
        *(variant("backward_accumulate_sync", node("launch", (0, 0)), graph=graph) for graph in (0, 1)),
        variant("backward_untouched", graph=0),
    ]
    found = [(phase.variant.graph, phase.variant.kind) for phase in phases_of(variants, micro_batches=2)]
    assert found == [
        *((0, "forward"), (1, "forward"), (1, "backward_overwrite_local"), (0, "backward_overwrite_local")),
        *((0, "forward"), (1, "forward"), (1, "backward_accumulate_sync"), (0, "backward_accumulate_sync")),
    ]


def recorded(number: int = 1, stretch: float = 1.0) -> RecordedStep:
    """A backward of 100 us that launches two buckets, and the waits after it."""
    spans = (
        Span("run", "graph0_backward_overwrite_sync", None, 0, 100 * stretch, None),
        Span("launch", "reduce_scatter", (0, 0), 40, 41, 80),
        Span("launch", "reduce_scatter", (0, 1), 60, 61, 120),
        Span("wait", "reduction", (0, 0), 100, 100, None),
        Span("wait", "reduction", (0, 1), 100, 120, None),
    )
    return RecordedStep(number, 150 * stretch, spans)


def test_measured_schedule() -> None:
    schedule = measured(recorded(), {"graph0_backward_overwrite_sync": "backward"})
    assert [(work.phase, work.begin, work.end) for work in schedule.work] == [("backward", 0, 100)]
    assert times(schedule, "reduce") == [(0, 40, 40, 80, 100, 0), (1, 60, 80, 120, 100, 20)]
    assert median_exposed([recorded(), recorded()]) == {((0, 0), "reduce"): 0, ((0, 1), "reduce"): 20}


def test_a_run_is_cut_where_it_stood_still() -> None:
    spans = (
        Span("launch", "all_gather", (0, 0), 0, 1, 50),
        Span("run", "graph0_forward", None, 10, 100, None),
        Span("wait", "gather", (0, 0), 20, 50, None),
    )
    schedule = measured(RecordedStep(0, 100, spans), {"graph0_forward": "forward"})
    assert [(work.begin, work.end) for work in schedule.work] == [(10, 20), (50, 100)]
    assert schedule.exposed == 30


def test_typical_step_is_the_median_of_whole_steps() -> None:
    short = RecordedStep(9, 1, recorded().spans[:2])
    steps = [recorded(1, 3.0), short, recorded(2, 1.0), recorded(3, 2.0)]
    assert typical_step(steps).number == 3


def test_calibration_finds_the_rates_of_a_predicted_step() -> None:
    """From two sizes of buckets: latency, bandwidth, the device's factor, and the time of a launch."""
    groups = {(0, 0): group(0, 200), (0, 1): group(1, 1000)}
    backward = variant("backward_overwrite_sync", *[COMPUTE] * 20)
    alpha, per_byte = 5.0, 0.5
    ends = [40 + alpha + 100 * per_byte, 200 + alpha + 500 * per_byte]
    spans = (
        Span("run", "graph0_backward_overwrite_sync", None, 0, 400, None),
        Span("launch", "reduce_scatter", (0, 0), 40, 43, ends[0]),
        Span("launch", "reduce_scatter", (0, 1), 200, 203, ends[1]),
    )
    found = calibrate([RecordedStep(0, 500, spans)], [backward], groups, device=DEVICE)
    assert found.link.alpha_us == pytest.approx(alpha)
    assert found.link.gbps == pytest.approx(8e-3 / per_byte)
    assert found.link.launch_us == 3
    assert found.device.op_us == pytest.approx(20)
    assert found.collectives == 2


def test_fold_module() -> None:
    names = ("transformer.h.3.attn.c_proj", "lm_head", "", "h.0")
    assert [fold_module(name) for name in names] == ["transformer.h.3", "lm_head", "", "h.0"]
