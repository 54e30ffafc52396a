"""A step as a CUDA graph holds it, recorded and replayed without a GPU.

[Note: tape]
A CUDA graph holds kernels with their addresses and numbers; a replay runs no Python. The tape models that on any
device: a dispatch mode records every op of a step with the very tensors it read and wrote. ``replay`` runs in-place ops
on the recorded tensors and copies what other ops return into the recorded storages; views are skipped, Python numbers
are those of the recording. Before each replay every storage that the step itself allocated is filled with 0xFF bytes
(NaN, -1), so a replay that reads what it did not write goes wrong visibly.

Of our own collectives the host ops ran once, in the recording, and only the device ops they issued are on the tape
([Note: host ops and device ops] in ``ops.py``). A graph that Inductor compiled is one entry, because its kernels are
invisible to a dispatch mode; host ops inside of it are replaced by what they issued.

What a CUDA graph could not hold is a *violation*: a read by the host, a shape that depends on data, memory that nobody
declared, a static tensor that moved, a collective that is read before, or not waited for at the end of the step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import megabuf_fx._compat as _compat
from megabuf_fx.runtime.ops import HOST_OPS, start_gather_, start_reduction_, wait_gather_, wait_reduction_

Statics = Callable[[], Mapping[str, Tensor]]
"""Finds the tensors that live longer than a step, by name. Called before and after a recording."""

_OWN_CODE = (os.path.dirname(torch.__file__), os.path.dirname(__file__))
_HOST_READS = ("tolist", "numpy", "cpu", "_to_dlpack")
"""Methods that read a tensor's values, or move them to the host, without an op that says so."""
_SETS_SEED = ("manual_seed", "seed", "set_state", "set_offset", "graphsafe_set_state")
"""Methods of generators. A replay draws on from where the last one ended."""
_UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
"""Ops of aten that allocate and write nothing: nothing is left to replay."""
_MOVES = ("aten::resize_", "aten::set_", "aten::set_data")
_MASKED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index", "aten::_index_put_impl_")
_STARTS = (start_reduction_, start_gather_)
_WAITS = (wait_reduction_, wait_gather_)


class TapeError(RuntimeError):
    """A step that a CUDA graph could not hold, or a replay that changed the state of the host."""


class Violation(NamedTuple):
    """One thing in a step that a CUDA graph could not hold."""

    kind: str
    message: str
    where: str
    """File and line of the caller's code, empty inside a backward."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" + (f" ({self.where})" if self.where else "")


@dataclass(slots=True)
class Entry:
    """An op, or a whole compiled graph, of the recorded step."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: list[tuple[int, Tensor]]
    """Outputs in storage that this entry allocated: position among the flat outputs, and the tensor."""
    host: list[list[Entry]] = field(default_factory=list)
    """Of a compiled graph: what each of its host ops issued, in order."""
    is_graph: bool = False


