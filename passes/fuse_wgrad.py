"""Let weight-gradient matrix products write straight into ``main_grad``.

    before   mm = aten.mm(a, b); t = aten.permute(mm, [1, 0]); t1 = aten.permute(t, ...)   -> (..., t1)
    after    megabuf.accumulate_wgrad_(main_grad, a, b, accumulate)                        -> (..., None)

Legal because the product has no other reader. It saves the temporary gradient and, when accumulating, one rounding:
the sum of micro-batches is added inside the product (``addmm``) instead of after it.

Requires: buffers.
Ensures: every gradient that is a (transposed, widened) ``mm`` with one reader is written by one mutating op.
Raises: PassError when a product has other operands than two tensors, or another shape than its parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from torch.fx import Graph, GraphModule, Node

from megabuf_fx.passes.contract import GraphPass, PassError
from megabuf_fx.passes.graph_utils import (
    aten,
    contiguous_stride,
    inherit_provenance,
    is_cast,
    main_grad_nodes,
    outputs,
    set_outputs,
)
from megabuf_fx.runtime.ops import accumulate_wgrad_
from megabuf_fx.runtime.plan import GraphParam

_TRANSPOSES = (aten.permute.default, aten.t.default, aten.transpose.int)


class WeightGrad(NamedTuple):
    """A gradient that is a matrix product, perhaps transposed."""

    chain: tuple[Node, ...]
    """From the gradient to its ``mm``; each has one reader."""
    is_transposed: bool

    @property
    def mm(self) -> Node:
        return self.chain[-1]


def find_weight_grad(grad: Node) -> WeightGrad | None:
    """Peel transposes and widening casts off ``grad``; None when what is left is not an ``mm`` of its own."""
    node, is_transposed = grad, False
    chain: list[Node] = []
    while len(node.users) == 1:
        chain.append(node)
        if node.target is aten.mm.default:
            return WeightGrad(tuple(chain), is_transposed)
        if node.op != "call_function" or not node.all_input_nodes:
            return None
        source = node.all_input_nodes[0]
        if node.target in _TRANSPOSES and node.meta["val"].dim() == 2:
            is_transposed = is_transposed != _swaps(node)
        elif not (is_cast(node) and source.meta["val"].dtype.itemsize <= node.meta["val"].dtype.itemsize):
            return None
        node = source
    return None


def _swaps(node: Node) -> bool:
    """Whether a two-dimensional permute exchanges the dimensions (``permute(x, [0, 1])`` does not)."""
    if node.target is aten.t.default:
        return True
    # args: permute(self, dims); transpose(self, dim0, dim1)
    dims = node.args[1] if node.target is aten.permute.default else node.args[1:3]
    if not isinstance(dims, (list, tuple)):
        return False
    first, second = (int(dim) % 2 for dim in dims)  # type: ignore[arg-type]
    return first > second if node.target is aten.permute.default else first != second


def fuse_wgrad(gm: GraphModule, *, gradients: Mapping[int, GraphParam], accumulate: bool) -> GraphModule:
    """``gradients`` maps output position to parameter."""
    graph = gm.graph
    values = outputs(graph)
    main_grads = main_grad_nodes(gm)
    replaced: list[Node] = []
    # The output node is one reader, however often it returns a gradient.
    returned = Counter(value for value in values if isinstance(value, Node))
    for position, param in gradients.items():
        grad = values[position]
        found = find_weight_grad(grad) if isinstance(grad, Node) and returned[grad] == 1 else None
        if found is None:
            continue
        if tuple(grad.meta["val"].shape) != param.shape:
            raise PassError(
                PASS.name, f"gradient of '{param.name}' is {grad.meta['val'].shape}, expected {param.shape}", found.mm
            )
        if param.stride != contiguous_stride(param.shape):
            continue
        _write_product(graph, found, main_grads[param.handle, param.param], grad, accumulate)
        values[position] = None
        replaced.extend(found.chain)
    set_outputs(graph, values)
    for node in replaced:
        graph.erase_node(node)
    return gm


def _write_product(graph: Graph, found: WeightGrad, main_grad: Node, grad: Node, accumulate: bool) -> None:
    # args: mm(self, mat2)
    lhs, rhs = found.mm.args
    if not isinstance(lhs, Node) or not isinstance(rhs, Node):
        raise PassError(PASS.name, f"mm of {lhs} and {rhs}, expected two tensors", found.mm)
    with graph.inserting_before(found.mm):
        if found.is_transposed:
            # (a b)^T = b^T a^T: transposing the factors is a view, transposing the product would be a copy.
            lhs, rhs = _transpose(graph, rhs), _transpose(graph, lhs)
        node = graph.call_function(accumulate_wgrad_, (main_grad, lhs, rhs, accumulate))
    node.meta["val"] = None
    inherit_provenance(node, found.mm)
    inherit_provenance(node, grad)


def _transpose(graph: Graph, node: Node) -> Node:
    # A transpose of a transpose is its source; so the factors read the activations as they are stored.
    if node.target in _TRANSPOSES and _swaps(node) and isinstance(node.args[0], Node):
        return node.args[0]
    transposed = graph.call_function(aten.permute.default, (node, [1, 0]))
    transposed.meta["val"] = node.meta["val"].t()
    return inherit_provenance(transposed, node)


PASS = GraphPass(name="fuse_wgrad", requires=("buffers",), preserves_numerics=False)
