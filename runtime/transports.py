"""Reductions made of several collectives, and which one a buffer uses.

[Note: all-to-all reduce-scatter]
Every rank sends each other rank its chunk and sums what it receives itself, in rank order. With 16-bit gradients the
sum has fp32 accuracy at the traffic of 16 bits (Megatron ``reduce_scatter_with_fp32_accumulation``, semantics §10).
Megatron selects it by replacing a function for the whole process and cannot average with it; here it is an object that
one buffer uses. What is received is a temporary, so one reduction is in flight at a time: the next one first makes the
stream wait for its predecessor.

[Note: exchange]
On gloo the same is the faster way even in fp32, by sends and receives between every two ranks. There the wait for a
predecessor is one of the host, and a link with nothing behind what it carries stands still until the host comes back.
So two are in flight, and the next one finishes those that have arrived: on a fast link there is one temporary all the
same (figures in ``tests/bench/README.md``). Gloo does not say what has arrived. Each chunk is therefore received over a
mark in its last byte, and a mark that is gone says that waiting will not take long. Nothing else depends on it: a
gradient that ends in the mark, which is that of negative numbers beyond 1.7e38 and of NaN, is summed by whoever needs
it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megabuf_fx.runtime.collectives import Comm, FakeComm, LocalComm, PendingWork, ProcessGroupComm

MOST_IN_FLIGHT = 2
"""Reductions with a temporary: while one travels, the gradients of the next are computed."""
LARGE_MESSAGE = 4 * 2**20
"""Bytes that buffers of sockets hold at most, by Linux's defaults (``tcp_wmem``)."""
_MARK = 0xFF

ReduceScatter = Callable[[Tensor, Tensor, bool], PendingWork]
"""``reduce_scatter(shard, full, average)``; ``shard`` is this rank's slice of ``full``, the rest of which stays."""


class AllToAllReduceScatter:
    """Reduce-scatter of 16-bit gradients with fp32 accumulation; see [Note: all-to-all reduce-scatter]."""

    def __init__(self, comm: ProcessGroupComm) -> None:
        self._comm = comm
        self._previous: _Reduction | None = None

    def __call__(self, shard: Tensor, full: Tensor, average: bool) -> PendingWork:
        if self._previous is not None:
            self._previous.finish_early()
        received = torch.empty_like(full)
        work = self._comm.all_to_all(received, full)
        divisor = self._comm.size if average else 1
        self._previous = _Reduction(work, partial(_sum_rows, shard, divisor, received.view(self._comm.size, -1)))
        return PendingWork(self._previous.finish, (shard, full), work.work)


class ExchangeReduceScatter:
    """Reduce-scatter over gloo with fp32 accumulation; see [Note: exchange]."""

    def __init__(self, comm: ProcessGroupComm) -> None:
        self._comm = comm
        self._in_flight: deque[_Reduction] = deque()

    def __call__(self, shard: Tensor, full: Tensor, average: bool) -> PendingWork:
        while self._in_flight and (len(self._in_flight) == MOST_IN_FLIGHT or self._in_flight[0].has_arrived):
            self._in_flight.popleft().finish_early()
        size, rank = self._comm.size, self._comm.rank
        # Nothing comes from this rank itself.
        received = shard.new_empty(size - 1, shard.numel())
        # An empty parameter may have a bucket of its own.
        marks = [row.view(torch.uint8)[-1] for row in received if row.numel()]
        for mark in marks:
            mark.fill_(_MARK)
        chunks = [*received[:rank], shard, *received[rank:]]
        is_small = shard.nbytes < LARGE_MESSAGE
        work = self._comm.exchange(chunks, full.view(size, -1).unbind(), sends_first=is_small)
        divisor = size if average else 1

        def add_up() -> None:
            _sum_in_turn(shard, divisor, chunks)
            # Messages that are over still hold it.
            received.untyped_storage().resize_(0)

        self._in_flight.append(_Reduction(work, add_up, marks))
        return PendingWork(self._in_flight[-1].finish, (shard, full), work.work)


