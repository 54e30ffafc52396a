"""Every private torch name that the project uses. Checked on torch 2.11.0, 2.13.0 and 2.14.1.

Inductor is imported inside functions: importing it takes a second that users of the eager path need not pay.
"""

from __future__ import annotations

import contextlib
import copy
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import CodeType
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
    is_traceable_wrapper_subclass,
)
from torch.utils.hooks import RemovableHandle

InnerCompile = Callable[..., Callable[..., Any]]
Strides = tuple[tuple[int, ...] | None, ...]
"""Of each output of a graph, None where it is no tensor."""

# Autograd engine: valid while a backward runs on this thread.


def current_autograd_node() -> Any:
    """The node that autograd executes now."""
    return torch._C._current_autograd_node()  # type: ignore[attr-defined]


def current_backward_id() -> int:
    """Number of the running autograd pass (graph task), -1 outside one."""
    return torch._C._current_graph_task_id()


def keeps_graph() -> bool:
    """Whether the running backward was asked to keep its graph (``retain_graph`` or ``create_graph``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())  # type: ignore[attr-defined]


def will_accumulate(accumulate_grads: Iterable[Any]) -> bool:
    """Whether the running backward will execute all of these AccumulateGrad nodes.

    False under ``torch.autograd.grad`` and for parameters left out of ``backward(inputs=...)``. For a parameter that
    ``autograd.grad`` captures, torch raises; that too means that nothing is accumulated.
    """
    try:
        return all(map(torch._C._will_engine_execute_node, accumulate_grads))
    except RuntimeError:
        return False


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the running backward ends without error."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def is_compiled_autograd_enabled() -> bool:
    from torch._dynamo import compiled_autograd

    return bool(
        getattr(torch._dynamo.config, "compiled_autograd", False)
        or getattr(compiled_autograd, "compiled_autograd_enabled", False)
    )


# Tensors and modes.


def has_user_hooks(param: Tensor) -> bool:
    """Whether ``register_hook`` or ``register_post_accumulate_grad_hook`` was called on this leaf."""
    return bool(param._backward_hooks) or bool(param._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def registered_hooks() -> int:
    """How many hooks anybody has registered in this process, on modules, tensors and autograd nodes. While it stays the
    same none was added; some may have been removed."""
    return RemovableHandle.next_id


def version_of(tensor: Tensor) -> int:
    """How often the tensor was written in place, through itself or a view that shares its counter."""
    return int(tensor._version)


def storage_info(file: str, offset: int, length: int) -> Any:
    """Where a tensor lies in a file of a checkpoint, in the words of ``torch.distributed.checkpoint``. In bytes."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


def module_hook_ids(module: nn.Module) -> tuple[int, ...]:
    """Numbers of the hooks registered on a module, of all kinds that run in a call or its backward."""
    return (
        *module._forward_pre_hooks,
        *module._forward_hooks,
        *module._backward_pre_hooks,
        *module._backward_hooks,
    )


def is_subclass_tensor(tensor: Tensor) -> bool:
    """Whether AOTAutograd would unwrap this tensor (DTensor and its like)."""
    return bool(is_traceable_wrapper_subclass(tensor))


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """Leave fake and dispatch modes, so that tensors made inside a compilation are real."""
    return cast("contextlib.AbstractContextManager[Any]", _disable_current_modes())


@contextlib.contextmanager
def fake_tensors() -> Iterator[Callable[[Any], Any]]:
    """Run what is inside on tensors without memory; yields a deep copy that turns tensors into such.

    Nothing of a compilation around it is seen or changed. Checked on torch 2.11.0, 2.13.0, 2.14.1.
    """
    from torch._guards import compile_context, tracing
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake_copy(value: Any) -> Any:
        with FakeCopyMode(mode):
            return copy.deepcopy(value)

    with _disable_current_modes(), tracing(None), compile_context(None), mode, torch.enable_grad():
        yield fake_copy


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Timeout of a process group, None when its backend does not tell."""
    for device in ("cuda", "cpu"):
        with contextlib.suppress(RuntimeError):
            options = getattr(group._get_backend(torch.device(device)), "options", None)
            timeout = getattr(options, "_timeout", None)
            if isinstance(timeout, timedelta):
                return timeout
    return None


def functional_all_reduce(value: Tensor, op: str, group: dist.ProcessGroup) -> Tensor:
    """``value`` over the ranks of ``group`` as a new tensor, by an op that a captured step can hold; checked on torch
    2.11.0, 2.13.0, 2.14.1."""
    functional = torch.ops._c10d_functional
    result: Tensor = functional.wait_tensor(functional.all_reduce(value, op, group.group_name))
    return result


def nccl_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The ``ProcessGroupNCCL`` behind a group; checked on torch 2.11.0, 2.13.0, 2.14.1 (by its Python API, without a
    GPU)."""
    return group._get_backend(device)


