"""Reading FX graphs: inputs, outputs, and what the megabuf passes have put into them.

Passes leave two marks in ``node.meta``, so that later passes and the verifier need no side table:

* ``meta["megabuf_param"]``: the ``GraphParam`` of a placeholder that is a parameter, or codes or scales of one;
* ``meta["megabuf_hidden"]``: the same of a placeholder whose memory nothing may read, as the parameter is quantized;
* ``meta["megabuf_extra"]``: the ``ExtraInput`` of a placeholder that ``add_buffer_inputs`` has made;
* ``meta["megabuf_main_grad"]``: the ``GraphParam`` of a node that is a ``main_grad`` (placeholder, or view of a whole
  buffer), and ``meta["megabuf_token"]``, ``meta["megabuf_flag"]`` on the placeholders of the token and of the flag;
* ``meta["megabuf_scaled"]``: on a product of a gradient with the factor of its bucket group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from megabuf_fx.runtime.ops import accumulate_embedding_, start_grad_sync, wait_param_sync
from megabuf_fx.runtime.plan import GraphParam

aten = torch.ops.aten

PARAM = "megabuf_param"
HIDDEN = "megabuf_hidden"
EXTRA = "megabuf_extra"
MAIN_GRAD = "megabuf_main_grad"
TOKEN = "megabuf_token"
FLAG = "megabuf_flag"
SCALED = "megabuf_scaled"

# A new node inherits where it comes from, so that traces and profiles show the user's source line.
_PROVENANCE = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "seq_nr", "original_aten", "from_node")


def placeholders(graph: Graph) -> list[Node]:
    return graph.find_nodes(op="placeholder")


def output_node(graph: Graph) -> Node:
    node: Node = next(iter(graph.find_nodes(op="output")))
    return node


def outputs(graph: Graph) -> list[Any]:
    """The flat outputs: nodes and None."""
    # args: (outputs,)
    (values,) = output_node(graph).args
    return list(values) if isinstance(values, Sequence) else [values]


def set_outputs(graph: Graph, values: Sequence[Any]) -> None:
    output_node(graph).args = (tuple(values),)


def positions(graph: Graph) -> dict[Node, int]:
    """Place of every node in the current order; any insertion makes it out of date."""
    return {node: index for index, node in enumerate(graph.nodes)}


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def inherit_provenance(node: Node, origin: Node) -> Node:
    """Copy stack trace and module of ``origin`` to the inserted ``node``."""
    for key in _PROVENANCE:
        if key in origin.meta and key not in node.meta:
            node.meta[key] = origin.meta[key]
    return node


def splice(
    gm: GraphModule,
    function: Callable[..., Any],
    inputs: Sequence[Node],
    *,
    before: Node,
    decompositions: Mapping[Any, Callable[..., Any]],
) -> Node:
    """Insert the ops of ``function(*inputs)``, which returns one tensor, before the node ``before``; its result.

    Traced with fake tensors, so ``meta["val"]`` is right on every new node.
    """
    values = [node.meta["val"] for node in inputs]
    with values[0].fake_mode:
        traced = make_fx(function, decomposition_table=dict(decompositions))(*values)
    copies: dict[Node, Node] = dict(zip(placeholders(traced.graph), inputs))
    (result,) = outputs(traced.graph)
    for node in traced.graph.nodes:
        if node.op != "call_function":
            continue
        with gm.graph.inserting_before(before):
            copies[node] = gm.graph.node_copy(node, lambda source: copies[source])
        inherit_provenance(copies[node], before)
    return copies[result]


def main_grad_nodes(gm: GraphModule) -> dict[tuple[int, int], Node]:
    """The ``main_grad`` node of each parameter, by ``(handle, param)``."""
    return {(p.handle, p.param): n for n in gm.graph.nodes if (p := _main_grad_of(n)) is not None}


def _main_grad_of(node: Node) -> GraphParam | None:
    param = node.meta.get(MAIN_GRAD)
    return param if isinstance(param, GraphParam) else None


def written_param(node: Node) -> GraphParam | None:
    """The parameter whose ``main_grad`` this node writes, itself or through a view; None for any other node.

    Collectives declare that they write what they send and wait for; they do not count.
    """
    destinations = (destination for written in written_nodes(node) for destination in _bases(written))
    return next((param for base in destinations if (param := _main_grad_of(base)) is not None), None)


def written_nodes(node: Node) -> list[Node]:
    """The arguments that this op writes in place, by its schema; none for collectives of ours."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable or node.target in (start_grad_sync, wait_param_sync):
        return []
    arguments = [*node.args, *([None] * (len(schema.arguments) - len(node.args)))]
    values = [node.kwargs.get(spec.name, value) for spec, value in zip(schema.arguments, arguments)]
    return [
        value
        for spec, value in zip(schema.arguments, values)
        if spec.alias_info is not None and spec.alias_info.is_write and isinstance(value, Node)
    ]


def _bases(node: Node) -> Iterator[Node]:
    """The node and what it is a view of, up to the input."""
    yield node
    while node.op == "call_function" and node.all_input_nodes and is_view(node):
        node = node.all_input_nodes[0]
        yield node


def is_cast(node: Node) -> bool:
    """Whether this op changes the dtype of its first argument and nothing else of it."""
    # Inductor's decompositions spell the cast as prims.convert_element_type.
    return node.target in (aten._to_copy.default, torch.ops.prims.convert_element_type.default)


def adds_rows(node: Node) -> bool:
    """Whether this node adds rows to a ``main_grad`` and keeps what is there."""
    # args: (main_grad, grad, indices, padding_idx, accumulate)
    return node.target is accumulate_embedding_ and node.args[4] is True


def is_view(node: Node) -> bool:
    """Whether the result of this op aliases its first argument (views and in-place ops), by its schema."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(value.alias_info is not None for value in schema.returns)


def is_view_of(node: Node, source: Node) -> bool:
    """Whether this op does nothing but view ``source``. In-place ops read or write it, whichever argument it is."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not schema.is_mutable and is_view(node) and node.args[:1] == (source,)


def storage_input(node: Node) -> Node:
    """The graph input of which ``node`` is a view, or the node itself."""
    *_, base = _bases(node)
    return base


def flag_node(gm: GraphModule) -> Node | None:
    """The placeholder of the accumulate flag, if the graph has one."""
    return next((node for node in placeholders(gm.graph) if node.meta.get(FLAG)), None)


def token_node(gm: GraphModule) -> Node | None:
    """The token placeholder, if the graph has one."""
    return next((node for node in placeholders(gm.graph) if node.meta.get(TOKEN)), None)
