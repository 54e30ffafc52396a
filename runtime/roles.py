"""Choosing the role of a compiled backward before it runs.

[Note: sync inside the graph]
A graph starts the reduction of a bucket group itself when it covers the group (all its parameters are inputs), this
is the last forward that will write it, no eager part is known to write it, and ``no_sync`` is off. A kept graph
(``retain_graph=True``) may run again, so it never starts a reduction. Everything else is left to the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megabuf_fx.runtime.model_buffers import ModelBuffers
from megabuf_fx.runtime.plan import GraphParam, GraphPlan, Role
from megabuf_fx.runtime.step_state import ForwardToken

UNTOUCHED = Role(None)


def choose_role(
    plan: GraphPlan,
    writes: Sequence[GraphParam],
    models: Mapping[int, ModelBuffers],
    *,
    token: ForwardToken | None,
    accumulates: bool,
    keeps_graph: bool,
) -> Role:
    """The role for the backward that is about to run. Zeroes unwritten slots where others are written already.

    ``writes`` are the parameters to which the graph produces a gradient. ``accumulates`` is False when autograd was
    asked for gradients (``torch.autograd.grad``, ``backward(inputs=...)``): then buffers stay untouched.

    Raises:
        RuntimeError: a gradient belongs to a bucket that was reduced and not reset.
        NotImplementedError: one micro-batch of several models is being captured.
    """
    if not accumulates:
        return UNTOUCHED
    written = {param.key for param in writes}
    for handle, group in sorted(written):
        models[handle].refuse_reduced(group)
    unwritten = [param for param in writes if not models[param.handle].state.written[param.param]]
    overwrite = len(unwritten) == len(writes)
    if any(models[param.handle].capture.is_micro_batch for param in writes):
        if len({param.handle for param in writes}) > 1:
            raise NotImplementedError("a captured micro-batch with a graph that spans several attached models")
        if overwrite:
            return Role("flagged")
    if not overwrite:
        for param in unwritten:
            models[param.handle].zero(param.param)
    launches = tuple(key for key in plan.covered if key in written and _may_launch(key, models, token))
    if keeps_graph:
        launches = ()
    return Role("overwrite" if overwrite else "accumulate", launches)


def _may_launch(key: tuple[int, int], models: Mapping[int, ModelBuffers], token: ForwardToken | None) -> bool:
    handle, group = key
    model = models[handle]
    return (
        token is not None
        and model.options.overlap_grad_reduce
        and not model.no_sync_depth
        and not model.reducer.is_started(group)
        and not model.state.eager_params.intersection(model.plan.groups[group].params)
        and not model.state.is_awaited(key, besides=token)
    )
