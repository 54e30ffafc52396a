"""MXFP8 parameters: codes and scales outside of the buffer; what is gathered are the 16-bit values they are made of.

    step      own shard of masters -> staging (param_data, bf16)
    gather    staging moves
    copy_out  every rank quantizes the whole bucket -> codes, scales

So block scales need no collective, and shard edges may cut blocks. ``staging`` is a tensor of its own, or lies in the
gradients' storage (``shared_storage.py``). A bucket ends at a multiple of 128 elements and a parameter starts at one of
64, so blocks of 32 along the last dimension are blocks of the flat bucket, and one kernel quantizes all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megabuf_fx.runtime.layout import BufferLayout, ParamSpec
from megabuf_fx.runtime.quantize_mx import BLOCK_SIZE, NAN_SCALE, MxTensor, ScaleRule, quantize_mxfp8
from megabuf_fx.runtime.stored_params import Compiler, ShardPiece, StoredParams, aligned_slots


class StoredMxfp8(StoredParams):
    """``staging``: ``[numel]`` of the parameters' dtype. See [Note: quantized step]."""

    is_staged = True

    def __init__(
        self,
        layout: BufferLayout,
        params: Sequence[ParamSpec],
        *,
        device: torch.device,
        compiler: Compiler,
        staging: Tensor,
        rule: ScaleRule,
    ) -> None:
        super().__init__(layout, params)
        self.param_data = staging
        self._rule = rule
        self._codes = torch.zeros(layout.numel, dtype=torch.uint8, device=device)
        shapes = {index: (spec.shape[0], spec.shape[1] // BLOCK_SIZE) for index, spec in self.specs.items()}
        self._scale_storage, self._scales = aligned_slots(shapes, torch.uint8, device)
        self.stored = {
            index: MxTensor(self._codes[slot.start : slot.end].view(self.specs[index].shape), self._scales[index])
            for index, slot in self.slots.items()
        }
        self._quantize = compiler(_quantize_)

    def quantize(self, param: int, values: Tensor) -> None:
        quantize_mxfp8(values, self._rule, out=self.stored[param])

    def write_shard(self, pieces: Sequence[ShardPiece], reduce_max: Callable[[Tensor], None]) -> None:
        if pieces:
            torch._foreach_copy_([self.codes_of(piece) for piece in pieces], [piece.values for piece in pieces])

    def copy_out(self, bucket: int) -> None:
        start, end = self.layout.buckets[bucket]
        scales = torch.empty((end - start) // BLOCK_SIZE, dtype=torch.uint8, device=self._codes.device)
        blocks = (-1, BLOCK_SIZE)
        self._quantize(
            self.param_data[start:end].view(blocks), self._codes[start:end].view(blocks), scales.view(-1, 1), self._rule
        )
        members = [index for index, slot in self.slots.items() if slot.bucket == bucket]
        torch._foreach_copy_(
            [self._scales[index].view(-1) for index in members],
            [
                scales[(self.slots[index].start - start) // BLOCK_SIZE : (self.slots[index].end - start) // BLOCK_SIZE]
                for index in members
            ],
        )

    def poison(self, bucket: int) -> None:
        for index, slot in self.slots.items():
            if slot.bucket == bucket:
                self._scales[index].fill_(NAN_SCALE)

    def tensors(self) -> dict[str, Tensor]:
        return {"codes": self._codes, "scales": self._scale_storage}


def _quantize_(blocks: Tensor, codes: Tensor, scales: Tensor, rule: ScaleRule) -> None:
    quantize_mxfp8(blocks, rule, out=MxTensor(codes, scales))
