"""The ops that graphs call, in the ``megabuf::`` namespace.

    start_grad_sync(Tensor(a!)[] main_grads, Tensor(b!) token, int handle, int group) -> ()
    wait_param_sync(Tensor(a!)[] params, Tensor(b!) token, int handle, int group) -> ()
    accumulate_wgrad_(Tensor(a!) main_grad, Tensor lhs, Tensor rhs, bool accumulate) -> ()

[Note: order of collectives in a graph]
Every collective op declares that it mutates the views of its bucket, so a compiler keeps it after their last write
and before their next read, and that it mutates the one-element *token*, so collectives keep their order among
themselves. The ops are defined through a raw ``torch.library.Library``: ``custom_op`` would bump autograd version
counters, and a wait on the parameters of a module called twice before backward would then raise "modified by an
inplace operation". Effect tokens do not order ops in Inductor 2.13.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class SyncTarget(Protocol):
    """What a graph's collective ops act on."""

    def start_grad_sync(self, group: int) -> None: ...

    def wait_param_sync(self, group: int) -> None: ...


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


def _start_grad_sync(main_grads: Sequence[Tensor], token: Tensor, handle: int, group: int) -> None:
    """Start the reduction of a bucket group. ``main_grads`` are the views of its parameters, already final."""
    _target(handle).start_grad_sync(group)


def _wait_param_sync(params: Sequence[Tensor], token: Tensor, handle: int, group: int) -> None:
    """Wait for the gather of a bucket group's parameters; nothing pending is a no-op."""
    _target(handle).wait_param_sync(group)


def _accumulate_wgrad_(main_grad: Tensor, lhs: Tensor, rhs: Tensor, accumulate: bool) -> None:
    """``main_grad = lhs @ rhs (+ main_grad)``, written straight into the buffer.

    Shapes: ``main_grad`` ``[m, n]``, ``lhs`` ``[m, k]``, ``rhs`` ``[k, n]``; ``main_grad`` may be wider than the
    factors. Without a kernel of mixed dtypes (CPU) the product is rounded to the factors' dtype and then added.
    """
    _check_product(main_grad, lhs, rhs)
    # `.data` shares the storage and not the version counter, see [Note: order of collectives in a graph].
    destination = main_grad.data
    if destination.dtype == lhs.dtype:
        if accumulate:
            destination.addmm_(lhs, rhs)
        else:
            torch.mm(lhs, rhs, out=destination)
    elif destination.is_cuda and destination.dtype == torch.float32:
        torch.ops.aten.addmm.dtype_out(
            destination, lhs, rhs, destination.dtype, beta=1 if accumulate else 0, out=destination
        )
    elif accumulate:
        destination.add_(torch.mm(lhs, rhs))
    else:
        destination.copy_(torch.mm(lhs, rhs))


def _check_product(main_grad: Tensor, lhs: Tensor, rhs: Tensor) -> None:
    # An `out=` of another shape would be resized, over the gradients of its neighbours in the buffer.
    if lhs.dim() != 2 or rhs.dim() != 2 or tuple(main_grad.shape) != (lhs.shape[0], rhs.shape[1]):
        raise RuntimeError(
            f"megabuf::accumulate_wgrad_ of {tuple(lhs.shape)} @ {tuple(rhs.shape)} into {tuple(main_grad.shape)}"
        )


_LIBRARY = torch.library.Library("megabuf", "DEF")
_LIBRARY.define("start_grad_sync(Tensor(a!)[] main_grads, Tensor(b!) token, int handle, int group) -> ()")
_LIBRARY.define("wait_param_sync(Tensor(a!)[] params, Tensor(b!) token, int handle, int group) -> ()")
_LIBRARY.define("accumulate_wgrad_(Tensor(a!) main_grad, Tensor lhs, Tensor rhs, bool accumulate) -> ()")
_LIBRARY.impl("start_grad_sync", _start_grad_sync, "CompositeExplicitAutograd")
_LIBRARY.impl("wait_param_sync", _wait_param_sync, "CompositeExplicitAutograd")
_LIBRARY.impl("accumulate_wgrad_", _accumulate_wgrad_, "CompositeExplicitAutograd")


@torch.library.register_fake("megabuf::start_grad_sync", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(main_grads: Sequence[Tensor], token: Tensor, handle: int, group: int) -> None:
    return None


@torch.library.register_fake("megabuf::wait_param_sync", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(params: Sequence[Tensor], token: Tensor, handle: int, group: int) -> None:
    return None


@torch.library.register_fake("megabuf::accumulate_wgrad_", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(main_grad: Tensor, lhs: Tensor, rhs: Tensor, accumulate: bool) -> None:
    _check_product(main_grad, lhs, rhs)


start_grad_sync = torch.ops.megabuf.start_grad_sync.default
wait_param_sync = torch.ops.megabuf.wait_param_sync.default
accumulate_wgrad_ = torch.ops.megabuf.accumulate_wgrad_.default
