"""Training runs for the tests of checkpoints: one global batch, whatever the number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers import batch, seeded
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import megabuf_fx as mb
from megabuf_fx.flat_shard import FlatShard

ROWS = 12
MODES: dict[str, dict[str, Any] | None] = {
    "sharded": {"bucket_size": 60},
    "overlap": {"bucket_size": 100, "overlap_param_gather": True},
    "instances": {"bucket_size": 60, "num_distributed_optimizer_instances": 2},
    "whole": {"use_distributed_optimizer": False},
    "plain": {"use_distributed_optimizer": False, "grad_reduce_in_fp32": False},
    "alone": None,
}
"""``whole`` is unsharded with our optimizer, ``plain`` unsharded with torch's, ``alone`` is not attached at all."""


class Zoo(nn.Module):
    """Parameters of all kinds: not row-major, tied, frozen, 0-dim, without elements, never used, used now and then."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.first = nn.Linear(4, 7)
        self.side = nn.Linear(7, 7)
        self.mid = nn.Linear(7, 7)
        self.again = nn.Linear(7, 7, bias=False)
        self.again.weight = self.mid.weight
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.idle = nn.Parameter(torch.randn(5))
        self.last = nn.Linear(7, 3)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor, with_side: bool) -> Tensor:
        hidden = torch.tanh(self.first(self.conv(x).mean((2, 3))))
        if with_side:
            hidden = hidden + torch.tanh(self.side(hidden))
        hidden = torch.tanh(self.again(torch.tanh(self.mid(hidden))) + self.frozen(hidden))
        self.seen += 1
        result: Tensor = self.last(hidden * self.scale) + self.empty.sum()
        return result


class Run:
    """A model in training, and its optimizer. The learning rate decays with every step."""

    def __init__(
        self,
        mode: str,
        *,
        dtype: torch.dtype = torch.float32,
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
        build: Any = Zoo,
        seed: int = 0,
        is_compiled: bool = False,
        lr: float = 1e-2,
        **config: Any,
    ) -> None:
        self.dtype = dtype
        self.world, self.rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self.model: Any = seeded(build, seed).to(dtype)
        options = MODES[mode]
        self.buf: Any = None
        if options is not None:
            self.buf = mb.attach(self.model, mb.MegabufConfig(inner_compiler="aot_eager", **{**options, **config}))
        self.call: Any = torch.compile(self.model, backend="megabuf") if is_compiled else self.model
        # One parameter goes without decay, so that there are two groups.
        groups: list[dict[str, Any]] = [
            {"params": [p for n, p in self.model.named_parameters() if n != "first.bias"]},
            {"params": [self.model.get_parameter("first.bias")], "weight_decay": 0.0},
        ]
        options = {"lr": lr, "momentum": 0.9} if optimizer is torch.optim.SGD else {"lr": lr, "weight_decay": 0.1}
        self.optimizer: Any
        if mode in ("plain", "alone"):
            self.optimizer = optimizer(groups, **options)
        else:
            self.optimizer = mb.DistributedOptimizer(groups, optimizer, **options)

    def loss(self, step: int) -> Tensor:
        x = batch(step, 0, 0, ROWS, 3, 3, 3).chunk(self.world)[self.rank]
        result: Tensor = self.call(x.to(self.dtype), step % 2 == 1).float().square().mean()
        return result

    def train(self, start: int, end: int) -> None:
        for step in range(start, end):
            self.loss(step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.9

    def save(self, root: str | Path, step: int, **more: Any) -> Path:
        return mb.save_checkpoint(root, step, self.model, self.optimizer, **more)

    def load(self, directory: str | Path) -> Any:
        return mb.load_checkpoint(directory, self.model, self.optimizer)

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of everything that training depends on, as far as this rank has it."""
        found = {f"model {name}": value.clone() for name, value in self.model.state_dict().items()}
        state = self.optimizer.state_dict()
        for name, entries in state["state"].items():
            for key, value in entries.items():
                pieces = value.pieces if isinstance(value, FlatShard) else [(0, torch.as_tensor(value))]
                found.update({f"{key} {name} {start}": part.clone() for start, part in pieces})
        for number, group in enumerate(state["param_groups"]):
            for key in ("lr", "weight_decay", "momentum", "betas"):
                if key in group:
                    found[f"group {number} {key}"] = torch.tensor(group[key], dtype=torch.float64)
        return found

    def close(self) -> None:
        if self.buf is not None:
            self.buf.detach()


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of what is not bitwise equal."""
    missing = [f"{name} on one side only" for name in sorted(found.keys() ^ expected.keys())]
    return missing + [name for name in expected if name in found and not is_same(found[name], expected[name])]


def is_same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


def content(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, read by torch's own converter, as other programs would."""
    target = directory.with_name("converted.pt")
    dcp_to_torch_save(directory, target)
    return dict(torch.load(target, weights_only=True))
