"""The passes in order, on one page.

    forward    locate_params -> add_buffer_inputs -> [dequantize_params -> verify_hidden]
               -> [insert_param_sync -> verify_forward]
    backward   add_buffer_inputs -> [dequantize_params -> verify_hidden]
               -> [fuse_embedding_grad -> fuse_wgrad] -> write_main_grads -> [scale_main_grads] -> insert_grad_sync
               -> verify_backward

A backward in the ``untouched`` role writes nothing. ``run_passes`` lints and dumps after each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from torch.fx import GraphModule

from megabuf_fx.dump import GraphDump
from megabuf_fx.passes import (
    add_buffer_inputs,
    dequantize_params,
    fuse_embedding_grad,
    fuse_wgrad,
    insert_grad_sync,
    insert_param_sync,
    locate_params,
    scale_main_grads,
    verify,
    write_main_grads,
)
from megabuf_fx.passes.add_buffer_inputs import ExtraInput
from megabuf_fx.passes.contract import GraphPass, validate_order
from megabuf_fx.passes.dequantize_params import HiddenInput
from megabuf_fx.runtime.plan import GraphParam, GraphPlan, Role

Step = tuple[GraphPass, Callable[[GraphModule], GraphModule]]
Decompositions = Mapping[Any, Callable[..., Any]]


def forward_passes(
    plan: GraphPlan,
    *,
    extras: Sequence[ExtraInput],
    waits: bool = True,
    hidden: Mapping[str, HiddenInput] = MappingProxyType({}),
    decompositions: Decompositions = MappingProxyType({}),
) -> list[Step]:
    """Waits ahead of first use, if parameters are gathered during forward (``waits``). Without ``extras`` only the
    inputs are checked. ``hidden`` are the quantized parameters, by placeholder name."""
    steps: list[Step] = [(locate_params.PASS, partial(locate_params.locate_params, plan=plan))]
    if not extras:
        return steps
    steps.append((add_buffer_inputs.PASS, partial(add_buffer_inputs.add_buffer_inputs, extras=extras, writes=())))
    steps += _dequantize(hidden, decompositions)
    if waits:
        steps.append((insert_param_sync.PASS, insert_param_sync.insert_param_sync))
        steps.append((verify.FORWARD, verify.verify_forward))
    return steps


def _dequantize(hidden: Mapping[str, HiddenInput], decompositions: Decompositions) -> list[Step]:
    if not hidden:
        return []
    dequantize = partial(dequantize_params.dequantize_params, hidden=hidden, decompositions=decompositions)
    return [(dequantize_params.PASS, dequantize), (verify.HIDDEN_PARAMS, verify.verify_hidden)]


def backward_passes(
    gradients: Mapping[int, GraphParam],
    *,
    role: Role,
    extras: Sequence[ExtraInput],
    fuse: bool,
    hidden: Mapping[str, HiddenInput] = MappingProxyType({}),
    decompositions: Decompositions = MappingProxyType({}),
    factors: Mapping[tuple[int, int], float] = MappingProxyType({}),
) -> list[Step]:
    """Gradients into buffers, launches at bucket boundaries. ``gradients`` maps output position to parameter,
    ``hidden`` placeholder names to what was saved of quantized parameters, ``factors`` launched bucket groups to what
    their gradients are multiplied by before they are sent."""
    writes = tuple(gradients.values()) if role.write is not None else ()
    if not writes and not hidden:
        return []
    steps: list[Step] = [
        (add_buffer_inputs.PASS, partial(add_buffer_inputs.add_buffer_inputs, extras=extras, writes=writes)),
        *_dequantize(hidden, decompositions),
    ]
    if role.write is None or not writes:
        return steps
    if fuse and role.write != "flagged":
        accumulate = role.write == "accumulate"
        embeddings = partial(fuse_embedding_grad.fuse_embedding_grad, gradients=gradients, accumulate=accumulate)
        steps.append((fuse_embedding_grad.PASS, embeddings))
        steps.append((fuse_wgrad.PASS, partial(fuse_wgrad.fuse_wgrad, gradients=gradients, accumulate=accumulate)))
    write = partial(write_main_grads.write_main_grads, gradients=gradients, write=role.write)
    steps.append((write_main_grads.PASS, write))
    if factors:
        steps.append((scale_main_grads.PASS, partial(scale_main_grads.scale_main_grads, factors=factors)))
    launch = partial(insert_grad_sync.insert_grad_sync, launches=role.launches, scaled=factors.keys())
    check = partial(
        verify.verify_backward, gradients=gradients, write=role.write, launches=role.launches, factors=factors
    )
    return [*steps, (insert_grad_sync.PASS, launch), (verify.BACKWARD, check)]


def run_passes(gm: GraphModule, steps: Sequence[Step], *, dump: GraphDump) -> GraphModule:
    """Apply ``steps`` to ``gm`` in place, checking contracts first and the graph after each pass."""
    validate_order([contract for contract, _ in steps])
    dump.write_graph(gm, "traced")
    for contract, function in steps:
        gm = function(gm)
        gm.graph.lint()
        dump.write_graph(gm, contract.name)
    gm.recompile()
    return gm
