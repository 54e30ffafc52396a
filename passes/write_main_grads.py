"""Write the remaining gradients into ``main_grad`` and return None instead.

    before   g = aten.sum(...)                                    -> (..., g)
    after    g = aten.sum(...); aten.copy_(main_grad, g)          -> (..., None)              overwrite
             s = aten.add(main_grad, g); aten.copy_(main_grad, s) -> (..., None)              accumulate

``copy_`` of a sum, because Inductor fuses it into the kernel that produces the gradient: one in-place store.

Requires: buffers.
Ensures: main_grads_written; no output belongs to a bound parameter any more.
Raises: PassError when a gradient has another shape than its parameter.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import GraphModule, Node

from megabuf_fx.passes.contract import GraphPass, PassError
from megabuf_fx.passes.graph_utils import (
    aten,
    inherit_provenance,
    main_grad_nodes,
    outputs,
    placeholders,
    set_outputs,
)
from megabuf_fx.runtime.plan import GraphParam


def write_main_grads(gm: GraphModule, *, gradients: Mapping[int, GraphParam], accumulate: bool) -> GraphModule:
    """``gradients`` maps output position to parameter."""
    graph = gm.graph
    values = outputs(graph)
    main_grads = main_grad_nodes(gm)
    last_input = max([*placeholders(graph), *main_grads.values()], key={n: i for i, n in enumerate(graph.nodes)}.get)  # type: ignore[arg-type]
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
        anchor = last_input if grad.op == "placeholder" else grad
        value = grad
        if accumulate:
            with graph.inserting_after(anchor):
                value = anchor = graph.call_function(aten.add.Tensor, (main_grad, grad))
            value.meta["val"] = main_grad.meta["val"] + grad.meta["val"]
            inherit_provenance(value, grad)
        with graph.inserting_after(anchor):
            write = graph.call_function(aten.copy_.default, (main_grad, value))
        write.meta["val"] = main_grad.meta["val"]
        inherit_provenance(write, grad)
        values[position] = None
    set_outputs(graph, values)
    graph.eliminate_dead_code()
    return gm


PASS = GraphPass(name="write_main_grads", requires=("buffers",), provides=("main_grads_written",))
