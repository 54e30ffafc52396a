"""The worked example on quantized buffers, byte for byte: as written, as ``megabuf`` says, as attached buffers are.

Three weights W0 [64, 64], W1 [96, 32], W2 [32, 32] in bf16, two ranks, buckets of 4000 elements.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from cli_attached import QUANTIZED, Attached
from cli_models import check_golden, ledger, options_of, run, worked_example
from helpers import seeded
from tabulate import tabulate

import megabuf_fx as mb
import megabuf_fx._compat as _compat
from megabuf_fx.runtime.shards import shard_bounds

# The sizes and ranges of the reference, in the order W2, W1, W0; codes and scales outside of buffers are ours.
ELEMENTS = {2: (0, 1024), 1: (1024, 4096), 0: (4096, 8192)}
BUCKETS = ((0, 4096), (4096, 8192))
GRAD_BYTES = {True: 4, False: 2}
"""Of an element, in fp32 or bf16."""
GATHERED_BYTES: dict[str, int | Fraction] = {
    "fp8": 1,
    "fp8 delayed": 1,
    "mxfp8": 2,
    "mxfp8 shared": 2,
    "nvfp4": Fraction(1, 2),
}
PARAM_DATA = {"fp8": 8192, "fp8 delayed": 8192, "mxfp8": 16384, "mxfp8 shared": 0, "nvfp4": 4096}
OUTSIDE = {
    "fp8": 3 * (16 + 12 + 4),
    "fp8 delayed": 3 * (16 + 12 + 16 * 4),
    "mxfp8": 8192 + 256,
    "mxfp8 shared": 8192 + 256,
    "nvfp4": (16 + 16 + 16) + 3 * 16,
}


class Line(NamedTuple):
    """Something in bytes, three times."""

    what: str
    written: object
    """By the reference, and by hand."""
    said: object
    """By ``megabuf``."""
    attached: object


class View(NamedTuple):
    """One of the two flat tensors of the example's buffer."""

    what: str
    written_bytes: int | Fraction
    """Per element."""
    said_bytes: int | Fraction
    data: torch.Tensor
    whole: torch.Tensor
    """In whose bytes ``data`` lies."""
    elements_per_item: int = 1

    def line(self, label: str, written: Sequence[int], said: Sequence[int], found: Sequence[int]) -> Line:
        """A range of elements, in bytes."""
        part = self.data[found[0] // self.elements_per_item : found[1] // self.elements_per_item]
        start = part.data_ptr() - self.whole.data_ptr()
        return Line(
            f"{label} {self.what}",
            _span(written[0] * self.written_bytes, written[1] * self.written_bytes),
            _span(said[0] * self.said_bytes, said[1] * self.said_bytes),
            _span(start, start + part.nbytes),
        )


def _span(start: int | Fraction, end: int | Fraction) -> str:
    return f"[{start}, {end})"


class Example:
    """The worked example in one format, on the command line and attached."""

    def __init__(self, name: str, *, fp32: bool) -> None:
        config = {"grad_reduce_in_fp32": fp32, "bucket_size": 4000, **QUANTIZED[name]}
        self.name, self.fp32 = name, fp32
        self.arguments = f"cli_models:worked_example --dtype bf16 --dp 2 {options_of(config)}"
        self.rows = ledger(self.arguments, "counted")
        (self.planned,) = json.loads(run("plan", *self.arguments.split(), "--json"))["plan"]["buffers"]
        with _compat.fake_process_group(world_size=2, rank=0):
            full = mb.MegabufConfig(inner_compiler="aot_eager", **config)
            self.attached = Attached(seeded(worked_example).bfloat16(), full)
            self.attached.handle.detach()
        (self.buffer,) = self.attached.handle.buffers.buffers

    def sizes(self) -> list[Line]:
        written = {
            "grad_data": 8192 * GRAD_BYTES[self.fp32],
            "param_data": PARAM_DATA[self.name],
            "codes and scales": OUTSIDE[self.name],
            "shadow": 4096 * 2,
            "fp32 masters": 4096 * 4,
            "Adam moments": 4096 * 8,
        }
        written["resident"] = sum(written.values())
        return [Line(key, written[key], self.rows[key], self.attached.sizes[key]) for key in written]

    def ranges(self) -> list[Line]:
        """Where weights, and the ranks' shards of buckets, lie in gradients and in what is gathered."""
        lines = []
        for view in self._views():
            for param in self.planned["params"][::-1]:
                index = int(param["name"].split(".")[0])
                slot = self.buffer.slots[index]
                said = (param["start"], param["end"])
                lines.append(view.line(f"W{index}", ELEMENTS[index], said, (slot.start, slot.end)))
            buckets = zip(BUCKETS, self.planned["buckets"], self.buffer.layout.buckets)
            for number, (written, said, found) in enumerate(buckets):
                for rank in (0, 1):
                    halves = [shard_bounds(bucket, 2, rank) for bucket in (written, said, found)]
                    lines.append(view.line(f"bucket {number}, rank {rank}", *halves))
        return lines

    def _views(self) -> tuple[View, View]:
        stored, grads = self.buffer.stored, self.buffer.grad_data
        assert stored is not None

        def said(row: str) -> Fraction:
            # One of two ranks sends half of what is reduced or gathered.
            return Fraction(2 * self.rows[row], self.planned["numel"])

        whole = grads if self.name == "mxfp8 shared" else stored.param_data
        each = stored.format.elements_per_byte
        return (
            View("gradient", GRAD_BYTES[self.fp32], said("gradient reduce-scatter"), grads, grads),
            View("gathered", GATHERED_BYTES[self.name], said("parameter all-gather"), stored.param_data, whole, each),
        )


def test_worked_example(write_results: bool) -> None:
    """Side by side in ``worked_example.txt``: written, said and attached are equal, byte for byte."""
    tables = []
    for name in QUANTIZED:
        for fp32 in (True, False):
            example = Example(name, fp32=fp32)
            lines = [*example.sizes(), *example.ranges()]
            assert [line for line in lines if not line.written == line.said == line.attached] == []
            table = tabulate(
                lines,
                headers=["bytes", "written", "megabuf", "attached"],
                tablefmt="simple",
                disable_numparse=True,
                colalign=["left", *["right"] * 3],
            )
            tables.append(f"{example.arguments}\n\n{table}\n")
    check_golden("worked_example", "\n".join(tables), write=write_results)
