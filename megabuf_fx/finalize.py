"""``finalize_model_grads``: what is left to do to gradients after the last backward of a step, over all axes.

Megatron-LM ``finalize_model_grads.py`` (semantics §15). Which parameters ranks have copies of is said by attributes
(``AxisFlags``), set before ``attach``.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import megabuf_fx._compat as _compat
from megabuf_fx.axis_grads import AxisGrad, AxisSum, find_cut_differently, first_difference, reduce_copies
from megabuf_fx.handle import MegabufHandle, find_handles, live_handles
from megabuf_fx.model_parallel import ModelParallelGroups
from megabuf_fx.runtime.flags import axis_flags

BiasUpdate = Callable[[Tensor, Tensor], Tensor]
"""``update(tokens, bias)``: the new bias of one router's experts. ``tokens`` (``[experts]``) is how many tokens each
got on all ranks together since the last call, ``bias`` the old bias. Must be a function of these alone."""


@runtime_checkable
class BiasedRouter(Protocol):
    """A module whose choice of experts is balanced by a bias instead of a loss (Megatron's ``TopKRouter``)."""

    training: bool
    expert_bias: Tensor
    """``[experts]``; not trained."""
    local_tokens_per_expert: Tensor
    """``[experts]``; the module counts into it, and ``finalize_model_grads`` zeroes it."""


def bias_by_sign(rate: float) -> BiasUpdate:
    """Raise the bias of experts with less than the average load by ``rate``, lower that of the others (Megatron
    ``get_updated_expert_bias``, ``moe_router_bias_update_rate``)."""

    def update(tokens: Tensor, bias: Tensor) -> Tensor:
        return bias + torch.sign(tokens.sum() / tokens.numel() - tokens) * rate

    return update


class _Chunk(NamedTuple):
    """One of the models that this rank trains; None for one that is not attached."""

    model: nn.Module
    handle: MegabufHandle | None


@torch.no_grad()
def finalize_model_grads(
    handles_or_models: MegabufHandle | nn.Module | Iterable[MegabufHandle | nn.Module],
    num_tokens: Tensor | None = None,
    *,
    groups: ModelParallelGroups,
    force_all_reduce: bool = False,
    sum_over_tp: Sequence[str] = (),
    update_expert_bias: BiasUpdate | None = None,
) -> None:
    """Complete the gradients of a step, after its last backward and before clipping and ``step``.

    Every rank of the job calls it, once per step, with its model chunks in order. It

    1. finishes every chunk's reductions (``finish_grad_sync``),
    2. sums gradients of copies over pipeline stages: ``pipeline_parallel`` parameters,
    3. then ``flextron_router_pp_sync`` ones; copies in several chunks are summed first,
    4. sums over tensor-parallel ranks: ``sequence_parallel`` parameters and those of ``sum_over_tp``; then averages
       ``average_gradients_across_tp_domain`` ones, which are in no sum,
    5. sums over the stages that share them: the ``shared_embedding``, then ``shared_position_embedding``,
    6. updates the bias of every ``BiasedRouter`` in training mode, and zeroes the counts of all of them,
    7. divides all gradients by the number of tokens.

    Gradients are ``main_grad``, of parameters in no buffer ``.grad``. See [Note: what a rank owns of a copy] in
    ``axis_grads.py``.

    Args:
        handles_or_models: what ``attach`` returned or got, or a list of such, one for each model chunk. Models that are
            not attached must be reduced already.
        num_tokens: tokens of this rank's part of the step, one element; what the last pipeline stage says counts.
            Becomes the number of all data-parallel ranks. Needs ``calculate_per_token_loss=True``.
        force_all_reduce: as in ``finish_grad_sync``.
        sum_over_tp: shell patterns of names of further parameters that are summed over ``tp``, such as
            ``("*q_layernorm*", "*k_layernorm*")``.
        update_expert_bias: see ``BiasUpdate``; ``bias_by_sign(rate)`` is Megatron's. None leaves routers alone.

    Raises:
        ValueError: a group that is needed is not given; ranks have other copies, or own other parts of them. Before
            this call sends any gradient, and on all ranks of ``tp`` and ``pp``.
        RuntimeError: called twice in a step; else as ``finish_grad_sync``.
    """
    is_one = isinstance(handles_or_models, MegabufHandle | nn.Module)
    chunks = [_chunk_of(one) for one in ([handles_or_models] if is_one else list(handles_or_models))]  # type: ignore[arg-type]
    handles = [chunk.handle for chunk in chunks if chunk.handle is not None]
    _refuse_repetition(handles)
    sums = list(_sums(chunks, sum_over_tp, force_all_reduce=force_all_reduce))
    problem = _find_missing(sums, groups, handles, num_tokens, update_expert_bias)
    problem = problem or _find_unfit(sums, groups, handles, num_tokens)
    _agree(sums, groups, handles, problem)
    for handle in handles:
        handle.finish_grad_sync(force_all_reduce=force_all_reduce)
        handle.buffers.access.require_gradients("finalize_model_grads uses gradients")
    used = {id(handle.buffers): handle.buffers.used_params() for handle in handles}
    for axis_sum in sums:
        for grad in (grad for same in axis_sum.copies for grad in same):
            grad.note_usage(used)
    for axis_sum in sums:
        reduce_copies(axis_sum, groups)
    if update_expert_bias is not None:
        _update_expert_biases(chunks, groups, update_expert_bias)
    for module in (module for chunk in chunks for module in chunk.model.modules()):
        reset = getattr(module, "reset_global_aux_loss_tracker", None)
        if callable(reset):
            reset()
    if num_tokens is not None:
        _divide_by_tokens(chunks, groups, num_tokens)
    for handle in handles:
        handle.buffers.state.is_finalized = True


def _chunk_of(given: object) -> _Chunk:
    if isinstance(given, MegabufHandle):
        return _Chunk(given.model, given)
    if not isinstance(given, nn.Module):
        raise TypeError(f"finalize_model_grads takes handles or models, got {type(given).__name__}")
    model = _compat.unwrap_compiled(given)
    for handle in live_handles():
        if handle.model is model:
            return _Chunk(model, handle)
    if find_handles(list(model.parameters())):
        raise ValueError(f"{type(model).__name__} shares parameters with an attached model; pass that one")
    return _Chunk(model, None)


def _refuse_repetition(handles: Sequence[MegabufHandle]) -> None:
    if len(set(map(id, handles))) < len(handles):
        raise ValueError("finalize_model_grads got the same model twice")
    if any(handle.buffers.state.is_finalized for handle in handles):
        raise RuntimeError(
            "finalize_model_grads was called twice in one step, which would sum gradients over other axes twice; call "
            "zero_grad() after every step"
        )


def _is_named(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _grads(chunks: Sequence[_Chunk], patterns: Sequence[str], *, force_all_reduce: bool) -> Iterator[AxisGrad]:
    """Of every parameter that is trained and of which other ranks have copies, once."""
    seen: set[int] = set()
    for chunk in chunks:
        for name, param in chunk.model.named_parameters():
            is_copy = axis_flags(param).is_copy or _is_named(name, patterns)
            if param.requires_grad and is_copy and id(param) not in seen:
                seen.add(id(param))
                buffers = chunk.handle.buffers if chunk.handle is not None else None
                if buffers is not None and buffers.index_of(param) is None:
                    buffers = None
                yield AxisGrad(name, param, buffers, force_all_reduce=force_all_reduce)


def _sums(chunks: Sequence[_Chunk], patterns: Sequence[str], *, force_all_reduce: bool) -> Iterator[AxisSum]:
    """Everything that is summed over other axes, in order; the same list on every rank, some entries empty."""
    grads = list(_grads(chunks, patterns, force_all_reduce=force_all_reduce))
    for what, flag in (
        ("gradients of pipeline_parallel parameters", "pipeline_parallel"),
        ("gradients of flextron_router_pp_sync parameters", "flextron_router_pp_sync"),
    ):
        by_name: dict[str, list[AxisGrad]] = {}
        for grad in grads:
            if getattr(grad.flags, flag):
                by_name.setdefault(grad.name, []).append(grad)
        yield AxisSum(what, "pp", list(by_name.values()))
    averaged = [[grad] for grad in grads if grad.flags.average_gradients_across_tp_domain]
    summed = [
        [grad]
        for grad in grads
        if not grad.flags.average_gradients_across_tp_domain
        and (grad.flags.sequence_parallel or _is_named(grad.name, patterns))
    ]
    yield AxisSum("gradients of sequence_parallel parameters", "tp", summed)
    yield AxisSum("gradients of average_gradients_across_tp_domain parameters", "tp", averaged, is_average=True)
    # The flag also gives a parameter its own bucket, which other copies may want.
    words = [
        [grad]
        for grad in grads
        if grad.flags.shared_embedding and not grad.flags.is_pipeline_copy and not grad.flags.shared_position_embedding
    ]
    yield AxisSum("word embedding gradients", "embd", words, has_names=False)
    positions = [[grad] for grad in grads if grad.flags.shared_position_embedding]
    yield AxisSum("position embedding gradients", "pos_embd", positions, has_names=False)


def _find_missing(
    sums: Sequence[AxisSum],
    groups: ModelParallelGroups,
    handles: Sequence[MegabufHandle],
    num_tokens: Tensor | None,
    update_expert_bias: BiasUpdate | None,
) -> str | None:
    """A group that is needed and not given; a single process needs none."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    needed = {axis_sum.group: f"for {axis_sum.what} ({axis_sum.names})" for axis_sum in sums if axis_sum.copies}
    for name in ("embd", "pos_embd"):
        # Without other stages the embedding is tied within this one, and autograd sums.
        if groups.size("pp") == 1 and not groups.is_given(name):
            needed.pop(name, None)
    if num_tokens is not None:
        needed["dp_cp"] = "for num_tokens"
    if update_expert_bias is not None:
        needed["tp_dp_cp"] = "for update_expert_bias"
    if any(handle.config.pipeline_parallel_rank for handle in handles):
        needed.setdefault("pp", "for a model attached with pipeline_parallel_rank")
    for name, why in needed.items():
        if not groups.is_given(name):
            return f"finalize_model_grads needs ModelParallelGroups({name}=...) {why}"
        if groups.find(name) is None:
            return f"this rank is no member of the {name} group, which is needed {why}"
    return None


def _find_unfit(
    sums: Sequence[AxisSum], groups: ModelParallelGroups, handles: Sequence[MegabufHandle], num_tokens: Tensor | None
) -> str | None:
    """What is wrong with what was given."""
    for axis_sum in sums:
        if axis_sum.group in ("embd", "pos_embd") and groups.size(axis_sum.group) > 1 and len(axis_sum.copies) > 1:
            return f"{axis_sum.what}: one parameter is shared over {axis_sum.group}, but found {axis_sum.names}"
    for handle in handles:
        if groups.is_given("dp_cp") and groups.size("dp_cp") != handle.dp_size:
            return f"dp_cp has {groups.size('dp_cp')} ranks, but gradients are reduced over {handle.dp_size} (attach)"
        expert = handle.buffers.comms.expert
        if groups.is_given("expert") and expert is not None:
            size = handle.buffers.comms.full_size(is_expert=True)
            if groups.size("expert") != size:
                return f"expert has {groups.size('expert')} ranks, but experts are reduced over {size} (attach)"
        if num_tokens is not None and not handle.config.calculate_per_token_loss and handle.dp_size > 1:
            return (
                "num_tokens divides sums of gradients by the tokens of all ranks, but these are averages over ranks; "
                "attach with calculate_per_token_loss=True"
            )
    if num_tokens is not None and num_tokens.numel() != 1:
        return f"num_tokens must be one number, got shape {tuple(num_tokens.shape)}"
    return find_cut_differently(sums)


def _agree(
    sums: Sequence[AxisSum], groups: ModelParallelGroups, handles: Sequence[MegabufHandle], problem: str | None
) -> None:
    """Compare with the ranks of other axes, whenever what this rank has is new to it: in the first step.

    A rank with a problem tells the others, so that none of them waits; later, when nobody listens, it raises alone.
    """
    if problem is not None and any(handle.agreed for handle in handles):
        raise ValueError(problem)
    described = [axis_sum.describe() for axis_sum in sums]
    digest = hashlib.sha256(repr((described, groups)).encode()).hexdigest()
    if problem is None and handles and all(digest in handle.agreed for handle in handles):
        return
    # Members of the first two are some of the ranks; tp and pp tell the others.
    for name in ("embd", "pos_embd", "tp", "pp"):
        group = groups.find(name)
        if group is None or group.size() == 1:
            continue
        mine = [lines for lines, axis_sum in zip(described, sums) if axis_sum.group == name]
        answers: list[tuple[str | None, list[list[tuple[str, str]]]]] = [(None, [])] * group.size()
        dist.all_gather_object(answers, (problem, mine), group=group)
        for rank, (told, _) in enumerate(answers):
            if problem is None and told is not None:
                problem = told if told.startswith("rank ") else f"rank {rank} of {name}: {told}"
        if problem is None:
            here = [axis_sum for axis_sum in sums if axis_sum.group == name]
            problem = first_difference(here, name, [lines for _, lines in answers])
    if problem is not None:
        raise ValueError(problem)
    for handle in handles:
        handle.agreed.add(digest)


def _update_expert_biases(chunks: Iterable[_Chunk], groups: ModelParallelGroups, update: BiasUpdate) -> None:
    routers = [module for chunk in chunks for module in chunk.model.modules() if isinstance(module, BiasedRouter)]
    training = [router for router in routers if router.training]
    if training:
        tokens = [router.local_tokens_per_expert.flatten() for router in training]
        total = groups.reduce("tp_dp_cp", torch.cat(tokens), "the tokens of experts")
        for router, counted in zip(training, total.split([each.numel() for each in tokens])):
            router.expert_bias.copy_(update(counted.view_as(router.expert_bias), router.expert_bias))
    for router in routers:
        router.local_tokens_per_expert.zero_()


def _divide_by_tokens(chunks: Sequence[_Chunk], groups: ModelParallelGroups, num_tokens: Tensor) -> None:
    if groups.rank("pp") + 1 < groups.size("pp"):
        # The last stage has the labels; a sum with zeros is its broadcast.
        num_tokens.zero_()
    num_tokens.copy_(groups.reduce("pp", num_tokens, "the number of tokens"))
    num_tokens.copy_(groups.reduce("dp_cp", num_tokens, "the number of tokens"))
    factor = 1.0 / num_tokens.reshape(()).clamp(min=1)
    for chunk in chunks:
        if chunk.handle is not None:
            chunk.handle.scale_gradients(factor)
        for param in chunk.model.parameters():
            is_ours = chunk.handle is not None and chunk.handle.buffers.index_of(param) is not None
            if param.grad is not None and not is_ours:
                param.grad.mul_(factor)
