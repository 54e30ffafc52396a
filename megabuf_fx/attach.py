"""``attach``: give a model its buffers. Everything that can be refused is refused here, on every rank."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import megabuf_fx._compat as _compat
from megabuf_fx.auto_buckets import BucketChoice, choose_buckets
from megabuf_fx.checks import check_groups, check_model, compare_ranks
from megabuf_fx.config import MegabufConfig
from megabuf_fx.handle import MegabufHandle, live_handles
from megabuf_fx.nccl_memory import check_nccl_ub, make_memory
from megabuf_fx.planning import plan_model
from megabuf_fx.quantization import mark_quantized, store_maker
from megabuf_fx.rates import find_rates
from megabuf_fx.runtime.collectives import Comm
from megabuf_fx.runtime.flags import is_embedding_or_output, spec_of
from megabuf_fx.runtime.layerwise_layout import tag_layer_wise
from megabuf_fx.runtime.layout import ParamSpec, default_bucket_size
from megabuf_fx.runtime.model_buffers import ModelBuffers
from megabuf_fx.runtime.options import RuntimeOptions
from megabuf_fx.runtime.plan import BucketPlan
from megabuf_fx.runtime.transports import CommPair, Communicators, make_comm_pair
from megabuf_fx.traced_step import TracedStep, check_example_inputs, trace_model

Trace = Callable[[Sequence[nn.Parameter], MegabufConfig], TracedStep]
"""From the trainable parameters to their backward."""

log = logging.getLogger("megabuf_fx.attach")


def attach(
    model: nn.Module,
    config: MegabufConfig | None = None,
    *,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    expert_process_group: dist.ProcessGroup | DeviceMesh | None = None,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
) -> MegabufHandle:
    """Move the trainable parameters' gradients (and, sharded, their values) into contiguous buffers.

    Collective: every rank of ``process_group`` (default: the world) must call it with an equal model and config.
    Without an initialized process group the model trains alone. Parameters with ``allreduce = False`` are experts (as
    in Megatron): they have buffers of their own, reduced over ``expert_process_group``, the ranks of ``process_group``
    that hold the same experts.

    ``example_inputs`` is for ``bucket_size="auto"`` and unused otherwise: arguments of the model's forward, a sequence
    of positional or a mapping of keyword ones, with shapes and dtypes of training; values do not matter. A copy of the
    model without memory is traced with them, in the mode and under the autocast of this call. The first rank decides
    where buckets end, with the slowest rank's rates.

    Raises:
        TypeError: ``model`` is no module, ``config`` no ``MegabufConfig``, or ``example_inputs`` no arguments.
        ValueError: no trainable parameters, complex ones, several devices, attached twice, a rank outside of the group,
            expert parameters without their group, optimizer instances that do not divide the ranks, no weight that
            can be quantized where that is wanted, ranks that differ (the message names the first difference), or
            ``bucket_size="auto"`` without ``example_inputs`` or with a model that cannot be traced.
        NotImplementedError: models wrapped by DDP or FSDP2, tensor-subclass or meta parameters.
        RuntimeError: several processes were started but ``torch.distributed`` is not initialized.
    """

    def trace(params: Sequence[nn.Parameter], config: MegabufConfig) -> TracedStep:
        return trace_model(
            model, check_example_inputs(example_inputs), use_decompositions=config.inner_compiler == "inductor"
        )

    model = _compat.unwrap_compiled(model)
    if example_inputs is not None:
        check_example_inputs(example_inputs)
    return attach_traced(
        model, config, process_group=process_group, expert_process_group=expert_process_group, trace=trace
    )


def attach_traced(
    model: nn.Module,
    config: MegabufConfig | None,
    *,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    expert_process_group: dist.ProcessGroup | DeviceMesh | None = None,
    trace: Trace,
) -> MegabufHandle:
    """``attach`` with another way to trace a step, which is done for ``bucket_size="auto"`` only."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach takes a torch.nn.Module, got {type(model).__name__}")
    config = MegabufConfig() if config is None else config
    if not isinstance(config, MegabufConfig):
        raise TypeError(f"config must be a MegabufConfig, got {type(config).__name__}")
    config = config.with_environment()
    group = _resolve_group(process_group)
    expert_group = _resolve_group(expert_process_group) if expert_process_group is not None else None
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    problem: str | None = None
    error: Exception | None = None
    specs: list[ParamSpec] = []
    traced: TracedStep | None = None
    try:
        check_model(model, named, [handle.buffers for handle in live_handles()])
        specs = [spec_of(name, param) for name, param in named]
        if config.layer_wise_optimizer:
            specs = _mark_layer_wise(model, named, specs)
        specs = mark_quantized(model, specs, config)
        check_groups(specs, config, group, expert_group)
        check_nccl_ub(config, named[0][1].device, group)
        if config.chooses_buckets:
            traced = trace([param for _, param in named], config)
    except (ValueError, NotImplementedError) as caught:
        # A rank whose model is refused tells the others first, so that none of them waits.
        problem, error = str(caught), caught
    timeout = _compat.group_timeout(group) if group is not None else None
    dense = make_comm_pair(group, name="megabuf", timeout=timeout)
    try:
        compare_ranks(dense.grads, problem, error, specs, config)
    except (ValueError, NotImplementedError):
        dense.close()
        raise
    comms = _make_communicators(dense, config, specs, group, expert_group, timeout)
    if config.init_sync:
        for tensor in [*model.parameters(), *model.buffers()]:
            is_expert = comms.expert is not None and not getattr(tensor, "allreduce", True)
            comms.pair(is_expert=is_expert).params.broadcast(tensor.detach())
    plan_of = partial(
        plan_model,
        config,
        specs,
        dp_size=comms.full_size(is_expert=False),
        expert_dp_size=comms.full_size(is_expert=True) if comms.expert is not None else None,
    )
    choice = _choose_buckets(traced, plan_of, config, comms, named[0][1], group) if traced is not None else None
    plan = plan_of(bucket_size=choice.ends if choice is not None else None)
    if not plan.is_gathered:
        # Nothing is gathered; they have served the broadcast.
        comms.close_params()
    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(RuntimeOptions)}
    make_store = store_maker(config, plan) if config.quantization is not None else None
    rank = dist.get_rank() if dist.is_initialized() else 0
    buffers = ModelBuffers(
        plan,
        [param for _, param in named],
        comms,
        RuntimeOptions(**options),
        make_store,
        make_memory(config, named[0][1].device, comms),
        rank=rank,
        is_profiling=_compat.is_profiling,
        version_of=_compat.version_of,
    )
    log.info("attached %s with %s: %d buckets", type(model).__name__, config, len(plan.groups))
    return MegabufHandle(model, config, plan, buffers, group, _expert_rank(comms.dense.grads, expert_group), choice)


