"""Collectives behind one interface, so that transports are objects and not flags.

A ``Comm`` starts a collective and returns a ``PendingWork``; ``wait()`` makes the result visible to the current stream
(CUDA) or to the host (CPU). Reduce-scatter and all-gather work in place: the shard is a slice of the full tensor.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed them and warns about the old names, which 2.11 only has.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


ADVICE = "Another rank has died, is stuck or cannot be reached; its own error says more. Restart from a checkpoint"


class CollectiveError(RuntimeError):
    """A collective failed or timed out; the message names what it carried."""


class HasFuture(Protocol):
    """A ``dist.Work``, or several of them that finish together."""

    def get_future(self) -> Any:
        """Of torch or of ``concurrent.futures``; ``RuntimeError`` where the backend has none."""


class PendingWork(NamedTuple):
    """A collective in flight."""

    wait: Callable[[], object]
    keep_alive: tuple[Tensor, ...]
    """Tensors that the collective reads or writes until ``wait`` returns."""
    work: HasFuture | None = None
    """Tells a profile when the collective has finished; None where several follow each other."""


class Comm(Protocol):
    """Data-parallel collectives of one communicator.

    ``average`` divides by the number of ranks as part of the collective (Megatron ``average_in_collective``), otherwise
    sums.
    """

    size: int
    """Ranks that share a bucket, each with a shard of its own."""
    rank: int
    """Which of the shards is this rank's."""

    def all_reduce(self, full: Tensor, *, average: bool) -> PendingWork: ...

    def reduce_scatter(self, shard: Tensor, full: Tensor, *, average: bool) -> PendingWork: ...

    def all_gather(self, full: Tensor, shard: Tensor) -> PendingWork: ...

    def all_gather_v(self, slices: Sequence[Tensor]) -> PendingWork:
        """Slice ``i``, of whatever size, comes from rank ``i``; in place."""
        ...

    def all_reduce_max(self, flags: Tensor) -> PendingWork:
        """Elementwise maximum over the group, in place."""
        ...

    def all_gather_object(self, value: object) -> list[object]:
        """One value per rank of the group, in rank order; blocks."""
        ...

    def reduce_scalar(self, value: Tensor) -> None:
        """Sum of a 0-dim tensor over the ranks that share a bucket; in place, visible when it returns."""
        ...

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with that of the group's first rank; blocks."""
        ...

    def check_alive(self) -> None:
        """Raise when the process group is gone."""
        ...

    def process_groups(self) -> list[dist.ProcessGroup]:
        """The process groups that carry buffers."""
        ...

    def close(self) -> None: ...


def _nothing() -> None:
    return None


class LocalComm:
    """A group of one: every collective is the identity."""

    size = 1
    rank = 0

    def all_reduce(self, full: Tensor, *, average: bool) -> PendingWork:
        return PendingWork(_nothing, ())

    def reduce_scatter(self, shard: Tensor, full: Tensor, *, average: bool) -> PendingWork:
        return PendingWork(_nothing, ())

    def all_gather(self, full: Tensor, shard: Tensor) -> PendingWork:
        return PendingWork(_nothing, ())

    def all_gather_v(self, slices: Sequence[Tensor]) -> PendingWork:
        return PendingWork(_nothing, ())

    def all_reduce_max(self, flags: Tensor) -> PendingWork:
        return PendingWork(_nothing, ())

    def all_gather_object(self, value: object) -> list[object]:
        return [value]

    def reduce_scalar(self, value: Tensor) -> None:
        return None

    def broadcast(self, tensor: Tensor) -> None:
        return None

    def check_alive(self) -> None:
        return None

    def process_groups(self) -> list[dist.ProcessGroup]:
        return []

    def close(self) -> None:
        return None


class FakeComm(LocalComm):
    """The fake process group: sizes and order of any world on one machine, no data moves."""

    def __init__(self, size: int, rank: int) -> None:
        self.size = size
        self.rank = rank


