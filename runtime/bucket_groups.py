"""Reductions and gathers of bucket groups: what is in flight, and in which order it may start.

    gradients   OPEN --start--> REDUCING --wait--> REDUCED --reset--> OPEN
    parameters  CURRENT --step--> STALE --start--> GATHERING --wait--> CURRENT

Gradients start in the order of the plan: a group that is ready early is queued until its predecessors have started.
Gathers start in reverse order, all together. So the sequence of collectives is a function of the plan alone.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from megabuf_fx.runtime.buffers import ParamGradBuffer
from megabuf_fx.runtime.collectives import ADVICE, CollectiveError, Comm, PendingWork
from megabuf_fx.runtime.ops import start_gather_, start_reduction_, wait_gather_, wait_reduction_
from megabuf_fx.runtime.plan import Bucket, BucketPlan
from megabuf_fx.runtime.scaling import GradScaling
from megabuf_fx.runtime.transports import ReduceScatter


class _NamedFailure:
    """Says of a failing collective which bucket group it carried, and in which step (counted from ``attach``)."""

    # Not made of a generator, which takes several times as long: it is entered for every bucket.

    def __init__(self, plan: BucketPlan, group: int, step: int, what: str) -> None:
        self._about = (plan, group, step, what)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, RuntimeError):
            return
        plan, group, step, what = self._about
        names = [plan.params[param].name for param in plan.groups[group].params]
        shown = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        raise CollectiveError(f"{what} of bucket {group} ({shown}) failed in step {step}: {error}\n{ADVICE}") from error


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


class GradChannel(NamedTuple):
    """How the gradients of one buffer travel."""

    comm: Comm
    reduce_scatter: ReduceScatter
    scaling: GradScaling


class GradReducer:
    """Starts and finishes the gradient collectives of all bucket groups; ``channels`` has one entry per buffer."""

    def __init__(
        self, plan: BucketPlan, buffers: Sequence[ParamGradBuffer], channels: Sequence[GradChannel], *, handle: int
    ) -> None:
        self.plan = plan
        self._handle = handle
        self.buffers = buffers
        self.channels = channels
        self.step = 0
        """For messages."""
        self.force_all_reduce = False
        """Sharded: give every rank complete gradients (Megatron ``force_all_reduce``). Read when a group starts."""
        self.phases = [GradPhase.OPEN] * len(plan.groups)
        self.is_complete = [False] * len(plan.groups)
        """Groups that were all-reduced since the last reset: every rank holds all of their gradients."""
        self._queued = [False] * len(plan.groups)
        self._scaled = [False] * len(plan.groups)
        self._next = 0
        self._works: dict[int, list[PendingWork]] = {}
        self._factors = [float(channels[group.buckets[0].buffer].scaling.factor) for group in plan.groups]
        # Buffers stay where they are, so no call needs to slice them anew.
        self._full_grads = [[self.full_grad(bucket) for bucket in group.buckets] for group in plan.groups]
        self._grad_shards = [
            [self.grad_shard(bucket) for bucket in group.buckets] if plan.sharded else [] for group in plan.groups
        ]

    def start(self, group: int, *, scaled: bool = False) -> None:
        """Start the group's reduction, now or as soon as all its predecessors have started.

        ``scaled`` says that whoever wrote the gradients has multiplied them by the factor of their ``GradScaling``.

        Raises:
            RuntimeError: the group was started before and not reset since.
        """
        if self.phases[group] is not GradPhase.OPEN or self._queued[group]:
            raise RuntimeError(
                f"bucket {group} is already {self.phases[group].value}; reset gradients (zero_grad) between steps"
            )
        self._queued[group] = True
        self._scaled[group] = scaled
        while self._next < len(self._queued) and self._queued[self._next]:
            self._launch(self._next, scaled=self._scaled[self._next])
            self._next += 1

    def is_started(self, group: int) -> bool:
        """Whether the group was started (or queued) since the last reset: its gradients are final."""
        return self._queued[group]

    @property
    def has_started(self) -> bool:
        """Whether any group was started since the last reset."""
        return any(self._queued)

    def wait(self, group: int) -> None:
        """Wait for the group's reduction; a group that is not in flight is left alone."""
        if self.phases[group] is GradPhase.REDUCING:
            wait_reduction_(self._full_grads[group], self._handle, group)
            for bucket in self.plan.groups[group].buckets:
                self.buffers[bucket.buffer].restore_promoted(bucket.params)
            self.phases[group] = GradPhase.REDUCED

    def reset(self) -> None:
        """Drain what is in flight and open every group again."""
        for group in range(len(self.phases)):
            self.wait(group)
            self.phases[group] = GradPhase.OPEN
            self._queued[group] = False
            self.is_complete[group] = False
        self._next = 0

    def reduce_again(self, group: int) -> None:
        """Reduce a group a second time within one step and wait for it."""
        self._launch(group, scaled=False)
        self.wait(group)

    def full_grad(self, bucket: Bucket) -> Tensor:
        """All of ``bucket`` in ``grad_data``, padding included."""
        return self.buffers[bucket.buffer].grad_data[bucket.start : bucket.end]

    def grad_shard(self, bucket: Bucket) -> Tensor:
        """The gradient that this rank owns of ``bucket``."""
        buffer, comm = self.buffers[bucket.buffer], self.channels[bucket.buffer].comm
        return buffer.grad_shard(bucket.index, dp_size=comm.size, dp_rank=comm.rank)

    def reduced_part(self, bucket: Bucket) -> Tensor:
        """The part of ``bucket`` that holds reduced gradients: this rank's shard, or all of it."""
        return self.grad_shard(bucket) if self.plan.sharded else self.full_grad(bucket)

    # Device work, called through the ops of those names; see [Note: host ops and device ops] in ops.py.

    def start_reduction(self, group: int, *, scatter: bool) -> list[PendingWork]:
        works = []
        with _NamedFailure(self.plan, group, self.step, "the gradient reduction"):
            for number, (bucket, full) in enumerate(zip(self.plan.groups[group].buckets, self._full_grads[group])):
                comm, reduce_scatter, scaling = self.channels[bucket.buffer]
                if scatter:
                    works.append(reduce_scatter(self._grad_shards[group][number], full, scaling.average))
                else:
                    works.append(comm.all_reduce(full, average=scaling.average))
        # Gloo's works hold temporaries of the transport, which may be done with them before this rank waits.
        self._works[group] = [PendingWork(pending.wait, pending.keep_alive) for pending in works]
        return works

    def wait_reduction(self, group: int) -> None:
        with _NamedFailure(self.plan, group, self.step, "the gradient reduction"):
            for work in self._works.pop(group):
                work.wait()

    def factor_of(self, group: int) -> float:
        """What multiplies the gradients of a group before they are sent; its buckets are all dense or all experts'."""
        return self._factors[group]

    def can_scale_early(self, group: int) -> bool:
        """Whether gradients may be multiplied as they are written: fp32 sums of their own are rounded first."""
        buckets = self.plan.groups[group].buckets
        return not any(set(self.buffers[b.buffer].promoted).intersection(b.params) for b in buckets)

    def _launch(self, group: int, *, scaled: bool) -> None:
        is_scattered = self.plan.sharded and not self.force_all_reduce
        factor = 1.0 if scaled else self.factor_of(group)
        for bucket, full in zip(self.plan.groups[group].buckets, self._full_grads[group]):
            self.buffers[bucket.buffer].round_promoted(bucket.params)
            if factor != 1:
                full.mul_(factor)
        start_reduction_(self._full_grads[group], self._handle, group, is_scattered)
        self.phases[group] = GradPhase.REDUCING
        self.is_complete[group] = not is_scattered


