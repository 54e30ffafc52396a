"""Block of ``check.py``: steps with quantized parameters, MXFP8 through the gradients' storage.

Numbers of invariants (I1 ...) are those of ``runtime/shared_storage.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import quantized_oracles as oracles
import torch
from blocks_quantizers import QUANTIZED, SHARED, same
from gpu_context import CheckError, Context, compare, no_host_reads, require
from gpu_training import STEPS, Training, make_net, replay_at
from torch import Tensor

import megabuf_fx as mb
from megabuf_fx.runtime.buffers import ParamGradBuffer
from megabuf_fx.runtime.collectives import Comm, LocalComm, PendingWork

DELAYED = {**QUANTIZED["fp8"], "fp8_recipe": "delayed", "fp8_amax_history_len": 2}
# Of the net that is trained here; 24 rows of fc3 do not divide into tiles.
NVFP4 = {**QUANTIZED["nvfp4"], "quantized_param_name_patterns": ("fc1*", "fc2*")}


class LateComm(LocalComm):
    """A group of one whose gathers take their time: until ``wait`` the data is NaN, then what was sent."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def all_gather(self, full: Tensor, shard: Tensor) -> PendingWork:
        sent = shard.clone()
        # As codes of fp8, these bytes are NaN, too.
        full.view(torch.uint8).fill_(0xFF)
        if not full.is_cuda:
            return PendingWork(lambda: full.copy_(sent), (sent, full))
        current = torch.cuda.current_stream(full.device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(full.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(1_000_000)
            full.copy_(sent)
            done = self._stream.record_event()
        return PendingWork(lambda: torch.cuda.current_stream(full.device).wait_event(done), (sent, full))


def make_late(group: object, *, name: str, timeout: timedelta | None, instances: int) -> Comm:
    return LateComm()


@dataclass
class Watched(Training):
    """Counts what is left of parameters in the gradients' storage when the first gradient of a step is written."""

    def __post_init__(self) -> None:
        self.leftover = torch.zeros((), dtype=torch.int64, device=self.context.device)
        self._is_first = False
        super().__post_init__()
        (self.buffer,) = (buffer for buffer in self.buf.buffers.buffers if buffer.stored is not None)

    def step(self, windows: Tensor) -> Tensor:
        self._is_first = True
        return super().step(windows)

    def backward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.call(x).float().square().mean()
        if self._is_first and self.buffer.shared is not None:
            # What lies outside of it are gradients of the last step, which will be overwritten.
            assert self.buffer.param_data is not None
            self.leftover += (self.buffer.param_data.view(torch.int16) != 0).sum()
        self._is_first = False
        loss.backward()
        return loss.detach()

    def capture(self, example: Tensor) -> mb.CapturedStep:
        return mb.capture_step(self.step, example, optimizer=self.optimizer, external={"leftover": self.leftover})

    def masters(self) -> dict[int, Tensor]:
        """Of each quantized parameter what it is made of, in its shape and dtype, on the host."""
        found = {}
        for run in self.optimizer.runs:
            if run.is_quantized:
                parts = run.master.detach().split([numel for _, numel in run.pieces])
                for (param, _), values in zip(run.pieces, parts):
                    spec = self.buf.plan.params[param]
                    found[param] = values.cpu().to(spec.dtype).float().view(spec.shape)
        return found


class Case(NamedTuple):
    name: str
    config: Mapping[str, Any]
    dtype: torch.dtype
    overlap: bool = True


CASES = (
    Case("shared mxfp8, fp32 gradients", {**SHARED, "grad_reduce_in_fp32": True}, torch.bfloat16),
    Case("shared mxfp8, bf16 gradients", SHARED, torch.bfloat16),
    Case("delayed fp8", DELAYED, torch.bfloat16),
    Case("nvfp4", NVFP4, torch.float32, overlap=False),
)


def quantized_step(context: Context) -> str:
    """Whole steps with quantized parameters in one graph, gathers taking their time: bitwise as ordinary steps.

    MXFP8 goes through the gradients' storage: nothing is left of it when gradients are written (I1), and forward sees
    what masters give when quantized as bf16 (I7), although buckets are cleared one by one (I3).
    """
    for case in CASES:
        with mock.patch("megabuf_fx.runtime.transports._make_comm", make_late):
            net = make_net(context, dropout=0.125, dtype=case.dtype)
            config = {"bucket_size": 4096, "overlap_param_gather": case.overlap, **case.config}
            training = Watched(context, context.compilers[0], net, config)
        require(len(training.buffer.layout.buckets) > 1, "the model is too small for several quantized buckets")
        batches = [context.randn(2, 32, 64, seed=step).to(case.dtype) for step in range(STEPS)]
        expected = training.run(training.step, batches)
        require(all(bool(value.isfinite().all()) for value in expected), f"{case.name}: ordinary steps give NaN")
        check_stored(training, training.masters(), f"{case.name}: weights after ordinary steps")
        require(int(training.leftover) == 0, f"{case.name}: ordinary steps write gradients over parameters (I1)")
        training.restart()
        captured = training.capture(batches[0])
        training.restart_seed()
        losses = replay_watched(training, captured, batches, case)
        compare([*losses, *training.state()], expected, f"{case.name}: losses, values and masters")
        require(int(training.leftover) == 0, f"{case.name}: replays write gradients over parameters (I1)")
        if case == CASES[0]:
            clear_too_much(training, batches)
    return f"{', '.join(case.name for case in CASES)}: {STEPS} replays bitwise; I1, I3, I7 hold, broken I3 is seen"


def replay_watched(training: Watched, captured: mb.CapturedStep, batches: Sequence[Tensor], case: Case) -> list[Tensor]:
    """The losses of replays; after each, what forward saw must be what masters gave."""
    losses = []
    for step, batch in enumerate(batches):
        # A gather by hand would have the next replay stage its parameters anew.
        before = training.masters()
        with no_host_reads(training.context):
            losses.append(replay_at(training, captured, step, batch))
        # Staged parameters become codes in the next forward; others, and without overlap all, are stored at once.
        is_late = case.overlap and training.buffer.shared is not None
        expected = before if is_late else training.masters()
        check_stored(training, expected, f"{case.name}: weights after replay {step}")
    return losses


def check_stored(training: Watched, masters: Mapping[int, Tensor], what: str) -> None:
    """I7: codes and scales are those of ``masters``, by fp64 arithmetic on the host."""
    stored = training.buffer.stored
    assert stored is not None
    if training.buf.config.fp8_recipe == "delayed":
        # Scales are those of earlier steps.
        return
    for param, values in masters.items():
        found = stored.stored[param]
        if training.buf.config.quantization == "nvfp4":
            expected = oracles.nvfp4(values, rows_of_block=16)
        else:
            expected = oracles.mxfp8(values, is_rceil=True)
        name = f"{what}: '{training.buf.plan.params[param].name}'"
        same(found[0], expected.codes, f"{name}, codes")
        for mine, other in zip(found[1:], expected.scales):
            same(mine, other, f"{name}, scales")


def clear_too_much(training: Watched, batches: Sequence[Tensor]) -> None:
    """Whoever clears the whole storage after the first bucket loses the weights of the others (I3): that must show."""
    original = ParamGradBuffer.finish_gather

    def clear_all(self: ParamGradBuffer, bucket: int) -> None:
        original(self, bucket)
        if self.shared is not None and self.param_data is not None:
            self.param_data.zero_()

    with (
        mock.patch.object(ParamGradBuffer, "finish_gather", clear_all),
        # Gathers that come late would bring back what was cleared.
        mock.patch.object(LateComm, "all_gather", LocalComm.all_gather),
    ):
        training.restart()
        for batch in batches[:2]:
            before = training.masters()
            training.step(batch)
        refused(lambda: check_stored(training, before, "weights"), "weights")
        # The recording sees it without any numbers.
        refused(lambda: training.capture(batches[0]), "in flight")


def refused(function: Callable[[], object], what: str) -> None:
    try:
        function()
    except (CheckError, mb.CaptureError) as error:
        require(what in str(error), f"another error: {error}")
    else:
        raise CheckError("clearing all buckets at once was not seen, so this block proves nothing")
