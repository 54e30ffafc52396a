"""From a plan to the numbers of the ledger, exactly, and to who owns what."""

from __future__ import annotations

import math
from itertools import accumulate

import torch

from megabuf_fx.cli.ledger import FP32, BufferKind, Setup, Terms
from megabuf_fx.config import MegabufConfig
from megabuf_fx.runtime.buffers import find_promoted
from megabuf_fx.runtime.layout import BufferLayout, bucket_end_divisor, pad_to_divisor
from megabuf_fx.runtime.plan import BucketPlan
from megabuf_fx.runtime.quantized_formats import FORMATS
from megabuf_fx.runtime.shards import ShardRange, compute_shard_ranges
from megabuf_fx.runtime.stored_params import SLOT_ALIGNMENT


def setup_of(plan: BucketPlan, config: MegabufConfig, *, is_cut: bool = True) -> Setup:
    """What decides the formulas for this plan. ``is_cut``: there is a bucket threshold."""
    return Setup(
        buffers=tuple(_kind_of(plan, layout) for layout in plan.layouts),
        sharded=plan.sharded,
        is_cut=is_cut,
        has_instances=config.num_distributed_optimizer_instances > 1,
        reuses_grad_buffer=config.reuse_grad_buf_for_mxfp8_param_ag,
        sums_in_fp32=bool(find_promoted(plan, config.param_name_patterns_for_fp32_local_accumulation)),
        # A group of one reduces nothing.
        reduces_by_all_to_all=config.reduce_scatter_with_fp32_accumulation and plan.dp_size > 1,
    )


def _kind_of(plan: BucketPlan, layout: BufferLayout) -> BufferKind:
    first = plan.params[layout.params[0]]
    name = first.quantized or {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}.get(
        first.dtype, str(first.dtype).removeprefix("torch.")
    )
    return BufferKind(
        name=f"{name}_experts" if layout.key.is_expert_parallel else name,
        weight_bytes=first.dtype.itemsize,
        grad_bytes=layout.key.grad_dtype.itemsize,
        quantized=first.quantized,
        is_expert=layout.key.is_expert_parallel,
    )


def terms_of(plan: BucketPlan, config: MegabufConfig, *, dp_rank: int) -> tuple[Terms, ...]:
    """The numbers of each buffer; ``owned`` is what ``dp_rank`` owns exactly."""
    promoted = find_promoted(plan, config.param_name_patterns_for_fp32_local_accumulation)
    instances = config.num_distributed_optimizer_instances
    found = []
    for layout in plan.layouts:
        sizes = {param: plan.params[param].numel for param in layout.params}
        # A buffer has quantized parameters of one format, or none.
        stored = plan.params[layout.params[0]].quantized
        quantized = list(sizes.values()) if stored else []
        elements = sum(sizes.values())
        ranges = shard_ranges(plan, layout, dp_rank=dp_rank, instances=instances)
        found.append(
            Terms(
                P=elements,
                N=layout.numel,
                owned=sum(piece.numel for piece in ranges) if plan.sharded else elements,
                shards=plan.dp_size_of(layout.key),
                instances=instances,
                B=max((end - start for start, end in layout.buckets), default=0),
                M=sum(sizes[param] for param in layout.params if param in promoted),
                S=max(quantized, default=0),
                n=len(quantized),
                buckets=len(layout.buckets),
                C=sum(block_scale_slots(size, stored) for size in quantized),
                A=sum(block_amax_slots(size, stored) for size in quantized),
                H=config.fp8_amax_history_len,
                u=bucket_end_divisor(
                    plan.dp_size_of(layout.key),
                    pad_for_high_busbw=config.pad_buckets_for_high_nccl_busbw,
                    packed=stored == "nvfp4",
                ),
            )
        )
    return tuple(found)


def block_scale_slots(numel: int, stored: str | None) -> int:
    """Bytes of the slot for a parameter's block scales of one byte each (``stored_params.aligned_slots``)."""
    return pad_to_divisor(_blocks(numel, stored), SLOT_ALIGNMENT)


def block_amax_slots(numel: int, stored: str | None) -> int:
    """fp32 numbers that the ranks exchange for a parameter's block amaxes: of NVFP4, as MXFP8 needs none."""
    return pad_to_divisor(_blocks(numel, stored), SLOT_ALIGNMENT // FP32) if stored == "nvfp4" else 0


def _blocks(numel: int, stored: str | None) -> int:
    """Blocks of a parameter that have a scale of their own."""
    if stored not in ("mxfp8", "nvfp4"):
        return 0
    return -(-numel // math.prod(FORMATS[stored].divisors))


def shard_ranges(plan: BucketPlan, layout: BufferLayout, *, dp_rank: int, instances: int) -> tuple[ShardRange, ...]:
    """What data-parallel rank ``dp_rank`` owns of a sharded buffer.

    Instances are runs of neighbouring ranks. Of ``ep`` neighbours each has other experts, as in Megatron, so their
    group holds every ``ep``-th rank.
    """
    if not plan.sharded:
        return ()
    shards = plan.dp_size_of(layout.key)
    rank = dp_rank // (plan.dp_size // shards) if layout.key.is_expert_parallel else dp_rank
    return compute_shard_ranges(layout, dp_size=shards, dp_rank=rank % shards)


def owned_by_rank(layout: BufferLayout, *, dp_size: int) -> list[int]:
    """Parameter elements, without padding, that each of ``dp_size`` ranks owns of a buffer.

    Equal to the sums of ``compute_shard_ranges`` over all ranks, in time proportional to parameters plus ranks.
    """
    # A parameter gives its inner ranks a whole shard each: that is added to a run of ranks at once (by differences).
    edges = [0] * dp_size
    steps = [0] * (dp_size + 1)
    for slot in layout.slots:
        start, end = layout.buckets[slot.bucket]
        shard = (end - start) // dp_size
        if slot.start == slot.end:
            continue
        low, high = slot.start - start, slot.end - start
        first, last = low // shard, (high - 1) // shard
        if first == last:
            edges[first] += high - low
            continue
        edges[first] += (first + 1) * shard - low
        edges[last] += high - last * shard
        steps[first + 1] += shard
        steps[last] -= shard
    return [edge + inner for edge, inner in zip(edges, accumulate(steps))]


def owner_ranks(layout: BufferLayout, *, dp_size: int) -> dict[int, tuple[int, int]]:
    """First and last rank that own a part of each parameter that has elements, by its index."""
    owners = {}
    for param, slot in zip(layout.params, layout.slots):
        start, end = layout.buckets[slot.bucket]
        shard = (end - start) // dp_size
        if slot.start < slot.end:
            owners[param] = ((slot.start - start) // shard, (slot.end - 1 - start) // shard)
    return owners
