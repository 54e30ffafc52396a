"""What the inner optimizer of ``DistributedOptimizer`` updates.

[Note: runs]
A rank owns ``1/dp`` of every bucket by elements (all of it without sharding). Neighbouring parameters of one param
group, without padding between them, form a *run*; the inner optimizer sees few long runs instead of many small tensors.
Elementwise updates do not care where one parameter ends, so results are those of the same optimizer on whole
parameters. Padding is in no run. Optimizers count steps per tensor, so a run whose parameters have not all had the same
steps cannot stay one: it is cut where the first difference appears, its state with it.

[Note: whole parameters]
Some optimizers need whole matrices (Muon). Parameters that the layer-wise layout manages are never cut: each is a run
by itself, whole and in its shape, on the rank that owns it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from megabuf_fx.runtime.model_buffers import ModelBuffers
from megabuf_fx.runtime.shards import compute_shard_ranges
from megabuf_fx.runtime.stored_params import ShardPiece


@dataclass(frozen=True, eq=False, slots=True)
class Run:
    """Elements ``[start, end)`` of one buffer that this rank owns and one param group updates."""

    buffer: int
    start: int
    end: int
    pieces: tuple[tuple[int, int], ...]
    """Parameter and number of elements, in buffer order."""
    master: nn.Parameter
    """What the inner optimizer updates, fp32; for sharded fp32 parameters a view of ``param_data``. 1-D, or one whole
    parameter in its shape ([Note: whole parameters])."""
    grad: Tensor
    """View of ``grad_data``, in the shape of ``master``."""
    params: tuple[Tensor, ...]
    """Flat views that hold the parameters' values one after the other: one of ``param_data`` when sharded, otherwise
    one of each parameter. None where they are quantized."""

    @property
    def is_quantized(self) -> bool:
        return not self.params

    @property
    def is_aliased(self) -> bool:
        """Whether the master is the parameters themselves."""
        return not self.is_quantized and self.master.data_ptr() == self.params[0].data_ptr()

    @property
    def is_fp32(self) -> bool:
        """Whether the gradient is fp32, as the master is; then it is the master's gradient, not a copy."""
        return self.grad.dtype == torch.float32

    def is_used(self, used: Sequence[bool]) -> bool:
        """Whether its parameters have gradients; all or none, after ``split_runs``."""
        return used[self.pieces[0][0]]

    @property
    def flat(self) -> Tensor:
        """The master, 1-D."""
        return flat_view(self.master.detach())

    @property
    def flat_grad(self) -> Tensor:
        """The gradient, 1-D."""
        return flat_view(self.grad)

    @property
    def parts(self) -> list[Tensor]:
        """The master, cut where ``params`` are."""
        return list(self.flat.split([param.numel() for param in self.params]))


def flat_view(tensor: Tensor) -> Tensor:
    """A dense tensor as ``[numel]``, in the order of its elements in memory."""
    return tensor if tensor.dim() == 1 else tensor.as_strided((tensor.numel(),), (1,))


def make_runs(buffers: ModelBuffers, params: Iterable[nn.Parameter]) -> list[Run]:
    """The longest runs of one param group on this rank, in buffer order."""
    members = {index for param in params if (index := buffers.index_of(param)) is not None}
    spans: list[tuple[int, int, int]] = []
    for number, start, end, param in _owned_pieces(buffers):
        if param not in members:
            continue
        is_whole = is_kept_whole(buffers, number)
        if spans and spans[-1][0] == number and spans[-1][2] == start and not is_whole:
            spans[-1] = (number, spans[-1][1], end)
        else:
            spans.append((number, start, end))
    return make_runs_of(buffers, spans)


def is_kept_whole(buffers: ModelBuffers, number: int) -> bool:
    """Whether the parameters of a buffer are runs by themselves. ([Note: whole parameters])"""
    return buffers.plan.owners is not None or buffers.plan.layouts[number].key.is_managed_by_layer_wise_optimizer


