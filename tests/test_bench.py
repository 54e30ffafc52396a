"""The benchmarks run; their figures are for a quiet machine and a person to judge."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent / "bench"


def test_plan_bench(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "plan_bench.py"), "--rounds", "1", "--case", "plan gpt2 --dp 8"]
    result = subprocess.run(
        [*command, "--json", str(tmp_path / "found.json")], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    (samples,) = json.loads((tmp_path / "found.json").read_text()).values()
    assert len(samples) == 1
    assert "megabuf plan gpt2 --dp 8" in result.stdout


@pytest.mark.dist
def test_checkpoint_bench(tmp_path: Path) -> None:
    options = ["--rounds", "1", "--layers", "1", "--n-embd", "32", "--heads", "2", "--context", "16"]
    command = [sys.executable, str(BENCH / "checkpoint_bench.py"), *options, "--folder", str(tmp_path)]
    result = subprocess.run(
        [*command, "--json", str(tmp_path / "found.json")], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "found.json").read_text())["summary"]
    assert len(summary) == 3
    for name, entry in summary.items():
        assert name in result.stdout
        # Weights and two moments, in fp32; of a small model the headers count, too.
        assert 12 <= entry["bytes_per_parameter"] < 30
        assert all(entry[key][0] > 0 for key in ("save", "load", "async"))
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
