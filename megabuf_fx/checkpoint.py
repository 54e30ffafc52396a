"""Save and load a run: whole or not at all, at any world size, from and into any optimizer.

The tensors go through ``torch.distributed.checkpoint`` (DCP) under plain names:

    model.<name>               parameters and module buffers, in their shape
    optimizer.<key>.<name>     optimizer state (exp_avg, ...) and fp32 ``master`` of 16-bit parameters, in logical 1-D
                               order; ``step`` and other scalars as they are
    quantized.<name>.<key>     state of fp8's delayed scaling; weights themselves are saved dequantized
    rank.<rank>.<key>          what only one rank has (``rank_state``)

Experts of one name are others on other ranks; their names end in ``@expert<k>``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import megabuf_fx._compat as _compat
import megabuf_fx.checkpoint_files as files
from megabuf_fx.checkpoint_files import CheckpointError
from megabuf_fx.checkpoint_state import (
    first_names,
    model_state,
    optimizer_state,
    quantized_params,
    saved_names,
    scaling_state,
    set_plain,
)
from megabuf_fx.checkpoint_tensors import Group, dtype_of, read_tensors, write_tensors
from megabuf_fx.flat_shard import FlatShard
from megabuf_fx.handle import MegabufHandle, find_handles
from megabuf_fx.mixed_optimizer import MixedOptimizer
from megabuf_fx.optimizer import DistributedOptimizer
from megabuf_fx.optimizer_state import MASTER, State, named_groups
from megabuf_fx.runtime.collectives import ADVICE, CollectiveError


class Loaded(NamedTuple):
    """What a checkpoint holds besides model and optimizer."""

    step: int
    extra: dict[str, Any]
    rank_state: dict[str, Tensor]
    """What this rank had saved; empty when the number of ranks differs."""


class PendingSave:
    """A save that goes on in the background."""

    def __init__(self, directory: Path, future: Future[Path], group: Group) -> None:
        self.directory = directory
        self.future = future
        self._group = group

    def result(self) -> Path:
        """Wait for it. Raises CheckpointError as ``save_checkpoint`` does."""
        try:
            return self.future.result()
        finally:
            # Here and not in the thread, so that no rank makes the next group while it still has this one.
            group, self._group = self._group, None
            if group is not None:
                dist.destroy_process_group(group)


def save_checkpoint(
    root: str | Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    extra: Mapping[str, Any] | None = None,
    rank_state: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write ``root/step-<step>``; every rank calls it, and all see ``root`` (a shared file system).

    ``optimizer`` is a ``DistributedOptimizer`` or one of torch itself. ``extra`` is JSON (data position, seeds, ...),
    equal on all ranks; ``rank_state`` holds tensors that differ from rank to rank, such as random-number states.

    Raises:
        CheckpointError: something could not be written, on every rank; the training state is untouched, and no
            directory of that name appears.
    """
    return _Save(Path(root), step, model, optimizer, extra, rank_state, is_staged=False).write(_group_of(model))


def async_save_checkpoint(
    root: str | Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    extra: Mapping[str, Any] | None = None,
    rank_state: Mapping[str, Tensor] | None = None,
) -> PendingSave:
    """As ``save_checkpoint``, but return once everything is copied to the host; training may go on.

    Writing runs in a thread over a gloo group of its own. Wait for one save (``result``) before starting the next.
    """
    saving = _Save(Path(root), step, model, optimizer, extra, rank_state, is_staged=True)
    group = _group_of(model)
    if group is not None:
        ranks = dist.get_process_group_ranks(group)
        is_subgroup = len(ranks) < dist.get_world_size()
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=is_subgroup, group_desc="megabuf_save")
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="megabuf_save")

    def write() -> Path:
        return saving.write(group)

    future = thread.submit(write)
    thread.shutdown(wait=False)
    return PendingSave(saving.directory, future, group)


def latest_checkpoint(root: str | Path) -> Path | None:
    """The complete checkpoint of the highest step in ``root``; None if there is none.

    What an interrupted save left has another name and is no candidate. A damaged one is found all the same: loading it
    says so, and goes back to an older one only when told to.
    """
    return files.find_latest(Path(root))


