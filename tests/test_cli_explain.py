"""``megabuf explain``: golden outputs, what is exposed and why, comparing dumps, errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_dumps import STEPS, check_golden, megabuf, write_dump
from helpers import fresh_compiler
from torch import nn

import megabuf_fx as mb
from megabuf_fx.cli.dump_files import read_dump

Dumps = Callable[[str], Path]


@pytest.mark.parametrize("name", STEPS)
def test_golden(cli_dump: Dumps, name: str, write_results: bool) -> None:
    outcome = megabuf("explain", cli_dump(name))
    assert (outcome.code, outcome.err) == (0, "")
    if not torch.__version__.startswith("2.13."):
        pytest.skip("golden outputs are of torch 2.13")
    check_golden(f"{name}.explain.txt", outcome.out, write=write_results)


def exposed(text: str) -> dict[str, float]:
    """Exposed microseconds by "bucket collective", read from the table of the step."""
    head, _, *rows = text.split("ONE STEP", 1)[1].splitlines()[2:]
    column = head.index("exposed")
    found = {}
    for row in rows:
        if row.startswith("predicted:"):
            break
        bucket, collective = row.split()[:2]
        found[f"{bucket} {collective}"] = float(row[column:].split()[0])
    return found


def test_a_faster_link_exposes_less(cli_dump: Dumps) -> None:
    slow, fast, instant = (
        exposed(megabuf("explain", cli_dump("train_gpt"), "--gbps", gbps, "--alpha-us", alpha).out)
        for gbps, alpha in ((10, 10), (400, 1), (1e9, 0))
    )
    assert sum(slow.values()) > sum(fast.values()) > 0
    assert set(instant.values()) == {0.0}


def test_what_is_launched_last_is_exposed(cli_dump: Dumps) -> None:
    """Nothing is left to compute when the last gradient is written: its bucket is never hidden."""
    out = megabuf("explain", cli_dump("train_gpt")).out
    reductions = {key: value for key, value in exposed(out).items() if key.endswith("reduce_scatter")}
    assert next(iter(reductions)).startswith("0 ")
    assert list(reductions.values())[-1] > 0
    assert "nothing to compute after its launch" in out
    assert "ONE STEP of 2 micro-batches" in out, "the dump has a backward that accumulates"


def test_passes_are_shown_as_diffs(cli_dump: Dumps) -> None:
    out = megabuf("explain", cli_dump("train_gpt"), "--passes").out
    assert "--- scale_main_grads\n+++ insert_grad_sync\n" in out
    assert "+    start_grad_sync_default" in out.replace("        ", "    ")


def test_diff_of_equal_dumps(cli_dump: Dumps) -> None:
    outcome = megabuf("explain", cli_dump("gpt2"), "--diff", cli_dump("gpt2"))
    assert (outcome.code, outcome.out) == (0, "same layout, same schedule\n")


def test_models_are_numbered_within_a_dump(cli_dump: Dumps, tmp_path: Path) -> None:
    """What else the process has attached makes no difference."""
    others = [mb.attach(nn.Linear(3, 3), mb.MegabufConfig(inner_compiler="aot_eager")) for _ in range(2)]
    later = write_dump("llama", tmp_path)
    (plan,) = later.glob("rank0/*_forward/plan.json")
    assert list(json.loads(plan.read_text())["models"]) != ["0"]
    outcome = megabuf("explain", later, "--diff", cli_dump("llama"))
    assert (outcome.code, outcome.out) == (0, "same layout, same schedule\n")
    assert megabuf("explain", later).out == megabuf("explain", cli_dump("llama")).out
    for other in others:
        other.detach()


@pytest.mark.parametrize(
    ("config", "nbytes"),
    [
        ({}, 2),
        ({"fp8_param_gather": True}, 1),
        ({"fp8_param_gather": True, "fp8_recipe": "mxfp8"}, 2),
        ({"fp4_param_gather": True}, 0.5),
    ],
)
def test_gathers_of_quantized_weights(tmp_path: Path, config: dict[str, Any], nbytes: float) -> None:
    """What is predicted to travel is what does."""
    model = nn.Linear(64, 64, bias=False).bfloat16()
    handle = mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager", dump_dir=str(tmp_path), **config))
    torch.compile(model, backend="megabuf")(torch.zeros(2, 64, dtype=torch.bfloat16)).sum().backward()
    (group,) = read_dump(tmp_path).groups.values()
    assert group.param_nbytes == nbytes * 64 * 64
    (buffer,) = handle.buffers.buffers
    assert buffer.param_data is not None
    assert group.param_nbytes == buffer.param_data.nbytes
    handle.detach()
    fresh_compiler()


def copy_of(path: Path, destination: Path) -> Path:
    shutil.copytree(path, destination)
    return destination


def test_diff_sees_a_launch_that_moved(cli_dump: Dumps, tmp_path: Path) -> None:
    other = copy_of(cli_dump("gpt2"), tmp_path / "other")
    (path,) = other.glob("rank0/graph0_backward_overwrite_sync/graph.json")
    content = json.loads(path.read_text())
    nodes = content["nodes"]
    place = next(place for place, node in enumerate(nodes) if node["kind"] == "launch")
    later = next(i for i in range(place + 1, len(nodes)) if nodes[i]["kind"] == "compute")
    nodes.insert(later, nodes.pop(place))
    path.write_text(json.dumps(content))
    outcome = megabuf("explain", other, "--diff", cli_dump("gpt2"))
    assert outcome.code == 1
    first, second = outcome.out.splitlines()
    assert first.startswith("! graph 0 backward_overwrite_sync: launch of bucket 0.0 after ")
    assert second.startswith("! graph 0 backward_overwrite_sync: launch of bucket 0.1 after ")


def test_diff_sees_layout_and_variants(cli_dump: Dumps, tmp_path: Path) -> None:
    other = copy_of(cli_dump("llama"), tmp_path / "other")
    for path in other.glob("rank0/*/plan.json"):
        plan = json.loads(path.read_text())
        (model,) = plan["models"].values()
        model["dp_size"] = 4
        path.write_text(json.dumps(plan))
    shutil.rmtree(next(other.glob("rank0/*_forward")))
    outcome = megabuf("explain", other, "--diff", cli_dump("llama"))
    assert outcome.code == 1
    assert "sharded over 8 ranks" in outcome.out
    assert "sharded over 4 ranks" in outcome.out
    assert "- graph 0 forward: no longer there" in outcome.out


def damage(dump: Path, file: str, text: str) -> None:
    (path,) = dump.glob(f"rank0/graph0_forward/{file}")
    path.write_text(text)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("plan.json", '{"format_version": 1}', "has format version 1, this megabuf reads 3; write the dump again"),
        ("plan.json", "{", "is not JSON"),
        ("graph.json", '{"format_version": 3}', "lacks what it should have (KeyError('nodes'))"),
        ("graph.json", "[]", "has format version None"),
    ],
)
def test_damaged_files_are_errors_of_one_line(
    cli_dump: Dumps, tmp_path: Path, file: str, text: str, message: str
) -> None:
    other = copy_of(cli_dump("llama"), tmp_path / "other")
    damage(other, file, text)
    outcome = megabuf("explain", other)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err
    assert outcome.err.count("\n") == 1


def test_missing_directories_are_errors_of_one_line(cli_dump: Dumps, tmp_path: Path) -> None:
    for arguments, message in (
        ((tmp_path / "none",), "is not a directory; give the one that MEGABUF_DUMP named"),
        ((tmp_path,), "has no dump of rank 0 (no rank0/graph*_*); run the program with MEGABUF_DUMP set to it"),
        ((cli_dump("llama"), "--rank", 3), "has no dump of rank 3 (no rank3/graph*_*); it has rank0"),
        ((cli_dump("llama"), "--calibrate", cli_dump("llama")), "has no recorded times"),
    ):
        outcome = megabuf("explain", *arguments)
        assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
        assert message in outcome.err


@pytest.mark.parametrize("command", ["explain", "timeline", "graph"])
def test_help_has_examples(command: str) -> None:
    outcome = megabuf(command, "--help")
    assert outcome.code == 0
    assert f"  megabuf {command} DIR" in outcome.out
