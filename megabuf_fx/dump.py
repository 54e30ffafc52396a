"""Writing what was compiled: MEGABUF_DUMP=dir or ``MegabufConfig(dump_dir=...)``.

<dir>/rank0/graph0_backward_overwrite_sync/
    00_traced.py  01_add_buffer_inputs.py  ...   the readable graph after each pass
    plan.json                                    layout, bucket groups, boundaries, and what each pass changed
    graph.json                                   every node of the final graph, see ``graph_nodes.py``

Under TORCH_TRACE the same plan and nodes go into torch's structured log, where tlparse shows them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

import megabuf_fx._compat as _compat
from megabuf_fx.graph_nodes import describe_nodes

FORMAT_VERSION = 3
"""2: parameters in definition order, ``graph.json``, recorded times, and in ``plan.json`` node counts by pass, inner
compiler and gathers."""


class GraphDump:
    """Receives the graph after each pass; this one writes nothing."""

    def write_graph(self, gm: GraphModule, name: str) -> None:
        return None

    def write_plan(self, plan: dict[str, Any]) -> None:
        return None

    def write_nodes(self, gm: GraphModule) -> None:
        return None


class DirectoryDump(GraphDump):
    """One directory for one compiled variant of one graph."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._passes: list[dict[str, Any]] = []
        directory.mkdir(parents=True, exist_ok=True)
        for stale in directory.glob("[0-9][0-9]_*.py"):
            stale.unlink()

    def write_graph(self, gm: GraphModule, name: str) -> None:
        text = gm.print_readable(print_output=False, include_stride=True, include_device=True)
        (self.directory / f"{len(self._passes):02d}_{name}.py").write_text(text + "\n")
        self._passes.append({"name": name, **count_nodes(gm)})

    def write_plan(self, plan: dict[str, Any]) -> None:
        text = json.dumps({"format_version": FORMAT_VERSION, **plan, "passes": self._passes}, indent=1)
        (self.directory / "plan.json").write_text(text + "\n")

    def write_nodes(self, gm: GraphModule) -> None:
        (self.directory / "graph.json").write_text(nodes_as_json(gm) + "\n")


def count_nodes(gm: GraphModule) -> dict[str, Any]:
    """How many nodes a graph has, and of each op how many calls."""
    ops = Counter(
        str(node.target) if _compat.is_op(node.target) else getattr(node.target, "__name__", str(node.target))
        for node in gm.graph.nodes
        if node.op == "call_function"
    )
    return {"nodes": len(gm.graph.nodes), "ops": dict(sorted(ops.items()))}


def nodes_as_json(gm: GraphModule) -> str:
    """Text of ``graph.json``: a line per node, so that two of them can be compared with ``diff``."""
    lines = ",\n".join(json.dumps(record) for record in describe_nodes(gm))
    return f'{{"format_version": {FORMAT_VERSION}, "nodes": [\n{lines}\n]}}'


def trace_variant(name: str, gm: GraphModule, plan: Callable[[], dict[str, Any]]) -> None:
    """Plan, nodes and readable graph as artifacts of torch's structured trace; nothing is computed without one."""
    for suffix, payload in (
        ("plan", lambda: json.dumps({"format_version": FORMAT_VERSION, **plan()}, indent=1)),
        ("nodes", lambda: nodes_as_json(gm)),
    ):
        _compat.trace_artifact(f"megabuf_{name}_{suffix}", encoding="json", payload=payload)
    _compat.trace_artifact(f"megabuf_{name}", encoding="string", payload=lambda: gm.print_readable(print_output=False))


def make_dump(dump_dir: str | None, *, rank: int, graph: int, variant: str) -> GraphDump:
    """The dump of variant ``variant`` of graph number ``graph``; silent without a directory."""
    if dump_dir is None:
        return GraphDump()
    return DirectoryDump(Path(dump_dir) / f"rank{rank}" / f"graph{graph}_{variant}")
