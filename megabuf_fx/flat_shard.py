"""A logical 1-D tensor of which this rank holds some ranges, as ``torch.distributed.checkpoint`` (DCP) understands it.

The checkpoint holds the whole tensor and knows nothing of ranks, buckets or padding, so any other division can load it.
DCP asks objects that are no tensors for the three methods with double underscores (its ``_Checkpointable`` protocol,
the one that DTensor follows; checked on torch 2.11.0, 2.13.0 and 2.14.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Piece(NamedTuple):
    """Elements ``[start, start + len(values))`` of the logical tensor."""

    start: int
    values: Tensor
    """1-D."""


class FlatShard:
    """``numel`` elements of ``dtype``; ``pieces`` are this rank's, by ``start``, none where it holds nothing."""

    def __init__(self, numel: int, dtype: torch.dtype, pieces: Sequence[Piece]) -> None:
        self.numel = numel
        self.dtype = dtype
        self.pieces = tuple(sorted(pieces, key=lambda piece: piece.start))

    @classmethod
    def whole(cls, tensor: Tensor) -> FlatShard:
        """All elements of ``tensor``, in logical (row-major) order."""
        flat = tensor.detach().contiguous().view(-1)
        return cls(flat.numel(), flat.dtype, [Piece(0, flat)])

    def map(self, function: Callable[[Tensor], Tensor]) -> FlatShard:
        """The same ranges with other values."""
        pieces = [Piece(piece.start, function(piece.values)) for piece in self.pieces]
        return FlatShard(self.numel, pieces[0].values.dtype if pieces else self.dtype, pieces)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatShard:
        return self.map(torch.clone)

    def __repr__(self) -> str:
        held = ", ".join(f"[{p.start}, {p.start + p.values.numel()})" for p in self.pieces) or "nothing"
        return f"FlatShard({held} of {self.numel} {self.dtype})"

    # What DCP calls.

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size([piece.start])),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties(dtype=piece.values.dtype),
                    size=torch.Size([self.numel]),
                ),
            )
            for piece, chunk in zip(self.pieces, self.__create_chunk_list__())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size([piece.start]), torch.Size([piece.values.numel()])) for piece in self.pieces
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for piece in self.pieces:
            if index.offset is not None and tuple(index.offset) == (piece.start,):
                return piece.values
        raise KeyError(f"no piece of {index.fqn} starts at {index.offset}; there are {self}")


# So that torch.load, which by default makes only objects it knows, reads what torch.save made of a state_dict.
torch.serialization.add_safe_globals([FlatShard, Piece])
