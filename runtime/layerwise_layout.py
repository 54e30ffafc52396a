"""Whole parameters per rank, for optimizers that need the matrix (Muon): pure functions over integers.

    definition order   p0  p1  p2  p3           sizes 2  3  4  5
    bucket             |------ rank 0 ------|------ rank 1 ------|
                       |    p3     | p0 |...|   p2   |  p1   |...|      dots are padding

A bucket takes a run of reverse definition order, as an ordinary one does, so that backward still finishes it in turn;
inside it parameters are dealt to shards, largest first. Rules are Megatron-LM's (commit e03878b5f,
``core/optimizer/layer_wise_optimizer.py``), computed with integers where Megatron multiplies floats.

:class:`Ownership` says who owns what and not how that was found, so that other layouts can hand one out too.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

from megabuf_fx.runtime.layout import (
    PARAM_ALIGNMENT,
    BucketEnds,
    BucketSize,
    BufferLayout,
    ParamGroup,
    ParamSlot,
    ParamSpec,
    bucket_end_divisor,
    is_bucket_end,
    pad_to_divisor,
)
from megabuf_fx.runtime.shards import shard_bounds


def is_layer_wise(param: ParamSpec, *, embedding_or_output: Set[str]) -> bool:
    """Whether a layer-wise optimizer steps ``param``: a matrix that is no embedding and no output layer.

    ``embedding_or_output`` names those (Megatron's attribute ``is_embedding_or_output_parameter``); other names in it,
    as of frozen parameters, do no harm.
    """
    return len(param.shape) == 2 and param.name not in embedding_or_output


def tag_layer_wise(params: Sequence[ParamSpec], *, embedding_or_output: Set[str]) -> tuple[ParamSpec, ...]:
    """The same parameters with ``is_managed_by_layer_wise_optimizer`` set by :func:`is_layer_wise`."""
    return tuple(
        dataclasses.replace(
            param,
            is_managed_by_layer_wise_optimizer=is_layer_wise(param, embedding_or_output=embedding_or_output),
        )
        for param in params
    )


def shard_divisor(dp_size: int, *, pad_for_high_busbw: bool = False) -> int:
    """Divisor of a rank's part of a bucket, in elements (Megatron ``_shard_divisor``).

    Shards start aligned, and ``dp_size`` of them end where a sharded bucket may. Half a shard is whole too, so packed
    buffers (``runtime/packed_layout.py``) need no divisor of their own.
    """
    bucket_divisor = bucket_end_divisor(dp_size, pad_for_high_busbw=pad_for_high_busbw)
    return math.lcm(PARAM_ALIGNMENT, bucket_divisor // dp_size)


def compute_layerwise_layout(
    group: ParamGroup,
    params: Sequence[ParamSpec],
    *,
    dp_size: int,
    bucket_size: BucketSize,
    pad_for_high_busbw: bool = False,
) -> BufferLayout:
    """Place each parameter of one buffer inside one of its bucket's ``dp_size`` shards.

    In a bucket, parameters are taken by descending size (equal ones in reverse definition order), each to the shard
    that is filled least (of equals the first). All shards of a bucket are as long as its fullest, padded.
    ``BufferLayout.unpadded`` counts parameters only. A shard can be empty.

    Raises:
        ValueError: the group is not that of a layer-wise optimizer, or there is no rank.
    """
    if not group.key.is_managed_by_layer_wise_optimizer:
        raise ValueError(f"{group.key} is not managed by a layer-wise optimizer; use compute_buffer_layout")
    _check_ranks(dp_size)
    divisor = shard_divisor(dp_size, pad_for_high_busbw=pad_for_high_busbw)
    slots: dict[int, ParamSlot] = {}
    buckets: list[tuple[int, int]] = []
    bucket_start = 0
    chunks = _cut_chunks(group, params, dp_size=dp_size, bucket_size=bucket_size)
    for bucket, chunk in enumerate(chunks):
        places, fullest = _deal_to_shards(chunk, params, dp_size=dp_size)
        shard = pad_to_divisor(fullest, divisor)
        for index, rank, offset in places:
            start = bucket_start + rank * shard + offset
            slots[index] = ParamSlot(start, start + params[index].numel, bucket)
        buckets.append((bucket_start, bucket_start + dp_size * shard))
        bucket_start = buckets[-1][1]
    return BufferLayout(
        key=group.key,
        params=group.params,
        param_indices=group.param_indices,
        slots=tuple(slots[index] for index in group.params),
        buckets=tuple(buckets),
        unpadded=tuple(sum(params[index].numel for index in chunk) for chunk in chunks),
    )


def _cut_chunks(
    group: ParamGroup, params: Sequence[ParamSpec], *, dp_size: int, bucket_size: BucketSize
) -> list[list[int]]:
    """The parameters of each bucket, in reverse definition order; a shared embedding is alone in its bucket."""
    chunks: list[list[int]] = []
    chunk: list[int] = []
    numel = largest = 0
    for index in reversed(group.params):
        param = params[index]
        if param.shared_embedding:
            chunks += [chunk, [index]] if chunk else [[index]]
            chunk, numel, largest = [], 0, 0
            continue
        chunk.append(index)
        numel += param.numel
        largest = max(largest, param.numel)
        # Every shard is at least as long as the largest parameter, so a bucket waits until nine tenths of that are
        # filled. Megatron has int(dp_size * largest * 0.9): equal below 2**50; from there on its floats are too coarse.
        # With explicit boundaries that is for whoever chose them.
        filled = isinstance(bucket_size, BucketEnds) or numel >= dp_size * largest * 9 // 10
        if filled and is_bucket_end(bucket_size, index, numel):
            chunks.append(chunk)
            chunk, numel, largest = [], 0, 0
    return [*chunks, chunk] if chunk else chunks


def _deal_to_shards(
    chunk: Sequence[int], params: Sequence[ParamSpec], *, dp_size: int
) -> tuple[list[tuple[int, int, int]], int]:
    """Returns parameter, rank and offset in the rank's shard of each, and the end of the fullest shard."""
    places = []
    shards = [(0, rank) for rank in range(dp_size)]  # a heap: the least filled first, of equals the lowest rank
    for index in sorted(chunk, key=lambda index: -params[index].numel):
        filled, rank = shards[0]
        offset = pad_to_divisor(filled, PARAM_ALIGNMENT)
        places.append((index, rank, offset))
        heapq.heapreplace(shards, (offset + params[index].numel, rank))
    return places, max(shards)[0]


@dataclass(frozen=True, slots=True)
class Ownership:
    """Which rank of one process group owns which whole parameter: ``params[i]`` belongs to ``ranks[i]``.

    Raises:
        ValueError: a parameter has two owners, or one that is not there.
    """

    dp_size: int
    params: tuple[int, ...]
    """Indices into the list of specs."""
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_ranks(self.dp_size)
        if len(self.params) != len(self.ranks):
            raise ValueError(f"{len(self.params)} parameters have {len(self.ranks)} owners; expected one each")
        owners: dict[int, int] = {}
        for param, rank in zip(self.params, self.ranks):
            if not 0 <= rank < self.dp_size:
                raise ValueError(f"parameter {param} belongs to rank {rank}, not one of {self.dp_size} ranks")
            if param in owners:
                raise ValueError(f"parameter {param} has two owners, ranks {owners[param]} and {rank}")
            owners[param] = rank

    @property
    def owners(self) -> dict[int, int]:
        """Rank of each parameter."""
        return dict(zip(self.params, self.ranks))

    @property
    def by_rank(self) -> tuple[tuple[int, ...], ...]:
        """The parameters of each rank, in the order of ``params``; a rank can have none."""
        owned: list[list[int]] = [[] for _ in range(self.dp_size)]
        for param, rank in zip(self.params, self.ranks):
            owned[rank].append(param)
        return tuple(map(tuple, owned))


def ownership_of(layout: BufferLayout, dp_size: int) -> Ownership:
    """Who owns the parameters of a buffer, in the order of ``layout.params``: the rank in whose shard each lies.

    Any layout will do that cuts no parameter. One without elements lies in no shard and is rank 0's.

    Raises:
        ValueError: a parameter crosses from one shard into another, or a bucket does not divide by ``dp_size``.
    """
    ranks = []
    for param, slot in zip(layout.params, layout.slots):
        start, shard_end = shard_bounds(layout.buckets[slot.bucket], dp_size, 0)
        first = last = 0
        if slot.start < slot.end:
            first, last = ((position - start) // (shard_end - start) for position in (slot.start, slot.end - 1))
        if first != last:
            raise ValueError(
                f"parameter {param} at [{slot.start}, {slot.end}) of bucket {slot.bucket} crosses shards of "
                f"{shard_end - start} elements from rank {first} to rank {last}; whole parameters need "
                f"compute_layerwise_layout for {dp_size} ranks"
            )
        ranks.append(first)
    return Ownership(dp_size, layout.params, tuple(ranks))


def ping_pong_ownership(
    params: Sequence[ParamSpec], dp_size: int, *, members: Sequence[int] | None = None, is_expert: bool = False
) -> Ownership:
    """Deal parameters to ranks by ascending size, there and back (Megatron ``shard_params`` without a layout).

        ranks              0   1   2   3
        smallest first    p0  p1  p2  p3
                          p7  p6  p5  p4
                          p8  p9

    ``members`` are indices into ``params``, default all; equal sizes keep its order. Only the expert parameters among
    them are dealt, or only the others: each kind has its own ranks and begins at rank 0.

    Raises:
        ValueError: a member occurs twice, or there is no rank.
    """
    _check_ranks(dp_size)
    chosen = [i for i in (range(len(params)) if members is None else members) if params[i].allreduce != is_expert]
    chosen.sort(key=lambda index: params[index].numel)
    turns = [divmod(position, dp_size) for position in range(len(chosen))]
    ranks = tuple(dp_size - 1 - place if turn % 2 else place for turn, place in turns)
    return Ownership(dp_size, tuple(chosen), ranks)


def _check_ranks(dp_size: int) -> None:
    if dp_size < 1:
        raise ValueError(f"{dp_size} ranks cannot own parameters; dp_size must be at least 1")
