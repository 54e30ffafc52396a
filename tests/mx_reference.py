"""What the quantizers must give, from the definitions of the formats: slow, and apart from the code under test.

Independent of it in four ways: no torch (bits come in and go out as numpy integers); a code's value is a fraction,
written down from exponent and mantissa fields (OCP OFP8 v1.0, OCP MX v1.0 section 5.3); a value's code is found by
comparing with the midpoints of neighbouring values, no cast and no shift of mantissas; fp32 products and quotients are
rounded by exact integer arithmetic. float64 is a container only, for values that it holds exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.uint8]
Bits = npt.NDArray[np.uint32]
"""fp32 values as their bits."""
Values = npt.NDArray[np.float64]

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)
FP32_MAX = (2 - Fraction(1, 2**23)) * 2**127


# Formats


def power_of_two(exponent: int) -> Fraction:
    return Fraction(2**exponent) if exponent >= 0 else Fraction(1, 2**-exponent)


@dataclass(frozen=True)
class MiniFloat:
    """A float of at most eight bits: sign, exponent, mantissa."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: int
    """Code of the largest finite magnitude."""

    def magnitude(self, code: int) -> Fraction:
        """Value of a finite ``code`` without its sign bit."""
        exponent, mantissa = divmod(code, 2**self.mantissa_bits)
        fraction = Fraction(mantissa, 2**self.mantissa_bits)
        if exponent == 0:
            return fraction * power_of_two(1 - self.bias)
        return (1 + fraction) * power_of_two(exponent - self.bias)

    @cached_property
    def midpoints(self) -> Values:
        """Between the values of code ``i`` and ``i + 1``, exactly."""
        exact = [(self.magnitude(i) + self.magnitude(i + 1)) / 2 for i in range(self.largest)]
        values = np.array([float(x) for x in exact])
        assert all(Fraction(float(value)) == x for value, x in zip(values, exact))
        return values

    def encode(self, magnitudes: Values) -> Codes:
        """Nearest codes of magnitudes, the even one at a tie, saturating; no sign bit."""
        below = np.searchsorted(self.midpoints, magnitudes, side="left")  # midpoints < magnitude
        up_to = np.searchsorted(self.midpoints, magnitudes, side="right")  # midpoints <= magnitude
        is_tie = below != up_to
        return np.where(is_tie & (below % 2 == 1), below + 1, below).astype(np.uint8)

    def decode(self, codes: Codes) -> Values:
        """Values of codes with their sign bit; NaN above the largest finite one."""
        sign_bit = 1 << (self.exponent_bits + self.mantissa_bits)
        table = [float(self.magnitude(i)) if i <= self.largest else np.nan for i in range(sign_bit)]
        return np.array(table + [-x for x in table])[codes]


E4M3 = MiniFloat(exponent_bits=4, mantissa_bits=3, bias=7, largest=0x7E)
E5M2 = MiniFloat(exponent_bits=5, mantissa_bits=2, bias=15, largest=0x7B)
E2M1 = MiniFloat(exponent_bits=2, mantissa_bits=1, bias=1, largest=0x7)


# fp32


def fp32_magnitudes(bits: Bits) -> Values:
    """Magnitudes of finite values; anything for the others."""
    exponent = ((bits & MAGNITUDE) >> np.uint32(23)).astype(np.int64)
    mantissa = (bits & np.uint32(0x7FFFFF)).astype(np.int64)
    significand = np.where(exponent == 0, mantissa, mantissa + 2**23)
    values: Values = np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - 150)
    return values


def is_negative(bits: Bits) -> npt.NDArray[np.bool_]:
    return bits > MAGNITUDE


def is_nan(bits: Bits) -> npt.NDArray[np.bool_]:
    mask: npt.NDArray[np.bool_] = (bits & MAGNITUDE) > INFINITY
    return mask


def is_infinite(bits: Bits) -> npt.NDArray[np.bool_]:
    mask: npt.NDArray[np.bool_] = (bits & MAGNITUDE) == INFINITY
    return mask


