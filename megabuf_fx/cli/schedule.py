"""When everything in a step happens: predicted from the nodes of its graphs, or taken from recorded times.

    compute         |- forward -|wait|- forward -|--- backward ---|-- backward --|wait|
    communication   |== gather ==|               launch ^|== reduce 0 ==|== reduce 1 ==|

Pure: nodes, bucket groups, a device and a link in, a ``Schedule`` out. All times are microseconds.

[Note: the model of a step]
The device runs the nodes one after another, each for the longer of its arithmetic and its memory traffic, but at least
``op_us``. Collectives run beside it, one at a time, in the order of their launches (they share a link). A ring of ``n``
ranks takes ``(n - 1) * (alpha + nbytes / n / bandwidth)`` (``cost_model.py``), an all-reduce twice that.
Where gradients are scaled before they are sent, or summed by this rank when they have come (an all-to-all in place of
a reduce-scatter), that is memory traffic of the device: a pass over the bucket at its launch or in its wait.
Left out: kernels and collectives that slow each other down, fusion (every node counts by itself, so with Inductor the
compute is an upper bound), the optimizer.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megabuf_fx.cli.dump_files import BucketGroup, Key, Node, RecordedStep, Variant
from megabuf_fx.cli.text import microseconds
from megabuf_fx.cost_model import Device, Link, ring_messages

Direction = Literal["reduce", "gather"]


def messages_of(group: BucketGroup, direction: Direction) -> int:
    """Messages that a ring sends one after the other, each of a rank's share of the bucket group."""
    return ring_messages(group.ranks, is_all_reduce=direction == "reduce" and not group.sharded)


def transfer_time(link: Link, group: BucketGroup, direction: Direction) -> float:
    """How long ``link`` carries one collective of the bucket group."""
    return link.time_of(messages_of(group, direction), _message_nbytes(group, direction))


@dataclass(frozen=True, slots=True)
class Phase:
    """One run of one compiled graph."""

    variant: Variant
    micro_batch: int

    @property
    def name(self) -> str:
        return "forward" if self.variant.kind == "forward" else "backward"


@dataclass(frozen=True, slots=True)
class Work:
    """A stretch of the compute row: nodes of one module."""

    phase: str
    """forward or backward; run where it is not known."""
    title: str
    begin: float
    end: float
    ops: int = 0
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """What becomes of one collective, and whether anybody stands still for it."""

    key: Key
    direction: Direction
    launch: float
    """The bucket group is ready and asked for."""
    begin: float
    """The link is free for it."""
    end: float
    need: float | None
    """Somebody cannot go on without it; None where nobody waits within the step."""
    exposed: float
    """How long that somebody stands still for this one, its sum included where this rank sums itself."""
    trigger: str
    """What launches it."""
    waiter: str
    """What waits for it."""
    hidden_ops: int
    """Operations between launch and wait."""
    hidden_flops: int
    why: str


@dataclass(frozen=True, slots=True)
class Schedule:
    title: str
    work: tuple[Work, ...]
    transfers: tuple[Transfer, ...]
    """In the order in which they are launched."""
    end: float
    note: str = ""

    @property
    def exposed(self) -> float:
        return sum(transfer.exposed for transfer in self.transfers)

    @property
    def busy(self) -> float:
        """How long the compute row works."""
        return sum(work.end - work.begin for work in self.work) if self.work else 0.0


def phases_of(variants: Sequence[Variant], *, micro_batches: int) -> tuple[Phase, ...]:
    """The graphs of one training step, in the order in which they run.

    Forwards in the order of compilation, backwards in reverse. The last backward is one that launches, where there is
    one; those before it accumulate locally.
    """
    forwards = [variant for variant in variants if variant.kind == "forward"]
    backwards: dict[int, list[Variant]] = {}
    for variant in variants:
        if variant.kind.startswith("backward") and variant.kind != "backward_untouched":
            backwards.setdefault(variant.graph, []).append(variant)
    phases = []
    for micro in range(micro_batches):
        is_last = micro + 1 == micro_batches
        phases += [Phase(forward, micro) for forward in forwards]
        for forward in reversed(forwards):
            if forward.graph in backwards:
                chosen = _choose(backwards[forward.graph], is_first=micro == 0, is_last=is_last)
                phases.append(Phase(chosen, micro))
    return tuple(phases)


