"""Append the buffers that a graph will use to its inputs.

    before   tangents_1, ...                      -> (grad_1, grad_2)
    after    tangents_1, ..., main_grad_0, main_grad_1, megabuf_token

One placeholder per ``main_grad``, so that identical layers keep identical code; a dense layout can misalign single
views, so there the whole buffer is one placeholder and its slices are nodes. ``extra_inputs`` says which tensors the
caller has to append, in which order.

Requires: placeholders with fake tensors in ``meta["val"]``.
Ensures: one marked node per written parameter; the token is the last placeholder.
Raises: PassError when no input has a fake tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from megabuf_fx.passes.contract import GraphPass, PassError
from megabuf_fx.passes.graph_utils import EXTRA, FLAG, MAIN_GRAD, TOKEN, aten, placeholders
from megabuf_fx.runtime.plan import GraphParam

_NAMES = {"token": TOKEN, "flag": FLAG}
"""Of the inputs that are no buffers: the name of the placeholder and its mark."""


@dataclass(frozen=True, slots=True)
class ExtraInput:
    """A tensor that the caller appends: shape, dtype and device, and which one it is."""

    kind: str
    """``main_grad``, ``grad_data`` (a whole buffer), ``flag`` (accumulate), ``token``, or what stores a quantized
    parameter: a field of its format (``codes``, ``scales``, ...)."""
    handle: int
    index: int
    """Parameter index for ``main_grad`` and what stores a parameter, buffer index for ``grad_data``, otherwise 0."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def extra_inputs(
    writes: Sequence[GraphParam],
    *,
    buffer_numels: dict[tuple[int, int], int],
    device: torch.device,
    with_token: bool,
    with_flag: bool = False,
) -> tuple[ExtraInput, ...]:
    """What a graph that writes ``writes`` needs; ``buffer_numels`` maps ``(handle, buffer)`` to elements."""
    found: dict[tuple[str, int, int], ExtraInput] = {}
    for param in writes:
        if param.whole_buffer:
            numel = buffer_numels[param.handle, param.buffer]
            extra = ExtraInput("grad_data", param.handle, param.buffer, (numel,), (1,), param.grad_dtype, device)
        else:
            extra = ExtraInput(
                "main_grad", param.handle, param.param, param.shape, param.stride, param.grad_dtype, device
            )
        found[extra.kind, extra.handle, extra.index] = extra
    numbers = []
    if with_flag and writes:
        numbers.append(ExtraInput("flag", writes[0].handle, 0, (), (), torch.int32, device))
    if with_token and writes:
        numbers.append(ExtraInput("token", writes[0].handle, 0, (1,), (1,), torch.float32, device))
    return (*found.values(), *numbers)


def stored_inputs(params: Iterable[GraphParam], stored: Callable[[GraphParam], Any]) -> tuple[ExtraInput, ...]:
    """What a graph needs that reads quantized ``params``; ``stored`` gives a parameter's tensors, a ``NamedTuple``."""
    return tuple(
        ExtraInput(field, param.handle, param.param, tuple(t.shape), tuple(t.stride()), t.dtype, t.device)
        for param in dict.fromkeys(params)
        for field, t in stored(param)._asdict().items()
    )


def add_buffer_inputs(gm: GraphModule, *, extras: Sequence[ExtraInput], writes: Sequence[GraphParam]) -> GraphModule:
    if not extras:
        return gm
    graph = gm.graph
    modes = [n.meta["val"].fake_mode for n in placeholders(graph) if hasattr(n.meta.get("val"), "fake_mode")]
    if not modes:
        raise PassError(PASS.name, "the graph has no input with a fake tensor in meta['val']")
    fake_mode = modes[0]
    anchor = placeholders(graph)[-1]
    nodes: dict[tuple[str, int, int], Node] = {}
    for extra in extras:
        with graph.inserting_after(anchor):
            # A graph can span several models, and its inputs must have different names.
            mark = "" if extra.handle == extras[0].handle else f"model{extra.handle}_"
            name = _NAMES.get(extra.kind, f"{extra.kind}_{mark}{extra.index}")
            anchor = graph.placeholder(name)
        with fake_mode:
            anchor.meta["val"] = torch.empty_strided(extra.shape, extra.stride, dtype=extra.dtype, device=extra.device)
        anchor.meta[EXTRA] = extra
        if extra.kind in _NAMES:
            anchor.meta[_NAMES[extra.kind]] = True
        nodes[extra.kind, extra.handle, extra.index] = anchor
    for param in writes:
        if param.whole_buffer:
            whole = nodes["grad_data", param.handle, param.buffer]
            for target, arguments in _slicing(param):
                source = anchor if target is not aten.slice.Tensor else whole
                with graph.inserting_after(anchor):
                    anchor = graph.call_function(target, (source, *arguments))
                anchor.meta["val"] = target(source.meta["val"], *arguments)
            anchor.meta[MAIN_GRAD] = param
        else:
            nodes["main_grad", param.handle, param.param].meta[MAIN_GRAD] = param
    return gm


def _slicing(param: GraphParam) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The views that lead from a whole buffer to one ``main_grad``, each op with its arguments after the source."""
    dims = sorted(range(len(param.shape)), key=lambda dim: -param.stride[dim])
    # args: slice(self, dim, start, end); view(self, size); permute(self, dims)
    steps: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (aten.slice.Tensor, (0, param.start, param.start + math.prod(param.shape))),
        (aten.view.default, ([param.shape[dim] for dim in dims],)),
    ]
    if dims != list(range(len(dims))):
        # The memory runs in another order than the dimensions (channels_last).
        steps.append((aten.permute.default, ([dims.index(dim) for dim in range(len(dims))],)))
    return steps


PASS = GraphPass(name="add_buffer_inputs", provides=("buffers",))
