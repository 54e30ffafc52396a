"""Training that blocks of ``check.py`` share: a small net, and steps with clipping, AdamW and a schedule."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from gpu_context import Context, no_host_reads
from torch import Tensor, nn

import megabuf_fx as mb

Kind = Literal["eager", "aot_eager", "inductor"]
"""How a model runs: by hooks alone, or compiled by one of the inner compilers."""

STEPS = 5
LR = 2.0**-7
FACTORS = (1.0, 0.5, 0.75, 0.25, 0.625)
"""Of the learning rate, step by step. Powers of two and their sums, so that the rate is the same number in fp32 (a
captured step's table on a GPU) and as a Python float (an ordinary step): then both steps can be compared bitwise."""


@dataclass
class Training:
    """A model, attached and perhaps compiled, with steps of clipping, AdamW and several micro-batches."""

    context: Context
    kind: Kind
    model: nn.Module
    config: Mapping[str, Any] = field(default_factory=dict)
    max_skipped_steps: int | None = None

    def __post_init__(self) -> None:
        # Dynamo would make sizes symbolic that differ from those of an earlier model.
        torch.compiler.reset()
        inner = self.kind if self.kind != "eager" else "aot_eager"
        # Not the parameters: what quantized ones hold is hidden, and a state holds values.
        self._start = copy.deepcopy(self.model.state_dict())
        self.buf = mb.attach(self.model, mb.MegabufConfig(inner_compiler=inner, **self.config))
        self.call: Any = self.model if self.kind == "eager" else torch.compile(self.model, backend="megabuf")
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Parameters of the beginning, a new optimizer, the seed anew. Compiled graphs stay, so both runs use them."""
        self.buf.sync_params()
        self.buf.zero_grad()
        self.model.load_state_dict(self._start)
        options: dict[str, Any] = {"lr": LR, "weight_decay": 0.125, "fused": True}
        self.optimizer = mb.DistributedOptimizer(
            self.model.parameters(), torch.optim.AdamW, max_skipped_steps=self.max_skipped_steps, **options
        )
        self.restart_seed()

    def restart_seed(self) -> None:
        torch.manual_seed(self.context.seed)

    def backward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.call(x).float().square().mean()
        loss.backward()
        # Not the loss itself: whoever keeps that keeps the autograd nodes of the parameters.
        return loss.detach()

    def step(self, windows: Tensor) -> Tensor:
        """One micro-batch for each of ``windows``; the sum of their losses."""
        with no_host_reads(self.context, is_on=self.buf.buffers.capture.is_active):
            total = torch.zeros((), device=self.context.device)
            for micro, x in enumerate(windows):
                is_last = micro + 1 == len(windows)
                with contextlib.nullcontext() if is_last else self.buf.no_sync():
                    total += self.backward(x)
            self.optimizer.clip_grad_norm_(0.125)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return total

    def run(self, take_step: Callable[[Tensor], Tensor], batches: Sequence[Tensor]) -> list[Tensor]:
        """The losses of all steps under a schedule, then parameters and masters."""
        schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: FACTORS[step % len(FACTORS)])
        results = []
        for batch in batches:
            results.append(take_step(batch))
            schedule.step()
        return [*results, *self.state()]

    def state(self) -> list[Tensor]:
        self.buf.sync_params()
        # Of quantized parameters the values that forward sees.
        masters = [run.master.detach().clone() for run in self.optimizer.runs]
        return [*(param.detach().clone() for param in self.model.parameters()), *masters]

    def capture(self, example: Tensor) -> mb.CapturedStep:
        return mb.capture_step(self.step, example, optimizer=self.optimizer)


class Net(nn.Module):
    """Linear layers with and without bias, dropout, a LayerNorm, and no parameter whose true gradient is zero."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.fc3 = nn.Linear(width, 24)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(torch.tanh(self.fc1(x)), self.dropout, self.training)
        result: Tensor = self.fc3(self.norm(torch.tanh(self.fc2(h))))
        return result


def make_net(context: Context, width: int = 64, *, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(context.seed)
    return Net(width, dropout).to(context.device, dtype)


def replay_at(training: Training, captured: mb.CapturedStep, step: int, batch: Tensor) -> Tensor:
    """A replay with the learning rate that the schedule of ``Training.run`` has in that step."""
    for group in training.optimizer.param_groups:
        group["lr"] = LR * FACTORS[step % len(FACTORS)]
    loss: Tensor = captured(batch)
    return loss
