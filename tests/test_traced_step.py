"""What is noted of a forward and a backward that are traced without values."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers import Mlp, seeded
from torch import Tensor, nn

from megabuf_fx._compat import compiled_graphs
from megabuf_fx.cost_model import Device
from megabuf_fx.traced_step import NodeCost, StepTimes, TracedStep, trace_model

DEVICE = Device(tflops=1, memory_gbs=10, op_us=1)


class Chain(nn.Module):
    """``breaks``: a graph break in the middle; ``eager`` leaves the last layer outside of any graph."""

    def __init__(self, breaks: bool = False, eager: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.unused = nn.Parameter(torch.ones(3))
        self.breaks = breaks
        self.eager = eager

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, last = self.layers
        x = torch.tanh(second(torch.tanh(first(x))))
        # Not in a loop, of which Dynamo would compile nothing.
        if self.breaks:
            torch._dynamo.graph_break()
        x = torch.tanh(third(x))
        result: Tensor = torch.compiler.disable(last.forward)(x) if self.eager else last(x)
        return result


def trace(model: nn.Module, *inputs: Any) -> TracedStep:
    return trace_model(model, inputs, use_decompositions=False)


@pytest.mark.parametrize("breaks", [False, True])
def test_gradients_complete_from_the_last_layer_to_the_first(breaks: bool) -> None:
    traced = trace(Chain(breaks), torch.zeros(5, 16))
    unused, *weights = traced.complete[:1] + traced.complete[1::2]
    # Seven operations or more, of which each layer's product comes later than that of the layer after it.
    assert unused == len(traced.backward)
    assert weights == sorted(weights, reverse=True)
    assert len(set(weights)) == 4
    # Two products per layer, but one for the first, whose input has no gradient.
    assert sum(node.flops for node in traced.backward) == 7 * 2 * 5 * 16 * 16
    times = traced.times(DEVICE)
    assert times.ready[0] == times.backward
    assert 0 < min(times.ready) < max(times.ready[1:]) <= times.backward


@pytest.mark.parametrize("breaks", [False, True])
def test_parameters_are_read_from_the_first_layer_to_the_last(breaks: bool) -> None:
    traced = trace(Chain(breaks), torch.zeros(5, 16))
    unused, *weights = traced.first_use[:1] + traced.first_use[1::2]
    assert unused == len(traced.forward)
    assert weights == sorted(set(weights))
    assert sum(node.flops for node in traced.forward) == 4 * 2 * 5 * 16 * 16
    # The first product needs both parameters of its layer and no computing before it.
    assert traced.times(DEVICE).needed[1:3] == (0.0, 0.0)


def test_gradients_outside_of_graphs() -> None:
    """What no graph returns is complete when autograd has it: here before any graph."""
    traced = trace(Chain(eager=True), torch.zeros(5, 16))
    assert traced.complete[-2:] == (0, 0)
    assert min(traced.complete[:-2]) > 0
    assert traced.first_use[-2:] == (len(traced.forward),) * 2


def test_time_of_nodes() -> None:
    nodes = (NodeCost("compute", 0, 20_000), NodeCost("view", 0, 0), NodeCost("compute", 3_000_000, 0))
    assert TracedStep(nodes, (0, 2), nodes, (1, 3)).times(DEVICE) == StepTimes((0.0, 2.0), (2.0, 5.0), 5.0)


@dataclasses.dataclass
class Answer:
    loss: Tensor
    parts: dict[str, list[Tensor]]
    note: str = "none"


class Wrapped(Mlp):
    def forward(self, x: Tensor) -> Any:
        result = super().forward(x)
        return Answer(result.mean(), {"all": [result, result.argmax()]})


def test_outputs_in_containers() -> None:
    assert len(trace(seeded(Wrapped), torch.zeros(4, 13)).complete) == 7


class Noisy(nn.Module):
    """Statistics, random numbers, a tensor that is no buffer, and memory that would be missed."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.scale = torch.ones(16)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.dropout(self.norm(self.fc(x)) * self.scale + torch.zeros(16), 0.5)


def test_nothing_of_the_model_changes() -> None:
    model = seeded(Noisy)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, graphs = torch.get_rng_state(), compiled_graphs()
    trace(model, torch.zeros(8, 16))
    assert compiled_graphs() == graphs + 1
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.calls == 0
    assert all(param.grad is None and not param._backward_hooks for param in model.parameters())


def test_no_memory_is_taken() -> None:
    """Weights of 1 TB each, all of whose elements are one number in memory: a copy of one would not fit."""
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(4)))
    for layer in model:
        layer.weight = nn.Parameter(torch.ones(1, 1).expand(500_000, 500_000))
    traced = trace(model, torch.zeros(2, 500_000))
    assert sum(node.flops for node in traced.backward) == 7 * 2 * 2 * 500_000**2


def test_shared_parameters_count_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    traced = trace(model, torch.zeros(3, 8))
    weight, first_bias, last_bias = traced.complete
    assert last_bias < weight
    assert last_bias < first_bias


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Identity(), "no output of its forward is a floating-point tensor with a gradient"),
        (Chain(), "mat1 and mat2 shapes cannot be multiplied|size mismatch"),
    ],
    ids=["no_gradient", "shapes"],
)
def test_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=r"could not trace the backward of .* without values of tensors"):
        trace(model, torch.zeros(2, 3))


@pytest.mark.filterwarnings("ignore")
def test_disabled_compiler() -> None:
    model = seeded(Mlp)
    model.forward = torch.compiler.disable(model.forward)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="nothing in it was compiled"):
        trace(model, torch.zeros(2, 13))
