"""Models that are split over ranks, each next to the same model in one piece.

``Flagged``: two parameters, one of which other ranks have copies of.
``TensorParallel``: a block whose layers are cut over tensor-parallel ranks, with layer norms on parts of the sequence.
``Stage``: one or two layers of a chain, with an embedding that the first stage shares with the last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from helpers import seeded
from torch import Tensor, nn

import megabuf_fx as mb
from megabuf_fx.runtime.shards import shard_bounds

# Groups


class Place(NamedTuple):
    """Where this rank is, and its groups."""

    groups: mb.ModelParallelGroups
    dp_rank: int
    dp_size: int
    axis_rank: int
    """Tensor-parallel rank or stage."""

    @property
    def dp(self) -> Any:
        return self.groups.dp_cp


@functools.cache
def place(rank: int, axis: str, size: int = 2) -> Place:
    """In a world of models of ``size`` neighbouring ranks, each split along ``axis`` (``tp`` or ``pp``).

    Groups are made once in a process.
    """
    world = dist.get_world_size()
    mine: dict[str, Any] = {"tp_dp_cp": dist.group.WORLD}
    for first in range(0, world, size):
        members = list(range(first, first + size))
        group = dist.new_group(members)
        if rank in members:
            mine[axis] = group
        if axis == "pp":
            for name in ("embd", "pos_embd"):
                ends = dist.new_group([members[0], members[-1]])
                if rank in members:
                    mine[name] = ends
    for position in range(size):
        group = dist.new_group(list(range(position, world, size)))
        if rank % size == position:
            mine["dp_cp"] = group
    return Place(mb.ModelParallelGroups(**mine), rank // size, world // size, rank % size)


# One parameter that other ranks have copies of

MODES: dict[str, dict[str, Any]] = {
    "sharded": {},
    "forced": {},
    "plain": {"use_distributed_optimizer": False},
    "instances": {"num_distributed_optimizer_instances": 2},
    "promoted": {"param_name_patterns_for_fp32_local_accumulation": ("all",)},
    "not attached": {},
}


class Flagged(nn.Module):
    """Two parameters of 70 elements, cut by shards of 64; the second has the flags."""

    def __init__(self, *flags: str, numel: int = 70, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.ordinary = nn.Parameter(torch.zeros(70, dtype=dtype))
        self.flagged = nn.Parameter(torch.zeros(numel, dtype=dtype))
        for flag in flags:
            setattr(self.flagged, flag, True)

    def backward(self, value: float) -> None:
        ((self.ordinary.sum() + self.flagged.sum()) * value).backward()


def attach_in(model: nn.Module, at: Place, mode: str = "sharded", **options: Any) -> Any:
    """The handle, or the model itself where it is not to be attached."""
    if mode == "not attached":
        return model
    buf = mb.attach(model, mb.MegabufConfig(bucket_size=1, **MODES[mode], **options), process_group=at.dp)
    buf.force_all_reduce = mode == "forced"
    return buf


def reduced(param: nn.Parameter, handle: Any) -> list[float]:
    """The different values of what this rank has reduced of a gradient, and of ``main_grad`` there."""
    if not isinstance(handle, mb.MegabufHandle):
        assert param.grad is not None
        return sorted(set(param.grad.tolist()))
    index = handle.buffers.index_of(param)
    assert index is not None
    number, slot = handle.buffers.locations[index]
    start, end = slot.start, slot.end
    if handle.plan.sharded and not handle.force_all_reduce:
        bounds = handle.plan.layouts[number].buckets[slot.bucket]
        low, high = shard_bounds(bounds, handle.plan.dp_size, handle.buffers.comm.rank)
        start, end = max(start, low), min(end, high)
    assert start < end
    in_buffer = handle.buffers.buffers[number].grad_data[start:end]
    main_grad = param.main_grad.flatten()[start - slot.start : end - slot.start]  # type: ignore[attr-defined]
    return sorted({*in_buffer.tolist(), *main_grad.tolist()})


# Tensor parallel, as graphs can hold it: functional collectives inside autograd functions


def _sum(x: Tensor, name: str) -> Tensor:
    result: Tensor = torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", name)
    )
    return result


def _gather(x: Tensor, size: int, name: str) -> Tensor:
    result: Tensor = torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, name)
    )
    return result


def _own(x: Tensor, rank: int, size: int) -> Tensor:
    # Not a view: with one as the result of such a backward, torch 2.11 compiles wrong gradients (aot_eager, inductor).
    return x.chunk(size)[rank].clone()


class GatherForParts(torch.autograd.Function):
    """The whole sequence for layers that are cut: their gradients add up (Megatron ``tensor_parallel_output_grad``)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, size: int, name: str) -> Tensor:
        ctx.where = rank, size, name
        return _gather(x, size, name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        rank, size, name = ctx.where
        return _own(_sum(grads[0], name), rank, size), None, None, None


class GatherForCopies(torch.autograd.Function):
    """The whole sequence for layers that every rank has: each rank has the same gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, size: int, name: str) -> Tensor:
        ctx.where = rank, size
        return _gather(x, size, name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _own(grads[0], *ctx.where), None, None, None


class ScatterSum(torch.autograd.Function):
    """Sum over ranks, of which each keeps its part of the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, size: int, name: str) -> Tensor:
        ctx.where = size, name
        return _own(_sum(x, name), rank, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _gather(grads[0], *ctx.where), None, None, None


WIDTH, HIDDEN, OUT = 6, 8, 3


class TensorParallel(nn.Module):
    """``[sequence, WIDTH] -> [sequence, OUT]``: norm, column-cut and row-cut layer, a norm named as those of queries,
    and a head that every rank has. ``group`` None is the model in one piece."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.size: int = group.size() if group is not None else 1
        self.rank: int = group.rank() if group is not None else 0
        self.name = group.group_name if group is not None else ""
        self.norm = nn.LayerNorm(WIDTH)
        self.column = nn.Linear(WIDTH, HIDDEN // self.size)
        self.row = nn.Linear(HIDDEN // self.size, WIDTH, bias=False)
        self.row_bias = nn.Parameter(torch.randn(WIDTH))
        self.q_layernorm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, OUT)

    def mark(self) -> None:
        """Megatron's attributes, before ``attach``."""
        for param in [*self.norm.parameters(), self.row_bias]:
            param.sequence_parallel = True  # type: ignore[attr-defined]
        for param in [*self.column.parameters(), *self.row.parameters()]:
            param.tensor_model_parallel = True  # type: ignore[attr-defined]
        for param in self.head.parameters():
            param.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]

    def cut(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parameters of the model in one piece."""
        dims = {"column.weight": 0, "column.bias": 0, "row.weight": 1}
        return {
            name: value.chunk(self.size, dims[name])[self.rank].clone() if name in dims else value
            for name, value in whole.items()
        }

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is this rank's part of the sequence; the result is of the whole sequence on every rank."""
        hidden = self.norm(x)
        if self.size > 1:
            hidden = GatherForParts.apply(hidden, self.rank, self.size, self.name)  # type: ignore[no-untyped-call]
        hidden = self.row(torch.tanh(self.column(hidden)))
        if self.size > 1:
            hidden = ScatterSum.apply(hidden, self.rank, self.size, self.name)  # type: ignore[no-untyped-call]
        hidden = self.q_layernorm(x + torch.tanh(hidden + self.row_bias))
        if self.size > 1:
            hidden = GatherForCopies.apply(hidden, self.rank, self.size, self.name)  # type: ignore[no-untyped-call]
        result: Tensor = self.head(hidden)
        return result


# Pipeline

TOKENS, SEQUENCE = 15, 5


class Stage(nn.Module):
    """Part ``number`` of a chain of ``count``: the first embeds, the last has the tied output layer."""

    def __init__(self, number: int, count: int) -> None:
        super().__init__()
        self.is_first, self.is_last = number == 0, number + 1 == count
        if self.is_first:
            self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        if self.is_last:
            self.output = nn.Linear(WIDTH, TOKENS, bias=False)

    @property
    def tied(self) -> Tensor | None:
        if self.is_first:
            return self.embedding.weight
        return self.output.weight if self.is_last else None

    def mark(self) -> None:
        if self.tied is not None:
            self.tied.shared_embedding = True  # type: ignore[attr-defined]
            self.tied.shared = self.is_last  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x) if self.is_first else x
        hidden = torch.tanh(self.norm(hidden + self.layer(hidden)))
        result: Tensor = self.output(hidden) if self.is_last else hidden
        return result


