"""``runtime/transports.py``: the reduce-scatter with fp32 accumulation, alone and through ``attach``."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import RankGroup
from torch import Tensor, nn

import megabuf_fx as mb
from megabuf_fx.runtime.collectives import PendingWork, ProcessGroupComm
from megabuf_fx.runtime.transports import AllToAllReduceScatter, ExchangeReduceScatter, make_comm_pair


def reduce_scatters(rank: int) -> list[tuple[bool, bool, bool]]:
    """Of 20 random tensors, three ways to reduce each: whether it equals fp32 and bf16 reduce-scatter, and left the
    other shards alone."""
    pair = make_comm_pair(dist.group.WORLD, name="test")
    comm = pair.grads
    assert isinstance(comm, ProcessGroupComm)
    found = []
    for seed in range(20):
        torch.manual_seed(100 * seed + rank)
        full = torch.randn(4 * 256).to(torch.bfloat16)

        def shard_of(tensor: Tensor) -> Tensor:
            return tensor.view(4, -1)[rank]

        wide, narrow = full.float(), full.clone()
        comm.reduce_scatter(shard_of(wide), wide, average=False).wait()
        comm.reduce_scatter(shard_of(narrow), narrow, average=False).wait()
        others = [part for part in range(4) if part != rank]
        for transport, limit in ((AllToAllReduceScatter, 0), (ExchangeReduceScatter, 0), (ExchangeReduceScatter, 1024)):
            after = full.clone()
            with mock.patch("megabuf_fx.runtime.transports.LARGE_MESSAGE", limit):
                # The shard is a slice of what is sent.
                transport(comm)(shard_of(after), after, False).wait()
            found.append(
                (
                    torch.equal(shard_of(after), shard_of(wide).bfloat16()),
                    torch.equal(shard_of(after), shard_of(narrow)),
                    torch.equal(after.view(4, -1)[others], full.view(4, -1)[others]),
                )
            )
    pair.close()
    return found


@pytest.mark.dist
def test_all_to_all_is_fp32_reduce_scatter_rounded_once(ranks: Callable[[int], RankGroup]) -> None:
    """Four ranks: with two, bf16 itself rounds once only."""
    for found in ranks(4).run(reduce_scatters):
        assert found == [(True, False, True)] * 60


class HoldingComm:
    """A rank of two that gets its own data back. What is received is held by collectives until they are over, by
    messages also afterwards, as gloo's do."""

    size = 2
    rank = 0

    def __init__(self) -> None:
        self.received: list[Callable[[], Tensor | None]] = []
        self.errors: dict[int, RuntimeError] = {}
        self._arrivals: dict[int, Callable[[], object]] = {}

    def all_to_all(self, received: Tensor, sent: Tensor) -> PendingWork:
        self.received.append(weakref.ref(received))
        return self._start(lambda: received.copy_(sent), (received, sent))

    def exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor], *, sends_first: bool) -> PendingWork:
        self.received.append(lambda: received[1])
        return self._start(lambda: received[1].copy_(sent[1]), (*received, *sent))

    def _start(self, arrive: Callable[[], object], held: tuple[Tensor, ...]) -> PendingWork:
        number = len(self._arrivals)
        self._arrivals[number] = arrive

        def wait() -> None:
            if number in self.errors:
                raise self.errors[number]
            self.arrive(number)

        return PendingWork(wait, held)

    def arrive(self, number: int) -> None:
        """What the collective brings is there now."""
        arrive, self._arrivals[number] = self._arrivals[number], lambda: None
        arrive()

    def alive(self) -> list[bool]:
        """Of each temporary, whether its memory is there."""
        gc.collect()
        found = (tensor() for tensor in self.received)
        return [tensor is not None and tensor.untyped_storage().nbytes() > 0 for tensor in found]


def four_buckets() -> list[Tensor]:
    return [torch.full((8,), float(number)) for number in range(4)]


Transport = type[AllToAllReduceScatter] | type[ExchangeReduceScatter]


@pytest.mark.parametrize("kind", [AllToAllReduceScatter, ExchangeReduceScatter])
def test_one_temporary_is_alive_on_a_fast_link(kind: Transport) -> None:
    """And none when all is reduced, although works and transport are still there."""
    comm = HoldingComm()
    transport = kind(comm)  # type: ignore[arg-type]
    buckets = four_buckets()
    works = []
    for full in buckets:
        works.append(transport(full[:4], full, False))
        assert sum(comm.alive()) == 1
        comm.arrive(len(works) - 1)
    for work in works:
        work.wait()
        work.wait()
    assert not any(comm.alive())
    assert [full[0].item() for full in buckets] == [0.0, 2.0, 4.0, 6.0]


