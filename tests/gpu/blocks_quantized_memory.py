"""Block of ``check.py``: the memory that quantized parameters and shared storage save."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from blocks_quantizers import QUANTIZED, SHARED
from gpu_context import Context, require
from torch import Tensor, nn

import megabuf_fx as mb


class Deep(nn.Module):
    """Large linear layers, so that weights are most of the memory."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Held(NamedTuple):
    """Bytes of one variant."""

    storages: int
    """Of parameters and buffers, each storage once."""
    allocated: int
    """On the device between steps, optimizer included; 0 on a CPU."""
    peak: int
    """On the device in a compiled forward and backward; 0 on a CPU."""


VARIANTS: dict[str, Mapping[str, Any]] = {"bf16": {}, **QUANTIZED, "shared mxfp8": SHARED}


def saved_memory(context: Context) -> str:
    """Bytes of parameters and buffers, as computed; on a GPU also as allocated, and the peak of a compiled step."""
    width, depth = (4096, 12) if context.is_cuda else (256, 6)
    if context.is_cuda:
        # cuBLAS takes its workspaces for both threads once and for all.
        measure(context, {}, 512, 2)
    numel, largest = width * width * depth, width * width
    held = {name: measure(context, config, width, depth) for name, config in VARIANTS.items()}
    # Hidden parameters share a bf16 tensor, as large as the largest.
    shadow = 2 * largest
    needed = {
        "bf16": 2 * numel,
        "fp8": numel + shadow,
        "mxfp8": 2 * numel + numel * 33 // 32 + shadow,
        "nvfp4": numel // 2 + numel // 256 + shadow,
        "shared mxfp8": numel * 33 // 32 + shadow,
    }
    notes = []
    for name, expected in needed.items():
        found, gradients = held[name], 2 * numel
        excess = found.storages - gradients - expected
        # Numbers on the device, scales in slots of 16 bytes.
        require(0 <= excess <= 16 * 2**10, f"{name}: {found.storages:,} bytes, expected {gradients + expected:,}")
        if context.is_cuda:
            saved = held["bf16"].allocated - found.allocated
            planned = needed["bf16"] - expected
            slack = 8 * 2**20
            require(abs(saved - planned) <= slack, f"{name}: {saved:,} bytes saved at rest, expected {planned:,}")
            saved_peak = held["bf16"].peak - found.peak
            # A dequantized weight or two come on top.
            require(saved_peak >= planned - 3 * shadow - slack, f"{name}: {saved_peak:,} bytes of the peak saved")
            notes.append(f"{name} {found.allocated / 2**20:.0f} MiB at rest, {found.peak / 2**20:.0f} at the peak")
        else:
            notes.append(f"{name} {expected / numel:.2f}")
    shared = held["mxfp8"].storages - held["shared mxfp8"].storages
    require(shared == 2 * numel, f"sharing saves {shared:,} bytes, expected {2 * numel:,}")
    unit = "fp32 masters included" if context.is_cuda else "bytes an element, gradients apart"
    return f"{depth} layers of {width} x {width}: {'; '.join(notes)} ({unit}); sharing saves 2 bytes an element"


def measure(context: Context, config: Mapping[str, Any], width: int, depth: int) -> Held:
    torch.compiler.reset()
    gc.collect()
    begin = torch.cuda.memory_allocated() if context.is_cuda else 0
    torch.manual_seed(context.seed)
    with torch.device(context.device):
        model = Deep(width, depth).bfloat16()
    buf = mb.attach(model, mb.MegabufConfig(inner_compiler=context.compilers[0], **config))
    # Makes masters, so that nobody needs the values of the beginning.
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.SGD, lr=0.0, fused=True)
    tensors = [*buf.buffers.tensors().values(), *model.parameters()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    if not context.is_cuda:
        return Held(sum(storages.values()), 0, 0)
    compiled = torch.compile(model, backend="megabuf")
    x = context.randn(64, width).bfloat16()

    def run() -> None:
        compiled(x).float().square().mean().backward()
        optimizer.zero_grad()

    for _ in range(2):
        run()
    optimizer.step()
    run()
    torch.cuda.synchronize()
    gc.collect()
    allocated = torch.cuda.memory_allocated() - begin
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return Held(sum(storages.values()), allocated, torch.cuda.max_memory_allocated() - begin)
