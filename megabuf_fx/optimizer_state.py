"""Optimizer state by parameter name, in logical element ranges: the form in which it is saved and loaded.

    {"fc1.weight": {"exp_avg": FlatShard, "exp_avg_sq": FlatShard, "step": tensor(3.), "master": FlatShard}}

Logical means row-major order of the parameter's shape, whatever its place in a buffer, so the form fits any world size,
bucket size and sharding, and plain ``torch.optim`` as well. ``master`` is the fp32 value of a 16-bit parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megabuf_fx.flat_shard import FlatShard, Piece
from megabuf_fx.runs import Run, flat_view
from megabuf_fx.runtime.model_buffers import ModelBuffers
from megabuf_fx.scaler_probe import ScalerProbe

MASTER = "master"

State = dict[str, dict[str, Any]]
"""By plain parameter name and key. A value is a ``FlatShard`` where it has one element per parameter element."""

_SCALARS = ("step", "mu_product", "eta", "mu")
"""State of one number, by name: of a 0-dim parameter all state looks alike."""


def plain_name(name: str) -> str:
    """Without what ``torch.compile`` of a submodule puts into names."""
    return name.replace("_orig_mod.", "")


class StateMap:
    """Where the state of one model's parameters lies on this rank."""

    def __init__(self, buffers: ModelBuffers) -> None:
        self._buffers = buffers
        self._specs = buffers.plan.params
        self._names = [plain_name(spec.name) for spec in self._specs]
        self._index = {name: index for index, name in enumerate(self._names)}
        self._not_row_major = [
            index for index, spec in enumerate(self._specs) if spec.numel and not self._view(index).is_contiguous()
        ]

    def collect(self, runs: Sequence[Run], state: Mapping[Any, Mapping[str, Any]]) -> State:
        """The state of this rank's ``runs``. Values alias the optimizer's own tensors where they can.

        Collective where a parameter is not row-major in memory (``channels_last``): ranks then own ranges that are none
        in logical order, so such a parameter's state is assembled on every rank.
        """
        found: State = {}
        pieces: dict[tuple[str, str], list[Piece]] = {}
        for run, param, start, values in self._pieces_of(runs):
            name = self._names[param]
            entries = found.setdefault(name, {})
            for key, value in _entries(run, state.get(run.master, {})):
                if isinstance(value, Tensor) and value.shape == run.master.shape:
                    pieces.setdefault((name, key), []).append(Piece(start, flat_view(value.detach())[values]))
                else:
                    entries[key] = value
        for (name, key), parts in pieces.items():
            found[name][key] = FlatShard(self._specs[self._index[name]].numel, parts[0].values.dtype, parts)
        for index in self._not_row_major:
            self._assemble(index, found)
        return {name: entries for name, entries in found.items() if entries}

    def wanted(self, runs: Sequence[Run], dtypes: Mapping[str, Mapping[str, torch.dtype]]) -> State:
        """Empty shards for what ``runs`` need of a saved state, to be filled by a load. ``dtypes`` by name and key."""
        ranges: dict[int, list[tuple[int, int]]] = {}
        for _, param, start, values in self._pieces_of(runs):
            ranges.setdefault(param, []).append((start, values.stop - values.start))
        wanted: State = {}
        for param, parts in ranges.items():
            spec = self._specs[param]
            if param in self._not_row_major:
                parts = [(0, spec.numel)]
            for key, dtype in dtypes.get(self._names[param], {}).items():
                shard = [Piece(start, torch.empty(length, dtype=dtype)) for start, length in parts]
                wanted.setdefault(self._names[param], {})[key] = FlatShard(spec.numel, dtype, shard)
        return wanted

    def values_of(self, run: Run, state: State, key: str) -> Tensor:
        """The values under ``key`` of all elements of ``run``, in its order: ``[run numel]``.

        Raises:
            KeyError: an element's value is missing.
        """
        return torch.cat(
            [
                self._range_of(param, state[self._names[param]][key], start, values.stop - values.start)
                for _, param, start, values in self._pieces_of([run])
            ]
        )

    def _range_of(self, param: int, shard: FlatShard, start: int, length: int) -> Tensor:
        if param in self._not_row_major:
            view = self._view(param)
            memory = torch.empty(shard.numel, dtype=shard.dtype)
            memory.as_strided(view.shape, view.stride()).copy_(shard.pieces[0].values.view(view.shape))
            return memory[start : start + length]
        for piece in shard.pieces:
            offset = start - piece.start
            if offset >= 0 and offset + length <= piece.values.numel():
                return piece.values[offset : offset + length]
        raise KeyError(f"the state of '{self._specs[param].name}' lacks elements [{start}, {start + length}): {shard}")

    def _pieces_of(self, runs: Sequence[Run]) -> Iterator[tuple[Run, int, int, slice]]:
        """Run, parameter, first element within the parameter's memory, and place within the run."""
        for run in runs:
            position = 0
            for param, numel in run.pieces:
                _, slot = self._buffers.locations[param]
                yield run, param, run.start + position - slot.start, slice(position, position + numel)
                position += numel

    def _view(self, index: int) -> Tensor:
        number, _ = self._buffers.locations[index]
        return self._buffers.buffers[number].grad_views[index]

    def _assemble(self, index: int, found: State) -> None:
        """Replace the pieces of one parameter by whole values in logical order, on every rank."""
        spec, name, view = self._specs[index], self._names[index], self._view(index)
        comm = self._buffers.comms.pair(is_expert=not spec.allreduce).grads
        own = found.pop(name, {})
        sent = {
            key: [(piece.start, piece.values.cpu()) for piece in value.pieces]
            if isinstance(value, FlatShard)
            else value
            for key, value in own.items()
        }
        memory: dict[str, Tensor] = {}
        scalars: dict[str, Any] = {}
        for answer in comm.all_gather_object(sent):
            assert isinstance(answer, dict)
            for key, value in answer.items():
                if not isinstance(value, list):
                    scalars[key] = value
                    continue
                for start, values in value:
                    memory.setdefault(key, torch.empty(spec.numel, dtype=values.dtype))
                    memory[key][start : start + values.numel()] = values
        shards = {key: FlatShard.whole(m.as_strided(view.shape, view.stride())) for key, m in memory.items()}
        found[name] = {**scalars, **shards}