class Tape(_compat.RecordingMode):
    """Records the step that runs inside ``with tape:``. See [Note: tape].

    Args:
        statics: the tensors that the step may read and write besides its own. None declares nothing.
        keeps: hold on to the ops and their tensors, for ``replay``. Otherwise only what is wrong and the journal stay.
    """

    def __init__(self, statics: Statics | None = None, *, keeps: bool = True) -> None:
        super().__init__()
        self._find_statics = statics or dict
        self._keeps = keeps
        self.outputs: Any = None
        """What the step returned, if its caller puts it here."""
        self.entries: list[Entry] = []
        self.violations: list[Violation] = []
        self.journal: list[tuple[Any, ...]] = []
        """One comparable line per op: storages by order of first use, statics by name, numbers as they are."""
        self._target = self.entries
        self._graph: Entry | None = None
        self._played: Iterator[list[Entry]] | None = None
        self._names: dict[int, str] = {}
        self._internal: dict[int, Any] = {}
        """Storages that the step has allocated: a tensor on each, or a weak reference to it."""
        self._external: dict[int, Tensor] = {}
        self._numbers: dict[int, Tensor] = {}
        """0-dim tensors on the host that nobody declared: numbers, mostly, which a recording bakes in."""
        self._in_flight: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        self._unwaited: set[int] = set()
        self._before: dict[str, tuple[Any, ...]] = {}
        self._depth = 0
        self._profiler: Any = None

    # Recording.

    def __enter__(self) -> Tape:
        if self._depth == 0:
            statics = self._find_statics()
            self._names = {_compat.storage_key(tensor): name for name, tensor in reversed(list(statics.items()))}
            self._before = {name: _address(tensor) for name, tensor in statics.items()}
            self._profiler = sys.getprofile()
            sys.setprofile(self._watch_calls)
        self._depth += 1
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._depth -= 1
        if self._depth == 0:
            sys.setprofile(self._profiler)
            if error[0] is None:
                self._finish()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in HOST_OPS:
            return self._run_host_op(func, args)
        if self._graph is not None or func.namespace == "profiler" or _compat.wraps_async_value(func):
            return func(*args, **kwargs)
        if not _compat.is_op(func):
            # A higher-order operator, such as the one that keeps the state of a random generator for recomputation.
            return self.record_graph(str(func), lambda values: func(*values, **kwargs), list(args))
        args, kwargs = self._settle(args, kwargs)
        inputs = _tensors((args, kwargs))
        self._check_op(func, args, inputs)
        for tensor in inputs:
            self._see_input(tensor)
        results = func(*args, **kwargs)
        outputs = _tensors(results)
        fresh = self._keep_fresh(inputs, outputs)
        if func.namespace == "_c10d_functional" and fresh:
            self._unwaited.update(_compat.storage_key(tensor) for _, tensor in fresh)
        self._write(str(func), (args, kwargs), outputs)
        is_unwritten = func.namespace == "aten" and func._schema.name.removeprefix("aten::") in _UNWRITTEN
        if self._keeps and not is_unwritten and (fresh or _is_mutable(func)):
            self._target.append(Entry(func, *detach_tensors((args, kwargs, fresh))))
        return results

    def record_graph(self, name: str, function: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        if self._played is not None:
            return function(args)
        kept = tuple(args)
        inputs = _tensors(kept)
        for tensor in inputs:
            self._see_input(tensor)
        entry = self._graph = Entry(function, kept, {}, [], is_graph=True)
        try:
            results = function(args)
        finally:
            self._graph = None
        outputs = _tensors(results)
        with _compat.real_tensors():
            # Called around a graph and not from an op, so this mode still sees what is done here.
            entry.fresh = detach_tensors(self._keep_fresh(inputs, outputs))
            entry.args = detach_tensors(kept)
        self._write(name, kept, outputs)
        if self._keeps:
            self._target.append(entry)
        return results

    def _run_host_op(self, func: Any, args: tuple[Any, ...]) -> None:
        if self._played is not None:
            _play(next(self._played))
            return
        graph, target = self._graph, self._target
        if graph is not None:
            self._graph, self._target = None, []
            graph.host.append(self._target)
        try:
            with self:
                HOST_OPS[func](*args)
        finally:
            self._graph, self._target = graph, target

    def _settle(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Results of functional collectives are waited for where they are used, as they do by themselves."""

        def plain(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            awaited = _compat.async_value(value)
            if awaited is not value and _compat.storage_key(awaited) in self._unwaited:
                with self:
                    torch.ops._c10d_functional.wait_tensor(awaited)
            return awaited

        settled: tuple[Any, Any] = _compat.tree_map(plain, (args, kwargs))
        return settled

    def _check_op(self, func: Any, args: tuple[Any, ...], inputs: Sequence[Tensor]) -> None:
        name = func.name().partition(".")[0]
        if torch.Tag.data_dependent_output in func.tags:
            self.violate("host read", f"{name} reads a value on the host")
        if name in _MASKED:
            # args: (self, indices, ...)
            if any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
                self.violate("data-dependent shape", f"{name} with a mask")
        elif torch.Tag.dynamic_output_shape in func.tags:
            self.violate("data-dependent shape", name)
        if name in _MOVES:
            self.violate("address change", f"{name} changes the memory of a tensor")
        if func.namespace == "c10d":
            self.violate(
                "collective",
                f"{name} is started by the step itself; call collectives of your own between replays, or use "
                "torch.distributed._functional_collectives",
            )
        if not _is_view(func):
            self._check_in_flight(func, args, inputs)

    def _check_in_flight(self, func: Any, args: tuple[Any, ...], inputs: Sequence[Tensor]) -> None:
        # args of our ops: (tensors, handle, group, ...); starts and waits of one kind come in pairs.
        if func in _WAITS:
            self._in_flight.pop((_WAITS.index(func), args[1], args[2]), None)
        if func.namespace == "_c10d_functional" and "wait_tensor" in func.name():
            self._unwaited.discard(_compat.storage_key(args[0]))
        if self._in_flight or self._unwaited:
            for tensor in inputs:
                if _compat.storage_key(tensor) in self._unwaited:
                    self.violate("collective", f"{func.name()} reads the result of a collective before its wait")
                begin, end = _extent(tensor)
                for (kind, _, group), ranges in self._in_flight.items():
                    if any(begin < high and low < end for low, high in ranges):
                        what = ("gradients", "parameters")[kind]
                        self.violate("collective", f"{func.name()} uses {what} of bucket group {group} in flight")
        if func in _STARTS:
            key = (_STARTS.index(func), args[1], args[2])
            self._in_flight[key] = [_extent(tensor) for tensor in args[0]]

    def _see_input(self, tensor: Tensor) -> None:
        key = _compat.storage_key(tensor)
        if key in self._internal or key in self._names:
            return
        if tensor.dim() == 0 and tensor.device.type == "cpu":
            self._numbers[key] = tensor
        else:
            self._external[key] = tensor

    def _keep_fresh(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        known = {_compat.storage_key(tensor) for tensor in inputs}
        fresh = [(i, tensor) for i, tensor in enumerate(outputs) if _compat.storage_key(tensor) not in known]
        for _, tensor in fresh:
            key = _compat.storage_key(tensor)
            self._internal[key] = detach_tensors(tensor) if self._keeps else _compat.weak_storage(tensor)
        return fresh

    def _write(self, name: str, inputs: Any, outputs: Sequence[Tensor]) -> None:
        values = [self._describe(value) for value in _compat.tree_leaves(inputs)]
        self.journal.append((name, *values, "->", *map(self._describe, outputs)))

    def _describe(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return repr(value)
        key = _compat.storage_key(value)
        if key in self._numbers:
            return f"number {value.item()!r} {value.dtype}"
        name = self._names.setdefault(key, f"%{len(self._names)}")
        return (name, str(value.dtype), tuple(value.shape), value.stride(), value.storage_offset())

    def _watch_calls(self, frame: FrameType, event: str, arg: Any) -> None:
        name = getattr(arg, "__name__", None)
        if event == "call" and self._graph is None:
            if _compat.prints_tensor(frame.f_code):
                self.violate("host read", "a tensor is printed")
            elif _compat.is_inductor_code(frame.f_code):
                self.violate("unseen graph", "torch.compile with another backend; compile it with backend='megabuf'")
        if event != "c_call":
            return
        if self._graph is None and name in _SETS_SEED and isinstance(getattr(arg, "__self__", None), torch.Generator):
            self.violate("random numbers", f"Generator.{name}() in the step, which a replay does not repeat")
        if name not in _HOST_READS:
            return
        # _to_dlpack is a function, the others are methods.
        if name == "_to_dlpack" or isinstance(getattr(arg, "__self__", None), Tensor):
            self.violate("host read", f"Tensor.{name}()")

    def violate(self, kind: str, message: str) -> None:
        """Note something that a CUDA graph could not hold."""
        self.violations.append(Violation(kind, message, _where()))

    def _finish(self) -> None:
        for kind, _, group in self._in_flight:
            what, call = (("gradient reduction", "finish_grad_sync"), ("parameter gather", "sync_params"))[kind]
            self.violate(
                "collective",
                f"the {what} of bucket group {group} is not waited for in the step; call buf.{call}() at its end",
            )
        for tensor in self._external.values():
            self.violate("undeclared memory", f"the step uses a {_shown(tensor)} that is not declared")
        after = {name: _address(tensor) for name, tensor in self._find_statics().items()}
        for name, address in self._before.items():
            if after.get(name) != address:
                what = "is gone" if name not in after else "moved to other memory, or changed shape or dtype"
                self.violate("address change", f"'{name}' {what} during the step")

    # Replaying.

    def reset(self) -> None:
        """Forget the recording and give its memory back, as ``CUDAGraph.reset`` does."""
        self.entries.clear()
        self._internal.clear()
        self._external.clear()
        self._numbers.clear()
        self.outputs = None

    def poison(self) -> None:
        """Fill every storage that the step allocates with 0xFF bytes."""
        for tensor in self._internal.values():
            tensor.untyped_storage().fill_(0xFF)

    def replay(self) -> None:
        """Run the recorded ops again, without the step's Python.

        Raises:
            TapeError: made with ``keeps=False``; an op returns another shape than it did.
        """
        if not self._keeps:
            raise TapeError("this tape was made to check a step, not to replay it (keeps=False)")
        self.poison()
        # Recorded ops have been cast already.
        with torch.no_grad(), _compat.without_autocast():
            for entry in self.entries:
                if not entry.is_graph:
                    _play([entry])
                    continue
                self._played = iter(entry.host)
                try:
                    with _compat.real_tensors(), _Player(self):
                        results = entry.function(list(entry.args))
                finally:
                    self._played = None
                _copy_back(entry, results)


class _Player(_compat.RecordingMode):
    """While a compiled graph is replayed: its host ops are replaced by what they issued when it was recorded."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOST_OPS:
            return self._tape._run_host_op(func, args)
        return func(*args, **(kwargs or {}))


def diff(first: Tape, second: Tape) -> str | None:
    """What differs between two recordings of one step, made in different states of the host; None when nothing does.

    A difference is something that Python decided, or a number that Python computed: a replay would repeat the first.
    """
    persistent = first._numbers.keys() & second._numbers.keys()
    if persistent:
        tensor = first._numbers[next(iter(persistent))]
        return f"both recordings read the same undeclared {_shown(tensor)} of the host"
    for index, (mine, other) in enumerate(zip(first.journal, second.journal)):
        if mine != other:
            if mine[0] != other[0]:
                return f"op {index} is {mine[0]} in one recording, {other[0]} in the other"
            pairs = [(a, b) for a, b in zip(mine, other) if a != b] or [(mine[1:], other[1:])]
            return f"op {index}, {mine[0]}, differs between recordings: {pairs[0][0]} and {pairs[0][1]}"
    if len(first.journal) != len(second.journal):
        longer = max(first.journal, second.journal, key=len)
        shorter = min(len(first.journal), len(second.journal))
        return f"one recording goes on after op {shorter}, with {longer[shorter][0]}"
    return None


def _play(entries: Sequence[Entry]) -> None:
    for entry in entries:
        _copy_back(entry, entry.function(*entry.args, **entry.kwargs))


def _copy_back(entry: Entry, results: Any) -> None:
    outputs = _tensors(results)
    if getattr(entry.function, "namespace", "") == "_c10d_functional":
        # The wait that was recorded knows the recorded tensor, not this one.
        outputs = [torch.ops._c10d_functional.wait_tensor(output) for output in outputs]
    for index, tensor in entry.fresh:
        if outputs[index].shape != tensor.shape:
            raise TapeError(
                f"{entry.function} returned shape {tuple(outputs[index].shape)} in a replay, "
                f"{tuple(tensor.shape)} when it was recorded"
            )
        if outputs[index].data_ptr() != tensor.data_ptr():
            tensor.untyped_storage().copy_(outputs[index].untyped_storage())


def _is_mutable(func: Any) -> bool:
    return bool(func._schema.is_mutable)


def detach_tensors(values: Any) -> Any:
    """``values`` without the autograd graphs behind their tensors, which would stay alive with all they have saved."""
    return _compat.tree_map(lambda value: value.detach() if isinstance(value, Tensor) else value, values)


def _is_view(func: Any) -> bool:
    return not _is_mutable(func) and any(value.alias_info is not None for value in func._schema.returns)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in _compat.tree_leaves(values) if isinstance(value, Tensor)]


def _address(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte, and the one after the last, that the tensor can touch."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return begin, begin + (last + 1) * tensor.element_size()


def _shown(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} tensor".replace("torch.", "")


def _where() -> str:
    """The innermost line of code that is neither torch's nor this project's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_inside(frame.f_code):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_inside(code: CodeType) -> bool:
    return code.co_filename.startswith(("<", *_OWN_CODE))
