"""Start the reduction of every bucket group directly after its last write.

    before   copy_(main_grad_3, g3); accumulate_wgrad_(main_grad_2, a, b); mm_1 = aten.mm(...)
    after    copy_(main_grad_3, g3); accumulate_wgrad_(main_grad_2, a, b)
             megabuf.start_grad_sync([main_grad_3, main_grad_2], token, handle, group); mm_1 = aten.mm(...)

A group never starts before its predecessor in ``launches``: its node moves behind the predecessor's. So the order is
that of the plan on every rank, whatever order the model's backward has. See [Note: order of collectives in a graph].

Requires: main_grads_written.
Ensures: grad_sync: one start per launched group, in launch order, after all writes of the group.
Raises: PassError when the graph has no token although it launches.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.fx import GraphModule, Node

from megabuf_fx.passes.contract import GraphPass, PassError
from megabuf_fx.passes.graph_utils import (
    MAIN_GRAD,
    inherit_provenance,
    placeholders,
    positions,
    storage_input,
    token_node,
    written_param,
)
from megabuf_fx.runtime.ops import start_grad_sync
from megabuf_fx.runtime.plan import GraphParam


def find_last_writes(gm: GraphModule) -> dict[tuple[int, int], Node]:
    """The last node that writes into each bucket group, by ``(handle, group)``."""
    return {param.key: node for node in gm.graph.nodes if (param := written_param(node)) is not None}


def insert_grad_sync(
    gm: GraphModule, *, launches: Sequence[tuple[int, int]], scaled: Collection[tuple[int, int]] = ()
) -> GraphModule:
    """``scaled`` are the groups whose writes ``scale_main_grads`` has multiplied."""
    if not launches:
        return gm
    graph = gm.graph
    token = token_node(gm)
    if token is None:
        raise PassError(PASS.name, f"launches {launches} but the graph has no token input")
    last_writes = find_last_writes(gm)
    views: dict[tuple[int, int], list[Node]] = {}
    for node in graph.nodes:
        param = node.meta.get(MAIN_GRAD)
        if isinstance(param, GraphParam):
            views.setdefault(param.key, []).append(node)
    order = positions(graph)
    boundary = max(placeholders(graph), key=lambda node: order[node])
    rank = order[boundary]
    for handle, group in launches:
        write = last_writes.get((handle, group))
        if write is not None and order[write] > rank:
            boundary, rank = write, order[write]
        with graph.inserting_after(boundary):
            # args: (main_grads, token, handle, group, scaled=False)
            args = (_destinations(views.get((handle, group), [])), token, handle, group)
            node = graph.call_function(start_grad_sync, (*args, True) if (handle, group) in scaled else args)
        node.meta["val"] = None
        boundary = inherit_provenance(node, write or boundary)
    return gm


def _destinations(views: list[Node]) -> list[Node]:
    """What the op mutates: the views, or, where they are slices of one whole buffer, that buffer."""
    return list(dict.fromkeys(storage_input(view) for view in views))


PASS = GraphPass(name="insert_grad_sync", requires=("main_grads_written",), provides=("grad_sync",))
