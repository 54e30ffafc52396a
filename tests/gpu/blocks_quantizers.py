"""Blocks of ``check.py``: casts and quantizers on the device, against fp64 on the host, and their bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import quantized_oracles as oracles
import torch
from gpu_context import Context, require, time_ms
from quantized_oracles import Oracle
from torch import Tensor, nn

import megabuf_fx as mb
from megabuf_fx.runtime.quantize_fp8 import (
    E4M3,
    E5M2,
    Fp8Tensor,
    decode_fp8,
    dequantize_fp8,
    encode_fp8,
    quantize_fp8,
    round_to_bf16,
    scale_from_amax,
    tensor_amax,
)
from megabuf_fx.runtime.quantize_mx import MxTensor, ScaleRule, dequantize_mxfp8, quantize_mxfp8
from megabuf_fx.runtime.quantize_nvfp4 import BlockShape, dequantize_nvfp4, quantize_nvfp4
from megabuf_fx.runtime.stored_params import ShardPiece

TABLES = {E4M3: oracles.E4M3, E5M2: oracles.E5M2}
LOWEST_CAPABILITY = (8, 9)
"""Triton has no e4m3 below."""

QUANTIZED: dict[str, dict[str, Any]] = {
    "fp8": {"fp8_param_gather": True},
    "mxfp8": {"fp8_param_gather": True, "fp8_recipe": "mxfp8"},
    "nvfp4": {"fp4_param_gather": True},
}
"""What to configure for each format."""
SHARED = {**QUANTIZED["mxfp8"], "reuse_grad_buf_for_mxfp8_param_ag": True}
"""MXFP8 through the gradients' storage."""
NEEDED_BYTES = {"fp8": 9.0, "mxfp8": 9.0 + 1 / 32, "nvfp4": 8.5 + 1 / 256}
"""An element. fp32 is read twice, for the amax and for the codes; MXFP8 is written and read in 16 bits in between."""
MOST_COPIES = 20.0
"""A reduction that runs on one multiprocessor takes over a hundred."""


def casts(context: Context) -> str:
    """Every bf16 value, every midpoint of fp8 codes and its fp32 neighbours, to codes and back; bf16 rounding."""
    if context.is_cuda:
        capability = torch.cuda.get_device_capability(context.device)
        require(capability >= LOWEST_CAPABILITY, f"capability {capability}: compiled fp8 casts need 8.9")
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    notes = []
    for dtype, table in TABLES.items():
        middles = ((table[1:] + table[:-1]) / 2).float()
        # Neighbours of representable values, too.
        near = torch.cat([middles, table.float()])
        near = torch.cat([near, near.nextafter(torch.tensor(torch.inf)), near.nextafter(torch.tensor(0.0))])
        x = torch.cat([patterns, near, -near])
        expected = oracles.nearest(x.double(), table, sign=128, nan=0x7F)
        same(encode_fp8(x.to(context.device), dtype), expected, f"codes of {dtype}")
        is_in_range = x.abs() <= table[-1]
        plain = x[is_in_range].to(context.device).to(dtype).view(torch.uint8)
        same(plain, expected[is_in_range], f"the plain cast to {dtype} of what is in range")
        codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
        is_finite = (codes & 0x7F) < len(table)
        values = oracles.decode(codes, table, sign=128).float()
        same(decode_fp8(codes.to(context.device), dtype).cpu()[is_finite], values[is_finite], f"values of {dtype}")
        beyond = torch.tensor([float(table[-1]) * 1.01, 1e9, torch.inf, torch.nan], device=context.device)
        raw = " ".join(f"{code:02X}" for code in beyond.to(dtype).view(torch.uint8).tolist())
        notes.append(f"{str(dtype).removeprefix('torch.')} without clamp: {raw}")
    x = torch.cat([context.randn(2**16, seed=3).cpu() * torch.exp2(context.randn(2**16, seed=4).cpu() * 20), patterns])
    same(round_to_bf16(x.to(context.device)), x.bfloat16().float(), "rounding to bf16")
    return f"all codes as in fp64; {'; '.join(notes)} (1.01 max, 1e9, inf, NaN)"


class Quantizer(NamedTuple):
    """A quantizer, its way back, and what they must give."""

    name: str
    quantize: Callable[[Tensor], Any]
    dequantize: Callable[[Any], Tensor]
    oracle: Callable[[Tensor], Oracle]
    is_compiled: bool = True
    """Whether the library compiles it."""