def round_to_fp32(x: Fraction) -> Fraction:
    """``x`` >= 0 rounded to fp32's spacing, nearest even; no overflow."""
    if x == 0:
        return x
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    if x < power_of_two(exponent):
        exponent -= 1
    spacing = power_of_two(max(exponent, -126) - 23)
    return round(x / spacing) * spacing  # Fraction's round takes the even one at a tie


def round_values_to_fp32(values: Values) -> Values:
    """The same for many exact values, each at most 53 bits long."""
    fraction, exponent = np.frexp(values)  # 0.5 <= fraction < 1
    significand = np.ldexp(fraction, 53).astype(np.int64)
    dropped = np.clip(53 - 24 + np.maximum(-125 - exponent, 0), 0, 60)
    unit = np.int64(1) << dropped
    quotient, rest = significand // unit, significand % unit
    quotient += (2 * rest > unit) | ((2 * rest == unit) & (quotient % 2 == 1))
    rounded: Values = np.ldexp(quotient.astype(np.float64), exponent - 53 + dropped)
    return rounded


def bf16_of_fp32(bits: Bits) -> Bits:
    """Rounded to bf16, as fp32 bits: nearest even among the two neighbours that drop the low half."""
    low, kept = bits & np.uint32(0xFFFF), bits & np.uint32(0xFFFF0000)
    up = (low > 0x8000) | ((low == 0x8000) & ((bits >> np.uint32(16)) % 2 == 1))
    rounded = kept + np.where(up, np.uint32(0x10000), np.uint32(0))
    return np.where(is_nan(bits), np.uint32(0x7FC00000), rounded).astype(np.uint32)


# Tensor-wise fp8


def quantize_fp8(bits: Bits, scale: Fraction, target: MiniFloat) -> Codes:
    """Codes of ``x * scale``, product in fp32; infinity saturates, NaN is 0x7F."""
    exact = fp32_magnitudes(bits) * float(scale)
    codes = target.encode(round_values_to_fp32(exact))
    codes[is_infinite(bits)] = target.largest
    codes[is_negative(bits)] |= 0x80
    codes[is_nan(bits)] = 0x7F
    return codes


# MXFP8


class Mx(NamedTuple):
    codes: Codes
    scales: Codes


def quantize_mxfp8(bits: Bits, rule: str) -> Mx:
    """``bits`` is ``[blocks, 32]``."""
    amax_bits = (bits & MAGNITUDE).max(axis=1)  # magnitudes order as their bits do
    is_lost = amax_bits >= INFINITY
    amax = fp32_magnitudes(amax_bits)
    if rule == "floor":
        _, ceiling = np.frexp(amax)
        lowest = amax == 0
        exponent = ceiling - 1 - 8  # 2**(ceiling - 1) is the largest power of two up to amax; 2**8 the largest of e4m3
    else:
        # Both factors have 24 bits, so float64 has the product exactly.
        product = round_values_to_fp32(amax * float(round_to_fp32(Fraction(1, 448))))
        lowest = product == 0
        fraction, exponent = np.frexp(product)
        exponent = np.where(fraction == 0.5, exponent - 1, exponent)
    exponent = np.where(lowest, -127, np.clip(exponent, -127, 127))
    codes = E4M3.encode(np.ldexp(fp32_magnitudes(bits), -exponent[:, None]))
    codes[is_negative(bits)] |= 0x80
    codes[is_lost] = 0x7F
    return Mx(codes, np.where(is_lost, 255, exponent + 127).astype(np.uint8))


# NVFP4


class Nvfp4(NamedTuple):
    codes: Codes
    """Packed."""
    scales: Codes
    tensor_scale: Fraction


