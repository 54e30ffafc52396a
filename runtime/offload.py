"""Give back the memory of buffers for a while, and rebuild it under every view and every compiled graph.

A storage is resized to nothing and back (as FSDP does): tensors that share it stay the same objects, their addresses
change. Gradients are dropped and come back as zeros; parameters wait in host memory, pinned where there is a GPU.
Megatron: ``offload_grad_buffers``, ``offload_to_cpu`` (semantics §12).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from megabuf_fx.runtime.memory import BufferMemory

Kind = Literal["gradients", "parameters"]


class OffloadedError(RuntimeError):
    """Something needs buffers whose memory was given back."""


class Storage:
    """The storage of ``tensor``. ``keeps``: its contents come back, otherwise zeros do."""

    def __init__(self, tensor: Tensor, *, keeps: bool) -> None:
        self._whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self._nbytes = tensor.untyped_storage().nbytes()
        self._keeps = keeps
        self._host: Tensor | None = None
        """Kept for the next time: pinned memory is expensive to get."""

    @property
    def nbytes(self) -> int:
        """Bytes that it has when it is there."""
        return self._nbytes

    def offload(self) -> None:
        if self._keeps:
            if self._host is None:
                pinned = self._whole.is_cuda
                self._host = torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=pinned)
            # Not asynchronous: the memory goes to others next.
            self._host.copy_(self._whole)
        self._whole.untyped_storage().resize_(0)

    def restore(self) -> None:
        self._whole.untyped_storage().resize_(self._nbytes)
        if self._keeps:
            assert self._host is not None
            self._whole.copy_(self._host)
        else:
            self._whole.zero_()


class Offload:
    """What of one model's memory is away."""

    def __init__(self, gradients: Iterable[Tensor], parameters: Iterable[Tensor], memory: BufferMemory) -> None:
        self._memory = memory
        self._storages: dict[Kind, list[Storage]] = {
            "gradients": _storages(gradients, keeps=False),
            "parameters": _storages(parameters, keeps=True),
        }
        self._away: set[Kind] = set()

    def nbytes(self, kind: Kind) -> int:
        """Bytes that an offload gives back."""
        return sum(storage.nbytes for storage in self._storages[kind])

    def offload(self, kind: Kind) -> bool:
        """Give the memory back; whether it was there."""
        if kind in self._away:
            return False
        for storage in self._storages[kind]:
            storage.offload()
        self._away.add(kind)
        return True

    def restore(self, kind: Kind) -> bool:
        """Rebuild it; whether it was away."""
        if kind not in self._away:
            return False
        with self._memory.allocating():
            for storage in self._storages[kind]:
                storage.restore()
        self._away.remove(kind)
        return True

    def require(self, kind: Kind, what: str) -> None:
        """Raise when ``what`` is about to use memory that is away."""
        if kind in self._away:
            call = "restore_grad_buffers" if kind == "gradients" else "restore_param_buffers"
            raise OffloadedError(f"{what}, but {kind} are offloaded; call buf.{call}() first, on every rank")


def _storages(tensors: Iterable[Tensor], *, keeps: bool) -> list[Storage]:
    unique = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors if tensor.untyped_storage().nbytes()}
    return [Storage(tensor, keeps=keeps) for tensor in unique.values()]
