"""``passes/dequantize_params.py``: graphs read codes and scales, and nothing reads the hidden memory.

Parameters hold NaN in every run, as their shadow does. Results equal, bit for bit, those of the untouched graph with
the dequantized values in their place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from graph_builders import TABLES, Traced, apply, copy_graph, find, order_of, text_of, trace
from helpers import batch, seeded
from quantized_runs import dequantized, quantized
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Node
from torch.testing import FileCheck

from megabuf_fx.dump import GraphDump
from megabuf_fx.passes.add_buffer_inputs import ExtraInput, add_buffer_inputs, extra_inputs, stored_inputs
from megabuf_fx.passes.contract import PassError
from megabuf_fx.passes.dequantize_params import (
    HiddenInput,
    ViewStep,
    dequantize_params,
    find_hidden_inputs,
    find_saved_params,
)
from megabuf_fx.passes.graph_utils import HIDDEN, PARAM, aten, output_node, outputs, placeholders
from megabuf_fx.passes.verify import verify_hidden
from megabuf_fx.pipeline import backward_passes, forward_passes, run_passes
from megabuf_fx.runtime.layout import ParamSpec
from megabuf_fx.runtime.plan import GraphParam, GraphPlan, Role, plan_buckets, plan_graph

FORMATS = ("fp8", "mxfp8", "nvfp4")
HANDLE = 7


class TwoLayers(nn.Module):
    """The backward needs the second weight, transposed; the input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.second = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.tanh(self.first(x)))
        return result


class Twice(nn.Module):
    """One weight for two products."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.only(torch.tanh(self.only(x)))
        return result


class Permuted(nn.Module):
    """Several views of the weight in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.only.weight.view(2, 16, 32).permute(0, 2, 1)
        return torch.matmul(torch.tanh(x).view(2, -1, 32), weight).flatten() * self.only.weight[0, 0]


