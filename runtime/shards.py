"""Which elements of which parameter a data-parallel rank owns (Megatron ``_build_model_gbuf_range``)."""

from __future__ import annotations

from dataclasses import dataclass

from megabuf_fx.runtime.layout import BufferLayout


@dataclass(frozen=True, slots=True)
class ShardRange:
    """The part of one parameter that a rank owns. All ranges are half-open, in elements.

    bucket   |----- rank 0 -----|----- rank 1 -----|
    params      [    W1    ][       W0        ]
                            [-- --]                    W0 on rank 0: one ShardRange
    """

    bucket: int
    param: int
    """Index into the list of specs."""
    start: int
    """In the buffer (Megatron ``gbuf_world``)."""
    end: int
    bucket_start: int
    """``start`` relative to the bucket (``gbuf_world_in_bucket``)."""
    shard_start: int
    """``start`` relative to this rank's shard of the bucket (``gbuf_local``)."""
    param_start: int
    """``start`` relative to the flattened parameter (``param``)."""

    @property
    def numel(self) -> int:
        return self.end - self.start


def shard_bounds(bucket: tuple[int, int], dp_size: int, dp_rank: int) -> tuple[int, int]:
    """Range of the buffer that ``dp_rank`` owns of ``bucket``.

    Raises:
        ValueError: the bucket does not divide by ``dp_size``, or there is no such rank.
    """
    start, end = bucket
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"rank {dp_rank} is not one of {dp_size} ranks")
    shard, rest = divmod(end - start, dp_size)
    if rest:
        raise ValueError(f"bucket [{start}, {end}) does not divide by {dp_size} ranks")
    return start + dp_rank * shard, start + (dp_rank + 1) * shard


def compute_shard_ranges(layout: BufferLayout, *, dp_size: int, dp_rank: int) -> tuple[ShardRange, ...]:
    """Every non-empty intersection of a parameter with the rank's shards: by bucket, then in buffer order."""
    members: list[list[tuple[int, int, int]]] = [[] for _ in layout.buckets]
    # Whoever joins neighbours into runs relies on this order, which in a layer-wise buffer is none of definition.
    for param, slot in sorted(zip(layout.params, layout.slots), key=lambda item: item[1].start):
        members[slot.bucket].append((param, slot.start, slot.end))
    ranges = []
    for bucket, bounds in enumerate(layout.buckets):
        shard_start, shard_end = shard_bounds(bounds, dp_size, dp_rank)
        for param, param_start, param_end in members[bucket]:
            start, end = max(param_start, shard_start), min(param_end, shard_end)
            if start < end:
                ranges.append(
                    ShardRange(
                        bucket=bucket,
                        param=param,
                        start=start,
                        end=end,
                        bucket_start=start - bounds[0],
                        shard_start=start - shard_start,
                        param_start=start - param_start,
                    )
                )
    return tuple(ranges)
