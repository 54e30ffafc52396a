"""Gradients that come after their bucket was reduced.

[Note: late gradients]
Until the first step has shown it, nobody knows that a parameter of a compiled graph also gets gradients from eager code
(a weight penalty in the loss, say), so its bucket may have been reduced before they come. In the first step they are
kept aside and reduced on their own; the ranks agree once on the buckets concerned. From then on those parameters'
buckets are left to the host. A new eager contribution in a later step is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megabuf_fx.runtime.bucket_groups import GradReducer
from megabuf_fx.runtime.collectives import Comm


class LateGradients:
    """What one model's first step kept aside. ``comm`` joins all ranks."""

    def __init__(self, reducer: GradReducer, comm: Comm, main_grads: Sequence[Tensor]) -> None:
        self._reducer = reducer
        self._comm = comm
        self._main_grads = main_grads
        self._group_of = reducer.plan.group_of_param
        self._kept: dict[int, Tensor] = {}
        self._has_agreed = False

    def take(self, param: int, grad: Tensor) -> None:
        """Keep a gradient until ``reduce``.

        Raises:
            RuntimeError: this is not the first step any more.
        """
        if self._has_agreed:
            raise RuntimeError(
                f"parameter '{self._reducer.plan.params[param].name}' got a gradient from outside the compiled graph "
                f"after its bucket {self._group_of[param]} was reduced inside it, for the first time in this run. From "
                "now on the bucket is reduced later; repeat this step, or run the first such backward under "
                "`with buf.no_sync()` followed by `buf.finish_grad_sync()`"
            )
        self._kept[param] = grad.clone()

    def reduce(self) -> None:
        """Reduce what was kept; every rank calls it at the end of its first step, afterwards it does nothing."""
        if self._has_agreed:
            return
        self._has_agreed = True
        mine = sorted({self._group_of[param] for param in self._kept})
        answers = self._comm.all_gather_object(mine)
        for group in sorted({group for answer in answers if isinstance(answer, list) for group in answer}):
            self._reduce_group(group)
        self._kept.clear()

    def forget(self) -> None:
        self._kept.clear()

    def _reduce_group(self, group: int) -> None:
        members = self._reducer.plan.groups[group]
        results = [self._reducer.reduced_part(bucket) for bucket in members.buckets]
        before = [part.clone() for part in results]
        for bucket in members.buckets:
            self._reducer.full_grad(bucket).zero_()
        for param in members.params:
            if param in self._kept:
                self._main_grads[param].copy_(self._kept[param])
            else:
                self._main_grads[param].zero_()
        self._reducer.reduce_again(group)
        for part, earlier in zip(results, before):
            part.add_(earlier)
        for bucket in members.buckets:
            self._reducer.buffers[bucket.buffer].restore_promoted(bucket.params)
