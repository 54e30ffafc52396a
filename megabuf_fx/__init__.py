"""Megatron-LM's contiguous parameter and gradient buffers as a ``torch.compile`` backend.

import megabuf_fx as mb
buf = mb.attach(model, mb.MegabufConfig())
model = torch.compile(model, backend="megabuf")
opt = mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)
"""

from megabuf_fx.attach import attach
from megabuf_fx.capture import CapturedStep, capture_step
from megabuf_fx.capture_micro import CapturedMicroBatch, capture_micro_batch
from megabuf_fx.capture_subject import CaptureError
from megabuf_fx.checkpoint import async_save_checkpoint, latest_checkpoint, load_checkpoint, save_checkpoint
from megabuf_fx.checkpoint_files import CheckpointError
from megabuf_fx.config import MegabufConfig
from megabuf_fx.finalize import BiasedRouter, bias_by_sign, finalize_model_grads
from megabuf_fx.handle import MegabufHandle, handle
from megabuf_fx.model_parallel import ModelParallelGroups
from megabuf_fx.optimizer import DistributedOptimizer, clip_grad_norm_

__all__ = [
    "BiasedRouter",
    "CaptureError",
    "CapturedMicroBatch",
    "CapturedStep",
    "CheckpointError",
    "DistributedOptimizer",
    "MegabufConfig",
    "MegabufHandle",
    "ModelParallelGroups",
    "async_save_checkpoint",
    "attach",
    "bias_by_sign",
    "capture_micro_batch",
    "capture_step",
    "clip_grad_norm_",
    "finalize_model_grads",
    "handle",
    "latest_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
]
