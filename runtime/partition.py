"""Which buckets share a bucket group: Megatron ``partition_buckets`` (semantics §4), as a pure function.

    no quantized buffer     one group per bucket
    a quantized buffer      one group per quantized bucket; the last takes every other bucket with it, because those
                            are small (norms, biases) and a collective of their own would cost a launch each
    force_single_bucket_group   one group

With ``reduce_scatter_with_fp32_accumulation`` the last quantized bucket stays alone: Megatron's transport takes one
bucket per call. A forced single group wins over that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Partition = tuple[tuple[tuple[int, int], ...], ...]
"""Groups of ``(buffer, bucket)``."""


def partition_buckets(
    buffers: Sequence[tuple[torch.dtype, int]],
    *,
    force_single_bucket_group: bool = False,
    reduce_scatter_with_fp32_accumulation: bool = False,
) -> Partition:
    """Group the buckets of buffers that one process group reduces. ``buffers`` holds ``(param_dtype, buckets)`` each.

    Raises:
        ValueError: more than one quantized (uint8) buffer.
    """
    quantized = [number for number, (dtype, _) in enumerate(buffers) if dtype == torch.uint8]
    if len(quantized) > 1:
        raise ValueError(f"buffers {quantized} are all quantized (uint8); one process group can reduce only one such")
    every = [(number, bucket) for number, (_, count) in enumerate(buffers) for bucket in range(count)]
    if force_single_bucket_group:
        return (tuple(every),) if every else ()
    if not quantized or not buffers[quantized[0]][1]:
        return tuple((bucket,) for bucket in every)
    first = [bucket for bucket in every if bucket[0] == quantized[0]]
    others = [bucket for bucket in every if bucket[0] != quantized[0]]
    if reduce_scatter_with_fp32_accumulation:
        return tuple((bucket,) for bucket in [*first, *others])
    return (*((bucket,) for bucket in first[:-1]), (first[-1], *others))
