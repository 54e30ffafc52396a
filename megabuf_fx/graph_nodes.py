"""What the nodes of a final graph are and cost, as plain values for ``graph.json``.

One record per node, in execution order:

    name, op        "mm_3", "aten.mm.default"
    inputs          names of the nodes that it reads
    shape, dtype    of its result; null when it has none, the first one of several
    kind            input, output, view (no work), compute, write, launch or wait
    flops           floating-point operations, by the formulas of ``torch.utils.flop_counter``; 0 where it has none
    nbytes          bytes read and written, each tensor once
    module, source  path of the user's module and last line of the user's code that it comes from; "" if unknown
    params          write: the parameter whose ``main_grad`` it writes; first use: those it is the first to read
    group           write, launch, wait: bucket group ``[handle, group]``, otherwise null
    first_use       bucket groups ``[handle, group]`` whose parameters this node is the first to read

Sizes that are symbols count with the values that they had when the graph was traced.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

import megabuf_fx._compat as _compat
from megabuf_fx.passes.graph_utils import PARAM, adds_rows, aten, is_view, written_param
from megabuf_fx.runtime.ops import accumulate_wgrad_, start_grad_sync, wait_param_sync
from megabuf_fx.runtime.plan import GraphParam

_SAME_FLOPS = {
    "aten._scaled_dot_product_flash_attention_for_cpu": aten._scaled_dot_product_flash_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": aten._scaled_dot_product_flash_attention_backward,
    "aten._scaled_dot_product_fused_attention_overrideable": aten._scaled_dot_product_flash_attention,
}
"""Ops without a formula, and one with the same leading arguments that has it."""
_READS_ROWS = (aten.embedding.default, aten.index.Tensor, aten.gather.default, aten.index_select.default)
"""Ops that read of their first argument only what they return."""


def describe_nodes(gm: GraphModule) -> list[dict[str, Any]]:
    """One record per node of ``gm``, in order; see the head of this file."""
    seen: set[tuple[int, int]] = set()
    return [_describe(node, seen) for node in gm.graph.nodes]


def source_line(node: Node) -> str:
    """Last line of the user's code that ``node`` comes from, empty if unknown."""
    # Some versions of Python underline the expression in a line of its own.
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip(" ^~")]
    # AOTAutograd ends the trace of a sum of gradients with a remark.
    lines = [line for line in lines if not line.startswith("Gradient addition node")]
    return lines[-1] if lines else ""


def module_path(node: Node) -> str:
    """Path of the module whose call ``node`` belongs to, as in ``named_modules``; of a backward node, that of the
    forward node which it differentiates."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next((path for path, _ in reversed(list(stack.values()))), "")
    # Dynamo writes "L['self'].blocks.0"; some versions write "L['self']._modules['blocks']._modules['0']".
    path = re.sub(r"\._modules\['([^']*)'\]", r".\1", path)
    return re.sub(r"^L\['\w+'\]\.?", "", path)


def _describe(node: Node, seen: set[tuple[int, int]]) -> dict[str, Any]:
    param = written_param(node) if node.op == "call_function" else None
    first_use = _first_use(node, seen)
    kind = _kind(node, param)
    does_work = kind in ("compute", "write")
    value = next(_tensors(node.meta.get("val")), None)
    return {
        "name": node.name,
        "op": str(node.target) if _compat.is_op(node.target) else getattr(node.target, "__name__", str(node.target)),
        "inputs": [source.name for source in node.all_input_nodes],
        "shape": None if value is None else _sizes(value),
        "dtype": None if value is None else str(value.dtype).removeprefix("torch."),
        "kind": kind,
        "flops": _flops(node) if does_work else 0,
        "nbytes": _nbytes(node) if does_work else 0,
        "module": module_path(node),
        "source": source_line(node),
        "params": [param.name] if param is not None else [p.name for p in first_use],
        "group": list(param.key) if param is not None else _group_argument(node),
        "first_use": [list(key) for key in dict.fromkeys(p.key for p in first_use)],
    }


def _kind(node: Node, param: GraphParam | None) -> str:
    if node.op != "call_function":
        return {"placeholder": "input", "output": "output"}.get(node.op, "view")
    if node.target is start_grad_sync:
        return "launch"
    if node.target is wait_param_sync:
        return "wait"
    if param is not None:
        return "write"
    schema = getattr(node.target, "_schema", None)
    # Without a schema it is Python's own: getitem of a tuple, arithmetic on sizes.
    return "view" if schema is None or (is_view(node) and not schema.is_mutable) else "compute"


def _group_argument(node: Node) -> list[int] | None:
    if node.target not in (start_grad_sync, wait_param_sync):
        return None
    # args: (tensors, token, handle, group)
    return [int(node.args[2]), int(node.args[3])]  # type: ignore[arg-type]


def _first_use(node: Node, seen: set[tuple[int, int]]) -> list[GraphParam]:
    """Parameters of bucket groups that no earlier node has read; a wait is no read."""
    if node.op != "call_function" or node.target is wait_param_sync:
        return []
    read = [p for source in node.all_input_nodes if isinstance(p := source.meta.get(PARAM), GraphParam)]
    found = [param for param in read if param.key not in seen]
    seen.update(param.key for param in found)
    return found


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in _compat.tree_leaves(value) if isinstance(leaf, Tensor))


def _sizes(value: Tensor) -> list[int]:
    return [_compat.size_hint(size) for size in value.shape]


def _nbytes(node: Node) -> int:
    written = list(_tensors(node.meta.get("val")))
    read = [tensor for source in node.all_input_nodes for tensor in _tensors(source.meta.get("val"))]
    if node.target in _READS_ROWS:
        read = [*written, *read[1:]]
    if adds_rows(node):
        # Of `main_grad` only these rows; overwriting sets all of it to zero.
        read[0] = read[0].new_empty(read[1].shape)
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        # The result is one of the arguments.
        written = []
    return sum(math.prod(_sizes(tensor)) * tensor.element_size() for tensor in (*read, *written))


def _flops(node: Node) -> int:
    arguments: tuple[Any, ...] = node.args
    packet = getattr(node.target, "overloadpacket", None)
    if node.target is accumulate_wgrad_:
        # args: (main_grad, lhs, rhs, accumulate)
        packet, arguments = aten.mm, node.args[1:3]
    formula = flop_registry.get(_SAME_FLOPS.get(str(packet), packet))
    if formula is None:
        return 0
    values = _compat.tree_map(_meta_value, arguments)
    results = _compat.tree_map(_meta_value, node)
    try:
        return int(formula(*values, **_compat.tree_map(_meta_value, dict(node.kwargs)), out_val=results))
    except (TypeError, ValueError, AssertionError, IndexError):
        # Formulas assert what they cannot count (ragged shapes).
        return 0


def _meta_value(value: Any) -> Any:
    """What an argument stands for, without data: formulas look at shapes only."""
    if not isinstance(value, Node):
        return value
    return _compat.tree_map(
        lambda leaf: torch.empty(_sizes(leaf), dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf,
        value.meta.get("val"),
    )
