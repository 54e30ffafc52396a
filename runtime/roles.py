"""Choosing the role of a compiled backward before it runs.

[Note: sync inside the graph]
A graph starts the reduction of a bucket group itself when it covers the group (all its parameters are inputs), this
is the last forward that will write it, no eager part is known to write it, and ``no_sync`` is off. A kept graph
(``retain_graph=True``) may run again, so it never starts a reduction. Everything else is left to the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from megabuf_fx.runtime.model_buffers import ModelBuffers
from megabuf_fx.runtime.plan import GraphPlan, GraphWrites, Role
from megabuf_fx.runtime.step_state import ForwardToken

UNTOUCHED = Role(None)


def choose_role(
    plan: GraphPlan,
    writes: GraphWrites,
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
    for handle, group in writes.groups:
        models[handle].writes.refuse_reduced(group)
    overwrite = all(models[handle].state.written.isdisjoint(indices) for handle, indices in writes.by_model)
    if any(models[handle].capture.is_micro_batch for handle, _ in writes.by_model):
        if len(writes.by_model) > 1:
            raise NotImplementedError("a captured micro-batch with a graph that spans several attached models")
        if overwrite:
            return Role("flagged")
    if not overwrite:
        for handle, indices in writes.by_model:
            for param in sorted(indices - models[handle].state.written):
                models[handle].writes.zero(param)
    launches: tuple[tuple[int, int], ...] = ()
    if token is not None and not keeps_graph:
        written = frozenset(writes.groups)
        awaited = {handle: models[handle].state.awaited(besides=token) for handle, _ in writes.by_model}
        launches = tuple(key for key in plan.covered if key in written and _may_launch(key, models, awaited[key[0]]))
    return Role("overwrite" if overwrite else "accumulate", launches)


def _may_launch(key: tuple[int, int], models: Mapping[int, ModelBuffers], awaited: Set[tuple[int, int]]) -> bool:
    handle, group = key
    model = models[handle]
    eager_params = model.state.eager_params
    return (
        model.options.overlap_grad_reduce
        and not model.state.no_sync_depth
        and not model.reducer.is_started(group)
        and (not eager_params or eager_params.isdisjoint(model.writes.params_of[group]))
        and key not in awaited
    )
