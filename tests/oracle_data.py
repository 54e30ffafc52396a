"""Readers of ``tests/oracle/*.json.gz``: results of Megatron-LM's own functions (``tests/oracle/README.md``)."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from megabuf_fx.runtime.layout import BufferKey, ParamSpec

ORACLE_DIR = Path(__file__).parent / "oracle"

DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "uint8": torch.uint8,  # in buffer keys only
}

PARAM_FLAGS = frozenset({"shared_embedding", "allreduce", "fp8", "nvfp4", "is_managed_by_layer_wise_optimizer"})


@functools.cache
def load(name: str) -> Any:
    """Content of ``tests/oracle/<name>.json.gz``. The object is shared by all callers: read only."""
    with gzip.open(ORACLE_DIR / f"{name}.json.gz", "rt", encoding="utf-8") as file:
        return json.load(file)


def param_spec(entry: Sequence[Any]) -> ParamSpec:
    """Spec of a parameter entry ``[name, shape, dtype, flags]``.

    Raises:
        ValueError: a flag that would be lost.
    """
    name, shape, dtype, flags = entry
    if unknown := flags.keys() - PARAM_FLAGS:
        raise ValueError(f"parameter {name} has flags {sorted(unknown)}; expected some of {sorted(PARAM_FLAGS)}")
    quantized: Literal["fp8", "nvfp4"] | None = None
    if flags.get("fp8"):
        quantized = "fp8"
    elif flags.get("nvfp4"):
        quantized = "nvfp4"
    return ParamSpec(
        name=name,
        shape=tuple(shape),
        dtype=DTYPES[dtype],
        shared_embedding=flags.get("shared_embedding", False),
        allreduce=flags.get("allreduce", True),
        quantized=quantized,
        is_managed_by_layer_wise_optimizer=flags.get("is_managed_by_layer_wise_optimizer", False),
    )


def param_specs(entries: Sequence[Sequence[Any]]) -> tuple[ParamSpec, ...]:
    return tuple(param_spec(entry) for entry in entries)


def buffer_key(entry: Mapping[str, Any]) -> BufferKey:
    """Key of a buffer, whose fields the oracle names as :class:`BufferKey` does."""
    return BufferKey(
        param_dtype=DTYPES[entry["param_dtype"]],
        grad_dtype=DTYPES[entry["grad_dtype"]],
        is_expert_parallel=entry["is_expert_parallel"],
        is_managed_by_layer_wise_optimizer=entry["is_managed_by_layer_wise_optimizer"],
    )
