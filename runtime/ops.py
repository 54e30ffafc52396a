"""The ops of this project, in the ``megabuf::`` namespace.

Graphs call

    start_grad_sync(Tensor(a!)[] main_grads, Tensor(b!) token, int handle, int group, bool scaled=False) -> ()
    wait_param_sync(Tensor(a!)[] params, Tensor(b!) token, int handle, int group) -> ()
    accumulate_wgrad_(Tensor(a!) main_grad, Tensor lhs, Tensor rhs, bool accumulate, *,
                      float beta=1., float alpha=1.) -> ()
    accumulate_embedding_(Tensor(a!) main_grad, Tensor grad, Tensor indices, int padding_idx, bool accumulate, *,
                          float beta=1., float alpha=1.) -> ()

and the host calls

    start_reduction_(Tensor(a!)[] grads, int handle, int group, bool scatter) -> ()
    wait_reduction_(Tensor(a!)[] grads, int handle, int group) -> ()
    start_gather_(Tensor(a!)[] params, int handle, int group) -> ()
    wait_gather_(Tensor(a!)[] params, int handle, int group) -> ()
    all_reduce_(Tensor(a!) value, int handle, bool maximum) -> ()
    all_reduce_amax_(Tensor(a!) amax, int handle, bool is_expert) -> ()

[Note: host ops and device ops]
``start_grad_sync`` and ``wait_param_sync`` are *host ops*: they look at the state of the step, decide, and issue
device ops. All others are *device ops*: functions of their arguments, of buffers and of communicators, which read and
change no state of the step. A captured step holds device ops only; host ops ran once, when it was captured. On CUDA
that is how graphs work; the tape (``megabuf_fx/tape.py``), which replays steps without a GPU, enforces it.

[Note: order of collectives in a graph]
Every collective op declares that it mutates the views of its bucket, so a compiler keeps it after their last write
and before their next read, and that it mutates the one-element *token*, so collectives keep their order among
themselves. The ops are defined through a raw ``torch.library.Library``: ``custom_op`` would bump autograd version
counters, and a wait on the parameters of a module called twice before backward would then raise "modified by an
inplace operation". Effect tokens do not order ops in Inductor 2.13.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from megabuf_fx.runtime.grad_kernels import accumulate_embedding, accumulate_wgrad, check_product, check_rows


class SyncTarget(Protocol):
    """What a graph's collective ops act on."""

    def start_grad_sync(self, group: int, *, scaled: bool = False) -> None: ...

    def wait_param_sync(self, group: int) -> None: ...


class DeviceTarget(SyncTarget, Protocol):
    """What device ops act on, too."""

    def start_reduction(self, group: int, *, scatter: bool) -> None: ...

    def wait_reduction(self, group: int) -> None: ...

    def start_gather(self, group: int) -> None: ...

    def wait_gather(self, group: int) -> None: ...

    def all_reduce(self, value: Tensor, *, maximum: bool) -> None: ...

    def all_reduce_amax(self, amax: Tensor, *, is_expert: bool) -> None: ...


# The one piece of mutable module state: graphs hold plain integers, and a target lives as long as its model does.
_TARGETS: weakref.WeakValueDictionary[int, SyncTarget] = weakref.WeakValueDictionary()


def register_target(target: SyncTarget) -> int:
    """Give ``target`` the lowest free id: deterministic, so that compile caches hit in the next process."""
    handle = next(i for i in range(len(_TARGETS) + 1) if i not in _TARGETS)
    _TARGETS[handle] = target
    return handle


def unregister_target(handle: int) -> None:
    """Forget a target; graphs that still name it raise when they run."""
    _TARGETS.pop(handle, None)


def live_targets() -> list[tuple[int, SyncTarget]]:
    """Registered targets by id."""
    return sorted(_TARGETS.items(), key=lambda item: item[0])


def _target(handle: int) -> SyncTarget:
    target = _TARGETS.get(handle)
    if target is None:
        raise RuntimeError(
            f"a compiled graph refers to megabuf buffers {handle}, which were detached; "
            "call torch.compiler.reset() and compile the model again"
        )
    return target


def _start_grad_sync(
    main_grads: Sequence[Tensor], token: Tensor, handle: int, group: int, scaled: bool = False
) -> None:
    """Start the reduction of a bucket group. ``main_grads`` are the views of its parameters, already final; ``scaled``
    when the graph has multiplied them by the factor of their buffer's ``GradScaling``."""
    _target(handle).start_grad_sync(group, scaled=scaled)


