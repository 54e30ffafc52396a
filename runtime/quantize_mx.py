"""MXFP8: blocks of 32 elements along one dimension share a power of two (OCP Microscaling Formats v1.0).

    x [rows, 64]   dim=-1   codes [rows, 64] e4m3     scales [rows, 2] e8m0     value = e4m3(code) * 2**(scale - 127)
    x [64, cols]   dim=0    codes [64, cols]          scales [2, cols]          (columnwise: for the transposed product)

Codes and scales are bytes (uint8). Masters are quantized as bf16: the caller rounds, with
:func:`megabuf_fx.runtime.quantize_fp8.round_to_bf16`, and not with ``x.bfloat16()`` in the same compiled graph, where
Inductor drops it and codes come out different. These functions take fp32 or bf16 values as they are.

[Note: MX edge cases]
* NaN or infinity in a block: the scale is 255, NaN, so that the whole block is NaN, and its codes are 0x7F. Neither
  e8m0 nor e4m3 has an infinity; torchao does the same (``to_mx``). TransformerEngine writes 254 for an infinity and
  drops a NaN (common/util/ptx_arch_spec.cuh, ``float_to_e8m0``): neighbours become zeros, the overflow is hidden.
* A zero block has scale 0, which is 2**-127, and zero codes. -0 keeps its sign.
* Subnormal inputs are exact: the smallest scale is 2**-127, an fp32 subnormal, built from bits.
* RCEIL rounds magnitudes from 2**128 - 2**123 on to 2**128, which :func:`dequantize_mxfp8` returns as infinity.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from megabuf_fx.runtime.quantize_fp8 import decode_fp8, encode_fp8, store

BLOCK_SIZE = 32
NAN_SCALE = 255

_INVERSE_E4M3_MAX = 0x924925 * 2.0**-32
"""1 / 448 rounded to fp32."""
_E4M3_MAX_EXPONENT = 8


class ScaleRule(Enum):
    """How a block's scale follows from its amax."""

    RCEIL = "rceil"
    """The smallest power of two at or above fp32 ``amax * (1 / 448)``: no saturation (TransformerEngine, cuBLAS)."""
    FLOOR = "floor"
    """2**(floor(log2(amax)) - 8): OCP MX v1.0, section 6.3. Scaled magnitudes above 448 saturate, up to 1/8 too low."""


class MxTensor(NamedTuple):
    codes: Tensor
    """uint8, e4m3, the shape of the tensor."""
    scales: Tensor
    """uint8, e8m0, that shape with the blocked dimension divided by 32."""


def _blocks(x: Tensor, dim: int) -> Tensor:
    """A view with ``dim`` split into blocks and elements of a block.

    Raises:
        ValueError: the size of ``dim`` is no multiple of 32.
    """
    size = x.shape[dim] if x.ndim else 1
    if size % BLOCK_SIZE:
        padded = -(-size // BLOCK_SIZE) * BLOCK_SIZE
        raise ValueError(
            f"dimension {dim} of shape {tuple(x.shape)} has {size} elements, expected a multiple of {BLOCK_SIZE}: "
            f"pad it to {padded}, or keep this tensor in bf16"
        )
    view: Tensor = x.unflatten(dim, (size // BLOCK_SIZE, BLOCK_SIZE))
    return view


def e8m0_scales(amax: Tensor, rule: ScaleRule = ScaleRule.RCEIL) -> Tensor:
    """The scale bytes of blocks with these fp32 ``amax``, as int32 of the same shape; 255 for infinity and NaN."""
    if rule is ScaleRule.FLOOR:
        exponent = (amax.view(torch.int32) >> 23) & 0xFF
        return torch.where(exponent == 255, NAN_SCALE, (exponent - _E4M3_MAX_EXPONENT).clamp(min=0))
    bits = (amax * _INVERSE_E4M3_MAX).view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    # Byte 0 is 2**-127, half of the smallest normal fp32, and also stands for all below.
    is_above = torch.where(exponent == 0, mantissa > 0x400000, mantissa != 0)
    return (exponent + is_above).clamp(max=NAN_SCALE)  # a NaN has a mantissa, too


def e8m0_values(scales: Tensor) -> Tensor:
    """2**(scale - 127) as fp32, exact; NaN for 255. From bits, because a cast of e8m0 does not fuse in torch 2.13."""
    bits = scales.int()
    # The top mantissa bit makes 2**-127 of byte 0 and NaN of byte 255.
    top = ((bits == 0) | (bits == NAN_SCALE)).int() << 22
    return ((bits << 23) | top).view(torch.float32)


def quantize_mxfp8(
    x: Tensor, rule: ScaleRule = ScaleRule.RCEIL, *, dim: int = -1, out: MxTensor | None = None
) -> MxTensor:
    """Codes and scales of ``x`` (fp32 or bf16), in blocks along ``dim``. ([Note: MX edge cases])

    Elements are multiplied by the exact reciprocal of the scale and rounded to e4m3, nearest even.

    Raises:
        ValueError: the size of ``dim`` is no multiple of 32; ``out`` does not fit.
    """
    blocks = _blocks(x, dim)
    block_dim = dim % x.ndim + 1
    scales = e8m0_scales(blocks.abs().amax(block_dim, keepdim=True).float(), rule)
    # No quantized scale lies in 248..254, so the reciprocal 2**(127 - scale) is never subnormal.
    reciprocal = e8m0_values(torch.where(scales == NAN_SCALE, NAN_SCALE, 254 - scales))
    codes = encode_fp8(blocks.float() * reciprocal).reshape(x.shape)
    return store(MxTensor(codes, scales.squeeze(block_dim).to(torch.uint8)), out)


def dequantize_mxfp8(
    q: MxTensor, *, dim: int = -1, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None
) -> Tensor:
    """The values of ``q``, whose blocks lie along ``dim``; into ``out`` if given, then in its dtype.

    Exact in fp32, and in bf16 down to 2**-133, below which values are rounded. NaN blocks are NaN.

    Raises:
        ValueError: shapes of codes, scales and ``out`` do not fit each other.
    """
    blocks = _blocks(q.codes, dim)
    block_dim = dim % q.codes.ndim + 1
    scales = q.scales.unsqueeze(block_dim)
    if blocks.select(block_dim, 0).shape != q.scales.shape:
        raise ValueError(
            f"scales have shape {tuple(q.scales.shape)}, expected {tuple(blocks.select(block_dim, 0).shape)} for codes "
            f"of shape {tuple(q.codes.shape)} in blocks along dimension {dim}"
        )
    values = (decode_fp8(blocks) * e8m0_values(scales)).reshape(q.codes.shape)
    if out is None:
        return values.to(dtype)
    if out.shape != values.shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, expected {tuple(values.shape)}: view it in that shape")
    return out.copy_(values)
