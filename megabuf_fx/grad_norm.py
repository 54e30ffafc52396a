"""Norms and checks of the gradients that this rank's optimizer updates, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megabuf_fx.model_parallel import ModelParallelGroups
from megabuf_fx.runs import Run
from megabuf_fx.runtime.model_buffers import ModelBuffers
from megabuf_fx.runtime.ops import all_reduce_

NORM_CHUNK = 2**16
"""Elements summed at once for the gradient norm."""


def total_norm(
    buffers: ModelBuffers, runs: Sequence[Run], norm_type: float, counted: Sequence[bool] | None = None
) -> Tensor:
    """Norm of all parameters' gradients, 0-dim fp32, equal on all data-parallel ranks; one reduction. Padding is in no
    run.

    Expert gradients count once for each set of experts. ``counted`` leaves out parameters, one flag for each.
    """
    is_expert = [layout.key.is_expert_parallel for layout in buffers.plan.layouts]
    dense, expert = (
        _local_norm(
            buffers,
            [grad for run in runs if is_expert[run.buffer] is kind for grad in _counted_grads(run, counted)],
            norm_type,
        )
        for kind in (False, True)
    )
    if norm_type == float("inf"):
        return _all_reduce(buffers, torch.maximum(dense, expert), maximum=True)
    dense, expert = dense.pow(norm_type), expert.pow(norm_type)
    if buffers.plan.is_gathered:
        return _all_reduce(buffers, dense + expert, maximum=False).pow(1.0 / norm_type)
    if any(is_expert):
        # Every rank has all of its gradients; the same experts are on as many ranks as share them.
        expert = _all_reduce(buffers, expert / buffers.comms.full_size(is_expert=True), maximum=False)
    return (dense + expert).pow(1.0 / norm_type)


def _counted_grads(run: Run, counted: Sequence[bool] | None) -> Sequence[Tensor]:
    if counted is None or all(counted[param] for param, _ in run.pieces):
        return [run.flat_grad]
    grads = run.flat_grad.split([numel for _, numel in run.pieces])
    return [grad for (param, _), grad in zip(run.pieces, grads) if counted[param]]


def total_over_axes(norms: Sequence[Tensor], norm_type: float, groups: ModelParallelGroups | None) -> Tensor:
    """One norm of those of several models, over tensor-parallel ranks and pipeline stages."""
    if len(norms) == 1 and groups is None:
        return norms[0]
    is_maximum = norm_type == float("inf")
    stacked = torch.stack(list(norms))
    total = stacked.max() if is_maximum else stacked.pow(norm_type).sum()
    if groups is not None:
        for name in ("tp", "pp"):
            total = groups.reduce(name, total, "the gradient norm", "max" if is_maximum else "sum")
    return total if is_maximum else total.pow(1.0 / norm_type)


def found_inf(buffers: ModelBuffers, runs: Sequence[Run], groups: ModelParallelGroups | None = None) -> Tensor:
    """Whether a reduced gradient is not finite on any rank: 0-dim bool, still on the device."""
    finite = [run.grad.isfinite().all() for run in runs]
    device = buffers.token.device
    local = torch.stack(finite).logical_not().any() if finite else torch.zeros((), dtype=torch.bool, device=device)
    found = _all_reduce(buffers, local.to(torch.uint8), maximum=True)
    for name in ("tp", "pp") if groups is not None else ():
        assert groups is not None
        found = groups.reduce(name, found, "the check for NaN and Inf", "max")
    return found.bool()


def not_finite(buffers: ModelBuffers, runs: Sequence[Run]) -> list[str]:
    """Names of parameters whose reduced gradient is not finite, over all ranks: the first five and how many more."""
    params = buffers.plan.params
    mine = [
        params[param].name
        for run in runs
        for (param, _), grad in zip(run.pieces, run.flat_grad.split([numel for _, numel in run.pieces]))
        if not bool(grad.isfinite().all())
    ]
    answers = buffers.comm.all_gather_object(mine)
    found = {name for answer in answers if isinstance(answer, list) for name in answer}
    listed = [f"'{spec.name}'" for spec in reversed(params) if spec.name in found]
    return [*listed[:5], f"{len(listed) - 5} more"] if len(listed) > 5 else listed


def scale_grads(grads: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply in place; no gradients are fine."""
    if grads:
        torch._foreach_mul_(list(grads), factor)


def _all_reduce(buffers: ModelBuffers, value: Tensor, *, maximum: bool) -> Tensor:
    """``value`` over all ranks; overwritten."""
    all_reduce_(value, buffers.handle, maximum)
    return value


def _local_norm(buffers: ModelBuffers, grads: Sequence[Tensor], norm_type: float) -> Tensor:
    # In chunks: the fp32 norm of one long run loses digits on the CPU (1e-4 relative at 5M elements).
    chunks = [chunk for grad in grads for chunk in grad.split(NORM_CHUNK)]
    if not chunks:
        return torch.zeros((), device=buffers.token.device)
    norms = torch.stack(torch._foreach_norm(chunks, norm_type, dtype=torch.float32))
    norm: Tensor = torch.linalg.vector_norm(norms, norm_type)
    return norm
