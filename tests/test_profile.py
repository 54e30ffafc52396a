"""``runtime/profile.py``: recorded times of steps, ranges for ``torch.profiler``, and nothing when nobody looks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_dumps import megabuf, renumber
from helpers import Mlp, RankGroup, batch, seeded
from torch.profiler import ProfilerActivity, profile

import megabuf_fx as mb
from megabuf_fx.runtime.collectives import PendingWork
from megabuf_fx.runtime.profile import KEPT_STEPS, StepRecorder, record_runs

STEPS = 24


def train(rank: int, options: dict[str, Any], steps: int = STEPS, micro_batches: int = 1) -> list[str]:
    """Steps of ``Mlp`` in two buckets (0: fc3, ln, fc2; 1: fc1); names of ranges in the last step."""
    model = seeded(Mlp)
    config = mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=600, overlap_param_gather=True, **options)
    handle = mb.attach(model, config)
    run = torch.compile(model, backend="megabuf")
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    def step(number: int) -> None:
        for micro in range(micro_batches - 1):
            with handle.no_sync():
                run(batch(number, micro, rank, 6, 13)).square().mean().backward()
        run(batch(number, micro_batches, rank, 6, 13)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(steps - 1):
        step(number)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(steps)
    handle.detach()
    return [event.name for event in profiler.events() if event.name.startswith("megabuf::")]


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.mark.dist
def test_times_of_two_ranks(ranks: Callable[[int], RankGroup], tmp_path: Path) -> None:
    """Every collective starts, finishes and is waited for, in this order, and the last 20 steps are kept."""
    ranks(2).run(train, {"dump_dir": str(tmp_path), "profile": True})
    for rank in range(2):
        (path,) = tmp_path.glob(f"rank{rank}/profile_model*.json")
        content = read(path)
        assert (content["format_version"], content["rank"]) == (3, rank)
        assert [step["step"] for step in content["steps"]] == list(range(STEPS - KEPT_STEPS, STEPS))
        assert not any(step["has_compile"] for step in content["steps"])
        for step in content["steps"]:
            kinds = [(span["kind"], span["name"], span["group"]) for span in step["spans"]]
            runs = [name.split("_", 1)[1] for kind, name, _ in kinds if kind == "run"]
            assert runs == ["forward", "backward_overwrite_sync"]
            for collective, awaited in (("all_gather", "gather"), ("reduce_scatter", "reduction")):
                for group in (0, 1):
                    launch = step["spans"][kinds.index(("launch", collective, group))]
                    wait = step["spans"][kinds.index(("wait", awaited, group))]
                    assert launch["begin_us"] <= launch["end_us"] <= wait["begin_us"] <= wait["end_us"]
                    assert launch["begin_us"] < launch["done_us"] <= step["end_us"]


@pytest.mark.dist
def test_predicted_beside_measured(ranks: Callable[[int], RankGroup], tmp_path: Path) -> None:
    """Both for every collective; micro-batches as recorded; rates from the times."""
    ranks(2).run(train, {"dump_dir": str(tmp_path), "profile": True}, 8, 3)
    renumber(tmp_path)
    for path in tmp_path.glob("rank*/profile_model*.json"):
        # `renumber` knows nothing of the names inside.
        text = path.read_text()
        number = text.split('"name": "graph', 1)[1].split("_")[0]
        path.write_text(text.replace(f'"graph{number}_', '"graph0_'))
    outcome = megabuf("explain", tmp_path, "--calibrate", tmp_path)
    assert outcome.code == 0, outcome.err
    assert "ONE STEP of 3 micro-batches" in outcome.out
    assert "us per launch" in outcome.out
    table = outcome.out.split("EXPOSED, predicted and measured\n")[1].splitlines()
    assert [line.split()[:2] for line in table[2:6]] == [
        *([group, "all_gather"] for group in "10"),
        *([group, "reduce_scatter"] for group in "01"),
    ]
    assert all(len(line.split()) == 5 and "-" not in line.split()[2:4] for line in table[2:6])
    assert table[7].startswith("sum of absolute differences ")
    page = tmp_path / "step.html"
    assert megabuf("timeline", tmp_path, "-o", page).code == 0
    assert 'data-schedule="predicted"' in page.read_text()
    assert 'data-schedule="measured"' in page.read_text()


@pytest.mark.dist
def test_ranges_of_the_profiler_name_buckets(ranks: Callable[[int], RankGroup]) -> None:
    """Without recording: ranges exist while ``torch.profiler`` runs. All gathers go out before anything else."""
    (names, _) = ranks(2).run(train, {}, 3)
    ranges = [name for name in names if " bucket " in name]
    # A group is named by its first parameter in buffer order.
    first = {0: "fc3.bias ...", 1: "fc1.bias ..."}
    expected = [
        *(("all_gather", 1), ("all_gather", 0), ("wait_gather", 1), ("wait_gather", 0)),
        *(("reduce_scatter", 0), ("reduce_scatter", 1), ("wait_reduction", 0), ("wait_reduction", 1)),
    ]
    assert ranges == [f"megabuf::{what} bucket {group} ({first[group]})" for what, group in expected]


def test_nothing_is_there_when_nobody_looks(tmp_path: Path) -> None:
    handle = mb.attach(seeded(Mlp), mb.MegabufConfig(dump_dir=str(tmp_path)))
    assert handle.buffers.trace.recorder is None

    def compiled(args: list[Any]) -> Any:
        return args

    assert record_runs(compiled, "graph0_forward", [None]) is compiled


def test_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGABUF_PROFILE", "1")
    with pytest.raises(ValueError, match=r"profile=True \(MEGABUF_PROFILE=1\) needs dump_dir \(MEGABUF_DUMP=dir\)"):
        mb.attach(seeded(Mlp))
    monkeypatch.setenv("MEGABUF_DUMP", str(tmp_path))
    handle = mb.attach(seeded(Mlp))
    assert handle.config.profile
    assert handle.buffers.trace.recorder is not None
    monkeypatch.setenv("MEGABUF_PROFILE", "0")
    assert not mb.attach(seeded(Mlp)).config.profile


def test_bare_form_records_steps_of_any_optimizer(tmp_path: Path) -> None:
    """Gradients are complete when backward returns; that ends a step, and nobody calls ``zero_grad`` of ours."""
    model = seeded(Mlp)
    options: dict[str, Any] = {"inner_compiler": "aot_eager", "dump_dir": str(tmp_path), "profile": True}
    run = torch.compile(model, backend="megabuf", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        run(batch(number, 0, 0, 6, 13)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    (path,) = tmp_path.glob("rank0/profile_model*.json")
    steps = read(path)["steps"]
    assert [step["has_compile"] for step in steps] == [True, False, False]
    assert [span["name"] for span in steps[-1]["spans"] if span["kind"] == "launch"] == ["all_reduce"]


class TickingClock:
    """Ten microseconds pass between any two marks; what is marked is known only ``delay`` marks later."""

    def __init__(self, delay: int = 0) -> None:
        self.now = 0
        self.delay = delay

    def mark(self) -> int:
        self.now += 1
        return self.now

    def microseconds(self, begin: int, end: int) -> float:
        return (end - begin) * 10.0

    def has_passed(self, mark: int) -> bool:
        return self.now >= mark + self.delay


def recorder(path: Path, clock: TickingClock, *, is_paused: Callable[[], bool] = lambda: False) -> StepRecorder:
    return StepRecorder(path, rank=0, handle=0, clock=clock, is_paused=is_paused)


def test_recorder_keeps_times_since_the_begin_of_the_step(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    made = recorder(path, TickingClock())
    made.note_compile()
    with made.span("run", "graph0_forward"), made.span("wait", "gather", 3):
        pass
    made.end_step()
    (step,) = read(path)["steps"]
    assert (step["step"], step["has_compile"], step["end_us"]) == (0, True, 50)
    assert [(s["kind"], s["group"], s["begin_us"], s["end_us"]) for s in step["spans"]] == [
        ("run", None, 10, 40),
        ("wait", 3, 20, 30),
    ]


def test_recorder_waits_until_times_are_known(tmp_path: Path) -> None:
    """As on a device: a step is written when its last event has passed, and ``close`` writes the rest."""
    path = tmp_path / "profile.json"
    made = recorder(path, TickingClock(delay=4))
    for _ in range(3):
        with made.span("run", "graph0_forward"):
            pass
        made.end_step()
    assert [step["step"] for step in read(path)["steps"]] == [0, 1]
    made.close()
    assert [step["step"] for step in read(path)["steps"]] == [0, 1, 2]


def test_recorder_pauses_and_drops_what_an_error_left(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    paused = [True]
    made = recorder(path, TickingClock(), is_paused=lambda: paused[0])
    with made.span("run", "captured"):
        pass
    made.end_step()
    assert not path.exists(), "a step of which nothing was recorded is none"
    paused[0] = False
    with pytest.raises(KeyError), made.span("run", "failed"):
        raise KeyError
    with made.span("run", "whole") as span:
        pass
    made.watch(span, [PendingWork(lambda: None, ())])
    made.end_step()
    (step,) = read(path)["steps"]
    assert [(entry["name"], entry["done_us"]) for entry in step["spans"]] == [("whole", None)]
