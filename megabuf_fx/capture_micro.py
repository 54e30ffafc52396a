"""``capture_micro_batch``: one captured forward and backward that serves every micro-batch of a step.

[Note: captured micro-batches]
Whether gradients overwrite or add is a number on the device (``StepFlags.accumulate``), which the host writes before a
replay: a Python flag would be frozen at the capture. Compiled backwards have the role ``flagged`` for it. Nothing is
communicated inside: the optimizer reduces, after the last micro-batch, and gathers before the first one. So nothing
overlaps; where all micro-batches fit into one graph, ``capture_step`` is better.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from megabuf_fx.capture import Captured
from megabuf_fx.capture_checks import HostState
from megabuf_fx.capture_subject import Subject, capture
from megabuf_fx.handle import handle


class CapturedMicroBatch(Captured):
    """What ``capture_micro_batch`` returns: call it with a micro-batch to add its gradients to the step's."""

    def __init__(self, subject: Subject, graph: Any, outputs: Any, begin: HostState, writes: list[int]) -> None:
        super().__init__(subject, graph, outputs, begin)
        self._writes = writes

    def __call__(self, batch: Any) -> Any:
        """Copy ``batch`` into the static inputs, replay, and return copies of what the function returned.

        Raises:
            CaptureError: the capture is no longer valid, or the batch does not fit.
            RuntimeError: gradients of this step were reduced already.
        """
        self._check_memory()
        self._check_model()
        (owner,) = self._subject.handles
        owner.buffers.sync_params()
        owner.buffers.writes.before_replay(self._writes)
        self._check_host_state(ignoring=("gradients in", "no_sync"))
        self._copy_in(batch)
        outputs = self._replay()
        owner.buffers.writes.after_replay(self._writes)
        return outputs


def capture_micro_batch(
    function: Callable[[Any], Any],
    example_batch: Any,
    *,
    model: nn.Module,
    external: Mapping[str, Tensor] | None = None,
    warmup: int = 2,
) -> CapturedMicroBatch:
    """Capture ``function(batch)``, the forward and backward of one micro-batch of ``model``, which is attached.

    Call the result for each micro-batch, then the optimizer as always; without the distributed optimizer
    ``buf.finish_grad_sync()`` before it, which reduces and publishes ``.grad``. Arguments are those of
    ``capture_step``, and so is what is checked. What running it changed is undone, gradients are reset.

    Raises:
        CaptureError: as ``capture_step``.
        ValueError: the model is not attached.
    """
    owner = handle(model)

    def run(batch: Any) -> Any:
        with owner.no_sync():
            return function(batch)

    written: list[int] = []

    def reset() -> None:
        written[:] = sorted(owner.buffers.state.written)
        owner.zero_grad()

    owner.buffers.sync_params()
    owner.zero_grad()
    subject = Subject(run, example_batch, [], [owner], dict(external or {}), reset)
    graph, outputs, begin = capture(subject, warmup=warmup, is_micro_batch=True)
    return CapturedMicroBatch(subject, graph, outputs, begin, written)