def named_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """``param_groups`` with plain names in place of parameters; a ``ScalerProbe`` has none and is left out."""
    names = {id(param): plain_name(name) for name, param in model.named_parameters()}
    return [
        {**group, "params": [names[id(param)] for param in group["params"] if not isinstance(param, ScalerProbe)]}
        for group in optimizer.param_groups
    ]


def collect_plain(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> State:
    """The state of an optimizer of torch itself; ``names`` maps ``id(param)`` to name."""
    return {
        names[id(param)]: {
            key: FlatShard.whole(value) if is_elementwise(key, value, param) else value
            for key, value in optimizer.state[param].items()
        }
        for group in optimizer.param_groups
        for param in group["params"]
        if id(param) in names and param in optimizer.state
    }


def is_elementwise(key: str, value: object, param: Tensor) -> bool:
    """Whether a value of a torch optimizer has one element per parameter element (``step`` of a scalar has not)."""
    return key not in _SCALARS and isinstance(value, Tensor) and value.shape == param.shape


def like(current: object, value: object) -> object:
    """A saved hyper-parameter in the form of the current one: JSON has lists for tuples and numbers for tensors."""
    if isinstance(current, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(current, Tensor) and not isinstance(value, Tensor):
        return torch.full_like(current, value)  # type: ignore[arg-type]
    return value.clone() if isinstance(value, Tensor) else value


def _entries(run: Run, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from state.items()
    if run.is_quantized or run.params[0].dtype != torch.float32:
        yield MASTER, run.master


def label_of(entries: Mapping[str, Any]) -> Any:
    """What parameters of one run must have in common: which state they have, and its scalars."""
    scalars = [(key, float(value)) for key, value in entries.items() if not isinstance(value, FlatShard)]
    return (tuple(sorted(entries)), tuple(sorted(scalars))) if entries else None


def state_of_run(run: Run, state_map: StateMap, state: State, name: str) -> dict[str, Any]:
    """The inner optimizer's state of ``run``, the master included; ``name`` is that of one of its parameters."""
    master = run.master
    entries: dict[str, Any] = {}
    for key, value in state.get(name, {}).items():
        if isinstance(value, FlatShard):
            values = state_map.values_of(run, state, key).to(master.device, master.dtype)
            entries[key] = values.as_strided(master.shape, master.stride())
        else:
            entries[key] = value.clone() if isinstance(value, Tensor) else value
    return entries


def first_other_group(saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> str:
    if len(saved) != len(own):
        return f"there are {len(saved)}, this optimizer has {len(own)}"
    for number, (theirs, mine) in enumerate(zip(saved, own)):
        for position in range(max(len(theirs["params"]), len(mine["params"]))):
            pair = [names["params"][position : position + 1] or ["nothing"] for names in (theirs, mine)]
            if pair[0] != pair[1]:
                return f"group {number} has '{pair[0][0]}' at position {position}, this optimizer '{pair[1][0]}'"
    return "no difference found"
