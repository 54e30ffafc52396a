"""Where every parameter lies inside its flat buffer: pure functions over integers.

    definition order   p0  p1  p2  p3            (``named_parameters()``)
    buffer order       p3  p2 | p1  p0           reverse, because backward finishes the last layer first
                       bucket 0   bucket 1

All positions count elements and ranges are half-open. The rules are Megatron-LM's (commit e03878b5f,
``core/optimizer/param_layout.py``, ``core/distributed/param_and_grad_buffer.py``), computed with integers
where Megatron divides floats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

PARAM_ALIGNMENT = 64
"""Parameter starts are multiples of this many elements (Megatron ``pad_param_start``); at one byte per element
that still is the 16-byte alignment below which Inductor clones a mutated input."""

BUCKET_ALIGNMENT = 128
"""Sharded bucket ends are multiples of ``lcm(dp_size, 128)`` (Megatron ``pad_bucket_end``)."""

HIGH_BUSBW_ALIGNMENT = 2**16
"""Further factor of the bucket end with ``pad_buckets_for_high_nccl_busbw``."""

DEFAULT_BUCKET_SIZE = 40_000_000
DEFAULT_BUCKET_SIZE_PER_RANK = 1_000_000


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What the planners know of a trainable parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Logical dtype: bf16 for a quantized parameter."""
    shared_embedding: bool = False
    """Word embedding that another pipeline stage shares: alone in its bucket when sharded."""
    allreduce: bool = True
    """False for an expert parameter, which is reduced over its own group."""
    quantized: Literal["fp8", "mxfp8", "nvfp4"] | None = None
    """What the storage holds: fp8 with scales per tensor or block, fp8 with MX scales, two values per byte (nvfp4),
    or values of ``dtype`` (None)."""
    is_managed_by_layer_wise_optimizer: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class BufferKey:
    """Parameters with equal keys share one buffer (Megatron ``BufferKey``)."""

    param_dtype: torch.dtype
    """``torch.uint8`` for quantized parameters."""
    grad_dtype: torch.dtype
    is_expert_parallel: bool = False
    is_managed_by_layer_wise_optimizer: bool = False


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """The parameters of one buffer, as indices into the list of specs, in definition order."""

    key: BufferKey
    params: tuple[int, ...]
    param_indices: tuple[int, ...]
    """Position among the parameters of equal logical dtype; Megatron loads unquantized checkpoints by it."""


@dataclass(frozen=True, slots=True)
class ParamSlot:
    """Place of a parameter in its buffer, in elements of the buffer."""

    start: int
    end: int
    bucket: int


def check_tiling(
    params: Sequence[int],
    slots: Sequence[ParamSlot],
    buckets: Sequence[tuple[int, int]],
    unpadded: Sequence[int],
) -> None:
    """Check that buckets tile a buffer from 0 and that slots lie in their buckets, apart from each other.

    Raises:
        ValueError: they do not; the message names parameters or bucket.
    """
    if len(slots) != len(params) or len(unpadded) != len(buckets):
        raise ValueError(f"{len(params)} params, {len(slots)} slots, {len(buckets)} buckets")
    position = 0
    for bucket, (start, end) in enumerate(buckets):
        if start != position or end < start:
            raise ValueError(f"bucket {bucket} covers [{start}, {end}) but must start at {position}")
        position = end
    previous: tuple[int, ParamSlot] | None = None
    for param, slot in sorted(zip(params, slots), key=lambda item: (item[1].start, item[1].end)):
        if not 0 <= slot.bucket < len(buckets):
            raise ValueError(f"parameter {param} at {slot} names one of {len(buckets)} buckets that is not there")
        start, end = buckets[slot.bucket]
        if not start <= slot.start <= slot.end <= end:
            raise ValueError(f"parameter {param} at {slot} leaves its bucket [{start}, {end})")
        if previous is not None and previous[1].end > slot.start:
            raise ValueError(f"parameter {param} at {slot} overlaps parameter {previous[0]} at {previous[1]}")
        previous = (param, slot)


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """One flat buffer: ``slots[i]`` belongs to parameter ``params[i]``; buckets tile ``[0, numel)``.

    Raises:
        ValueError: slots overlap or leave their bucket, or buckets do not tile the buffer.
    """

    key: BufferKey
    params: tuple[int, ...]
    param_indices: tuple[int, ...]
    slots: tuple[ParamSlot, ...]
    buckets: tuple[tuple[int, int], ...]
    unpadded: tuple[int, ...]
    """Elements of each bucket up to the end of its last parameter; gaps between parameters are included. In a
    layer-wise layout (``runtime/layerwise_layout.py``), where gaps are everywhere, elements of its parameters alone."""

    def __post_init__(self) -> None:
        check_tiling(self.params, self.slots, self.buckets, self.unpadded)

    @property
    def numel(self) -> int:
        """Elements of the buffer, padding included."""
        return self.buckets[-1][1] if self.buckets else 0

    @property
    def numel_unpadded(self) -> int:
        return sum(self.unpadded)


