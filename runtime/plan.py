"""Plans: frozen values that say what is reduced, where, and in which order. Tensor-free and equal on all ranks.

``ParamSpec -> BufferLayout -> BucketPlan -> GraphPlan``; the first two are in ``layout.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megabuf_fx.runtime.layerwise_layout import compute_layerwise_layout, ping_pong_ownership
from megabuf_fx.runtime.layout import (
    BucketEnds,
    BucketSize,
    BufferKey,
    BufferLayout,
    LayoutPolicy,
    ParamGroup,
    ParamSlot,
    ParamSpec,
    compute_buffer_layout,
    group_params_for_buffers,
)
from megabuf_fx.runtime.partition import partition_buckets


@dataclass(frozen=True, slots=True)
class Bucket:
    """A slice ``[start, end)`` (elements) of one buffer."""

    buffer: int
    index: int
    """Position among the buckets of its buffer."""
    start: int
    end: int
    numel_unpadded: int
    params: tuple[int, ...]
    """Indices of specs, in reverse definition order. That is their order in the buffer too, except in a layer-wise
    one (``runtime/layerwise_layout.py``)."""

    @property
    def numel(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class BucketGroup:
    """Buckets whose collectives are launched together (Megatron ``_ParamAndGradBucketGroup``)."""

    buckets: tuple[Bucket, ...]

    @property
    def params(self) -> tuple[int, ...]:
        return tuple(param for bucket in self.buckets for param in bucket.params)


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """All buffers of one attached model and the order of its collectives.

    ``groups`` is that order: gradients are reduced in it, parameters are gathered in its reverse (the head of the
    model, which forward needs first, is in the last group). It follows from the layout alone, so all ranks agree.
    """

    params: tuple[ParamSpec, ...]
    layouts: tuple[BufferLayout, ...]
    groups: tuple[BucketGroup, ...]
    dp_size: int
    """Ranks that share a dense bucket: those of one optimizer instance."""
    expert_dp_size: int
    """The same of expert buckets."""
    sharded: bool
    aligned: bool
    """Every parameter view is aligned and may enter a graph by itself."""
    owners: tuple[int, ...] | None = None
    """Without shards but with a layer-wise optimizer: the rank that updates each parameter, whole, and sends it to the
    others. A rank among those that share its bucket."""

    @property
    def is_gathered(self) -> bool:
        """Whether ranks update parts of the model and gather the rest."""
        return self.sharded or self.owners is not None

    def dp_size_of(self, key: BufferKey) -> int:
        """Ranks that share a bucket of the buffer with this key."""
        return self.expert_dp_size if key.is_expert_parallel else self.dp_size

    @property
    def locations(self) -> tuple[tuple[int, ParamSlot], ...]:
        """Buffer and slot of each parameter."""
        found: list[tuple[int, ParamSlot] | None] = [None] * len(self.params)
        for buffer, layout in enumerate(self.layouts):
            for param, slot in zip(layout.params, layout.slots):
                found[param] = (buffer, slot)
        return tuple(location for location in found if location is not None)

    @property
    def group_of_param(self) -> tuple[int, ...]:
        """Index of the bucket group of each parameter."""
        owner = {param: index for index, group in enumerate(self.groups) for param in group.params}
        return tuple(owner[param] for param in range(len(self.params)))

    @property
    def bucket_ends(self) -> BucketEnds:
        """Boundaries with which the same buckets come out again, for any number of ranks."""
        return BucketEnds(frozenset(min(bucket.params) for group in self.groups for bucket in group.buckets))

    @property
    def digest(self) -> str:
        """Hex digest that is equal exactly when the plans are."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def plan_buckets(
    params: Sequence[ParamSpec],
    *,
    dp_size: int,
    sharded: bool,
    bucket_size: BucketSize,
    grad_reduce_in_fp32: bool,
    expert_dp_size: int | None = None,
    dense: bool = False,
    pad_for_high_busbw: bool = False,
    force_single_bucket_group: bool = False,
    reduce_scatter_with_fp32_accumulation: bool = False,
    owned_whole: bool = False,
) -> BucketPlan:
    """Lay out ``params`` (definition order) and cut them into buckets.

    ``dense`` drops the alignment of non-sharded buffers, as Megatron does; sharded buffers are always aligned.
    ``bucket_size`` is a lower threshold in elements, or says where buckets end; None is one bucket per buffer. Expert
    buffers are cut for ``expert_dp_size`` ranks (default ``dp_size``). ``owned_whole`` gives every parameter an owner
    where nothing is sharded. A sharded buffer of a layer-wise optimizer has no cut parameter.

    Raises:
        ValueError: several quantized buffers.
    """
    expert_dp_size = dp_size if expert_dp_size is None else expert_dp_size
    layouts = tuple(
        _layout_of(
            group,
            params,
            dp_size=expert_dp_size if group.key.is_expert_parallel else dp_size,
            sharded=sharded,
            dense=dense,
            bucket_size=bucket_size,
            pad_for_high_busbw=pad_for_high_busbw,
        )
        for group in group_params_for_buffers(params, grad_reduce_in_fp32=grad_reduce_in_fp32)
    )
    groups: list[BucketGroup] = []
    for is_expert in (False, True):
        # Dense and expert buckets travel over different process groups and never share a bucket group.
        numbers = [n for n, layout in enumerate(layouts) if layout.key.is_expert_parallel == is_expert]
        buckets = [_buckets_of(number, layouts[number]) for number in numbers]
        partition = partition_buckets(
            [(layouts[number].key.param_dtype, len(layouts[number].buckets)) for number in numbers],
            force_single_bucket_group=force_single_bucket_group,
            reduce_scatter_with_fp32_accumulation=reduce_scatter_with_fp32_accumulation,
        )
        groups.extend(BucketGroup(tuple(buckets[buffer][index] for buffer, index in group)) for group in partition)
    # A group can be reduced once its parameter nearest to the head of the model is done, so that decides its place.
    # Within a buffer this is Megatron's order. Zero-sized models have no bucket.
    groups.sort(key=lambda group: -min(group.params))
    owners: list[int] | None = None
    if owned_whole and not sharded:
        owners = [0] * len(params)
        for is_expert, size in ((False, dp_size), (True, expert_dp_size)):
            for param, rank in ping_pong_ownership(params, size, is_expert=is_expert).owners.items():
                owners[param] = rank
    return BucketPlan(
        params=tuple(params),
        layouts=layouts,
        groups=tuple(groups),
        dp_size=dp_size,
        expert_dp_size=expert_dp_size,
        sharded=sharded,
        aligned=sharded or not dense,
        owners=tuple(owners) if owners is not None else None,
    )