def scaler_tensors(scaler: torch.amp.GradScaler, device: torch.device) -> dict[str, Tensor]:
    """What a ``GradScaler`` keeps on the device: ``loss_scale`` and ``growth_tracker``."""
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
    assert scaler._scale is not None
    assert scaler._growth_tracker is not None
    return {"loss_scale": scaler._scale, "growth_tracker": scaler._growth_tracker}


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell a learning-rate scheduler that the optimizer has stepped, so that it does not warn."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


class RecordingMode(TorchDispatchMode):
    """A dispatch mode that sees the ops of compiled graphs as they run, and not what compiles them.

    Under a plain mode Dynamo runs the original Python instead of what it has compiled.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def record_graph(self, name: str, function: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run a compiled graph that does not run op by op: its kernels are invisible to a dispatch mode."""
        raise NotImplementedError


def size_hint(size: int | torch.SymInt) -> int:
    """A size; of a symbol the value that it had when it was traced, without a guard on it."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return int(hint) if hint is not None else 1


def is_profiling() -> bool:
    """Whether ``torch.profiler`` or ``emit_nvtx`` is recording."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def trace_artifact(name: str, *, encoding: str, payload: Callable[[], str]) -> None:
    """Put an artifact into the log that TORCH_TRACE asks for, which tlparse shows by the graph being compiled.

    ``payload`` is not called when nobody asked. ``encoding`` is "json" or "string".
    """
    torch._logging.trace_structured(  # type: ignore[attr-defined]
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        expect_trace_id=False,
    )


def is_op(function: object) -> bool:
    """Whether a dispatch mode was called for an ordinary op; a higher-order operator has no schema."""
    return isinstance(function, torch._ops.OpOverload)


def recording_mode() -> RecordingMode | None:
    """The innermost dispatch mode, if it is one that records."""
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, RecordingMode) else None


def tree_leaves(values: Any) -> list[Any]:
    """The leaves of nested tuples, lists, dicts and what else torch knows."""
    return pytree.tree_leaves(values)


def tree_map(function: Callable[[Any], Any], values: Any) -> Any:
    """``values`` with ``function`` applied to every leaf."""
    return pytree.tree_map(function, values)


def storage_key(tensor: Tensor) -> int:
    """The same for all tensors that share a storage, unique while one of them lives."""
    return int(tensor.untyped_storage()._cdata)


def weak_storage(tensor: Tensor) -> object:
    """Keeps ``storage_key`` of the tensor's storage from being used again, without keeping the memory."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


def wraps_async_value(func: Any) -> bool:
    """Whether this op only makes a tensor that waits for a functional collective where it is used."""
    return str(func) == "_c10d_functional._wrap_tensor_autograd.default"


def without_autocast() -> contextlib.AbstractContextManager[Any]:
    """Ops run in the dtypes of their arguments, on every device."""
    return cast("contextlib.AbstractContextManager[Any]", torch._C._DisableAutocast())


def is_inductor_code(code: CodeType) -> bool:
    """Whether this is the function that runs the kernels of a graph that Inductor has compiled."""
    if code.co_name != "call":
        return False
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return code.co_filename.startswith(cache_dir())


def prints_tensor(code: CodeType) -> bool:
    """Whether this is the function that makes a tensor's text. It leaves all dispatch modes while it reads values."""
    return code is torch._tensor_str._str.__code__


def async_value(tensor: Tensor) -> Tensor:
    """What a functional collective will have written, without waiting; any other tensor itself."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


# Dynamo.


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """The module inside ``torch.compile(module)``; any other module itself."""
    from torch._dynamo import OptimizedModule

    return model._orig_mod if isinstance(model, OptimizedModule) else model


def find_calling_module() -> nn.Module | None:
    """The outermost module whose code is running, by the Python stack; None outside of any.

    When Dynamo skips a frame (a graph break inside a loop), it compiles the modules called from it one by one; the
    module that the user compiled is then further out on the stack.
    """
    found = None
    frame = sys._getframe(1)
    while frame is not None:
        value = frame.f_locals.get("self")
        if isinstance(value, nn.Module) and not isinstance(value, GraphModule):
            found = unwrap_compiled(value)
        frame = frame.f_back  # type: ignore[assignment]
    return found


def find_root_modules(gm: GraphModule) -> list[nn.Module]:
    """The outermost modules through which the traced code reaches the trainable parameters of ``gm``.

    Read from the sources of the graph's inputs, in the frame that Dynamo is compiling.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    root = InstructionTranslator.current_tx().output.root_tx
    scope = {"L": root.f_locals, "G": root.f_globals}
    found: dict[int, nn.Module] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        example = getattr(argument, "example", None) if argument is not None else None
        if not isinstance(example, nn.Parameter) or not example.requires_grad:
            continue
        module = _outermost_module(argument.source, scope)
        if module is not None:
            found[id(module)] = module
    return list(found.values())


