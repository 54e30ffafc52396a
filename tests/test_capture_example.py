"""``examples/train_gpt.py --capture`` trains as it does without: the losses in its ``log.json`` are the same."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import train_gpt
from helpers import RankGroup, fresh_compiler

import megabuf_fx as mb
import megabuf_fx.capture

OPTIONS = "--steps 10 --inner aot_eager --layers 2 --n-embd 48 --heads 4 --context 16 --batch-size 4 --check-steps 0"


def run_example(rank: int, world: int, out: str) -> list[int]:
    """With and without ``--capture``, for 1 and 3 micro-batches; how many replays there were in each captured run."""
    made: list[mb.CapturedStep] = []

    def capture_step(*args: Any, **options: Any) -> mb.CapturedStep:
        made.append(megabuf_fx.capture.capture_step(*args, **options))
        return made[-1]

    for micro_batches in (1, 3):
        for capture in ("--no-capture", "--capture"):
            name = f"{micro_batches}{capture}"
            argv = [*OPTIONS.split(), capture, "--micro-batches", str(micro_batches), "--out", f"{out}/{name}"]
            with mock.patch.object(sys, "argv", ["train_gpt.py", *argv]):
                args = train_gpt.parse_args()
            # Validation is the same code with and without.
            few = mock.patch.object(train_gpt, "VALIDATION_WINDOWS", 16)
            with few, mock.patch.object(mb, "capture_step", capture_step):
                complaint = train_gpt.run(args, train_gpt.World(rank, world, torch.device("cpu")))
            assert complaint is None
            fresh_compiler()
    return [captured.replays for captured in made]


@pytest.mark.dist
@pytest.mark.parametrize("world", [1, 2])
def test_losses_are_equal(ranks: Callable[[int], RankGroup], world: int, tmp_path: Path) -> None:
    assert ranks(world).run(run_example, world, str(tmp_path), timeout=150) == [[10, 10]] * world
    for micro_batches in (1, 3):
        logs = [
            json.loads((tmp_path / f"{micro_batches}{capture}" / "log.json").read_text())
            for capture in ("--no-capture", "--capture")
        ]
        assert [log["args"]["capture"] for log in logs] == [False, True]
        assert len(logs[0]["losses"]) == 10
        assert logs[0]["losses"] == logs[1]["losses"]
        assert logs[0]["losses"][-1] < logs[0]["losses"][0] - 0.2
        assert logs[0]["validation"] == logs[1]["validation"]