class Chain(nn.Module):
    """All stages in one process, one tensor for both ends."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList([seeded(lambda n=n: Stage(n, count), seed=n) for n in range(count)])  # type: ignore[misc]
        self.stages[-1].output.weight = self.stages[0].embedding.weight  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x

    def stage_params(self, number: int) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.stages[number].named_parameters()}


def text(step: int, micro: int, dp_rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and the mask of those that count, ``[2, SEQUENCE]``; ranks count other numbers."""
    generator = torch.Generator().manual_seed(step * 10007 + micro * 101 + dp_rank + 1)
    tokens = torch.randint(TOKENS, (2, SEQUENCE), generator=generator)
    mask = torch.rand(2, SEQUENCE, generator=generator) < 0.5 + 0.2 * dp_rank
    mask[0, 0] = True
    return tokens, mask


def loss_sum(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Of predicting the token itself, summed over the tokens that count."""
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
    return (losses * mask.flatten()).sum()


class Action(NamedTuple):
    """One forward or backward of a rank."""

    is_forward: bool
    chunk: int
    micro: int


def schedule(stage: int, stages: int, chunks: int, micros: int) -> Iterator[Action]:
    """1F1B, interleaved with several chunks (Megatron ``schedules.py``)."""
    total = micros * chunks
    warmup = stages - stage - 1
    if chunks > 1:
        warmup = (stages - stage - 1) * 2 + (chunks - 1) * stages

    def action(k: int, is_forward: bool) -> Action:
        chunk = k % (stages * chunks) // stages
        micro = k // (stages * chunks) * stages + k % stages
        if chunks == 1:
            chunk, micro = 0, k
        return Action(is_forward, chunk if is_forward else chunks - 1 - chunk, micro)

    warmup = min(warmup, total)
    for k in range(warmup):
        yield action(k, True)
    for k in range(warmup, total):
        yield action(k, True)
        yield action(k - warmup, False)
    for k in range(total - warmup, total):
        yield action(k, False)


class Pipeline:
    """This rank's chunks of a pipeline and the messages between stages, all of them tagged, sends not waited for."""

    def __init__(self, at: Place, calls: Sequence[Callable[[Tensor], Tensor]], micros: int) -> None:
        self.at = at
        self.calls = calls
        self.micros = micros
        self.stages = at.groups.size("pp")
        self.last = len(calls) * self.stages - 1

    def run(self, step: int, tokens_seen: Tensor, after: Callable[[int, Action], None] | None = None) -> None:
        """All forwards and backwards of a step. ``after(k, action)`` is called after the k-th backward."""
        kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        sends: list[Any] = []
        backwards = 0
        for action in schedule(self.at.axis_rank, self.stages, len(self.calls), self.micros):
            virtual = action.chunk * self.stages + self.at.axis_rank
            tokens, mask = text(step, action.micro, self.at.dp_rank)
            if action.is_forward:
                x = tokens if virtual == 0 else self._receive(virtual - 1, action).requires_grad_()
                out = self.calls[action.chunk](x)
                if virtual == self.last:
                    out = loss_sum(out, tokens, mask)
                    tokens_seen += mask.sum()
                else:
                    sends.append(self._send(out.detach(), virtual + 1, action))
                kept[action.chunk, action.micro] = x, out
            else:
                x, out = kept.pop((action.chunk, action.micro))
                out.backward(None if virtual == self.last else self._receive(virtual + 1, action))
                if x.grad is not None:
                    sends.append(self._send(x.grad, virtual - 1, action))
                if after is not None:
                    after(backwards, action)
                backwards += 1
        for work in sends:
            work.wait()

    def _peer(self, virtual: int) -> int:
        return dist.get_process_group_ranks(self.at.groups.pp)[virtual % self.stages]  # type: ignore[arg-type]

    def _tag(self, receiver: int, action: Action) -> int:
        return (receiver * 2 + action.is_forward) * self.micros + action.micro

    def _send(self, tensor: Tensor, receiver: int, action: Action) -> Any:
        return dist.isend(tensor.contiguous(), self._peer(receiver), tag=self._tag(receiver, action))

    def _receive(self, sender: int, action: Action) -> Tensor:
        receiver = action.chunk * self.stages + self.at.axis_rank
        tensor = torch.empty(2, SEQUENCE, WIDTH)
        dist.recv(tensor, self._peer(sender), tag=self._tag(receiver, action))
        return tensor