class ParamGatherer:
    """Starts and finishes the all-gathers of updated parameters; ``comms`` by buffer.

    ``prefetch`` bounds the gathers in flight beyond the one that is waited for: None starts all at once, 1 is
    Megatron's chain, 0 starts each one only when it is needed.
    """

    def __init__(
        self,
        plan: BucketPlan,
        buffers: Sequence[ParamGradBuffer],
        comms: Sequence[Comm],
        *,
        handle: int,
        prefetch: int | None = None,
    ) -> None:
        self.plan = plan
        self._handle = handle
        self.buffers = buffers
        self.comms = comms
        self.prefetch = prefetch
        self.step = 0
        """For messages."""
        self.phases = [ParamPhase.CURRENT] * len(plan.groups)
        self._works: dict[int, list[PendingWork]] = {}

    @property
    def phases(self) -> list[ParamPhase]:
        """Of every bucket group. Settable as a whole only."""
        return self._phases

    @phases.setter
    def phases(self, phases: Sequence[ParamPhase]) -> None:
        self._phases = list(phases)
        self._stale = self._phases.count(ParamPhase.STALE)
        """How many are. Asked for whenever a reduction starts."""

    def mark_stale(self) -> None:
        """The optimizer has written this rank's shards.

        Raises:
            RuntimeError: a gather is in flight, so the shards were written while they were being sent.
        """
        if any(phase is ParamPhase.GATHERING for phase in self.phases):
            raise RuntimeError("parameters were updated while they were being gathered; call wait_all() first")
        self.phases = [ParamPhase.STALE] * len(self.phases)

    def start_ahead(self) -> None:
        """Start as many gathers as may be in flight before anything is waited for."""
        if self.prefetch != 0:
            self._start_down_to(0 if self.prefetch is None else len(self.phases) - self.prefetch)

    def start_all(self) -> None:
        """Start the gather of every stale group, head of the model first."""
        self._start_down_to(0)

    def wait(self, group: int) -> None:
        """Make the group's parameters current; all stale predecessors are started first."""
        if self.phases[group] is ParamPhase.CURRENT:
            return
        self._start_down_to(0 if self.prefetch is None else group - self.prefetch)
        wait_gather_(self._full_params(group), self._handle, group)
        for bucket in self.plan.groups[group].buckets:
            self.buffers[bucket.buffer].finish_gather(bucket.index)
        self._phases[group] = ParamPhase.CURRENT

    def wait_all(self) -> None:
        """Make every parameter current."""
        self.start_all()
        for group in reversed(range(len(self.phases))):
            self.wait(group)

    @property
    def is_current(self) -> bool:
        return all(phase is ParamPhase.CURRENT for phase in self.phases)

    def poison_stale(self) -> None:
        """Make NaN of what other ranks own of every stale group."""
        for group, phase in zip(self.plan.groups, self.phases):
            for bucket in group.buckets if phase is ParamPhase.STALE else ():
                comm = self.comms[bucket.buffer]
                self.buffers[bucket.buffer].poison(bucket.index, dp_size=comm.size, dp_rank=comm.rank)

    # Device work, called through the ops of those names.

    def start_gather(self, group: int) -> list[PendingWork]:
        with _NamedFailure(self.plan, group, self.step, "the parameter gather"):
            self._works[group] = [
                self.buffers[bucket.buffer].start_gather(bucket.index, self.comms[bucket.buffer])
                for bucket in self.plan.groups[group].buckets
            ]
        return self._works[group]

    def wait_gather(self, group: int) -> None:
        with _NamedFailure(self.plan, group, self.step, "the parameter gather"):
            for work in self._works.pop(group):
                work.wait()

    def _start_down_to(self, last: int) -> None:
        if not self._stale:
            return
        for group in reversed(range(max(last, 0), len(self._phases))):
            if self._phases[group] is ParamPhase.STALE:
                for bucket in self.plan.groups[group].buckets:
                    self.buffers[bucket.buffer].before_gather(bucket.index)
                start_gather_(self._full_params(group), self._handle, group)
                self._phases[group] = ParamPhase.GATHERING
                self._stale -= 1

    def _full_params(self, group: int) -> list[Tensor]:
        return [self._full(bucket) for bucket in self.plan.groups[group].buckets]

    def _full(self, bucket: Bucket) -> Tensor:
        return self.buffers[bucket.buffer].param_bucket(bucket.index)
