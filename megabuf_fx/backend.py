"""``torch.compile(model, backend="megabuf")``."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule

import megabuf_fx._compat as _compat
from megabuf_fx.attach import attach_traced
from megabuf_fx.config import MegabufConfig, suggest
from megabuf_fx.handle import MegabufHandle, find_handles
from megabuf_fx.saved_graph import cache_tag
from megabuf_fx.traced_graph import TracedGraph
from megabuf_fx.traced_step import TracedStep, trace_graph

log = logging.getLogger("megabuf_fx.backend")

_GRAPH_NUMBERS = itertools.count()


def megabuf(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend: compiles one Dynamo graph so that its gradients go into the buffers of attached models.

    ``options`` holds fields of ``MegabufConfig`` (for a model that nobody attached: it is then attached without the
    distributed optimizer) and options of the Inductor backend; ``mode`` is Inductor's.

    Raises:
        ValueError: unknown option; options of an attached model that differ from its config.
        RuntimeError: trainable parameters that belong to no attached model and not to one root module.
        NotImplementedError: compiled autograd, tensor subclasses.
    """
    if _compat.is_compiled_autograd_enabled():
        raise NotImplementedError(
            "backend='megabuf' writes gradients inside the compiled backward and cannot run under compiled autograd; "
            "turn it off (torch._dynamo.config.compiled_autograd = False)"
        )
    ours, inductor_options = split_options(mode, options)
    _refuse_inputs(gm, example_inputs)
    handles = _find_or_attach(gm, example_inputs, ours)
    config = handles[0].config if handles else MegabufConfig(**{**ours, "use_distributed_optimizer": False})
    graph = TracedGraph(
        example_inputs,
        number=next(_GRAPH_NUMBERS),
        rank=dist.get_rank() if dist.is_initialized() else 0,
        inner_compiler=config.inner_compiler,
        fuse=config.gradient_accumulation_fusion,
        dump_dir=config.dump_dir,
    )
    wants = settle_cudagraphs(inductor_options, example_inputs, inner_compiler=config.inner_compiler)
    inductor_options["triton.cudagraphs"] = wants
    if wants:
        # It would move all launches behind the backward, so that fewer parts are recorded and nothing overlaps.
        inductor_options.setdefault("triton.reorder_for_reducing_graph_partitions", False)
    if handles:
        modules = _compat.find_traced_modules(gm)
        for handle in handles:
            handle.watched_hooks.watch(graph, modules)
            handle.buffers.has_inductor_graphs |= wants
    with graph.adopting():
        compiled = _compat.compile_with_aot_autograd(
            gm,
            example_inputs,
            inner_compile=graph.inner_compile,
            inductor_options=inductor_options,
            use_decompositions=config.inner_compiler == "inductor",
            cache_tag=cache_tag(example_inputs) if config.inner_compiler == "inductor" and not wants else None,
        )
    return graph.wrap(compiled)


def split_options(mode: str | None, options: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of ours and options of Inductor (those of ``mode`` included).

    Raises:
        ValueError: a name that neither knows; the message suggests a near one.
    """
    known = [field.name for field in dataclasses.fields(MegabufConfig)]
    inductor_names = _compat.inductor_option_names()
    ours: dict[str, Any] = {}
    inductor: dict[str, Any] = dict(_compat.inductor_mode_options(mode)) if mode and mode != "default" else {}
    for name, value in (options or {}).items():
        inductor_name = name.replace("-", "_")
        if name in known:
            ours[name] = value
        elif inductor_name in inductor_names:
            inductor[inductor_name] = value
        else:
            hint = suggest(name, known, further=inductor_names)
            raise ValueError(f"unknown option '{name}' of backend 'megabuf'{hint}")
    return ours, inductor


def settle_cudagraphs(inductor: Mapping[str, Any], example_inputs: Sequence[Any], *, inner_compiler: str) -> bool:
    """Whether this graph is recorded in CUDA graphs, as ``mode="reduce-overhead"`` wants them.

    Collectives are left out of them ([Note: Inductor's CUDA graphs] in ``variants.py``).

    Raises:
        ValueError: an option that recording needs is off.
    """
    if not inductor.get("triton.cudagraphs", _compat.inductor_default("triton.cudagraphs")):
        return False
    if not any(isinstance(x, torch.Tensor) and x.is_cuda for x in example_inputs):
        warnings.warn("CUDA graphs are wanted, but this graph is not on a GPU; it runs without them", stacklevel=2)
        return False
    if inner_compiler != "inductor":
        raise ValueError(f"CUDA graphs need inner_compiler='inductor', not {inner_compiler!r}")
    for name in ("graph_partition", "triton.cudagraph_trees"):
        if not inductor.get(name, _compat.inductor_default(name)):
            raise ValueError(f"CUDA graphs need Inductor's option {name}=True: collectives run between their parts")
    return True


def _refuse_inputs(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    if any(True for _ in gm.parameters()):
        raise NotImplementedError(
            "the traced graph holds parameters instead of taking them as inputs "
            "(torch._dynamo.config.inline_inbuilt_nn_modules is off); turn it on"
        )
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    for name, value in zip(names, example_inputs):
        if isinstance(value, nn.Parameter) and _compat.is_subclass_tensor(value):
            raise NotImplementedError(
                f"parameter input '{name}' is a {type(value.data).__name__}; tensor-subclass parameters "
                "(DTensor, FSDP2, quantized) are not supported by backend 'megabuf'"
            )


def _find_or_attach(gm: GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any]) -> list[MegabufHandle]:
    """Handles of the attached models whose parameters the graph uses; attaches the root of an unattached one."""
    trainable = [x for x in example_inputs if isinstance(x, nn.Parameter) and x.requires_grad]
    handles = find_handles(trainable)
    if handles:
        for name, value in options.items():
            if getattr(handles[0].config, name) != value:
                raise ValueError(
                    f"option {name}={value!r} differs from {getattr(handles[0].config, name)!r} with which the model "
                    "was attached; pass it to attach(model, MegabufConfig(...)) instead"
                )
        return handles
    if not trainable or not torch.is_grad_enabled():
        # A graph without gradients (evaluation, an averaged teacher) needs no buffers.
        return []
    roots = _compat.find_root_modules(gm)
    caller = _compat.find_calling_module()
    if caller is not None and {id(param) for param in trainable} <= {id(param) for param in caller.parameters()}:
        # The graph can be a piece of the compiled module; parameters outside of it must be reduced, too.
        roots = [caller]
    if len(roots) != 1:
        raise RuntimeError(
            f"the compiled function uses trainable parameters of {len(roots)} modules "
            f"({', '.join(type(root).__name__ for root in roots) or 'none found'}), so it is not clear which one to "
            "attach; call megabuf_fx.attach(model) on each model before compiling"
        )
    config = MegabufConfig(**{"use_distributed_optimizer": False, **options})
    log.info("attaching %s, the root module of the first compiled graph", type(roots[0]).__name__)

    def trace(params: Sequence[nn.Parameter], config: MegabufConfig) -> TracedStep:
        return trace_graph(
            gm,
            example_inputs,
            params,
            name=type(roots[0]).__name__,
            use_decompositions=config.inner_compiler == "inductor",
        )

    with _compat.real_tensors():
        return [attach_traced(roots[0], config, trace=trace)]