def _choose_buckets(
    traced: TracedStep,
    plan_of: Callable[..., BucketPlan],
    config: MegabufConfig,
    comms: Communicators,
    like: nn.Parameter,
    group: dist.ProcessGroup | None,
) -> BucketChoice:
    """The first rank's choice, on every rank."""
    comm = comms.dense.grads
    device, link = find_rates(config, comm, like.detach())
    choice: BucketChoice | None = None
    if group is None or group.rank() == 0:
        choice = choose_buckets(
            traced,
            device,
            link,
            config=config,
            default_size=default_bucket_size(comms.full_size(is_expert=False)),
            plan_of=lambda size: plan_of(bucket_size=size),
        )
        log.info("bucket_size='auto': %s", choice)
    (agreed,) = (answer for answer in comm.all_gather_object(choice) if isinstance(answer, BucketChoice))
    return agreed


def _mark_layer_wise(
    model: nn.Module, named: Sequence[tuple[str, nn.Parameter]], specs: Sequence[ParamSpec]
) -> list[ParamSpec]:
    embeddings = {
        id(param)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for param in module.parameters(recurse=False)
    }
    excluded = {name for name, param in named if id(param) in embeddings or is_embedding_or_output(param)}
    marked = tag_layer_wise(specs, embedding_or_output=excluded)
    # What the user says of a parameter counts more than the rule.
    said = [getattr(param, "is_managed_by_layer_wise_optimizer", None) for _, param in named]
    return [
        spec if value is None else dataclasses.replace(spec, is_managed_by_layer_wise_optimizer=bool(value))
        for spec, value in zip(marked, said)
    ]


def _expert_rank(comm: Comm, expert_group: dist.ProcessGroup | None) -> int | None:
    """Expert groups are numbered by their first ranks."""
    if expert_group is None:
        return None
    first = min(dist.get_process_group_ranks(expert_group))
    return sorted({answer for answer in comm.all_gather_object(first) if isinstance(answer, int)}).index(first)


def _make_communicators(
    dense: CommPair,
    config: MegabufConfig,
    specs: Sequence[ParamSpec],
    group: dist.ProcessGroup | None,
    expert_group: dist.ProcessGroup | None,
    timeout: timedelta | None,
) -> Communicators:
    """``dense`` joins all ranks; several optimizer instances take its place by communicators inside and across."""
    instances = config.num_distributed_optimizer_instances
    if instances > 1:
        dense.close()
        dense = make_comm_pair(group, name="megabuf", timeout=timeout, instances=instances)
    if all(spec.allreduce for spec in specs):
        return Communicators(dense, None, instances)
    expert = make_comm_pair(expert_group, name="megabuf_expert", timeout=timeout, instances=instances)
    return Communicators(dense, expert, instances)


def _resolve_group(process_group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """The process group meant, None for a single process."""
    if process_group is None:
        if dist.is_available() and dist.is_initialized():
            return dist.group.WORLD
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RuntimeError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but torch.distributed is not initialized; call "
                "torch.distributed.init_process_group() before attach, or each process would train alone"
            )
        return None
    if isinstance(process_group, DeviceMesh):
        if process_group.ndim != 1:
            raise ValueError(
                f"process_group is a {process_group.ndim}-dimensional DeviceMesh {process_group}; pass the "
                "data-parallel axis, for example mesh['dp']"
            )
        return process_group.get_group()
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(
            f"process_group must be a ProcessGroup or DeviceMesh of which this rank is a member, got {process_group!r}"
        )
    return process_group
