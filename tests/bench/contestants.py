"""Ways to train one model on several ranks, ours and the peers', behind one interface.

All train the GPT of ``examples/train_gpt.py`` with AdamW (fused) from the same weights on the same data. ``fp32`` is
fp32 throughout. ``bf16`` multiplies in bf16 and keeps fp32 weights and fp32 gradients: ours has bf16 parameters with
fp32 masters, FSDP2 a ``MixedPrecisionPolicy``, and DDP, which reduces gradients in the dtype of their parameters,
fp32 parameters under autocast.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import megabuf_fx as mb

LR = 1e-3
BUCKETS = 18
"""About how many buckets ours cut the model into, unless they choose themselves."""
DDP_BUCKETS = 7
"""With 14 and 28, DDP was slower on loopback and equally fast at 1 Gbit/s."""


class Work(NamedTuple):
    """What all contestants do."""

    precision: Literal["fp32", "bf16"]
    inner: Literal["inductor", "aot_eager"]
    """What compiles."""
    windows: tuple[int, int]
    """Shape of a micro-batch: sequences, and tokens of each with the one to predict."""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A model with all that a step of it needs."""

    forward: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    autocast: bool = False
    no_sync: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    drain: Callable[[], object] = lambda: None
    """Waits for what a step leaves to the next one."""
    first_step: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """Around the steps in which everything is compiled."""
    windows: list[tuple[float, float]] = field(default_factory=list)
    """Seconds of the first forward and of the last backward of each step."""

    def step(self, micro_batches: Sequence[Tensor] | Tensor) -> Tensor:
        """One optimizer step; returns the mean loss of this rank, 0-dim."""
        total = torch.zeros(())
        begin = time.perf_counter()
        first_forward = last_backward = 0.0
        for number, windows in enumerate(micro_batches):
            is_last = number + 1 == len(micro_batches)
            with contextlib.nullcontext() if is_last else self.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                    loss = self.forward(windows) / len(micro_batches)
                if number == 0:
                    first_forward = time.perf_counter() - begin
                middle = time.perf_counter()
                loss.backward()  # type: ignore[no-untyped-call]
                last_backward = time.perf_counter() - middle
            total += loss.detach()
        self.windows.append((first_forward, last_backward))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def megabuf(
    model: nn.Module,
    work: Work,
    *,
    compiled: bool = True,
    sharded: bool = True,
    group: dist.ProcessGroup | None = None,
    chooses_buckets: bool = False,
) -> Contestant:
    """megabuf_fx. ``compiled=False`` is Megatron's scheme: hooks on eager autograd fill the same buffers. Parameters
    without gradient are not looked for, as in DDP's default."""
    if work.precision == "bf16":
        model = model.bfloat16()
    config = mb.MegabufConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=sharded,
        overlap_param_gather=sharded,
        bucket_size="auto" if chooses_buckets else sum(p.numel() for p in model.parameters()) // BUCKETS,
        find_unused_parameters=False,
        inner_compiler=work.inner,
    )
    example_inputs = (torch.zeros(work.windows, dtype=torch.long),) if chooses_buckets else None
    handle = mb.attach(model, config, process_group=group, example_inputs=example_inputs)
    return Contestant(
        forward=torch.compile(model, backend="megabuf") if compiled else model,
        optimizer=mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, fused=True),
        no_sync=handle.no_sync,
        drain=handle.sync_params,
    )


def ddp(model: nn.Module, work: Work, *, compiled: bool = False, split: bool = True, zero: bool = False) -> Contestant:
    """DDP; ``split`` is Dynamo's ``optimize_ddp``, ``zero`` shards the optimizer."""
    numel = sum(p.numel() for p in model.parameters())
    # DDP's own first bucket has 1 MiB, and Dynamo wants none smaller.
    megabytes = max(1.0, 4 * numel / DDP_BUCKETS / 2**20)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=megabytes)
    optimizer: torch.optim.Optimizer
    if zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    return Contestant(
        forward=torch.compile(wrapped, backend=work.inner) if compiled else wrapped,
        optimizer=optimizer,
        autocast=work.precision == "bf16",
        no_sync=wrapped.no_sync,
        first_step=lambda: torch._dynamo.config.patch(optimize_ddp=split),  # type: ignore[attr-defined,no-any-return]
    )


def fsdp(model: Any, work: Work, *, reshard: bool) -> Contestant:
    """FSDP2 by block, compiled by block, as its users do. ``reshard`` frees weights after forward."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if work.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        block.compile(backend=work.inner)
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)

    @contextlib.contextmanager
    def no_sync() -> Any:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    return Contestant(forward=model, optimizer=optimizer, no_sync=no_sync)


def plain(model: nn.Module, work: Work) -> Contestant:
    """Inductor and AdamW on one process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    return Contestant(
        forward=torch.compile(model, backend=work.inner), optimizer=optimizer, autocast=work.precision == "bf16"
    )


Maker = Callable[[nn.Module, Work], Contestant]

OURS: dict[str, Maker] = {
    "megabuf": megabuf,
    'megabuf, bucket_size="auto"': lambda model, work: megabuf(model, work, chooses_buckets=True),
    "megabuf, not sharded": lambda model, work: megabuf(model, work, sharded=False),
    "Megatron's hooks (our eager path)": lambda model, work: megabuf(model, work, compiled=False),
}
PEERS: dict[str, Maker] = {
    "DDP": ddp,
    "DDP + compile": lambda model, work: ddp(model, work, compiled=True),
    "DDP + compile, optimize_ddp=False": lambda model, work: ddp(model, work, compiled=True, split=False),
    "DDP + compile + ZeRO": lambda model, work: ddp(model, work, compiled=True, zero=True),
    "FSDP2 + compile": lambda model, work: fsdp(model, work, reshard=True),
    "FSDP2 + compile, no resharding": lambda model, work: fsdp(model, work, reshard=False),
}
ALONE: dict[str, Maker] = {"megabuf": megabuf, "Inductor + fused AdamW": plain}


def without_collectives(model: nn.Module, work: Work) -> Contestant:
    """What ``megabuf`` computes on one of the ranks: the same graphs, buffers and shards, and nothing travels."""
    ranks = list(range(dist.get_world_size()))
    return megabuf(model, work, group=dist.new_group(ranks, backend="fake"))