class OnlySaved(nn.Module):
    """The forward reads nothing of ``late``: it multiplies a constant zero in forward's graph by shape alone."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _ReadInBackward.apply(x, self.late.weight)  # type: ignore[no-untyped-call]
        return result


class WithBuffer(nn.Module):
    """A buffer of the weight's shape."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(32, 32, bias=False)
        self.register_buffer("average", torch.zeros(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.only(torch.matmul(x, self.average))
        return result


class _ReadInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "two layers": (TwoLayers, False),
    "two layers, input with gradient": (TwoLayers, True),
    "twice": (Twice, True),
    "permuted": (Permuted, True),
    "only saved": (OnlySaved, True),
    "with buffer": (WithBuffer, True),
}
"""What builds the module, and whether the input needs a gradient."""
SAVES_VIEWS = ("permuted", "two layers, input with gradient")
"""Of these also the graphs of the partitioner that saves views of weights."""


class Case:
    """Both graphs of a module whose linear weights are stored in ``form``."""

    def __init__(
        self, form: str, name: str, table: str, *, dtype: torch.dtype = torch.bfloat16, saves_views: bool = False
    ) -> None:
        build, with_grad = MODELS[name]
        self.form, self.table = form, table
        model = seeded(build).to(dtype)
        self.stored: dict[int, Any] = {}
        weights = {index for index, (key, _) in enumerate(model.named_parameters()) if key.endswith("weight")}
        for index, param in enumerate(model.parameters()):
            if index in weights:
                self.stored[index] = quantized(form, param.detach())
                # The untouched graph runs on the values that are stored.
                param.data.copy_(dequantized(form, self.stored[index], dtype))
        x = batch(0, 0, 0, 64, 32).to(dtype).requires_grad_(with_grad)
        self.traced: Traced = trace(model, x, table=table, saves_views=saves_views)
        specs = [
            dataclasses.replace(spec, quantized=form) if index in weights else spec  # type: ignore[arg-type]
            for index, spec in enumerate(self.traced.specs)
        ]
        self.bucket_plan = plan_buckets(specs, dp_size=1, sharded=True, bucket_size=None, grad_reduce_in_fp32=False)
        self.params = [_graph_param(index, spec) for index, spec in enumerate(specs)]
        inputs = [None if index is None else self.params[index] for index in self.traced.inputs]
        self.plan: GraphPlan = plan_graph(inputs, {HANDLE: self.bucket_plan})

    @property
    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        return select_decomp_table() if self.table == "inductor" else {}

    def extras(self, hidden: Mapping[str, HiddenInput]) -> tuple[ExtraInput, ...]:
        return stored_inputs((entry.param for entry in hidden.values()), lambda param: self.stored[param.param])

    def tensors(self, extras: tuple[ExtraInput, ...]) -> list[Tensor]:
        return [getattr(self.stored[extra.index], extra.kind) for extra in extras]

    @property
    def hidden(self) -> dict[str, HiddenInput]:
        return find_hidden_inputs(self.traced.forward.graph, self.plan)

    @property
    def saved(self) -> dict[str, HiddenInput]:
        names = {node.name for node in placeholders(self.traced.backward.graph)}
        found = find_saved_params(self.traced.forward.graph, self.plan)
        return {name: entry for name, entry in found.items() if name in names}

    def rewrite(self, gm: GraphModule, hidden: Mapping[str, HiddenInput]) -> GraphModule:
        return apply(
            gm,
            partial(add_buffer_inputs, extras=self.extras(hidden), writes=()),
            partial(dequantize_params, hidden=hidden, decompositions=self.decompositions),
            verify_hidden,
        )

    @torch.no_grad()
    def run(self, gm: GraphModule, arguments: tuple[Any, ...], hidden: Mapping[str, HiddenInput]) -> tuple[Any, ...]:
        """With NaN in the place of what is hidden."""
        names = [node.name for node in placeholders(gm.graph)]
        given = [torch.full_like(a, torch.nan) if name in hidden else a for name, a in zip(names, arguments)]
        return tuple(gm(*given, *self.tensors(self.extras(hidden))))


case_of = functools.cache(Case)
"""Shared by the tests; graphs are copied before they are rewritten."""


def _graph_param(index: int, spec: ParamSpec) -> GraphParam:
    return GraphParam(
        handle=HANDLE,
        param=index,
        group=0,
        name=spec.name,
        shape=spec.shape,
        stride=torch.empty(spec.shape, device="meta").stride(),
        grad_dtype=spec.dtype,
        buffer=0,
        start=0,
        whole_buffer=False,
        dtype=spec.dtype,
        quantized=spec.quantized,
    )


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", FORMATS)
def test_results_are_those_of_the_stored_values(form: str, name: str, table: str) -> None:
    check_results(case_of(form, name, table))


@pytest.mark.parametrize("name", SAVES_VIEWS)
@pytest.mark.parametrize("form", FORMATS)
def test_results_with_saved_views(form: str, name: str) -> None:
    case = case_of(form, name, "none", saves_views=True)
    assert any(entry.views for entry in case.saved.values())
    check_results(case)


def check_results(case: Case) -> None:
    traced = case.traced
    forward = case.rewrite(traced.forward, case.hidden)
    assert len(case.hidden) == len(case.stored)
    results = case.run(forward, traced.forward_args, case.hidden)
    saved = {node: entry for node, entry in zip(outputs(forward.graph), range(len(results))) if isinstance(node, Node)}
    for node, place in saved.items():
        # What is saved of a weight is the placeholder or a view of it, NaN: it costs nothing.
        expected, found = traced.forward_results[place], results[place]
        if node.name in find_saved_params(traced.forward.graph, case.plan):
            assert found.isnan().all()
            assert (found.shape, found.stride()) == (expected.shape, expected.stride())
        elif isinstance(expected, Tensor):
            assert torch.equal(found, expected), node.name
    backward = case.rewrite(traced.backward, case.saved)
    assert case.saved
    for found, expected in zip(
        case.run(backward, traced.backward_args, case.saved), traced.backward_results, strict=True
    ):
        assert (found is None) == (expected is None)
        if isinstance(expected, Tensor):
            assert torch.equal(found, expected)
            assert found.dtype == expected.dtype


@pytest.mark.parametrize("form", FORMATS)
def test_fp32_parameters(form: str) -> None:
    case = case_of(form, "two layers", "none", dtype=torch.float32)
    forward = case.rewrite(case.traced.forward, case.hidden)
    assert torch.equal(case.run(forward, case.traced.forward_args, case.hidden)[0], case.traced.forward_results[0])


def reads(gm: GraphModule, name: str) -> list[Node]:
    """Ops that take an input."""
    (node,) = [node for node in placeholders(gm.graph) if node.name == name]
    return list(node.users)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("form", FORMATS)
def test_structure_of_a_forward(form: str, table: str) -> None:
    case = case_of(form, "twice", table)
    gm = case.rewrite(case.traced.forward, case.hidden)
    (entry,) = case.hidden.values()
    fields = case.stored[entry.param.param]._fields
    inputs = placeholders(gm.graph)
    assert [node.name for node in inputs[-len(fields) :]] == [f"{field}_{entry.param.param}" for field in fields]
    assert all(node.meta[PARAM] == entry.param for node in inputs[-len(fields) :])
    (hidden,) = [node for node in inputs if HIDDEN in node.meta]
    assert hidden.meta[HIDDEN] == entry.param
    assert PARAM not in hidden.meta
    products = find(gm, aten.mm.default)
    assert len(products) == 2
    assert products[0].args[1] is products[1].args[1]
    assert sources(products[0].args[1]) == set(inputs[-len(fields) :])
    assert all("val" in node.meta for node in gm.graph.nodes if node.op == "call_function")
    order = order_of(gm)
    made = [node for node in gm.graph.nodes if order[inputs[-1]] < order[node] < order[products[0]]]
    # Just before the first read: in between is only what makes it.
    assert all(sources(node) <= set(inputs[-len(fields) :]) for node in made)
    (tanh,) = find(gm, aten.tanh.default)
    assert order[products[0]] < order[tanh] < order[products[1]]
    assert [node.target for node in gm.graph.nodes if order[node] > order[tanh]] == [aten.mm.default, "output"]
    kept = [value for value in outputs(gm.graph) if isinstance(value, Node)]
    assert [value.name for value in kept] == [
        value.name for value in outputs(case.traced.forward.graph) if isinstance(value, Node)
    ]


def sources(node: Any) -> set[Node]:
    """The inputs from which ``node`` is made."""
    if node.op == "placeholder":
        return {node}
    return {source for each in node.all_input_nodes for source in sources(each)}


def test_text() -> None:
    case = case_of("fp8", "two layers", "none")
    gm = case.rewrite(case.traced.forward, case.hidden)
    first, second = (entry.param.param for entry in case.hidden.values())
    check = FileCheck()
    check.check(f"view.dtype(codes_{first}, torch.float8_e4m3fn)").check(f"scale_inv_{first}").check("torch.bfloat16")
    check.check("aten.addmm.default").check("aten.tanh.default")
    check.check(f"view.dtype(codes_{second}").check(f"scale_inv_{second}").check("aten.mm.default")
    check.check_not("codes").run(gm.code)


def test_provenance_is_that_of_the_first_read() -> None:
    case = case_of("mxfp8", "two layers", "none")
    gm = case.rewrite(case.traced.forward, case.hidden)
    (node,) = [node for node in placeholders(gm.graph) if node.name.startswith("codes_2")]
    (user,) = node.users
    assert "self.second(" in user.meta["stack_trace"]


def test_views_that_are_saved_are_repeated_in_backward() -> None:
    case = case_of("fp8", "permuted", "none", saves_views=True)
    views = [entry.views for entry in case.saved.values()]
    assert any(len(steps) > 1 for steps in views)
    assert all(isinstance(step, ViewStep) for steps in views for step in steps)
    gm = case.rewrite(case.traced.backward, case.saved)
    for name in case.saved:
        assert not [user for user in reads(gm, name) if user.op != "output"]


@pytest.mark.parametrize("table", TABLES)
def test_in_place_ops_read_the_values(table: str) -> None:
    """``average.copy_(weight)``: its result is an alias, but of the other argument."""
    case = case_of("fp8", "with buffer", table)
    gm = copy_graph(case.traced.forward)
    names = [node.name for node in placeholders(gm.graph)]
    (weight,) = [node for node in placeholders(gm.graph) if node.name in case.hidden]
    arguments = list(case.traced.forward_args)
    (place,) = [i for i, x in enumerate(arguments) if x.shape == (32, 32) and names[i] != weight.name]
    arguments[place] = torch.zeros_like(arguments[place])
    with gm.graph.inserting_before(output_node(gm.graph)):
        gm.graph.call_function(aten.copy_.default, (placeholders(gm.graph)[place], weight))
    case.run(case.rewrite(gm, case.hidden), tuple(arguments), case.hidden)
    (stored,) = case.stored.values()
    assert torch.equal(arguments[place], dequantized("fp8", stored, torch.bfloat16))


def test_what_is_only_saved_is_not_dequantized_in_forward() -> None:
    case = case_of("fp8", "only saved", "none")
    gm = case.rewrite(case.traced.forward, case.hidden)
    before = case.traced.forward.graph
    assert len(gm.graph.nodes) == len(before.nodes) + 2  # codes and scale, which nobody reads
    assert all(not node.users for node in placeholders(gm.graph)[-2:])


def test_two_saved_views_of_one_weight_share_one_value() -> None:
    """As a checkpointed or hand-made graph may have them: the weight itself, and its transpose."""
    case = case_of("fp8", "two layers, input with gradient", "none")
    (name,) = [n for n, entry in case.saved.items() if entry.param.name == "second.weight"]
    gm = copy_graph(case.traced.backward)
    (old,) = [node for node in placeholders(gm.graph) if node.name == name]
    entry = case.saved[name]
    plain = HiddenInput(entry.param)
    with gm.graph.inserting_after(old):
        twin = gm.graph.placeholder("whole_weight")
    twin.meta["val"] = old.meta["val"].t() if entry.views else old.meta["val"]
    (last, *rest) = outputs(gm.graph)
    with gm.graph.inserting_before(output_node(gm.graph)):
        total = gm.graph.call_function(aten.sum.default, (twin,))
    total.meta["val"] = old.meta["val"].sum()
    output_node(gm.graph).args = ((last, *rest, total),)
    hidden = {**case.saved, "whole_weight": plain}
    gm = case.rewrite(gm, hidden)
    (codes,) = [node for node in placeholders(gm.graph) if node.name == f"codes_{entry.param.param}"]
    assert len(codes.users) == 1
    arguments = list(case.traced.backward_args)
    arguments.insert([n.name for n in placeholders(gm.graph)].index("whole_weight"), arguments[0])
    results = case.run(gm, tuple(arguments), hidden)
    expected = dequantized("fp8", case.stored[entry.param.param], torch.bfloat16)
    assert torch.equal(results[-1], expected.sum())


@pytest.mark.parametrize("form", FORMATS)
def test_missing_codes_or_scales_are_refused(form: str) -> None:
    case = case_of(form, "two layers", "none")
    fields = case.stored[0]._fields
    for missing in fields:
        extras = tuple(extra for extra in case.extras(case.hidden) if (extra.kind, extra.index) != (missing, 0))
        gm = apply(case.traced.forward, partial(add_buffer_inputs, extras=extras, writes=()))
        with pytest.raises(
            PassError, match=f"dequantize_params: 'first.weight' is stored as {form}, but its {missing} is no input"
        ):
            dequantize_params(gm, hidden=case.hidden, decompositions={})


def test_a_saved_view_that_depends_on_more_is_refused() -> None:
    case = case_of("fp8", "two layers, input with gradient", "none")
    gm = copy_graph(case.traced.forward)
    weight = next(node for node in placeholders(gm.graph) if node.name in case.hidden)
    other = next(node for node in placeholders(gm.graph) if node.name not in case.hidden)
    with gm.graph.inserting_before(output_node(gm.graph)):
        size = gm.graph.call_function(aten.sym_size.int, (other, 0))
        view = gm.graph.call_function(aten.view.default, (weight, [size, -1]))
    output_node(gm.graph).args = ((*outputs(gm.graph), view),)
    with pytest.raises(PassError, match=r"a view of quantized 'first.weight' depends on other values"):
        find_saved_params(gm.graph, case.plan)


def test_nothing_to_do() -> None:
    case = case_of("fp8", "two layers", "none")
    gm = copy_graph(case.traced.forward)
    before = text_of(gm)
    assert dequantize_params(gm, hidden={}, decompositions={}) is gm
    assert dequantize_params(gm, hidden={"no_such_input": next(iter(case.hidden.values()))}, decompositions={}) is gm
    assert verify_hidden(gm) is gm
    assert text_of(gm) == before


def test_same_graph_and_plan_give_the_same_graph() -> None:
    case = case_of("nvfp4", "permuted", "inductor")
    assert len({text_of(case.rewrite(case.traced.forward, case.hidden)) for _ in range(2)}) == 1


# verify_hidden


def planted_compute(gm: GraphModule, hidden: Node) -> None:
    with gm.graph.inserting_before(output_node(gm.graph)):
        gm.graph.call_function(aten.sum.default, (hidden,))


def planted_behind_views(gm: GraphModule, hidden: Node) -> None:
    with gm.graph.inserting_before(output_node(gm.graph)):
        view = gm.graph.call_function(aten.t.default, (hidden,))
        view = gm.graph.call_function(aten.slice.Tensor, (view, 0, 0, 2))
        gm.graph.call_function(aten.relu.default, (view,))


def planted_mm(gm: GraphModule, hidden: Node) -> None:
    """The product of the untouched graph."""
    product = next(node for node in gm.graph.nodes if node.target in (aten.mm.default, aten.addmm.default))
    with gm.graph.inserting_before(product):
        view = gm.graph.call_function(aten.t.default, (hidden,))
    product.args = (*product.args[:-1], view)


def planted_write(gm: GraphModule, hidden: Node) -> None:
    with gm.graph.inserting_before(output_node(gm.graph)):
        gm.graph.call_function(aten.zero_.default, (hidden,))


def planted_copy(gm: GraphModule, hidden: Node) -> None:
    """It returns an alias, but of its other argument."""
    other = next(node for node in placeholders(gm.graph) if HIDDEN not in node.meta)
    with gm.graph.inserting_before(output_node(gm.graph)):
        gm.graph.call_function(aten.copy_.default, (other, hidden))


@pytest.mark.parametrize("plant", [planted_compute, planted_behind_views, planted_mm, planted_write, planted_copy])
def test_verify_hidden_catches(plant: Callable[[GraphModule, Node], None]) -> None:
    case = case_of("fp8", "two layers", "none")
    gm = case.rewrite(case.traced.forward, case.hidden)
    assert verify_hidden(gm) is gm
    hidden = next(node for node in placeholders(gm.graph) if HIDDEN in node.meta)
    plant(gm, hidden)
    with pytest.raises(PassError, match=r"verify_hidden at node .*: the memory of quantized 'first.weight' is read"):
        verify_hidden(gm)


# The pipeline


@pytest.mark.parametrize("form", FORMATS)
def test_pipeline(form: str) -> None:
    """Contracts hold, waits name codes and scales, and gradients are written as ever."""
    case = case_of(form, "two layers", "none")
    token = ExtraInput("token", HANDLE, 0, (1,), (1,), torch.float32, torch.device("cpu"))
    extras = (*case.extras(case.hidden), token)
    steps = forward_passes(case.plan, extras=extras, waits=True, hidden=case.hidden, decompositions={})
    gm = run_passes(copy_graph(case.traced.forward), steps, dump=GraphDump())
    waited = [node for node in gm.graph.nodes if "wait_param_sync" in str(node.target)]
    named = {node.name for wait in waited for node in wait.args[0]}
    for index, stored in case.stored.items():
        assert {f"{field}_{index}" for field in stored._fields} <= named
    assert not named & set(case.hidden)
    results = case.traced.backward_results
    gradients = {i: param for i, param in enumerate(case.plan.inputs) if param is not None and results[i] is not None}
    written = case.extras(case.saved) + extra_inputs(
        list(gradients.values()), buffer_numels={}, device=torch.device("cpu"), with_token=False
    )
    steps = backward_passes(
        gradients, role=Role("overwrite"), extras=written, fuse=True, hidden=case.saved, decompositions={}
    )
    gm = run_passes(copy_graph(case.traced.backward), steps, dump=GraphDump())
    assert [i for i in gradients if outputs(gm.graph)[i] is not None] == []
    # A backward that writes nothing (torch.autograd.grad) dequantizes all the same.
    steps = backward_passes(
        gradients,
        role=Role(None),
        extras=case.extras(case.saved),
        fuse=True,
        hidden=case.saved,
        decompositions={},
    )
    gm = run_passes(copy_graph(case.traced.backward), steps, dump=GraphDump())
    found = case.run(gm, case.traced.backward_args, case.saved)
    for got, expected in zip(found, results, strict=True):
        assert got is None or torch.equal(got, expected)
