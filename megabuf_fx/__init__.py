"""Megatron-LM's contiguous parameter and gradient buffers as a ``torch.compile`` backend.

import megabuf_fx as mb
buf = mb.attach(model, mb.MegabufConfig())
model = torch.compile(model, backend="megabuf")
opt = mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)
"""

from megabuf_fx.config import MegabufConfig
from megabuf_fx.handle import MegabufHandle, attach, handle
from megabuf_fx.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer", "MegabufConfig", "MegabufHandle", "attach", "handle"]
