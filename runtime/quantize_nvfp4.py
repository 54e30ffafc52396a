"""NVFP4: blocks of 16 elements with an e4m3 scale each, and one fp32 scale for the tensor; two e2m1 codes in a byte.

    value = e2m1(code) * (e4m3(block scale) * tensor_scale)

    x [rows, 32]   codes [rows, 16]                             block scales
                   byte = code[2i] | code[2i + 1] << 4          ROW   1 x 16   [rows, 2]
                   (an even element is the low nibble)          TILE 16 x 16   [rows // 16, 2]

The low nibble comes first because CUDA's ``__nv_fp4x2_e2m1`` and TransformerEngine (common/recipe/nvfp4.cu, the partial
cast) have it so, and torchao; the OCP specification leaves packing open. TILE is for weights: the transposed tensor has
the same scales. Scales follow TransformerEngine operation by operation, each rounded to fp32
(tests/cpp/operator/test_cast_nvfp4_transpose.cu):

    encode = min(448 * 6 / amax, fp32 maximum), 1 if amax is 0     tensor_scale = 1 / encode
    block scale = e4m3(block amax * (encode * (1 / 6)))
    code = e2m1(x * min(1 / (block scale * tensor_scale), fp32 maximum))

Masters are quantized as bf16: the caller rounds (:func:`megabuf_fx.runtime.quantize_fp8.round_to_bf16`).

[Note: NVFP4 edge cases]
* e2m1 has neither NaN nor infinity. A block that holds one has scale 0x7F, NaN, so that the whole block is NaN; its
  codes are 0, with the sign where the element is finite. TransformerEngine drops NaN and saturates infinity, which
  hides an overflow.
* A tensor amax that is infinite or NaN counts as 0: encode is 1, so blocks without such elements keep finite values.
* A block scale that rounds to 0 (block amax up to 2**-10 / 448 of the tensor's) makes all codes of the block 0.
  TransformerEngine's partial cast writes 6 there, its other kernels 0; the values are 0 in each case.
* A block whose scale times ``tensor_scale`` is below 2**-128 needs a multiplier above the largest fp32; cut to that, it
  leaves the block's codes too small.
* -0 keeps its sign, as 8. Magnitudes above 6 after scaling saturate.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from megabuf_fx.runtime.quantize_fp8 import FP32_MAX, decode_fp8, encode_fp8, exact_quotient, store, tensor_amax

BLOCK_SIZE = 16
E2M1_MAX = 6.0
_ENCODE_MAX = 448.0 * E2M1_MAX
_INVERSE_E2M1_MAX = 0xAAAAAB * 2.0**-26
"""1 / 6 rounded to fp32."""


class BlockShape(Enum):
    """Rows and columns that share a scale."""

    ROW = (1, BLOCK_SIZE)
    TILE = (BLOCK_SIZE, BLOCK_SIZE)


class Nvfp4Tensor(NamedTuple):
    codes: Tensor
    """uint8 ``[..., columns // 2]``, two e2m1 codes each."""
    block_scales: Tensor
    """uint8, e4m3: ``[..., columns // 16]`` of ROW, ``[rows // 16, columns // 16]`` of TILE."""
    tensor_scale: Tensor
    """fp32 ``[]``, multiplies the block scales."""


def pack_nibbles(codes: Tensor) -> Tensor:
    """``[..., n]`` uint8 below 16 -> ``[..., n // 2]``: pairs in a byte, the even element low."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of :func:`pack_nibbles`."""
    # Not torch.stack, which Inductor turns into kernels of its own.
    shifts = torch.arange(0, 8, 4, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 0xF).flatten(-2)


def encode_e2m1(y: Tensor) -> Tensor:
    """uint8 codes 0 to 15 of fp32 values, nearest even, saturating at 6; NaN is 0."""
    magnitude = y.abs()
    # A midpoint belongs to the even code: the comparison with it is strict after an even code only.
    codes = (magnitude > 0.25).to(torch.uint8)
    codes += magnitude >= 0.75
    codes += magnitude > 1.25
    codes += magnitude >= 1.75
    codes += magnitude > 2.5
    codes += magnitude >= 3.5
    codes += magnitude > 5.0
    return codes | ((y.signbit() & ~y.isnan()).to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor) -> Tensor:
    """fp32 values of uint8 codes 0 to 15: 0, 0.5, 1, 1.5, 2, 3, 4, 6, then the same below zero."""
    m = (codes & 7).float()
    # The spacing doubles at 2 and at 4, so the values are the largest of three lines.
    magnitude = torch.maximum(torch.maximum(m * 0.5, m - 2), m * 2 - 8)
    # Not a negation: Triton's is 0 - x, which makes +0 of what must be -0.
    return magnitude * torch.where(codes > 7, -1.0, 1.0)


def _blocks(x: Tensor, shape: BlockShape) -> tuple[Tensor, list[int]]:
    """A view with the blocked dimensions split, and the view's dimensions that lie within a block.

    Raises:
        ValueError: the shape of ``x`` does not divide into blocks.
    """
    if shape is BlockShape.TILE and x.ndim != 2:
        raise ValueError(f"16 x 16 blocks need a matrix, this tensor has shape {tuple(x.shape)}: use BlockShape.ROW")
    view = _split(x, -1)
    return (view, [-1]) if shape is BlockShape.ROW else (_split(view, 0), [1, 3])


def _split(x: Tensor, dim: int) -> Tensor:
    size = x.shape[dim] if x.ndim else 1
    if size % BLOCK_SIZE:
        raise ValueError(
            f"dimension {dim} of shape {tuple(x.shape)} has {size} elements, expected a multiple of {BLOCK_SIZE}: "
            f"pad it to {-(-size // BLOCK_SIZE) * BLOCK_SIZE}, or keep this tensor in bf16"
        )
    view: Tensor = x.unflatten(dim, (size // BLOCK_SIZE, BLOCK_SIZE))
    return view


def _per_element(per_block: Tensor, within: list[int]) -> Tensor:
    """``per_block`` shaped to broadcast against the view of :func:`_blocks`."""
    for dim in within:
        per_block = per_block.unsqueeze(dim)
    return per_block


def block_amax(x: Tensor, shape: BlockShape = BlockShape.ROW) -> Tensor:
    """fp32, the shape of the block scales: the largest magnitude of each block; NaN if any element is NaN.

    Raises:
        ValueError: the shape of ``x`` does not divide into blocks.
    """
    view, within = _blocks(x, shape)
    return view.abs().amax(within).float()


def encode_scale(amax: Tensor) -> Tensor:
    """fp32, by which a tensor of this amax is multiplied before its block scales are cast."""
    scale = exact_quotient(_ENCODE_MAX, amax).clamp(max=FP32_MAX)
    return torch.where(amax.isfinite() & (amax > 0), scale, 1.0)


def scales_of(amax_of_blocks: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Block scales (uint8, e4m3, the shape of ``amax_of_blocks``) and tensor scale (fp32 ``[]``) for fp32 amaxes."""
    encode = encode_scale(amax)
    scaled = amax_of_blocks * (encode * _INVERSE_E2M1_MAX)
    block_scales = encode_fp8(torch.where(amax_of_blocks.isfinite(), scaled, torch.nan))
    return block_scales, exact_quotient(1.0, encode)


def quantize_nvfp4(
    x: Tensor,
    shape: BlockShape = BlockShape.ROW,
    *,
    amax: Tensor | None = None,
    amax_of_blocks: Tensor | None = None,
    out: Nvfp4Tensor | None = None,
) -> Nvfp4Tensor:
    """Codes and scales of ``x`` (fp32 or bf16). ([Note: NVFP4 edge cases])

    ``amax`` (fp32 ``[]``) and ``amax_of_blocks`` (as :func:`block_amax`) replace ``x``'s own where several ranks hold
    parts of a tensor and have taken the maximum.

    Raises:
        ValueError: the shape of ``x`` does not divide into blocks; ``out`` does not fit.
    """
    if amax_of_blocks is None:
        amax_of_blocks = block_amax(x, shape)
    block_scales, tensor_scale = scales_of(amax_of_blocks, tensor_amax(amax_of_blocks) if amax is None else amax)
    scale = decode_fp8(block_scales)
    multiplier = exact_quotient(1.0, scale * tensor_scale).clamp(max=FP32_MAX)
    multiplier = torch.where(scale > 0, multiplier, 0.0)
    view, within = _blocks(x, shape)
    codes = encode_e2m1(view.float() * _per_element(multiplier, within)).reshape(x.shape)
    return store(Nvfp4Tensor(pack_nibbles(codes), block_scales, tensor_scale), out)


def dequantize_nvfp4(
    q: Nvfp4Tensor, shape: BlockShape = BlockShape.ROW, *, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """The values of ``q``, ``[..., columns]``, in fp32 arithmetic, rounded once more if ``dtype`` is narrower.

    NaN blocks are NaN.
    """
    codes = unpack_nibbles(q.codes)
    view, within = _blocks(decode_e2m1(codes), shape)
    scale = decode_fp8(q.block_scales) * q.tensor_scale
    return (view * _per_element(scale, within)).reshape(codes.shape).to(dtype)
