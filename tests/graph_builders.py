"""Real AOTAutograd graphs of small modules, plans for them, and a target that records what rewritten graphs call."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from helpers import Mlp, batch, seeded
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from megabuf_fx.passes.add_buffer_inputs import ExtraInput, extra_inputs
from megabuf_fx.passes.graph_utils import contiguous_stride
from megabuf_fx.runtime.layout import ParamSpec
from megabuf_fx.runtime.ops import register_target
from megabuf_fx.runtime.plan import GraphParam, GraphPlan, plan_buckets, plan_graph

TABLES = ("none", "inductor")
"""Decomposition tables: that of the ``aot_eager`` inner compiler and that of Inductor."""


@dataclass(frozen=True, slots=True)
class Traced:
    """The two graphs of one module, with the arguments and results of one run of each."""

    specs: tuple[ParamSpec, ...]
    """Trainable parameters in definition order."""
    inputs: tuple[int | None, ...]
    """Entry ``i``: index into ``specs`` of the parameter that is graph input ``i``, None for other inputs."""
    forward: GraphModule
    forward_args: tuple[Any, ...]
    forward_results: tuple[Any, ...]
    backward: GraphModule
    backward_args: tuple[Any, ...]
    backward_results: tuple[Any, ...]
    """What the untouched backward returns: one gradient or None per graph input."""

    def reference(self, param: int) -> Tensor:
        """The gradient of parameter ``param`` that the untouched backward returns."""
        grad = self.backward_results[self.inputs.index(param)]
        assert isinstance(grad, Tensor)
        return grad


@functools.cache
def leave_modules_out_of_collections() -> None:
    """Once per session: conftest.py collects garbage after every test, and what the compiler has imported by now lives
    as long as the session. Without it each collection is 0.1 s shorter."""
    gc.collect()
    gc.freeze()


def trace(model: nn.Module, *args: Tensor, table: str, dynamic: bool = False, saves_views: bool = False) -> Traced:
    """Dynamo's and AOTAutograd's graphs of ``model(*args)`` and its backward, as the backend gets them.

    Inputs of the Dynamo graph come in the order of their first use, as in the backend. ``dynamic`` makes sizes symbols,
    which are inputs too. ``saves_views``: with the partitioner that recomputes nothing, not even views.
    """
    graphs: dict[str, GraphModule] = {}
    runs: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {}
    examples: list[Any] = []

    def keep(kind: str) -> Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]:
        def compile_graph(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            graphs[kind] = copy_graph(gm)

            def run(arguments: list[Any]) -> Any:
                values = tuple(arguments)
                arguments.clear()
                results = gm(*values)
                runs[kind] = (values, tuple(results))
                return results

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return compile_graph

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        # Dynamo can call again for the same code, after it has learned which inputs it does not need.
        examples[:] = example_inputs
        compiler = aot_autograd(
            fw_compiler=keep("forward"),
            bw_compiler=keep("backward"),
            decompositions=select_decomp_table() if table == "inductor" else {},
            partition_fn=default_partition
            if saves_views
            else functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
        )
        with functorch_config.patch(enable_autograd_cache=False):
            compiled: Callable[..., Any] = compiler(gm, list(example_inputs))
        return compiled

    result = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    result.float().square().sum().backward()
    torch.compiler.reset()
    leave_modules_out_of_collections()
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    index_of = {id(param): index for index, (_, param) in enumerate(named)}
    return Traced(
        specs=tuple(ParamSpec(name, tuple(param.shape), param.dtype) for name, param in named),
        inputs=tuple(index_of.get(id(example)) for example in examples),
        forward=graphs["forward"],
        forward_args=runs["forward"][0],
        forward_results=runs["forward"][1],
        backward=graphs["backward"],
        backward_args=runs["backward"][0],
        backward_results=runs["backward"][1],
    )


def trace_backward(function: Callable[..., tuple[Tensor, ...]], *args: Tensor) -> Traced:
    """A hand-made backward: ``function`` computes the gradients of parameters ``p0``, ``p1``, ... from ``args``."""
    backward = make_fx(function, tracing_mode="fake")(*args)
    results = function(*args)
    specs = tuple(ParamSpec(f"p{i}", tuple(grad.shape), grad.dtype) for i, grad in enumerate(results))
    empty = GraphModule(nn.Module(), Graph())
    return Traced(specs, tuple(range(len(specs))), empty, (), (), backward, args, results)


@functools.cache
def traced_mlp(table: str) -> Traced:
    """``Mlp`` on an input that needs no gradient: the case that most tests share. Read only."""
    return trace(seeded(Mlp), batch(0, 0, 0, 6, 13), table=table)


class Buffers:
    """Gradient buffers for a traced module, and the target of its collectives.

    ``calls`` are the collectives in the order in which they ran; ``sent[group]`` holds the group's gradients as they
    were when its reduction started.
    """

    def __init__(
        self,
        traced: Traced,
        *,
        bucket_size: int | None = None,
        sharded: bool = False,
        dense: bool = False,
        grad_reduce_in_fp32: bool = False,
    ) -> None:
        self.traced = traced
        self.bucket_plan = plan_buckets(
            traced.specs,
            dp_size=1,
            sharded=sharded,
            bucket_size=bucket_size,
            grad_reduce_in_fp32=grad_reduce_in_fp32,
            dense=dense,
        )
        self.grad_data = [
            torch.full((layout.numel,), torch.nan, dtype=layout.key.grad_dtype) for layout in self.bucket_plan.layouts
        ]
        self.main_grads = [
            self.grad_data[buffer][slot.start : slot.end].view(spec.shape)
            for spec, (buffer, slot) in zip(traced.specs, self.bucket_plan.locations)
        ]
        self._locations, self._group_of = self.bucket_plan.locations, self.bucket_plan.group_of_param
        self.token = torch.zeros(1)
        self.flag = torch.zeros((), dtype=torch.int32)
        self.calls: list[tuple[str, int]] = []
        self.sent: dict[int, list[Tensor]] = {}
        self.handle = register_target(self)
        self.plan: GraphPlan = plan_graph(
            [None if index is None else self.graph_param(index) for index in traced.inputs],
            {self.handle: self.bucket_plan},
        )

    def graph_param(self, index: int) -> GraphParam:
        spec, (buffer, slot) = self.traced.specs[index], self._locations[index]
        return GraphParam(
            handle=self.handle,
            param=index,
            group=self._group_of[index],
            name=spec.name,
            shape=spec.shape,
            stride=contiguous_stride(spec.shape),
            grad_dtype=self.bucket_plan.layouts[buffer].key.grad_dtype,
            buffer=buffer,
            start=slot.start,
            whole_buffer=not self.bucket_plan.aligned,
        )

    @property
    def gradients(self) -> dict[int, GraphParam]:
        """Output position and parameter of every gradient that the backward returns."""
        results = self.traced.backward_results
        return {i: p for i, p in enumerate(self.plan.inputs) if p is not None and results[i] is not None}

    @property
    def launches(self) -> tuple[tuple[int, int], ...]:
        return self.plan.covered

    def start_grad_sync(self, group: int, *, scaled: bool = False) -> None:
        self.calls.append(("start_grad_sync", group))
        params = self.bucket_plan.groups[group].params
        self.sent[group] = [self.main_grads[param].clone() for param in params]

    def wait_param_sync(self, group: int) -> None:
        self.calls.append(("wait_param_sync", group))

    def extras(self, *, with_token: bool = True, with_flag: bool = False) -> tuple[ExtraInput, ...]:
        """What a backward that writes all gradients needs."""
        return extra_inputs(
            list(self.gradients.values()),
            buffer_numels={(self.handle, index): data.numel() for index, data in enumerate(self.grad_data)},
            device=self.token.device,
            with_token=with_token,
            with_flag=with_flag,
        )

    @property
    def token_input(self) -> ExtraInput:
        """What a forward that waits needs."""
        return ExtraInput("token", self.handle, 0, (1,), (1,), torch.float32, self.token.device)

    def poison(self) -> None:
        """Fill the buffers with NaN: whoever reads before writing, or writes too little, shows."""
        for data in self.grad_data:
            data.fill_(torch.nan)

    def randomize(self, seed: int = 1) -> list[Tensor]:
        """Gradients of an earlier micro-batch; returns copies. Padding stays NaN."""
        generator = torch.Generator().manual_seed(seed)
        for main_grad in self.main_grads:
            main_grad.copy_(torch.randn(main_grad.shape, generator=generator))
        return [main_grad.clone() for main_grad in self.main_grads]

    @torch.no_grad()
    def run_backward(self, gm: GraphModule, extras: Sequence[ExtraInput]) -> tuple[Any, ...]:
        return tuple(gm(*self.traced.backward_args, *map(self._tensor, extras)))

    @torch.no_grad()
    def run_forward(self, gm: GraphModule, extras: Sequence[ExtraInput]) -> tuple[Any, ...]:
        return tuple(gm(*self.traced.forward_args, *map(self._tensor, extras)))

    def assert_padding_is_untouched(self) -> None:
        """Outside the slots every element is still the NaN that ``poison`` or ``__init__`` put there."""
        for data, layout in zip(self.grad_data, self.bucket_plan.layouts):
            is_padding = torch.ones(data.shape, dtype=torch.bool)
            for slot in layout.slots:
                is_padding[slot.start : slot.end] = False
            assert data[is_padding].isnan().all()

    def _tensor(self, extra: ExtraInput) -> Tensor:
        if extra.kind in ("token", "flag"):
            return self.token if extra.kind == "token" else self.flag
        return self.grad_data[extra.index] if extra.kind == "grad_data" else self.main_grads[extra.index]


def copy_graph(gm: GraphModule) -> GraphModule:
    """A copy to rewrite; node names and ``meta`` stay."""
    graph = Graph()
    copied: dict[Node, Node] = {}
    graph.output(graph.graph_copy(gm.graph, copied))
    return GraphModule(gm, graph)


def apply(gm: GraphModule, *passes: Callable[[GraphModule], GraphModule]) -> GraphModule:
    """Run ``passes`` on a copy of ``gm``, checked and ready to call."""
    gm = copy_graph(gm)
    for function in passes:
        assert function(gm) is gm, "a pass rewrites in place and returns what it was given"
    return finish(gm)


def finish(gm: GraphModule) -> GraphModule:
    """Check and recompile, as the runner does."""
    gm.graph.lint()
    gm.recompile()
    return gm


def find(gm: GraphModule, target: object) -> list[Node]:
    """Calls of ``target`` in order."""
    return [node for node in gm.graph.nodes if node.op == "call_function" and node.target is target]


def node_named(gm: GraphModule, name: str) -> Node:
    node: Node
    (node,) = [node for node in gm.graph.nodes if node.name == name]
    return node


def order_of(gm: GraphModule) -> dict[Node, int]:
    return {node: place for place, node in enumerate(gm.graph.nodes)}


def code_line(node: Node) -> str:
    """The user's line that ``node`` comes from; Python 3.11 underlines it with carets."""
    trace: str = node.meta["stack_trace"]
    lines = [line.strip() for line in trace.splitlines()]
    return [line for line in lines if line.strip("^~")][-1]


def text_of(gm: GraphModule) -> str:
    """The graph as text, to compare two of them: nodes, arguments and their order."""
    return str(gm.graph)
