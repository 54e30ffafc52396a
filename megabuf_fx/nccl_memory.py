"""Buffers in memory that NCCL has allocated and knows (``nccl_ub``): user buffer registration.

NCCL then sends from buffers and into them without copies of its own, with fewer thread blocks, and on NVLink switches
lets the switch add (NVLS). Every rank must register, so the option is part of what ranks compare.

The pool is made by the first communicator's allocator and registered with each communicator that carries buffers, after
buffers are allocated: torch registers what a pool holds at that moment. Written from torch 2.11 to 2.14's API
(``ProcessGroupNCCL.mem_allocator``, ``register_mem_pool``; Megatron ``nccl_allocator.py``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import megabuf_fx._compat as _compat
from megabuf_fx.config import MegabufConfig
from megabuf_fx.runtime.memory import BufferMemory
from megabuf_fx.runtime.transports import Communicators


def check_nccl_ub(config: MegabufConfig, device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Refuse ``nccl_ub`` where there is no NCCL.

    Raises:
        ValueError: parameters are not on a GPU, the group is not one of NCCL with several ranks, or torch allocates
            expandable segments, which NCCL cannot register.
    """
    if not config.nccl_ub:
        return
    if device.type != "cuda":
        raise ValueError(f"nccl_ub=True needs parameters on a GPU, they are on {device}; drop it here")
    if group is None or group.size() == 1 or "nccl" not in dist.get_backend(group):
        found = (
            "there is none" if group is None else f"this one has {group.size()} rank(s) of {dist.get_backend(group)}"
        )
        raise ValueError(f"nccl_ub=True needs a process group of several ranks over NCCL, {found}; drop it here")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:True" in os.environ.get(name, ""):
            raise ValueError(f"nccl_ub=True does not work with expandable segments; take them out of {name}")


def make_memory(config: MegabufConfig, device: torch.device, comms: Communicators) -> BufferMemory:
    """Where the buffers of one model are allocated."""
    if not config.nccl_ub:
        return BufferMemory()
    groups = [group for pair in (comms.dense, comms.expert) if pair for comm in pair for group in comm.process_groups()]
    return NcclMemory([_compat.nccl_backend(group, device) for group in groups], device)


class NcclMemory(BufferMemory):
    """A pool of NCCL's memory; ``backends`` are those of all communicators that carry buffers."""

    def __init__(self, backends: Sequence[Any], device: torch.device) -> None:
        self._backends = list(backends)
        self._device = device
        self._pool = torch.cuda.MemPool(self._backends[0].mem_allocator)
        self._registered: list[Any] = []

    def allocating(self) -> contextlib.AbstractContextManager[None]:
        return torch.cuda.use_mem_pool(self._pool, self._device)

    def register(self) -> None:
        for backend in self._backends:
            # Communicators are made by their first collective; registering needs one.
            backend.eager_connect_single_device(self._device)
            backend.register_mem_pool(self._pool)
            self._registered.append(backend)

    def close(self) -> None:
        while self._registered:
            self._registered.pop().deregister_mem_pool(self._pool)
