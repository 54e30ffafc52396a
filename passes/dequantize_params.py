"""Read quantized parameters from their codes and scales.

    before   primals_2 [128, 64]; t = aten.t(primals_2); mm = aten.mm(x, t)              -> (mm, primals_2)
    after    primals_2; codes_1; scale_inv_1
             w = (codes_1 viewed as e4m3, as fp32) * scale_inv_1, as bf16
             t = aten.t(w); mm = aten.mm(x, t)                                           -> (mm, primals_2)

The placeholder of a quantized parameter stays, because AOTAutograd counts inputs, but nothing may read it: its memory
is a shadow ([Note: hidden parameters] in ``runtime/quantized_weights.py``). What forward saves of it for backward stays
as it is, the placeholder or a view of it, which costs no memory; backward dequantizes again and repeats the view. One
value serves all reads of a parameter in a graph and is made just before the first.

Requires: buffers; the codes and scales of every hidden parameter are among the inputs.
Ensures: dequantized: no op computes with a hidden placeholder; codes and scales are marked as their parameter.
Raises: PassError when codes or scales are missing, or a saved view depends on more than its parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.fx import Graph, GraphModule, Node

from megabuf_fx.passes.contract import GraphPass, PassError
from megabuf_fx.passes.graph_utils import (
    EXTRA,
    HIDDEN,
    PARAM,
    inherit_provenance,
    is_view_of,
    outputs,
    placeholders,
    positions,
    splice,
)
from megabuf_fx.runtime.plan import GraphParam, GraphPlan
from megabuf_fx.runtime.quantized_formats import FORMATS


class ViewStep(NamedTuple):
    """One view op; its first argument is the parameter or the view before."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    """The other arguments."""
    kwargs: Mapping[str, Any]


class HiddenInput(NamedTuple):
    """What a placeholder is: a quantized parameter, or a view of one."""

    param: GraphParam
    views: tuple[ViewStep, ...] = ()


def find_hidden_inputs(graph: Graph, plan: GraphPlan) -> dict[str, HiddenInput]:
    """The quantized parameters among the inputs of a forward graph, by placeholder name."""
    pairs = zip(placeholders(graph), plan.inputs)
    return {node.name: HiddenInput(param) for node, param in pairs if param is not None and param.quantized}


def find_saved_params(graph: Graph, plan: GraphPlan) -> dict[str, HiddenInput]:
    """What a forward graph returns of its quantized parameters: AOTAutograd gives the backward's placeholders the names
    of these nodes."""
    inputs = find_hidden_inputs(graph, plan)
    known = {node: inputs[node.name] for node in placeholders(graph) if node.name in inputs}
    for node in graph.nodes:
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if source in known and is_view_of(node, source):
            base = known[source]
            known[node] = HiddenInput(base.param, (*base.views, ViewStep(node.target, node.args[1:], node.kwargs)))
    saved = {
        value.name: (value, known[value]) for value in outputs(graph) if isinstance(value, Node) and value in known
    }
    for node, hidden in saved.values():
        if hidden.views and len(node.all_input_nodes) > 1:
            raise PassError(PASS.name, f"a view of quantized '{hidden.param.name}' depends on other values", node)
    return {name: hidden for name, (_, hidden) in saved.items()}


def dequantize_params(
    gm: GraphModule, *, hidden: Mapping[str, HiddenInput], decompositions: Mapping[Any, Callable[..., Any]]
) -> GraphModule:
    """``hidden`` by placeholder name; ``decompositions`` are those with which the graph was traced."""
    present = [(node, hidden[node.name]) for node in placeholders(gm.graph) if node.name in hidden]
    if not present:
        return gm
    order = positions(gm.graph)
    stored = _stored_nodes(gm)
    by_param: dict[tuple[int, int], list[tuple[Node, HiddenInput]]] = {}
    for node, entry in present:
        node.meta[HIDDEN] = entry.param
        node.meta.pop(PARAM, None)
        by_param.setdefault((entry.param.handle, entry.param.param), []).append((node, entry))
    for key, entries in by_param.items():
        param = entries[0][1].param
        reads = {node: _find_reads(node, order) for node, _ in entries}
        first = min(
            (read for found in reads.values() for read in (*found.views, *found.computes)),
            key=lambda node: order[node],
            default=None,
        )
        if not any(found.computes for found in reads.values()) or first is None:
            continue
        value = splice(
            gm,
            lambda *values, param=param: _dequantize(param, values),
            _stored_inputs(stored.get(key, {}), param),
            before=first,
            decompositions=decompositions,
        )
        for node, entry in entries:
            if reads[node].computes:
                _replace_reads(gm.graph, node, reads[node], _repeat_views(value, entry.views, node))
    return gm


class _Reads(NamedTuple):
    views: tuple[Node, ...]
    """Views of a placeholder, in graph order."""
    computes: tuple[Node, ...]
    """What reads the placeholder or one of these views, the output apart."""


def _find_reads(placeholder: Node, order: Mapping[Node, int]) -> _Reads:
    """``order`` may be that of before other parameters were replaced: their views are not this one's."""
    views: dict[Node, None] = {}
    computes: dict[Node, None] = {}
    pending = [placeholder]
    while pending:
        source = pending.pop()
        for user in source.users:
            if is_view_of(user, source):
                views[user] = None
                pending.append(user)
            elif user.op != "output":
                computes[user] = None
    return _Reads(tuple(sorted(views, key=lambda node: order[node])), tuple(computes))


def _replace_reads(graph: Graph, placeholder: Node, reads: _Reads, value: Node) -> None:
    """Give computations ``value`` and views of it; what is returned keeps the placeholder's own views."""
    replaced = {placeholder: value}
    for view in reads.views:
        with graph.inserting_before(view):
            replaced[view] = graph.node_copy(view, lambda node: replaced.get(node, node))
    for node in reads.computes:
        for before, after in replaced.items():
            node.replace_input_with(before, after)
    for view in reversed(reads.views):
        for node in (view, replaced[view]):
            if not node.users:
                graph.erase_node(node)


def _repeat_views(value: Node, views: Sequence[ViewStep], origin: Node) -> Node:
    for step in views:
        with value.graph.inserting_after(value):
            node = value.graph.call_function(step.target, (value, *step.args), dict(step.kwargs))
        node.meta["val"] = step.target(value.meta["val"], *step.args, **step.kwargs)
        value = inherit_provenance(node, origin)
    return value


def _dequantize(param: GraphParam, stored: Sequence[Any]) -> Any:
    form = FORMATS[str(param.quantized)]
    return form.dequantize(form.stored(*stored), param.dtype)


def _stored_nodes(gm: GraphModule) -> dict[tuple[int, int], dict[str, Node]]:
    """The placeholders that ``add_buffer_inputs`` has made, by ``(handle, index)`` and kind."""
    found: dict[tuple[int, int], dict[str, Node]] = {}
    for node in placeholders(gm.graph):
        extra = node.meta.get(EXTRA)
        if extra is not None:
            found.setdefault((extra.handle, extra.index), {})[extra.kind] = node
    return found


def _stored_inputs(found: Mapping[str, Node], param: GraphParam) -> list[Node]:
    """The placeholders of the codes and scales of ``param`` by field, marked as it."""
    nodes = []
    for field in FORMATS[str(param.quantized)].stored._fields:
        if field not in found:
            raise PassError(PASS.name, f"'{param.name}' is stored as {param.quantized}, but its {field} is no input")
        found[field].meta[PARAM] = param
        nodes.append(found[field])
    return nodes


PASS = GraphPass(name="dequantize_params", requires=("buffers",), provides=("dequantized",))