@torch.no_grad()
def load_checkpoint(directory: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Loaded:
    """Load what ``save_checkpoint`` wrote, at whatever world size; every rank calls it.

    ``model`` is attached or not, ``optimizer`` ours or torch's. Floating dtypes are converted: an fp32 model takes the
    masters of a 16-bit one, and masters of a 16-bit model come from fp32 weights. Everything is read and checked on the
    host before anything is changed.

    Raises:
        CheckpointError: damaged (every file is compared with its checksum), incomplete, foreign, or of another model;
            on every rank, and the training state is untouched.
    """
    directory = Path(directory)
    group = _group_of(model)
    with _named_failure(f"loading {directory}"):
        index: dict[str, Any] = _on_all(group, lambda: files.read_index(directory))
        names = sorted(index["files"])
        rank, size = _rank_and_size(group)
        _on_all(group, lambda: files.check_files(directory, index["files"], names[rank::size]))
        loading = _Load(directory, index, _compat.unwrap_compiled(model), optimizer)
        here = set().union(*_gather(group, loading.plan))
        _on_all(group, lambda: loading.check_covered(here))
        _on_all(group, lambda: loading.read(group))
    # From here on nothing can fail: shapes, names and values are known to fit on every rank.
    loading.apply()
    return Loaded(index["step"], index["extra"], loading.rank_state)


class _Save:
    """Everything of one checkpoint, gathered on the calling thread; ``write`` may run on another."""

    def __init__(
        self,
        root: Path,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        extra: Mapping[str, Any] | None,
        rank_state: Mapping[str, Tensor] | None,
        *,
        is_staged: bool,
    ) -> None:
        self.directory = root / f"step-{step:08d}"
        model = _compat.unwrap_compiled(model)
        rename = saved_names(model)
        tensors: dict[str, Any] = {}
        for name, value in model_state(model).items():
            tensors[f"model.{rename(name)}"] = value
        for name, scaling in scaling_state(model).items():
            tensors.update({f"quantized.{rename(name)}.{key}": value for key, value in scaling.items()})
        state, groups = optimizer_state(model, optimizer)
        for name, entries in state.items():
            for key, value in entries.items():
                if value is not None:
                    entry = (
                        value if isinstance(value, (FlatShard, Tensor)) else torch.tensor(value, dtype=torch.float64)
                    )
                    tensors[f"optimizer.{key}.{rename(name)}"] = entry
        rank, size = _rank_and_size(_group_of(model))
        for key, value in (rank_state or {}).items():
            tensors[f"rank.{rank}.{key}"] = value
        self.content = {
            "step": step,
            "extra": dict(extra or {}),
            "optimizer": _class_of(optimizer),
            "param_groups": [{key: _plain(value) for key, value in group.items()} for group in groups],
            "world_size": size,
        }
        json.dumps(self.content)  # before anything is written: TypeError names what is no JSON
        self.tensors = {name: _to_host(value) for name, value in tensors.items()} if is_staged else tensors

    def write(self, group: Group) -> Path:
        try:
            with _named_failure(f"saving {self.directory}"):
                return self._write(group)
        except RuntimeError:
            if group is None or group.rank() == 0:
                files.remove_partial(self.directory)
            raise

    def _write(self, group: Group) -> Path:
        partial = files.partial_of(self.directory)
        _on_first(group, lambda: files.clear_partial(self.directory))
        index = write_tensors(partial, self.tensors, group)
        rank, _ = _rank_and_size(group)
        own = sorted(path.name for path in partial.glob(f"__{rank}_*"))
        sums = _gather(group, lambda: files.checksums(partial, own))
        listed = {name: entry for part in sums for name, entry in part.items()}

        def finish() -> None:
            listed.update(files.checksums(partial, [".metadata"]))
            files.complete(self.directory, {**self.content, "files": listed, "tensors": index})

        _on_first(group, finish)
        return self.directory


class _Load:
    """What is read of a checkpoint before anything is changed."""

    def __init__(
        self, directory: Path, index: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self._directory = directory
        self._index = index
        self._model = model
        self._optimizer = optimizer
        self._tensors: dict[str, Any] = index["tensors"]
        self._weights: dict[str, Tensor] = {}
        self._state: State = {}
        self._scaling: dict[str, dict[str, Tensor]] = {}
        self._wanted: dict[str, Any] = {}
        self.rank_state: dict[str, Tensor] = {}

    def plan(self) -> set[str]:
        """Check names and shapes and make room for everything; returns the names of this rank's model tensors."""
        rename = saved_names(self._model)
        firsts = first_names(self._model)
        current = model_state(self._model)
        here = {rename(name): tensor for name, tensor in current.items()}
        self._check_names(here)
        self._check_groups()
        wanted = self._wanted
        for name, tensor in current.items():
            source = f"model.{rename(name)}"
            master = f"optimizer.{MASTER}.{rename(firsts.get(name, name))}"
            if tensor.dtype == torch.float32 and master in self._tensors:
                source = master
            self._weights[name] = wanted.setdefault(source, self._empty(source))
        for name in quantized_params(self._model):
            prefix = f"quantized.{rename(name)}."
            keys = [full.removeprefix(prefix) for full in self._tensors if full.startswith(prefix)]
            self._scaling[name] = {key: self._empty(prefix + key) for key in keys}
            wanted.update({prefix + key: value for key, value in self._scaling[name].items()})
        self._state = self._wanted_state(current, rename)
        for name, entries in self._state.items():
            for key, value in entries.items():
                wanted[f"optimizer.{key}.{rename(name)}"] = value
        rank, size = _rank_and_size(_group_of(self._model))
        if self._index["world_size"] == size:
            prefix = f"rank.{rank}."
            self.rank_state = {n.removeprefix(prefix): self._empty(n) for n in self._tensors if n.startswith(prefix)}
            wanted.update({prefix + key: value for key, value in self.rank_state.items()})
        return set(here)

    def check_covered(self, here: set[str]) -> None:
        """``here``: the names of all ranks' model tensors."""
        for name in self._tensors:
            if name.startswith("model.") and name.removeprefix("model.") not in here:
                raise CheckpointError(
                    f"{self._directory} is of another model: this one has no '{name.removeprefix('model.')}'"
                )

    def read(self, group: Group) -> None:
        read_tensors(self._directory, self._tensors, self._wanted, group)

    def apply(self) -> None:
        current = model_state(self._model)
        quantized = quantized_params(self._model)
        for name, value in self._weights.items():
            if name in quantized:
                weights, index = quantized[name]
                weights.load(index, value)
                if self._optimizer is not None:
                    # Its masters are stored next.
                    weights.resume(index, self._scaling[name])
            else:
                current[name].copy_(value.view(current[name].shape))
        optimizer = self._optimizer
        if isinstance(optimizer, DistributedOptimizer):
            for name, value in self._weights.items():
                if current[name].dtype in (torch.bfloat16, torch.float16) or name in quantized:
                    self._state.setdefault(name, {}).setdefault(MASTER, FlatShard.whole(value.float()))
            optimizer.set_state(self._state, self._index["param_groups"], is_gathered=True)
        elif optimizer is not None:
            set_plain(optimizer, self._model, self._state, self._index["param_groups"])

    def _wanted_state(self, current: Mapping[str, Tensor], rename: Callable[[str], str]) -> State:
        if self._optimizer is None:
            return {}
        saved: dict[str, dict[str, Any]] = {}
        for full in self._tensors:
            if full.startswith("optimizer."):
                _, key, name = full.split(".", 2)
                saved.setdefault(name, {})[key] = self._tensors[full]
        firsts = dict.fromkeys(first_names(self._model).values())
        quantized = quantized_params(self._model)
        entries = {name: saved[rename(name)] for name in firsts if rename(name) in saved}
        for name, keys in entries.items():
            if current[name].dtype == torch.float32 and name not in quantized:
                # The weights themselves are read from it.
                keys.pop(MASTER, None)
        if isinstance(self._optimizer, DistributedOptimizer):
            elementwise = {
                name: {key: dtype_of(entry) for key, entry in keys.items() if entry["size"]}
                for name, keys in entries.items()
            }
            wanted = self._optimizer.wanted_state(elementwise)
        else:
            wanted = {
                name: {
                    key: FlatShard.whole(torch.empty(entry["size"], dtype=dtype_of(entry)))
                    for key, entry in keys.items()
                    if entry["size"] and key != MASTER
                }
                for name, keys in entries.items()
            }
        for name, shards in wanted.items():
            scalars = (key for key, entry in entries[name].items() if not entry["size"])
            shards.update({key: self._empty(f"optimizer.{key}.{rename(name)}") for key in scalars})
        return wanted

    def _empty(self, name: str) -> Tensor:
        entry = self._tensors[name]
        return torch.empty(entry["size"], dtype=dtype_of(entry))

    def _check_names(self, current: Mapping[str, Tensor]) -> None:
        saved = {
            name.removeprefix("model."): entry for name, entry in self._tensors.items() if name.startswith("model.")
        }
        for name, tensor in current.items():
            entry = saved.get(name)
            if entry is None:
                raise CheckpointError(f"{self._directory} is of another model: it has no '{name}'")
            if tuple(entry["size"]) != tuple(tensor.shape):
                raise CheckpointError(
                    f"{self._directory} is of another model: '{name}' has shape {tuple(entry['size'])}, here "
                    f"{tuple(tensor.shape)}"
                )
            dtype = dtype_of(entry)
            if dtype != tensor.dtype and not (dtype.is_floating_point and tensor.dtype.is_floating_point):
                raise CheckpointError(f"{self._directory}: '{name}' is {dtype}, here {tensor.dtype}")

    def _check_groups(self) -> None:
        if self._optimizer is None:
            return
        writer, reader = self._index["optimizer"], _class_of(self._optimizer)
        if writer != reader and {writer, reader} != {"Adam", "AdamW"}:
            raise CheckpointError(
                f"{self._directory} holds the state of {writer}, which {reader} cannot go on from; leave the "
                "optimizer out to load the weights alone"
            )
        own = [group["params"] for group in named_groups(self._model, self._optimizer)]
        saved = [group["params"] for group in self._index["param_groups"]]
        if own != saved:
            raise CheckpointError(
                f"{self._directory}: the optimizer has other param groups: {len(own)} here, {len(saved)} saved, or "
                "other parameters in them"
            )


def _class_of(optimizer: torch.optim.Optimizer) -> str:
    inner = optimizer.inner if isinstance(optimizer, DistributedOptimizer) else optimizer
    return inner.name if isinstance(inner, MixedOptimizer) else type(inner).__name__


def _group_of(model: nn.Module) -> Group:
    """The ranks over which the model is trained; for one that is not attached, all."""
    handles: list[MegabufHandle] = find_handles(list(_compat.unwrap_compiled(model).parameters()))
    if handles:
        return handles[0].process_group
    return dist.group.WORLD if dist.is_initialized() else None


@contextlib.contextmanager
def _named_failure(what: str) -> Iterator[None]:
    """Say what the ranks were doing when one of them could not be reached."""
    try:
        yield
    except (CheckpointError, CollectiveError):
        raise
    except RuntimeError as error:
        raise CollectiveError(f"{what} failed: {error}\n{ADVICE}") from error


def _rank_and_size(group: Group) -> tuple[int, int]:
    return (group.rank(), group.size()) if group is not None else (0, 1)


def _gather(group: Group, function: Callable[[], Any]) -> list[Any]:
    """The values of ``function`` on every rank; an error on one is raised on all."""
    try:
        answer: tuple[bool, Any] = (True, function())
    except (CheckpointError, OSError) as error:
        answer = (False, str(error))
    except Exception as error:
        # The other ranks wait for an answer, whatever it is.
        answer = (False, f"{type(error).__name__}: {error}")
    answers: list[Any] = [answer]
    if group is not None:
        answers = [None] * group.size()
        dist.all_gather_object(answers, answer, group=group)
    for rank, (is_ok, value) in enumerate(answers):
        if not is_ok:
            raise CheckpointError(value if not group or group.rank() == rank else f"rank {rank}: {value}")
    return [value for _, value in answers]


def _on_all(group: Group, function: Callable[[], Any]) -> Any:
    """Run on every rank and return this rank's value; an error on one is raised on all."""
    return _gather(group, function)[group.rank() if group is not None else 0]


def _on_first(group: Group, function: Callable[[], None]) -> None:
    """Run on the first rank, the others wait; an error is raised on all."""
    _gather(group, function if group is None or group.rank() == 0 else lambda: None)


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, Tensor) else value


def _to_host(value: FlatShard | Tensor) -> FlatShard | Tensor:
    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", copy=True)

    return value.map(copy) if isinstance(value, FlatShard) else copy(value)