def make_quantizers() -> list[Quantizer]:
    """With functions of their own: all that is compiled here is compiled once."""

    def fp8(dtype: torch.dtype) -> Quantizer:
        def quantize(x: Tensor) -> Fp8Tensor:
            return quantize_fp8(x, scale_from_amax(tensor_amax(x), dtype), dtype)

        return Quantizer(
            f"fp8 {str(dtype).removeprefix('torch.')}",
            quantize,
            lambda q: dequantize_fp8(q, dtype),
            lambda x: oracles.fp8(x, TABLES[dtype]),
            is_compiled=dtype is E4M3,
        )

    def mxfp8(rule: ScaleRule, dim: int) -> Quantizer:
        return Quantizer(
            f"mxfp8 {rule.value} dim {dim}",
            lambda x: quantize_mxfp8(x, rule, dim=dim),
            lambda q: dequantize_mxfp8(q, dim=dim),
            lambda x: oracles.mxfp8(x, is_rceil=rule is ScaleRule.RCEIL, dim=dim),
            is_compiled=dim == -1,
        )

    def nvfp4(shape: BlockShape) -> Quantizer:
        return Quantizer(
            f"nvfp4 {shape.name}",
            lambda x: quantize_nvfp4(x, shape),
            lambda q: dequantize_nvfp4(q, shape),
            lambda x: oracles.nvfp4(x, rows_of_block=shape.value[0]),
            is_compiled=shape is BlockShape.TILE,
        )

    return [
        fp8(E4M3),
        fp8(E5M2),
        mxfp8(ScaleRule.RCEIL, -1),
        mxfp8(ScaleRule.FLOOR, -1),
        mxfp8(ScaleRule.RCEIL, 0),
        nvfp4(BlockShape.ROW),
        nvfp4(BlockShape.TILE),
    ]


def quantizers(context: Context) -> str:
    """Codes, scales and values of every format, eager and compiled, bit for bit as in fp64."""
    # Other backends than Inductor run the ops of eager mode.
    kinds = ["eager", *(["inductor"] if "inductor" in context.compilers else [])]
    inputs = samples(context)
    count = 0
    for quantizer in make_quantizers():
        for name, x in inputs.items():
            expected = quantizer.oracle(x)
            for kind in kinds if quantizer.is_compiled else kinds[:1]:
                what = f"{quantizer.name}, {name}, {kind}"
                quantize, dequantize = quantizer.quantize, quantizer.dequantize
                if kind != "eager":
                    quantize = torch.compile(quantize, backend=kind, dynamic=False)
                    dequantize = torch.compile(dequantize, backend=kind, dynamic=False)
                found = quantize(x.to(context.device))
                same(found[0], expected.codes, f"{what}: codes")
                for mine, other in zip(found[1:], expected.scales):
                    same(mine, other, f"{what}: scales")
                same(dequantize(found), expected.values, f"{what}: values")
                count += 1
        torch.compiler.reset()
    for kind in kinds:
        odd_views(context, kind, inputs["wide"])
    shape = list(inputs["wide"].shape)
    return f"{' and '.join(kinds)}: {count} cases of {shape} bitwise as in fp64, and at odd addresses"


