"""What is captured, and how: warm up, check, capture, and undo what that changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import megabuf_fx._compat as _compat
from megabuf_fx.capture_checks import (
    HostState,
    Snapshot,
    changes,
    compiles_of,
    find_statics,
    held_gradients,
    host_state,
)
from megabuf_fx.handle import MegabufHandle
from megabuf_fx.optimizer import DistributedOptimizer
from megabuf_fx.runtime.bucket_groups import ParamPhase
from megabuf_fx.tape import Tape, detach_tensors, diff

MAX_SHOWN = 10
"""Problems that one error lists."""


class CaptureError(RuntimeError):
    """A step that cannot be captured, or a captured step that is no longer valid."""


class Subject:
    """What is captured, and all that belongs to it. ``reset`` ends each run where the function itself does not."""

    def __init__(
        self,
        step_fn: Callable[[Any], Any],
        example_batch: Any,
        optimizers: Sequence[torch.optim.Optimizer],
        handles: Sequence[MegabufHandle],
        external: Mapping[str, Tensor],
        reset: Callable[[], None] = lambda: None,
    ) -> None:
        self.step_fn = step_fn
        self.reset = reset
        self.static = clone_tensors(example_batch)
        """The inputs that every replay reads."""
        self.optimizers = list(optimizers)
        self.handles = list(handles)
        self.external = external
        self.device = handles[0].buffers.token.device
        self.uploaded: list[object] = []
        """The learning rates that the device has."""
        for each in self.optimizers:
            if isinstance(each, DistributedOptimizer):
                each.handle.buffers.capture.flags.make_lr(len(each.param_groups))

    def run(self) -> None:
        self.upload_lr()
        self.step_fn(self.static)
        self.reset()

    def upload_lr(self) -> None:
        """Bring the learning rates of the param groups into the table, as far as they have changed."""
        pairs = [
            (group["lr"], lr)
            for each in self.optimizers
            if isinstance(each, DistributedOptimizer)
            for group, lr in zip(each.param_groups, each.handle.buffers.capture.flags.lr)
        ]
        values: list[object] = [value for value, _ in pairs]
        if any(isinstance(value, Tensor) for value in values) or values != self.uploaded:
            for value, lr in pairs:
                if isinstance(value, Tensor):
                    lr.copy_(value)
                else:
                    lr.fill_(float(value))
            self.uploaded = values

    def python_lrs(self) -> list[float]:
        """Learning rates that are numbers of the host; tensors are declared, and writing them is on the tape."""
        groups = [group for each in self.optimizers for group in each.param_groups]
        return [group["lr"] for group in groups if not isinstance(group["lr"], Tensor)]

    def statics(self) -> dict[str, Tensor]:
        inputs = [leaf for leaf in _compat.tree_leaves(self.static) if isinstance(leaf, Tensor)]
        return find_statics(self.optimizers, self.handles, self.external, inputs)

    def changing(self) -> dict[str, Tensor]:
        """What a run changes and the next one reads. Gradients are overwritten first."""
        constant = (
            "grad_data",
            "main_grad",
            "hidden parameter",
            *(() if self.optimizers else ("parameter", "param_data")),
        )
        return {name: tensor for name, tensor in self.statics().items() if not name.startswith(constant)}

    def host_state(self) -> HostState:
        return host_state(self.optimizers, self.handles)

    def stage_params(self, handle: MegabufHandle) -> None:
        """Let what the next gather moves be there, whatever was gathered or restored meanwhile."""
        for each in self.optimizers:
            if isinstance(each, DistributedOptimizer) and each.handle is handle:
                each.stage_params()

    @contextlib.contextmanager
    def captured(self, *, is_micro_batch: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for handle in self.handles:
                stack.enter_context(handle.buffers.capture.active(is_micro_batch=is_micro_batch))
            yield

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """CUDA captures on a stream of its own, and everything that the step touches must have run there before."""
        if self.device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(stream):
                for handle in self.handles:
                    handle.renew_hooks()
                yield
        finally:
            torch.cuda.current_stream(self.device).wait_stream(stream)
        for handle in self.handles:
            handle.renew_hooks()


def capture(
    subject: Subject, *, warmup: int, is_micro_batch: bool
) -> tuple[torch.cuda.CUDAGraph | Tape, Any, HostState]:
    """Warm up, check and capture, then undo what that changed: the graph, its outputs, the host's state before it."""
    if warmup < 2:
        raise ValueError(f"warmup must be at least 2, got {warmup}")
    for handle in subject.handles:
        handle.buffers.access.hide_params()
    snapshot = Snapshot(subject.changing(), subject.device)
    try:
        with subject.side_stream():
            subject.run()
            with subject.captured(is_micro_batch=is_micro_batch):
                for _ in range(warmup - 1):
                    subject.run()
                begin = subject.host_state()
                tape = _check(subject, begin)
                if subject.device.type == "cuda":
                    graph, outputs = _capture_cuda(subject)
                    return graph, outputs, begin
                return tape, tape.outputs, begin
    except BaseException:
        # What the step has left half-done; where ranks are gone, this fails too, and the first error says more.
        for handle in subject.handles:
            with contextlib.suppress(RuntimeError):
                handle.zero_grad()
        raise
    finally:
        snapshot.restore(subject.changing())
        for handle in subject.handles:
            if ParamPhase.STALE in handle.buffers.gather_phases:
                phases = handle.buffers.gather_phases
                subject.stage_params(handle)
                handle.buffers.gather_phases = phases
        subject.uploaded = []
        for each in subject.optimizers:
            if isinstance(each, DistributedOptimizer):
                each.note_written_weights()


