"""``capture_step``: a whole training step as one CUDA graph, or as a tape where there is no GPU.

[Note: what is captured]
All of ``step_fn``: micro-batches, reductions, clipping, the optimizer's update and gathers. Compiled graphs have the
roles of an ordinary step: the host chooses them once, while the step is captured, and every collective that a graph
starts is waited for later in the same step. Learning rates and all other numbers that change are read from
``StepFlags``; the host writes them before a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import megabuf_fx._compat as _compat
from megabuf_fx.capture_checks import HostState, changes, held_gradients, refuse_unfit
from megabuf_fx.capture_subject import CaptureError, Subject, capture, clone_tensors, raise_on_all_ranks
from megabuf_fx.handle import MegabufHandle, find_handles
from megabuf_fx.optimizer import DistributedOptimizer
from megabuf_fx.tape import Tape


def capture_step(
    step_fn: Callable[[Any], Any],
    example_batch: Any,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    grad_scaler: torch.amp.GradScaler | None = None,
    external: Mapping[str, Tensor] | None = None,
    warmup: int = 3,
) -> CapturedStep:
    """Capture ``step_fn(batch)``, a whole training step that ends with ``zero_grad``.

    Runs the step ``warmup`` times on a side stream, twice more to check it, and captures it; then undoes what these
    steps changed: parameters, module buffers, optimizer state, random number generators. Every rank must call it. On a
    GPU the step becomes a ``torch.cuda.CUDAGraph``, elsewhere a ``Tape``, which replays the same ops without Python.

    Args:
        example_batch: tensors in nested containers; later batches must have the same shapes, dtypes and devices. What
            is no tensor in it stays as it is here.
        optimizer: those that the step steps, over attached models. Fused ones (``fused=True``), or on a GPU
            ``capturable=True``; those of torch itself with a tensor as ``lr``.
        grad_scaler: the ``torch.amp.GradScaler`` that the step uses; needs a fused optimizer.
        external: further tensors that outlive a step and that the step uses, by name.
        warmup: ordinary steps before the capture, at least 2: compilation, optimizer state, first-step agreements.

    Raises:
        CaptureError: the step does not end in the state in which it began, reads values on the host, uses memory that
            nobody declared, or depends on numbers that Python computes; the message lists what, by name.
        ValueError: an optimizer that cannot be captured, a model that is not attached.
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    handles = _handles_of(optimizers)
    refuse_unfit(optimizers, handles)
    held = [f"gradients of an earlier backward are in '{name}'" for name in held_gradients(handles)]
    raise_on_all_ranks(held, handles, "call zero_grad() before capture_step")
    declared = dict(external or {})
    if grad_scaler is not None:
        declared.update(_compat.scaler_tensors(grad_scaler, handles[0].buffers.token.device))
        for handle in handles:
            handle.buffers.capture.flags.loss_scale = declared["loss_scale"]
    subject = Subject(step_fn, example_batch, optimizers, handles, declared)
    return CapturedStep(subject, *capture(subject, warmup=warmup, is_micro_batch=False))