def _choose(backwards: Sequence[Variant], *, is_first: bool, is_last: bool) -> Variant:
    def fit(variant: Variant) -> tuple[bool, bool, int]:
        # Of several launch sets the last compiled one is what later steps run.
        return (
            bool(variant.boundaries) == is_last,
            variant.kind.startswith("backward_overwrite") == is_first,
            -len(variant.name),
        )

    return max(backwards, key=fit)


def predict(phases: Sequence[Phase], groups: Mapping[Key, BucketGroup], *, device: Device, link: Link) -> Schedule:
    """The schedule of one step; see [Note: the model of a step]."""
    run = _Run(groups, link, device)
    for key in _started_ahead(groups):
        run.launch(key, "gather", "begin of the step")
    for phase in phases:
        for node in phase.variant.nodes:
            if node.kind == "launch" and node.group is not None:
                run.launch(node.group, "reduce", _trigger(phase.variant, node.group))
            elif node.kind == "wait" and node.group is not None:
                run.wait(node.group, "gather", _first_use(phase.variant, node.group))
            elif node.kind in ("compute", "write"):
                run.work(phase, node, device.time_of(node))
    for key in groups:
        run.launch(key, "reduce", "host, after backward")
    for key in groups:
        run.wait(key, "reduce", "end of backward (clip, step)")
    late = [key for key in reversed(list(groups)) if groups[key].sharded and not groups[key].has_early_gather]
    for key in late:
        run.launch(key, "gather", "host, inside step")
    for key in late:
        run.wait(key, "gather", "end of step")
    return Schedule("predicted", tuple(run.done_work), run.transfers(), run.now)


def _started_ahead(groups: Mapping[Key, BucketGroup]) -> list[Key]:
    """Gathers that are in flight before anything waits (``ParamGatherer.start_ahead``)."""
    counts: dict[int, int] = {}
    found = []
    for key in reversed(list(groups)):
        group = groups[key]
        place = counts[key[0]] = counts.get(key[0], 0) + 1
        if group.sharded and group.has_early_gather and (group.prefetch is None or place <= group.prefetch):
            found.append(key)
    return found


@dataclass(slots=True)
class _Pending:
    key: Key
    direction: Direction
    launch: float
    begin: float
    end: float
    trigger: str
    ops_before: int
    flops_before: int
    work_before: float
    behind: _Pending | None
    """What is ahead of this one when it is launched."""
    need: float | None = None
    exposed: float = 0.0
    sum: float = 0.0
    """Part of ``exposed`` that is this rank's own sum."""
    waiter: str = ""
    ops_after: int = 0
    flops_after: int = 0
    work_after: float = 0.0


