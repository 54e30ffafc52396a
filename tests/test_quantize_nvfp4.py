"""``runtime/quantize_nvfp4.py``: packing, codes and both levels of scales, bit for bit with the reference."""

from __future__ import annotations

import math
from fractions import Fraction

import mx_reference
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megabuf_fx.runtime.quantize_fp8 import decode_fp8, round_to_bf16, tensor_amax
from megabuf_fx.runtime.quantize_nvfp4 import (
    BlockShape,
    Nvfp4Tensor,
    block_amax,
    decode_e2m1,
    dequantize_nvfp4,
    encode_e2m1,
    encode_scale,
    pack_nibbles,
    quantize_nvfp4,
    unpack_nibbles,
)

SHAPES = pytest.mark.parametrize("shape", BlockShape)
BLOCKS = {BlockShape.ROW: 20_000, BlockShape.TILE: 2_000}
COLUMNS = 64


def floats(bits: mx_reference.Bits) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int32)).view(torch.float32)


def tiles(x: torch.Tensor) -> torch.Tensor:
    """``[rows, columns]`` -> ``[tiles, 256]``, row by row of tiles."""
    rows, columns = x.shape
    return x.view(rows // 16, 16, columns // 16, 16).transpose(1, 2).reshape(-1, 256)


def check(q: Nvfp4Tensor, bits: mx_reference.Bits, shape: BlockShape) -> None:
    """``q`` is what the reference makes of ``bits`` ``[rows, columns]``."""
    if shape is BlockShape.ROW:
        by_block = bits.reshape(-1, 16)
        codes = q.codes.reshape(-1, 8)
    else:
        by_block = tiles(torch.from_numpy(bits.view(np.int32))).numpy().view(np.uint32)
        codes = pack_nibbles(tiles(unpack_nibbles(q.codes)))
    expected = mx_reference.quantize_nvfp4(by_block)
    np.testing.assert_array_equal(q.block_scales.numpy().ravel(), expected.scales)
    np.testing.assert_array_equal(codes.numpy(), expected.codes)
    assert q.tensor_scale.item() == float(expected.tensor_scale)


def data(shape: BlockShape, *, specials: bool, limit: float = math.inf) -> mx_reference.Bits:
    """Blocks with edge values, as ``[rows, 64]``; magnitudes above ``limit`` are brought to [1, 2)."""
    bits = mx_reference.edge_blocks(BLOCKS[shape], math.prod(shape.value), specials=specials)
    too_large = mx_reference.fp32_magnitudes(bits) > limit
    is_finite = (bits & mx_reference.MAGNITUDE) < mx_reference.INFINITY
    bits = np.where(too_large & is_finite, (bits & np.uint32(0x807FFFFF)) | np.uint32(0x3F800000), bits)
    if shape is BlockShape.TILE:
        bits = bits.reshape(-1, COLUMNS // 16, 16, 16).swapaxes(1, 2)
    return bits.astype(np.uint32).reshape(-1, COLUMNS)


# Packing and e2m1


def test_all_pairs_of_bytes_survive_unpacking_and_packing() -> None:
    pairs = torch.cartesian_prod(torch.arange(256), torch.arange(256)).to(torch.uint8)
    codes = unpack_nibbles(pairs)
    assert codes.shape == (65_536, 4)
    assert codes.max() == 15
    assert torch.equal(pack_nibbles(codes), pairs)
    assert torch.equal(encode_e2m1(decode_e2m1(codes)), codes)


def test_the_even_element_is_the_low_nibble() -> None:
    assert pack_nibbles(torch.tensor([1, 2, 0xF, 0], dtype=torch.uint8)).tolist() == [0x21, 0x0F]
    assert quantize_nvfp4(torch.tensor([6.0, -1.0] * 8)).codes.tolist() == [0xA7] * 8


def test_e2m1_values_equal_their_definition() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = decode_e2m1(codes).numpy()
    np.testing.assert_array_equal(values, mx_reference.E2M1.decode(codes.numpy()))
    assert np.signbit(values).tolist() == [False] * 8 + [True] * 8


def test_e2m1_codes_equal_the_reference() -> None:
    every_bf16 = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    some_fp32 = np.random.default_rng(0).integers(0, 2**32, size=100_000, dtype=np.uint32)
    bits = np.concatenate([every_bf16, some_fp32, mx_reference.edge_values()])
    expected = mx_reference.E2M1.encode(mx_reference.fp32_magnitudes(bits))
    expected = expected | np.where(mx_reference.is_negative(bits), 8, 0)
    expected[mx_reference.is_nan(bits)] = 0
    np.testing.assert_array_equal(encode_e2m1(floats(bits)).numpy(), expected)


# Codes and scales


@SHAPES
@pytest.mark.parametrize("limit", [math.inf, 2.0**4, 2.0**-100, 2.0**-127])
def test_fp32_blocks_equal_the_reference(limit: float, shape: BlockShape) -> None:
    bits = data(shape, specials=False, limit=limit)
    scaled = floats(bits) * min(limit, 1.0)  # a tensor whose own maximum is tiny has the tiny blocks' scales in range
    bits = scaled.view(torch.int32).numpy().view(np.uint32)
    check(quantize_nvfp4(scaled, shape), bits, shape)


@SHAPES
def test_blocks_with_nan_and_infinity_equal_the_reference(shape: BlockShape) -> None:
    bits = data(shape, specials=True, limit=2.0**4)
    check(quantize_nvfp4(floats(bits), shape), bits, shape)


@SHAPES
def test_bf16_blocks_equal_the_reference(shape: BlockShape) -> None:
    bits = mx_reference.bf16_of_fp32(data(shape, specials=False, limit=2.0**4))
    check(quantize_nvfp4(floats(bits).bfloat16(), shape), bits, shape)
    check(quantize_nvfp4(round_to_bf16(floats(bits)), shape), bits, shape)


def test_known_blocks() -> None:
    x = torch.zeros(3, 16)
    x[0, :4] = torch.tensor([2688.0, -448.0, 0.0, -0.0])
    x[1, 0] = 6.0
    q = quantize_nvfp4(x)
    assert q.tensor_scale == 1.0
    assert q.block_scales.flatten().tolist() == [0x7E, 0x38, 0x00]  # 448, 1, 0
    assert q.codes[:, :2].tolist() == [[0xA7, 0x80], [0x07, 0x00], [0x00, 0x00]]


@SHAPES
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, -math.nan])
def test_an_infinity_or_nan_spoils_its_block_only(bad: float, shape: BlockShape) -> None:
    x = torch.full((48, 16), 6.0)
    x[17, 3] = bad
    q = quantize_nvfp4(x, shape)
    hit = 17 if shape is BlockShape.ROW else 1
    is_hit = torch.arange(len(q.block_scales)) == hit
    assert (q.block_scales.flatten() == 0x7F).tolist() == is_hit.tolist()
    assert q.codes[17, 1].item() == 0
    back = dequantize_nvfp4(q, shape)
    rows = is_hit.repeat_interleave(48 // len(is_hit))
    assert back[rows].isnan().all()
    assert (back[~rows] == 6).all()


def test_zero_tensors_and_blocks_too_small_for_a_scale() -> None:
    zero = quantize_nvfp4(torch.zeros(16))
    assert (zero.tensor_scale.item(), zero.block_scales.item()) == (1.0, 0)
    x = torch.ones(2, 16)
    x[1] = -(2.0**-20)
    q = quantize_nvfp4(x)
    assert q.block_scales[1] == 0
    assert q.codes[1].tolist() == [0x88] * 8
    assert (dequantize_nvfp4(q)[1] == 0).all()


def test_tiles_serve_the_transpose() -> None:
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    q, transposed = quantize_nvfp4(x, BlockShape.TILE), quantize_nvfp4(x.t(), BlockShape.TILE)
    assert q.block_scales.shape == (2, 3)
    assert torch.equal(transposed.block_scales, q.block_scales.t())
    assert torch.equal(dequantize_nvfp4(transposed, BlockShape.TILE), dequantize_nvfp4(q, BlockShape.TILE).t())


def test_rows_of_any_number_of_dimensions() -> None:
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    q = quantize_nvfp4(x)
    flat = quantize_nvfp4(x.flatten())
    assert (q.codes.shape, q.block_scales.shape) == ((2, 3, 16), (2, 3, 2))
    assert torch.equal(q.codes.flatten(), flat.codes)
    assert torch.equal(dequantize_nvfp4(q).flatten(), dequantize_nvfp4(flat))


@SHAPES
def test_parts_quantized_with_common_maxima_are_parts_of_the_whole(shape: BlockShape) -> None:
    # Two ranks hold rows [0, 24) and [24, 64): the border cuts a tile.
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    whole = quantize_nvfp4(x, shape)
    parts = [x.clone(), x.clone()]
    parts[0][24:], parts[1][:24] = 0, 0
    amax_of_blocks = torch.maximum(*(block_amax(part, shape) for part in parts))
    amax = tensor_amax(amax_of_blocks)
    assert amax == x.abs().max()
    for part, rows in zip(parts, (slice(0, 24), slice(24, 64))):
        q = quantize_nvfp4(part, shape, amax=amax, amax_of_blocks=amax_of_blocks)
        assert torch.equal(q.codes[rows], whole.codes[rows])
        assert torch.equal(q.block_scales, whole.block_scales)
        assert torch.equal(q.tensor_scale, whole.tensor_scale)


@SHAPES
def test_values_equal_their_definition(shape: BlockShape) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (32, 16), dtype=torch.uint8, generator=generator)
    scale_shape = (32, 2) if shape is BlockShape.ROW else (2, 2)
    scales = torch.randint(0x7F, scale_shape, dtype=torch.uint8, generator=generator)
    tensor_scale = torch.tensor(0.3)
    values = dequantize_nvfp4(Nvfp4Tensor(codes, scales, tensor_scale), shape, dtype=torch.float32)
    elements = unpack_nibbles(codes)
    for row, column in [(0, 0), (0, 31), (15, 16), (16, 15), (31, 31), (20, 3)]:
        scale = int(scales[row if shape is BlockShape.ROW else row // 16, column // 16])
        factor = mx_reference.round_to_fp32(mx_reference.E4M3.magnitude(scale) * Fraction(float(tensor_scale)))
        code = int(elements[row, column])
        magnitude = mx_reference.round_to_fp32(mx_reference.E2M1.magnitude(code & 7) * factor)
        assert values[row, column].item() == float(magnitude) * (-1 if code & 8 else 1)
    rounded = dequantize_nvfp4(Nvfp4Tensor(codes, scales, tensor_scale), shape)
    assert torch.equal(rounded, values.bfloat16())


# Buffers


@SHAPES
def test_out_is_a_slice_of_a_buffer(shape: BlockShape) -> None:
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    expected = quantize_nvfp4(x, shape)
    buffer = torch.full((600,), 99, dtype=torch.uint8)
    out = Nvfp4Tensor(buffer[64:576].view(32, 16), torch.empty_like(expected.block_scales), torch.empty(()))
    assert quantize_nvfp4(x, shape, out=out) is out
    assert all(torch.equal(a, b) for a, b in zip(out, expected))
    assert (torch.cat([buffer[:64], buffer[576:]]) == 99).all()


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"dimension -1 of shape \(4, 40\) has 40 .* multiple of 16: pad it to 48, or"):
        quantize_nvfp4(torch.ones(4, 40))
    with pytest.raises(ValueError, match=r"dimension 0 of shape .* has 4 elements"):
        quantize_nvfp4(torch.ones(4, 32), BlockShape.TILE)
    with pytest.raises(ValueError, match=r"need a matrix, this tensor has shape \(32,\): use BlockShape.ROW"):
        quantize_nvfp4(torch.ones(32), BlockShape.TILE)
    q = quantize_nvfp4(torch.ones(2, 16))
    with pytest.raises(ValueError, match=r"out.codes is torch.uint8 \(2, 16\), expected torch.uint8 \(2, 8\)"):
        quantize_nvfp4(torch.ones(2, 16), out=q._replace(codes=unpack_nibbles(q.codes)))


# Properties

finite = st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100)


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """``[3, 16]``; nothing so small that a scale's reciprocal exceeds the largest fp32 and is cut."""
    values = draw(st.lists(finite, min_size=1, max_size=48))
    x = torch.tensor(values + [0.0] * (48 - len(values))).view(3, 16)
    return torch.where(x.abs() > 2.0**-80, x, 0.0)