class Captured:
    """Something that was captured, with the inputs it reads and the outputs it writes."""

    def __init__(self, subject: Subject, graph: torch.cuda.CUDAGraph | Tape, outputs: Any, begin: HostState) -> None:
        self.graph = graph
        """The ``CUDAGraph``, or the tape."""
        self.replays = 0
        self._subject = subject
        self._outputs = outputs
        self._begin = begin
        self._memory = [(name, tensor, tensor.data_ptr()) for name, tensor in subject.statics().items()]
        self._members = [member for handle in subject.handles for member in _members_of(handle.model)]
        self._epochs = [handle.buffers.capture.epoch for handle in subject.handles]
        for handle in subject.handles:
            handle.buffers.capture.add(self)

    def release(self) -> None:
        """Give back the graph and its memory; the next call is refused."""
        self.graph.reset()
        self._outputs = None
        self._memory.clear()
        self._members.clear()

    def _check_model(self) -> None:
        for handle in self._subject.handles:
            handle.check_module_hooks()
        for module, name, path, tensor in self._members:
            if getattr(module, name, None) is not tensor:
                self._refuse(f"'{path}' is another tensor than when it was captured")

    def _check_memory(self) -> None:
        for handle in self._subject.handles:
            handle.buffers.access.hide_params()
        for handle, epoch in zip(self._subject.handles, self._epochs):
            if handle.buffers.capture.epoch != epoch:
                self._refuse(handle.buffers.capture.reason)
        for name, tensor, address in self._memory:
            if tensor.data_ptr() != address:
                self._refuse(f"{name} is in other memory than when it was captured")

    def _check_host_state(self, *, ignoring: tuple[str, ...] = ()) -> None:
        found = changes(self._begin, self._subject.host_state())
        found = [line for line in found if not line.startswith(ignoring)]
        if found:
            self._refuse(f"it does not begin as it did, {found[0]}")

    def _refuse(self, reason: str) -> None:
        raise CaptureError(f"this capture is not valid any more: {reason}. Capture again")

    def _copy_in(self, batch: Any) -> None:
        static, given = _compat.tree_leaves(self._subject.static), _compat.tree_leaves(batch)
        if len(static) != len(given):
            raise CaptureError(f"the batch has {len(given)} leaves, the example had {len(static)}")
        for index, (mine, value) in enumerate(zip(static, given)):
            if not isinstance(mine, Tensor):
                if mine is not value and mine != value:
                    raise CaptureError(f"leaf {index} of the batch is {value!r}, but {mine!r} was captured")
            elif not isinstance(value, Tensor) or value.shape != mine.shape or value.dtype != mine.dtype:
                got = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)
                raise CaptureError(f"leaf {index} of the batch is {got}, captured was {tuple(mine.shape)} {mine.dtype}")
            else:
                mine.copy_(value, non_blocking=True)

    def _replay(self) -> Any:
        """Replay; copies of the outputs, which the next replay overwrites."""
        before = self._subject.host_state() if isinstance(self.graph, Tape) else None
        self.graph.replay()
        self.replays += 1
        if before is not None:
            found = changes(before, self._subject.host_state())
            if found:
                raise CaptureError(f"a replay changed the state of the host: {found[0]}")
        return clone_tensors(self._outputs)


class CapturedStep(Captured):
    """What ``capture_step`` returns: call it with a batch to take one training step."""

    def __init__(self, subject: Subject, graph: torch.cuda.CUDAGraph | Tape, outputs: Any, begin: HostState) -> None:
        super().__init__(subject, graph, outputs, begin)
        self._gathers = [handle.buffers.gather_phases for handle in subject.handles]

    def __call__(self, batch: Any) -> Any:
        """Copy ``batch`` into the static inputs, replay, and return copies of what the step returned.

        Raises:
            CaptureError: the capture is no longer valid, or the batch does not fit.
            RuntimeError: NaN or Inf was found (``check_for_nan_in_grad``, ``max_skipped_steps``), on every rank; the
                update was left out.
        """
        subject = self._subject
        self._check_memory()
        self._check_model()
        for handle, gathers in zip(subject.handles, self._gathers):
            if handle.buffers.gather_phases != gathers:
                # Somebody has gathered parameters by hand; the step gathers them again.
                handle.buffers.sync_params()
                subject.stage_params(handle)
                handle.buffers.gather_phases = gathers
        self._check_host_state()
        for each in subject.optimizers:
            if isinstance(each, DistributedOptimizer):
                each.warn_of_written_weights()
        self._copy_in(batch)
        subject.upload_lr()
        outputs = self._replay()
        self._note_step()
        return outputs

    def _note_step(self) -> None:
        """What the host would have noted, had it run the step."""
        for handle in self._subject.handles:
            handle.buffers.count_step()
        for each in self._subject.optimizers:
            _compat.mark_stepped(each)
            if isinstance(each, DistributedOptimizer):
                each.note_written_weights()
                # Looking waits for the device, so it is done as seldom as the limit allows.
                if each.max_skipped_steps is not None and self.replays % each.max_skipped_steps == 0:
                    each.check_skipped()
        for handle in self._subject.handles:
            handle.buffers.report(has_findings=True)


def _members_of(model: nn.Module) -> list[tuple[nn.Module, str, str, Tensor]]:
    """Parameters and buffers: the module that holds each, its name there and in the model."""
    return [
        (module, name, f"{path}.{name}".removeprefix("."), tensor)
        for path, module in model.named_modules()
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    ]


def _handles_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[MegabufHandle]:
    params = [param for each in optimizers for group in each.param_groups for param in group["params"]]
    handles = find_handles(params)
    if not handles:
        raise ValueError("capture_step needs optimizers over attached models; call megabuf_fx.attach(model) first")
    devices = {handle.buffers.token.device for handle in handles}
    if len(devices) > 1:
        raise ValueError(f"the models of one captured step must be on one device, not on {sorted(map(str, devices))}")
    return handles
