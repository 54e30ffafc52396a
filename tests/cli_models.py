"""Models that the tests of the command line name as ``cli_models:function``, and how they run it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from typer.testing import CliRunner

from megabuf_fx.cli.app import app

GOLDEN = Path(__file__).parent / "results" / "cli"


def tiny() -> nn.Module:
    """Sizes that need padding."""
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 5))


def experts() -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 32))
    for param in model[1].parameters():
        param.allreduce = False  # type: ignore[attr-defined]
    return model


def worked_example() -> nn.Module:
    """The weights of the worked example on quantized buffers: W0 [64, 64], W1 [96, 32], W2 [32, 32]."""
    return nn.Sequential(*(nn.Linear(columns, rows, bias=False) for rows, columns in ((64, 64), (96, 32), (32, 32))))


class Linears(nn.Module):
    """One weight that every format takes, one that blocks do not fit, one tied to an embedding, one of a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 64)
        self.first = nn.Linear(64, 96)
        self.odd = nn.Linear(96, 40)
        self.last = nn.modules.linear.NonDynamicallyQuantizableLinear(64, 64)
        self.head = nn.Linear(64, 32)
        self.head.weight = self.words.weight


def linears() -> nn.Module:
    return Linears()


def frozen() -> nn.Module:
    return tiny().requires_grad_(False)


def number() -> int:
    return 3


def broken() -> nn.Module:
    raise RuntimeError("first line\nsecond line")


def options_of(config: Mapping[str, Any]) -> str:
    """``config`` on the command line."""
    texts = []
    for name, value in config.items():
        option = name.replace("_", "-")
        texts.append(f"--{option}" if value is True else f"--no-{option}" if value is False else f"--{option} {value}")
    return " ".join(texts)


def run(*arguments: str) -> str:
    """What ``megabuf`` prints."""
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.stderr or repr(result.exception)
    return result.stdout


def ledger(arguments: str, column: str) -> dict[str, int]:
    """Bytes, or counts, by row."""
    rows = json.loads(run("ledger", *arguments.split(), "--json"))["rows"]
    return {row["name"]: row[column] for row in rows if column in row}


def error_of(*arguments: str) -> str:
    """The one line that ``megabuf`` complains in."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def check_golden(name: str, text: str, *, write: bool) -> None:
    """Compare with ``tests/results/cli/<name>.txt``, or write it."""
    path = GOLDEN / f"{name}.txt"
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text, f"{path.name} differs; after a look, rewrite it with pytest --write-results"