def samples(context: Context) -> dict[str, Tensor]:
    """Matrices on the host, fp32: near one, over nearly all exponents, with what is special in some blocks."""
    rows, columns = (1024, 2048) if context.is_cuda else (64, 96)
    plain = context.randn(rows, columns, seed=1).cpu()
    exponents = torch.randint(-130, 110, (rows, columns // 16), generator=torch.Generator().manual_seed(context.seed))
    wide = torch.ldexp(plain, exponents.repeat_interleave(16, dim=1))
    special = plain.clone()
    special[:16, :32] = 0
    special[16:32, :32] *= -0.0
    special[32, 32] = torch.inf
    special[33, 70] = -torch.inf
    special[48, 8] = torch.nan
    special[3, 64:] = torch.finfo(torch.float32).max
    special[4, 64:] *= 2.0**-140  # subnormal
    return {"plain": plain.bfloat16().float(), "wide": wide, "special": special}


def odd_views(context: Context, kind: str, x: Tensor) -> None:
    """A kernel that was compiled for aligned tensors gets others: inputs and outputs that begin at any element."""

    def quantize(x: Tensor, codes: Tensor, scales: Tensor) -> None:
        quantize_mxfp8(x, out=MxTensor(codes, scales))

    call = quantize if kind == "eager" else torch.compile(quantize, backend=kind, dynamic=True)
    expected = oracles.mxfp8(x, is_rceil=True)
    for offset in (0, 3):
        source = torch.zeros(x.numel() + offset, device=context.device)
        codes = torch.full((x.numel() + offset + 1,), 0x55, dtype=torch.uint8, device=context.device)
        scales = torch.full((x.numel() // 32 + offset + 1,), 0x55, dtype=torch.uint8, device=context.device)
        source[offset:] = x.to(context.device).view(-1)
        found = MxTensor(codes[offset:-1].view(x.shape), scales[offset:-1].view(x.shape[0], -1))
        call(source[offset:].view(x.shape), *found)
        same(found.codes, expected.codes, f"{kind}: codes from element {offset} on")
        same(found.scales, expected.scales[0], f"{kind}: scales from element {offset} on")
        for data in (codes, scales):
            require(int((data[:offset] != 0x55).sum()) == 0 and int(data[-1]) == 0x55, "a neighbour was written")


def same(found: Tensor, expected: Tensor, what: str) -> None:
    """Bit for bit, where two NaN are the same. ``expected`` is on the host."""
    found = found.cpu()
    require(found.shape == expected.shape and found.dtype == expected.dtype, f"{what}: {found.shape}, {found.dtype}")
    is_same = found == expected
    if found.is_floating_point():
        # Zeros of other signs are equal.
        is_same &= found.signbit() == expected.signbit()
        is_same |= found.isnan() & expected.isnan()
    if not is_same.all():
        first = int((~is_same).flatten().nonzero()[0])
        pair = [value.flatten()[first].item() for value in (found, expected)]
        wrong = int((~is_same).sum())
        require(
            False, f"{what}: {wrong:,} of {is_same.numel():,} differ, the first at {first}: {pair[0]}, not {pair[1]}"
        )


# Bandwidth.


def quantize_speed(context: Context) -> str:
    """What a step does to masters of each format, by the library's own kernels, next to copying the bytes it needs."""
    notes = []
    for name in QUANTIZED:
        torch.compiler.reset()
        notes.append(quantize_masters(name, context))
    return f"stored as quantized whole: {'; '.join(notes)}"


def quantize_masters(name: str, context: Context) -> str:
    rows, columns = (2**14, 2**13) if context.is_cuda else (64, 64)
    layers = [nn.Linear(columns, rows, bias=False, device="meta"), nn.Linear(64, 64, bias=False, device="meta")]
    model = nn.Sequential(*layers).to_empty(device=context.device).bfloat16()
    for param in model.parameters():
        nn.init.zeros_(param)
    buf = mb.attach(model, mb.MegabufConfig(inner_compiler=context.compilers[0], **QUANTIZED[name]))
    (buffer,) = buf.buffers.buffers
    stored = buffer.stored
    assert stored is not None
    # A small matrix first: what was compiled for it serves the large one.
    order = sorted(stored.specs.items(), key=lambda item: item[1].numel)
    pieces = [ShardPiece(index, 0, context.randn(spec.numel, seed=index)) for index, spec in order]

    def step() -> None:
        stored.write_shard(pieces, lambda amax: None)
        for bucket in range(len(buffer.layout.buckets)):
            stored.copy_out(bucket)

    step()
    for index, _, values in pieces:
        spec, found = stored.specs[index], [tensor.clone() for tensor in stored.stored[index]]
        stored.quantize(index, values.view(spec.shape).to(spec.dtype))
        for field, mine, other in zip(stored.stored[index]._fields, found, stored.stored[index]):
            same(
                mine, other.cpu(), f"{name}: {field} of '{spec.name}' after a step, against its values quantized whole"
            )
    return f"{name} {time_quantizing(name, step, rows * columns)}" if context.is_cuda else name


def time_quantizing(name: str, step: Callable[[], None], numel: int) -> str:
    nbytes = int(NEEDED_BYTES[name] * numel)
    source = torch.zeros(nbytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    rest = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    extra = (torch.cuda.max_memory_allocated() - rest) / numel
    needed, copying = time_ms([step, lambda: target.copy_(source)], calls=5)
    ratio = needed / copying
    require(ratio < MOST_COPIES, f"{name}: {needed:.1f} ms, {ratio:.0f} copies of {nbytes:,} bytes")
    speed = nbytes / needed / 1e6
    return f"{needed:.2f} ms = {ratio:.2f}x a copy of its bytes ({speed:.0f} GB/s), {extra:.1f} bytes an element on top"
