"""Tables and JSON of layout, buckets and boundaries."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch.fx import GraphModule, Node

from megabuf_fx.graph_nodes import source_line
from megabuf_fx.passes.graph_utils import written_param
from megabuf_fx.runtime.model_buffers import ModelBuffers
from megabuf_fx.runtime.ops import start_grad_sync
from megabuf_fx.runtime.plan import BucketPlan
from megabuf_fx.runtime.transports import AllToAllReduceScatter, ExchangeReduceScatter


@dataclass(frozen=True, slots=True)
class Boundary:
    """Where a graph starts the reduction of a bucket group."""

    handle: int
    group: int
    trigger: str
    """Name of the node whose write completes the group."""
    trigger_op: str
    source: str
    """Last line of the user's code that the trigger comes from, empty if unknown."""
    scaled: bool
    """Gradients were multiplied by the factor of their mean where they were written."""


def find_boundaries(gm: GraphModule) -> tuple[Boundary, ...]:
    """The launches of a final backward graph, in order, each with the node that triggers it."""
    found = []
    last_write: dict[tuple[int, int], Node] = {}
    previous: Node | None = None
    for node in gm.graph.nodes:
        param = written_param(node)
        if param is not None:
            last_write[param.key] = previous = node
        if node.target is start_grad_sync:
            # args: (main_grads, token, handle, group, scaled=False)
            key = (int(node.args[2]), int(node.args[3]))
            trigger = last_write.get(key) or previous or node
            found.append(
                Boundary(*key, trigger.name, str(trigger.target), source_line(trigger), node.args[4:] == (True,))
            )
    return tuple(found)


def bucket_table(plan: BucketPlan, boundaries: Mapping[int, Boundary]) -> str:
    """One row per bucket group. ``boundaries`` maps bucket group to where its reduction starts inside a compiled graph;
    groups without one are started by the host."""
    rows = []
    for index in range(len(plan.groups)):
        boundary = boundaries.get(index)
        trigger = f"{boundary.trigger} [{boundary.trigger_op}]" if boundary else "host, after backward"
        rows.append((*_group_cells(plan, index), trigger, _collective_of(plan, index)))
    headers = (*_GROUP_HEADERS, "trigger node", "collective")
    return str(tabulate(rows, headers=headers, tablefmt="simple", intfmt=","))


def planned_bucket_table(plan: BucketPlan) -> str:
    """One row per bucket group of a plan that nothing was compiled for. *shard* is what one rank owns, in elements;
    *bytes* is the size of the reduction's input."""
    rows = []
    for index, group in enumerate(plan.groups):
        numel = sum(bucket.numel for bucket in group.buckets)
        keys = [plan.layouts[bucket.buffer].key for bucket in group.buckets]
        nbytes = sum(bucket.numel * key.grad_dtype.itemsize for bucket, key in zip(group.buckets, keys))
        shard = numel // plan.dp_size_of(keys[0]) if plan.sharded else numel
        buffers = ", ".join(str(bucket.buffer) for bucket in group.buckets)
        rows.append((*_group_cells(plan, index), buffers, shard, nbytes, _collective_of(plan, index)))
    headers = (*_GROUP_HEADERS, "buffer", "shard", "bytes", "collective")
    return str(tabulate(rows, headers=headers, tablefmt="simple", intfmt=",", disable_numparse=[4]))


_GROUP_HEADERS = ("bucket", "parameters", "elements", "padding")


def _group_cells(plan: BucketPlan, index: int) -> tuple[int, str, int, int]:
    group = plan.groups[index]
    names = [plan.params[param].name for param in group.params]
    shown = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})"
    elements = sum(plan.params[param].numel for param in group.params)
    return index, shown, elements, sum(bucket.numel for bucket in group.buckets) - elements


def _collective_of(plan: BucketPlan, index: int) -> str:
    key = plan.layouts[plan.groups[index].buckets[0].buffer].key
    return f"{'reduce_scatter' if plan.sharded else 'all_reduce'} {_plain(key.grad_dtype)}"


def plan_as_json(plan: BucketPlan) -> dict[str, Any]:
    """Layout and bucket groups; positions in elements."""
    return {
        "digest": plan.digest,
        "dp_size": plan.dp_size,
        "expert_dp_size": plan.expert_dp_size,
        "sharded": plan.sharded,
        "params": [{name: _plain(value) for name, value in dataclasses.asdict(spec).items()} for spec in plan.params],
        "buffers": [
            {
                **{key: _plain(value) for key, value in dataclasses.asdict(layout.key).items()},
                "numel": layout.numel,
                "numel_unpadded": layout.numel_unpadded,
                "params": [
                    {
                        "name": plan.params[param].name,
                        "shape": list(plan.params[param].shape),
                        "start": slot.start,
                        "end": slot.end,
                        "bucket": slot.bucket,
                    }
                    for param, slot in zip(layout.params, layout.slots)
                ],
                "buckets": [list(bucket) for bucket in layout.buckets],
            }
            for layout in plan.layouts
        ],
        "groups": [
            [{"buffer": b.buffer, "bucket": b.index, "start": b.start, "end": b.end} for b in group.buckets]
            for group in plan.groups
        ],
    }


def transport_as_json(model: ModelBuffers) -> dict[str, Any]:
    """How buckets travel: when gathers start (inside ``step``, or with the next forward), and of each buffer whether
    gradients are scaled before they are sent and whether this rank sums what it receives itself."""
    channels = model.reducer.channels
    return {
        "overlap_param_gather": model.options.overlap_param_gather,
        "param_gather_prefetch": model.options.param_gather_prefetch,
        "scales": [channel.scaling.factor != 1 for channel in channels],
        "sums": [
            isinstance(channel.reduce_scatter, (AllToAllReduceScatter, ExchangeReduceScatter)) for channel in channels
        ],
    }


def boundaries_as_json(boundaries: Sequence[Boundary]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(boundary) for boundary in boundaries]


def _plain(value: object) -> object:
    """As JSON has it."""
    if isinstance(value, tuple):
        return list(value)
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
