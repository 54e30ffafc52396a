"""What torch's own tools show of us: TORCH_TRACE (tlparse) and TORCH_LOGS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from megabuf_fx.dump import FORMAT_VERSION

PROGRAM = """
import torch
import megabuf_fx as mb

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
handle = mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager"))
run = torch.compile(model, backend="megabuf")
with handle.no_sync():
    run(torch.ones(3, 4)).sum().backward()
run(torch.ones(3, 4)).sum().backward()
"""


def structured_log(path: Path) -> list[tuple[dict[str, Any], str]]:
    """Records and payloads: a line of JSON each, the payload in the indented lines that follow."""
    records: list[tuple[dict[str, Any], str]] = []
    for line in path.read_text().splitlines():
        if line.startswith("\t"):
            record, payload = records[-1]
            records[-1] = (record, payload + line[1:] + "\n")
        elif "{" in line:
            records.append((json.loads(line[line.index("{") :]), ""))
    return records


def test_artifacts_and_logger_names(tmp_path: Path) -> None:
    """Every variant, the one compiled in backward included, is filed under the graph that it belongs to."""
    environment = {**os.environ, "TORCH_TRACE": str(tmp_path), "TORCH_LOGS": "+megabuf_fx"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    for text in (
        "attached Sequential with MegabufConfig(",
        "compiled graph 0 forward: 0 launches",
        "compiled graph 0 backward_accumulate_sync: 1 launches",
    ):
        assert text in result.stderr
    (path,) = tmp_path.glob("*.log")
    found = {
        record["artifact"]["name"]: (record, payload)
        for record, payload in structured_log(path)
        if record.get("artifact", {}).get("name", "").startswith("megabuf_")
    }
    variants = ("forward", "backward_overwrite_local", "backward_accumulate_sync")
    assert set(found) == {f"megabuf_graph0_{name}{part}" for name in variants for part in ("", "_plan", "_nodes")}
    for record, payload in found.values():
        assert (record["frame_id"], record["frame_compile_id"]) == (0, 0)
        if record["artifact"]["encoding"] == "json":
            assert json.loads(payload)["format_version"] == FORMAT_VERSION
    assert "megabuf.start_grad_sync.default" in found["megabuf_graph0_backward_accumulate_sync"][1]