def test_at_most_two_temporaries_on_a_slow_link() -> None:
    """The host waits for the oldest only, and for none that need not make room."""
    comm = HoldingComm()
    transport = ExchangeReduceScatter(comm)  # type: ignore[arg-type]
    buckets = four_buckets()
    works = [transport(full[:4], full, False) for full in buckets[:2]]
    assert comm.alive() == [True, True]
    works.append(transport(buckets[2][:4], buckets[2], False))
    assert comm.alive() == [False, True, True]
    assert [full[0].item() for full in buckets] == [0.0, 1.0, 2.0, 3.0]
    comm.arrive(2)
    works[2].wait()
    assert comm.alive() == [False, True, False]
    works.append(transport(buckets[3][:4], buckets[3], False))
    for work in works:
        work.wait()
    assert not any(comm.alive())
    assert [full[0].item() for full in buckets] == [0.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_looks_like_nothing_received(dtype: torch.dtype) -> None:
    """NaN in the place of the mark: it is summed late, and is the result."""
    comm = HoldingComm()
    transport = ExchangeReduceScatter(comm)  # type: ignore[arg-type]
    full = torch.ones(8, dtype=dtype)
    full[7:].view(torch.uint8).fill_(0xFF)
    work = transport(full[:4], full, False)
    comm.arrive(0)
    # Nothing at all is no less.
    transport(torch.zeros(0), torch.zeros(0), False).wait()
    assert full[:4].tolist() == [1.0] * 4
    work.wait()
    assert full[:3].tolist() == [2.0] * 3
    assert full[3].isnan()


@pytest.mark.parametrize("kind", [AllToAllReduceScatter, ExchangeReduceScatter])
def test_a_failure_reaches_the_one_who_waits_for_it(kind: Transport) -> None:
    """Not the launch that comes after it, which carries another bucket."""
    comm = HoldingComm()
    comm.errors[0] = RuntimeError("peer is gone")
    transport = kind(comm)  # type: ignore[arg-type]
    buckets = four_buckets()
    first = transport(buckets[0][:4], buckets[0], False)
    comm.arrive(0)
    transport(buckets[1][:4], buckets[1], False).wait()
    # Known from now on; waiting for it would take as long again.
    comm.errors.clear()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="peer is gone"):
            first.wait()


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", range(4))
def test_sum_is_in_rank_order(rank: int, dtype: torch.dtype, average: bool) -> None:
    """In fp32 bitwise that of adding from the first rank on, whichever rank adds."""
    torch.manual_seed(rank)
    addends = torch.randn(4, 64).to(dtype)
    comm = mock.Mock(size=4, rank=rank)

    def exchange(received: Sequence[Tensor], sent: Sequence[Tensor], *, sends_first: bool) -> PendingWork:
        for other in {0, 1, 2, 3} - {rank}:
            received[other].copy_(addends[other])
        return PendingWork(lambda: None, ())

    comm.exchange = exchange
    full = torch.zeros(4, 64, dtype=dtype)
    full[rank] = addends[rank]
    ExchangeReduceScatter(comm)(full[rank], full.view(-1), average).wait()
    first, *rest = addends.float()
    for addend in rest:
        first = first + addend
    assert torch.equal(full[rank], (first / 4 if average else first).to(dtype))


def gathers(rank: int) -> list[list[float]]:
    """Equal slices, then slices of ``rank`` elements; two gathers in flight, waited for in the other order."""
    pair = make_comm_pair(dist.group.WORLD, name="test")
    size = pair.params.size
    equal, uneven = torch.zeros(2 * size), torch.zeros(sum(range(size)))
    slices = list(uneven.split(list(range(size))))
    own = equal.view(size, -1)[rank]
    own.fill_(rank + 1)
    slices[rank].fill_(rank + 1)
    first, second = pair.params.all_gather(equal, own), pair.params.all_gather_v(slices)
    # As a profile does; then a thread waits.
    assert second.work is not None
    future = second.work.get_future()
    for work in (second, first):
        work.wait()
        work.wait()
    assert future.done()
    pair.close()
    return [equal.tolist(), uneven.tolist()]


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 4])
def test_gathers_between_every_two_ranks(ranks: Callable[[int], RankGroup], world: int) -> None:
    """The first rank has nothing to send in the uneven one."""
    equal = [float(rank + 1) for rank in range(world) for _ in range(2)]
    uneven = [float(rank + 1) for rank in range(world) for _ in range(rank)]
    assert ranks(world).run(gathers) == [[equal, uneven]] * world


def accumulated(rank: int) -> list[bool]:
    """The same through ``attach``: this rank's gradients with the flag and in fp32, over two overlapped buckets."""
    owned = []
    for with_flag in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)).to(torch.bfloat16)
        config = mb.MegabufConfig(
            reduce_scatter_with_fp32_accumulation=with_flag,
            grad_reduce_in_fp32=not with_flag,
            bucket_size=1,
            calculate_per_token_loss=True,  # no factor, which would be rounded in one of them only
        )
        buf = mb.attach(model, config)
        for step in range(2):
            buf.zero_grad()
            torch.manual_seed(10 * step + rank)
            model(torch.randn(8, 16).bfloat16()).float().square().sum().backward()
            buf.finish_grad_sync()
        groups = buf.plan.groups
        owned.append([buf.buffers.reducer.grad_shard(group.buckets[0]).bfloat16() for group in groups])
        buf.detach()
    return [torch.equal(left, right) for left, right in zip(*owned)]


@pytest.mark.dist
def test_fp32_accumulation_equals_fp32_gradients_rounded(ranks: Callable[[int], RankGroup]) -> None:
    assert ranks(4).run(accumulated) == [[True, True]] * 4
