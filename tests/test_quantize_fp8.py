"""``runtime/quantize_fp8.py``: casts, scales and histories, bit for bit with the reference."""

from __future__ import annotations

import math
from fractions import Fraction

import mx_reference
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megabuf_fx.runtime.quantize_fp8 import (
    E4M3,
    E5M2,
    FP32_MAX,
    AmaxAlgorithm,
    DelayedScale,
    Fp8Tensor,
    decode_fp8,
    dequantize_fp8,
    encode_fp8,
    exact_quotient,
    new_delayed_scale,
    quantize_fp8,
    record_amax,
    round_to_bf16,
    scale_from_amax,
    tensor_amax,
    update_delayed_scale,
)

FORMATS = [(E4M3, mx_reference.E4M3), (E5M2, mx_reference.E5M2)]
ONE = torch.tensor(1.0)
ALL_BF16 = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
BAD_AMAX = [0.0, math.inf, math.nan]


def floats(bits: mx_reference.Bits) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int32)).view(torch.float32)


def random_fp32(count: int) -> mx_reference.Bits:
    """Any bits, NaN and infinity among them."""
    return np.random.default_rng(0).integers(0, 2**32, size=count, dtype=np.uint32)


# Casts


@pytest.mark.parametrize(("fp8_dtype", "target"), FORMATS, ids=["e4m3", "e5m2"])
def test_casts_equal_the_reference(fp8_dtype: torch.dtype, target: mx_reference.MiniFloat) -> None:
    bits = np.concatenate([ALL_BF16, random_fp32(100_000), mx_reference.edge_values()])
    codes = encode_fp8(floats(bits), fp8_dtype).numpy()
    np.testing.assert_array_equal(codes, mx_reference.quantize_fp8(bits, Fraction(1), target))


@pytest.mark.parametrize(("fp8_dtype", "target"), FORMATS, ids=["e4m3", "e5m2"])
def test_all_bf16_values_equal_the_reference(fp8_dtype: torch.dtype, target: mx_reference.MiniFloat) -> None:
    x = floats(ALL_BF16).bfloat16()
    codes = quantize_fp8(x, ONE, fp8_dtype).codes.numpy()
    np.testing.assert_array_equal(codes, mx_reference.quantize_fp8(ALL_BF16, Fraction(1), target))


@pytest.mark.parametrize(("fp8_dtype", "target"), FORMATS, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", [3.7, 2.0**-100, 2.0**100, 1e-40, FP32_MAX])
def test_products_are_rounded_to_fp32_first(
    fp8_dtype: torch.dtype, target: mx_reference.MiniFloat, scale: float
) -> None:
    scale_tensor = torch.tensor(scale)
    bits = np.concatenate([random_fp32(20_000), mx_reference.edge_values()])
    codes = quantize_fp8(floats(bits), scale_tensor, fp8_dtype).codes.numpy()
    exact = Fraction(float(scale_tensor))
    np.testing.assert_array_equal(codes, mx_reference.quantize_fp8(bits, exact, target))
    codes = quantize_fp8(floats(ALL_BF16).bfloat16(), scale_tensor, fp8_dtype).codes.numpy()
    np.testing.assert_array_equal(codes, mx_reference.quantize_fp8(ALL_BF16, exact, target))


@pytest.mark.parametrize(("fp8_dtype", "target"), FORMATS, ids=["e4m3", "e5m2"])
def test_all_codes_decode_to_their_definition(fp8_dtype: torch.dtype, target: mx_reference.MiniFloat) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = target.decode(codes.numpy())
    if fp8_dtype is E5M2:
        expected[[0x7C, 0xFC]] = math.inf, -math.inf
    np.testing.assert_array_equal(decode_fp8(codes, fp8_dtype).double().numpy(), expected)
    is_finite = np.isfinite(expected)
    np.testing.assert_array_equal(
        encode_fp8(decode_fp8(codes, fp8_dtype), fp8_dtype).numpy()[is_finite], codes.numpy()[is_finite]
    )


def test_special_values() -> None:
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan])
    assert encode_fp8(x, E4M3).tolist() == [0x00, 0x80, 0x7E, 0xFE, 0x7F, 0x7F]
    assert encode_fp8(x, E5M2).tolist() == [0x00, 0x80, 0x7B, 0xFB, 0x7F, 0x7F]


