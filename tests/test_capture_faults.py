"""Captured steps and what goes wrong in training: NaN and Inf, loss scales, ranks that come apart, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from capture_runs import Run, are_same, differences
from helpers import RankGroup, error_text, fresh_compiler
from torch import Tensor, nn

import megabuf_fx as mb

NAN, INF = float("nan"), float("inf")


class Weighed(Run):
    """A batch has a weight, too, that becomes the gradient of ``fc3.bias`` and of nothing else."""

    def batches(self, index: int, weight: float = 0.0) -> tuple[Tensor, Tensor]:
        return self.batch(index), torch.tensor([weight] * 5)

    def weighed(self, given: tuple[Tensor, Tensor]) -> Tensor:
        x, weight = given
        loss: Tensor = self.loss(self.call, x[0]) + (self.model.fc3.bias * weight).sum()
        loss.backward()
        self.update()
        return loss.detach()


def pair_of_runs(mode: str, **options: Any) -> tuple[Weighed, Weighed]:
    """Two, that have met the gradient from outside the compiled graph: it is added in another order the first time."""
    runs = Weighed(mode, **options), Weighed(mode, **options)
    for run in runs:
        start = run.state()
        run.weighed(run.batches(0))
        run.restore(start)
    return runs


def skip_steps(rank: int, mode: str, is_compiled: bool, bad: float) -> list[str]:
    """Steps 1, 2 and 4 are bad, on rank 1 alone. What is wrong."""
    options: dict[str, Any] = {"rank": rank, "is_compiled": is_compiled, "optimizer": {"max_skipped_steps": 3}}
    ordinary, run = pair_of_runs(mode, **options)
    captured = run.capture(run.weighed, run.batches(0))
    flags = run.buf.flags
    problems = []
    for index in range(6):
        is_bad = index in (1, 2, 4)
        given = run.batches(index, bad if is_bad and rank == 1 else 0.1)
        before = run.state()
        ordinary.weighed(given)
        captured(given)
        if bool(differences(before, run.state())) == is_bad:
            problems.append(f"step {index}: wrongly {'taken' if is_bad else 'skipped'}")
        if bool(flags.found_inf) != is_bad or int(flags.skipped_in_a_row) != {1: 1, 2: 2, 4: 1}.get(index, 0):
            problems.append(f"step {index}: found_inf {flags.found_inf}, {flags.skipped_in_a_row} in a row")
    if run.optimizer.skipped_steps != 3 or (int(flags.step), int(flags.skipped)) != (3, 3):
        problems.append(f"{run.optimizer.skipped_steps} skipped steps, {flags.step} taken, {flags.skipped} skipped")
    if any(int(entries["step"]) != 3 for entries in run.optimizer.inner.state.values()):
        problems.append("skipped steps count as steps")
    problems += differences(ordinary.state(), run.state())
    for each in (ordinary, run):
        each.buf.detach()
    fresh_compiler()
    return problems


def skip_in_all_modes(rank: int) -> dict[str, list[str]]:
    return {
        f"{mode}, compiled {is_compiled}, {bad}": skip_steps(rank, mode, is_compiled, bad)
        for mode, is_compiled, bad in (
            ("sharded", True, NAN),
            ("overlap", False, INF),
            ("whole", True, -INF),
            ("whole", False, NAN),
        )
    }


@pytest.mark.dist
def test_steps_are_skipped_on_all_ranks(ranks: Callable[[int], RankGroup]) -> None:
    for answers in ranks(2).run(skip_in_all_modes, timeout=120):
        for case, problems in answers.items():
            assert not problems, (case, problems)


def skip_too_many(rank: int) -> tuple[list[int], str, float]:
    """Which of the replays raised, what, and how far the parameters have moved by a good step after that."""
    run = Weighed("sharded", rank=rank, optimizer={"max_skipped_steps": 3})
    captured = run.capture(run.weighed, run.batches(0))
    raised, texts = [], []
    for index in range(9):
        given = run.batches(index, INF if index >= 1 and rank == 1 else 0.1)
        try:
            captured(given)
        except RuntimeError as error:
            raised.append(index)
            texts.append(f"{type(error).__name__}: {error}")
    before = run.state()
    captured(run.batches(9, 0.1))
    moved = len(differences(before, run.state()))
    run.buf.detach()
    return raised, texts[0], moved


@pytest.mark.dist
def test_too_many_skipped_steps_in_a_row(ranks: Callable[[int], RankGroup]) -> None:
    """Looked for every third replay, because looking waits for the device: replays 3, 6 and 9."""
    for raised, text, moved in ranks(2).run(skip_too_many):
        assert raised == [5, 8]
        assert text.startswith("RuntimeError: 5 steps in a row had NaN or Inf in the gradients, the last in 'fc3.bias'")
        assert moved


def find_nan(rank: int, mode: str, is_compiled: bool) -> list[str]:
    """The errors of replays 0 to 3, of which 1 and 2 are bad on rank 1; then what is wrong."""
    options: dict[str, Any] = {"rank": rank, "is_compiled": is_compiled, "check_for_nan_in_grad": True}
    ordinary, run = pair_of_runs(mode, **options)
    captured = run.capture(run.weighed, run.batches(0))
    texts = []
    for index in range(4):
        is_bad = index in (1, 2)
        given = run.batches(index, NAN if is_bad and rank == 1 else 0.1)
        before = run.state()
        if is_bad:
            texts.append(error_text(lambda: captured(given)))  # noqa: B023
            assert not differences(before, run.state())
        else:
            captured(given)
            ordinary.weighed(given)
    assert not differences(ordinary.state(), run.state())
    for each in (ordinary, run):
        each.buf.detach()
    fresh_compiler()
    return texts


def find_nan_in_all_modes(rank: int) -> list[list[str]]:
    cases = [("sharded", True), ("overlap", False), ("whole", True), ("whole", False)]
    return [find_nan(rank, mode, is_compiled) for mode, is_compiled in cases]


@pytest.mark.dist
def test_nan_is_an_error_on_every_rank_and_by_name(ranks: Callable[[int], RankGroup]) -> None:
    for rank, answers in enumerate(ranks(2).run(find_nan_in_all_modes, timeout=120)):
        where = "this rank" if rank == 1 else "another rank"
        for texts in answers:
            assert len(texts) == 2
            for text in texts:
                assert text.startswith(
                    "RuntimeError: found NaN or Inf in local gradients before their reduction: "
                    f"'fc3.bias' (bucket 0, NaN, {where}). The step must not be taken"
                )


def come_apart(rank: int, is_planted: bool) -> list[str]:
    """What each of six replays raises."""
    run = Run("plain", rank=rank, check_for_drift_every=3)
    captured = run.capture()
    texts = []
    for index in range(6):
        if is_planted and index == 1 and rank == 1:
            with torch.no_grad():
                run.model.fc2.weight[3, 4] += 1e-3
        try:
            captured(run.batch(index))
            texts.append("")
        except RuntimeError as error:
            texts.append(str(error))
    run.buf.detach()
    return texts


@pytest.mark.dist
def test_ranks_that_come_apart(ranks: Callable[[int], RankGroup]) -> None:
    for texts in ranks(2).run(come_apart, True):
        # The one ordinary step of the warm-up counts, too: steps 3 and 6 are replays 1 and 4.
        assert [index for index, text in enumerate(texts) if text] == [1, 4]
        assert texts[1].startswith("ranks have come apart after 3 steps: parameter 'fc2.weight' (and 0 more) of rank")
    assert ranks(2).run(come_apart, False) == [[""] * 6] * 2


@pytest.mark.parametrize("mode", ["sharded", "overlap", "plain"])
def test_checkpoints_between_replays(mode: str, tmp_path: Path) -> None:
    """The captured run goes on as if nothing had been saved, and what was saved goes on as it would have."""
    run, other = Run(mode, dtype=torch.bfloat16), Run(mode, dtype=torch.bfloat16)
    plain, saving = run.capture(), other.capture()
    run.train(plain, range(6))
    other.train(saving, range(3))
    path = mb.save_checkpoint(tmp_path, 3, other.model, other.optimizer)
    other.train(saving, range(3, 6))
    assert not differences(run.state(), other.state())
    resumed = Run(mode, dtype=torch.bfloat16)
    mb.load_checkpoint(path, resumed.model, resumed.optimizer)
    resumed.train(resumed.capture(), range(3, 6))
    assert not differences(run.state(), resumed.state())


class Scaled(Run):
    """Trained with a ``GradScaler``; its scale grows every other step."""

    def __init__(self, mode: str, *, unscales: bool, **options: Any) -> None:
        super().__init__(mode, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.unscales = unscales

    def scaled(self, x: Tensor) -> dict[str, Tensor]:
        loss = self.loss(self.call, x[0])
        self.scaler.scale(loss).backward()
        if self.unscales:
            self.scaler.unscale_(self.optimizer)
            if isinstance(self.optimizer, mb.DistributedOptimizer):
                self.optimizer.clip_grad_norm_(0.1)
            else:
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return {"loss": loss.detach()}

    def bad_batch(self, index: int) -> Tensor:
        x = self.batch(index)
        # One rank alone overflows.
        return x * INF if index == 3 and self.rank == 0 else x


def train_scaled(rank: int, mode: str, unscales: bool, is_compiled: bool) -> str:
    """Six ordinary steps and six replays, the fourth of them with an infinite loss; what differs."""
    states: list[dict[str, Tensor]] = []
    results: list[list[dict[str, Tensor]]] = []
    scales: list[list[float]] = []
    for is_captured in (False, True):
        run = Scaled(mode, unscales=unscales, rank=rank, is_compiled=is_compiled)
        step: Callable[[Tensor], Any] = run.scaled
        if is_captured:
            step = run.capture(run.scaled, grad_scaler=run.scaler)
            if run.scaler.get_scale() != 8.0:
                return f"the scale is {run.scaler.get_scale()} after the capture"
        scales.append([])
        results.append([])
        for index in range(6):
            results[-1].append(step(run.bad_batch(index)))
            scales[-1].append(run.scaler.get_scale())
        states.append(run.state())
        run.buf.detach()
        fresh_compiler()
    problems = differences(*states)
    results = [[entry for index, entry in enumerate(each) if index != 3] for each in results]
    if scales[0] != [8.0, 16.0, 16.0, 8.0, 8.0, 16.0] or scales[1] != scales[0]:
        problems.append(f"scales {scales}")
    if not are_same(*results):
        problems.append("losses")
    return ", ".join(problems)


def train_scaled_everywhere(rank: int) -> dict[str, str]:
    return {
        f"{mode}, unscales {unscales}": train_scaled(rank, mode, unscales, is_compiled=unscales == (mode != "whole"))
        for mode in ("sharded", "overlap", "whole", "plain")
        for unscales in (True, False)
    }


def test_a_loss_scale() -> None:
    for case, problem in train_scaled_everywhere(0).items():
        assert not problem, (case, problem)


def train_scaled_on_two(rank: int) -> dict[str, str]:
    cases = [("sharded", True, True), ("overlap", False, False), ("whole", False, True), ("plain", True, False)]
    return {str(case): train_scaled(rank, *case) for case in cases}


@pytest.mark.dist
def test_a_loss_scale_on_two_ranks(ranks: Callable[[int], RankGroup]) -> None:
    for problems in ranks(2).run(train_scaled_on_two, timeout=120):
        for case, problem in problems.items():
            assert not problem, (case, problem)
