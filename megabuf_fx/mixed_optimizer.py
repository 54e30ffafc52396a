"""Several optimizer classes as one: each updates the param groups that name it.

    groups   [{"params": matrices, "optimizer_class": Muon, "lr": 0.02}, {"params": others}]     default: AdamW
    parts     Muon over the first group                                   AdamW over the second

``param_groups`` keep their order and are the parts' own dicts; ``state`` is shared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

OptimizerClass = Callable[..., torch.optim.Optimizer]


class MixedOptimizer:
    """What ``DistributedOptimizer`` needs of its inner optimizer. ``defaults`` are for groups without a class."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        classes: Sequence[OptimizerClass],
        default: OptimizerClass,
        defaults: Mapping[str, Any],
    ) -> None:
        self.parts: list[torch.optim.Optimizer] = []
        self.state: dict[Any, Any] = defaultdict(dict)
        made: dict[int, dict[str, Any]] = {}
        for kind in dict.fromkeys(classes):
            positions = [index for index, each in enumerate(classes) if each is kind]
            part = kind([groups[index] for index in positions], **(defaults if kind is default else {}))
            part.state = self.state  # type: ignore[assignment]
            self.parts.append(part)
            made.update(zip(positions, part.param_groups))
        self.param_groups = [made[index] for index in range(len(groups))]
        self.defaults = next((p.defaults for p, k in zip(self.parts, dict.fromkeys(classes)) if k is default), {})
        self.found_inf: Tensor | None = None

    @property
    def name(self) -> str:
        """The classes' names."""
        return " and ".join(type(part).__name__ for part in self.parts)

    def step(self) -> None:
        for part in self.parts:
            part.found_inf = self.found_inf  # type: ignore[attr-defined]
            part.step()
