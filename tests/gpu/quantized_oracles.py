"""What quantized tensors must be, for ``check.py``: by tables and midpoints in fp64 on the host, no casts, no bits.

fp64 holds every fp32 value and every product of two; ``fp32`` rounds what the definitions round.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP32_MAX = torch.finfo(torch.float32).max


class Oracle(NamedTuple):
    """Codes, scales (of blocks, then of the tensor, as far as the format has them) and values, on the host."""

    codes: Tensor
    scales: tuple[Tensor, ...]
    values: Tensor
    """bf16."""


def magnitudes(exponent_bits: int, mantissa_bits: int, bias: int, largest: int) -> Tensor:
    """fp64 ``[largest + 1]``: the values of all finite codes without sign (OCP OFP8 v1.0, OCP MX v1.0 section 5.3)."""
    steps = 2**mantissa_bits
    values = []
    for code in range(largest + 1):
        exponent, mantissa = divmod(code, steps)
        is_normal = exponent > 0
        values.append((is_normal + mantissa / steps) * 2.0 ** (max(exponent, 1) - bias))
    assert exponent < 2**exponent_bits
    return torch.tensor(values, dtype=torch.float64)


E4M3 = magnitudes(4, 3, 7, 0x7E)
E5M2 = magnitudes(5, 2, 15, 0x7B)
E2M1 = magnitudes(2, 1, 1, 7)


def nearest(values: Tensor, table: Tensor, *, sign: int, nan: int) -> Tensor:
    """uint8 codes of fp64 ``values``: the nearest of ``table``, ties to even codes, beyond it the largest.

    ``sign`` is the bit of negative values, ``nan`` the code of NaN.
    """
    midpoints = (table[1:] + table[:-1]) / 2
    below = torch.bucketize(values.abs(), midpoints)
    at_most = torch.bucketize(values.abs(), midpoints, right=True)
    # They differ on a midpoint only.
    codes = torch.where(below % 2 == 0, below, at_most) + values.signbit() * sign
    return torch.where(values.isnan(), nan, codes).to(torch.uint8)


def fp32(values: Tensor) -> Tensor:
    """``values`` rounded to fp32, as fp64."""
    return values.float().double()


def decode(codes: Tensor, table: Tensor, *, sign: int) -> Tensor:
    """fp64 values; NaN for codes that ``table`` does not have."""
    index = (codes & (sign - 1)).long()
    values = torch.where(index < len(table), table[index.clamp(max=len(table) - 1)], torch.nan)
    return torch.where(codes >= sign, -values, values)


def fp8_scale(amax: Tensor, table: Tensor) -> Tensor:
    """fp64 ``[]``, rounded to fp32: of current scaling."""
    if not (amax > 0 and amax.isfinite()):
        return torch.ones((), dtype=torch.float64)
    return fp32((table[-1] / amax.double()).clamp(max=FP32_MAX))


def fp8(x: Tensor, table: Tensor) -> Oracle:
    scale = fp8_scale(x.abs().max(), table)
    scale_inv = fp32(1 / scale)
    codes = nearest(fp32(x.double() * scale), table, sign=128, nan=0x7F)
    values = decode(codes, table, sign=128) * scale_inv
    return Oracle(codes, (scale_inv.float(),), values.float().bfloat16())


def mxfp8(x: Tensor, *, is_rceil: bool, dim: int = -1) -> Oracle:
    """``x`` is a matrix, its blocks lie along ``dim``."""
    if dim == 0:
        found = mxfp8(x.t(), is_rceil=is_rceil)
        return Oracle(found.codes.t(), (found.scales[0].t(),), found.values.t())
    blocks = x.double().unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1)
    if is_rceil:
        mantissa, exponent = torch.frexp(fp32(amax * fp32(torch.tensor(1 / 448, dtype=torch.float64))))
        # frexp's mantissas begin at one half.
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    else:
        exponent = torch.frexp(amax).exponent - 1 - 8
    exponent = torch.where(amax == 0, -127, exponent).clamp(min=-127).unsqueeze(-1)
    is_finite = amax.isfinite().unsqueeze(-1)
    scaled = torch.where(is_finite, torch.ldexp(blocks, -exponent), torch.nan)
    codes = nearest(scaled, E4M3, sign=128, nan=0x7F)
    values = torch.ldexp(decode(codes, E4M3, sign=128), exponent)
    scales = torch.where(is_finite, exponent + 127, 255).squeeze(-1).to(torch.uint8)
    return Oracle(codes.reshape(x.shape), (scales,), values.reshape(x.shape).float().bfloat16())


def nvfp4(x: Tensor, *, rows_of_block: int) -> Oracle:
    """Blocks of ``rows_of_block`` x 16 of a matrix."""
    blocks = x.double().unflatten(0, (-1, rows_of_block)).unflatten(-1, (-1, 16))
    amax = blocks.abs().amax((1, 3))
    largest = amax.max()
    encode = torch.ones((), dtype=torch.float64)
    if largest > 0 and largest.isfinite():
        encode = fp32((2688 / largest).clamp(max=FP32_MAX))
    tensor_scale = fp32(1 / encode)
    scaled = fp32(amax * fp32(encode * fp32(torch.tensor(1 / 6, dtype=torch.float64))))
    scales = nearest(torch.where(amax.isfinite(), scaled, torch.nan), E4M3, sign=128, nan=0x7F)
    step = fp32(decode(scales, E4M3, sign=128) * tensor_scale)
    multiplier = torch.where(step > 0, fp32((1 / step).clamp(max=FP32_MAX)), 0.0)
    nibbles = nearest(fp32(blocks * multiplier[:, None, :, None]), E2M1, sign=8, nan=0)
    values = decode(nibbles, E2M1, sign=8) * step[:, None, :, None]
    pairs = nibbles.reshape(x.shape).unflatten(-1, (-1, 2))
    codes = pairs[..., 0] | (pairs[..., 1] << 4)
    return Oracle(codes, (scales, tensor_scale.float()), values.reshape(x.shape).float().bfloat16())
