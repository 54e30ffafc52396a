"""``megabuf timeline`` and ``megabuf graph``: golden outputs, and every bucket is in the picture."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from cli_dumps import STEPS, check_golden, megabuf

Dumps = Callable[[str], Path]


def timeline(dump: Path, directory: Path, *options: object) -> tuple[str, ElementTree.Element, list[dict[str, Any]]]:
    """The page, the picture and the events of the trace."""
    page, picture, trace = (directory / name for name in ("step.html", "step.svg", "step.json"))
    outcome = megabuf("timeline", dump, "-o", page, "--svg", picture, "--trace", trace, *options)
    assert (outcome.code, outcome.err) == (0, "")
    events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    return page.read_text(), ElementTree.fromstring(picture.read_text()), events


def slices(events: list[dict[str, Any]]) -> str:
    """A line per slice of the trace, in time order."""
    rows = ("compute", "link", "exposed")
    found = sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["tid"], e["ts"]))
    return "".join(f"{rows[e['tid']]:8} {e['ts']:9.2f} {e['dur']:8.2f}  {e['name']}\n" for e in found)


@pytest.mark.parametrize("name", STEPS)
def test_golden(cli_dump: Dumps, tmp_path: Path, name: str, write_results: bool) -> None:
    _, _, events = timeline(cli_dump(name), tmp_path)
    variant = "backward_accumulate_sync" if name == "train_gpt" else "backward_overwrite_sync"
    dot = megabuf("graph", cli_dump(name), "--dot", "-", "--variant", variant)
    assert dot.code == 0
    if not torch.__version__.startswith("2.13."):
        pytest.skip("golden outputs are of torch 2.13")
    check_golden(f"{name}.timeline.txt", slices(events), write=write_results)
    check_golden(f"{name}.dot", dot.out, write=write_results)
    if name == "train_gpt":
        check_golden("train_gpt.svg", (tmp_path / "step.svg").read_text(), write=write_results)


def marks(picture: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [mark for mark in picture.iter("{http://www.w3.org/2000/svg}g") if mark.get("data-kind") == kind]


@pytest.mark.parametrize("name", STEPS)
def test_every_bucket_has_its_bars(cli_dump: Dumps, tmp_path: Path, name: str) -> None:
    page, picture, events = timeline(cli_dump(name), tmp_path)
    (plan,) = {
        json.dumps([model["groups"] for model in json.loads(path.read_text())["models"].values()])
        for path in cli_dump(name).glob("rank0/*/plan.json")
    }
    (groups,) = json.loads(plan)
    buckets = {f"0.{group}" for group in range(len(groups))}
    for kind in ("link", "lane"):
        for direction in ("reduce", "gather"):
            found = [mark for mark in marks(picture, kind) if mark.get("data-direction") == direction]
            assert {mark.get("data-bucket") for mark in found} == buckets
            assert len(found) == len(buckets)
    assert all(mark.get("tabindex") == "0" and mark.get("aria-label") for mark in marks(picture, "lane"))
    assert {event["name"] for event in events if event["ph"] == "X" and event["tid"] == 1} == {
        f"{collective} bucket {bucket[2:]}" for bucket in buckets for collective in ("reduce_scatter", "all_gather")
    }
    # Self-contained: no other file is ever asked for.
    assert not re.search(r"""(src|href)\s*=\s*["']|url\((?!#)|@import""", page)
    assert json.loads(re.search(r'id="buckets">(.*?)</script>', page, re.DOTALL)[1]).keys() == buckets  # type: ignore[index]


def test_one_thing_at_a_time(cli_dump: Dumps, tmp_path: Path) -> None:
    """On no row do two slices overlap, and nobody computes while standing still."""
    _, _, events = timeline(cli_dump("train_gpt"), tmp_path, "--gbps", 5)
    for tids in ({0, 2}, {1}):
        row = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] in tids)
        assert all(end <= begin + 1e-6 for (_, end), (begin, _) in itertools.pairwise(row))


def test_graph_has_every_boundary(cli_dump: Dumps, tmp_path: Path) -> None:
    picture = tmp_path / "graph.svg"
    assert megabuf("graph", cli_dump("llama"), "--svg", picture).code == 0
    root = ElementTree.fromstring(picture.read_text())
    classes = [group.get("class") for group in root.iter("{http://www.w3.org/2000/svg}g")]
    launches = [group for group in classes if group == "launch"]
    assert len(launches) == len([group for group in classes if group == "wait"]) >= 4
    # Every launch is reached from what writes its bucket, every wait leads to what reads it.
    paths = [path.get("class") for path in root.iter("{http://www.w3.org/2000/svg}path")]
    assert paths.count("writes") >= len(launches)
    assert paths.count("reads") >= len(launches)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("timeline",), "nothing to write; give -o page.html, --svg picture.svg or --trace trace.json"),
        (("graph",), "nothing to write; give --dot graph.dot or --svg graph.svg"),
        (("graph", "--dot", "-", "--variant", "x"), "no variant 'x'; the dump has forward, backward_overwrite_sync"),
        (("timeline", "-o", "/nowhere/step.html"), "cannot write /nowhere/step.html: No such file or directory"),
    ],
)
def test_errors(cli_dump: Dumps, arguments: tuple[str, ...], message: str) -> None:
    outcome = megabuf(arguments[0], cli_dump("llama"), *arguments[1:])
    assert (outcome.code, outcome.out, outcome.err) == (2, "", f"megabuf {arguments[0]}: {message}\n")