def test_round_to_bf16_equals_the_reference() -> None:
    bits = np.concatenate([random_fp32(100_000), mx_reference.edge_values()])
    rounded = round_to_bf16(floats(bits)).view(torch.int32).numpy().view(np.uint32)
    np.testing.assert_array_equal(rounded, mx_reference.bf16_of_fp32(bits))
    assert torch.equal(round_to_bf16(floats(ALL_BF16)).isnan(), floats(ALL_BF16).isnan())


def test_quotients_are_correctly_rounded() -> None:
    bits = (random_fp32(3_000) & np.uint32(0x7FFFFFFF)) | np.uint32(1)
    bits = bits[bits < mx_reference.INFINITY]
    exact = [Fraction(448) / Fraction(x) for x in mx_reference.fp32_magnitudes(bits)]
    expected = [math.inf if x > mx_reference.FP32_MAX else float(mx_reference.round_to_fp32(x)) for x in exact]
    assert exact_quotient(448.0, floats(bits)).tolist() == expected


# Scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_amax(dtype: torch.dtype) -> None:
    assert tensor_amax(torch.tensor([[1.0, -3.0], [2.0, 0.0]], dtype=dtype)).item() == 3.0
    assert tensor_amax(torch.empty(0, dtype=dtype)).item() == 0.0
    assert tensor_amax(torch.tensor([1.0, math.nan], dtype=dtype)).isnan()
    assert tensor_amax(torch.tensor([1.0, -math.inf], dtype=dtype)).item() == math.inf


def test_scale_from_amax() -> None:
    amax = torch.tensor([448.0, 3.0, 1e-45, *BAD_AMAX])
    third = float(mx_reference.round_to_fp32(Fraction(448, 3)))
    assert scale_from_amax(amax).tolist() == [1.0, third, FP32_MAX, 1.0, 1.0, 1.0]
    assert scale_from_amax(amax, E5M2)[0].item() == 128.0
    assert scale_from_amax(amax, power_of_two=True).tolist() == [1.0, 128.0, 2.0**127, 1.0, 1.0, 1.0]
    # An epsilon makes a floor of zero, too, but not a number of NaN.
    assert scale_from_amax(amax, epsilon=4.0).tolist() == [1.0, 112.0, 112.0, 112.0, 1.0, 1.0]


def test_current_scaling_uses_the_whole_range() -> None:
    x = torch.tensor([-7.0, 3.5, 0.0])
    q = quantize_fp8(x, scale_from_amax(tensor_amax(x)))
    assert q.codes.tolist() == [0xFE, 0x76, 0x00]
    assert torch.equal(dequantize_fp8(q), x.bfloat16())


@pytest.mark.parametrize("algorithm", AmaxAlgorithm)
@pytest.mark.parametrize("window", [1, 2, 4])
def test_delayed_scaling_follows_a_list_of_past_steps(window: int, algorithm: AmaxAlgorithm) -> None:
    steps = [3.0, 5.0, 0.0, 2.0, math.inf, 1.0, 1.0, math.nan, 4.0, 1e-45, 7.0, 6.0, 6.0, 5.0, *[1e-45] * 4]
    state = new_delayed_scale(window)
    past: list[float] = []
    expected = 1.0
    for step in steps:
        record_amax(state, torch.tensor(step / 2))  # two uses in a step: the larger one counts
        record_amax(state, torch.tensor(step))
        update_delayed_scale(state, algorithm=algorithm, margin=1, out=state)
        if step != 0:
            past.append(step)
            seen = past[-window:] if algorithm is AmaxAlgorithm.MAX else past[-1:]
            if all(math.isfinite(amax) for amax in seen):
                exact = Fraction(224) / Fraction(float(torch.tensor(max(seen))))
                expected = float(mx_reference.round_to_fp32(min(exact, mx_reference.FP32_MAX)))
        assert state.scale.item() == expected, f"after {past}"
        assert state.amax_history[0] == 0.0


