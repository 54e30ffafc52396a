"""Warm starts: what AOTAutograd's cache keeps of a graph, so that another process does not trace it again.

[Note: warm starts]
The cache keeps a graph as AOTAutograd has made it, *before* any pass of ours, and nothing that depends on buffers:
layout, config, ranks and roles are no part of an entry and need not be part of its key. A graph from the cache goes
through the same passes as a traced one, when a variant of it is first needed, and the result through Inductor's own
cache, whose key is the rewritten graph. So an entry cannot be stale, only useless.

One thing of the forward's first variant goes into the backward graph: the strides of what is saved for it, which
Inductor chooses. They are kept and compared; where they differ, the model is traced again.

Graphs with symbolic sizes, constants or nested graphs are not kept, nor those that Inductor records in CUDA graphs, nor
any of the ``aot_eager`` inner compiler.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

import megabuf_fx._compat as _compat
from megabuf_fx.variants import Boxed, GraphSource

Adopt = Callable[[GraphSource], Boxed]

# AOTAutograd makes objects from its cache by itself and hands nothing of the caller's to them.
_ADOPTS: ContextVar[tuple[Adopt, str]] = ContextVar("megabuf_fx.saved_graph")


def cache_tag(example_inputs: Sequence[Any]) -> str | None:
    """What tells our entries from those of plain Inductor and of other versions of this file; None for a graph that is
    not kept."""
    if any(isinstance(value, torch.SymInt) for value in example_inputs):
        return None
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


@contextlib.contextmanager
def adopting(adopt: Adopt, inner_compiler: str) -> Iterator[None]:
    """Graphs from the cache are given to ``adopt``, which returns what runs them."""
    token = _ADOPTS.set((adopt, inner_compiler))
    try:
        yield
    finally:
        _ADOPTS.reset(token)


class SavedGraph(_compat.output_code()):  # type: ignore[misc]
    """What AOTAutograd calls, and what its cache keeps."""

    def __init__(self, source: GraphSource, run: Boxed, strides: _compat.Strides) -> None:
        super().__init__()
        self._boxed_call = True
        self._run: Boxed | None = run
        self._source: GraphSource | None = source
        self._content = b""
        self._strides = strides
        self._metadata = source.metadata

    def __call__(self, args: list[Any]) -> Any:
        assert self._run is not None
        return self._run(args)

    def prepare_for_serialization(self) -> None:
        """Called on a shallow copy, which is then pickled."""
        assert self._source is not None
        if reason := _why_not_kept(self._source):
            raise _compat.do_not_cache(reason)
        try:
            self._content = self._source.save()
        except Exception as error:
            raise _compat.do_not_cache(f"the graph cannot be stored: {error}") from error
        self._source = self._run = None

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Mapping[str, Any]) -> None:
        """Called on an object from the cache."""
        adopt, inner_compiler = _ADOPTS.get()
        source = GraphSource.load(
            self._content, settings=graph_kwargs, inner_compiler=inner_compiler, metadata=self._metadata
        )
        with _compat.noting_output_strides() as noted:
            self._run = adopt(source)
        if noted() != self._strides:
            raise _compat.do_not_cache("what is saved for backward has other strides than when the graph was traced")
        self._content = b""

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Kernels belong to the variants, which are in Inductor's cache."""


def keep_graph(source: GraphSource, adopt: Adopt) -> SavedGraph:
    """Give a traced graph to ``adopt``, and make AOTAutograd's cache keep it."""
    run = adopt(source)
    return SavedGraph(source, run, () if source.is_backward else _compat.output_strides())


def _why_not_kept(source: GraphSource) -> str | None:
    if source.has_symbolic_shapes:
        return "sizes are symbols"
    for node in source.graph.nodes:
        if node.op == "get_attr":
            return f"{node.name} is a constant or a graph"
        if node.op == "call_function" and not (_compat.is_op(node.target) or node.target is operator.getitem):
            return f"{node.target} is no ordinary op"
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        if any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes):
            return f"{node.name} has symbolic sizes"
    return None