def find_traced_modules(gm: GraphModule) -> list[nn.Module]:
    """The modules whose calls are part of ``gm``, by the module paths on its nodes."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    root = InstructionTranslator.current_tx().output.root_tx
    paths = {path for node in gm.graph.nodes for path, _ in (node.meta.get("nn_module_stack") or {}).values()}
    found: dict[int, nn.Module] = {}
    for path in paths:
        # As in "L['self'].blocks.0": a local of the frame that Dynamo compiles, then names of submodules.
        match = re.fullmatch(r"L\['(\w+)'\]\.?(.*)", path)
        value = root.f_locals.get(match[1]) if match else None
        value = getattr(value, "__self__", value)
        if match and isinstance(value, nn.Module):
            with contextlib.suppress(AttributeError):
                module = value.get_submodule(match[2])
                found[id(module)] = module
    return list(found.values())


def _outermost_module(source: Any, scope: dict[str, Any]) -> nn.Module | None:
    chain = [source]
    while getattr(chain[-1], "base", None) is not None:
        chain.append(chain[-1].base)
    for link in reversed(chain):
        name = link.name() if callable(link.name) else link.name
        try:
            value = eval(name, dict(scope))
        except Exception:
            continue
        value = getattr(value, "__self__", value)
        if isinstance(value, nn.Module):
            return value
    return None


def compiled_graphs() -> int:
    """How many graphs Dynamo has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


# AOTAutograd and Inductor.


def compile_with_aot_autograd(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    inner_compile: InnerCompile,
    inductor_options: Mapping[str, Any],
    use_decompositions: bool,
    cache_tag: str | None = None,
    is_backward_lazy: bool = True,
) -> Callable[..., Any]:
    """Trace, partition and compile as the Inductor backend does, with ``inner_compile`` in place of Inductor's own.

    AOTAutograd's cache keeps what ``inner_compile`` returns, an ``OutputCode`` (its *bundled* form, which torch's
    regional Inductor uses, too), under keys that ``cache_tag`` is part of; without a tag it is off in here. The
    backward is then handed over right after the forward, as a late one would be stored under the settings of its time;
    so it is when not ``is_backward_lazy``, for what cannot be inside a compilation when it first runs. Checked on torch
    2.11.0, 2.13.0, 2.14.1.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    if cache_tag is None or not _keeps_graphs():
        cache = functorch_config.patch(
            enable_autograd_cache=False, force_non_lazy_backward_lowering=not is_backward_lazy
        )
    else:
        cache = _own_cache_entries(cache_tag)
    with cache:
        return cast(
            "Callable[..., Any]",
            compile_fx(
                gm,
                example_inputs,
                inner_compile=cast("Any", inner_compile),
                config_patches=dict(inductor_options),
                decompositions=None if use_decompositions else {},
            ),
        )


_TAG_MARK = "|megabuf_fx:"
"""Stands between the user's ``torch.compiler.config.cache_key_tag`` and ours."""


def _keeps_graphs() -> bool:
    """Whether AOTAutograd's cache is on, and in the form in which graphs are found again by a further process."""
    from torch._dynamo import config as dynamo_config
    from torch._functorch import config as functorch_config

    return bool(
        functorch_config.enable_autograd_cache
        and not torch.compiler.config.force_disable_caches
        # Whole compiled models are stored then, and loaded without a call of the backend.
        and not functorch_config.bundled_autograd_cache
        and not dynamo_config.caching_precompile
    )


@contextlib.contextmanager
def _own_cache_entries(tag: str) -> Iterator[None]:
    from torch._functorch import config as functorch_config

    # Without a tag of ours, plain Inductor would be handed our entries for the same model.
    key_tag = torch.compiler.config.cache_key_tag + _TAG_MARK + tag
    with (
        functorch_config.patch(bundled_autograd_cache=True, force_non_lazy_backward_lowering=True),
        torch.compiler.config.patch(cache_key_tag=key_tag),  # type: ignore[attr-defined]
    ):
        yield


