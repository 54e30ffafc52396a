"""What differs in a step that is being captured, and which captures are still valid."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Protocol

import torch

from megabuf_fx.runtime.flags import StepFlags


class Releasable(Protocol):
    """A captured step."""

    def release(self) -> None:
        """Give back the graph and its memory."""


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
        self._captures: weakref.WeakSet[Releasable] = weakref.WeakSet()

    @contextlib.contextmanager
    def active(self, *, is_micro_batch: bool = False) -> Iterator[None]:
        self.is_active, self.is_micro_batch = True, is_micro_batch
        try:
            yield
        finally:
            self.is_active = self.is_micro_batch = False

    def add(self, capture: Releasable) -> None:
        """Release this one when captures become invalid."""
        self._captures.add(capture)

    def invalidate(self, reason: str) -> None:
        """Every captured step refuses to run from now on, and says ``reason``.

        What it holds is released: NCCL waits, when a communicator is destroyed, until no graph has its kernels.
        """
        self.epoch += 1
        self.reason = reason
        for capture in list(self._captures):
            capture.release()
        self._captures.clear()
