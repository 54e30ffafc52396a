"""Which weights are quantized: the choice that ``attach`` and the command line share."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_models import linears
from torch import nn

import megabuf_fx as mb
from megabuf_fx.planning import plan_model
from megabuf_fx.quantization import choose_quantized, linear_weights, mark_quantized, store_maker
from megabuf_fx.runtime.flags import spec_of
from megabuf_fx.runtime.layout import ParamSpec

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8: dict[str, Any] = {"fp8_param_gather": True}


def specs_of(model: nn.Module) -> list[ParamSpec]:
    return [spec_of(name, param) for name, param in model.named_parameters()]


def test_linear_weights_are_those_of_linear_layers_alone() -> None:
    assert linear_weights(linears()) == {"first.weight", "odd.weight"}
    shared = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    shared[1].weight = shared[0].weight
    assert linear_weights(shared) == {"0.weight"}


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({}, set()),
        (FP8, {"first.weight", "odd.weight"}),
        ({**FP8, "quantized_param_name_patterns": ("o*", "x")}, {"odd.weight"}),
        ({"fp4_param_gather": True}, {"first.weight"}),
    ],
)
def test_choice(config: dict[str, Any], names: set[str]) -> None:
    model, full = linears(), mb.MegabufConfig(**config)
    chosen = choose_quantized(specs_of(model), linear_weights(model), full)
    assert {spec.name for spec in chosen if spec.quantized} == names
    assert {spec.quantized for spec in chosen} - {None} <= {full.quantization}
    assert chosen == mark_quantized(model, specs_of(model), full)


def test_weights_that_do_not_divide_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = linears()
    with caplog.at_level(logging.WARNING, "megabuf_fx.quantization"):
        mark_quantized(model, specs_of(model), mb.MegabufConfig(fp4_param_gather=True))
    (line,) = caplog.messages
    assert line == (
        "'odd.weight' of shape (40, 96) stays in torch.float32: nvfp4 needs rows and columns in multiples of (16, 16)"
    )


@pytest.mark.parametrize(
    ("dtypes", "patterns", "message"),
    [
        ((FP16, FP16), ("all",), "must be all bf16 or all fp32, found torch.float16"),
        ((BF16, FP32), ("all",), "must be all bf16 or all fp32, found torch.bfloat16, torch.float32"),
        ((BF16, BF16), ("c*",), r"fp8: no weight can be quantized; .* that match \('c\*',\)"),
    ],
)
def test_refused(dtypes: tuple[torch.dtype, torch.dtype], patterns: tuple[str, ...], message: str) -> None:
    specs = [ParamSpec(name, (8, 8), dtype) for name, dtype in zip("ab", dtypes)]
    config = mb.MegabufConfig(**FP8, quantized_param_name_patterns=patterns)
    with pytest.raises(ValueError, match=message):
        choose_quantized(specs, {"a", "b"}, config)


def test_other_dtypes_may_stay_as_they_are() -> None:
    specs = [ParamSpec(name, (8, 8), dtype) for name, dtype in zip("ab", (BF16, FP16))]
    config = mb.MegabufConfig(**FP8, quantized_param_name_patterns=("a",))
    assert [spec.quantized for spec in choose_quantized(specs, {"a", "b"}, config)] == ["fp8", None]


@pytest.mark.parametrize(
    ("capability", "inner", "is_refused"), [((8, 0), "inductor", True), ((8, 0), "aot_eager", False)]
)
def test_old_cards_are_refused_where_kernels_are_compiled(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], inner: Any, is_refused: bool
) -> None:
    config = mb.MegabufConfig(**FP8, inner_compiler=inner)
    plan = plan_model(config, [ParamSpec("a", (16, 16), BF16, quantized="fp8")], dp_size=1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    grad_data: Any = SimpleNamespace(device=torch.device("cuda", 0))
    # Without a GPU the tensors themselves cannot be made.
    expected = (
        (NotImplementedError, "capability 8.9 or higher")
        if is_refused
        else ((AssertionError, RuntimeError), "CUDA|NVIDIA")
    )
    with pytest.raises(expected[0], match=expected[1]):
        store_maker(config, plan)(plan.layouts[0], grad_data)
