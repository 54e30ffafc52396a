"""Let gradients that consist of a few rows add these rows into ``main_grad``, without a table of zeros around them.

    before   e = aten.embedding_dense_backward(rows, indices, n, padding_idx, False)                 -> (..., e)
    after    megabuf.accumulate_embedding_(main_grad, rows, indices, padding_idx, accumulate)        -> (..., None)
    before   s = aten.add(mm, e)                                                                     -> (..., s)
    after    megabuf.accumulate_embedding_(main_grad, rows, indices, padding_idx, True)              -> (..., mm)

Legal because neither the table nor the sum has another reader. What is left of a sum (``mm``: the output layer of tied
embeddings) stays an output for later passes. They write it where it is computed, which is before the rows are added.

Inductor spells the table as zeros and an ``index_put`` with a mask (in torch 2.11: of masked rows), and
``weight[indices]`` is an ``index_put`` into zeros, too. With ``scale_grad_by_freq`` a table is left alone, unless the
graph itself has divided the rows by their counts. So is ``weight[:k]``, whose zeros Inductor folds into the kernel that
writes ``main_grad``.

A sum is then rounded after each of its rows, and not where tables were added; 16-bit rows and sums are not rounded on
their way to a wider ``main_grad``.

Requires: buffers, and that no pass has written gradients yet.
Ensures: every such table with one reader, alone or as a term of a sum, is added by one mutating op.
Raises: PassError when a gradient has another shape than its parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
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
from megabuf_fx.runtime.ops import accumulate_embedding_
from megabuf_fx.runtime.plan import GraphParam

_NO_PADDING = -1
_INDEX_PUTS = (aten.index_put.default, aten._unsafe_index_put.default)


class RowGrad(NamedTuple):
    """A gradient that is zero but for the rows at ``indices``, where ``rows`` are added up."""

    rows: Node
    indices: Node
    padding_idx: int
    """Rows of this index are left out; -1: none."""
    wraps: bool
    """Negative indices count from the end of the table, instead of being left out."""


def find_row_grad(grad: Node) -> RowGrad | None:
    """Look through casts of ``grad`` for a table that has one reader; None when there is no such table."""
    node = grad
    while is_cast(node) and len(node.users) == 1:
        node = node.all_input_nodes[0]
    if len(node.users) != 1 or node.op != "call_function":
        return None
    args: tuple[Any, ...] = node.args
    if node.target is aten.embedding_dense_backward.default:
        # args: (grad_output, indices, num_weights, padding_idx, scale_grad_by_freq)
        rows, indices, _, padding_idx, is_scaled = args
        return None if is_scaled else RowGrad(rows, indices, padding_idx, wraps=False)
    if node.target is aten._unsafe_masked_index_put_accumulate.default:
        # args: (self, mask, indices, values)
        zeros, mask, (indices, *others), rows = args
        padding_idx, wraps = _padding_of(mask, indices, len(node.meta["val"])), False
    elif node.target in _INDEX_PUTS and len(args) == 4 and args[3]:
        # args: (self, indices, values, accumulate=False)
        zeros, (indices, *others), rows = args[:3]
        padding_idx, wraps = _NO_PADDING, True
    else:
        return None
    if others or padding_idx is None or not _is_zeros(zeros) or not _has_rows(rows, indices, node):
        return None
    return RowGrad(rows, indices, padding_idx, wraps)


def _has_rows(rows: Any, indices: Any, table: Node) -> bool:
    """Whether there is one row per index: ``index_put`` broadcasts its values, and takes masks for indices."""
    if not isinstance(rows, Node) or not isinstance(indices, Node):
        return False
    shape = (*indices.meta["val"].shape, *table.meta["val"].shape[1:])
    return indices.meta["val"].dtype in (torch.int32, torch.int64) and tuple(rows.meta["val"].shape) == shape


def _is_zeros(node: Any) -> bool:
    if not isinstance(node, Node):
        return False
    # args: full(size, fill_value)
    is_filled = node.target is aten.full.default and bool(node.args[1] == 0)
    return is_filled or node.target in (aten.zeros.default, aten.new_zeros.default)


def _padding_of(mask: Any, indices: Any, size: int) -> int | None:
    """``padding_idx`` of ``(indices >= 0) & (indices < size) & (indices != padding_idx)``; None for other masks."""
    while isinstance(mask, Node) and mask.target is aten.unsqueeze.default:
        mask = mask.args[0]
    bounds: dict[Any, Any] = {}
    pending = [mask]
    while pending:
        node = pending.pop()
        if isinstance(node, Node) and node.target is aten.bitwise_and.Tensor:
            pending.extend(node.args)
        elif isinstance(node, Node) and len(node.args) == 2 and node.args[0] is indices and node.target not in bounds:
            bounds[node.target] = node.args[1]
        else:
            return None
    padding_idx = bounds.pop(aten.ne.Scalar, None)
    is_expected = bounds == {aten.ge.Scalar: 0, aten.lt.Scalar: size}
    return padding_idx if is_expected and isinstance(padding_idx, int) else None


class Terms(NamedTuple):
    """A gradient, taken apart where it is a sum."""

    tables: list[tuple[Node, RowGrad]]
    others: list[Node]


def find_terms(grad: Node) -> Terms:
    """Take apart sums with one reader."""
    tables: list[tuple[Node, RowGrad]] = []
    others: list[Node] = []
    pending = [grad]
    while pending:
        node = pending.pop()
        found = find_row_grad(node)
        if _is_sum(node):
            pending.extend(reversed(node.all_input_nodes))
        # Equal terms would look as one that is added twice by mistake; the verifier refuses that.
        elif found is not None and all(found != other for _, other in tables):
            tables.append((node, found))
        else:
            others.append(node)
    return Terms(tables, others)


def _is_sum(node: Node) -> bool:
    """Whether it adds two tensors of its own shape, unscaled, for one reader."""
    # Without a second input node it adds a number, or a tensor to itself.
    if node.target is not aten.add.Tensor or node.kwargs or len(node.users) != 1 or len(node.all_input_nodes) != 2:
        return False
    return all(source.meta["val"].shape == node.meta["val"].shape for source in node.all_input_nodes)


def fuse_embedding_grad(gm: GraphModule, *, gradients: Mapping[int, GraphParam], accumulate: bool) -> GraphModule:
    """``gradients`` maps output position to parameter."""
    graph = gm.graph
    values = outputs(graph)
    main_grads = main_grad_nodes(gm)
    for position, param in gradients.items():
        grad = values[position]
        # The output node is one reader, however often it returns the gradient.
        if not isinstance(grad, Node) or sum(value is grad for value in values) > 1:
            continue
        tables, others = find_terms(grad)
        if not tables or param.stride != contiguous_stride(param.shape):
            continue
        if tuple(grad.meta["val"].shape) != param.shape:
            raise PassError(
                PASS.name, f"gradient of '{param.name}' is {grad.meta['val'].shape}, expected {param.shape}", grad
            )
        with graph.inserting_before(grad):
            values[position] = _add_up(graph, others)
            for index, (table, found) in enumerate(tables):
                adds = accumulate or index > 0 or bool(others)
                node = _add_rows(graph, found, main_grads[param.handle, param.param], table, adds)
                inherit_provenance(node, grad)
        set_outputs(graph, values)
        _erase_unread(grad)
    return gm


def _erase_unread(last: Node) -> None:
    """Erase ``last`` and what only it has read. Other unread nodes, such as views of buffers, wait for their pass."""
    pending = {last}
    while pending:
        node = pending.pop()
        if node.op == "call_function" and not node.users:
            pending.update(node.all_input_nodes)
            node.graph.erase_node(node)


def _add_up(graph: Graph, terms: list[Node]) -> Node | None:
    total = terms[0] if terms else None
    for term in terms[1:]:
        total = inherit_provenance(_call(graph, aten.add.Tensor, total, term), term)
    return total


def _add_rows(graph: Graph, found: RowGrad, main_grad: Node, table: Node, accumulate: bool) -> Node:
    indices = found.indices
    if found.wraps:
        indices = inherit_provenance(_call(graph, aten.remainder.Scalar, indices, table.meta["val"].shape[0]), table)
    node = graph.call_function(accumulate_embedding_, (main_grad, found.rows, indices, found.padding_idx, accumulate))
    node.meta["val"] = None
    return inherit_provenance(node, table)


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, Node) else arg for arg in args))
    return node


PASS = GraphPass(name="fuse_embedding_grad", requires=("buffers",), preserves_numerics=False)
