"""What is around each collective: ranges for ``torch.profiler``, and (MEGABUF_PROFILE=1) the times of recent steps.

    forward   |-- graph0_forward --|                                    one run of a compiled graph
    launch                    |-|............done                       the call that starts a collective, its end
    wait                                     |---|                      how long whoever needs the result stood still

Times are microseconds since the step began: of the host's clock on CPUs, of events on the current stream on a GPU. They
are written after every step, one file per rank and model, and hold the last ``KEPT_STEPS`` steps.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch.profiler import record_function

from megabuf_fx.runtime.collectives import PendingWork
from megabuf_fx.runtime.plan import BucketPlan

FORMAT_VERSION = 3
KEPT_STEPS = 20

Collective = Literal["reduce_scatter", "all_reduce", "all_gather"]
Awaited = Literal["reduction", "gather"]


class Clock(Protocol):
    """Marks moments; how far apart two of them are may be known only later."""

    def mark(self) -> Any: ...

    def microseconds(self, begin: Any, end: Any) -> float: ...

    def has_passed(self, mark: Any) -> bool: ...


class HostClock:
    def mark(self) -> int:
        return time.perf_counter_ns()

    def microseconds(self, begin: int, end: int) -> float:
        return (end - begin) / 1e3

    def has_passed(self, mark: int) -> bool:
        return True


class DeviceClock:
    """Events on the stream that is current where they are marked; the host never waits for them."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def microseconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end)) * 1e3

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())


@dataclass(slots=True)
class _Span:
    kind: Literal["run", "launch", "wait"]
    name: str
    group: int | None
    begin: Any
    end: Any = None
    done: list[Any] = field(default_factory=list)
    """Of a launch: when each of its collectives had finished."""


@dataclass(slots=True)
class _Step:
    number: int
    origin_us: float
    """``begin`` on the host's clock, which all models of a process share."""
    begin: Any
    spans: list[_Span] = field(default_factory=list)
    end: Any = None
    has_compile: bool = False


class StepRecorder:
    """Times of one model's steps, written to ``path`` after each."""

    def __init__(self, path: Path, *, rank: int, handle: int, clock: Clock, is_paused: Callable[[], bool]) -> None:
        self._path = path
        self._head = {"format_version": FORMAT_VERSION, "rank": rank, "handle": handle}
        self._clock = clock
        self._is_paused = is_paused
        self._steps: deque[dict[str, Any]] = deque(maxlen=KEPT_STEPS)
        self._unresolved: list[_Step] = []
        self._step: _Step | None = None
        self._count = 0
        self._has_compile = False
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)

    def note_compile(self) -> None:
        """The running step compiles something, so its times say nothing about others."""
        self._has_compile = True

    @contextlib.contextmanager
    def span(self, kind: Literal["run", "launch", "wait"], name: str, group: int | None = None) -> Iterator[_Span]:
        """Record how long the body takes."""
        if self._is_paused():
            yield _Span(kind, name, group, None)
            return
        if self._step is None:
            self._step = _Step(self._count, time.perf_counter_ns() / 1e3, self._clock.mark())
        span = _Span(kind, name, group, self._clock.mark())
        self._step.spans.append(span)
        yield span
        span.end = self._clock.mark()

    def watch(self, span: _Span, works: Sequence[PendingWork]) -> None:
        """Note when the collectives that were started in ``span`` finish."""
        for pending in works:
            if pending.work is None or span.begin is None:
                continue
            # Some backends have no futures; then the end of the wait is all that is known.
            with contextlib.suppress(RuntimeError, NotImplementedError):
                future: Any = pending.work.get_future()
                # Called by whatever thread sees the collective finish; on a GPU on a stream that has waited for it.
                future.add_done_callback(lambda _: span.done.append(self._clock.mark()))

    def end_step(self) -> None:
        """The step is over: what comes next belongs to another one."""
        step, self._step = self._step, None
        if step is None:
            return
        step.end, step.has_compile = self._clock.mark(), self._has_compile
        self._has_compile = False
        self._count += 1
        self._unresolved.append(step)
        self._write(lambda waiting: self._clock.has_passed(waiting.end))

    def close(self) -> None:
        """Write what is still unresolved; a step that has not ended is dropped."""
        if self._unresolved and isinstance(self._clock, DeviceClock):
            self._unresolved[-1].end.synchronize()
        self._write(lambda _: True)

    def _write(self, is_ready: Callable[[_Step], bool]) -> None:
        count = len(self._steps)
        while self._unresolved and is_ready(self._unresolved[0]):
            self._steps.append(self._resolve(self._unresolved.pop(0)))
            count = -1
        if count == -1:
            # Renamed into place, so that nobody reads half a file.
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(json.dumps({**self._head, "steps": list(self._steps)}) + "\n")
            temporary.replace(self._path)

    def _resolve(self, step: _Step) -> dict[str, Any]:
        def since_begin(mark: Any) -> float | None:
            return None if mark is None else round(self._clock.microseconds(step.begin, mark), 2)

        def record(span: _Span) -> dict[str, Any]:
            done = [since_begin(mark) for mark in list(span.done)]
            return {
                "kind": span.kind,
                "name": span.name,
                "group": span.group,
                "begin_us": since_begin(span.begin),
                "end_us": since_begin(span.end),
                "done_us": max((moment for moment in done if moment is not None), default=None),
            }

        return {
            "step": step.number,
            "origin_us": round(step.origin_us, 2),
            "has_compile": step.has_compile,
            "end_us": since_begin(step.end),
            # A span that an exception left has no end.
            "spans": [record(span) for span in step.spans if span.end is not None],
        }


