"""The tensors of a checkpoint, by ``torch.distributed.checkpoint`` (DCP), with an index in JSON instead of a pickle."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import megabuf_fx._compat as _compat
from megabuf_fx.checkpoint_files import CheckpointError
from megabuf_fx.flat_shard import FlatShard

Tensors = Mapping[str, Tensor | FlatShard]
Group = dist.ProcessGroup | None
"""The ranks that save or load together; None is a single process."""


def write_tensors(directory: Path, tensors: Tensors, group: Group) -> dict[str, Any] | None:
    """Write into an empty ``directory``; every rank of ``group`` calls it. The first rank gets the index, in JSON.

    Raises:
        CheckpointError: something could not be written, on every rank.
    """
    writer = _Writer(directory)
    try:
        with _quiet(group):
            save(
                dict(tensors),
                storage_writer=writer,
                planner=_SavePlanner(),
                process_group=group,
                no_dist=group is None,
            )
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot write {directory}: {_cause(error)}") from error
    return writer.index


def read_tensors(directory: Path, index: Mapping[str, Any], wanted: Tensors, group: Group) -> None:
    """Fill ``wanted`` from ``directory``; every rank of ``group`` calls it.

    Raises:
        CheckpointError: something could not be read, on every rank.
    """
    try:
        with _quiet(group):
            load(
                dict(wanted),
                storage_reader=_Reader(directory, index),
                planner=_LoadPlanner(),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointError as error:
        raise CheckpointError(f"{directory} is damaged: {error}") from None
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"cannot read {directory}: {_cause(error)}") from error


def dtype_of(tensor: Mapping[str, Any]) -> torch.dtype:
    """The dtype of an entry of the index."""
    dtype = getattr(torch, tensor["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"unknown dtype {tensor['dtype']!r}")
    return dtype


@contextlib.contextmanager
def _quiet(group: Group) -> Iterator[None]:
    # DCP warns of what no_dist says.
    if group is not None:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _cause(error: BaseException) -> str:
    """The first failure in words; DCP wraps what happened on each rank."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = next(iter(failures.items()))
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"


class _Writer(FileSystemWriter):
    """DCP's writer, which also keeps the metadata in our form, on the first rank."""

    index: dict[str, Any] | None = None

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        # torch 2.11 fills in a copy of the metadata.
        places = {result.index: result.storage_data for per_rank in results for result in per_rank}
        self.index = _tensors_as_json(metadata, places)


class _Reader(FileSystemReader):
    """DCP's reader with our index in place of the pickle."""

    def __init__(self, directory: Path, tensors: Mapping[str, Any]) -> None:
        super().__init__(directory)
        self._metadata = _metadata_of(tensors)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _SavePlanner(DefaultSavePlanner):
    """Saves a flat state dict. The default planner finds pieces in tensors only."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return _find(self.state_dict[index.fqn], index)


class _LoadPlanner(DefaultLoadPlanner):
    """Loads a flat state dict. The default planner finds pieces in tensors only, and deep-copies what it does not
    know."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _find(self.state_dict[index.fqn], index)


def _find(value: Tensor | FlatShard, index: MetadataIndex) -> Tensor:
    return value.__get_tensor_shard__(index) if isinstance(value, FlatShard) else value


def _tensors_as_json(metadata: Metadata, places: Mapping[MetadataIndex, Any]) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"'{name}' is no tensor")
        chunks = []
        for chunk in entry.chunks:
            info = places[MetadataIndex(name, chunk.offsets)]
            chunks.append([list(chunk.offsets), list(chunk.sizes), info.relative_path, info.offset, info.length])
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "size": list(entry.size), "chunks": chunks}
    return tensors


def _metadata_of(tensors: Mapping[str, Any]) -> Metadata:
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    for name, tensor in tensors.items():
        chunks = []
        for offsets, sizes, file, offset, length in tensor["chunks"]:
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            chunks.append(chunk)
            storage[MetadataIndex(name, chunk.offsets)] = _compat.storage_info(file, offset, length)
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(tensor["size"]):
            # DCP would leave the rest as it finds it, without a word.
            raise CheckpointError(f"the index does not say where all of '{name}' is")
        properties = TensorProperties(dtype=dtype_of(tensor))
        entries[name] = TensorStorageMetadata(properties, torch.Size(tensor["size"]), chunks)
    return Metadata(entries, storage_data=storage)