def make_runs_of(buffers: ModelBuffers, spans: Iterable[Sequence[int]]) -> list[Run]:
    """Runs over the given ``(buffer, start, end)``; masters of 16-bit parameters are made from the parameters."""
    owned = _owned_pieces(buffers)
    first = {(number, start): index for index, (number, start, _, _) in enumerate(owned)}
    runs = []
    for number, start, end in spans:
        buffer = buffers.buffers[number]
        index, pieces = first[number, start], []
        while index < len(owned) and owned[index][0] == number and owned[index][2] <= end:
            pieces.append((owned[index][3], owned[index][2] - owned[index][1]))
            index += 1
        params: tuple[Tensor, ...] = ()
        if buffer.holds_params:
            assert buffer.param_data is not None
            params = (buffer.param_data[start:end],)
        elif buffer.stored is None:
            params = tuple(_flat(buffers, param) for param, _ in pieces)
        if buffer.holds_params and params[0].dtype == torch.float32:
            master = params[0]
        else:
            values = params or _quantized_values(buffers, start, pieces)
            master = torch.cat([value.float() for value in values])
        grad = buffer.grad_data[start:end]
        if is_kept_whole(buffers, number):
            grad = buffer.grad_views[pieces[0][0]]
            master = master.as_strided(grad.shape, grad.stride())
        runs.append(Run(number, start, end, tuple(pieces), nn.Parameter(master), grad, params))
    return runs


def write_params(buffers: ModelBuffers, runs: Sequence[Run]) -> None:
    """Set the parameters of ``runs`` to their masters, rounded to their dtype or quantized. Collective where some
    parameters of the model are quantized."""
    for run in runs:
        if not run.is_quantized and not run.is_aliased:
            torch._foreach_copy_(list(run.params), run.parts)
    buffers.access.release_gradients()
    if buffers.weights is not None:
        buffers.weights.write(_pieces_to_write(buffers, runs))


def stage_params(buffers: ModelBuffers, runs: Sequence[Run]) -> None:
    """Write again what a gather has used up; masters are those of the last ``write_params``."""
    if buffers.weights is not None:
        buffers.weights.write(_pieces_to_write(buffers, runs), only_staged=True)


def read_params(buffers: ModelBuffers, runs: Sequence[Run]) -> None:
    """Set masters to the parameters; of quantized ones to what was written or loaded since the last step, if anything
    was, as masters are finer than what is stored."""
    if buffers.weights is not None:
        buffers.weights.absorb(buffers.weights.indices)
    for run in runs:
        if not run.is_quantized and not run.is_aliased:
            torch._foreach_copy_(run.parts, list(run.params))
    if buffers.weights is not None:
        for pieces in _quantized_pieces(buffers, runs).values():
            for piece in pieces:
                given = buffers.weights.given.get(piece.param)
                if given is not None:
                    piece.values.copy_(given.reshape(-1)[piece.start : piece.start + piece.values.numel()])


def _quantized_pieces(buffers: ModelBuffers, runs: Sequence[Run]) -> dict[int, list[ShardPiece]]:
    """The masters of quantized parameters, by buffer."""
    found: dict[int, list[ShardPiece]] = {}
    for run in runs:
        if run.is_quantized:
            position = run.start
            for (param, numel), values in zip(run.pieces, run.flat.split([n for _, n in run.pieces])):
                _, slot = buffers.locations[param]
                found.setdefault(run.buffer, []).append(ShardPiece(param, position - slot.start, values))
                position += numel
    return found


def _pieces_to_write(buffers: ModelBuffers, runs: Sequence[Run]) -> dict[int, list[ShardPiece]]:
    """The masters, and where a gather uses up what was staged also the parameters without one, as they are stored."""
    found = _quantized_pieces(buffers, runs)
    updated = {piece.param for pieces in found.values() for piece in pieces}
    for number, start, end, param in _owned_pieces(buffers):
        stored = buffers.buffers[number].stored
        if stored is not None and stored.is_staged and param not in updated:
            offset = start - buffers.locations[param][1].start
            values = stored.values(param).reshape(-1)[offset : offset + end - start]
            found.setdefault(number, []).append(ShardPiece(param, offset, values.float()))
    return found