class CollectiveTrace:
    """Runs the collectives of one model inside ranges and spans; does nothing else when nobody looks."""

    def __init__(self, plan: BucketPlan, recorder: StepRecorder | None, is_profiling: Callable[[], bool]) -> None:
        self.recorder = recorder
        self._plan = plan
        self._is_profiling = is_profiling

    def launch(self, what: Collective, group: int, start: Callable[[], list[PendingWork]]) -> None:
        """Call ``start``, which starts the collectives of bucket group ``group``."""
        if self.recorder is None and not self._is_profiling():
            start()
            return
        with self._range(what, group), self._span("launch", what, group) as span:
            works = start()
        if span is not None and self.recorder is not None:
            self.recorder.watch(span, works)

    def wait(self, what: Awaited, group: int, wait: Callable[[], None]) -> None:
        """Call ``wait``, which waits for the collectives of bucket group ``group``."""
        if self.recorder is None and not self._is_profiling():
            wait()
            return
        with self._range(f"wait_{what}", group), self._span("wait", what, group):
            wait()

    def end_step(self) -> None:
        if self.recorder is not None:
            self.recorder.end_step()

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()

    def _range(self, what: str, group: int) -> contextlib.AbstractContextManager[object]:
        if not self._is_profiling():
            return contextlib.nullcontext()
        names = [self._plan.params[param].name for param in self._plan.groups[group].params]
        return record_function(f"megabuf::{what} bucket {group} ({names[0]}{' ...' if len(names) > 1 else ''})")

    def _span(
        self, kind: Literal["launch", "wait"], name: str, group: int
    ) -> contextlib.AbstractContextManager[_Span | None]:
        return contextlib.nullcontext() if self.recorder is None else self.recorder.span(kind, name, group)


def make_recorder(
    directory: str | None, *, rank: int, handle: int, device: torch.device, is_paused: Callable[[], bool]
) -> StepRecorder | None:
    """The recorder that writes ``<directory>/rank<rank>/profile_model<handle>.json``; None without a directory."""
    if directory is None:
        return None
    path = Path(directory) / f"rank{rank}" / f"profile_model{handle}.json"
    clock: Clock = DeviceClock() if device.type == "cuda" else HostClock()
    return StepRecorder(path, rank=rank, handle=handle, clock=clock, is_paused=is_paused)


def record_runs(
    compiled: Callable[[list[Any]], Any], name: str, recorders: Sequence[StepRecorder | None]
) -> Callable[[list[Any]], Any]:
    """``compiled``, noting its runs in ``recorders``; ``compiled`` itself when there are none."""
    live = [recorder for recorder in recorders if recorder is not None]
    if not live:
        return compiled
    for recorder in live:
        recorder.note_compile()

    def run(args: list[Any]) -> Any:
        with contextlib.ExitStack() as stack:
            for recorder in live:
                stack.enter_context(recorder.span("run", name))
            return compiled(args)

    return run
