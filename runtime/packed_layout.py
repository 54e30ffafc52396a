"""Where NVFP4 parameters lie in the packed buffer, two values per byte: pure functions over integers.

Gradients, and the optimizer's shards, have one position per element (``BufferLayout``). The values that all-gather
moves have half as many, so a rank's shard of bytes must be the bytes of its shard of elements:

    elements  |---- rank 0 ----|---- rank 1 ----|     bucket [0, N)
    bytes     |-rank 0-|-rank 1-|                     bucket [0, N / 2)

Our rule halves every position, and then that is so. Megatron's rule (commit e03878b5f) pads the packed bucket afresh,
to the same divisor as the full one. Where that is not N / 2, a rank updates elements that another rank sends.

All positions are those of a uint8 buffer, hence bytes, and ranges are half-open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megabuf_fx.runtime.layout import (
    BufferLayout,
    LayoutPolicy,
    ParamSlot,
    ParamSpec,
    check_tiling,
    pad_to_divisor,
)
from megabuf_fx.runtime.shards import shard_bounds

VALUES_PER_BYTE = 2


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The packed buffer of one :class:`BufferLayout`: the same parameters and buckets, at other positions.

    full     |    p1    | .. |        p0        | .... |     elements; dots are padding
    packed   | p1  |.|   p0    | .. |                        bytes, here half as many

    Raises:
        ValueError: slots overlap or leave their bucket, or buckets do not tile the buffer.
    """

    params: tuple[int, ...]
    slots: tuple[ParamSlot, ...]
    buckets: tuple[tuple[int, int], ...]
    unpadded: tuple[int, ...]
    """Bytes of each bucket without the padding of its end; gaps between parameters are included."""

    def __post_init__(self) -> None:
        check_tiling(self.params, self.slots, self.buckets, self.unpadded)

    @property
    def numel(self) -> int:
        """Bytes of the buffer, padding included."""
        return self.buckets[-1][1] if self.buckets else 0

    @property
    def numel_unpadded(self) -> int:
        return sum(self.unpadded)


def halve_layout(layout: BufferLayout) -> PackedLayout:
    """Divide every position by two, so that byte ``i`` holds the elements ``2 * i`` and ``2 * i + 1`` of the buffer.

    Every parameter of the layout must be NVFP4. A rank's shards of bytes and of elements agree whatever ``dp_size``
    is, provided half a bucket divides by it: ``LayoutPolicy.sharded(dp_size, packed=True)``.

    Raises:
        ValueError: a position is odd. Starts and bucket ends of the aligned policies never are, and an NVFP4 parameter
            has whole rows of 16.
    """

    def halve(what: str, *positions: int) -> list[int]:
        if any(position % VALUES_PER_BYTE for position in positions):
            raise ValueError(
                f"{what} has an odd position among {positions}, but a byte holds two elements; use an aligned layout "
                f"and parameters of an even number of elements"
            )
        return [position // VALUES_PER_BYTE for position in positions]

    slots = []
    for param, slot in zip(layout.params, layout.slots):
        start, end = halve(f"parameter {param}", slot.start, slot.end)
        slots.append(ParamSlot(start, end, slot.bucket))
    buckets, unpadded = [], []
    for bucket, (positions, numel) in enumerate(zip(layout.buckets, layout.unpadded)):
        start, end, nbytes = halve(f"bucket {bucket}", *positions, numel)
        buckets.append((start, end))
        unpadded.append(nbytes)
    return PackedLayout(layout.params, tuple(slots), tuple(buckets), tuple(unpadded))


def megatron_packed_layout(layout: BufferLayout, params: Sequence[ParamSpec], *, policy: LayoutPolicy) -> PackedLayout:
    """Megatron's rule (``_ParamAndGradBuffer._compute_nvfp4_packed_layout``), for buffers that must look like its own.

    Parameters are placed anew: NVFP4 in half its elements, others in one byte per element. ``policy`` is that of
    ``layout``, and its alignments, which count elements there, count bytes here. Each parameter keeps its bucket.
    :func:`misowned_elements` says what this costs.

    Raises:
        ValueError: an NVFP4 parameter has an odd number of elements, or a bucket has no parameter.
    """
    if empty := set(range(len(layout.buckets))) - {slot.bucket for slot in layout.slots}:
        raise ValueError(f"buckets {sorted(empty)} have no parameter, so the rule gives them no place")
    slots: list[ParamSlot] = []
    buckets: list[tuple[int, int]] = []
    unpadded: list[int] = []
    bucket_start = end = 0

    def close(unpadded_end: int) -> int:
        unpadded.append(unpadded_end - bucket_start)
        buckets.append((bucket_start, pad_to_divisor(unpadded_end, policy.bucket_divisor)))
        return buckets[-1][1]

    for index, full in reversed(list(zip(layout.params, layout.slots))):
        param = params[index]
        start = pad_to_divisor(end, policy.param_alignment)
        if full.bucket != len(buckets):
            # As before an isolated embedding in the full layout, the bucket closes with the start already padded.
            bucket_start = start = close(start)
        if param.quantized == "nvfp4" and param.numel % VALUES_PER_BYTE:
            raise ValueError(f"NVFP4 parameter {param.name} has {param.numel} elements; packing needs an even number")
        end = start + (param.numel // VALUES_PER_BYTE if param.quantized == "nvfp4" else param.numel)
        slots.append(ParamSlot(start, end, full.bucket))
    if slots:
        close(end)
    return PackedLayout(layout.params, tuple(reversed(slots)), tuple(buckets), tuple(unpadded))


def misowned_elements(layout: BufferLayout, packed: PackedLayout, *, dp_size: int) -> int:
    """Count the elements that one rank updates and another sends, so that the update is lost.

    The owner of an element holds it in its shard of the full bucket; the sender holds its byte in its shard of the
    packed bucket. They agree everywhere under :func:`halve_layout`.

    Raises:
        ValueError: ``packed`` is of other parameters or sizes, or a bucket of either does not divide by ``dp_size``.
    """
    if layout.params != packed.params:
        raise ValueError(f"the full layout has parameters {layout.params}, the packed one {packed.params}")
    misowned = 0
    for param, full, half in zip(layout.params, layout.slots, packed.slots):
        numel, nbytes = full.end - full.start, half.end - half.start
        if numel not in (nbytes, VALUES_PER_BYTE * nbytes):
            raise ValueError(f"parameter {param} has {numel} elements in {nbytes} bytes; expected one or two per byte")
        values_per_byte = 1 if numel == nbytes else VALUES_PER_BYTE
        misowned += numel
        for rank in range(dp_size):
            owned_start, owned_end = shard_bounds(layout.buckets[full.bucket], dp_size, rank)
            sent_start, sent_end = shard_bounds(packed.buckets[half.bucket], dp_size, rank)
            # As elements from the start of the parameter.
            start = max(0, owned_start - full.start, values_per_byte * (sent_start - half.start))
            end = min(numel, owned_end - full.start, values_per_byte * (sent_end - half.start))
            misowned -= max(0, end - start)
    return misowned