@contextlib.contextmanager
def _user_cache_entries() -> Iterator[None]:
    """Undo ``_own_cache_entries``: Inductor's own cache reads the same settings."""
    from torch._functorch import config as functorch_config

    user_tag, mark, _ = torch.compiler.config.cache_key_tag.partition(_TAG_MARK)
    if not mark:
        yield
        return
    with (
        functorch_config.patch(bundled_autograd_cache=False, force_non_lazy_backward_lowering=False),
        torch.compiler.config.patch(cache_key_tag=user_tag),  # type: ignore[attr-defined]
    ):
        yield


def output_code() -> Any:
    """Base class of what AOTAutograd's cache can keep."""
    from torch._inductor.output_code import OutputCode

    return OutputCode


def do_not_cache(reason: str) -> Exception:
    """An exception to raise while AOTAutograd stores or loads an entry: it then goes on as if there were no cache."""
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

    return BypassAOTAutogradCache(reason)


def dump_graph(content: object) -> bytes:
    """Graph modules and fake tensors, in tuples and dicts, as bytes."""
    from torch.fx._graph_pickler import GraphPickler, Options

    class Pickler(GraphPickler):
        """Stores what tells fake tensors apart instead of all that could be: reading that takes 0.2 ms for each."""

        def reducer_override(self, obj: object) -> Any:
            if type(obj) is FakeTensor and _is_plain(obj):
                memory = (storage_key(obj), obj.untyped_storage().nbytes())
                view = (obj.dtype, tuple(obj.shape), obj.stride(), obj.storage_offset())
                return _make_fake_tensor, (self._unpickle_state, memory, view, obj.device)
            return super().reducer_override(obj)

    # Where nodes come from is for messages only, and takes longer to store than the rest.
    stacks = {"nn_module_stack", "fwd_nn_module_stack", "source_fn_stack", "fwd_source_fn_stack", "from_node"}
    options = Options(ops_filter=None, node_metadata_key_filter=lambda key: key not in stacks)
    return Pickler.dumps(content, options)


def _is_plain(tensor: FakeTensor) -> bool:
    is_marked = tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.constant is not None
    return tensor.layout == torch.strided and not tensor.is_quantized and not is_marked and not _has_symbols(tensor)


def _has_symbols(tensor: Tensor) -> bool:
    return any(not isinstance(size, int) for size in (*tensor.shape, *tensor.stride(), tensor.storage_offset()))


def _make_fake_tensor(state: Any, memory: tuple[int, int], view: tuple[Any, ...], device: torch.device) -> FakeTensor:
    """A fake tensor of the mode in ``state``, the torch unpickler's. Tensors that shared their storage do so again."""
    number, nbytes = memory
    dtype, shape, stride, offset = view
    storages = vars(state).setdefault("megabuf_storages", {})
    with no_dispatch():
        if number not in storages:
            storages[number] = torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()
        meta = torch.empty(0, dtype=dtype, device="meta").set_(storages[number], offset, shape, stride)
        return FakeTensor(state.fake_mode, meta, device)


def load_graph(content: bytes) -> Any:
    """What ``dump_graph`` was given, with fake tensors of the mode under which Dynamo compiles."""
    from torch._guards import TracingContext
    from torch.fx._graph_pickler import GraphPickler

    fake_mode = TracingContext.get().fake_mode
    assert fake_mode is not None
    return GraphPickler.loads(content, fake_mode)


def plain_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What can be kept of the keyword arguments of an inner compiler."""
    made_anew = {"cudagraphs", "boxed_forward_device_index", "get_decomp_fn"}
    return {
        **{name: value for name, value in kwargs.items() if name not in made_anew},
        "made_anew": sorted(made_anew & set(kwargs)),
    }


def complete_arguments(plain: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments again; ``settings`` are those that AOTAutograd gives to what comes from its cache."""
    from torch._inductor.decomposition import select_decomp_table

    known = {**settings, "get_decomp_fn": select_decomp_table}
    kwargs = dict(plain)
    return {**{name: known[name] for name in kwargs.pop("made_anew")}, **kwargs}


def output_strides() -> Strides:
    """Strides of the outputs of the forward that was compiled last, as AOTAutograd has been told them."""
    from torch._guards import TracingContext

    return _as_tuples(TracingContext.get().output_strides)


