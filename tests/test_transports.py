"""``runtime/transports.py``: the reduce-scatter with fp32 accumulation, alone and through ``attach``."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from helpers import RankGroup
from torch import Tensor, nn

import megabuf_fx as mb
from megabuf_fx.runtime.collectives import PendingWork, ProcessGroupComm
from megabuf_fx.runtime.transports import AllToAllReduceScatter, make_comm_pair


def reduce_scatters(rank: int) -> list[tuple[bool, bool, bool]]:
    """Of 20 random tensors: whether all-to-all equals fp32 and bf16 reduce-scatter, and left the other shards alone."""
    pair = make_comm_pair(dist.group.WORLD, name="test")
    comm = pair.grads
    assert isinstance(comm, ProcessGroupComm)
    found = []
    for seed in range(20):
        torch.manual_seed(100 * seed + rank)
        full = torch.randn(4 * 256).to(torch.bfloat16)

        def shard_of(tensor: Tensor) -> Tensor:
            return tensor.view(4, -1)[rank]

        wide, narrow, before = full.float(), full.clone(), full.clone()
        comm.reduce_scatter(shard_of(wide), wide, average=False).wait()
        comm.reduce_scatter(shard_of(narrow), narrow, average=False).wait()
        # The shard is a slice of what is sent.
        work = AllToAllReduceScatter(comm)(shard_of(full), full, False)
        work.wait()
        others = [part for part in range(4) if part != rank]
        found.append(
            (
                torch.equal(shard_of(full), shard_of(wide).bfloat16()),
                torch.equal(shard_of(full), shard_of(narrow)),
                torch.equal(full.view(4, -1)[others], before.view(4, -1)[others]),
            )
        )
    pair.close()
    return found


@pytest.mark.dist
def test_all_to_all_is_fp32_reduce_scatter_rounded_once(ranks: Callable[[int], RankGroup]) -> None:
    """Four ranks: with two, bf16 itself rounds once only."""
    for found in ranks(4).run(reduce_scatters):
        assert found == [(True, False, True)] * 20


class HoldingComm:
    """A rank of two that gets its own data back; a collective holds its tensors, as gloo's do."""

    size = 2

    def __init__(self) -> None:
        self.received: list[weakref.ref[Tensor]] = []

    def all_to_all(self, received: Tensor, sent: Tensor) -> PendingWork:
        received.copy_(sent)
        self.received.append(weakref.ref(received))
        return PendingWork(lambda: None, (received, sent))

    def alive(self) -> int:
        """Temporaries that something still holds."""
        return sum(reference() is not None for reference in self.received)


def test_one_temporary_is_alive() -> None:
    """And none when all is reduced, although works and transport are still there."""
    comm = HoldingComm()
    transport = AllToAllReduceScatter(comm)  # type: ignore[arg-type]
    buckets = [torch.full((8,), float(number)) for number in range(4)]
    works = []
    for full in buckets:
        works.append(transport(full[:4], full, False))
        assert comm.alive() == 1
    for work in works:
        work.wait()
        work.wait()
    assert comm.alive() == 0
    assert [full[0].item() for full in buckets] == [0.0, 2.0, 4.0, 6.0]


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
