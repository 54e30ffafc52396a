"""Mark which graph inputs are parameters, and check that graph and plan fit together.

    before   primals_1, primals_2, primals_3                   (forward)
    after    the same; primals_2.meta["megabuf_param"] = GraphParam(name="fc.weight", ...)

AOTAutograd keeps the inputs of the Dynamo graph in order, and its backward returns one output per forward input, so
input ``i`` belongs to parameter ``i`` and to backward output ``i``.

Requires: a forward graph as AOTAutograd made it.
Ensures: every planned parameter is marked on a placeholder of its shape.
Raises: PassError when counts or shapes do not fit, as with inputs that AOTAutograd unwraps (tensor subclasses).
"""

from __future__ import annotations

from torch.fx import GraphModule

from megabuf_fx.passes.contract import GraphPass, PassError
from megabuf_fx.passes.graph_utils import PARAM, placeholders
from megabuf_fx.runtime.plan import GraphPlan


def locate_params(gm: GraphModule, *, plan: GraphPlan) -> GraphModule:
    inputs = placeholders(gm.graph)
    if len(inputs) != len(plan.inputs):
        raise PassError(
            PASS.name,
            f"the graph has {len(inputs)} inputs, the traced model {len(plan.inputs)}; inputs that are tensor "
            "subclasses (DTensor) or effect tokens are not supported",
        )
    for node, param in zip(inputs, plan.inputs):
        if param is None:
            continue
        shape = getattr(node.meta["val"], "shape", None)
        if shape is None or tuple(shape) != param.shape:
            found = tuple(shape) if shape is not None else node.meta["val"]
            raise PassError(PASS.name, f"parameter '{param.name}' has shape {param.shape}, not {found}", node)
        node.meta[PARAM] = param
    return gm


PASS = GraphPass(name="locate_params", provides=("params",))
