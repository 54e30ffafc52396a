"""NaN, Inf and unusually large gradients, found before they are communicated (semantics §8).

Megatron raises inside the backward, on the one rank that has them. Here the device keeps the findings, nothing waits
for it during the backward, and ``report`` raises on every rank, naming parameter and bucket. All but ``report`` works
inside a captured step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megabuf_fx.runtime.plan import BucketPlan

log = logging.getLogger("megabuf_fx.runtime.grad_checks")

LARGE_FACTOR = 10.0
"""A bucket group is large whose norm exceeds this multiple of the largest norm seen so far (Megatron's threshold)."""

_INF, _NAN = 1, 2


class GradChecks:
    """Findings of one step. ``nan`` makes NaN and Inf an error, ``large`` warns of large bucket groups.

    ``all_reduce`` gives the elementwise maximum over all ranks, in place.
    """

    def __init__(
        self,
        plan: BucketPlan,
        all_reduce: Callable[[Tensor], None],
        device: torch.device,
        *,
        nan: bool,
        large: bool,
    ) -> None:
        self._plan = plan
        self._all_reduce = all_reduce
        self._nan = nan
        self._large = large
        self._group_of = plan.group_of_param
        # [n_params] uint8 and [n_groups] fp32.
        self._found = torch.zeros(len(plan.params), dtype=torch.uint8, device=device)
        self._largest = torch.zeros(len(plan.groups), device=device)
        self._is_large = torch.zeros(len(plan.groups), dtype=torch.uint8, device=device)
        # Of the step that ended last: on this rank, on any rank, and its large groups.
        self._found_here = torch.zeros_like(self._found)
        self._found_anywhere = torch.zeros_like(self._found)
        self._was_large = torch.zeros_like(self._is_large)
        self._members = [
            torch.tensor([p for p in group.params if plan.params[p].numel], dtype=torch.long, device=device)
            for group in plan.groups
        ]
        self._has_looked = False

    def look(self, group: int, main_grads: Sequence[Tensor]) -> None:
        """Examine a bucket group's own gradients, before scaling; ``main_grads`` is that of every parameter."""
        members = [p for p in self._plan.groups[group].params if self._plan.params[p].numel]
        if not members:
            return
        self._has_looked = True
        grads = [main_grads[param] for param in members]
        if self._nan:
            # The largest magnitude shows both; a sum of squares would overflow where no element does.
            peaks = torch.stack(torch._foreach_norm(grads, float("inf")))
            found = torch.where(peaks.isnan(), _NAN, torch.where(peaks.isinf(), _INF, 0))
            self._found[self._members[group]] = found.to(torch.uint8)
        if self._large:
            norm = torch.stack(torch._foreach_norm(grads, 2.0, dtype=torch.float32)).norm()
            largest = self._largest[group]
            is_large = (norm > LARGE_FACTOR * largest) & (largest > 0)
            self._is_large[group] = is_large
            self._largest[group] = torch.where(is_large | ~norm.isfinite(), largest, torch.maximum(largest, norm))

    def exchange(self) -> bool:
        """Complete the findings of a step with those of the other ranks; False when there was nothing to look at.

        Every rank calls it after the backward. Nothing waits for the device.
        """
        if not self._has_looked:
            return False
        self._has_looked = False
        self._found_here.copy_(self._found)
        self._found_anywhere.copy_(self._found)
        self._was_large.copy_(self._is_large)
        self._found.zero_()
        self._is_large.zero_()
        self._all_reduce(self._found_anywhere)
        return True

    def found(self) -> Tensor:
        """Whether the last exchange found NaN or Inf on any rank: 0-dim bool, on the device."""
        return self._found_anywhere.any()

    def report(self) -> None:
        """Read what the last exchange found.

        Raises:
            RuntimeError: NaN or Inf in the gradients of some rank, on every rank.
        """
        everywhere, here = self._found_anywhere.tolist(), self._found_here.tolist()
        for group, is_large in enumerate(self._was_large.tolist() if self._large else []):
            if is_large:
                log.warning("found unexpectedly large gradients in bucket %d (%s)", group, self._names(group))
        if any(everywhere):
            raise RuntimeError(self._message(everywhere, here))

    def tensors(self) -> dict[str, Tensor]:
        """All that it keeps on the device."""
        named = {name.strip("_"): value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return {**named, **{f"members[{group}]": members for group, members in enumerate(self._members)}}

    def _names(self, group: int) -> str:
        names = [self._plan.params[param].name for param in self._plan.groups[group].params]
        return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"

    def _message(self, everywhere: Sequence[int], here: Sequence[int]) -> str:
        listed = [
            f"'{self._plan.params[param].name}' (bucket {self._group_of[param]}, {'NaN' if code == _NAN else 'Inf'}, "
            f"{'this rank' if here[param] else 'another rank'})"
            # As backward finished them: what comes first is nearest to the cause.
            for param, code in reversed(list(enumerate(everywhere)))
            if code
        ]
        rest = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
        return (
            "found NaN or Inf in local gradients before their reduction: "
            f"{', '.join(listed[:5])}{rest}. The step must not be taken; call zero_grad() to go on with the next batch"
        )