class ProcessGroupComm:
    """``torch.distributed`` on a communicator of its own over ``ranks`` (of the world), destroyed by ``close``.

    A communicator of its own keeps our order of collectives apart from the user's, and gradients apart from gathers.
    Every one of ``ranks`` must create it; for all ranks, every rank of the world.
    """

    def __init__(self, ranks: Sequence[int], *, name: str, timeout: timedelta | None) -> None:
        self.size = len(ranks)
        self.rank = list(ranks).index(dist.get_rank())
        self.name = name
        # Other ranks do not take part in creating a sub-group, so torch names it by a hash of its ranks and of the
        # number of live groups. After a destroy that name comes back, finds the old keys in the store, and hangs: a
        # sub-group is therefore kept until the process group itself is destroyed.
        self._is_subgroup = len(ranks) < dist.get_world_size()
        make = functools.partial(dist.new_group, list(ranks), timeout=timeout, group_desc=name)
        self._group: dist.ProcessGroup | None = _new_subgroup(make) if self._is_subgroup else make()
        self._finished: list[dist.Work | None] = []
        """Messages of exchanges that are over; see ``_Messages``."""

    @property
    def is_gloo(self) -> bool:
        return dist.get_backend(self.group) == "gloo"

    @property
    def group(self) -> dist.ProcessGroup:
        self.check_alive()
        assert self._group is not None
        return self._group

    def check_alive(self) -> None:
        if self._group is None or not dist.is_initialized():
            raise RuntimeError(
                f"the process group of {self.name} is gone (destroy_process_group or detach was called); "
                "attach the model again after init_process_group"
            )

    def process_groups(self) -> list[dist.ProcessGroup]:
        return [self.group]

    def all_reduce(self, full: Tensor, *, average: bool) -> PendingWork:
        work = dist.all_reduce(full, op=_reduce_op(average), group=self.group, async_op=True)
        return PendingWork(_waiter(work), (full,), work)

    def reduce_scatter(self, shard: Tensor, full: Tensor, *, average: bool) -> PendingWork:
        work = _reduce_scatter(shard, full, op=_reduce_op(average), group=self.group, async_op=True)
        return PendingWork(_waiter(work), (shard, full), work)

    def all_gather(self, full: Tensor, shard: Tensor) -> PendingWork:
        if self.is_gloo:
            return self._gather_by_exchange(full.view(self.size, -1).unbind())
        work = _all_gather(full, shard, group=self.group, async_op=True)
        return PendingWork(_waiter(work), (full, shard), work)

    def all_gather_v(self, slices: Sequence[Tensor]) -> PendingWork:
        if self.is_gloo:
            return self._gather_by_exchange(slices)
        # NCCL gathers equal sizes only.
        works = [
            dist.broadcast(part, group=self.group, group_src=rank, async_op=True)
            for rank, part in enumerate(slices)
            if part.numel()
        ]
        waits = [_waiter(work) for work in works]

        def wait() -> None:
            for each in waits:
                each()

        # They are finished in this order, or nearly so.
        return PendingWork(wait, tuple(slices), works[-1] if works else None)

    def _gather_by_exchange(self, slices: Sequence[Tensor]) -> PendingWork:
        return self.exchange(slices, [slices[self.rank]] * self.size)

    def exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor], *, sends_first: bool = False) -> PendingWork:
        """Gloo: ``sent[i]`` goes to rank ``i``, whose ``received[self.rank]`` has its size; own places are left alone.

        Gloo's own collectives run two at a time, and its all-gather takes a temporary. They send before they are ready
        to receive, so that on a slow link the directions of a message that is larger than the sockets' buffers follow
        each other. Receiving first avoids that, and makes gloo's thread wait in a loop for this one where data comes
        while this one sends: milliseconds where both share a core (figures in ``tests/bench/README.md``).
        """
        self._finished.clear()
        distances = range(1, self.size)
        sources = [(self.rank - distance) % self.size for distance in distances]
        targets = [(self.rank + distance) % self.size for distance in distances]

        def receive() -> list[dist.Work | None]:
            return [dist.irecv(received[i], group=self.group, group_src=i) for i in sources if received[i].numel()]

        def send() -> list[dist.Work | None]:
            return [dist.isend(sent[i], group=self.group, group_dst=i) for i in targets if sent[i].numel()]

        works = [*send(), *receive()] if sends_first else [*receive(), *send()]
        messages = _Messages(works, self._finished)
        return PendingWork(messages.wait, (*received, *sent), messages)

    def all_to_all(self, received: Tensor, sent: Tensor) -> PendingWork:
        """Chunk ``i`` of ``sent`` goes to rank ``i``; ``received`` must be another tensor of its size."""
        work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        return PendingWork(_waiter(work), (received, sent), work)

    def all_reduce_max(self, flags: Tensor) -> PendingWork:
        with self._named("a maximum of flags"):
            work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group, async_op=True)

        def wait() -> None:
            with self._named("a maximum of flags"):
                _waiter(work)()

        return PendingWork(wait, (flags,))

    def all_gather_object(self, value: object) -> list[object]:
        values: list[object] = [None] * self.size
        with self._named("an exchange of objects"):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def reduce_scalar(self, value: Tensor) -> None:
        with self._named("the reduction of a number"):
            dist.all_reduce(value, group=self.group)

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise CollectiveError(f"{what} over {self.name} ({self.size} ranks) failed: {error}\n{ADVICE}") from error

    def broadcast(self, tensor: Tensor) -> None:
        if not tensor.numel():
            return
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
            if stride == 0 and size > 1:
                # Expanded: its elements share memory, and gloo would write each of them, past the end of it.
                tensor = tensor.narrow(dim, 0, 1)
        staged = tensor.contiguous()
        dist.broadcast(staged, group=self.group, group_src=0)
        if staged is not tensor:
            tensor.copy_(staged)

    def close(self) -> None:
        self._finished.clear()
        if self._group is not None and dist.is_initialized() and not self._is_subgroup:
            # The world may have been destroyed, this group with it, and initialized anew.
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(self._group)
        self._group = None


