"""An attached model whose steps are recorded in the terms of ``oracle/state_machine.json.gz``.

Two linear layers on the eager path (``attach`` without ``torch.compile``). "Fill" in the oracle sets ``grad_data`` by
hand; here a loss whose gradient is ``rank + 1`` everywhere does, so padding stays zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import megabuf_fx as mb
from megabuf_fx.runtime.collectives import ProcessGroupComm
from megabuf_fx.runtime.transports import ExchangeReduceScatter


class Sent(NamedTuple):
    """A collective as the oracle writes it. Ours are all asynchronous, so that column is left out."""

    op: str
    numel: int
    """Elements of the whole bucket."""
    dtype: str
    redop: str


class Seen(NamedTuple):
    """What one step did on one rank."""

    label: str
    outcome: str
    """``ok``, ``no such call``, or the error."""
    sent: list[Sent]
    buffers: list[list[float]]
    """``grad_data`` of every buffer."""
    is_padding: list[list[bool]]
    phases: list[str] | None
    """Of every bucket group's gradients; None where ``.grad`` is published, because then a backward ends in a new
    state."""
    rest: list[Any] | None
    """Further values of the step, as the oracle lists them."""


@contextlib.contextmanager
def recorded() -> Iterator[list[Sent]]:
    """Reductions and gathers started meanwhile. What is exchanged for a reduce-scatter over gloo counts as
    what it stands for. The flags of used parameters are not in it."""
    found: list[Sent] = []

    def watch(cls: type, name: str, op: str | None, full: int) -> mock._patch[Any]:
        original = getattr(cls, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            tensor: Tensor = args[full]
            average = kwargs.get("average", args[-1])
            redop = "" if op == "all_gather" else "AVG" if average is True else "SUM"
            kind = op or ("reduce_scatter" if tensor.dtype == torch.float32 else "reduce_scatter_fp32acc")
            found.append(Sent(kind, tensor.numel(), str(tensor.dtype).removeprefix("torch."), redop))
            return original(self, *args, **kwargs)

        return mock.patch.object(cls, name, call)

    with (
        watch(ProcessGroupComm, "all_reduce", "all_reduce", 0),
        watch(ProcessGroupComm, "reduce_scatter", "reduce_scatter", 1),
        watch(ProcessGroupComm, "all_gather", "all_gather", 0),
        watch(ExchangeReduceScatter, "__call__", None, 1),
    ):
        yield found


class Two(nn.Module):
    """3 -> 4 -> 2 with the oracle's parameters."""

    def __init__(self, *, has_unused: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.l1 = nn.Linear(3, 4, dtype=dtype)
        self.l2 = nn.Linear(4, 2, dtype=dtype)
        if has_unused:
            self.l3 = nn.Linear(2, 2, dtype=dtype)
        with torch.no_grad():
            for j, param in enumerate(self.parameters()):
                k = torch.arange(param.numel(), dtype=torch.float64)
                param.copy_((0.2 * torch.sin(0.37 * k + 1.3 * j + 0.11)).view(param.shape))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.l2(self.l1(x))
        return result


class Replay:
    """An attached model and what its steps did. ``options`` are Megatron's names with Megatron's defaults."""

    def __init__(self, rank: int, sent: list[Sent], model: nn.Module | None = None, **options: Any) -> None:
        self.rank = rank
        self.model: Any = Two() if model is None else model
        self.seen: list[Seen] = []
        self._sent = sent
        config = {"use_distributed_optimizer": False, "overlap_grad_reduce": False, **options}
        config.setdefault("dense_layout", not config["use_distributed_optimizer"])
        self.buf = mb.attach(self.model, mb.MegabufConfig(**config))

    def step(self, label: str, *actions: Callable[[], object], rest: Callable[[], list[Any]] | None = None) -> None:
        self._sent.clear()
        outcome = "ok"
        try:
            for action in actions:
                action()
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        self._see(label, outcome, rest() if rest is not None else None)

    def absent(self, label: str, name: str) -> None:
        """A call of Megatron's that we do not have."""
        self._sent.clear()
        assert not hasattr(self.buf, name), f"{name} exists now: replay '{label}' with it"
        self._see(label, "no such call", None)

    def _see(self, label: str, outcome: str, rest: list[Any] | None) -> None:
        buffers = self.buf.buffers.buffers
        is_padding = []
        for buffer in buffers:
            mask = torch.ones(buffer.layout.numel, dtype=torch.bool)
            for slot in buffer.layout.slots:
                mask[slot.start : slot.end] = False
            is_padding.append(mask.tolist())
        values = [b.grad_data.tolist() if b.grad_data.untyped_storage().nbytes() else [] for b in buffers]
        phases = None
        if not self.buf.buffers.publishes_grad:
            phases = [phase.value for phase in self.buf.buffers.reducer.phases]
        self.seen.append(Seen(label, outcome, list(self._sent), values, is_padding, phases, rest))

    def backward(self) -> None:
        self.model(torch.ones(1, 3) * (self.rank + 1)).sum().backward()

    def backward_l1(self) -> None:
        self.model.l1(torch.ones(1, 3) * (self.rank + 1)).sum().backward()

    def fill(self, value: float | None = None) -> None:
        """Gradients of ``value``, by default ``rank + 1``."""
        value = self.rank + 1 if value is None else value
        (torch.stack([param.sum() for param in self.model.parameters()]).sum() * value).backward()

    def fill_unsynced(self) -> None:
        with self.buf.no_sync():
            self.fill()

    def finish(self) -> None:
        self.buf.finish_grad_sync()

    def force(self) -> None:
        self.buf.finish_grad_sync(force_all_reduce=True)

    def zero(self) -> None:
        self.buf.zero_grad()

    def main_grads(self) -> list[Any]:
        """Name to first element of ``main_grad``."""
        return [{name: param.main_grad.flatten()[0].item() for name, param in self.model.named_parameters()}]