@settings(max_examples=100, deadline=None)
@given(matrices())
def test_quantizing_values_again_changes_nothing(x: torch.Tensor) -> None:
    # With the same tensor scale, which a maximum rounded once would miss by an ulp; and where block scales are normal:
    # the largest code of a block with a smaller one can be below 6, and then the block's new scale is smaller still.
    amax = tensor_amax(x)
    q = quantize_nvfp4(x, amax=amax)
    again = quantize_nvfp4(dequantize_nvfp4(q, dtype=torch.float32), amax=amax)
    stable = (q.block_scales >= 0x08).flatten() | (q.block_scales == 0).flatten()
    assert torch.equal(again.codes[stable], q.codes[stable])
    assert torch.equal(again.block_scales[stable], q.block_scales[stable])


@settings(max_examples=100, deadline=None)
@given(matrices())
def test_error_bound(x: torch.Tensor) -> None:
    q = quantize_nvfp4(x)
    values = dequantize_nvfp4(q, dtype=torch.float32)
    error = (values.double() - x.double()).abs()
    # Half the widest spacing of e2m1, 2, in units of the scale; fp32 rounding of the scales adds a few ulps.
    unit = (decode_fp8(q.block_scales) * q.tensor_scale).double()
    # The smallest subnormal scale stands for up to 1.5 of itself: 9 units saturate at 6. Below it all is lost.
    units = torch.where(q.block_scales >= 0x08, 1.0, 3.0) * (1 + 2.0**-20)
    assert (error <= torch.where(q.block_scales == 0, x.abs().double(), unit * units)).all()


@settings(max_examples=100, deadline=None)
@given(matrices(), st.integers(-20, 20))
def test_powers_of_two_commute(x: torch.Tensor, exponent: int) -> None:
    q, moved = quantize_nvfp4(x), quantize_nvfp4(x * 2.0**exponent)
    assert torch.equal(moved.codes, q.codes)
    assert torch.equal(moved.block_scales, q.block_scales)
    if x.any():
        assert moved.tensor_scale == q.tensor_scale * 2.0**exponent


def test_encode_scale() -> None:
    amax = torch.tensor([2688.0, 1.0, 1e-45, 0.0, math.inf, math.nan])
    assert encode_scale(amax).tolist() == [1.0, 2688.0, float(mx_reference.FP32_MAX), 1.0, 1.0, 1.0]


@SHAPES
def test_compiles_without_a_break(shape: BlockShape) -> None:
    def there_and_back(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q = quantize_nvfp4(round_to_bf16(x), shape)
        return (*q, dequantize_nvfp4(q, shape))

    x = floats(data(shape, specials=False, limit=2.0**4)[:64])
    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(x)
    assert all(torch.equal(a, b) for a, b in zip(there_and_back(x), compiled))
