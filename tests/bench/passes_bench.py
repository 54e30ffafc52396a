"""Host time that our passes and graph copies take per node, on graphs of growing size.

    python tests/bench/passes_bench.py                     # up to 100,000 nodes; a few minutes

The graphs are those that AOTAutograd makes of one transformer block of the example, repeated: block ``k`` reads what
block ``k - 1`` returns, every value has its fake tensor, every block brings parameters of its own. A bucket holds
``--blocks-per-bucket`` of them, so there are more collectives the longer the graph is. Counted is what one compiled
variant costs beyond its inner compiler, as ``GraphSource`` and ``TracedGraph`` do it:

* *copies*: of the traced graph when it comes, and before every compile;
* each pass, the verifier among them;
* *runner*: ``run_passes`` without the passes, that is lint after each of them and ``recompile``;
* *boundaries*: finding what triggers each launch in the final graph.

Without Python's garbage collector, as ``timeit`` does. A row's nodes are those of the traced graph.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.fx import Graph, GraphModule, Node

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from graph_builders import TABLES, Buffers, Traced, trace
from train_gpt import Block, GPTConfig

from megabuf_fx.dump import GraphDump
from megabuf_fx.passes.graph_utils import outputs, placeholders
from megabuf_fx.pipeline import Step, backward_passes, forward_passes, run_passes
from megabuf_fx.report import find_boundaries
from megabuf_fx.runtime.plan import Role
from megabuf_fx.variants import copy_graph

KINDS = ("forward", "backward overwrite", "backward accumulate", "backward flagged")
N_EMBD = 16


def trace_block(table: str) -> Traced:
    torch.manual_seed(0)
    block = Block(GPTConfig(context=8, layers=1, n_embd=N_EMBD, heads=2))
    return trace(block, torch.randn(2, 8, N_EMBD, requires_grad=True), table=table)


def chain(gm: GraphModule, count: int, *, entry: int, leaving: int, is_backward: bool) -> GraphModule:
    """``gm`` ``count`` times in a row: input number ``entry`` of a copy is output number ``leaving`` of the one before.

    All other inputs and outputs are there once for every copy. In a backward the first copy is that of the last block,
    and gradients leave in the order of the blocks.
    """
    graph = Graph()
    inputs, values = placeholders(gm.graph), outputs(gm.graph)
    copies: list[dict[Node, Node]] = [{} for _ in range(count)]
    for number, copied in enumerate(copies):
        for position, node in enumerate(inputs):
            if position != entry or number == 0:
                copied[node] = graph.placeholder(f"{node.name}_of_{number}")
                copied[node].meta = dict(node.meta)
    results: list[list[Any]] = []
    for number, copied in enumerate(copies):
        if number > 0:
            copied[inputs[entry]] = copies[number - 1][values[leaving]]
        for node in gm.graph.nodes:
            if node.op not in ("placeholder", "output"):
                copied[node] = graph.node_copy(node, copied.__getitem__)
        kept = [value for position, value in enumerate(values) if position != leaving or number == count - 1]
        results.append([copied[value] if isinstance(value, Node) else value for value in kept])
    graph.output(tuple(itertools.chain(*(reversed(results) if is_backward else results))))
    return GraphModule(nn.Module(), graph)


def repeat(block: Traced, count: int) -> Traced:
    """The graphs of ``count`` such blocks in a row."""
    (hidden,) = (position for position, index in enumerate(block.inputs) if index is None)
    tangent = len(placeholders(block.backward.graph)) - 1
    per_block, own = len(block.specs), [index for index in block.inputs if index is not None]
    backward = chain(block.backward, count, entry=tangent, leaving=hidden, is_backward=True)
    return dataclasses.replace(
        block,
        specs=tuple(
            dataclasses.replace(spec, name=f"blocks.{number}.{spec.name}")
            for number in range(count)
            for spec in block.specs
        ),
        # Hidden states are an input of the first block only.
        inputs=(*block.inputs, *(index + number * per_block for number in range(1, count) for index in own)),
        forward=chain(block.forward, count, entry=hidden, leaving=0, is_backward=False),
        backward=backward,
        backward_results=tuple(outputs(backward.graph)),
    )


def steps_for(kind: str, buffers: Buffers) -> list[Step]:
    if kind == "forward":
        return forward_passes(buffers.plan, extras=(buffers.token_input,))
    write: Any = kind.removeprefix("backward ")
    role = Role(write, () if write == "flagged" else buffers.launches)
    extras = buffers.extras(with_token=bool(role.launches), with_flag=write == "flagged")
    return backward_passes(buffers.gradients, role=role, extras=extras, fuse=True)


def measure(kind: str, traced: Traced, buffers: Buffers) -> dict[str, float]:
    """Seconds of one variant, by part."""
    source = traced.forward if kind == "forward" else traced.backward
    seconds: dict[str, float] = {}

    def timed(name: str, function: Callable[[GraphModule], Any]) -> Callable[[GraphModule], Any]:
        def call(gm: GraphModule) -> Any:
            begin = time.process_time()
            result = function(gm)
            seconds[name] = seconds.get(name, 0.0) + time.process_time() - begin
            return result

        return call

    steps: list[Step] = [(contract, timed(contract.name, run)) for contract, run in steps_for(kind, buffers)]
    copy = timed("copies", copy_graph)
    gc.collect()
    gc.disable()
    kept = copy(source)
    gm = copy(kept)
    before = sum(seconds.values())
    begin = time.process_time()
    run_passes(gm, steps, dump=GraphDump())
    seconds["runner"] = time.process_time() - begin - (sum(seconds.values()) - before)
    timed("boundaries", find_boundaries)(gm)
    gc.enable()
    return seconds


def table(found: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """Microseconds per node: the sum as median [least most] of the rounds, of each part the median."""
    rows = []
    for kind, sizes in found.items():
        for nodes, rounds in sizes.items():
            each = [{name: 1e6 * value / int(nodes) for name, value in sample.items()} for sample in rounds]
            sums = [sum(sample.values()) for sample in each]
            parts = {name: statistics.median(sample[name] for sample in each) for name in each[0]}
            spread = f"{statistics.median(sums):.1f} [{min(sums):.1f} {max(sums):.1f}]"
            rows.append((kind, f"{int(nodes):,}", spread, ", ".join(f"{n} {v:.1f}" for n, v in parts.items())))
    headers = ("graph", "nodes", "us per node", "of which")
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=5)
    add("--nodes", type=int, nargs="+", default=[1_000, 10_000, 100_000], help="nodes of a backward, about")
    add("--kind", choices=KINDS, help="only this one")
    add("--table", choices=TABLES, default="inductor", help="decompositions with which the block is traced")
    add("--blocks-per-bucket", type=int, default=4)
    add("--json", type=Path, help="write every sample here, in seconds")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    block = trace_block(args.table)
    numel = sum(spec.numel for spec in block.specs)
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    cases = []
    for nodes in args.nodes:
        traced = repeat(block, max(1, nodes // len(block.backward.graph.nodes)))
        cases.append((traced, Buffers(traced, bucket_size=args.blocks_per_bucket * numel)))
    gc.freeze()  # the graphs stay, and collecting between the timings takes as long as they are large
    for _ in range(args.rounds):
        for traced, buffers in cases:
            for kind in [args.kind] if args.kind else KINDS:
                nodes = len((traced.forward if kind == "forward" else traced.backward).graph.nodes)
                found.setdefault(kind, {}).setdefault(str(nodes), []).append(measure(kind, traced, buffers))
    print(table(found))
    if args.json is not None:
        args.json.write_text(json.dumps({"torch": torch.__version__, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