class _Run:
    """The state of a step while it is played through."""

    def __init__(self, groups: Mapping[Key, BucketGroup], link: Link, device: Device) -> None:
        self.now = 0.0
        self.done_work: list[Work] = []
        self._groups = groups
        self._link = link
        self._device = device
        self._order = list(groups)
        self._asked: dict[Key, tuple[str, float]] = {}
        """What asked for a reduction, and when."""
        self._pending: dict[tuple[Key, Direction], _Pending] = {}
        self._title = ""
        self._ops = 0
        self._flops = 0
        self._worked = 0.0

    def work(self, phase: Phase, node: Node, time: float) -> None:
        # What belongs to no module (residual sums, gradients that add up) counts to its surroundings.
        title = fold_module(node.module) if node.module else self._title
        self._title = title
        self._add(phase.name, title, time, 1, node.flops)
        self._ops += 1
        self._flops += node.flops

    def _add(self, phase: str, title: str, time: float, ops: int = 0, flops: int = 0) -> None:
        begin, self.now = self.now, self.now + time
        self._worked += time
        last = self.done_work[-1] if self.done_work else None
        if last is not None and (last.phase, last.title, last.end) == (phase, title, begin):
            self.done_work.pop()
            begin, ops, flops = last.begin, last.ops + ops, last.flops + flops
        self.done_work.append(Work(phase, title, begin, self.now, ops, flops))

    def launch(self, key: Key, direction: Direction, trigger: str) -> None:
        """Start a collective; reductions wait for their predecessors in the plan, as ``GradReducer`` does."""
        if direction == "gather":
            self._start(key, "gather", trigger, asked=self.now)
            return
        self._asked.setdefault(key, (trigger, self.now))
        for other in (other for other in self._order if other[0] == key[0]):
            if other not in self._asked:
                break
            self._start(other, "reduce", self._asked[other][0], asked=self._asked[other][1])

    def wait(self, key: Key, direction: Direction, waiter: str) -> None:
        if direction == "gather":
            self._start_gathers_for(key)
        pending = self._pending.get((key, direction))
        if pending is None or pending.need is not None:
            return
        pending.need, pending.waiter = self.now, waiter
        pending.ops_after, pending.flops_after, pending.work_after = self._ops, self._flops, self._worked
        self.now = max(self.now, pending.end)
        group = self._groups[key]
        if direction == "reduce" and group.is_summed_here:
            pending.sum = self._device.time_of_bytes(group.grad_nbytes * (1 + 1 / group.ranks))
            self.now += pending.sum
        pending.exposed = self.now - pending.need

    def transfers(self) -> tuple[Transfer, ...]:
        return tuple(self._finished(pending) for pending in self._pending.values())

    def _start(self, key: Key, direction: Direction, trigger: str, *, asked: float) -> None:
        if (key, direction) in self._pending:
            return
        group = self._groups[key]
        if group.ranks > 1:
            phase = "backward" if direction == "reduce" else "forward"
            if direction == "reduce" and group.is_scaled:
                self._add(phase, "scale", self._device.time_of_bytes(2 * group.grad_nbytes))
        last = next(reversed(self._pending.values()), None)
        begin = max(self.now, last.end if last else 0.0)
        end = begin + transfer_time(self._link, group, direction)
        behind = last if last is not None and last.end > asked else None
        if group.ranks > 1 and self._link.launch_us:
            self._add(phase, "launch", self._link.launch_us)
        self._pending[key, direction] = _Pending(
            key, direction, asked, begin, end, trigger, self._ops, self._flops, self._worked, behind
        )

    def _start_gathers_for(self, key: Key) -> None:
        """With a bounded prefetch a wait starts its own gather and those ahead of it (``ParamGatherer.wait``)."""
        group = self._groups[key]
        if group.prefetch is None or not group.has_early_gather:
            return
        handle, index = key
        for other in reversed(self._order):
            if other[0] == handle and other[1] >= index - group.prefetch:
                self._start(other, "gather", f"wait for bucket {group.number}", asked=self.now)

    def _finished(self, pending: _Pending) -> Transfer:
        is_awaited = pending.need is not None
        return Transfer(
            key=pending.key,
            direction=pending.direction,
            launch=pending.launch,
            begin=pending.begin,
            end=pending.end,
            need=pending.need,
            exposed=pending.exposed,
            trigger=pending.trigger,
            waiter=pending.waiter,
            hidden_ops=pending.ops_after - pending.ops_before if is_awaited else 0,
            hidden_flops=pending.flops_after - pending.flops_before if is_awaited else 0,
            why=self._why(pending),
        )

    def _why(self, pending: _Pending) -> str:
        if self._groups[pending.key].ranks == 1:
            return "one rank, nothing is sent"
        if pending.need is None:
            return "nobody waits for it in this step"
        if pending.exposed == 0:
            return f"hidden, {microseconds(pending.need - pending.end)} to spare"
        if pending.sum >= pending.exposed * 0.99:
            return "arrived in time; its sum on this rank"
        took = pending.end - pending.begin
        cover = pending.work_after - pending.work_before
        if pending.behind is not None and pending.begin - pending.launch > pending.exposed / 2:
            behind = pending.behind
            verb = "reducing" if behind.direction == "reduce" else "gathering"
            return f"the link was {verb} bucket {self._groups[behind.key].number} until {microseconds(pending.begin)}"
        if pending.ops_after == pending.ops_before:
            return "nothing to compute after its launch"
        return f"{microseconds(cover)} of compute cannot hide {microseconds(took)}"


