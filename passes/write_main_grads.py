"""Write the remaining gradients into ``main_grad`` and return None instead.

    before   g = aten.sum(...)                                    -> (..., g)
    after    g = aten.sum(...); aten.copy_(main_grad, g)          -> (..., None)              overwrite
             s = aten.add(main_grad, g); aten.copy_(main_grad, s) -> (..., None)              accumulate
             s = ...; w = aten.where(flag, s, g); aten.copy_(main_grad, w) -> (..., None)     by the flag

``copy_`` of a sum, because Inductor fuses it into the kernel that produces the gradient: one in-place store. The flag
selects and never multiplies: what an overwritten ``main_grad`` holds may be NaN.

Requires: buffers.
Ensures: main_grads_written; no output belongs to a bound parameter any more.
Raises: PassError when a gradient has another shape than its parameter, or the flag is wanted and is no input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import GraphModule, Node

from megabuf_fx.passes.contract import GraphPass, PassError
from megabuf_fx.passes.graph_utils import (
    aten,
    flag_node,
    inherit_provenance,
    main_grad_nodes,
    outputs,
    placeholders,
    set_outputs,
)
from megabuf_fx.runtime.plan import GraphParam, Write


def write_main_grads(gm: GraphModule, *, gradients: Mapping[int, GraphParam], write: Write) -> GraphModule:
    """``gradients`` maps output position to parameter; ``write`` is that of the graph's ``Role``."""
    graph = gm.graph
    values = outputs(graph)
    main_grads = main_grad_nodes(gm)
    last_input = max([*placeholders(graph), *main_grads.values()], key={n: i for i, n in enumerate(graph.nodes)}.get)  # type: ignore[arg-type]
    condition = None
    if write == "flagged":
        flag = flag_node(gm)
        if flag is None:
            raise PassError(PASS.name, "the choice is left to a flag that is not among the graph's inputs")
        condition = _call_after(last_input, aten.ne.Scalar, (flag, 0), flag)
    for position, param in gradients.items():
        grad = values[position]
        if not isinstance(grad, Node):
            continue
        main_grad = main_grads[param.handle, param.param]
        if tuple(grad.meta["val"].shape) != param.shape:
            raise PassError(
                PASS.name, f"gradient of '{param.name}' is {grad.meta['val'].shape}, expected {param.shape}", grad
            )
        # A gradient can be an input itself; nothing may stand between inputs.
        anchor = (condition or last_input) if grad.op == "placeholder" else grad
        value = grad
        if write != "overwrite":
            value = anchor = _call_after(anchor, aten.add.Tensor, (main_grad, grad), grad)
        if condition is not None:
            value = anchor = _call_after(anchor, aten.where.self, (condition, value, grad), grad)
        with graph.inserting_after(anchor):
            node = graph.call_function(aten.copy_.default, (main_grad, value))
        node.meta["val"] = main_grad.meta["val"]
        inherit_provenance(node, grad)
        values[position] = None
    set_outputs(graph, values)
    graph.eliminate_dead_code()
    return gm


def _call_after(anchor: Node, target: Any, args: tuple[Any, ...], origin: Node) -> Node:
    with anchor.graph.inserting_after(anchor):
        node = anchor.graph.call_function(target, args)
    node.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, Node) else arg for arg in args))
    return inherit_provenance(node, origin)


PASS = GraphPass(name="write_main_grads", requires=("buffers",), provides=("main_grads_written",))