def _new_subgroup(make: Callable[..., dist.ProcessGroup]) -> dist.ProcessGroup:
    """A group that its own ranks create, without the others.

    A group of the same ranks that is kept may have the name that torch makes up, because the number of live groups has
    come back since. All of its ranks see that alike, so each creates a group of itself, which changes the number.
    """
    while True:
        try:
            return make(use_local_synchronization=True)
        except ValueError as error:
            if "already been created" not in str(error):
                raise
            dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc="megabuf_count")


class _Messages:
    """Gloo's point-to-point works, waited for together: each can be waited for once, and they have no futures.

    What is over goes to ``finished``, for the next exchange to drop: a receive that is dropped while gloo's thread is
    about to be done with it waits for that thread, several milliseconds where both share a core. Until then these works
    hold their tensors.
    """

    def __init__(self, works: Sequence[dist.Work | None], finished: list[dist.Work | None]) -> None:
        self._works = list(works)
        self._finished = finished
        self._future: Future[None] | None = None

    def wait(self) -> None:
        if self._future is None:
            self._wait_here()
        else:
            self._future.result()

    def get_future(self) -> Future[None]:
        """From now on a thread waits, which only a profile is worth."""
        if self._future is None:
            pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="megabuf_messages")
            self._future = pool.submit(self._wait_here)
            pool.shutdown(wait=False)
        return self._future

    def _wait_here(self) -> None:
        while self._works:
            _waiter(self._works[0])()
            self._finished.append(self._works.pop(0))


def _reduce_op(average: bool) -> dist.ReduceOp.RedOpType:
    return dist.ReduceOp.AVG if average else dist.ReduceOp.SUM


def _waiter(work: dist.Work | None) -> Callable[[], object]:
    if work is None:
        raise RuntimeError("this rank is not a member of the process group")
    return work.wait
