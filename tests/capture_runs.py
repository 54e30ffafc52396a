"""Training runs that are captured: a model, its step, and everything that the step changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import Mlp, batch, seeded
from torch import Tensor, nn

import megabuf_fx as mb

MODES: dict[str, dict[str, Any]] = {
    "sharded": {},
    "overlap": {"overlap_param_gather": True},
    "whole": {"use_distributed_optimizer": False},
    # Without our optimizer. Gradients must then have the dtype of the parameters.
    "plain": {"use_distributed_optimizer": False},
}

Loss = Callable[[Any, Tensor], Tensor]


def mean_square(call: Any, x: Tensor) -> Tensor:
    loss: Tensor = call(x).float().square().mean()
    return loss


class Run:
    """``step`` takes one micro-batch after another, clips, updates and zeroes; ``batch`` is ``[micro, 8, 13]``."""

    def __init__(
        self,
        mode: str = "sharded",
        *,
        build: Callable[[], nn.Module] = Mlp,
        is_compiled: bool = False,
        micro_batches: int = 1,
        dtype: torch.dtype = torch.float32,
        rank: int = 0,
        clip: float | None = 0.05,
        loss: Loss = mean_square,
        inner: Any = "aot_eager",
        optimizer: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.dtype, self.rank, self.micro_batches, self.clip, self.loss = dtype, rank, micro_batches, clip, loss
        self.model: Any = seeded(build).to(dtype)
        is_plain = mode == "plain"
        defaults = {"inner_compiler": inner, "bucket_size": 600, "grad_reduce_in_fp32": not is_plain}
        self.buf = mb.attach(self.model, mb.MegabufConfig(**{**defaults, **MODES[mode], **options}))
        self.call: Any = torch.compile(self.model, backend="megabuf") if is_compiled else self.model
        settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "fused": True, **(optimizer or {})}
        kind = settings.pop("kind", torch.optim.AdamW)
        if is_plain:
            lr = settings["lr"]
            settings["lr"] = lr if isinstance(lr, Tensor) else torch.tensor(lr)
            settings.pop("max_skipped_steps", None)
            self.optimizer: Any = kind(self.model.parameters(), **settings)
        else:
            self.optimizer = mb.DistributedOptimizer(self.model.parameters(), kind, **settings)

    def batch(self, index: int) -> Tensor:
        return batch(index, 0, self.rank, self.micro_batches, 8, 13).to(self.dtype)

    def backward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for micro, part in enumerate(x):
            with self.buf.no_sync() if micro + 1 < len(x) else contextlib.nullcontext():
                loss = self.loss(self.call, part) / len(x)
                loss.backward()
            total = total + loss.detach()
        return total

    def update(self) -> Tensor:
        norm = torch.zeros(())
        if self.clip is not None and isinstance(self.optimizer, mb.DistributedOptimizer):
            norm = self.optimizer.clip_grad_norm_(self.clip)
        elif self.clip is not None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def step(self, x: Tensor) -> dict[str, Tensor]:
        loss = self.backward(x)
        return {"loss": loss, "norm": self.update()}

    def capture(self, step: Callable[[Any], Any] | None = None, example: Any = None, **options: Any) -> mb.CapturedStep:
        return mb.capture_step(
            step or self.step,
            self.batch(0) if example is None else example,
            **{"optimizer": self.optimizer, "warmup": 2, **options},
        )

    def live(self) -> dict[str, Tensor]:
        """What training changes: parameters, module buffers, masters and the optimizer's state."""
        self.buf.sync_params()
        named: dict[str, Tensor] = dict(self.model.state_dict())
        inner = self.optimizer
        if isinstance(inner, mb.DistributedOptimizer):
            named.update({f"master {index}": run.master for index, run in enumerate(inner.runs)})
            inner = inner.inner
        for index, entries in enumerate(inner.state.values()):
            named.update({f"{key} {index}": value for key, value in entries.items()})
        return named

    def state(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.live().items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Put ``state`` back; what is not in it is the state of a new optimizer."""
        with torch.no_grad():
            for name, value in self.live().items():
                value.copy_(state.get(name, torch.zeros_like(value)))
        if isinstance(self.optimizer, mb.DistributedOptimizer):
            self.optimizer.note_written_weights()

    def train(
        self, step: Callable[[Any], Any], steps: Sequence[int], schedule: Callable[[int], float] | None = None
    ) -> list[Any]:
        """What each step returned; batches by number. A schedule of learning rates acts between steps."""
        scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule) if schedule else None
        results = []
        for index in steps:
            results.append(step(self.batch(index)))
            if scheduler is not None:
                scheduler.step()
        return results


def falling(step: int) -> float:
    return 1.0 / (1 + step)


def differences(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """Names of what is not bitwise equal."""
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


def are_same(left: Sequence[dict[str, Tensor]], right: Sequence[dict[str, Tensor]]) -> bool:
    return len(left) == len(right) and all(not differences(a, b) for a, b in zip(left, right))


def refusal(call: Callable[[], Any], kind: type[Exception] = mb.CaptureError) -> str:
    """What ``call`` raises says."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)
