"""Multiply the gradients of launched bucket groups where they are written, instead of in a pass of its own.

    before   accumulate_wgrad_(main_grad, a, b, True); aten.copy_(main_grad_1, s)
    after    accumulate_wgrad_(main_grad, a, b, True, beta=f, alpha=f); m = aten.mul(s, f); aten.copy_(main_grad_1, m)

A mean over ranks is a sum of gradients that were multiplied by ``f = 1 / ranks`` (``GradScaling``). Matrix products
take the factor along for nothing, and Inductor fuses the other products into the kernels that store: reading and
writing all of ``grad_data`` once more is saved. Where ``f`` is a power of two, results are the same bits.

Of several writes to one ``main_grad``, the first also multiplies what earlier micro-batches have left there.

Requires: main_grads_written.
Ensures: main_grads_scaled: every write to a group of ``factors`` is multiplied, so that its launch says ``scaled``.
Raises: PassError when a gradient is written by an op that cannot be multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph, GraphModule, Node

from megabuf_fx.passes.contract import GraphPass, PassError
from megabuf_fx.passes.graph_utils import SCALED, aten, inherit_provenance, written_param
from megabuf_fx.runtime.ops import ACCUMULATING_OPS


def scale_main_grads(gm: GraphModule, *, factors: Mapping[tuple[int, int], float]) -> GraphModule:
    """``factors`` by bucket group, ``(handle, group)``; groups that are not in it are left as they are."""
    seen: set[tuple[int, int]] = set()
    for node in list(gm.graph.nodes):
        param = written_param(node)
        if param is None or param.key not in factors:
            continue
        factor, is_first = factors[param.key], (param.handle, param.param) not in seen
        seen.add((param.handle, param.param))
        if node.target in ACCUMULATING_OPS:
            node.kwargs = {**node.kwargs, "alpha": factor, **({"beta": factor} if is_first else {})}
        elif node.target is aten.copy_.default and is_first:
            node.args = (node.args[0], _multiplied(gm.graph, node, factor))
        else:
            raise PassError(PASS.name, f"cannot multiply what is written to main_grad of '{param.name}'", node)
    return gm


def _multiplied(graph: Graph, write: Node, factor: float) -> Node:
    # args: copy_(self, src)
    source = write.args[1]
    if not isinstance(source, Node):
        raise PassError(PASS.name, f"copy of {source}, expected a tensor", write)
    with graph.inserting_before(write):
        product = graph.call_function(aten.mul.Tensor, (source, factor))
    product.meta[SCALED] = True
    product.meta["val"] = aten.mul.Tensor(source.meta["val"], factor)
    return inherit_provenance(product, write)


PASS = GraphPass(name="scale_main_grads", requires=("main_grads_written",), provides=("main_grads_scaled",))
