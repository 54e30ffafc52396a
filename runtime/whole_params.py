"""Gathering whole parameters through the gradients' storage: Megatron's layer-wise path without shards.

Gradients are all-reduced, each rank updates the parameters that it owns, and a gather brings them to the others. What
it receives lies in the bucket's ``grad_data``, viewed in the parameters' dtype, rank after rank:

    grad_data of a bucket   | rank 0's: p0 p7 | rank 1's: p1 | rank 2's: p2 p6 |   ...   |

The slices have different sizes, so the collective is one broadcast per rank. As with MXFP8, gradients are gone once a
gather starts, so the same state machine watches the order (``shared_storage.py``), and what it filled is zeroed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from megabuf_fx.runtime.collectives import Comm, PendingWork
from megabuf_fx.runtime.layout import BufferLayout


class WholeParams:
    """The parameters of one buffer; ``owners`` maps each to the rank that owns it."""

    def __init__(
        self,
        layout: BufferLayout,
        params: Mapping[int, nn.Parameter],
        owners: Mapping[int, int],
        grad_data: Tensor,
        *,
        size: int,
        rank: int,
    ) -> None:
        self._params = params
        self._owners = owners
        self._rank = rank
        dtype = layout.key.param_dtype
        self.received = [
            grad_data[start:end].view(dtype)[: sum(params[p].numel() for p in members)]
            for (start, end), members in zip(layout.buckets, _by_bucket(layout))
        ]
        """Of each bucket, where a gather puts all of its parameters."""
        self.slices: list[list[Tensor]] = []
        """Of each bucket, the part that each rank sends; empty where it owns nothing."""
        self.views: list[dict[int, Tensor]] = []
        """Of each bucket, where each parameter lies in what is received, in its shape and memory format."""
        for members, received in zip(_by_bucket(layout), self.received):
            position, views, slices = 0, {}, []
            for owner in range(size):
                begin = position
                for index in members:
                    if owners[index] == owner:
                        param = params[index]
                        flat = received[position : position + param.numel()]
                        views[index] = flat.as_strided(param.shape, torch.empty_like(param, device="meta").stride())
                        position += param.numel()
                slices.append(received[begin:position])
            self.views.append(views)
            self.slices.append(slices)

    def stage(self, bucket: int) -> None:
        """Put this rank's parameters where they are sent from."""
        for index, view in self.views[bucket].items():
            if self._owners[index] == self._rank:
                view.copy_(self._params[index].data)

    def all_gather(self, bucket: int, comm: Comm) -> PendingWork:
        return comm.all_gather_v(self.slices[bucket])

    def copy_out(self, bucket: int) -> None:
        """Take over what other ranks have sent."""
        for index, view in self.views[bucket].items():
            if self._owners[index] != self._rank:
                # Not through the parameter: that would count as a change by the user (its version).
                self._params[index].data.copy_(view)

    def poison(self, bucket: int) -> None:
        """Make NaN of what other ranks own."""
        for index in self.views[bucket]:
            if self._owners[index] != self._rank:
                self._params[index].data.fill_(torch.nan)


def _by_bucket(layout: BufferLayout) -> list[Sequence[int]]:
    members: list[list[int]] = [[] for _ in layout.buckets]
    for index, slot in zip(layout.params, layout.slots):
        members[slot.bucket].append(index)
    return list(members)
