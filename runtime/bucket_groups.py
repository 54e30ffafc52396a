"""Reductions and gathers of bucket groups: what is in flight, and in which order it may start.

    gradients   OPEN --start--> REDUCING --wait--> REDUCED --reset--> OPEN
    parameters  CURRENT --step--> STALE --start--> GATHERING --wait--> CURRENT

Gradients start in the order of the plan: a group that is ready early is queued until its predecessors have started.
Gathers start in reverse order, all together. So the sequence of collectives is a function of the plan alone.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from torch import Tensor

from megabuf_fx.runtime.buffers import ParamGradBuffer
from megabuf_fx.runtime.collectives import Comm, PendingWork
from megabuf_fx.runtime.plan import Bucket, BucketPlan


class GradPhase(enum.Enum):
    """State of a bucket group's gradients."""

    OPEN = "open"
    """Being written."""
    REDUCING = "reducing"
    """Sent; nobody may write."""
    REDUCED = "reduced"
    """This rank's shard (sharded) or the whole bucket holds the reduced gradient."""


class ParamPhase(enum.Enum):
    """State of a bucket group's gathered parameters."""

    CURRENT = "current"
    STALE = "stale"
    """Only the shard of this rank is new."""
    GATHERING = "gathering"


class GradReducer:
    """Starts and finishes the gradient collectives of all bucket groups.

    ``scale`` multiplies a bucket in place before its collective (Megatron ``gradient_scaling_factor``, semantics §5);
    ``average`` lets the collective divide instead.
    """

    def __init__(
        self, plan: BucketPlan, buffers: Sequence[ParamGradBuffer], comm: Comm, *, scale: float, average: bool
    ) -> None:
        self.plan = plan
        self.buffers = buffers
        self.comm = comm
        self.scale = scale
        self.average = average
        self.phases = [GradPhase.OPEN] * len(plan.groups)
        self._queued = [False] * len(plan.groups)
        self._next = 0
        self._works: dict[int, list[PendingWork]] = {}

    def start(self, group: int) -> None:
        """Start the group's reduction, now or as soon as all its predecessors have started.

        Raises:
            RuntimeError: the group was started before and not reset since.
        """
        if self.phases[group] is not GradPhase.OPEN or self._queued[group]:
            raise RuntimeError(
                f"bucket {group} is already {self.phases[group].value}; reset gradients (zero_grad) between steps"
            )
        self._queued[group] = True
        while self._next < len(self._queued) and self._queued[self._next]:
            self._launch(self._next)
            self._next += 1

    def is_started(self, group: int) -> bool:
        """Whether the group was started (or queued) since the last reset: its gradients are final."""
        return self._queued[group]

    def wait(self, group: int) -> None:
        """Wait for the group's reduction; a group that is not in flight is left alone."""
        if self.phases[group] is GradPhase.REDUCING:
            for work in self._works.pop(group):
                work.wait()
            self.phases[group] = GradPhase.REDUCED

    def reset(self) -> None:
        """Drain what is in flight and open every group again."""
        for group in range(len(self.phases)):
            self.wait(group)
            self.phases[group] = GradPhase.OPEN
            self._queued[group] = False
        self._next = 0

    def reduce_again(self, group: int) -> None:
        """Reduce a group a second time within one step and wait for it."""
        self._launch(group)
        self.wait(group)

    def full_grad(self, bucket: Bucket) -> Tensor:
        """All of ``bucket`` in ``grad_data``, padding included."""
        return self.buffers[bucket.buffer].grad_data[bucket.start : bucket.end]

    def grad_shard(self, bucket: Bucket) -> Tensor:
        """The gradient that this rank owns of ``bucket``."""
        buffer = self.buffers[bucket.buffer]
        return buffer.shard(buffer.grad_data, bucket.index, dp_size=self.comm.size, dp_rank=self.comm.rank)

    def reduced_part(self, bucket: Bucket) -> Tensor:
        """The part of ``bucket`` that holds reduced gradients: this rank's shard, or all of it."""
        return self.grad_shard(bucket) if self.plan.sharded else self.full_grad(bucket)

    def _launch(self, group: int) -> None:
        works = []
        for bucket in self.plan.groups[group].buckets:
            full = self.full_grad(bucket)
            if self.scale != 1.0:
                full.mul_(self.scale)
            if self.plan.sharded:
                works.append(self.comm.reduce_scatter(self.grad_shard(bucket), full, average=self.average))
            else:
                works.append(self.comm.all_reduce(full, average=self.average))
        self._works[group] = works
        self.phases[group] = GradPhase.REDUCING


class ParamGatherer:
    """Starts and finishes the all-gathers of updated parameters (sharded mode only)."""

    def __init__(self, plan: BucketPlan, buffers: Sequence[ParamGradBuffer], comm: Comm) -> None:
        self.plan = plan
        self.buffers = buffers
        self.comm = comm
        self.phases = [ParamPhase.CURRENT] * len(plan.groups)
        self._works: dict[int, list[PendingWork]] = {}

    def mark_stale(self) -> None:
        """The optimizer has written this rank's shards.

        Raises:
            RuntimeError: a gather is in flight, so the shards were written while they were being sent.
        """
        if any(phase is ParamPhase.GATHERING for phase in self.phases):
            raise RuntimeError("parameters were updated while they were being gathered; call wait_all() first")
        self.phases = [ParamPhase.STALE] * len(self.phases)

    def start_all(self) -> None:
        """Start the gather of every stale group, head of the model first."""
        for group in reversed(range(len(self.phases))):
            if self.phases[group] is ParamPhase.STALE:
                self._works[group] = [self._gather(bucket) for bucket in self.plan.groups[group].buckets]
                self.phases[group] = ParamPhase.GATHERING

    def wait(self, group: int) -> None:
        """Make the group's parameters current; all stale predecessors are started first."""
        if self.phases[group] is ParamPhase.STALE:
            self.start_all()
        if self.phases[group] is ParamPhase.GATHERING:
            for work in self._works.pop(group):
                work.wait()
            self.phases[group] = ParamPhase.CURRENT

    def wait_all(self) -> None:
        """Make every parameter current."""
        self.start_all()
        for group in reversed(range(len(self.phases))):
            self.wait(group)

    @property
    def is_current(self) -> bool:
        return all(phase is ParamPhase.CURRENT for phase in self.phases)

    def param_shard(self, bucket: Bucket) -> Tensor:
        """The parameters that this rank owns of ``bucket``."""
        buffer = self.buffers[bucket.buffer]
        if buffer.param_data is None:
            raise RuntimeError("parameters live in a buffer only with use_distributed_optimizer=True")
        return buffer.shard(buffer.param_data, bucket.index, dp_size=self.comm.size, dp_rank=self.comm.rank)

    def _gather(self, bucket: Bucket) -> PendingWork:
        buffer = self.buffers[bucket.buffer]
        if buffer.param_data is None:
            raise RuntimeError("parameters live in a buffer only with use_distributed_optimizer=True")
        full = buffer.param_data[bucket.start : bucket.end]
        return self.comm.all_gather(full, self.param_shard(bucket))
