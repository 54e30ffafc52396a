"""The passes in order, on one page.

    forward    locate_params -> add_buffer_inputs -> insert_param_sync -> verify_forward
    backward   add_buffer_inputs -> [fuse_wgrad] -> write_main_grads -> insert_grad_sync -> verify_backward

A backward in the ``untouched`` role runs as it was traced. ``run_passes`` lints and dumps after each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch.fx import GraphModule

from megabuf_fx.dump import GraphDump
from megabuf_fx.passes import (
    add_buffer_inputs,
    fuse_wgrad,
    insert_grad_sync,
    insert_param_sync,
    locate_params,
    verify,
    write_main_grads,
)
from megabuf_fx.passes.add_buffer_inputs import ExtraInput
from megabuf_fx.passes.contract import GraphPass, validate_order
from megabuf_fx.runtime.plan import GraphParam, GraphPlan, Role

Step = tuple[GraphPass, Callable[[GraphModule], GraphModule]]


def forward_passes(plan: GraphPlan, *, extras: Sequence[ExtraInput]) -> list[Step]:
    """Waits ahead of first use. Without ``extras`` (nothing is ever gathered) only the inputs are checked."""
    locate = (locate_params.PASS, partial(locate_params.locate_params, plan=plan))
    if not extras:
        return [locate]
    return [
        locate,
        (add_buffer_inputs.PASS, partial(add_buffer_inputs.add_buffer_inputs, extras=extras, writes=())),
        (insert_param_sync.PASS, insert_param_sync.insert_param_sync),
        (verify.FORWARD, verify.verify_forward),
    ]


def backward_passes(
    gradients: Mapping[int, GraphParam], *, role: Role, extras: Sequence[ExtraInput], fuse: bool
) -> list[Step]:
    """Gradients into buffers, launches at bucket boundaries. ``gradients`` maps output position to parameter."""
    if role.write is None or not gradients:
        return []
    writes = tuple(gradients.values())
    steps: list[Step] = [
        (add_buffer_inputs.PASS, partial(add_buffer_inputs.add_buffer_inputs, extras=extras, writes=writes))
    ]
    if fuse and role.write != "flagged":
        accumulate = role.write == "accumulate"
        steps.append((fuse_wgrad.PASS, partial(fuse_wgrad.fuse_wgrad, gradients=gradients, accumulate=accumulate)))
    return [
        *steps,
        (
            write_main_grads.PASS,
            partial(write_main_grads.write_main_grads, gradients=gradients, write=role.write),
        ),
        (insert_grad_sync.PASS, partial(insert_grad_sync.insert_grad_sync, launches=role.launches)),
        (verify.BACKWARD, partial(verify.verify_backward, gradients=gradients, launches=role.launches)),
    ]


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
