"""Prove, on the final graph, what the passes promise.

Backward: every launched bucket group is launched exactly once, in launch order, after every write of the group and
with all the destinations it writes; no write comes later; each gradient is written exactly once, over what is there or
added to it as the role says, and only distinct terms of rows are added afterwards; no bound parameter is left among the
outputs; collectives share one token.
Forward: every read of a parameter comes after exactly one wait of its group, and that wait names the parameter.

Both, with quantized parameters: no op reads the memory of one.

Requires: main_grads_written and grad_sync (backward), or param_sync (forward); dequantized for the last.
Ensures: the properties above hold; the graph is unchanged.
Raises: PassError naming parameter, bucket group and node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch.fx import GraphModule, Node

from megabuf_fx.passes.contract import GraphPass, PassError
from megabuf_fx.passes.graph_utils import (
    HIDDEN,
    PARAM,
    SCALED,
    adds_rows,
    aten,
    is_view_of,
    outputs,
    placeholders,
    positions,
    storage_input,
    token_node,
    written_nodes,
    written_param,
)
from megabuf_fx.runtime.ops import ACCUMULATING_OPS, start_grad_sync, wait_param_sync
from megabuf_fx.runtime.plan import GraphParam, Write


def verify_backward(
    gm: GraphModule,
    *,
    gradients: Mapping[int, GraphParam],
    write: Write,
    launches: Sequence[tuple[int, int]],
    factors: Mapping[tuple[int, int], float] = MappingProxyType({}),
) -> GraphModule:
    """``gradients`` maps output position to parameter; ``write`` and ``launches`` are the role's, ``factors`` what the
    gradients of a launched group are multiplied by."""
    values = outputs(gm.graph)
    writes: dict[tuple[int, int], list[Node]] = {}
    by_group: dict[tuple[int, int], list[tuple[Node, GraphParam]]] = {}
    for node in gm.graph.nodes:
        param = written_param(node)
        if param is not None:
            writes.setdefault((param.handle, param.param), []).append(node)
            by_group.setdefault(param.key, []).append((node, param))
    for position, param in gradients.items():
        if values[position] is not None:
            raise PassError(BACKWARD.name, f"gradient of '{param.name}' is still output {position}", values[position])
        _check_written_once(param, writes.get((param.handle, param.param), []), write)
    starts = [node for node in gm.graph.nodes if node.target is start_grad_sync]
    # args: (main_grads, token, handle, group)
    found = [(node.args[2], node.args[3]) for node in starts]
    if found != list(launches):
        raise PassError(BACKWARD.name, f"bucket groups are launched as {found}, expected {list(launches)}")
    order = positions(gm.graph)
    first_writes = {group[0] for group in writes.values()}
    token = token_node(gm)
    for node, key in zip(starts, launches):
        _check_token(token, node, BACKWARD.name, key)
        # args: (main_grads, token, handle, group, scaled=False)
        if (node.args[4:] == (True,)) != (key in factors):
            raise PassError(BACKWARD.name, f"the launch of bucket group {key} says the wrong thing of its factor", node)
        sent = _named(node)
        for writer, param in by_group.get(key, []):
            if order[writer] > order[node]:
                raise PassError(
                    BACKWARD.name, f"'{param.name}' is written after its bucket group {key} was launched", writer
                )
            sources = {storage_input(written) for written in written_nodes(writer)}
            if sources.isdisjoint(sent):
                raise PassError(BACKWARD.name, f"launch of bucket group {key} does not name '{param.name}'", node)
            expected = factors.get(key, 1.0)
            if _factor_of(writer) != expected or _kept_of(writer) not in (
                None,
                expected if writer in first_writes else 1.0,
            ):
                raise PassError(BACKWARD.name, f"'{param.name}' is not written times {expected}", writer)
    return gm


def _factor_of(writer: Node) -> object:
    """What a write multiplies its gradient by."""
    if writer.target in ACCUMULATING_OPS:
        return writer.kwargs.get("alpha", 1.0)
    # args: mul(self, other)
    product = _product_in(writer)
    return product.args[1] if product is not None else 1.0


def _kept_of(writer: Node) -> object:
    """What a write multiplies that by which it adds to; None when it does not say, as it multiplies the sum."""
    return writer.kwargs.get("beta", 1.0) if writer.target in ACCUMULATING_OPS else None


def _product_in(writer: Node) -> Node | None:
    """The multiplication by a factor whose result is copied."""
    # args: copy_(self, src)
    source = writer.args[1] if writer.target is aten.copy_.default else None
    return source if isinstance(source, Node) and source.target is aten.mul.Tensor and SCALED in source.meta else None


def _way_of(writer: Node) -> Write:
    """What a write does with what is there."""
    if writer.target in ACCUMULATING_OPS:
        # args: (main_grad, ..., accumulate)
        return "accumulate" if writer.args[-1] is True else "overwrite"
    product = _product_in(writer)
    source = writer.args[1] if product is None else product.args[0]
    if not isinstance(source, Node):
        return "overwrite"
    if source.target is aten.where.self:
        return "flagged"
    inputs = {storage_input(node) for node in source.all_input_nodes}
    is_sum = source.target is aten.add.Tensor and not inputs.isdisjoint(map(storage_input, written_nodes(writer)))
    return "accumulate" if is_sum else "overwrite"


def _check_written_once(param: GraphParam, writers: Sequence[Node], write: Write) -> None:
    """One write, and behind it no other but rows that are added to it, each lot of them once."""
    added = [writer.args for writer in writers if adds_rows(writer)]
    if not writers or not all(map(adds_rows, writers[1:])) or any(added.count(args) > 1 for args in added):
        raise PassError(BACKWARD.name, f"main_grad of '{param.name}' is written {len(writers)} times, expected once")
    if (way := _way_of(writers[0])) != write:
        raise PassError(BACKWARD.name, f"main_grad of '{param.name}' is written by {way}, expected {write}", writers[0])


def verify_forward(gm: GraphModule) -> GraphModule:
    order = positions(gm.graph)
    token = token_node(gm)
    waits: dict[tuple[object, object], Node] = {}
    named: dict[Node, set[object]] = {}
    for node in gm.graph.nodes:
        if node.target is wait_param_sync:
            # args: (params, token, handle, group)
            key = (node.args[2], node.args[3])
            _check_token(token, node, FORWARD.name, key)
            if key in waits:
                raise PassError(FORWARD.name, f"bucket group {key} is waited for twice", node)
            waits[key], named[node] = node, _named(node)
    for placeholder in placeholders(gm.graph):
        param = placeholder.meta.get(PARAM)
        if not isinstance(param, GraphParam):
            continue
        wait = waits.get(param.key)
        for user in placeholder.users:
            if user is wait:
                continue
            if wait is None or order[user] < order[wait]:
                raise PassError(FORWARD.name, f"'{param.name}' is read before bucket group {param.key} is waited", user)
            if placeholder not in named[wait]:
                raise PassError(FORWARD.name, f"wait of bucket group {param.key} does not name '{param.name}'", wait)
    return gm


def verify_hidden(gm: GraphModule) -> GraphModule:
    for placeholder in placeholders(gm.graph):
        param = placeholder.meta.get(HIDDEN)
        if not isinstance(param, GraphParam):
            continue
        pending = [placeholder]
        while pending:
            source = pending.pop()
            for user in source.users:
                if is_view_of(user, source):
                    pending.append(user)
                elif user.op != "output":
                    raise PassError(HIDDEN_PARAMS.name, f"the memory of quantized '{param.name}' is read", user)
    return gm


def _named(node: Node) -> set[object]:
    """The tensors that a collective names as its own."""
    # args: (main_grads or params, token, handle, group)
    tensors = node.args[0]
    return set(tensors) if isinstance(tensors, (list, tuple)) else set()


def _check_token(token: Node | None, node: Node, name: str, key: object) -> None:
    if token is None or node.args[1] is not token:
        raise PassError(
            name,
            f"the collective of bucket group {key} does not carry the graph's token, so its order is not fixed",
            node,
        )


BACKWARD = GraphPass(name="verify_backward", requires=("main_grads_written", "grad_sync"))
FORWARD = GraphPass(name="verify_forward", requires=("param_sync",))
HIDDEN_PARAMS = GraphPass(name="verify_hidden", requires=("dequantized",))
