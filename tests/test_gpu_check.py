"""``tests/gpu/check.py`` on a CPU: its blocks pass as far as they run here, and what is broken is seen."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import blocks_kernels
import blocks_micro_batch
import blocks_quantizers
import check
import pytest
import torch
from gpu_context import Block, Context
from helpers import fresh_compiler
from torch import Tensor

import megabuf_fx as mb
from megabuf_fx import quantization
from megabuf_fx._compat import recording_mode
from megabuf_fx.capture_subject import Subject
from megabuf_fx.runtime import quantize_mx, quantize_nvfp4
from megabuf_fx.runtime.bucket_groups import ParamGatherer, ParamPhase
from megabuf_fx.runtime.buffers import ParamGradBuffer
from megabuf_fx.runtime.collectives import PendingWork, ProcessGroupComm
from megabuf_fx.runtime.grad_writes import GradWrites
from megabuf_fx.runtime.ops import accumulate_embedding_
from megabuf_fx.runtime.quantized_weights import QuantizedWeights
from megabuf_fx.runtime.stored_mxfp8 import StoredMxfp8
from megabuf_fx.runtime.stored_params import ShardPiece

SCRIPT = Path(__file__).parent / "gpu" / "check.py"
NEEDS_GPU = {"reduce_overhead", "peak_memory", "step_time", "streams", "nccl_memory"}
RUNS_HERE = {
    "versions",
    "micro_batch",
    "whole_step",
    "odd_sizes",
    "accumulate_gemm",
    "accumulate_rows",
    "optimizer_step",
    "casts",
    "quantizers",
    "quantize_speed",
    "quantized_step",
    "saved_memory",
    "collectives",
}


def test_the_script_runs_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "results" / "cpu.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = {row["name"]: row for row in json.loads(out.read_text())}
    assert {name for name, row in results.items() if row["result"] == "SKIP"} == NEEDS_GPU
    assert {name for name, row in results.items() if row["result"] == "PASS"} == RUNS_HERE
    lines, table = done.stdout.split("\n\n")[:2]
    assert [line.split()[0] for line in lines.splitlines()] == [row["result"] for row in results.values()]
    assert [line.split()[:2] for line in table.splitlines()[2:]] == [
        [name, row["result"]] for name, row in results.items()
    ]


def test_a_failing_block_is_reported_and_the_others_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(context: Any) -> str:
        raise ValueError("planted,\nin two lines")

    def slow(context: Any) -> str:
        time.sleep(0.05)
        return "done"

    blocks = (Block("bad", fail), Block("slow", slow, limit_s=0.01), check.BLOCKS[0])
    monkeypatch.setattr(check, "BLOCKS", blocks)
    assert check.main(["--device", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAIL bad: ValueError: planted, in two lines (line ")
    assert " of check.py) [" in lines[0]
    assert lines[1].startswith("PASS slow done (over its 0 s) [")
    assert lines[2].startswith("PASS versions Python ")
    assert [line.split()[:2] for line in lines[6:9]] == [["bad", "FAIL"], ["slow", "PASS"], ["versions", "PASS"]]
    assert check.main(["--device", "cpu", "--blocks", "versions,slow"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--blocks", "whole_stp"], "unknown blocks ['whole_stp']"), (["--compilers", "nvcc"], "unknown compiler")],
)
def test_options_are_checked(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit):
        check.main(["--device", "cpu", *arguments])
    assert message in capsys.readouterr().err


def without_flag(patch: pytest.MonkeyPatch) -> None:
    """The host no longer says whether a replayed micro-batch overwrites or adds."""
    original = GradWrites.before_replay

    def before_replay(self: GradWrites, writes: Any) -> None:
        original(self, writes)
        self._capture.flags.accumulate.zero_()

    patch.setattr(GradWrites, "before_replay", before_replay)


def with_right_python_flag(patch: pytest.MonkeyPatch) -> None:
    """Replays of a frozen decision that are right all the same: then the comparison shows nothing."""

    def by_hand(training: Any, function: Callable[[], None], inputs: Any) -> Callable[[], None]:
        return function

    patch.setattr(blocks_micro_batch, "record_by_hand", by_hand)


def without_schedule(patch: pytest.MonkeyPatch) -> None:
    """Replays go on with the learning rate of the first."""
    original = Subject.upload_lr

    def once(self: Subject) -> None:
        if not self.uploaded:
            original(self)

    patch.setattr(Subject, "upload_lr", once)


def without_skipping(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks for NaN and Inf in a captured step."""
    patch.setattr("megabuf_fx.optimizer.found_inf", lambda *unused: torch.zeros((), dtype=torch.bool))