def check_params(buffers: ModelBuffers, runs: Iterable[Run]) -> None:
    """Raise when somebody replaced ``param.data`` of a parameter outside of any buffer: the run would miss it."""
    if buffers.plan.sharded:
        return
    for run in runs:
        for (param, _), view in zip(run.pieces, run.params):
            if view.data_ptr() != buffers.params[param].data_ptr():
                raise RuntimeError(
                    f"the data of parameter '{buffers.plan.params[param].name}' was replaced after the optimizer was "
                    "built; copy values into it instead (param.data.copy_(...)), or build a new optimizer"
                )


def split_runs(runs: Sequence[Run], used: Sequence[Hashable], state: MutableMapping[Any, Any]) -> list[Run]:
    """Cut runs so that ``used`` is the same for all parameters of one, and the optimizer's ``state`` with them."""
    result: list[Run] = []
    for run in runs:
        if len({used[param] for param, _ in run.pieces}) == 1:
            result.append(run)
        else:
            result.extend(_split(run, used, state))
    return result


def _split(run: Run, used: Sequence[Hashable], state: MutableMapping[Any, Any]) -> list[Run]:
    entries: dict[str, Any] = state.pop(run.master, {})
    parts = []
    offset = 0
    for _, group in groupby(run.pieces, key=lambda piece: used[piece[0]]):
        pieces = tuple(group)
        end = offset + sum(numel for _, numel in pieces)
        master = nn.Parameter(run.master.detach()[offset:end])
        part = Run(
            run.buffer,
            run.start + offset,
            run.start + end,
            pieces,
            master,
            run.grad[offset:end],
            _params_between(run, offset, end),
        )
        if entries:
            state[master] = {name: _slice_of(value, run.master, offset, end) for name, value in entries.items()}
        parts.append(part)
        offset = end
    return parts


def _params_between(run: Run, start: int, end: int) -> tuple[Tensor, ...]:
    """The parts of ``run.params`` that hold its elements ``[start, end)``."""
    parts, offset = [], 0
    for param in run.params:
        low, high = max(start - offset, 0), min(end - offset, param.numel())
        if low < high:
            parts.append(param[low:high])
        offset += param.numel()
    return tuple(parts)


def _slice_of(value: Any, master: Tensor, start: int, end: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    # Moments have the master's shape; counters are scalars, and each part goes on counting by itself.
    return value[start:end] if value.shape == master.shape and value.dim() == 1 else value.clone()


def _flat(buffers: ModelBuffers, index: int) -> Tensor:
    """A parameter outside of any buffer as ``[numel]``, in the order of its elements in memory."""
    param = buffers.params[index].detach()
    number, _ = buffers.locations[index]
    if param.stride() != buffers.buffers[number].grad_views[index].stride():
        raise ValueError(
            f"parameter '{buffers.plan.params[index].name}' has strides {param.stride()}, so its elements share or "
            "skip memory; make it contiguous, or attach with use_distributed_optimizer=True"
        )
    return param.as_strided((param.numel(),), (1,))


def _quantized_values(buffers: ModelBuffers, start: int, pieces: Sequence[tuple[int, int]]) -> list[Tensor]:
    """What the masters of a run of quantized parameters are made of; ``start`` is where it begins in its buffer."""
    assert buffers.weights is not None
    values = []
    for param, numel in pieces:
        offset = start - buffers.locations[param][1].start
        values.append(buffers.weights.values(param).reshape(-1)[offset : offset + numel])
        start += numel
    return values


def _owned_pieces(buffers: ModelBuffers) -> list[tuple[int, int, int, int]]:
    """``(buffer, start, end, param)`` of everything this rank updates, in buffer order."""
    pieces: list[tuple[int, int, int, int]] = []
    for number, (buffer, channel) in enumerate(zip(buffers.buffers, buffers.reducer.channels)):
        size, rank = (channel.comm.size, channel.comm.rank) if buffers.plan.sharded else (1, 0)
        ranges = compute_shard_ranges(buffer.layout, dp_size=size, dp_rank=rank)
        owners = buffers.plan.owners
        pieces.extend(
            (number, piece.start, piece.end, piece.param)
            for piece in ranges
            if owners is None or owners[piece.param] == channel.comm.rank
        )
    return pieces
