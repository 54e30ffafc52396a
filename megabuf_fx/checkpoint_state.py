"""What of a model and its optimizer goes into a checkpoint, and under which names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megabuf_fx.flat_shard import FlatShard
from megabuf_fx.handle import find_handles
from megabuf_fx.optimizer import DistributedOptimizer
from megabuf_fx.optimizer_state import State, collect_plain, like, named_groups, plain_name
from megabuf_fx.runtime.flags import is_expert
from megabuf_fx.runtime.quantized_weights import QuantizedWeights


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by plain name; the tensors are the model's own, but for quantized parameters,
    which are dequantized."""
    state = model.state_dict()
    return {plain_name(name): value for name, value in state.items() if isinstance(value, Tensor)}


def quantized_params(model: nn.Module) -> dict[str, tuple[QuantizedWeights, int]]:
    """Quantized parameters by plain name: what stores each, and its index there."""
    found = {}
    for handle in find_handles(list(model.parameters())):
        weights = handle.buffers.weights
        if weights is None:
            continue
        for name, param in model.named_parameters(remove_duplicate=False):
            index = handle.buffers.index_of(param)
            if index is not None and index in weights:
                found[plain_name(name)] = (weights, index)
    return found


def scaling_state(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """What codes and scales depend on besides masters (fp8's delayed scaling), by plain name of the parameter."""
    return {name: weights.scaling_state(index) for name, (weights, index) in quantized_params(model).items()}


def first_names(model: nn.Module) -> dict[str, str]:
    """By plain name of a parameter, the first of its names: tied ones have several, state is under the first."""
    firsts: dict[int, str] = {}
    named = [(plain_name(name), param) for name, param in model.named_parameters(remove_duplicate=False)]
    return {name: firsts.setdefault(id(param), name) for name, param in named}


def saved_names(model: nn.Module) -> Callable[[str], str]:
    """What plain names of this rank's tensors are in a checkpoint: experts of one name are others on other ranks.

    Frozen experts and module buffers are marked as parameters are (``allreduce = False``).
    """
    ranks = [handle.expert_rank for handle in find_handles(list(model.parameters())) if handle.expert_rank is not None]
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    experts = {plain_name(name) for name, tensor in named if ranks and is_expert(tensor)}
    return lambda name: f"{name}@expert{ranks[0]}" if name in experts else name


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[State, list[dict[str, Any]]]:
    if isinstance(optimizer, DistributedOptimizer):
        state_dict = optimizer.state_dict()
        return state_dict["state"], state_dict["param_groups"]
    names = {id(param): plain_name(name) for name, param in model.named_parameters()}
    return collect_plain(optimizer, names), named_groups(model, optimizer)


def set_plain(optimizer: torch.optim.Optimizer, model: nn.Module, state: State, groups: list[dict[str, Any]]) -> None:
    params = {plain_name(name): param for name, param in model.named_parameters()}
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
    optimizer.load_state_dict(
        {
            "state": {
                numbers[name]: {
                    key: value.pieces[0].values.view(params[name].shape) if isinstance(value, FlatShard) else value
                    for key, value in entries.items()
                }
                for name, entries in state.items()
                if entries
            },
            "param_groups": [
                {**{k: like(own.get(k), v) for k, v in group.items()}, "params": [numbers[n] for n in group["params"]]}
                for group, own in zip(groups, optimizer.param_groups)
            ],
        }
    )
