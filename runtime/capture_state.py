"""What differs in a step that is being captured, and which captures are still valid."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megabuf_fx.runtime.flags import StepFlags


class CaptureState:
    """Of one attached model. While ``is_active``, nothing is read back by the host."""

    def __init__(self, device: torch.device) -> None:
        self.flags = StepFlags(device)
        self.is_active = False
        self.is_micro_batch = False
        """One micro-batch is captured: its gradients overwrite or add as ``flags.accumulate`` says."""
        self.used: list[bool] = []
        """Which parameters got a gradient on some rank in the last step that asked."""
        self.epoch = 0
        """How often memory that captured steps use was replaced."""
        self.reason = ""

    @contextlib.contextmanager
    def active(self, *, is_micro_batch: bool = False) -> Iterator[None]:
        self.is_active, self.is_micro_batch = True, is_micro_batch
        try:
            yield
        finally:
            self.is_active = self.is_micro_batch = False

    def invalidate(self, reason: str) -> None:
        """Every captured step refuses to run from now on, and says ``reason``."""
        self.epoch += 1
        self.reason = reason
