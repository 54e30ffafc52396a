"""From a config and the parameters of one rank to its plan; what ``attach`` does, without tensors or processes."""

from __future__ import annotations

from collections.abc import Sequence

from megabuf_fx.config import MegabufConfig
from megabuf_fx.runtime.layout import BucketEnds, BucketSize, ParamSpec, resolve_bucket_size
from megabuf_fx.runtime.plan import BucketPlan, plan_buckets


def bucket_threshold(config: MegabufConfig, specs: Sequence[ParamSpec], *, dp_size: int) -> int | None:
    """Elements after which a bucket closes, None for one bucket per buffer. ``dp_size`` counts all instances.

    Raises:
        ValueError: ``bucket_size`` is "auto", which is decided while a model is attached.
    """
    if config.disable_bucketing or config.pipeline_parallel_rank > 0:
        return None
    size = config.bucket_size
    if size == "auto":
        if config.chooses_buckets:
            raise ValueError("bucket_size='auto' is decided in attach, by a traced backward; give a number of elements")
        size = None
    return resolve_bucket_size(
        bucket_size=size,
        num_buckets=config.num_buckets,
        numel=sum(spec.numel for spec in specs),
        dp_size=dp_size,
        overlap_grad_reduce=config.overlap_grad_reduce,
    )


def plan_model(
    config: MegabufConfig,
    specs: Sequence[ParamSpec],
    *,
    dp_size: int,
    expert_dp_size: int | None = None,
    bucket_size: int | BucketEnds | None = None,
) -> BucketPlan:
    """The plan of trainable parameters ``specs`` (definition order).

    ``dp_size`` and ``expert_dp_size`` are the ranks over which gradients are averaged, all optimizer instances
    together; ``expert_dp_size`` is None without expert parameters. ``bucket_size``, elements or
    boundaries, stands in for the size that the config gives.
    """
    instances = config.num_distributed_optimizer_instances
    size: BucketSize = bucket_size
    if size is None:
        size = bucket_threshold(config, specs, dp_size=dp_size)
    return plan_buckets(
        specs,
        dp_size=dp_size // instances,
        expert_dp_size=expert_dp_size // instances if expert_dp_size is not None else None,
        sharded=config.use_distributed_optimizer,
        bucket_size=size,
        grad_reduce_in_fp32=config.grad_reduce_in_fp32,
        dense=config.dense_layout,
        pad_for_high_busbw=config.pad_buckets_for_high_nccl_busbw,
        force_single_bucket_group=config.disable_bucketing,
        reduce_scatter_with_fp32_accumulation=config.reduce_scatter_with_fp32_accumulation,
        owned_whole=config.layer_wise_optimizer,
    )
