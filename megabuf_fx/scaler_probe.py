"""What makes ``torch.amp.GradScaler`` work on shards.

[Note: scaler probe]
GradScaler unscales and checks ``.grad`` of every parameter in ``param_groups``. With buffers that is None, and the Inf
that one rank holds in its shard must be seen by all. The probe is one more entry of ``param_groups``: reading its
``grad`` completes the reductions, asks all ranks whether a gradient is not finite, and gives ``[1]`` or ``[inf]``. So
every scaler finds the same, skips the same step and updates its scale alike; and what it multiplied the ``1`` by is the
factor that the optimizer applies to the real gradients before it uses them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class ScalerProbe(nn.Parameter):
    """One element, trained by nobody. See [Note: scaler probe]."""

    _find_inf: Callable[[], Tensor]
    _step: Callable[[], int]
    _value: Tensor
    _value_of: int

    @classmethod
    def of(cls, find_inf: Callable[[], Tensor], step: Callable[[], int]) -> ScalerProbe:
        """A probe that asks ``find_inf`` (0-dim bool, equal on all ranks) once for each value of ``step``."""
        probe = cls(torch.zeros(1), requires_grad=False)
        probe._find_inf = find_inf
        probe._step = step
        probe._value_of = -1
        return probe

    @property
    def grad(self) -> Tensor:  # type: ignore[override]
        """``[1]`` fp32, or ``[inf]``; every rank must read it."""
        if self._value_of != self._step():
            self._value = torch.where(self._find_inf(), float("inf"), 1.0).reshape(1).to(torch.float32)
            self._value_of = self._step()
        return self._value

    def take_factor(self) -> Tensor | None:
        """What the gradients have to be multiplied by, 0-dim; None if no scaler has looked. Then starts anew at 1."""
        if self._value_of != self._step():
            return None
        factor = self._value[0].clone()
        self._value.fill_(1.0)
        return factor
