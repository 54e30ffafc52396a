"""``runtime/quantize_mx.py``: codes and scales bit for bit with the reference, eager and compiled."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import mx_reference
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

from megabuf_fx.runtime.quantize_fp8 import round_to_bf16
from megabuf_fx.runtime.quantize_mx import (
    MxTensor,
    ScaleRule,
    dequantize_mxfp8,
    e8m0_values,
    quantize_mxfp8,
)

RULES = pytest.mark.parametrize("rule", ScaleRule)
BLOCKS = 20_000


def floats(bits: mx_reference.Bits) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int32)).view(torch.float32)


def check(q: MxTensor, expected: mx_reference.Mx) -> None:
    np.testing.assert_array_equal(q.scales.numpy().ravel(), expected.scales)
    np.testing.assert_array_equal(q.codes.numpy().reshape(-1, 32), expected.codes)


# The reference itself


def test_reference_knows_the_formats() -> None:
    maxima = [f.magnitude(f.largest) for f in (mx_reference.E4M3, mx_reference.E5M2, mx_reference.E2M1)]
    assert maxima == [448, 57344, 6]
    assert [float(mx_reference.E2M1.magnitude(i)) for i in range(8)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    # Nearest by exhaustive search among exact fractions, the even code of two equally near.
    magnitudes = np.abs(np.random.default_rng(0).standard_normal(50)) * 3
    for target in (mx_reference.E4M3, mx_reference.E5M2, mx_reference.E2M1):
        table = [target.magnitude(i) for i in range(target.largest + 1)]
        values = np.concatenate([magnitudes, target.midpoints])
        for value, code in zip(values, target.encode(values)):
            distances = [abs(x - Fraction(value)) for x in table]
            assert code == min(range(len(table)), key=lambda i: (distances[i], i % 2))


def test_reference_rounds_products_both_ways_alike() -> None:
    values = np.ldexp(np.random.default_rng(0).random(2_000), np.random.default_rng(1).integers(-160, 20, 2_000))
    rounded = mx_reference.round_values_to_fp32(values)
    assert [float(mx_reference.round_to_fp32(Fraction(x))) for x in values] == rounded.tolist()


# Codes and scales


@RULES
def test_fp32_blocks_equal_the_reference(rule: ScaleRule) -> None:
    bits = mx_reference.edge_blocks(BLOCKS, 32)
    check(quantize_mxfp8(floats(bits), rule), mx_reference.quantize_mxfp8(bits, rule.value))


@RULES
def test_bf16_blocks_equal_the_reference(rule: ScaleRule) -> None:
    bits = mx_reference.bf16_of_fp32(mx_reference.edge_blocks(BLOCKS, 32))
    expected = mx_reference.quantize_mxfp8(bits, rule.value)
    check(quantize_mxfp8(floats(bits).bfloat16(), rule), expected)
    check(quantize_mxfp8(round_to_bf16(floats(bits)), rule), expected)


@RULES
def test_each_edge_value_alone_in_a_block(rule: ScaleRule) -> None:
    edges = mx_reference.edge_values()
    bits = np.zeros((len(edges), 32), dtype=np.uint32)
    bits[np.arange(len(edges)), np.arange(len(edges)) % 32] = edges
    check(quantize_mxfp8(floats(bits), rule), mx_reference.quantize_mxfp8(bits, rule.value))


def test_input_rounding_to_bf16_matters() -> None:
    # Why the caller has to round: a maximum just above 448 needs a larger scale, in bf16 it does not.
    x = torch.full((32,), 448.0).nextafter(torch.tensor(math.inf))
    x[0] = 449.0
    assert quantize_mxfp8(x).scales.item() == 128
    assert quantize_mxfp8(round_to_bf16(x)).scales.item() == 127


def block(*values: float) -> torch.Tensor:
    return torch.tensor(values + (0.0,) * (32 - len(values)))


def test_known_blocks() -> None:
    assert quantize_mxfp8(block(448.0)).scales.item() == 127
    assert quantize_mxfp8(block(449.0)).scales.item() == 128
    assert quantize_mxfp8(block(449.0), ScaleRule.FLOOR).scales.item() == 127
    saturated = quantize_mxfp8(block(511.0, -470.0), ScaleRule.FLOOR)
    assert saturated.codes[:2].tolist() == [0x7E, 0xFE]
    zero = quantize_mxfp8(block(0.0, -0.0))
    assert (zero.scales.item(), zero.codes[:2].tolist()) == (0, [0x00, 0x80])
    assert dequantize_mxfp8(quantize_mxfp8(block(3.4e38)))[0] == math.inf
    assert dequantize_mxfp8(quantize_mxfp8(block(3.4e38), ScaleRule.FLOOR))[0] == 448 * 2.0**119
    smallest = quantize_mxfp8(block(2.0**-136, -(2.0**-137), 2.0**-149))
    assert (smallest.scales.item(), smallest.codes[:3].tolist()) == (0, [0x01, 0x80, 0x00])


@RULES
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, -math.nan])
def test_an_infinity_or_nan_spoils_its_block_only(bad: float, rule: ScaleRule) -> None:
    x = torch.ones(3, 32)
    x[1, 7] = bad
    q = quantize_mxfp8(x, rule)
    assert q.scales.flatten().tolist() == [q.scales[0, 0], 255, q.scales[0, 0]]
    assert (q.codes[1] == 0x7F).all()
    back = dequantize_mxfp8(q)
    assert back[1].isnan().all()
    assert (back[[0, 2]] == 1).all()


@RULES
@pytest.mark.parametrize("dim", [0, 1, 2, -2])
def test_blocks_along_any_dimension(dim: int, rule: ScaleRule) -> None:
    x = floats(mx_reference.edge_blocks(64 * 96, 32)).reshape(64, 96, 32)[:, :64]
    q = quantize_mxfp8(x, rule, dim=dim)
    last = quantize_mxfp8(x.movedim(dim, -1).contiguous(), rule)
    assert q.codes.shape == x.shape
    assert torch.equal(q.codes.movedim(dim, -1), last.codes)
    assert torch.equal(q.scales.movedim(dim, -1), last.scales)
    values = dequantize_mxfp8(q, dim=dim, dtype=torch.float32)
    expected = dequantize_mxfp8(last, dtype=torch.float32)
    torch.testing.assert_close(values.movedim(dim, -1), expected, rtol=0, atol=0, equal_nan=True)


def test_empty_tensors() -> None:
    assert quantize_mxfp8(torch.empty(0, 64)).scales.shape == (0, 2)
    assert quantize_mxfp8(torch.empty(5, 0)).scales.shape == (5, 0)


# Values


def test_scale_bytes_are_powers_of_two() -> None:
    values = e8m0_values(torch.arange(256, dtype=torch.uint8))
    assert values[:255].double().tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert values[255].isnan()


def test_all_codes_under_all_scales_dequantize_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8).contiguous()
    exact = np.ldexp(mx_reference.E4M3.decode(codes.numpy()), np.arange(256)[:, None] - 127)
    exact[255] = np.nan
    exact[np.abs(exact) >= 2.0**128] *= np.inf  # larger than fp32 has
    values = dequantize_mxfp8(MxTensor(codes, scales), dtype=torch.float32)
    np.testing.assert_array_equal(values.double().numpy(), exact)
    rounded = dequantize_mxfp8(MxTensor(codes, scales))
    torch.testing.assert_close(rounded, values.bfloat16(), rtol=0, atol=0, equal_nan=True)
    # bf16 has every value but those below its smallest subnormal.
    is_finite = values[4:255].isfinite()
    assert torch.equal(rounded[4:255][is_finite].float(), values[4:255][is_finite])


# Buffers


def test_out_is_a_slice_of_a_buffer() -> None:
    x = floats(mx_reference.edge_blocks(16, 32)).reshape(8, 64)
    buffer = torch.full((600,), 99, dtype=torch.uint8)
    out = MxTensor(buffer[32:544].view(8, 64), buffer[550:566].view(8, 2))
    expected = quantize_mxfp8(x)
    assert quantize_mxfp8(x, out=out) is out
    assert torch.equal(buffer[32:544].view(8, 64), expected.codes)
    assert torch.equal(buffer[550:566].view(8, 2), expected.scales)
    assert (torch.cat([buffer[:32], buffer[544:550], buffer[566:]]) == 99).all()
    values = torch.empty(512, dtype=torch.bfloat16)
    dequantize_mxfp8(out, out=values.view(8, 64))
    assert torch.equal(values.view(8, 64).view(torch.int16), dequantize_mxfp8(expected).view(torch.int16))


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"dimension -1 of shape \(4, 33\) has 33 .* multiple of 32: pad it to 64, or"):
        quantize_mxfp8(torch.ones(4, 33))
    with pytest.raises(ValueError, match=r"dimension 0 of shape \(4, 32\) has 4 elements.* pad it to 32"):
        quantize_mxfp8(torch.ones(4, 32), dim=0)
    with pytest.raises(ValueError, match="has 1 elements"):
        quantize_mxfp8(torch.tensor(1.0))
    q = quantize_mxfp8(torch.ones(64, 64))
    with pytest.raises(ValueError, match=r"out.codes is torch.uint8 \(4096,\), expected torch.uint8 \(64, 64\)"):
        quantize_mxfp8(torch.ones(64, 64), out=MxTensor(q.codes.flatten(), q.scales))
    with pytest.raises(ValueError, match=r"scales have shape \(64, 2\), expected \(2, 64\) .* along dimension 0"):
        dequantize_mxfp8(q, dim=0)
    with pytest.raises(ValueError, match=r"out has shape \(64,\), expected \(64, 64\)"):
        dequantize_mxfp8(q, out=torch.empty(64))


# Properties

blocks = st.lists(st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100), min_size=1, max_size=32)


@settings(max_examples=150, deadline=None)
@given(blocks, st.sampled_from(ScaleRule))
def test_quantizing_values_again_changes_nothing(values: list[float], rule: ScaleRule) -> None:
    # Values, not codes: a maximum of 224 after rounding takes half the scale and doubled codes.
    once = dequantize_mxfp8(quantize_mxfp8(block(*values), rule), dtype=torch.float32)
    again = dequantize_mxfp8(quantize_mxfp8(once, rule), dtype=torch.float32)
    assert torch.equal(once.view(torch.int32), again.view(torch.int32))


@settings(max_examples=150, deadline=None)
@given(blocks, st.sampled_from(ScaleRule))
def test_error_bound(values: list[float], rule: ScaleRule) -> None:
    x = block(*values)
    q = quantize_mxfp8(x, rule)
    # Half a spacing: 2**-4 of a normal value, 2**-10 scales of a subnormal one. FLOOR saturates by up to 64 / 512.
    relative = 2.0**-4 if rule is ScaleRule.RCEIL else 2.0**-3
    bound = torch.maximum(x.abs().double() * relative, e8m0_values(q.scales).double() * 2.0**-10)
    assert ((dequantize_mxfp8(q, dtype=torch.float32).double() - x.double()).abs() <= bound).all()


@settings(max_examples=150, deadline=None)
@given(blocks, st.integers(-20, 20), st.sampled_from(ScaleRule))
def test_powers_of_two_commute(values: list[float], exponent: int, rule: ScaleRule) -> None:
    x = block(*(value if abs(value) > 2.0**-80 else 0.0 for value in values))
    q, moved = quantize_mxfp8(x, rule), quantize_mxfp8(x * 2.0**exponent, rule)
    assert torch.equal(q.codes, moved.codes)
    assert moved.scales.item() == (q.scales.item() + exponent if x.any() else 0)


# Compiled


@pytest.mark.parametrize("dim", [-1, 0])
def test_inductor_makes_one_kernel_with_equal_bytes(dim: int) -> None:
    """Rounding to bf16, scales, codes and the stores into a flat buffer; NaN lanes are compared, too."""
    x = floats(mx_reference.edge_blocks(512, 32)).reshape(128, 128)
    end = x.numel() + 64

    def quantize_into(x: torch.Tensor, buffer: torch.Tensor) -> None:
        scales = buffer[end : end + 512].view(4, 128) if dim == 0 else buffer[end : end + 512].view(128, 4)
        quantize_mxfp8(round_to_bf16(x), dim=dim, out=MxTensor(buffer[64:end].view(128, 128), scales))

    eager, compiled = torch.zeros(2, end + 600, dtype=torch.uint8)
    quantize_into(x, eager)
    # The cache would hand out the code without generating it.
    with inductor_config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(torch.compile(quantize_into, fullgraph=True), x, compiled)
    assert torch.equal(eager, compiled)
    kernel = re.compile(r"^\s+(?:\w+ = )?(?:cpp_fused\w*|extern_kernels\.\w+|torch\.ops\.\S+)\(", re.MULTILINE)
    assert len(kernel.findall(codes[0], codes[0].index("def call("))) == 1