def quantize_nvfp4(bits: Bits) -> Nvfp4:
    """``bits`` is ``[blocks, elements]``, one scale a block, whatever the block's shape was."""
    amax_bits = (bits & MAGNITUDE).max(axis=1)
    is_lost = amax_bits >= INFINITY
    amax = fp32_magnitudes(amax_bits)
    largest = Fraction(0) if is_lost.any() else Fraction(float(amax.max()))
    encode = min(round_to_fp32(Fraction(448 * 6) / largest), FP32_MAX) if largest else Fraction(1)
    tensor_scale = round_to_fp32(1 / encode)
    sixth = round_to_fp32(encode * round_to_fp32(Fraction(1, 6)))
    scales = E4M3.encode(round_values_to_fp32(np.where(is_lost, 0, amax) * float(sixth)))
    # One multiplier for each of the 127 scales.
    multiplier = np.zeros(127)
    for code in range(1, 127):
        product = round_to_fp32(E4M3.magnitude(code) * tensor_scale)
        multiplier[code] = float(min(round_to_fp32(1 / product), FP32_MAX) if product else FP32_MAX)
    magnitudes = np.where(is_lost[:, None], 0, fp32_magnitudes(bits))
    codes = E2M1.encode(round_values_to_fp32(magnitudes * multiplier[scales][:, None]))
    codes[is_negative(bits)] |= 8
    codes[is_nan(bits) | is_infinite(bits)] = 0
    packed = (codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8)
    return Nvfp4(packed, np.where(is_lost, 0x7F, scales).astype(np.uint8), tensor_scale)


# Inputs


def edge_values() -> Bits:
    """Zeros, subnormals, powers of two, the formats' values and midpoints, all with neighbours; infinity, NaN."""
    exact = [power_of_two(k) for k in range(-149, 128, 3)]
    exact += [448 * power_of_two(k) for k in range(-130, 119, 8)]
    for target in (E4M3, E5M2, E2M1):
        exact += [target.magnitude(code) for code in range(target.largest + 1)]
        exact += [Fraction(float(x)) for x in target.midpoints]
    exact += [FP32_MAX, Fraction(34 * 10**37), power_of_two(127) * Fraction(511, 256)]
    finite = np.array([float(x) for x in exact], dtype=np.float32).view(np.uint32)
    near = np.unique(np.concatenate([finite, finite + np.uint32(1), np.maximum(finite, 1) - np.uint32(1)]))
    special = np.array([INFINITY, 0x7FC00000, 0x7F800001], dtype=np.uint32)
    positive = np.concatenate([near[near < INFINITY], special])
    return np.concatenate([positive, positive | np.uint32(0x80000000)])


def edge_blocks(blocks: int, width: int, *, specials: bool = True) -> Bits:
    """``[blocks, width]``: normal data at scales 2**-150 to 2**120, some with edge values, some of edge values only."""
    rng = np.random.default_rng(width)
    exponents = rng.integers(-150, 121, size=(blocks, 1))
    data = np.ldexp(rng.standard_normal((blocks, width)), exponents)
    bits = np.clip(data, -float(FP32_MAX), float(FP32_MAX)).astype(np.float32).view(np.uint32)
    edges = edge_values()
    if not specials:
        edges = edges[(edges & MAGNITUDE) < INFINITY]
    chosen = rng.choice(edges, size=bits.shape)
    # Edge values that a block's own data does not dwarf: a power of two and its neighbours times the block's scale.
    shifted = np.ldexp(2.0 ** rng.integers(-12, 3, size=bits.shape), exponents).astype(np.float32).view(np.uint32)
    shifted = shifted + rng.integers(0, 3, size=bits.shape).astype(np.uint32)
    kind = rng.integers(0, 8, size=(blocks, 1))
    one_in = rng.random(bits.shape) < 1 / 16
    bits = np.where((kind == 0) | ((kind == 1) & one_in), chosen, bits)
    bits = np.where((kind == 2) | ((kind == 3) & one_in), shifted, bits)
    bits[kind[:, 0] == 4] &= np.uint32(0xFFFF0000)  # values that bf16 has
    bits[:: blocks // 8] &= np.uint32(0x80000000)  # zeros of both signs
    return bits.astype(np.uint32)
