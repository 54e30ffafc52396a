"""One Dynamo graph: binds its inputs to attached parameters and runs the right variant of forward and backward
(see [Note: bindings] in ``binding.py``).

[Note: from forward to backward]
The autograd node that AOTAutograd creates in forward is the node that runs in backward. Its metadata carries the
binding and the ``ForwardToken``, so a backward knows which forward it belongs to, and a forward whose result is dropped
disappears with its node.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

import megabuf_fx._compat as _compat
from megabuf_fx.binding import Binding, BindingKey, key_of, locate_arguments
from megabuf_fx.dump import make_dump, trace_variant
from megabuf_fx.passes.add_buffer_inputs import ExtraInput, extra_inputs, stored_inputs
from megabuf_fx.passes.contract import PassError
from megabuf_fx.passes.dequantize_params import HiddenInput, find_hidden_inputs, find_saved_params
from megabuf_fx.passes.graph_utils import outputs, placeholders
from megabuf_fx.pipeline import backward_passes, forward_passes
from megabuf_fx.report import Boundary, boundaries_as_json, find_boundaries, plan_as_json, transport_as_json
from megabuf_fx.runtime.model_buffers import ModelBuffers
from megabuf_fx.runtime.plan import GraphParam, GraphWrites, Role
from megabuf_fx.runtime.profile import record_runs
from megabuf_fx.runtime.roles import UNTOUCHED, choose_role
from megabuf_fx.runtime.step_state import ForwardToken
from megabuf_fx.saved_graph import adopting, keep_graph
from megabuf_fx.variants import Boxed, GraphSource, copy_graph

log = logging.getLogger("megabuf_fx.traced_graph")

_METADATA_KEY = "megabuf_fx"
_COMPILED_NODE = "CompiledFunctionBackward"
"""Class name of AOTAutograd's nodes; every compiled graph has a class of its own of that name."""
MAX_LAUNCH_SETS = 4
"""Sets of bucket groups that one backward is compiled to launch; beyond it the host launches instead."""