def _check(subject: Subject, begin: HostState) -> Tape:
    """Record the step twice and raise CaptureError for all that is wrong with it; the second recording."""
    compiled = compiles_of(subject.handles)
    rates = subject.python_lrs()
    (first, _), (second, end) = _record(subject), _record(subject)
    problems = [
        f"the step leaves gradients in '{name}' for the next one: end the step with zero_grad()"
        for name in held_gradients(subject.handles)
    ]
    if subject.python_lrs() != rates:
        problems.append("the step changes its learning rate; step schedulers between replays")
    problems += [f"the step does not end as it began, {line}" for line in changes(begin, end)]
    problems += [str(violation) for tape in (first, second) for violation in tape.violations]
    difference = diff(first, second)
    if difference is not None and not problems:
        problems.append(f"two runs of the step differ: {difference}. A replay would repeat the first")
    returned = [_numbers(tape.outputs) for tape in (first, second)]
    if returned[0] != returned[1]:
        problems.append(f"the step returns {returned[0]} and then {returned[1]}; only tensors can change in a replay")
    if compiles_of(subject.handles) != compiled:
        problems.append("something was compiled in the last steps; raise `warmup`")
    raise_on_all_ranks(problems, subject.handles, "this step cannot be captured")
    return second


def _record(subject: Subject) -> tuple[Tape, HostState]:
    """One run, and the state of the host after it."""
    tape = Tape(subject.statics, keeps=subject.device.type != "cuda")
    subject.upload_lr()
    with tape:
        outputs = subject.step_fn(subject.static)
    subject.reset()
    # With the outputs at hand: one whose backward is still to come keeps its forward open.
    end = subject.host_state()
    tape.outputs = detach_tensors(outputs)
    return tape, end


def _numbers(outputs: Any) -> list[str]:
    return [repr(value) for value in _compat.tree_leaves(outputs) if not isinstance(value, Tensor)]


def raise_on_all_ranks(problems: Sequence[str], handles: Sequence[MegabufHandle], what: str) -> None:
    """Raise CaptureError on every rank if any has problems: either every rank captures, or none does."""
    shown = list(dict.fromkeys(problems))
    for handle in handles:
        answers = handle.buffers.comm.all_gather_object(shown)
        others = [f"rank {r}: {p}" for r, answer in enumerate(answers) if isinstance(answer, list) for p in answer]
        shown = shown or others
    if shown:
        rest = f"\n* and {len(shown) - MAX_SHOWN} more" if len(shown) > MAX_SHOWN else ""
        raise CaptureError(f"{what}:\n* " + "\n* ".join(shown[:MAX_SHOWN]) + rest)


def _capture_cuda(subject: Subject) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(subject.device)
    # Other threads may call CUDA meanwhile, as NCCL's watchdog does.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(subject.device), capture_error_mode="thread_local"):
        outputs = subject.step_fn(subject.static)
    subject.reset()
    # A graph behind an output would keep the nodes that accumulate gradients on the stream of the capture.
    return graph, detach_tensors(outputs)


def clone_tensors(values: Any) -> Any:
    """``values`` with a copy of every tensor in it."""
    return _compat.tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, values)