class _Reduction:
    """Messages and their sum, made by a later reduction or by whoever needs it, whoever comes first."""

    def __init__(self, work: PendingWork, add_up: Callable[[], None], marks: Sequence[Tensor] = ()) -> None:
        # Dropped together, as all of them hold what is received.
        self._pending = [(work, add_up, marks)]
        self._error: RuntimeError | None = None

    @property
    def has_arrived(self) -> bool:
        """Whether ``finish`` will not wait long, by the marks."""
        return all(mark.item() != _MARK for _, _, marks in self._pending for mark in marks)

    def finish(self) -> None:
        if self._error is not None:
            # Waiting again could take as long again.
            raise self._error
        if not self._pending:
            return
        try:
            self._pending[0][0].wait()
        except RuntimeError as error:
            self._error = error
            raise
        _, add_up, _ = self._pending.pop()
        add_up()

    def finish_early(self) -> None:
        """``finish`` for a later reduction: a failure is raised again by whoever waits for this one, with its name."""
        with contextlib.suppress(RuntimeError):
            self.finish()


def _sum_rows(shard: Tensor, divisor: int, rows: Tensor) -> None:
    """Write the sum of ``rows``, in fp32 and divided before it is rounded, to ``shard``."""
    total = torch.sum(rows, dim=0, dtype=torch.float32)
    shard.copy_(total.div_(divisor) if divisor != 1 else total)


def _sum_in_turn(shard: Tensor, divisor: int, addends: Sequence[Tensor]) -> None:
    """The same of ``addends``, of which ``shard`` is one and which are overwritten. One pass for each: with two
    ranks, torch.sum over rows takes four times as long."""
    total, *rest = addends
    if shard.dtype != torch.float32:
        total = total.float()
        for addend in rest:
            total += addend
        shard.copy_(total.div_(divisor) if divisor != 1 else total)
        return
    for addend in rest:
        total = torch.add(total, addend, out=shard if addend is rest[-1] else addend)
    if divisor != 1:
        shard.div_(divisor)


class HybridComm:
    """Several optimizer instances (HSDP, semantics §16): shards within an instance, equal copies across instances.

    ``intra`` joins the ranks of one instance, ``inter`` those that hold the same shard in every instance. A gradient is
    reduce-scattered inside, then its shard is all-reduced across; both overlap with backward. Unlike Megatron's,
    ``all_reduce`` gives complete gradients.
    """

    def __init__(self, intra: Comm, inter: Comm) -> None:
        self.size = intra.size
        self.rank = intra.rank
        self._intra = intra
        self._inter = inter
        # One thread starts everything that goes across, in the order in which it was asked for, so that the order is
        # the same on every rank although it waits for the first collective on the host.
        self._across = ThreadPoolExecutor(max_workers=1, thread_name_prefix="megabuf_inter")

    def all_reduce(self, full: Tensor, *, average: bool) -> PendingWork:
        work = self._intra.all_reduce(full, average=average)
        return self._then(work, lambda: self._inter.all_reduce(full, average=average), full)

    def reduce_scatter(self, shard: Tensor, full: Tensor, *, average: bool) -> PendingWork:
        work = self._intra.reduce_scatter(shard, full, average=average)
        return self._then(work, lambda: self._inter.all_reduce(shard, average=average), full)

    def all_gather(self, full: Tensor, shard: Tensor) -> PendingWork:
        return self._intra.all_gather(full, shard)

    def all_gather_v(self, slices: Sequence[Tensor]) -> PendingWork:
        return self._intra.all_gather_v(slices)

    def all_reduce_max(self, flags: Tensor) -> PendingWork:
        return self._then(self._intra.all_reduce_max(flags), lambda: self._inter.all_reduce_max(flags), flags)

    def all_gather_object(self, value: object) -> list[object]:
        values = self._intra.all_gather_object(value)
        answers = self._across.submit(self._inter.all_gather_object, values).result()
        return [value for answer in answers if isinstance(answer, list) for value in answer]

    def reduce_scalar(self, value: Tensor) -> None:
        self._intra.reduce_scalar(value)

    def broadcast(self, tensor: Tensor) -> None:
        self._across.submit(self._inter.broadcast, tensor).result()
        self._intra.broadcast(tensor)

    def check_alive(self) -> None:
        self._intra.check_alive()
        self._inter.check_alive()

    def process_groups(self) -> list[dist.ProcessGroup]:
        return [*self._intra.process_groups(), *self._inter.process_groups()]

    def close(self) -> None:
        self._across.shutdown()
        self._inter.close()
        self._intra.close()

    def _then(self, first: PendingWork, second: Callable[[], PendingWork], tensor: Tensor) -> PendingWork:
        """``second`` after ``first`` has finished, without waiting here."""
        if tensor.is_cuda:
            return _then_on_stream(first, second, tensor)

        def run() -> None:
            first.wait()
            second().wait()

        return PendingWork(self._across.submit(run).result, (tensor,))