def _layout_of(
    group: ParamGroup,
    params: Sequence[ParamSpec],
    *,
    dp_size: int,
    sharded: bool,
    dense: bool,
    bucket_size: BucketSize,
    pad_for_high_busbw: bool,
) -> BufferLayout:
    if sharded and group.key.is_managed_by_layer_wise_optimizer:
        return compute_layerwise_layout(
            group, params, dp_size=dp_size, bucket_size=bucket_size, pad_for_high_busbw=pad_for_high_busbw
        )
    policy = layout_policy(
        [params[index] for index in group.params],
        dp_size=dp_size,
        sharded=sharded,
        dense=dense,
        pad_for_high_busbw=pad_for_high_busbw,
    )
    return compute_buffer_layout(group, params, policy=policy, bucket_size=bucket_size)


def layout_policy(
    params: Sequence[ParamSpec], *, dp_size: int, sharded: bool, dense: bool, pad_for_high_busbw: bool
) -> LayoutPolicy:
    """Alignment of a buffer that holds ``params``, unless it is the sharded one of a layer-wise optimizer."""
    if not sharded:
        return LayoutPolicy.dense() if dense else LayoutPolicy.aligned()
    packed = any(param.quantized == "nvfp4" for param in params)
    return LayoutPolicy.sharded(dp_size, pad_for_high_busbw=pad_for_high_busbw, packed=packed)


