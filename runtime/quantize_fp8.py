"""Tensor-wise fp8: one scale for a whole tensor, from its own amax (current) or from past ones (delayed).

    codes = fp8(clamp(x * scale))      scale = fp8 maximum / amax, in fp32
    x    ~= value(codes) * scale_inv   scale_inv = 1 / scale

Also what the other quantizers share: the clamped cast, exact division, rounding to bf16 that survives a compiler. Torch
ops only. Codes are bytes (uint8), so that they can lie in a flat buffer and be gathered by any backend.

[Note: non-finite codes]
NaN stays NaN, and always as byte 0x7F: casts differ in the sign of a NaN between eager, Inductor and devices, and
codes are compared between ranks. An infinite element saturates to the largest finite value, in e5m2 too, which has an
infinity: OCP OFP8 v1.0 calls this the saturating mode, and TransformerEngine's casts (``__nv_fp8_e4m3`` and
``__nv_fp8_e5m2`` with ``__NV_SATFINITE``) do the same. Who must know of an overflow looks at the amax, which stays
infinite. -0 keeps its sign.

[Note: rounding and compilers]
Within a graph, Inductor drops the rounding of ``x.bfloat16().float()`` (seen on CPUs with torch 2.11, 2.13 and 2.14).
Its Triton code divides fp32 with ``div.full.f32``, which can be off by an ulp (codegen/triton.py, ``truediv``). Both
would make compiled codes differ from eager ones. So bf16 rounding is done on bits, and quotients go through fp64:
53 >= 2 * 24 + 2 bits, so rounding twice is exact.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
FP32_MAX = torch.finfo(torch.float32).max

FP8_MAX = {E4M3: 448.0, E5M2: 57344.0}
_LARGEST_CODE = {E4M3: 0x7E, E5M2: 0x7B}
"""The code of the largest finite value, without the sign bit."""
NAN_CODE = 0x7F

T = TypeVar("T", bound=NamedTuple)


class Fp8Tensor(NamedTuple):
    codes: Tensor
    """uint8, the shape of the tensor."""
    scale_inv: Tensor
    """fp32 ``[]``; codes' values times this are the tensor's."""


class DelayedScale(NamedTuple):
    amax_history: Tensor
    """fp32 ``[window, *shape]``; row 0 collects the running step's amax, the last row is the most recent step's."""
    scale: Tensor
    """fp32 ``[*shape]``, multiplies before the cast; ``shape`` is ``()`` for one tensor, ``(n,)`` for ``n`` of them."""


class AmaxAlgorithm(Enum):
    """Which amax of the history sets the scale (TransformerEngine's ``amax_compute_algo``)."""

    MAX = "max"
    MOST_RECENT = "most_recent"


def round_to_bf16(x: Tensor) -> Tensor:
    """``x`` rounded to bf16 (nearest even) but kept as fp32. ([Note: rounding and compilers])

    Infinity stays; finite values at or above 2**128 - 2**119 become infinite; NaN stays NaN.
    """
    bits = x.float().view(torch.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return torch.where(x.isnan(), torch.nan, rounded.view(torch.float32))


def exact_quotient(numerator: float, denominator: Tensor) -> Tensor:
    """``numerator / denominator``, correctly rounded to fp32 in eager and compiled code alike."""
    return (numerator / denominator.double()).float()


def store(result: T, out: T | None) -> T:
    """Copy every field of ``result`` into ``out``; return ``out``, or ``result`` if there is none.

    Raises:
        ValueError: a field of ``out`` has another shape or dtype.
    """
    if out is None:
        return result
    for name, source, target in zip(result._fields, result, out):
        if target.shape != source.shape or target.dtype != source.dtype:
            raise ValueError(
                f"out.{name} is {target.dtype} {tuple(target.shape)}, expected {source.dtype} {tuple(source.shape)}: "
                "slice the buffer and view it in that shape"
            )
        target.copy_(source)
    return out


def encode_fp8(y: Tensor, fp8_dtype: torch.dtype = E4M3) -> Tensor:
    """uint8 codes of fp32 values, nearest even, saturating; NaN is 0x7F. ([Note: non-finite codes])"""
    # Eager casts to e4m3 saturate since torch 2.13 only, those to e5m2 not at all.
    limit = FP8_MAX[fp8_dtype]
    codes = y.clamp(-limit, limit).to(fp8_dtype).view(torch.uint8)
    return codes.masked_fill((codes & 0x7F) > _LARGEST_CODE[fp8_dtype], NAN_CODE)


def decode_fp8(codes: Tensor, fp8_dtype: torch.dtype = E4M3) -> Tensor:
    """fp32 values of uint8 codes, exact; NaN codes are NaN, infinite ones of e5m2 infinite."""
    return codes.view(fp8_dtype).float()


def tensor_amax(x: Tensor) -> Tensor:
    """fp32 ``[]``: the largest magnitude; 0 of an empty ``x`` (a rank's empty shard), NaN if any element is NaN."""
    if not x.numel():
        return x.new_zeros((), dtype=torch.float32)
    return x.abs().amax().float()


def scale_from_amax(
    amax: Tensor, fp8_dtype: torch.dtype = E4M3, *, epsilon: float = 0.0, power_of_two: bool = False
) -> Tensor:
    """Current scaling: fp32, the shape of ``amax``; ``fp8 maximum / max(amax, epsilon)``.

    1 for an amax that is 0, infinite or NaN; the largest fp32 where the quotient overflows. ``power_of_two`` rounds it
    down to one. The rule is TransformerEngine's (common/recipe/recipe_common.cuh, ``compute_scale_from_amax``).
    """
    amax = amax.clamp(min=epsilon)
    scale = exact_quotient(FP8_MAX[fp8_dtype], amax).clamp(max=FP32_MAX)
    if power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(amax.isfinite() & (amax > 0), scale, 1.0)


def new_delayed_scale(window: int, shape: tuple[int, ...] = (), device: torch.device | None = None) -> DelayedScale:
    """An empty history of ``window`` steps and scale 1.

    Raises:
        ValueError: ``window`` below 1.
    """
    if window < 1:
        raise ValueError(f"the amax history has {window} steps, expected at least 1")
    return DelayedScale(torch.zeros((window, *shape), device=device), torch.ones(shape, device=device))


def record_amax(state: DelayedScale, amax: Tensor) -> None:
    """Enter ``amax`` (fp32, shape of the scale) into the running step, in place. A NaN stays."""
    state.amax_history[0].copy_(torch.maximum(state.amax_history[0], amax))


def update_delayed_scale(
    state: DelayedScale,
    fp8_dtype: torch.dtype = E4M3,
    *,
    algorithm: AmaxAlgorithm = AmaxAlgorithm.MAX,
    margin: int = 0,
    out: DelayedScale | None = None,
) -> DelayedScale:
    """End a step: the scale for the next one, and the history moved on. ``out=state`` works in place.

        history [a0 a1 a2 a3]  ->  [0 a2 a3 a0]      scale = fp8 maximum / 2**margin / max(a0 ... a3)

    Call it when row 0 holds the maximum over all ranks. As in TransformerEngine (common/recipe/delayed_scaling.cu,
    ``kernel_bulk``): a tensor with a0 == 0 was not used and keeps history and scale; an infinite amax keeps the scale,
    for as long as it is in the window. So does a NaN, which TransformerEngine's fmaxf would drop. The scale is at most
    the largest fp32.

    Raises:
        ValueError: ``out`` does not fit.
    """
    history, scale = state
    latest = history[0]
    moved = history.roll(-1, 0)
    moved[0] = 0
    amax = history.amax(0) if algorithm is AmaxAlgorithm.MAX else latest
    new_scale = exact_quotient(FP8_MAX[fp8_dtype] * 2.0**-margin, amax).clamp(max=FP32_MAX)
    is_used = latest != 0
    return store(
        DelayedScale(
            torch.where(is_used, moved, history),
            torch.where(is_used & amax.isfinite(), new_scale, scale),
        ),
        out,
    )


def quantize_fp8(x: Tensor, scale: Tensor, fp8_dtype: torch.dtype = E4M3, *, out: Fp8Tensor | None = None) -> Fp8Tensor:
    """Codes of ``x`` (fp32 or bf16, any shape, any part of a tensor) under a given fp32 ``scale`` ``[]``.

    Products are rounded to fp32 before the cast. Current scaling is ``scale = scale_from_amax(tensor_amax(x))``, with
    the maximum over all ranks in between if ``x`` is a shard. Masters are quantized as bf16: the caller rounds
    (:func:`round_to_bf16`). ([Note: non-finite codes])

    Raises:
        ValueError: ``out`` does not fit.
    """
    codes = encode_fp8(x.float() * scale, fp8_dtype)
    return store(Fp8Tensor(codes, exact_quotient(1.0, scale)), out)


def dequantize_fp8(q: Fp8Tensor, fp8_dtype: torch.dtype = E4M3, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The values, in fp32 arithmetic, rounded once more if ``dtype`` is narrower."""
    return (decode_fp8(q.codes, fp8_dtype) * q.scale_inv).to(dtype)