def pad_to_divisor(value: int, divisor: int) -> int:
    """Smallest multiple of ``divisor`` that is at least ``value``."""
    return -(-value // divisor) * divisor


def bucket_end_divisor(dp_size: int, *, pad_for_high_busbw: bool = False, packed: bool = False) -> int:
    """Divisor of sharded bucket ends, in elements (Megatron ``pad_bucket_end``).

    With ``packed``, half a bucket divides by ``dp_size`` too (``runtime/packed_layout.py``). The divisor is Megatron's
    unless ``dp_size`` is a multiple of 128 (of 2**16 with ``pad_for_high_busbw``); there it is twice Megatron's.
    """
    ranks = 2 * dp_size if packed else dp_size
    return math.lcm(ranks, BUCKET_ALIGNMENT, *([HIGH_BUSBW_ALIGNMENT] if pad_for_high_busbw else []))


def group_params_for_buffers(params: Sequence[ParamSpec], *, grad_reduce_in_fp32: bool) -> tuple[ParamGroup, ...]:
    """Group parameters by buffer key, keys in order of first occurrence (Megatron ``group_params_for_buffers``)."""
    members: dict[BufferKey, list[tuple[int, int]]] = {}
    counters: dict[BufferKey, int] = {}
    for index, param in enumerate(params):
        grad_dtype = torch.float32 if grad_reduce_in_fp32 else param.dtype
        # Quantized and plain parameters of one logical dtype share a counter, so a uint8 group can have gaps.
        logical = BufferKey(param.dtype, grad_dtype, not param.allreduce, param.is_managed_by_layer_wise_optimizer)
        key = BufferKey(
            torch.uint8 if param.quantized else param.dtype,
            logical.grad_dtype,
            logical.is_expert_parallel,
            logical.is_managed_by_layer_wise_optimizer,
        )
        position = counters.get(logical, 0)
        counters[logical] = position + 1
        members.setdefault(key, []).append((index, position))
    return tuple(ParamGroup(key, tuple(i for i, _ in m), tuple(k for _, k in m)) for key, m in members.items())


@dataclass(frozen=True, slots=True)
class BucketEnds:
    """Explicit boundaries in place of a size: a bucket closes after each of these parameters."""

    params: frozenset[int]
    """Indices of specs. The last bucket of a buffer closes without being named here."""

    def __repr__(self) -> str:
        # Sets print in any order.
        return f"BucketEnds({sorted(self.params)})"


BucketSize = int | BucketEnds | None
"""Where buckets close: at a threshold in elements, at given parameters, or never (one bucket per buffer)."""


@dataclass(frozen=True, slots=True)
class LayoutPolicy:
    """The choices in which Megatron's two layouts, and ours for non-sharded buffers, differ."""

    param_alignment: int
    """Divisor of parameter starts, in elements."""
    bucket_divisor: int
    """Divisor of bucket ends, in elements."""
    isolate_shared_embedding: bool
    """Give a ``shared_embedding`` parameter a bucket of its own."""

    @classmethod
    def dense(cls) -> LayoutPolicy:
        """No padding at all: Megatron without distributed optimizer (``_compute_default_per_buffer_param_layout``)."""
        return cls(1, 1, False)

    @classmethod
    def aligned(cls) -> LayoutPolicy:
        """Not sharded, but every view may enter a graph: starts and bucket ends are multiples of 64 elements."""
        return cls(PARAM_ALIGNMENT, PARAM_ALIGNMENT, False)

    @classmethod
    def sharded(cls, dp_size: int, *, pad_for_high_busbw: bool = False, packed: bool = False) -> LayoutPolicy:
        """Megatron's ``DistributedOptimizer`` layout; ``packed`` for a buffer whose storage has two values per byte."""
        divisor = bucket_end_divisor(dp_size, pad_for_high_busbw=pad_for_high_busbw, packed=packed)
        return cls(PARAM_ALIGNMENT, divisor, True)


def is_bucket_end(bucket_size: BucketSize, param: int, numel: int) -> bool:
    """Whether a bucket of ``numel`` elements, the last of them those of ``param``, closes."""
    if isinstance(bucket_size, BucketEnds):
        return param in bucket_size.params
    return bucket_size is not None and numel >= bucket_size


def compute_buffer_layout(
    group: ParamGroup, params: Sequence[ParamSpec], *, policy: LayoutPolicy, bucket_size: BucketSize
) -> BufferLayout:
    """Place the parameters of one buffer in reverse definition order.

    A bucket closes after the parameter with which it holds at least ``bucket_size`` elements, so the size is a lower
    threshold and no parameter is cut; with ``BucketEnds``, after each parameter named there. ``None`` means one bucket.
    Isolated shared embeddings are always apart.
    """
    slots: dict[int, ParamSlot] = {}
    buckets: list[tuple[int, int]] = []
    unpadded: list[int] = []
    bucket_start, end, has_params = 0, 0, False

    def close(unpadded_end: int) -> int:
        unpadded.append(unpadded_end - bucket_start)
        buckets.append((bucket_start, pad_to_divisor(unpadded_end, policy.bucket_divisor)))
        return buckets[-1][1]

    for index in reversed(group.params):
        param = params[index]
        isolated = policy.isolate_shared_embedding and param.shared_embedding
        start = pad_to_divisor(end, policy.param_alignment)
        if isolated and has_params:
            # Megatron closes with the start it has just padded, so this bucket's unpadded size holds that padding.
            bucket_start = start = close(start)
        end = start + param.numel
        slots[index] = ParamSlot(start, end, len(buckets))
        has_params = True
        if isolated or is_bucket_end(bucket_size, index, end - bucket_start):
            bucket_start = end = close(end)
            has_params = False
    if has_params:
        close(end)
    return BufferLayout(
        key=group.key,
        params=group.params,
        param_indices=group.param_indices,
        slots=tuple(slots[index] for index in group.params),
        buckets=tuple(buckets),
        unpadded=tuple(unpadded),
    )


def resolve_bucket_size(
    *,
    bucket_size: int | None,
    num_buckets: int | None,
    numel: int,
    dp_size: int,
    overlap_grad_reduce: bool,
) -> int | None:
    """Bucket threshold in elements, None for a single bucket (semantics of Megatron's ``DistributedDataParallel``).

    ``num_buckets`` divides the ``numel`` trainable elements of this rank, as Megatron's training script does;
    Megatron's DDP itself ignores it.
    """
    if not overlap_grad_reduce:
        return None
    if bucket_size is not None:
        return bucket_size
    if num_buckets is not None:
        return max(1, numel // num_buckets)
    return default_bucket_size(dp_size)


def default_bucket_size(dp_size: int) -> int:
    """Megatron's threshold, in elements."""
    return max(DEFAULT_BUCKET_SIZE, DEFAULT_BUCKET_SIZE_PER_RANK * dp_size)
