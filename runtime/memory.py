"""Where buffers get their memory."""

from __future__ import annotations

import contextlib


class BufferMemory:
    """Torch's own allocator. Others (``megabuf_fx/nccl_memory.py``) override what differs."""

    def allocating(self) -> contextlib.AbstractContextManager[None]:
        """Tensors made inside lie in this memory."""
        return contextlib.nullcontext()

    def register(self) -> None:
        """All buffers are there: make them known to whoever sends them."""
        return

    def close(self) -> None:
        """Nothing is sent any more."""
        return
