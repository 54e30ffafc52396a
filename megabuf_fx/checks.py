"""What ``attach`` refuses, and how ranks compare what they attach."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

import megabuf_fx._compat as _compat
from megabuf_fx.config import MegabufConfig
from megabuf_fx.runtime.collectives import Comm
from megabuf_fx.runtime.layout import ParamSpec
from megabuf_fx.runtime.model_buffers import ModelBuffers

_WRAPPERS = (DistributedDataParallel, DataParallel, FullyShardedDataParallel, FSDPModule)

NamedParams = Sequence[tuple[str, nn.Parameter]]


def check_model(model: nn.Module, named: NamedParams, attached: Sequence[ModelBuffers]) -> None:
    """Refuse what contiguous buffers cannot hold. ``named`` are the trainable parameters.

    Raises:
        ValueError, NotImplementedError: as documented at ``attach``; the message names the parameter or module.
    """
    for name, module in model.named_modules():
        where = f"module '{name}'" if name else "the model"
        if isinstance(module, _WRAPPERS):
            raise NotImplementedError(
                f"{where} is already wrapped by {type(module).__name__}, which reduces gradients itself; "
                "attach the plain model instead"
            )
        if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(
                f"{where} makes sparse gradients ({type(module).__name__}(sparse=True)); contiguous buffers hold dense "
                "gradients only, build it with sparse=False"
            )
    if not named:
        raise ValueError(f"{type(model).__name__} has no trainable parameters; set requires_grad before attaching")
    devices = {param.device: name for name, param in named}
    if len(devices) > 1:
        listed = ", ".join(f"'{name}' on {device}" for device, name in devices.items())
        raise ValueError(f"parameters are on several devices ({listed}); move the model to one device before attaching")
    for name, param in named:
        _check_param(name, param)
        if any(buffers.index_of(param) is not None for buffers in attached):
            raise ValueError(
                f"parameter '{name}' is already attached; attach a model once, and call detach() before attaching again"
            )


def _check_param(name: str, param: nn.Parameter) -> None:
    if _compat.is_subclass_tensor(param):
        raise NotImplementedError(
            f"parameter '{name}' is a {type(param.data).__name__}; tensor-subclass parameters (DTensor, FSDP2, "
            "quantized) are not supported, attach before applying them or leave them out"
        )
    if param.is_complex():
        raise ValueError(f"parameter '{name}' is complex ({param.dtype}); store real and imaginary part separately")
    if not param.is_floating_point():
        raise ValueError(f"parameter '{name}' has dtype {param.dtype}; only floating-point parameters are trained")
    if param.layout != torch.strided:
        raise ValueError(f"parameter '{name}' has layout {param.layout}; only dense parameters are supported")
    if param.is_meta:
        raise NotImplementedError(f"parameter '{name}' is on the meta device; materialize the model before attaching")


def check_groups(
    specs: Sequence[ParamSpec],
    config: MegabufConfig,
    group: dist.ProcessGroup | None,
    expert_group: dist.ProcessGroup | None,
) -> None:
    """Refuse process groups that do not fit the parameters or each other.

    Raises:
        ValueError: expert parameters without their group, or a group without such; an expert group that is no part of
            the data-parallel group; optimizer instances that do not divide the ranks.
    """
    size = group.size() if group is not None else 1
    sizes = {"process_group": size}
    expert = next((spec.name for spec in specs if not spec.allreduce), None)
    if expert is not None and expert_group is None and size > 1:
        raise ValueError(
            f"parameter '{expert}' is an expert parameter (allreduce=False); pass the ranks that hold the same experts "
            "as attach(..., expert_process_group=...)"
        )
    if expert_group is not None:
        if expert is None:
            raise ValueError(
                "expert_process_group was passed, but no parameter has allreduce=False; set it on the experts' "
                "parameters before attaching"
            )
        sizes["expert_process_group"] = expert_group.size()
        ranks = dist.get_process_group_ranks(group) if group is not None else []
        outside = sorted(set(dist.get_process_group_ranks(expert_group)) - set(ranks))
        if outside or size % expert_group.size():
            raise ValueError(
                f"expert_process_group has ranks {dist.get_process_group_ranks(expert_group)}, which are no equal part "
                f"of the {size} ranks of process_group"
            )
    for name, ranks_in in sizes.items():
        if ranks_in % config.num_distributed_optimizer_instances:
            raise ValueError(
                f"num_distributed_optimizer_instances={config.num_distributed_optimizer_instances} does not divide the "
                f"{ranks_in} ranks of {name}"
            )


class _Answer(NamedTuple):
    """What a rank says of its model."""

    problem: str | None
    digest: str


def compare_ranks(
    comm: Comm, problem: str | None, error: Exception | None, specs: Sequence[ParamSpec], config: MegabufConfig
) -> None:
    """Check that every rank attaches an equal model with an equal config; an error on one rank reaches all.

    Digests are compared first; only when they differ are the full lists exchanged to find the first difference.

    Raises:
        ValueError: some rank was refused, or names, shapes, dtypes or config differ. This rank's own error is raised
            as it is.
    """
    # Where a rank writes its dumps is its own affair.
    lines = [
        f"config {dataclasses.replace(config, dump_dir=None, profile=False)!r}",
        *(f"parameter {spec!r}" for spec in specs),
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    answers = comm.all_gather_object((problem, digest))
    if error is not None:
        raise error
    parsed = [_Answer(*answer) for answer in answers if isinstance(answer, tuple)]
    for rank, answer in enumerate(parsed):
        if answer.problem is not None:
            raise ValueError(f"rank {rank} cannot attach its model: {answer.problem}")
    if len({answer.digest for answer in parsed}) == 1:
        return
    every = [answer for answer in comm.all_gather_object(lines) if isinstance(answer, list)]
    raise ValueError(f"ranks attach different models or configs: {_first_difference(every)}")


def _first_difference(every: Sequence[list[str]]) -> str:
    for position in range(max(len(lines) for lines in every)):
        values = [lines[position] if position < len(lines) else "nothing" for lines in every]
        for rank, value in enumerate(values):
            if value != values[0]:
                return f"rank 0 has {values[0]}, rank {rank} has {value}"
    return "no difference found in names, shapes, dtypes and config"