def _wait_param_sync(params: Sequence[Tensor], token: Tensor, handle: int, group: int) -> None:
    """Wait for the gather of a bucket group's parameters; nothing pending is a no-op."""
    _target(handle).wait_param_sync(group)


def _device_target(handle: int) -> DeviceTarget:
    return cast("DeviceTarget", _target(handle))


def _start_reduction_(grads: Sequence[Tensor], handle: int, group: int, scatter: bool) -> None:
    """Start the collective of a bucket group. ``grads`` are its buckets in ``grad_data``, whole."""
    _device_target(handle).start_reduction(group, scatter=scatter)


def _wait_reduction_(grads: Sequence[Tensor], handle: int, group: int) -> None:
    _device_target(handle).wait_reduction(group)


def _start_gather_(params: Sequence[Tensor], handle: int, group: int) -> None:
    """Start the collective of a bucket group. ``params`` are its buckets in ``param_data``, whole."""
    _device_target(handle).start_gather(group)


def _wait_gather_(params: Sequence[Tensor], handle: int, group: int) -> None:
    _device_target(handle).wait_gather(group)


def _all_reduce_(value: Tensor, handle: int, maximum: bool) -> None:
    """Sum over the ranks that share buckets, or elementwise maximum over all ranks; visible when it returns."""
    _device_target(handle).all_reduce(value, maximum=maximum)


def _all_reduce_amax_(amax: Tensor, handle: int, is_expert: bool) -> None:
    """Elementwise maximum over the ranks that share dense or expert buckets; visible when it returns."""
    _device_target(handle).all_reduce_amax(amax, is_expert=is_expert)


_LIBRARY = torch.library.Library("megabuf", "DEF")


def _define(
    schema: str, function: Callable[..., None], fake: Callable[..., None] | None = None, *, is_host_op: bool = False
) -> Any:
    name = schema.partition("(")[0]
    # Inductor's own CUDA graphs leave host ops out: they run between two recorded parts of a graph.
    _LIBRARY.define(schema, tags=(torch.Tag.cudagraph_unsafe,) if is_host_op else ())
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"megabuf::{name}", fake or _nothing, lib=_LIBRARY)
    return getattr(torch.ops.megabuf, name).default


def _nothing(*unused: object) -> None:
    return None


start_grad_sync = _define(
    "start_grad_sync(Tensor(a!)[] main_grads, Tensor(b!) token, int handle, int group, bool scaled=False) -> ()",
    _start_grad_sync,
    is_host_op=True,
)
wait_param_sync = _define(
    "wait_param_sync(Tensor(a!)[] params, Tensor(b!) token, int handle, int group) -> ()",
    _wait_param_sync,
    is_host_op=True,
)
accumulate_wgrad_ = _define(
    "accumulate_wgrad_(Tensor(a!) main_grad, Tensor lhs, Tensor rhs, bool accumulate, *, "
    "float beta=1., float alpha=1.) -> ()",
    accumulate_wgrad,
    check_product,
)
accumulate_embedding_ = _define(
    "accumulate_embedding_(Tensor(a!) main_grad, Tensor grad, Tensor indices, int padding_idx, bool accumulate, *, "
    "float beta=1., float alpha=1.) -> ()",
    accumulate_embedding,
    check_rows,
)
start_reduction_ = _define(
    "start_reduction_(Tensor(a!)[] grads, int handle, int group, bool scatter) -> ()", _start_reduction_
)
wait_reduction_ = _define("wait_reduction_(Tensor(a!)[] grads, int handle, int group) -> ()", _wait_reduction_)
start_gather_ = _define("start_gather_(Tensor(a!)[] params, int handle, int group) -> ()", _start_gather_)
wait_gather_ = _define("wait_gather_(Tensor(a!)[] params, int handle, int group) -> ()", _wait_gather_)
all_reduce_ = _define("all_reduce_(Tensor(a!) value, int handle, bool maximum) -> ()", _all_reduce_)
all_reduce_amax_ = _define("all_reduce_amax_(Tensor(a!) amax, int handle, bool is_expert) -> ()", _all_reduce_amax_)

ACCUMULATING_OPS = (accumulate_wgrad_, accumulate_embedding_)
"""Device ops that compute a gradient and write it into ``main_grad``; all have ``beta`` and ``alpha``."""

HOST_OPS: Mapping[Any, Callable[..., None]] = MappingProxyType(
    {start_grad_sync: _start_grad_sync, wait_param_sync: _wait_param_sync}
)
"""See [Note: host ops and device ops]."""
