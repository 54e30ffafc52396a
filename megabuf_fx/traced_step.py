"""What a forward and a backward compute, when each parameter is first read and each gradient complete: traced on a
copy, before anything is attached.

The copy has tensors without memory (fake tensors), so nothing is computed, no memory is taken, and neither the model
nor torch's random numbers change. Its forward is compiled, as training will compile it, by a backend that only notes
what each graph costs; graph breaks give several graphs, in the order in which they run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import megabuf_fx._compat as _compat
from megabuf_fx.cost_model import Device
from megabuf_fx.graph_nodes import describe_nodes
from megabuf_fx.passes.graph_utils import outputs, placeholders
from megabuf_fx.variants import copy_graph


@dataclass(frozen=True, slots=True)
class NodeCost:
    """Of one node; fields as in ``graph_nodes.py``."""

    kind: str
    flops: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Microseconds of computing; one entry per trainable parameter in tuples."""

    needed: tuple[float, ...]
    """From the start of the forward until the parameter is first read."""
    ready: tuple[float, ...]
    """From the start of the backward until the parameter's gradient is complete."""
    backward: float


@dataclass(frozen=True, slots=True)
class TracedStep:
    """The nodes of a forward and its backward in order, and where each trainable parameter stands between them."""

    forward: tuple[NodeCost, ...]
    first_use: tuple[int, ...]
    """How many nodes run before the parameter is read; all of them where no graph reads it, as no graph waits then."""
    backward: tuple[NodeCost, ...]
    complete: tuple[int, ...]
    """How many nodes complete the gradient; all of them where there is none."""

    def times(self, device: Device) -> StepTimes:
        """How long all that takes."""
        starts = _running_time(self.forward, device)
        ends = _running_time(self.backward, device)
        return StepTimes(
            tuple(starts[count] for count in self.first_use), tuple(ends[count] for count in self.complete), ends[-1]
        )


def _running_time(nodes: Sequence[NodeCost], device: Device) -> list[float]:
    """After 0, 1, 2 ... nodes."""
    return [0.0, *itertools.accumulate(device.time_of(node) for node in nodes)]


def check_example_inputs(example_inputs: object) -> Sequence[Any] | Mapping[str, Any]:
    """The same, if it can be the arguments of a forward.

    Raises:
        ValueError: there are none.
        TypeError: neither a sequence nor a mapping.
    """
    if example_inputs is None:
        raise ValueError(
            "bucket_size='auto' traces a backward and needs arguments of the model's forward: "
            "attach(model, config, example_inputs=(tokens,)), or a dict of keyword arguments; of tensors only shapes "
            "and dtypes count. Or give bucket_size as a number of elements"
        )
    if isinstance(example_inputs, str) or not isinstance(example_inputs, (Sequence, Mapping)):
        raise TypeError(
            "example_inputs must be a sequence of positional or a mapping of keyword arguments, "
            f"got {type(example_inputs).__name__}"
        )
    return example_inputs


def trace_model(
    model: nn.Module, example_inputs: Sequence[Any] | Mapping[str, Any], *, use_decompositions: bool
) -> TracedStep:
    """Trace ``model(*example_inputs)``, or ``model(**example_inputs)``, and the backward of the sum of its outputs.

    Raises:
        ValueError: it cannot be traced without values; the message has the cause.
    """

    def run() -> TracedStep:
        with _compat.fake_tensors() as fake_copy:
            traced = fake_copy(model)
            recorder = _Recorder([p for p in traced.parameters() if p.requires_grad], use_decompositions)
            arguments = fake_copy(example_inputs)
            compiled: Any = torch.compile(traced, backend=recorder.backend)
            recorder.run(lambda: compiled(**arguments) if isinstance(arguments, Mapping) else compiled(*arguments))
            return recorder.result()

    return _explained(type(model).__name__, run, "give bucket_size as a number of elements")


def trace_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    params: Sequence[nn.Parameter],
    *,
    name: str,
    use_decompositions: bool,
) -> TracedStep:
    """Trace a Dynamo graph that uses all ``params``, the trainable parameters of the model ``name``.

    Raises:
        ValueError: it does not use all of them, or cannot be traced.
    """
    used = {id(value) for value in example_inputs}
    missing = sum(id(param) not in used for param in params)
    if missing:
        raise ValueError(
            f"bucket_size='auto' needs the whole backward, but the first compiled graph of {name} uses only "
            f"{len(params) - missing} of {len(params)} trainable parameters (a graph break, or unused ones); call "
            "attach(model, MegabufConfig(bucket_size='auto'), example_inputs=...) before compiling"
        )

    def run() -> TracedStep:
        with _compat.fake_tensors() as fake_copy:
            values = [_compat.size_hint(x) if isinstance(x, torch.SymInt) else x for x in example_inputs]
            copies = fake_copy(values)
            by_id = {id(value): fake for value, fake in zip(values, copies)}
            recorder = _Recorder([by_id[id(param)] for param in params], use_decompositions)
            compiled = recorder.backend(copy_graph(gm), copies)
            recorder.run(lambda: compiled(*copies))
            return recorder.result()

    remedy = (
        "call attach(model, config, example_inputs=...) before compiling, or give bucket_size as a number of elements"
    )
    return _explained(name, run, remedy)


