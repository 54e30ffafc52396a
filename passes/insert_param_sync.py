"""Wait for gathered parameters directly before their first use.

    before   t = aten.t(primals_1); mm = aten.mm(x, t)
    after    megabuf.wait_param_sync([primals_1, primals_2], token, handle, group); t = aten.t(primals_1); ...

One wait per bucket group and graph, before the first node that reads any of the group's parameters; being an output
(saved for backward) is a use. The host starts the gathers before the graph runs, and a wait with nothing pending is a
no-op, so one forward serves every step.

Requires: params.
Ensures: param_sync: every read of a parameter is dominated by the wait of its group.
Raises: PassError when the graph has no token although it waits.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from megabuf_fx.passes.contract import GraphPass, PassError
from megabuf_fx.passes.graph_utils import PARAM, inherit_provenance, placeholders, positions, token_node
from megabuf_fx.runtime.ops import wait_param_sync
from megabuf_fx.runtime.plan import GraphParam


def find_group_params(gm: GraphModule) -> dict[tuple[int, int], list[Node]]:
    """Parameter placeholders that have users, by bucket group ``(handle, group)``."""
    groups: dict[tuple[int, int], list[Node]] = {}
    for node in placeholders(gm.graph):
        param = node.meta.get(PARAM)
        if isinstance(param, GraphParam) and node.users:
            groups.setdefault(param.key, []).append(node)
    return groups


def insert_param_sync(gm: GraphModule) -> GraphModule:
    groups = find_group_params(gm)
    if not groups:
        return gm
    token = token_node(gm)
    if token is None:
        raise PassError(PASS.name, f"waits for groups {sorted(groups)} but the graph has no token input")
    order = positions(gm.graph)
    for (handle, group), params in groups.items():
        first_use = min((user for param in params for user in param.users), key=lambda node: order[node])
        with gm.graph.inserting_before(first_use):
            # args: (params, token, handle, group)
            node = gm.graph.call_function(wait_param_sync, (params, token, handle, group))
        node.meta["val"] = None
        inherit_provenance(node, first_use)
    return gm


PASS = GraphPass(name="insert_param_sync", requires=("params", "buffers"), provides=("param_sync",))
