"""Writing what was compiled: MEGABUF_DUMP=dir or ``MegabufConfig(dump_dir=...)``.

<dir>/rank0/graph0_backward_overwrite_sync/
    00_traced.py  01_add_buffer_inputs.py  ...   the readable graph after each pass
    plan.json                                    layout, bucket groups, boundaries and their trigger nodes
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

FORMAT_VERSION = 2
"""2: ``models`` lists the parameters in definition order."""


class GraphDump:
    """Receives the graph after each pass; this one writes nothing."""

    def write_graph(self, gm: GraphModule, name: str) -> None:
        return None

    def write_plan(self, plan: dict[str, Any]) -> None:
        return None


class DirectoryDump(GraphDump):
    """One directory for one compiled variant of one graph."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._count = 0
        directory.mkdir(parents=True, exist_ok=True)
        for stale in directory.glob("[0-9][0-9]_*.py"):
            stale.unlink()

    def write_graph(self, gm: GraphModule, name: str) -> None:
        text = gm.print_readable(print_output=False, include_stride=True, include_device=True)
        (self.directory / f"{self._count:02d}_{name}.py").write_text(text + "\n")
        self._count += 1

    def write_plan(self, plan: dict[str, Any]) -> None:
        text = json.dumps({"format_version": FORMAT_VERSION, **plan}, indent=1)
        (self.directory / "plan.json").write_text(text + "\n")


def make_dump(dump_dir: str | None, *, rank: int, graph: int, variant: str) -> GraphDump:
    """The dump of variant ``variant`` of graph number ``graph``; silent without a directory."""
    if dump_dir is None:
        return GraphDump()
    return DirectoryDump(Path(dump_dir) / f"rank{rank}" / f"graph{graph}_{variant}")