def with_lost_messages(patch: pytest.MonkeyPatch) -> None:
    """An exchange leaves zeros."""

    def lose(self: ProcessGroupComm, received: Sequence[Tensor], sent: Sequence[Tensor], **order: bool) -> PendingWork:
        for tensor in received:
            tensor.zero_()
        return PendingWork(lambda: None, ())

    patch.setattr(ProcessGroupComm, "exchange", lose)


def with_shifted_gradients(patch: pytest.MonkeyPatch) -> None:
    """One slot of a buffer begins an element too early."""
    original = mb.attach

    def attach(model: Any, config: Any) -> Any:
        buf = original(model, config)
        buf.buffers.main_grads[2] = (
            buf.buffers.buffers[0]
            .grad_data[:1]
            .as_strided(buf.buffers.main_grads[2].shape, buf.buffers.main_grads[2].stride())
        )
        return buf

    patch.setattr(mb, "attach", attach)


def without_accumulation(patch: pytest.MonkeyPatch) -> None:
    """The product overwrites what it should be added to."""

    def overwrite(main: Tensor, lhs: Tensor, rhs: Tensor, accumulate: bool) -> None:
        main.copy_(lhs.float() @ rhs.float())

    patch.setattr(blocks_kernels, "accumulate_wgrad_", overwrite)


def with_padding_rows(patch: pytest.MonkeyPatch) -> None:
    """Padding tokens count like others."""

    def add(main: Tensor, rows: Tensor, indices: Tensor, padding: int, accumulate: bool, **factors: float) -> None:
        accumulate_embedding_(main, rows, indices, -1, accumulate, **factors)

    patch.setattr(blocks_kernels, "accumulate_embedding_", add)


def without_write_back(patch: pytest.MonkeyPatch) -> None:
    """Updated masters do not reach 16-bit parameters."""
    patch.setattr("megabuf_fx.optimizer.write_params", lambda buffers, runs: None)