def _explained(name: str, run: Callable[[], TracedStep], remedy: str) -> TracedStep:
    try:
        return run()
    except Exception as error:
        # Whatever the model's own code raises when it gets tensors without values.
        lines = str(error).strip().splitlines()
        raise ValueError(
            f"bucket_size='auto' could not trace the backward of {name} without values of tensors "
            f"({type(error).__name__}: {lines[0] if lines else 'no message'}); {remedy}"
        ) from error


class _Recorder:
    """A backend that runs graphs as they are and notes what each one costs."""

    def __init__(self, params: Sequence[nn.Parameter], use_decompositions: bool) -> None:
        self._params = params
        self._index = {id(param): index for index, param in enumerate(params)}
        self._use_decompositions = use_decompositions
        self._forward: list[NodeCost] = []
        self._first_use: dict[int, int] = {}
        self._backward: list[NodeCost] = []
        self._in_graphs: dict[int, int] = {}
        self._by_hooks: dict[int, int] = {}
        """Of gradients that no graph returns: those of code after a graph break."""

    def backend(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        inputs = [self._index.get(id(value)) for value in example_inputs]

        def inner_compile(graph: GraphModule, _: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
            def run(args: list[Any]) -> Any:
                note = self._note_backward if kwargs.get("is_backward") else self._note_forward
                note(graph, inputs)
                values = tuple(args)
                args.clear()
                return graph(*values)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return _compat.compile_with_aot_autograd(
            gm,
            example_inputs,
            inner_compile=inner_compile,
            inductor_options={},
            use_decompositions=self._use_decompositions,
            is_backward_lazy=False,
        )

    def run(self, forward: Callable[[], Any]) -> None:
        """Run a forward and its backward.

        Raises:
            RuntimeError: no output has a gradient, or none of it was compiled.
        """
        for index, param in enumerate(self._params):
            param.register_post_accumulate_grad_hook(lambda _, index=index: self._note_hook(index))
        losses = [leaf.sum() for leaf in _tensors(forward()) if leaf.is_floating_point() and leaf.requires_grad]
        if not losses:
            raise RuntimeError("no output of its forward is a floating-point tensor with a gradient")
        torch.stack([loss.float() for loss in losses]).sum().backward()
        if not self._backward:
            raise RuntimeError("nothing in it was compiled")

    def result(self) -> TracedStep:
        params = range(len(self._params))
        first_use = dict.fromkeys(params, len(self._forward)) | self._first_use
        complete = dict.fromkeys(params, len(self._backward)) | self._by_hooks | self._in_graphs
        return TracedStep(
            tuple(self._forward),
            tuple(first_use[index] for index in params),
            tuple(self._backward),
            tuple(complete[index] for index in params),
        )

    def _note_forward(self, graph: GraphModule, inputs: Sequence[int | None]) -> None:
        before = len(self._forward)
        self._forward += _costs(graph)
        place = {node: before + index for index, node in enumerate(graph.graph.nodes)}
        for index, value in zip(inputs, placeholders(graph.graph)):
            users = [place[user] for user in value.users if user.op != "output"]
            if index is not None and users:
                self._first_use.setdefault(index, min(users))

    def _note_backward(self, graph: GraphModule, inputs: Sequence[int | None]) -> None:
        before = len(self._backward)
        self._backward += _costs(graph)
        place = {node: before + index + 1 for index, node in enumerate(graph.graph.nodes)}
        for index, value in zip(inputs, outputs(graph.graph)):
            if index is not None and isinstance(value, Node):
                self._in_graphs[index] = max(place[value], self._in_graphs.get(index, 0))

    def _note_hook(self, index: int) -> None:
        self._by_hooks[index] = len(self._backward)


def _costs(graph: GraphModule) -> Iterator[NodeCost]:
    for record in describe_nodes(graph):
        yield NodeCost(record["kind"], record["flops"], record["nbytes"])


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors in nested containers and in dataclasses, which torch does not look into."""
    for leaf in _compat.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
