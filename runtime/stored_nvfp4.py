"""NVFP4 parameters: half a byte per element in ``param_data``, a scale per 16 x 16 tile, one more per parameter.

A shard cuts tiles anywhere, so tile amaxes are a maximum over ranks; the tensor's amax is the largest of them.

    piece of a master  ->  its 16-row bands, zero elsewhere  ->  amax of tiles  ->  maximum over ranks  ->  codes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megabuf_fx.runtime.layout import BufferLayout, ParamSpec
from megabuf_fx.runtime.packed_layout import halve_layout
from megabuf_fx.runtime.quantize_nvfp4 import (
    BLOCK_SIZE,
    BlockShape,
    Nvfp4Tensor,
    block_amax,
    quantize_nvfp4,
    scales_of,
)
from megabuf_fx.runtime.stored_params import (
    Compiler,
    ShardPiece,
    StoredParams,
    aligned_slots,
    as_stored,
    finite_or_inf,
)


class StoredNvfp4(StoredParams):
    """See [Note: quantized step]. ``param_data`` is exactly half of the full layout, in bytes."""

    def __init__(
        self, layout: BufferLayout, params: Sequence[ParamSpec], *, device: torch.device, compiler: Compiler
    ) -> None:
        super().__init__(layout, params)
        # Proves that a rank's bytes are those of its elements.
        self.param_data = torch.zeros(halve_layout(layout).numel, dtype=torch.uint8, device=device)
        tiles = {
            index: (spec.shape[0] // BLOCK_SIZE, spec.shape[1] // BLOCK_SIZE) for index, spec in self.specs.items()
        }
        self._tiles = tiles
        self._block_storage, block_scales = aligned_slots(tiles, torch.uint8, device)
        self._scale_storage, tensor_scales = aligned_slots(dict.fromkeys(tiles, ()), torch.float32, device)
        self.stored = {
            index: Nvfp4Tensor(codes, block_scales[index], tensor_scales[index])
            for index, codes in self.code_views().items()
        }
        self._kept: dict[int, Tensor] = {}
        """Scales of poisoned parameters."""
        self._measure = compiler(_measure)
        self._encode = compiler(_encode)
        self._scale = compiler(_scale_)

    def quantize(self, param: int, values: Tensor) -> None:
        quantize_nvfp4(values, BlockShape.TILE, out=self.stored[param])

    def write_shard(self, pieces: Sequence[ShardPiece], reduce_max: Callable[[Tensor], None]) -> None:
        amax_storage, amax = aligned_slots(self._tiles, torch.float32, self.param_data.device)
        bands: list[tuple[ShardPiece, Tensor, slice]] = []
        for piece in pieces:
            columns = self.specs[piece.param].shape[1]
            height = BLOCK_SIZE * columns
            first, last = piece.start // height, -(-(piece.start + piece.values.numel()) // height)
            band, offset = piece.values, piece.start - first * height
            if band.numel() != (last - first) * height:
                # A shard's edge cuts the first or the last band.
                band = torch.zeros((last - first) * height, device=piece.values.device)
                band[offset : offset + piece.values.numel()].copy_(piece.values)
            rows = slice(first, last)
            amax[piece.param][rows].copy_(self._measure(band.view(-1, columns), self.dtype))
            bands.append((piece, band.view(-1, columns), rows))
        reduce_max(amax_storage)
        # Not in the compiled functions, where all that follows from it would become one block of threads.
        largest = {index: tiles.amax() for index, tiles in amax.items()}
        for index, (_, block_scales, tensor_scale) in self.stored.items():
            self._scale(amax[index], largest[index], block_scales, tensor_scale)
        for piece, band, rows in bands:
            codes = self._encode(band, amax[piece.param][rows], largest[piece.param], self.dtype)
            offset = (piece.start - rows.start * BLOCK_SIZE * band.shape[1]) // 2
            self.codes_of(piece).copy_(codes.view(-1)[offset : offset + piece.values.numel() // 2])

    def copy_out(self, bucket: int) -> None:
        for index, slot in self.slots.items():
            if slot.bucket == bucket and index in self._kept:
                self.stored[index].tensor_scale.copy_(self._kept.pop(index))

    def poison(self, bucket: int) -> None:
        for index, slot in self.slots.items():
            if slot.bucket == bucket:
                # Codes have no NaN, and all ranks have the new scales already.
                self._kept[index] = self.stored[index].tensor_scale.clone()
                self.stored[index].tensor_scale.fill_(torch.nan)

    def tensors(self) -> dict[str, Tensor]:
        return {"block_scales": self._block_storage, "tensor_scales": self._scale_storage}


def _measure(band: Tensor, dtype: torch.dtype) -> Tensor:
    return finite_or_inf(block_amax(as_stored(band, dtype), BlockShape.TILE))


def _scale_(amax: Tensor, largest: Tensor, block_scales: Tensor, tensor_scale: Tensor) -> None:
    """``largest``: the maximum of ``amax``."""
    new_blocks, new_scale = scales_of(amax, largest)
    # Nobody has a piece of what has amax 0, or it is zero and any scale is right.
    is_written = largest > 0
    block_scales.copy_(torch.where(is_written, new_blocks, block_scales))
    tensor_scale.copy_(torch.where(is_written, new_scale, tensor_scale))


def _encode(band: Tensor, amax: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of whole bands; ``amax`` is that of their tiles, ``largest`` that of the whole parameter."""
    values = as_stored(band, dtype)
    return quantize_nvfp4(values, BlockShape.TILE, amax=largest, amax_of_blocks=amax).codes
