"""Block of ``check.py``: a collective on memory that NCCL has allocated and registered."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from blocks_collectives import in_time
from gpu_context import Context, compare, require

import megabuf_fx._compat as _compat
from megabuf_fx.nccl_memory import NcclMemory
from megabuf_fx.runtime.collectives import ProcessGroupComm


def nccl_memory(context: Context) -> str:
    """The way of ``nccl_ub``, on a communicator of one rank: a pool, buffers in it, registered, used, given up."""
    torch.cuda.set_device(context.device)
    store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
    try:
        comm = ProcessGroupComm([0], name="check", timeout=None)
        (group,) = comm.process_groups()
        memory = NcclMemory([_compat.nccl_backend(group, context.device)], context.device)
        with memory.allocating():
            buffer = torch.empty(2**20, device=context.device)
        buffer.copy_(context.randn(2**20))
        expected = buffer.clone()
        memory.register()
        comm.all_reduce(buffer, average=False).wait()
        comm.reduce_scatter(buffer, buffer, average=False).wait()
        comm.all_gather(buffer, buffer).wait()
        compare([buffer], [expected], "what one rank reduces and gathers")
        # As an offload does.
        address = buffer.untyped_storage().data_ptr()
        buffer.untyped_storage().resize_(0)
        with memory.allocating():
            buffer.untyped_storage().resize_(4 * 2**20)
        buffer.copy_(expected)
        comm.all_reduce(buffer, average=False).wait()
        compare([buffer], [expected], "after its memory was rebuilt")
        context.synchronize()
        require(buffer.untyped_storage().data_ptr() % 16 == 0, "the pool's memory is not aligned")
        memory.close()
        comm.close()
    finally:
        in_time(dist.destroy_process_group, "destroy_process_group", limit_s=30.0)
    return f"registered, reduced, gathered and rebuilt, first at {address:#x}"
