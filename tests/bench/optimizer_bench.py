"""Time of ``DistributedOptimizer.step`` in one process, beside a copy of as many bytes as an update has to move.

    python tests/bench/optimizer_bench.py                  # three precisions, three optimizers, a few minutes

A round goes through all contestants of a case, so that what else the machine does meets all alike; the table has
medians over the rounds. Ratios are of CPU seconds, as other processes lengthen those less than seconds of the clock.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import megabuf_fx as mb

BASE = "copy"
PRECISIONS = {
    "fp32": (torch.float32, torch.float32),
    "bf16, fp32 gradients": (torch.bfloat16, torch.float32),
    "bf16, bf16 gradients": (torch.bfloat16, torch.bfloat16),
}
"""Dtypes of parameters and gradients."""
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], int]] = {
    "SGD": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}, 1),
    "Adam": (torch.optim.Adam, {"lr": 1e-3}, 2),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}, 2),
}
"""Class, options, and how many fp32 values of state it keeps for each element."""
FORMS: dict[str, dict[str, Any]] = {
    "step, fused": {"fused": True},
    "step, foreach": {"foreach": True},
    "step, compiled": {"compile_step": True},
}

Step = Callable[[], object]


class Parameters(nn.Module):
    """Square matrices of a million elements, each with a bias; its output sums them all."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        width = min(1024, int(numel**0.5))
        count = max(1, numel // (width * width + width))
        torch.manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(width, width)) for _ in range(count))
        self.biases = nn.ParameterList(nn.Parameter(torch.randn(width)) for _ in range(count))

    def forward(self) -> Tensor:
        return torch.stack([param.float().square().mean() for param in self.parameters()]).sum()


def bytes_per_element(precision: str, optimizer: str) -> int:
    """What one pass moves: it reads gradient, master and state, and writes master, state and a 16-bit parameter."""
    param, grad = PRECISIONS[precision]
    state = 4 * OPTIMIZERS[optimizer][2]
    read = grad.itemsize + 4 + state
    written = 4 + state + (0 if param == torch.float32 else param.itemsize)
    return read + written


def make_copy(numel: int, nbytes: int) -> Step:
    """Half of the bytes are read, half written."""
    source = torch.ones(numel * nbytes // 2, dtype=torch.uint8)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def make_torch(numel: int, precision: str, optimizer: str) -> Step:
    """Torch's fused optimizer over the parameters one by one, with what mixed precision needs around it."""
    dtype, grad_dtype = PRECISIONS[precision]
    masters = list(Parameters(numel).parameters())
    params: list[Tensor] = [master.detach().to(dtype) for master in masters]
    grads = [torch.randn_like(param, dtype=grad_dtype) for param in params]
    kind, options, _ = OPTIMIZERS[optimizer]
    inner = kind(masters, fused=True, **options)  # type: ignore[call-arg]

    @torch.no_grad()
    def step() -> None:
        for master, grad in zip(masters, grads):
            master.grad = grad.float()
        inner.step()
        if dtype != torch.float32:
            torch._foreach_copy_(params, list[Tensor](masters))

    return step


def make_ours(numel: int, precision: str, optimizer: str, form: str) -> tuple[nn.Module, Step]:
    """``step`` with everything it does, and the model whose backward must come before it."""
    dtype, grad_dtype = PRECISIONS[precision]
    model = Parameters(numel).to(dtype)
    mb.attach(model, mb.MegabufConfig(grad_reduce_in_fp32=grad_dtype == torch.float32))
    kind, options, _ = OPTIMIZERS[optimizer]
    ours = mb.DistributedOptimizer(model.parameters(), kind, **options, **FORMS[form])
    return model, ours.step


def timed(step: Step) -> tuple[float, float]:
    """Seconds of CPU, and of the clock."""
    begin = time.process_time(), time.perf_counter()
    step()
    return time.process_time() - begin[0], time.perf_counter() - begin[1]


def measure(numel: int, precision: str, optimizer: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Of every contestant the seconds of each round."""
    models: dict[str, nn.Module] = {}
    steps: dict[str, Step] = {BASE: make_copy(numel, bytes_per_element(precision, optimizer))}
    for form in FORMS:
        models[form], steps[form] = make_ours(numel, precision, optimizer, form)
    steps["torch, fused, by parameter"] = make_torch(numel, precision, optimizer)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    gc.collect()
    # As timeit does: a collection comes when it likes.
    gc.disable()
    # The first step makes state, the second compiles.
    for number in range(-2, rounds):
        for name, step in steps.items():
            if name in models:
                models[name]().backward()
            seconds = timed(step)
            if name in models:
                mb.handle(models[name]).zero_grad()
            if number >= 0:
                found[name].append(seconds)
    gc.enable()
    for model in models.values():
        mb.handle(model).detach()
    return found


def summarize(samples: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, Any]]:
    """By contestant: ``[median, least, most]`` CPU seconds, median seconds of the clock, ratio to the copy."""
    summary: dict[str, dict[str, Any]] = {}
    for name, rounds in samples.items():
        cpu, wall = zip(*rounds)
        summary[name] = {"cpu_s": [statistics.median(cpu), min(cpu), max(cpu)], "wall_s": statistics.median(wall)}
    for entry in summary.values():
        entry["ratio"] = entry["cpu_s"][0] / summary[BASE]["cpu_s"][0]
    return summary


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare the optimizer's step with a copy of the same bytes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rounds", type=int, default=15, help="rounds through all contestants, after two that warm up")
    add("--numel", type=int, nargs="+", default=[11_000_000, 40_000_000], help="elements of the shard")
    add("--precision", choices=PRECISIONS, nargs="+", default=list(PRECISIONS), help="dtypes")
    add("--optimizer", choices=OPTIMIZERS, nargs="+", default=list(OPTIMIZERS), help="classes")
    add("--json", type=Path, default=None, help="file for everything that was measured")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    rows, kept = [], []
    for numel in args.numel:
        for precision in args.precision:
            for optimizer in args.optimizer:
                samples = measure(numel, precision, optimizer, args.rounds)
                gc.collect()
                nbytes = bytes_per_element(precision, optimizer)
                summary = summarize(samples)
                case = {"numel": numel, "precision": precision, "optimizer": optimizer, "bytes_per_element": nbytes}
                kept.append({**case, "samples": samples, "summary": summary})
                for name, entry in summary.items():
                    median, least, most = (1000 * value for value in entry["cpu_s"])
                    cpu = f"{median:.1f} [{least:.1f} {most:.1f}]"
                    rows.append((*case.values(), name, cpu, f"{1000 * entry['wall_s']:.1f}", f"{entry['ratio']:.2f}"))
    print(
        f"One thread on {os.cpu_count()} cores, torch {torch.__version__}, {args.rounds} rounds: median [least most]; "
        "ratio of CPU time to a copy of as many bytes"
    )
    headers = ("elements", "parameters", "optimizer", "bytes/element", "", "CPU ms", "wall ms", "ratio")
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))
    if args.json is not None:
        args.json.write_text(json.dumps({"torch": torch.__version__, "cases": kept}, indent=1) + "\n")


if __name__ == "__main__":
    main()
