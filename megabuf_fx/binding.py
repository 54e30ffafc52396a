"""Which attached parameters a call of a compiled graph uses.

[Note: bindings]
Dynamo reuses compiled code for other parameters of the same shapes (a block class compiled once, a deep-copied
teacher). So which parameters a graph uses is read from its arguments at every call. A ``Binding`` belongs to one choice
of attached parameters and holds their plan and the variants compiled for them; a call with others gets one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import megabuf_fx._compat as _compat
from megabuf_fx.runtime.model_buffers import ModelBuffers
from megabuf_fx.runtime.ops import live_targets
from megabuf_fx.runtime.plan import GraphParam, GraphPlan, GraphWrites, Role, plan_graph, plan_writes

BindingKey = tuple[tuple[int, int, bool] | None, ...]
"""``(handle, param, is_hooked)`` of each argument, None where it is not attached; unattached tensors are all alike to a
graph."""


class Binding:
    """One choice of attached parameters: the models they belong to, their plan, and what is compiled for them."""

    def __init__(self, inputs: Sequence[GraphParam | None]) -> None:
        used = {param.handle for param in inputs if param is not None}
        self.models = {handle: model for handle, model in _live_models() if handle in used}
        for model in self.models.values():
            model.state.is_compiled = True
        self.plan: GraphPlan = plan_graph(inputs, {handle: model.plan for handle, model in self.models.items()})
        self.groups = frozenset(self.plan.groups)
        self.covered: tuple[tuple[int, tuple[int, ...]], ...] = tuple(
            (handle, tuple(group for owner, group in self.plan.covered if owner == handle)) for handle in self.models
        )
        """Handle id of each model, and its bucket groups that the graph covers."""
        for param in self.plan.params:
            if param.is_hooked:
                self.models[param.handle].writes.wake([param.group])
        self._is_hushed = False
        self.writes: GraphWrites | None = None
        """What its backward writes; known once AOTAutograd has made that graph."""
        self.completed: tuple[tuple[int, tuple[int, ...]], ...] = ()
        """Handle id of each model, and its bucket groups that the graph covers and writes; known with ``writes``."""
        self.forward: Callable[[list[Any]], Any] | None = None
        self.backwards: dict[Role, Callable[[list[Any]], Any]] = {}

    def set_writes(self, params: Iterable[GraphParam]) -> None:
        """The backward gives gradients to ``params``."""
        self.writes = plan_writes(params)
        written = set(self.writes.groups)
        self.completed = tuple(
            (handle, tuple(group for group in groups if (handle, group) in written)) for handle, groups in self.covered
        )

    def hush(self) -> None:
        """A forward with gradient is about to run, so a backward writes the gradients of what the graph covers."""
        if not self._is_hushed:
            self._is_hushed = True
            for handle, groups in self.covered:
                self.models[handle].writes.hush(groups)


def locate_arguments(arguments: Sequence[object]) -> list[GraphParam | None]:
    """What each argument is to the attached models, None for tensors of nobody's."""
    models = _live_models()
    return [next((found for h, m in models if (found := _locate(argument, h, m))), None) for argument in arguments]


def key_of(located: Sequence[GraphParam | None]) -> BindingKey:
    return tuple((param.handle, param.param, param.is_hooked) if param is not None else None for param in located)


def _live_models() -> list[tuple[int, ModelBuffers]]:
    return [(handle, target) for handle, target in live_targets() if isinstance(target, ModelBuffers)]


def _locate(argument: object, handle: int, model: ModelBuffers) -> GraphParam | None:
    index = model.index_of(argument)
    if index is None:
        return None
    spec = model.plan.params[index]
    buffer, slot = model.locations[index]
    main_grad = model.main_grads[index]
    return GraphParam(
        handle=handle,
        param=index,
        group=model.group_of[index],
        name=spec.name,
        shape=spec.shape,
        stride=main_grad.stride(),
        grad_dtype=main_grad.dtype,
        buffer=buffer,
        start=slot.start,
        whole_buffer=not model.plan.aligned and index not in model.buffers[buffer].promoted,
        dtype=spec.dtype,
        quantized=spec.quantized,
        is_hooked=_compat.has_user_hooks(model.params[index]),
    )