class TracedGraph:
    """What the backend returns for one Dynamo graph, apart from AOTAutograd's own wrapper around it."""

    def __init__(
        self,
        example_inputs: Sequence[Any],
        *,
        number: int,
        rank: int,
        inner_compiler: str,
        fuse: bool,
        dump_dir: str | None,
    ) -> None:
        self.number = number
        self.rank = rank
        self.inner_compiler = inner_compiler
        self.fuse = fuse
        self.dump_dir = dump_dir
        self.n_inputs = len(example_inputs)
        self.positions = [i for i, x in enumerate(example_inputs) if isinstance(x, nn.Parameter)]
        self._parameters_of = _picker(self.positions)
        self._arguments: tuple[Any, ...] = ()
        self._hooked: tuple[bool, ...] = ()
        """Of each argument whether it has hooks of the user; empty when none has."""
        self._registered = -1
        """Hooks that anybody had registered when the arguments' were looked at last."""
        self._bindings: dict[BindingKey, Binding] = {}
        self._binding = self._select(example_inputs)
        self._is_training = False
        self._forward_source: GraphSource | None = None
        self._backward_source: GraphSource | None = None
        self._gradient_positions: tuple[int, ...] = ()
        self._node_type: type | None = None

    # The two places where a call enters: around AOTAutograd, and instead of Inductor.

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap AOTAutograd's callable: bind parameters before it, leave a token for backward after it."""

        def call(*args: Any) -> Any:
            binding = self._select(args)
            for model in binding.models.values():
                model.before_forward(in_backward=_compat.current_backward_id() != -1)
            if self._is_training:
                binding.hush()
            results = compiled(*args)
            if self._is_training and binding.models:
                self._leave_token(results, binding)
            return results

        return call

    def inner_compile(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Boxed:
        """Take a graph from AOTAutograd and return the boxed callable that picks a variant at each call."""
        source = GraphSource(copy_graph(gm), example_inputs, kwargs, inner_compiler=self.inner_compiler)
        return keep_graph(source, self._adopt)

    def _adopt(self, source: GraphSource) -> Boxed:
        """Take a graph, traced or from AOTAutograd's cache, and return the callable that picks a variant."""
        if not source.is_backward:
            self._forward_source = source
            self._is_training = not source.is_inference
            # Now, not at the first call: AOTAutograd reads from it the strides of what is saved for backward.
            self._compile_forward(self._binding)
            return self._run_forward
        self._backward_source = source
        values = outputs(source.graph)
        if len(values) != self.n_inputs:
            raise PassError("locate_params", f"backward returns {len(values)} gradients for {self.n_inputs} inputs")
        self._gradient_positions = tuple(i for i, value in enumerate(values) if isinstance(value, Node))
        if source.has_symbolic_shapes:
            self._compile_all_roles(self._binding)
        return self._run_backward

    def adopting(self) -> contextlib.AbstractContextManager[None]:
        """Within, graphs that AOTAutograd finds in its cache become those of this object."""
        return adopting(self._adopt, self.inner_compiler)

    # Running.

    def _select(self, args: Sequence[Any]) -> Binding:
        arguments = self._parameters_of(args)
        registered = _compat.registered_hooks()
        is_same = bool(self._bindings) and all(map(operator.is_, arguments, self._arguments))
        if is_same and not self._hooked and registered == self._registered:
            return self._binding
        hooked = tuple(map(_compat.has_user_hooks, arguments))
        hooked = hooked if any(hooked) else ()
        self._registered = registered
        if is_same and hooked == self._hooked:
            return self._binding
        located: list[GraphParam | None] = [None] * self.n_inputs
        for position, param in zip(self.positions, locate_arguments(arguments)):
            located[position] = param
        key = key_of(located)
        if key not in self._bindings:
            self._bindings[key] = Binding(located)
        self._arguments, self._hooked, self._binding = arguments, hooked, self._bindings[key]
        return self._binding

    def _run_forward(self, args: list[Any]) -> Any:
        binding = self._binding
        if binding.forward is None:
            self._compile_forward(binding)
        assert binding.forward is not None
        return binding.forward(args)

    def _run_backward(self, args: list[Any]) -> Any:
        record = _compat.current_autograd_node().metadata.get(_METADATA_KEY)
        binding, token = record if record is not None else (self._binding, None)
        if not binding.models:
            return self._backward_variant(binding, UNTOUCHED)(args)
        backward_id = _compat.current_backward_id()
        keeps_graph = _compat.keeps_graph()
        writes = self._writes(binding)
        for model in binding.models.values():
            model.writes.enter_backward(backward_id)
            model.writes.take_left_grads()
            model.writes.note_writer()
        accumulates = all(
            _compat.will_accumulate(map(binding.models[handle].writes.leaf_hooks.nodes.__getitem__, params))
            for handle, params in writes.by_model
        )
        if accumulates:
            for handle, params in writes.by_model:
                binding.models[handle].writes.prepare_graph_writes(params)
        role = choose_role(
            binding.plan,
            writes,
            binding.models,
            token=token,
            accumulates=accumulates,
            keeps_graph=keeps_graph,
        )
        role = self._within_limit(binding, role)
        variant = self._backward_variant(binding, role)
        if accumulates:
            for handle, params in writes.by_model:
                binding.models[handle].writes.mark_graph_writes(params)
        else:
            for model in binding.models.values():
                model.writes.mark_untouched()
        if token is not None and not keeps_graph:
            for model in binding.models.values():
                model.state.close_forward(token)
        results = variant(args)
        if accumulates:
            for handle, groups in binding.completed:
                binding.models[handle].writes.after_graph(groups)
        return results

    def _leave_token(self, results: Any, binding: Binding) -> None:
        node = self._find_node(results)
        if node is None:
            return
        token = ForwardToken(binding.groups)
        node.metadata[_METADATA_KEY] = (binding, token)
        for model in binding.models.values():
            model.state.open_forward(token)

    def _find_node(self, results: Any) -> Any:
        """The autograd node that this call created: the results' own, or behind the views that alias them."""
        seeds = [r.grad_fn for r in results if isinstance(r, Tensor) and r.grad_fn is not None]
        seen: set[Any] = set()
        for _ in range(4):
            for node in seeds:
                if self._is_own_node(node):
                    self._node_type = type(node)
                    return node
            seen.update(seeds)
            seeds = [n for node in seeds for n, _ in node.next_functions if n is not None and n not in seen]
        return None

    def _is_own_node(self, node: Any) -> bool:
        is_kind = type(node) is self._node_type if self._node_type else type(node).__name__ == _COMPILED_NODE
        return is_kind and _METADATA_KEY not in node.metadata

    # Compiling.

    def _writes(self, binding: Binding) -> GraphWrites:
        if binding.writes is None:
            binding.set_writes(self._gradients(binding).values())
            assert binding.writes is not None
        return binding.writes

    def _gradients(self, binding: Binding) -> dict[int, GraphParam]:
        """Output position and parameter of every gradient that belongs to a buffer."""
        inputs = binding.plan.inputs
        written = ((i, inputs[i]) for i in self._gradient_positions)
        return {i: param for i, param in written if param is not None and not param.is_hooked}

    def _within_limit(self, binding: Binding, role: Role) -> Role:
        if role in binding.backwards:
            return role
        launch_sets = {known.launches for known in binding.backwards if known.launches}
        if role.launches and role.launches not in launch_sets and len(launch_sets) >= MAX_LAUNCH_SETS:
            return Role(role.write)
        return role

    def _compile_forward(self, binding: Binding) -> None:
        assert self._forward_source is not None
        hidden = find_hidden_inputs(self._forward_source.graph, binding.plan)
        gathering = {h for h, model in binding.models.items() if model.options.overlap_param_gather}
        extras = _stored_inputs(hidden, binding.models)
        waiting = [param for param in binding.plan.params if param.handle in gathering]
        if waiting:
            model = binding.models[waiting[0].handle]
            token = model.token
            extras += (ExtraInput("token", waiting[0].handle, 0, (1,), (1,), token.dtype, token.device),)
        steps = forward_passes(
            binding.plan,
            extras=extras,
            waits=bool(waiting),
            hidden=hidden,
            decompositions=self._decompositions() if hidden else {},
        )
        kind = "forward" if self._is_training else "inference"
        binding.forward, _ = self._compile(self._forward_source, binding, steps, extras, kind, ())

    def _compile_all_roles(self, binding: Binding) -> None:
        covered = binding.plan.covered
        for write in ("overwrite", "accumulate"):
            for launches in ((), covered) if covered else ((),):
                self._backward_variant(binding, Role(write, launches))  # type: ignore[arg-type]
        self._backward_variant(binding, UNTOUCHED)

    def _backward_variant(self, binding: Binding, role: Role) -> Callable[[list[Any]], Any]:
        variant = binding.backwards.get(role)
        if variant is not None:
            return variant
        assert self._backward_source is not None
        gradients = self._gradients(binding) if role.write is not None else {}
        hidden = self._saved_params(binding)
        extras = _stored_inputs(hidden, binding.models)
        if gradients:
            any_model = next(iter(binding.models.values()))
            extras += extra_inputs(
                list(gradients.values()),
                buffer_numels={
                    (handle, index): buffer.layout.numel
                    for handle, model in binding.models.items()
                    for index, buffer in enumerate(model.buffers)
                },
                device=any_model.token.device,
                with_token=bool(role.launches),
                with_flag=role.write == "flagged",
            )
        steps = backward_passes(
            gradients,
            role=role,
            extras=extras,
            fuse=self.fuse,
            hidden=hidden,
            decompositions=self._decompositions() if hidden else {},
            factors=_factors(role, binding.models),
        )
        kind = f"backward_{role.name}"
        if role.launches and role.launches != binding.plan.covered:
            kind += "_" + "-".join(str(group) for _, group in role.launches)
        variant, boundaries = self._compile(self._backward_source, binding, steps, extras, kind, role.launches)
        if role.launches:
            # What this variant leaves to the host, an earlier one may have launched.
            for handle, group in binding.plan.covered:
                binding.models[handle].boundaries.pop(group, None)
        for boundary in boundaries:
            binding.models[boundary.handle].boundaries[boundary.group] = boundary
        binding.backwards[role] = variant
        return variant

    def _saved_params(self, binding: Binding) -> dict[str, HiddenInput]:
        """What the backward gets of quantized parameters, by placeholder name."""
        assert self._forward_source is not None
        assert self._backward_source is not None
        saved = find_saved_params(self._forward_source.graph, binding.plan)
        inputs = {node.name for node in placeholders(self._backward_source.graph)}
        return {name: hidden for name, hidden in saved.items() if name in inputs}

    def _decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        return _compat.decompositions() if self.inner_compiler == "inductor" else {}

    def _compile(
        self,
        source: GraphSource,
        binding: Binding,
        steps: Sequence[Any],
        extras: Sequence[ExtraInput],
        kind: str,
        launches: Sequence[tuple[int, int]],
    ) -> tuple[Callable[[list[Any]], Any], tuple[Boundary, ...]]:
        order = list(self._bindings.values()).index(binding)
        name = kind if order == 0 else f"binding{order}_{kind}"
        dump = make_dump(self.dump_dir, rank=self.rank, graph=self.number, variant=name)
        boundaries: tuple[Boundary, ...] = ()

        def plan() -> dict[str, Any]:
            return {
                "kind": kind,
                "inner_compiler": self.inner_compiler,
                "launches": [list(key) for key in launches],
                "boundaries": boundaries_as_json(boundaries),
                "inputs": [param.name if param is not None else None for param in binding.plan.inputs],
                "models": {str(handle): plan_as_json(model.plan) for handle, model in binding.models.items()},
                "transport": {str(handle): transport_as_json(model) for handle, model in binding.models.items()},
            }

        def inspect(final: GraphModule) -> None:
            nonlocal boundaries
            boundaries = find_boundaries(final) if launches else ()
            if self.dump_dir is not None:
                dump.write_plan(plan())
                dump.write_nodes(final)
            trace_variant(f"graph{self.number}_{name}", final, plan)

        compiled = source.compile(steps, extras, dump=dump, keeps_order=bool(launches), inspect=inspect)
        for model in binding.models.values():
            model.compiles += 1
        if self.inner_compiler == "inductor":
            compiled = _recordable(f"graph {self.number} {name}", compiled)
        log.info("compiled graph %d %s: %d launches", self.number, name, len(boundaries))
        compiled = record_runs(
            compiled, f"graph{self.number}_{name}", [model.trace.recorder for model in binding.models.values()]
        )
        if not extras:
            return compiled, boundaries
        tensors = [_find_tensor(extra, binding.models) for extra in extras]

        def call(args: list[Any]) -> Any:
            args.extend(tensors)
            return compiled(args)

        return call, boundaries


def _stored_inputs(hidden: Mapping[str, HiddenInput], models: Mapping[int, ModelBuffers]) -> tuple[ExtraInput, ...]:
    def stored(param: GraphParam) -> Any:
        weights = models[param.handle].weights
        assert weights is not None
        return weights.stored(param.param)

    return stored_inputs((entry.param for entry in hidden.values()), stored)


def _factors(role: Role, models: Mapping[int, ModelBuffers]) -> dict[tuple[int, int], float]:
    """What the gradients of launched bucket groups are multiplied by in the graph, by ``(handle, group)``."""
    found = {}
    for handle, group in role.launches:
        reducer = models[handle].reducer
        if reducer.factor_of(group) != 1 and reducer.can_scale_early(group):
            found[handle, group] = reducer.factor_of(group)
    return found


def _find_tensor(extra: ExtraInput, models: Mapping[int, ModelBuffers]) -> Tensor:
    model = models[extra.handle]
    if extra.kind == "token":
        return model.token
    if extra.kind == "flag":
        return model.capture.flags.accumulate
    if extra.kind == "grad_data":
        return model.buffers[extra.index].grad_data
    if extra.kind == "main_grad":
        return model.main_grads[extra.index]
    assert model.weights is not None
    tensor: Tensor = getattr(model.weights.stored(extra.index), extra.kind)
    return tensor


def _recordable(name: str, compiled: Boxed) -> Boxed:
    def call(args: list[Any]) -> Any:
        mode = _compat.recording_mode()
        return compiled(args) if mode is None else mode.record_graph(name, compiled, args)

    return call


def _picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that returns the values at ``positions`` of a sequence."""
    if len(positions) < 2:
        return lambda values: tuple(values[i] for i in positions)
    return operator.itemgetter(*positions)
