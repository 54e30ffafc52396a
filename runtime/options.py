"""The part of the user's config that the running model needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeOptions:
    """What the running model needs of the user's config; fields as in ``MegabufConfig``."""

    overlap_grad_reduce: bool
    overlap_param_gather: bool
    align_param_gather: bool
    overlap_param_gather_with_optimizer_step: bool
    param_gather_prefetch: int | None
    find_unused_parameters: bool
    average_in_collective: bool
    calculate_per_token_loss: bool
    reduce_scatter_with_fp32_accumulation: bool
    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...]
    check_for_nan_in_grad: bool
    check_for_large_grads: bool
    check_for_drift_every: int | None
    debug_nan_stale_params: bool
    profile: bool
    dump_dir: str | None
    """Where ``profile`` writes."""
