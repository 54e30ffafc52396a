"""Train a small model, compiled by Inductor, and tell what torch's caches had to do with it.

TORCHINDUCTOR_CACHE_DIR=... python tests/warm_start_runs.py '{"bucket_size": 600}'
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any, NamedTuple

import torch
from helpers import batch, params_of
from torch import Tensor, nn
from torch._dynamo.utils import counters

import megabuf_fx as mb


class Products(nn.Module):
    """Matrix products only: Inductor has no kernel to compile, which would take longer than all the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24, bias=False)
        self.second = nn.Linear(24, 8, bias=False)
        self.third = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.third(self.second(self.first(x)))
        return result


class Run(NamedTuple):
    params: dict[str, list[Any]]
    aot: dict[str, int]
    """``hit``, ``miss``, ``saved`` and ``bypass`` of AOTAutograd's cache."""
    inductor: dict[str, int]
    """``hit`` and ``miss`` of Inductor's."""
    launches: list[list[int]]
    """Bucket groups launched by each backward."""
    compiles: int


def cache_counts(kind: str, prefix: str) -> dict[str, int]:
    found: Counter[str] = counters[kind]
    names = ("hit", "miss", "saved", "bypass")
    return {name: found[prefix + name] for name in names if found[prefix + name]}


def train(call: Any, optimizer: Any, handle: mb.MegabufHandle | None, *, steps: int = 2) -> None:
    """Every step has a micro-batch without synchronization: three variants of the backward."""
    for step in range(steps):
        for micro in range(2):
            out = call(batch(step, micro, 0, 8, 16))
            grad = batch(step, micro, 1, *out.shape)
            if handle is not None and micro == 0:
                with handle.no_sync():
                    out.backward(grad)
            else:
                out.backward(grad)
        optimizer.step()
        optimizer.zero_grad()
    call(batch(steps, 0, 0, 8, 16)).backward(torch.ones(8, 4))


def run(options: dict[str, Any]) -> Run:
    """``options`` are fields of ``MegabufConfig``."""
    torch.manual_seed(0)
    model = Products()
    handle = mb.attach(model, mb.MegabufConfig(**{"bucket_size": 100, **options}))
    launches: list[list[int]] = []
    original = handle.buffers.start_grad_sync

    def recorded(group: int, *, scaled: bool = False) -> None:
        launches[-1].append(group)
        original(group, scaled=scaled)

    handle.buffers.start_grad_sync = recorded  # type: ignore[method-assign]
    compiled = torch.compile(model, backend="megabuf")

    def call(x: Tensor) -> Tensor:
        launches.append([])
        result: Tensor = compiled(x)
        return result

    counters.clear()
    train(call, mb.DistributedOptimizer(model.parameters(), torch.optim.SGD, lr=1e-2), handle)
    values = {name: param.tolist() for name, param in params_of(model).items()}
    return Run(
        values,
        cache_counts("aot_autograd", "autograd_cache_"),
        cache_counts("inductor", "fxgraph_cache_"),
        launches,
        handle.buffers.compiles,
    )


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps(run(json.loads(sys.argv[1]))._asdict()))


if __name__ == "__main__":
    main()
