"""The parameters of one rank of a tensor- and pipeline-parallel job, from the whole model.

[Note: what a rank holds]
The rules are Megatron-LM's for its own layers, applied by name to models that know nothing of them:

* ``pp`` stages divide the layer list (the ``ModuleList`` with most parameters) into equal runs. What is defined before
  it (embeddings) is on the first stage, what is defined after it (last norm, head) on the last. A head tied to the
  embedding is on both, marked ``shared_embedding``, when these are two stages.
* ``tp`` ranks divide column-parallel weights (query, key, value, gate, up, head) by output features, their biases too;
  row-parallel ones (attention output, down) by input features; embeddings by rows, after rounding the vocabulary up to
  a multiple of ``128 * tp``. Norms, position embeddings, routers and row-parallel biases are whole on every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from megabuf_fx.cli.errors import CliError
from megabuf_fx.quantization import linear_weights
from megabuf_fx.runtime.flags import spec_of
from megabuf_fx.runtime.layout import ParamSpec, pad_to_divisor

# What Hugging Face, Megatron, GPT-2 and the original Llama call their layers.
COLUMN_PARALLEL = {
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "query", "key", "value", "query_key_value"),
    *("wq", "wk", "wv", "wqkv", "c_attn", "linear_qkv"),
    *("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "c_fc", "fc1", "fc_in", "dense_h_to_4h", "linear_fc1"),
}
ROW_PARALLEL = {
    *("o_proj", "out_proj", "wo", "c_proj", "dense", "linear_proj"),
    *("down_proj", "w2", "fc2", "fc_out", "dense_4h_to_h", "linear_fc2"),
}
HEADS = {"lm_head", "embed_out", "output_layer"}
REPLICATED = {"gate", "router", "wpe", "position_embeddings", "embed_positions", "token_type_embeddings"}

VOCAB_DIVISOR = 128
"""Megatron ``make_vocab_size_divisible_by``."""


@dataclass(frozen=True, slots=True)
class RankParams:
    """Trainable parameters of one rank, in definition order."""

    specs: tuple[ParamSpec, ...]
    linear_weights: frozenset[str]
    """Names of those that could be quantized (``quantization.linear_weights``)."""


@dataclass(frozen=True, slots=True)
class _Owned:
    """A parameter and the module that holds it."""

    spec: ParamSpec
    module: nn.Module
    aliases: tuple[str, ...]
    """Further names of the same parameter."""


def params_of_rank(model: nn.Module, *, tp: int, pp: int, stage: int) -> RankParams:
    """What a rank of pipeline stage ``stage`` holds; see [Note: what a rank holds].

    Raises:
        CliError: no trainable parameters on it; layers, or a divided dim, that do not divide; a weight of unknown role.
    """
    owned = _owned_params(model)
    if pp > 1:
        owned = _params_of_stage(model, owned, pp=pp, stage=stage)
    if not owned:
        raise CliError(f"stage {stage} of {pp} has no trainable parameters")
    specs = [_divide(param, tp) if tp > 1 else param.spec for param in owned]
    # A head tied to the embedding is none of them, on either stage.
    return RankParams(tuple(specs), frozenset(linear_weights(model) & {spec.name for spec in specs}))


def _owned_params(model: nn.Module) -> list[_Owned]:
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return [
        _Owned(spec_of(name, param), model.get_submodule(name.rpartition(".")[0]), tuple(names[id(param)][1:]))
        for name, param in model.named_parameters()
        if param.requires_grad
    ]


def _params_of_stage(model: nn.Module, owned: Sequence[_Owned], *, pp: int, stage: int) -> list[_Owned]:
    prefix, layers = _find_layers(model)
    if len(layers) % pp:
        raise CliError(f"--pp {pp} does not divide the {len(layers)} layers of '{prefix.rstrip('.')}'")
    per_stage = len(layers) // pp
    first = next(index for index, param in enumerate(owned) if param.spec.name.startswith(prefix))

    def home(index: int) -> int:
        name = owned[index].spec.name
        if name.startswith(prefix):
            return int(name.removeprefix(prefix).split(".")[0]) // per_stage
        return 0 if index < first else pp - 1

    kept = [param for index, param in enumerate(owned) if home(index) == stage]
    for index, param in enumerate(owned):
        head = next((alias for alias in param.aliases if _role_name(alias) in HEADS), None)
        if head is None or home(index) != 0:
            continue
        if stage == 0:
            kept[kept.index(param)] = _shared(param, param.spec.name)
        elif stage == pp - 1:
            # Models define their head last.
            kept.append(_shared(param, head))
    return kept


def _shared(param: _Owned, name: str) -> _Owned:
    return dataclasses.replace(param, spec=dataclasses.replace(param.spec, name=name, shared_embedding=True))


def _find_layers(model: nn.Module) -> tuple[str, nn.ModuleList | nn.Sequential]:
    """The list of layers, with the prefix of its parameters' names."""
    lists = [
        (name, module) for name, module in model.named_modules() if isinstance(module, (nn.ModuleList, nn.Sequential))
    ]
    sizes = [sum(param.numel() for param in module.parameters()) for _, module in lists]
    if not sizes or not max(sizes):
        raise CliError("--pp needs a model with a list of layers (nn.ModuleList or nn.Sequential)")
    name, layers = lists[sizes.index(max(sizes))]
    return f"{name}." if name else "", layers


def _divide(param: _Owned, tp: int) -> ParamSpec:
    """The part of a parameter that one of ``tp`` ranks holds."""
    spec = param.spec
    dim = _divided_dim(param)
    if dim is None:
        return spec
    size = spec.shape[dim]
    is_vocabulary = isinstance(param.module, nn.Embedding) or _role_name(spec.name) in HEADS
    if is_vocabulary:
        size = pad_to_divisor(size, VOCAB_DIVISOR * tp)
    if size % tp:
        raise CliError(f"--tp {tp} does not divide dim {dim} of '{spec.name}' {list(spec.shape)}")
    shape = list(spec.shape)
    shape[dim] = size // tp
    return dataclasses.replace(spec, shape=tuple(shape))


def _role_name(name: str) -> str:
    """The part of a parameter's name that says what it is for: that of the layer, or its own in fused experts."""
    parts = name.split(".")
    return parts[-2] if parts[-1] in ("weight", "bias") and len(parts) > 1 else parts[-1]


def _divided_dim(param: _Owned) -> int | None:
    """The dim that tensor parallelism divides, None for a parameter that is whole on every rank."""
    spec, role = param.spec, _role_name(param.spec.name)
    if role in REPLICATED:
        return None
    if isinstance(param.module, nn.Embedding):
        return 0
    if len(spec.shape) < 2:
        return 0 if spec.shape and role in COLUMN_PARALLEL | HEADS else None
    # [out, in], but Hugging Face's Conv1D (GPT-2) has [in, out]; fused experts have a dim of experts in front.
    out_dim, in_dim = len(spec.shape) - 2, len(spec.shape) - 1
    if type(param.module).__name__ == "Conv1D":
        out_dim, in_dim = in_dim, out_dim
    if role in COLUMN_PARALLEL | HEADS:
        return out_dim
    if role in ROW_PARALLEL:
        return in_dim
    raise CliError(
        f"--tp: cannot tell from its name whether '{spec.name}' {list(spec.shape)} is column- or row-parallel; build "
        "one rank's model in a function and pass that as module:function, without --tp"
    )
