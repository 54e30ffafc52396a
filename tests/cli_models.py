"""Models that the tests of the command line name as ``cli_models:function``, and how they run it."""

from __future__ import annotations

from pathlib import Path

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


def frozen() -> nn.Module:
    return tiny().requires_grad_(False)


def number() -> int:
    return 3


def broken() -> nn.Module:
    raise RuntimeError("first line\nsecond line")


def run(*arguments: str) -> str:
    """What ``megabuf`` prints."""
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.stderr or repr(result.exception)
    return result.stdout


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
