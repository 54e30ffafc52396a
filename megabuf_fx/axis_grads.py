"""Gradients of parameters that ranks of other axes have copies of, and their sums over these ranks.

[Note: what a rank owns of a copy]
With shards a reduce-scatter leaves each data-parallel rank one part of every bucket; the rest of ``main_grad`` is this
rank's own unreduced gradient. Copies are summed over ranks of equal data-parallel position, so these must own the same
elements of the parameter, or the sum adds what is reduced to what is not. Megatron-LM sums all of ``main_grad`` and
relies on that without looking. It holds

* between tensor-parallel ranks with equal shapes, whose layouts are equal, and
* between pipeline stages for a ``shared_embedding``, which is alone in its bucket, so that every rank's part of it
  depends on its size, the number of ranks and the padding only.

It does not hold between stages for any other parameter (its bucket has other neighbours), nor for tensor-parallel ranks
whose layers differ in size. Here the ranks compare what they own, once, and a difference is an error on all of them.
Only the owned part is sent: a share of ``1 / dp`` of Megatron's traffic.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megabuf_fx.model_parallel import ModelParallelGroups
from megabuf_fx.runtime.flags import AxisFlags, axis_flags
from megabuf_fx.runtime.model_buffers import ModelBuffers
from megabuf_fx.runtime.shards import shard_bounds


class AxisGrad:
    """The gradient of one parameter, as far as this rank has it reduced.

    ``buffers`` is None for a parameter of no attached model, whose gradient is ``.grad``. ``is_whole``: every
    data-parallel rank has all of it.
    """

    def __init__(self, name: str, param: nn.Parameter, buffers: ModelBuffers | None, *, force_all_reduce: bool) -> None:
        self.name = name
        self.param = param
        self.flags: AxisFlags = axis_flags(param)
        self.is_used = True
        self._buffers = buffers
        self._index = -1
        if buffers is not None:
            index = buffers.index_of(param)
            assert index is not None
            self._index = index
            self._number, self._slot = buffers.locations[index]
            self._comm = buffers.reducer.channels[self._number].comm
            self._bounds = buffers.plan.layouts[self._number].buckets[self._slot.bucket]
            reducer, group = buffers.reducer, buffers.group_of[index]
            is_forced = not reducer.is_started(group) and (force_all_reduce or reducer.force_all_reduce)
            self.is_whole = not buffers.plan.sharded or reducer.is_complete[group] or is_forced
        else:
            self.is_whole = True

    @property
    def owned(self) -> str:
        """Which elements each data-parallel rank owns, and which of these ranks this is."""
        if self.is_whole:
            return "everything"
        slot, size = self._slot, self._comm.size
        if slot.start == slot.end:
            return "nothing"
        shard = (self._bounds[1] - self._bounds[0]) // size
        first, last = ((at - self._bounds[0]) // shard for at in (slot.start, slot.end - 1))
        parts = []
        for rank in range(first, last + 1):
            start, end = shard_bounds(self._bounds, size, rank)
            start, end = max(start, slot.start) - slot.start, min(end, slot.end) - slot.start
            parts.append(f"[{start}, {end}) on rank {rank}")
        return f"{', '.join(parts)} of {size}; this is rank {self._comm.rank}"

    def part(self) -> Tensor:
        """What this rank has reduced, flat: a view, or zeros for a gradient that is None."""
        if self._buffers is None:
            return (torch.zeros_like(self.param) if self.param.grad is None else self.param.grad).flatten()
        start, end = self._slot.start, self._slot.end
        if not self.is_whole:
            low, high = shard_bounds(self._bounds, self._comm.size, self._comm.rank)
            start, end = max(start, low), min(end, high)
        return self._buffers.buffers[self._number].grad_data[start : max(start, end)]

    def set(self, part: Tensor, *, is_used: bool) -> None:
        """Replace what ``part`` returned; ``is_used``: some copy has a gradient."""
        if self._buffers is None:
            if is_used and self.param.grad is None:
                self.param.grad = torch.zeros_like(self.param)
            if is_used and self.param.grad is not None:
                self.param.grad.copy_(part.view(self.param.shape))
            return
        self.part().copy_(part)
        self._buffers.buffers[self._number].restore_promoted([self._index])
        if is_used and not self.is_used:
            self._buffers.note_used(self._index)
            self.is_used = True

    def note_usage(self, used: Mapping[int, Sequence[bool]]) -> None:
        """After the reduction: whether some data-parallel rank has a gradient. ``used`` has the answers of
        ``used_params``, by id of the buffers."""
        self.is_used = self.param.grad is not None if self._buffers is None else used[id(self._buffers)][self._index]

    @property
    def is_captured(self) -> bool:
        return self._buffers is not None and self._buffers.capture.is_active


class AxisSum(NamedTuple):
    """A sum of copies over the ranks of one group."""

    what: str
    group: str
    """Field of ``ModelParallelGroups``."""
    copies: Sequence[Sequence[AxisGrad]]
    """For each parameter all copies that this rank has: several where its virtual stages have one each."""
    is_average: bool = False
    has_names: bool = True
    """Copies have the same name on all ranks."""

    @property
    def names(self) -> str:
        return ", ".join(f"'{same[0].name}'" for same in self.copies)

    def describe(self) -> list[tuple[str, str]]:
        """Of each copy what it is and what is owned of it; equal on all ranks of the group."""
        return [
            (
                f"{f'{grad.name!r} ' if self.has_names else ''}{tuple(grad.param.shape)} {grad.param.stride()}",
                grad.owned,
            )
            for same in self.copies
            for grad in same[:1]
        ]


def find_cut_differently(sums: Sequence[AxisSum]) -> str | None:
    """What is wrong with the copies of virtual stages, which are summed on this rank."""
    for axis_sum in sums:
        for first, *others in axis_sum.copies:
            for other in others:
                if (first.param.shape, first.owned) != (other.param.shape, other.owned):
                    return _cut_differently(axis_sum.what, first.name, "in one model chunk", first.owned, other.owned)
    return None


def first_difference(sums: Sequence[AxisSum], group: str, every: Sequence[list[list[tuple[str, str]]]]) -> str | None:
    """What is wrong, from what ``describe`` returned on every rank of ``group``."""
    for number, axis_sum in enumerate(sums):
        for rank, lists in enumerate(every):
            mine, other = every[0][number], lists[number]
            shapes = [[what for what, _ in entries] for entries in (mine, other)]
            if shapes[0] != shapes[1]:
                position = next((i for i, (a, b) in enumerate(zip(*shapes)) if a != b), min(map(len, shapes)))
                have = [values[position] if position < len(values) else "nothing" for values in shapes]
                return (
                    f"{axis_sum.what} are summed over {group}, but where rank 0 of it has {have[0]}, rank {rank} has "
                    f"{have[1]}; set the attribute alike on all copies, and freeze all of them or none"
                )
            for (what, owned), (_, other_owned) in zip(mine, other):
                if owned != other_owned:
                    return _cut_differently(axis_sum.what, what, f"on rank 0 of {group}", owned, other_owned)
    return None


def _cut_differently(what: str, name: str, where: str, one: str, another: str) -> str:
    return (
        f"{what}: data-parallel ranks own other parts of {name} {where} ({one}) than elsewhere ({another}), because it "
        "lies elsewhere in its bucket, so what is reduced would be added to what is not. Give it a bucket of its own "
        "(param.shared_embedding = True on every copy, before attach), or make gradients complete "
        "(buf.force_all_reduce = True before the backward)"
    )


def reduce_copies(axis_sum: AxisSum, groups: ModelParallelGroups) -> None:
    """Sum, in one flattened collective, and give every copy the result. A last element for each parameter tells whether
    some copy has a gradient: without it stages could disagree on what the optimizer leaves alone."""
    if not axis_sum.copies:
        return
    totals = [functools.reduce(torch.add, [grad.part() for grad in same]) for same in axis_sum.copies]
    used = [any(grad.is_used for grad in same) for same in axis_sum.copies]
    flags = totals[0].new_ones(len(used)) if all(used) else totals[0].new_tensor([float(flag) for flag in used])
    flat = groups.reduce(axis_sum.group, torch.cat([*totals, flags]), axis_sum.what)
    *parts, flags = flat.split([*(total.numel() for total in totals), len(used)])
    if not all(used) and not any(grad.is_captured for same in axis_sum.copies for grad in same):
        used = [flag > 0 for flag in flags.tolist()]
    if axis_sum.is_average:
        torch._foreach_div_(parts, groups.size(axis_sum.group))
    for same, part, is_used in zip(axis_sum.copies, parts, used):
        for grad in same:
            grad.set(part, is_used=is_used)
