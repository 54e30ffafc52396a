"""``passes/locate_params.py``: which inputs of a forward graph are parameters."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from graph_builders import TABLES, Buffers, copy_graph, text_of, traced_mlp

from megabuf_fx.passes.contract import PassError
from megabuf_fx.passes.graph_utils import PARAM, placeholders
from megabuf_fx.passes.locate_params import PASS, locate_params
from megabuf_fx.runtime.plan import GraphParam, GraphPlan


@pytest.mark.parametrize("table", TABLES)
def test_every_parameter_is_marked_on_its_input(table: str) -> None:
    traced = traced_mlp(table)
    buffers = Buffers(traced)
    gm = copy_graph(traced.forward)
    before = text_of(gm)
    assert locate_params(gm, plan=buffers.plan) is gm
    assert text_of(gm) == before, "marks only, no rewriting"
    marks = [node.meta.get(PARAM) for node in placeholders(gm.graph)]
    assert marks == list(buffers.plan.inputs)
    # The input between fc1 and fc2 is the batch.
    names = [mark.name if isinstance(mark, GraphParam) else None for mark in marks]
    assert names == ["fc1.weight", "fc1.bias", None, "fc2.weight", "ln.weight", "ln.bias", "fc3.weight", "fc3.bias"]
    for node, argument in zip(placeholders(gm.graph), traced.forward_args):
        assert (PARAM in node.meta) == isinstance(argument, torch.nn.Parameter)


def test_nothing_to_do() -> None:
    traced = traced_mlp("none")
    gm = copy_graph(traced.forward)
    before = text_of(gm)
    assert locate_params(gm, plan=GraphPlan((None,) * len(traced.inputs), ())) is gm
    assert text_of(gm) == before
    assert not any(PARAM in node.meta for node in gm.graph.nodes)


def test_another_number_of_inputs_is_refused() -> None:
    """As after AOTAutograd has unwrapped a tensor subclass into two tensors."""
    traced = traced_mlp("none")
    plan = Buffers(traced).plan
    for inputs, count in ((plan.inputs[:-1], 7), ((*plan.inputs, None), 9)):
        with pytest.raises(
            PassError, match=rf"pass {PASS.name}: the graph has 8 inputs, the traced model {count}; .*DTensor"
        ):
            locate_params(copy_graph(traced.forward), plan=GraphPlan(inputs, ()))


def test_another_shape_is_refused() -> None:
    traced = traced_mlp("none")
    plan = Buffers(traced).plan
    first = plan.inputs[0]
    assert first is not None
    wrong = GraphPlan((dataclasses.replace(first, shape=(13, 37)), *plan.inputs[1:]), ())
    with pytest.raises(PassError, match=r"node 'primals_1'.*'fc1.weight' has shape \(13, 37\), not \(37, 13\)"):
        locate_params(copy_graph(traced.forward), plan=wrong)


def test_parameter_on_an_input_that_is_no_tensor_is_refused() -> None:
    """Inputs that shifted, by an effect token say, can put a parameter where a size is."""
    traced = traced_mlp("none")
    gm = copy_graph(traced.forward)
    placeholders(gm.graph)[0].meta["val"] = 7
    with pytest.raises(PassError, match=r"fc1\.weight"):
        locate_params(gm, plan=Buffers(traced).plan)