def _then_on_stream(first: PendingWork, second: Callable[[], PendingWork], tensor: Tensor) -> PendingWork:
    # On the device the host never waits: a stream of its own waits for the first collective and starts the second.
    stream = torch.cuda.Stream(tensor.device)
    with torch.cuda.stream(stream):
        first.wait()
        second().wait()
        event = stream.record_event()
    return PendingWork(lambda: torch.cuda.current_stream(tensor.device).wait_event(event), (tensor,))


class CommPair(NamedTuple):
    """The communicators of one process group: their orders of collectives are independent of each other."""

    grads: Comm
    params: Comm

    def close(self) -> None:
        self.grads.close()
        self.params.close()


class Communicators(NamedTuple):
    """All that one model's collectives run on."""

    dense: CommPair
    expert: CommPair | None = None
    """Of expert parameters (``allreduce=False``); None without such."""
    instances: int = 1
    """Optimizer instances: complete sets of shards."""

    def pair(self, *, is_expert: bool) -> CommPair:
        if not is_expert:
            return self.dense
        assert self.expert is not None
        return self.expert

    def full_size(self, *, is_expert: bool) -> int:
        """Ranks over which gradients are averaged, all instances together."""
        return self.pair(is_expert=is_expert).grads.size * self.instances

    def close_params(self) -> None:
        """Close what gathers run on; harmless to repeat, as is ``close``."""
        for pair in (self.dense, self.expert):
            if pair is not None:
                pair.params.close()

    def close(self) -> None:
        for pair in (self.dense, self.expert):
            if pair is not None:
                pair.close()


def make_comm_pair(
    group: dist.ProcessGroup | None, *, name: str, timeout: timedelta | None = None, instances: int = 1
) -> CommPair:
    """Communicators over ``group``; None is a single process. ``timeout`` is that of every collective.

    ``instances`` divides the group into that many runs of neighbouring ranks, each with a complete set of shards.
    """
    return CommPair(
        *(_make_comm(group, name=f"{name}_{kind}", timeout=timeout, instances=instances) for kind in CommPair._fields)
    )


def _make_comm(group: dist.ProcessGroup | None, *, name: str, timeout: timedelta | None, instances: int) -> Comm:
    if group is None or group.size() == 1:
        return LocalComm()
    size = group.size() // instances
    instance, position = divmod(group.rank(), size)
    if dist.get_backend(group) == "fake":
        return FakeComm(size, position)
    ranks = dist.get_process_group_ranks(group)
    if instances == 1:
        return ProcessGroupComm(ranks, name=name, timeout=timeout)

    def part(members: Sequence[int], suffix: str) -> Comm:
        if len(members) == 1:
            return LocalComm()
        return ProcessGroupComm(members, name=f"{name}_{suffix}", timeout=timeout)

    return HybridComm(
        part(ranks[instance * size : (instance + 1) * size], "intra"), part(ranks[position::size], "inter")
    )


def choose_reduce_scatter(comm: Comm, grad_dtype: torch.dtype, *, with_fp32_accumulation: bool) -> ReduceScatter:
    """The reduce-scatter of a buffer with gradients of ``grad_dtype``; ``comm`` has several ranks or is the
    identity."""
    if isinstance(comm, ProcessGroupComm):
        if comm.is_gloo and (grad_dtype == torch.float32 or with_fp32_accumulation):
            return ExchangeReduceScatter(comm)
        if with_fp32_accumulation and grad_dtype != torch.float32:
            return AllToAllReduceScatter(comm)
    return lambda shard, full, average: comm.reduce_scatter(shard, full, average=average)
