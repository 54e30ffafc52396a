"""Which weights are quantized, and what stores them: from the config to ``runtime/stored_*.py``."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import logging
from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

import megabuf_fx._compat as _compat
from megabuf_fx.config import MegabufConfig
from megabuf_fx.runtime.buffers import MakeStore, Store
from megabuf_fx.runtime.layout import BufferLayout, ParamSpec
from megabuf_fx.runtime.plan import BucketPlan
from megabuf_fx.runtime.quantize_fp8 import AmaxAlgorithm
from megabuf_fx.runtime.quantize_mx import ScaleRule
from megabuf_fx.runtime.quantized_formats import FORMATS
from megabuf_fx.runtime.shared_storage import SharedStorage, bucket_names
from megabuf_fx.runtime.stored_fp8 import DelayedRecipe, StoredFp8
from megabuf_fx.runtime.stored_mxfp8 import StoredMxfp8
from megabuf_fx.runtime.stored_nvfp4 import StoredNvfp4
from megabuf_fx.runtime.stored_params import F

log = logging.getLogger("megabuf_fx.quantization")


def mark_quantized(model: nn.Module, specs: Sequence[ParamSpec], config: MegabufConfig) -> list[ParamSpec]:
    """``specs`` of ``model`` with the format of those that ``config`` quantizes; warns of weights that do not divide.

    Raises:
        ValueError: see ``choose_quantized``.
    """
    linear = linear_weights(model)
    if config.quantization is not None:
        for spec in _wanted(specs, linear, config):
            if not FORMATS[config.quantization].fits(spec.shape):
                log.warning(
                    "'%s' of shape %s stays in %s: %s needs rows and columns in multiples of %s",
                    spec.name,
                    spec.shape,
                    spec.dtype,
                    config.quantization,
                    FORMATS[config.quantization].divisors,
                )
    return choose_quantized(specs, linear, config)


def linear_weights(model: nn.Module) -> set[str]:
    """Names of parameters that are weights of ``nn.Linear`` itself, whose forward everybody knows.

    A subclass may read its weight elsewhere, and an embedding (tied or not) reads rows.
    """
    owners: dict[int, set[bool]] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            owners.setdefault(id(param), set()).add(type(module) is nn.Linear and name == "weight")
    return {name for name, param in model.named_parameters() if owners[id(param)] == {True}}


def choose_quantized(specs: Sequence[ParamSpec], linear: Collection[str], config: MegabufConfig) -> list[ParamSpec]:
    """``specs`` with the format of those that ``config`` quantizes, among the weights named ``linear``.

    Norms and biases stay as they are, as in Megatron; so do weights whose shape does not divide into blocks.

    Raises:
        ValueError: nothing can be quantized, or weights of several dtypes or of one that is neither bf16 nor fp32.
    """
    name_of_format = config.quantization
    if name_of_format is None:
        return list(specs)
    chosen = {spec.name for spec in _wanted(specs, linear, config) if FORMATS[name_of_format].fits(spec.shape)}
    if not chosen:
        rows, columns = FORMATS[name_of_format].divisors
        raise ValueError(
            f"{name_of_format}: no weight can be quantized; it needs nn.Linear weights (not tied to an embedding) that "
            f"match {config.quantized_param_name_patterns}, with rows in multiples of {rows} and columns of {columns}"
        )
    check_dtypes({spec.dtype for spec in specs if spec.name in chosen})
    return [dataclasses.replace(spec, quantized=name_of_format) if spec.name in chosen else spec for spec in specs]


def check_dtypes(dtypes: set[torch.dtype]) -> None:
    """Refuse quantized weights of these dtypes together.

    Raises:
        ValueError: several, or one that is neither bf16 nor fp32.
    """
    if len(dtypes) > 1 or not dtypes <= {torch.bfloat16, torch.float32}:
        raise ValueError(
            f"quantized weights must be all bf16 or all fp32, found {', '.join(sorted(map(str, dtypes)))}; choose some "
            "with quantized_param_name_patterns, or convert the model"
        )


def _wanted(specs: Sequence[ParamSpec], linear: Collection[str], config: MegabufConfig) -> list[ParamSpec]:
    patterns = config.quantized_param_name_patterns
    return [
        spec
        for spec in specs
        if spec.name in linear and any(p == "all" or fnmatch.fnmatch(spec.name, p) for p in patterns)
    ]


def store_maker(config: MegabufConfig, plan: BucketPlan) -> MakeStore:
    """Makes what holds the quantized parameters of one buffer."""
    compiler = _inductor if config.inner_compiler == "inductor" else _identity

    def make(layout: BufferLayout, grad_data: Tensor) -> Store:
        device = grad_data.device
        if device.type == "cuda" and config.inner_compiler == "inductor":
            _refuse_old_cards(torch.cuda.get_device_capability(device))
        if config.quantization == "nvfp4":
            return Store(StoredNvfp4(layout, plan.params, device=device, compiler=compiler), None)
        if config.quantization == "fp8":
            return Store(
                StoredFp8(layout, plan.params, device=device, compiler=compiler, delayed=_delayed(config)), None
            )
        staging, shared = _staging(config, plan, layout, grad_data)
        rule = ScaleRule(config.mxfp8_scale_rule)
        return Store(
            StoredMxfp8(layout, plan.params, device=device, compiler=compiler, staging=staging, rule=rule), shared
        )

    return make


def _refuse_old_cards(capability: tuple[int, int]) -> None:
    """All formats have e4m3 codes or scales, and Triton refuses to compile that type for older cards."""
    if capability < (8, 9):
        raise NotImplementedError(
            "quantized parameters need a card of capability 8.9 or higher with inner_compiler='inductor', this one has "
            f"{'.'.join(map(str, capability))}; take inner_compiler='aot_eager', or drop fp8_param_gather and "
            "fp4_param_gather"
        )


def _delayed(config: MegabufConfig) -> DelayedRecipe | None:
    if config.fp8_recipe != "delayed":
        return None
    return DelayedRecipe(config.fp8_amax_history_len, AmaxAlgorithm(config.fp8_amax_compute_algo), config.fp8_margin)


def _staging(
    config: MegabufConfig, plan: BucketPlan, layout: BufferLayout, grad_data: Tensor
) -> tuple[Tensor, SharedStorage | None]:
    """Where MXFP8 parameters are gathered: the lower bytes of ``grad_data``, or a tensor of their own."""
    dtype = plan.params[layout.params[0]].dtype
    if not config.reuse_grad_buf_for_mxfp8_param_ag:
        return torch.zeros(layout.numel, dtype=dtype, device=grad_data.device), None
    return grad_data.view(dtype)[: layout.numel], SharedStorage(bucket_names(layout, plan.params))


def _identity(function: F) -> F:
    return function


def _inductor(function: F) -> F:
    compiled = torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        # A tape sees ops, not kernels; both give the same bits.
        return function(*args) if _compat.recording_mode() is not None else compiled(*args)

    return cast("F", call)
