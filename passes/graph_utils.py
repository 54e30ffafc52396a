"""Reading FX graphs: inputs, outputs, and what the megabuf passes have put into them.

Passes leave two marks in ``node.meta``, so that later passes and the verifier need no side table:

* ``meta["megabuf_param"]``: the ``GraphParam`` of a placeholder that is a parameter (forward);
* ``meta["megabuf_main_grad"]``: the ``GraphParam`` of a node that is a ``main_grad`` (placeholder, or view of a whole
  buffer), and ``meta["megabuf_token"]`` on the token placeholder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from megabuf_fx.runtime.ops import accumulate_wgrad_
from megabuf_fx.runtime.plan import GraphParam

aten = torch.ops.aten

PARAM = "megabuf_param"
MAIN_GRAD = "megabuf_main_grad"
TOKEN = "megabuf_token"

# A new node inherits where it comes from, so that traces and profiles show the user's source line.
_PROVENANCE = ("stack_trace", "nn_module_stack", "seq_nr", "original_aten", "from_node")


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


def inherit_provenance(node: Node, origin: Node) -> Node:
    """Copy stack trace and module of ``origin`` to the inserted ``node``."""
    for key in _PROVENANCE:
        if key in origin.meta and key not in node.meta:
            node.meta[key] = origin.meta[key]
    return node


def main_grad_nodes(gm: GraphModule) -> dict[tuple[int, int], Node]:
    """The ``main_grad`` node of each parameter, by ``(handle, param)``."""
    return {(p.handle, p.param): n for n in gm.graph.nodes if (p := _main_grad_of(n)) is not None}


def _main_grad_of(node: Node) -> GraphParam | None:
    param = node.meta.get(MAIN_GRAD)
    return param if isinstance(param, GraphParam) else None


def written_param(node: Node) -> GraphParam | None:
    """The parameter whose ``main_grad`` this node writes, None for any other node."""
    # args: copy_(self, src); accumulate_wgrad_(main_grad, lhs, rhs, accumulate)
    if node.op == "call_function" and node.target in (aten.copy_.default, accumulate_wgrad_):
        destination = node.args[0]
        if isinstance(destination, Node):
            return _main_grad_of(destination)
    return None


def token_node(gm: GraphModule) -> Node | None:
    """The token placeholder, if the graph has one."""
    return next((node for node in placeholders(gm.graph) if node.meta.get(TOKEN)), None)