def _buckets_of(buffer: int, layout: BufferLayout) -> list[Bucket]:
    members: list[list[int]] = [[] for _ in layout.buckets]
    for param, slot in reversed(list(zip(layout.params, layout.slots))):
        members[slot.bucket].append(param)
    return [
        Bucket(buffer, index, start, end, layout.unpadded[index], tuple(members[index]))
        for index, (start, end) in enumerate(layout.buckets)
    ]


@dataclass(frozen=True, slots=True)
class GraphParam:
    """A graph input that is a parameter of an attached model."""

    handle: int
    """Registry id of the buffers (``runtime/ops.py``)."""
    param: int
    """Index into that model's specs."""
    group: int
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Of ``main_grad``, which has the parameter's memory format."""
    grad_dtype: torch.dtype
    buffer: int
    start: int
    """First element in the buffer."""
    whole_buffer: bool
    """Its view may be misaligned, so the graph takes the whole buffer and slices it (dense layout)."""
    dtype: torch.dtype = torch.float32
    """Of the parameter."""
    quantized: str | None = None
    """Its format, when graphs read codes and scales instead of it."""
    is_hooked: bool = False
    """A hook of the user waits for its gradient, so the graph hands that out instead of writing it."""

    @property
    def key(self) -> tuple[int, int]:
        """Bucket group, as ``(handle, group)``."""
        return (self.handle, self.group)


Write = Literal["overwrite", "accumulate", "flagged"]
"""What a compiled backward does with what ``main_grad`` holds."""


@dataclass(frozen=True, slots=True)
class Role:
    """What one compiled variant of a backward graph does with its gradients. Nothing is decided inside a graph.

    ``write`` is None for plain gradients (``torch.autograd.grad``); ``flagged`` overwrites or accumulates as a number
    on the device says, for graphs that are captured once and replayed for every micro-batch. ``launches`` are the
    bucket groups, as ``(handle, group)`` in launch order, whose reduction starts inside the graph; an empty tuple is
    Megatron's ``no_sync``, or a host that launches by itself.
    """

    write: Write | None
    launches: tuple[tuple[int, int], ...] = ()

    @property
    def name(self) -> str:
        if self.write is None:
            return "untouched"
        return f"{self.write}_{'sync' if self.launches else 'local'}"


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """How one traced graph maps to buffers: entry ``i`` belongs to graph input ``i``, None if it is not ours."""

    inputs: tuple[GraphParam | None, ...]
    covered: tuple[tuple[int, int], ...]
    """Bucket groups ``(handle, group)`` all of whose parameters are inputs of this graph, in launch order."""

    @property
    def params(self) -> tuple[GraphParam, ...]:
        return tuple(param for param in self.inputs if param is not None)

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """Every bucket group that has a parameter here, in launch order."""
        return tuple(sorted({param.key for param in self.params}))


@dataclass(frozen=True, slots=True)
class GraphWrites:
    """The parameters to which a backward produces a gradient, as every call of it needs them."""

    by_model: tuple[tuple[int, frozenset[int]], ...]
    """Handle id of each model, and the indices of its parameters."""
    groups: tuple[tuple[int, int], ...]
    """Their bucket groups ``(handle, group)``, sorted."""


def plan_writes(params: Iterable[GraphParam]) -> GraphWrites:
    """Arrange ``params`` by model and bucket group."""
    by_model: dict[int, list[int]] = {}
    groups: set[tuple[int, int]] = set()
    for param in params:
        by_model.setdefault(param.handle, []).append(param.param)
        groups.add(param.key)
    return GraphWrites(tuple((handle, frozenset(own)) for handle, own in by_model.items()), tuple(sorted(groups)))


def plan_graph(inputs: Sequence[GraphParam | None], bucket_plans: dict[int, BucketPlan]) -> GraphPlan:
    """Find the bucket groups that the graph with these inputs covers. ``bucket_plans`` maps handle id to plan."""
    present = {(param.handle, param.param) for param in inputs if param is not None and not param.is_hooked}
    covered = [
        (handle, index)
        for handle, plan in sorted(bucket_plans.items())
        for index, group in enumerate(plan.groups)
        if all((handle, param) in present for param in group.params)
    ]
    return GraphPlan(tuple(inputs), tuple(covered))
