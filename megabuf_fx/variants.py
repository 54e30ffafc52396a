"""Compiled variants of one traced graph, made when they are first needed.

A ``GraphSource`` keeps what an inner compiler was given: an untouched copy of the graph (the first compile mutates its
own), example inputs, keyword arguments, and the surroundings of that call. A further role compiled hours later then
still has the user's Inductor options and its donated buffers.

[Note: Inductor's CUDA graphs]
With ``mode="reduce-overhead"`` Inductor records graphs by itself. Buffers are static inputs of theirs, so gradients are
written in place. Host ops carry the tag ``cudagraph_unsafe``: Inductor cuts the graph there and records the parts
between, ``n + 1`` for ``n`` collectives that have kernels on both sides; collectives start and are waited for by the
host, as always. A graph that Inductor does not record after all is an error, never a silent change.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

import megabuf_fx._compat as _compat
from megabuf_fx.dump import GraphDump
from megabuf_fx.passes.add_buffer_inputs import ExtraInput
from megabuf_fx.pipeline import Step, run_passes

log = logging.getLogger("megabuf_fx.variants")

Boxed = Callable[[list[Any]], Any]


class GraphSource:
    """The graph that AOTAutograd handed to an inner compiler, ready to be compiled again and again.

    ``gm`` must stay as it is: give a ``copy_graph`` of one that somebody else has.
    """

    def __init__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        inner_compiler: str,
        metadata: Any = None,
    ) -> None:
        self._gm = gm
        self._example_inputs = list(example_inputs)
        self._kwargs = dict(kwargs)
        self._inner_compiler = inner_compiler
        self._environment = _compat.CompileEnvironment(metadata)

    @property
    def metadata(self) -> Any:
        """AOTAutograd's description of the graph."""
        return self._environment.metadata

    @property
    def is_backward(self) -> bool:
        return bool(self._kwargs.get("is_backward"))

    @property
    def is_inference(self) -> bool:
        return bool(self._kwargs.get("is_inference"))

    @property
    def graph(self) -> Graph:
        """The traced graph; read only."""
        return self._gm.graph

    @property
    def has_symbolic_shapes(self) -> bool:
        """Whether sizes are symbols; then every variant must be compiled while guards can still be added."""
        return any(
            isinstance(x, torch.SymInt) or (isinstance(x, Tensor) and any(isinstance(s, torch.SymInt) for s in x.shape))
            for x in self._example_inputs
        )

    def save(self) -> bytes:
        """The graph as bytes, for ``load`` in another process.

        Raises:
            Exception: of whatever kind, where a node holds what cannot be stored.
        """
        return _compat.dump_graph((self._gm, self._example_inputs, _compat.plain_arguments(self._kwargs)))

    @classmethod
    def load(cls, content: bytes, *, settings: Mapping[str, Any], inner_compiler: str, metadata: Any) -> GraphSource:
        """The source that was saved, in the surroundings of now; ``settings`` come from AOTAutograd."""
        gm, example_inputs, plain = _compat.load_graph(content)
        kwargs = _compat.complete_arguments(plain, settings)
        return cls(gm, example_inputs, kwargs, inner_compiler=inner_compiler, metadata=metadata)

    def compile(
        self,
        steps: Sequence[Step],
        extras: Sequence[ExtraInput],
        *,
        dump: GraphDump,
        keeps_order: bool,
        inspect: Callable[[GraphModule], None],
    ) -> Boxed:
        """Run ``steps`` on a fresh copy and compile it with ``extras`` appended to its inputs.

        ``keeps_order`` is for graphs that launch collectives. ``inspect`` sees the rewritten graph before the inner
        compiler changes it; what it wants to keep, it must copy.
        """
        with self._environment.entered():
            gm = run_passes(copy_graph(self._gm), steps, dump=dump)
            inspect(gm)
            if self._inner_compiler == "aot_eager":
                return _run_op_by_op(gm)
            kwargs = dict(self._kwargs)
            count = len(self._example_inputs)
            static = tuple(kwargs.get("static_input_idxs") or ())
            kwargs["static_input_idxs"] = (*static, *range(count, count + len(extras)))
            examples = [*self._example_inputs, *_example_values(gm, len(extras))]
            with _compat.keep_graph_order() if keeps_order else contextlib.nullcontext():
                return _compile_with_inductor(gm, examples, kwargs)


def _compile_with_inductor(gm: GraphModule, examples: Sequence[Any], kwargs: Mapping[str, Any]) -> Boxed:
    # Inductor turns this switch off, for forward and backward, when it does not record a graph.
    switch = kwargs.get("cudagraphs")
    was_on = bool(switch)
    compiled = _compat.compile_with_inductor(gm, examples, **kwargs)
    if was_on and not switch:
        raise RuntimeError(
            "CUDA graphs were asked for, but Inductor does not record this graph: "
            f"{_compat.why_not_recorded(compiled)}. Compile without mode='reduce-overhead', or mend the cause"
        )
    return compiled


def copy_graph(gm: GraphModule) -> GraphModule:
    """A copy to rewrite, with the names of its nodes; they share what is in their ``meta``."""
    graph = Graph()
    copied: dict[Node, Node] = {}
    outputs = graph.graph_copy(gm.graph, copied)
    output = graph.output(outputs)
    (original,) = gm.graph.find_nodes(op="output")
    # Inductor keeps there which outputs the user sees.
    output.meta = dict(original.meta)
    copy = _compat.graph_module(gm, graph)
    copy.meta = dict(gm.meta)
    return copy


def _example_values(gm: GraphModule, count: int) -> list[Any]:
    nodes = gm.graph.find_nodes(op="placeholder")
    return [node.meta["val"] for node in nodes[len(nodes) - count :]]


def _run_op_by_op(gm: GraphModule) -> Boxed:
    def run(args: list[Any]) -> Any:
        values = tuple(args)
        args.clear()
        return gm(*values)

    return run