def _trigger(variant: Variant, key: Key) -> str:
    return next((f"{b.trigger} [{b.trigger_op}]" for b in variant.boundaries if b.key == key), "graph")


def _first_use(variant: Variant, key: Key) -> str:
    return next((f"{node.name} [{node.op}]" for node in variant.nodes if key in node.first_use), "graph")


def fold_module(path: str) -> str:
    """A module's path up to its first number: ``transformer.h.3`` for all that is inside that block."""
    parts = path.split(".")
    place = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: place + 1]) if place is not None else path


def typical_step(steps: Sequence[RecordedStep]) -> RecordedStep:
    """The recorded step of median length, of those with the most collectives (others ended early)."""
    most = max(len(step.spans) for step in steps)
    whole = sorted((step for step in steps if len(step.spans) == most), key=lambda step: step.end)
    return whole[(len(whole) - 1) // 2]


def micro_batches_of(step: RecordedStep) -> int:
    """How many forwards of each graph the step ran."""
    runs = Counter(span.name for span in step.spans if span.kind == "run" and span.name.endswith("forward"))
    return max(runs.values(), default=1)


def measured(step: RecordedStep, kinds: Mapping[str, str]) -> Schedule:
    """What was recorded of ``step``; ``kinds`` maps names of variants to forward or backward.

    A run of a graph is cut where it stood still for a bucket.
    """
    waits = [span for span in step.spans if span.kind == "wait"]
    work = []
    for span in step.spans:
        if span.kind == "run":
            inside = [(w.begin, w.end) for w in waits if span.begin <= w.begin < span.end]
            for begin, end in _without(span.begin, span.end, inside):
                work.append(Work(kinds.get(span.name, "run"), span.name, begin, end))
    transfers: list[Transfer] = []
    for launch in (span for span in step.spans if span.kind == "launch" and span.key is not None):
        direction: Direction = "gather" if launch.name == "all_gather" else "reduce"
        awaited = "gather" if direction == "gather" else "reduction"
        wait = next((w for w in waits if (w.key, w.name) == (launch.key, awaited) and w.begin >= launch.begin), None)
        done = launch.done if launch.done is not None else (wait.end if wait else launch.end)
        exposed = wait.end - wait.begin if wait else 0.0
        assert launch.key is not None
        transfers.append(
            Transfer(
                key=launch.key,
                direction=direction,
                launch=launch.begin,
                begin=launch.begin,
                end=done,
                need=wait.begin if wait else None,
                exposed=exposed,
                trigger="",
                waiter="",
                hidden_ops=0,
                hidden_flops=0,
                why="" if wait else "nobody waited for it in this step",
            )
        )
    note = f"step {step.number}, the one of median length; the link is taken to carry one collective at a time"
    return Schedule("measured", tuple(work), _one_at_a_time(transfers), step.end, note)


def _one_at_a_time(transfers: Sequence[Transfer]) -> tuple[Transfer, ...]:
    """When it was a collective's turn is not recorded: let it begin where the one that ended before it ends."""
    begins: dict[int, float] = {}
    free = 0.0
    for place in sorted(range(len(transfers)), key=lambda place: transfers[place].end):
        begins[place] = min(max(transfers[place].launch, free), transfers[place].end)
        free = transfers[place].end
    return tuple(dataclasses.replace(transfer, begin=begins[place]) for place, transfer in enumerate(transfers))


def _without(begin: float, end: float, holes: Sequence[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    for hole_begin, hole_end in holes:
        if hole_begin > begin:
            yield begin, hole_begin
        begin = max(begin, hole_end)
    if end > begin:
        yield begin, end


def median_exposed(steps: Sequence[RecordedStep]) -> dict[tuple[Key, Direction], float]:
    """How long each bucket group was waited for, the median over steps."""
    found: dict[tuple[Key, Direction], list[float]] = {}
    for step in steps:
        for span in step.spans:
            if span.kind == "wait" and span.key is not None:
                direction: Direction = "gather" if span.name == "gather" else "reduce"
                found.setdefault((span.key, direction), []).append(span.end - span.begin)
    return {key: statistics.median(times) for key, times in found.items()}


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rates that explain recorded times best."""

    device: Device
    link: Link
    collectives: int
    """How many were looked at."""


def calibrate(
    steps: Sequence[RecordedStep],
    variants: Sequence[Variant],
    groups: Mapping[Key, BucketGroup],
    *,
    device: Device,
) -> Calibration:
    """Fit the device to the runs of graphs and the link to the collectives.

    The device keeps its proportions: one factor on all three rates makes the compute time of the median step right. The
    link is a least-squares line through (bytes, time), time counted from when the link was free.
    """
    by_name = {f"graph{variant.graph}_{variant.name}": variant for variant in variants}
    factors = []
    times: dict[tuple[Key, Direction], list[float]] = {}
    for step in steps:
        schedule = measured(step, {})
        runs = [by_name[span.name] for span in step.spans if span.kind == "run" and span.name in by_name]
        expected = sum(device.time_of(node) for run in runs for node in run.nodes)
        if expected:
            factors.append(schedule.busy / expected)
        for transfer in schedule.transfers:
            if groups[transfer.key].ranks > 1:
                time = transfer.end - transfer.begin
                times.setdefault((transfer.key, transfer.direction), []).append(time)
    factor = statistics.median(factors) if factors else 1.0
    launches = [s.end - s.begin for step in steps for s in step.spans if s.kind == "launch"]
    fitted = Device(device.tflops / factor, device.memory_gbs / factor, device.op_us * factor)
    # The lower quartile: a collective also lasts as long as the slowest rank takes to launch it.
    points = [
        (_message_nbytes(groups[key], direction), _lower_quartile(found) / messages_of(groups[key], direction))
        for (key, direction), found in times.items()
    ]
    link = dataclasses.replace(_fit_link(points), launch_us=statistics.median(launches) if launches else 0.0)
    return Calibration(fitted, link, sum(map(len, times.values())))


def _lower_quartile(times: Sequence[float]) -> float:
    return sorted(times)[(len(times) - 1) // 4]


def _message_nbytes(group: BucketGroup, direction: Direction) -> float:
    return (group.grad_nbytes if direction == "reduce" else group.param_nbytes) / group.ranks


def _fit_link(points: Sequence[tuple[float, float]]) -> Link:
    """``points`` are bytes and microseconds of one message."""
    if not points:
        return Link(gbps=float("inf"), alpha_us=0.0)
    sizes, times = [size for size, _ in points], [time for _, time in points]
    mean_size, mean_time = statistics.fmean(sizes), statistics.fmean(times)
    spread = sum((size - mean_size) ** 2 for size in sizes)
    slope = sum((s - mean_size) * (t - mean_time) for s, t in zip(sizes, times)) / spread if spread else 0.0
    alpha = mean_time - slope * mean_size
    if slope <= 0 or alpha < 0:
        # Buckets of about one size tell nothing about latency: all of it counts as bandwidth.
        squares = sum(size * size for size in sizes)
        slope, alpha = (sum(s * t for s, t in zip(sizes, times)) / squares if squares else 0.0), 0.0
    return Link(gbps=8e-3 / slope if slope else float("inf"), alpha_us=alpha)
