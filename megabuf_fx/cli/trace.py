"""A schedule as a trace for Perfetto or chrome://tracing (the "Trace Event Format", times in microseconds)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megabuf_fx.cli.dump_files import BucketGroup, Key
from megabuf_fx.cli.explain import collective_name
from megabuf_fx.cli.schedule import Schedule, Transfer

_COMPUTE, _LINK, _EXPOSED = 0, 1, 2
_THREADS = {_COMPUTE: "compute", _LINK: "link", _EXPOSED: "exposed"}


def chrome_trace(schedules: Sequence[Schedule], groups: Mapping[Key, BucketGroup]) -> dict[str, Any]:
    """One process per schedule with rows for compute, link and exposed gaps; arrows lead from launches to transfers."""
    events: list[dict[str, Any]] = []
    for pid, schedule in enumerate(schedules):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": schedule.title}})
        for tid, name in _THREADS.items():
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
        for work in schedule.work:
            arguments = {"operations": work.ops, "flops": work.flops}
            name = f"{work.phase} {work.title}".strip()
            events.append(_slice(pid, _COMPUTE, name, work.phase, work.begin, work.end, arguments))
        for number, transfer in enumerate(schedule.transfers):
            events += _transfer_events(pid, number, transfer, groups[transfer.key])
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _transfer_events(pid: int, number: int, transfer: Transfer, group: BucketGroup) -> list[dict[str, Any]]:
    name = f"{collective_name(group, transfer.direction)} bucket {group.number}"
    arguments = {
        "parameters": list(group.params),
        "elements": group.numel,
        "launched at us": transfer.launch,
        "needed at us": transfer.need,
        "exposed us": transfer.exposed,
        "why": transfer.why,
    }
    flow = {"name": "launch", "cat": "launch", "id": pid * 1_000_000 + number, "pid": pid}
    events = [
        _slice(pid, _LINK, name, transfer.direction, transfer.begin, transfer.end, arguments),
        {**flow, "ph": "s", "tid": _COMPUTE, "ts": transfer.launch},
        {**flow, "ph": "f", "bp": "e", "tid": _LINK, "ts": transfer.begin},
    ]
    if transfer.need is not None and transfer.exposed > 0:
        end = transfer.need + transfer.exposed
        events.append(_slice(pid, _EXPOSED, f"wait for {name}", "exposed", transfer.need, end, {"why": transfer.why}))
    return events


def _slice(
    pid: int, tid: int, name: str, category: str, begin: float, end: float, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": begin,
        "dur": end - begin,
        "args": dict(arguments),
    }
