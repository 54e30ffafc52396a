"""Block of ``check.py``: what Inductor's own CUDA graphs make of the compiled graphs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gpu_context import Context, compare, require
from gpu_training import STEPS, make_net
from torch import Tensor

import megabuf_fx as mb


class Recorded(NamedTuple):
    """What became of a run, and of Inductor's own CUDA graphs in it."""

    values: list[Tensor]
    """Losses and parameters."""
    groups: int
    parts: int
    """Of all graphs: what Inductor wants to record."""
    recordings: list[int]
    """After each step, in all."""
    skips: int


def reduce_overhead(context: Context) -> str:
    """``mode="reduce-overhead"``: Inductor records every part of every graph, cut at collectives and nowhere else."""
    expected = train_recorded(context, None)
    found = train_recorded(context, "reduce-overhead")
    groups, parts, recordings = found.groups, found.parts, found.recordings
    require(found.skips == 0, f"Inductor left {found.skips} graphs unrecorded")
    require(0 < parts <= recordings[-1], f"{recordings} recordings of {parts} parts")
    require(recordings[-1] == recordings[-3], f"still recording in the last steps: {recordings}")
    worst = compare(found.values, expected.values, "losses and parameters", bound=1e-5)
    # The first wait stands before any kernel, the last launch after all of them: as many parts as groups, each way.
    require(
        groups > 1 and parts == 2 * groups,
        f"forward and backward were cut into {parts} parts in all, expected {groups} each, one for each bucket group "
        f"(everything else is right: all recorded, within {worst:.0e} of the default mode)",
    )
    return f"{groups} bucket groups, {parts} parts, {recordings[-1]} recordings, 0 skips; {worst:.0e} from default mode"


def train_recorded(context: Context, mode: str | None) -> Recorded:
    from torch._dynamo.utils import counters
    from torch._inductor.cudagraph_trees import get_manager

    torch.compiler.reset()
    counters.clear()
    index = context.device.index or 0
    model = make_net(context)
    buf = mb.attach(model, mb.MegabufConfig(bucket_size=1000, overlap_param_gather=True))
    call = torch.compile(model, backend="megabuf", mode=mode)
    # SGD, because AdamW turns the rounding of a tiny gradient into an update of full size.
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.SGD, lr=2.0**-3, momentum=0.5)
    recordings, values = [], []
    addresses = [tensor.data_ptr() for tensor in buf.buffers.tensors().values()]
    for step in range(STEPS):
        loss = call(context.randn(32, 64, seed=step)).square().mean()
        loss.backward()
        values.append(loss.detach().clone())
        del loss
        optimizer.step()
        optimizer.zero_grad()
        recordings.append(count_recordings(get_manager(index, create_if_none_exists=False)))
    buf.sync_params()
    require([tensor.data_ptr() for tensor in buf.buffers.tensors().values()] == addresses, "buffers have moved")
    values += [param.detach().clone() for param in model.parameters()]
    # Now, because the manager goes with the last compiled function.
    manager = get_manager(index, create_if_none_exists=False)
    parts = len(manager.ids_to_funcs) if manager is not None else 0
    return Recorded(values, len(buf.plan.groups), parts, recordings, counters["inductor"]["cudagraph_skips"])


def count_recordings(manager: Any) -> int:
    """Nodes in the trees of recorded CUDA graphs."""
    if manager is None:
        return 0
    nodes = [node for roots in manager.roots.values() for node in roots]
    count = 0
    while nodes:
        node = nodes.pop()
        count += 1
        nodes += [child for children in node.children.values() for child in children]
    return count
