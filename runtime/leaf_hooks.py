"""The AccumulateGrad nodes of parameters, and hooks that run when autograd has accumulated a gradient.

[Note: quiet bucket groups]
A hook on an AccumulateGrad node runs in every backward that reaches its parameter, also where a compiled graph has
written the gradient and autograd gets none; that takes a microsecond and more for each parameter. So the bucket groups
that a graph covers are *quiet*: they have no hooks, and the graph, or the host directly after it, starts the reduction.
Should code outside graphs differentiate such a parameter, its gradient is left in ``.grad``. It is found there before
the next graph writes gradients, or when the step ends, and the group is woken: hooks again, for good. Where ``.grad``
is published after the reduction, hooks do that, and no group is quiet.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

_OLD = "megabuf_fx old"
"""Marks nodes that are to be made anew."""
_GRAD = operator.attrgetter("grad")


class LeafHooks:
    """The hooks of one model's parameters; ``groups`` are the indices of those of each bucket group."""

    def __init__(self, params: Sequence[nn.Parameter], groups: Sequence[Sequence[int]]) -> None:
        self.nodes = [_leaf_node(param) for param in params]
        """The AccumulateGrad node of each parameter."""
        self.quiet: set[int] = set()
        """Bucket groups without hooks."""
        self._params = params
        self._groups = groups
        self._quiet_params: tuple[nn.Parameter, ...] = ()
        self._woken: set[int] = set()
        self._hooks: dict[int, Any] = {}
        self._call: Callable[[int], None] | None = None

    def install(self, call: Callable[[int], None]) -> None:
        """Call ``call(param)`` when the node of a parameter has run, from now on. Autograd keeps ``call`` alive without
        the garbage collector's knowledge."""
        self._call = call
        for param in range(len(self._params)):
            self._hook(param)

    def hush(self, group: int) -> None:
        """A graph covers the bucket group: make it quiet, unless it was woken or some of it is frozen for now."""
        if group in self._woken or group in self.quiet or self._call is None:
            return
        if not all(self._params[param].requires_grad for param in self._groups[group]):
            return
        self.quiet.add(group)
        self._quiet_params += tuple(self._params[param] for param in self._groups[group])
        for param in self._groups[group]:
            self._hooks.pop(param).remove()
            # A node that ever had a hook calls into Python for ever. So another one is made, unless a graph that is
            # still there holds this one.
            self.nodes[param] = None
            self.nodes[param] = _leaf_node(self._params[param])

    def wake(self, group: int) -> None:
        """Something outside graphs may give gradients to the bucket group, from now on."""
        self._woken.add(group)
        if group not in self.quiet:
            return
        self.quiet.discard(group)
        self._quiet_params = tuple(self._params[param] for each in self.quiet for param in self._groups[each])
        for param in self._groups[group]:
            self._hook(param)

    @property
    def hooked(self) -> Iterable[int]:
        """Parameters that are not quiet."""
        return self._hooks

    @property
    def have_left_grads(self) -> bool:
        """Whether a parameter of a quiet group has a ``.grad``. Asked in every backward, so without a Python call for
        each."""
        return operator.countOf(map(_GRAD, self._quiet_params), None) != len(self._quiet_params)

    def renew(self) -> None:
        """Make new nodes, on the current stream: autograd runs the node of a leaf on the stream that was current when
        it was made.

        Raises:
            RuntimeError: somebody else holds on to the old ones.
        """
        hooked = list(self._hooks)
        for param in hooked:
            self._hooks.pop(param).remove()
        try:
            _renew_leaf_nodes(self.nodes, self._params)
        finally:
            for param in hooked:
                self._hook(param)

    def remove(self) -> None:
        """Call nothing any more."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._call = None

    def _hook(self, param: int) -> None:
        call = self._call
        assert call is not None

        def hook(*unused: object) -> None:
            call(param)

        self._hooks[param] = self.nodes[param].register_hook(hook)


def _leaf_node(param: nn.Parameter) -> Any:
    # Made where there is none. Whoever needs it holds it: autograd keeps the node of a leaf only while somebody does.
    return torch.autograd.graph.get_gradient_edge(param).node


def _renew_leaf_nodes(nodes: list[Any], params: Sequence[nn.Parameter]) -> None:
    while nodes:
        nodes.pop().metadata[_OLD] = True
    gc.collect()
    nodes.extend(map(_leaf_node, params))
    are_old = [node.metadata.pop(_OLD, False) for node in nodes]
    if any(are_old):
        raise RuntimeError(
            "a loss or an output of an earlier step is still held, and with it the autograd graph of the stream it ran "
            "on; drop it, or keep only its detach()"
        )