def test_delayed_scaling_of_several_tensors_and_out() -> None:
    state = new_delayed_scale(3, (2,))
    record_amax(state, torch.tensor([2.0, 0.0]))
    history, scale = update_delayed_scale(state)
    assert state.amax_history[0].tolist() == [2.0, 0.0]
    assert history.tolist() == [[0.0, 0.0], [0.0, 0.0], [2.0, 0.0]]
    assert scale.tolist() == [224.0, 1.0]
    pointers = [tensor.data_ptr() for tensor in state]
    assert update_delayed_scale(state, out=state) is state
    assert [tensor.data_ptr() for tensor in state] == pointers
    assert torch.equal(state.amax_history, history)


# Buffers


def test_codes_are_written_into_a_slice_of_a_buffer() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    buffer = torch.full((40,), 99, dtype=torch.uint8)
    out = Fp8Tensor(buffer[8:32].view(4, 6), torch.empty(()))
    expected = quantize_fp8(x, torch.tensor(10.0))
    assert quantize_fp8(x, torch.tensor(10.0), out=out) is out
    assert torch.equal(buffer[8:32].view(4, 6), expected.codes)
    assert out.scale_inv == expected.scale_inv
    assert (buffer[:8] == 99).all()
    assert (buffer[32:] == 99).all()


def test_codes_of_parts_are_parts_of_the_codes() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    scale = scale_from_amax(tensor_amax(x))
    parts = [quantize_fp8(part, scale).codes for part in (x[:0], x[:33], x[33:])]
    assert torch.equal(torch.cat(parts), quantize_fp8(x, scale).codes)


def test_errors() -> None:
    out = Fp8Tensor(torch.empty(5, dtype=torch.uint8), torch.empty(()))
    with pytest.raises(ValueError, match=r"out.codes is torch.uint8 \(5,\), expected torch.uint8 \(6,\): slice"):
        quantize_fp8(torch.ones(6), ONE, out=out)
    with pytest.raises(ValueError, match="history has 0 steps, expected at least 1"):
        new_delayed_scale(0)


# Properties

finite = st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100)


@settings(max_examples=100, deadline=None)
@given(st.lists(finite, min_size=1, max_size=40), st.sampled_from([E4M3, E5M2]))
def test_error_bound_and_idempotence(values: list[float], fp8_dtype: torch.dtype) -> None:
    x = torch.tensor(values)
    scale = scale_from_amax(tensor_amax(x), fp8_dtype, power_of_two=True)
    q = quantize_fp8(x, scale, fp8_dtype)
    again = dequantize_fp8(q, fp8_dtype, dtype=torch.float32)
    assert torch.equal(quantize_fp8(again, scale, fp8_dtype).codes, q.codes)
    # Half a spacing: half the format's epsilon of a normal value, half the smallest subnormal of others.
    info = torch.finfo(fp8_dtype)
    bound = torch.maximum(x.abs().double() * info.eps / 2, info.smallest_normal * info.eps / 2 / scale.double())
    assert ((again.double() - x.double()).abs() <= bound).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(finite, min_size=1, max_size=40), st.integers(-20, 20))
def test_powers_of_two_commute(values: list[float], exponent: int) -> None:
    x = torch.tensor([value if abs(value) > 2.0**-80 else 0.0 for value in values])
    q = quantize_fp8(x, scale_from_amax(tensor_amax(x)))
    moved = x * 2.0**exponent
    q_moved = quantize_fp8(moved, scale_from_amax(tensor_amax(moved)))
    assert torch.equal(q_moved.codes, q.codes)
    if x.any():
        assert q_moved.scale_inv.item() == q.scale_inv.item() * 2.0**exponent


def test_compiles_without_a_break() -> None:
    def step(x: torch.Tensor, state: DelayedScale) -> Fp8Tensor:
        record_amax(state, tensor_amax(x))
        update_delayed_scale(state, out=state)
        return quantize_fp8(round_to_bf16(x), state.scale)

    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    states = new_delayed_scale(4), new_delayed_scale(4)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(x, states[1])
    for a, b in zip((*step(x, states[0]), *states[0]), (*compiled, *states[1])):
        assert torch.equal(a, b)
    assert states[1].scale == exact_quotient(448.0, x.abs().max())