def without_clamp(patch: pytest.MonkeyPatch) -> None:
    """Values beyond the range go to the cast as they are."""

    def encode(y: Tensor, fp8_dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
        codes = y.to(fp8_dtype).view(torch.uint8)
        return torch.where(y.isnan(), 0x7F, codes)

    patch.setattr(blocks_quantizers, "encode_fp8", encode)


def with_truncated_bf16(patch: pytest.MonkeyPatch) -> None:
    """Masters are cut to bf16 instead of rounded, as the interpreter of Triton does."""

    def cut(values: Tensor, dtype: torch.dtype) -> Tensor:
        return (values.float().view(torch.int32) & -0x10000).view(torch.float32)

    for module in ("fp8", "nvfp4"):
        patch.setattr(f"megabuf_fx.runtime.stored_{module}.as_stored", cut)


def with_scales_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Every MX block has twice the scale that it needs."""
    original = quantize_mx.e8m0_scales
    patch.setattr(quantize_mx, "e8m0_scales", lambda amax, rule: original(amax, rule) + 1)


def with_high_nibble_first(patch: pytest.MonkeyPatch) -> None:
    """Two codes of a byte have changed places, there and back."""
    patch.setattr(quantize_nvfp4, "pack_nibbles", lambda codes: codes[..., 1::2] | (codes[..., ::2] << 4))
    original = quantize_nvfp4.unpack_nibbles
    patch.setattr(
        quantize_nvfp4, "unpack_nibbles", lambda packed: original(packed).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    )


def without_copy_out(patch: pytest.MonkeyPatch) -> None:
    """Gathered values are cleared before anybody has quantized them."""
    patch.setattr(StoredMxfp8, "copy_out", lambda self, bucket: None)


def without_clearing(patch: pytest.MonkeyPatch) -> None:
    """Gathered values stay where gradients will be."""

    def finish_gather(self: ParamGradBuffer, bucket: int) -> None:
        if self.stored is not None:
            for move in (self.shared.copy_out, self.shared.clear) if self.shared is not None else ():
                move(bucket)
            self.stored.copy_out(bucket)

    patch.setattr(ParamGradBuffer, "finish_gather", finish_gather)


def with_stale_staging(patch: pytest.MonkeyPatch) -> None:
    """A captured step stages what was staged when it was captured."""
    original = StoredMxfp8.write_shard

    def write_shard(self: StoredMxfp8, pieces: list[ShardPiece], reduce_max: Any) -> None:
        if recording_mode() is not None:
            # What is on the tape then depends on no master.
            pieces = [piece._replace(values=torch.full_like(piece.values, 0.25)) for piece in pieces]
        original(self, pieces, reduce_max)

    patch.setattr(StoredMxfp8, "write_shard", write_shard)


def with_early_copy_out(patch: pytest.MonkeyPatch) -> None:
    """Gathered values are quantized before they have come."""
    original, copy_out = ParamGatherer.wait, StoredMxfp8.copy_out

    def wait(self: ParamGatherer, group: int) -> None:
        for bucket in self.plan.groups[group].buckets if self.phases[group] is ParamPhase.GATHERING else ():
            stored = self.buffers[bucket.buffer].stored
            if isinstance(stored, StoredMxfp8):
                copy_out(stored, bucket.index)
        original(self, group)

    patch.setattr(StoredMxfp8, "copy_out", lambda self, bucket: None)
    patch.setattr(ParamGatherer, "wait", wait)


def with_private_staging(patch: pytest.MonkeyPatch) -> None:
    """Nothing is shared, whatever was asked for."""
    original = quantization._staging

    def staging(config: Any, plan: Any, layout: Any, grad_data: Tensor) -> Any:
        return original(dataclasses.replace(config, reuse_grad_buf_for_mxfp8_param_ag=False), plan, layout, grad_data)

    patch.setattr(quantization, "_staging", staging)


def with_shadows_of_their_own(patch: pytest.MonkeyPatch) -> None:
    """Every hidden parameter has memory, so that nothing is saved."""
    original = QuantizedWeights._hide

    def hide(self: QuantizedWeights, index: int) -> None:
        original(self, index)
        self._params[index].data = self._params[index].data.clone()

    patch.setattr(QuantizedWeights, "_hide", hide)


@pytest.mark.parametrize(
    ("name", "plant", "message"),
    [
        ("micro_batch", without_flag, "losses and main_grads"),
        ("micro_batch", with_right_python_flag, "a frozen overwrite leaves"),
        ("whole_step", without_schedule, "losses, parameters and masters"),
        ("whole_step", without_skipping, "after an Inf batch"),
        ("collectives", with_lost_messages, "losses, parameters and masters"),
        ("odd_sizes", with_shifted_gradients, "gradients"),
        ("accumulate_gemm", without_accumulation, "accumulating"),
        ("accumulate_rows", with_padding_rows, "torch.float32, accumulate=False"),
        ("optimizer_step", without_write_back, "bfloat16 parameters"),
        ("casts", without_clamp, "codes of torch.float8_e"),
        ("quantizers", with_scales_off_by_one, "mxfp8 rceil dim -1"),
        ("quantizers", with_high_nibble_first, "nvfp4 ROW, plain, eager: codes"),
        ("quantize_speed", with_truncated_bf16, "against its values quantized whole"),
        ("quantized_step", without_copy_out, "weights after ordinary steps"),
        ("quantized_step", without_clearing, "write gradients over parameters (I1)"),
        ("quantized_step", with_stale_staging, "weights after replay"),
        ("quantized_step", with_early_copy_out, "ordinary steps give NaN"),
        ("saved_memory", with_private_staging, "shared mxfp8: "),
        ("saved_memory", with_shadows_of_their_own, "fp8: "),
    ],
)
def test_planted_errors_are_seen(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    plant: Callable[[pytest.MonkeyPatch], None],
    message: str,
) -> None:
    (block,) = (block for block in check.BLOCKS if block.name == name)
    context = Context(torch.device("cpu"))
    plant(monkeypatch)
    result = check.run_block(block, context)
    assert result.result == "FAIL", result
    assert "CheckError" in result.note, result
    assert message in result.note, result
    assert re.search(r"\(line \d+ of blocks_\w+\.py\)", result.note), result
    monkeypatch.undo()
    fresh_compiler()