@contextlib.contextmanager
def noting_output_strides() -> Iterator[Callable[[], Strides]]:
    """Hands out a function that returns the strides of the outputs of the forward that was compiled within."""
    from torch._guards import TracingContext

    with TracingContext.report_output_strides() as strides:
        yield lambda: _as_tuples(strides)


def _as_tuples(strides: Sequence[Sequence[int] | None] | None) -> Strides:
    # Symbols stay symbols: to make a number of one would be a guard.
    return tuple(None if of_one is None else tuple(of_one) for of_one in strides or ())


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Those with which Inductor has AOTAutograd trace; checked on torch 2.11.0, 2.13.0, 2.14.1."""
    from torch._inductor.decomposition import select_decomp_table

    return cast("Mapping[Any, Callable[..., Any]]", select_decomp_table())


def compile_with_inductor(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Inductor on one graph after AOTAutograd."""
    from torch._inductor.compile_fx import compile_fx_inner

    return cast("Callable[..., Any]", compile_fx_inner(gm, list(example_inputs), **kwargs))


def keep_graph_order() -> contextlib.AbstractContextManager[Any]:
    """Stop Inductor from delaying collectives: ``reorder_for_peak_memory`` moved one behind the next GEMM."""
    from torch._inductor import config

    return cast("contextlib.AbstractContextManager[Any]", config.patch(reorder_for_peak_memory=False))


def inductor_option_names() -> list[str]:
    from torch._inductor import config

    return list(config.get_config_copy())


def inductor_default(name: str) -> Any:
    """The value of an option of Inductor where the user does not give one."""
    from torch._inductor import config

    return config.get_config_copy()[name]


def why_not_recorded(compiled: Any) -> str:
    """Why Inductor has compiled a graph without CUDA graphs although they were wanted."""
    info = getattr(compiled, "cudagraph_info", None)
    reasons = getattr(info, "cudagraph_fail_reasons", None)
    return str(getattr(compiled, "disabled_cudagraphs_reason", None) or reasons or "nothing in it runs on a GPU")


def inductor_mode_options(mode: str) -> dict[str, Any]:
    """What ``torch.compile(mode=...)`` means to Inductor.

    Raises:
        RuntimeError: unknown mode (from torch).
    """
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def graph_module(root: nn.Module, graph: Graph) -> GraphModule:
    """A graph module over attributes of ``root`` that generates its code when it is first called or printed: most are
    neither, which saves about 30 microseconds per node. Checked on torch 2.11.0, 2.13.0, 2.14.1."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


class CompileEnvironment:
    """What surrounds one call of an inner compiler, to compile a further variant of the same graph later.

    Without it a late variant would lose the donated buffers (from the tracing context) and the user's Inductor options.
    ``metadata`` is given for a graph from AOTAutograd's cache: what the tracing context would hold after tracing.
    """

    def __init__(self, metadata: Any = None) -> None:
        from torch._guards import CompileContext, TracingContext
        from torch._inductor import config

        self._tracing = TracingContext.try_get()
        if metadata is not None and self._tracing is not None:
            self._tracing.fw_metadata = metadata
        self._compile = CompileContext.try_get()
        self._config = config.get_config_copy()

    @property
    def metadata(self) -> Any:
        """AOTAutograd's description of the graph, among it which saved tensors the backward may reuse."""
        return self._tracing.fw_metadata if self._tracing is not None else None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        from torch._dynamo import compiled_autograd
        from torch._guards import compile_context, tracing
        from torch._inductor import config
        from torch._inductor.virtualized import V

        current = config.get_config_copy()
        changed = {key: value for key, value in self._config.items() if not _is_same(current.get(key), value)}
        with contextlib.ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            stack.enter_context(_user_cache_entries())
            stack.enter_context(tracing(self._tracing))
            stack.enter_context(compile_context(self._compile))
            stack.enter_context(compiled_autograd._disable())
            if self._tracing is not None and self._tracing.fake_mode is not None:
                stack.enter_context(V.set_fake_mode(self._tracing.fake_mode))
            if changed:
                stack.enter_context(config.patch(changed))
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch._C._DisableAutocast())
            yield


def _is_same(left: object, right: object) -> bool:
    if left is right:
        return True
    try:
        return bool(left == right)
    except Exception:
        return False


# A process group without processes, for planning.


@contextlib.contextmanager
def fake_process_group(*, world_size: int, rank: int) -> Iterator[None]:
    """Make the default process group one of ``world_size`` ranks that exist in name only, of which this is ``rank``."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
