"""``capture_step``: replays give what ordinary steps give, bit by bit."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from capture_runs import MODES, Run, are_same, differences, falling
from helpers import Mlp, RankGroup, batch, fresh_compiler
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

import megabuf_fx as mb
from megabuf_fx.tape import Tape


def compare(mode: str, **options: Any) -> str:
    """Ten ordinary steps and ten replays from one state, with clipping and a schedule; what differs."""
    run = Run(mode, **options)
    run.train(run.step, range(90, 92))
    start = run.state()
    steps = range(10)
    expected = run.train(run.step, steps, falling)
    trained = run.state()
    run.restore(start)
    for group in run.optimizer.param_groups:
        lr = group["lr"]
        group["lr"] = lr.fill_(0.01) if isinstance(lr, Tensor) else 0.01
        group.pop("initial_lr")
    captured = run.capture()
    undone = differences(run.state(), start)
    found = run.train(captured, steps, falling)
    wrong = differences(run.state(), trained)
    moved = len(differences(trained, start))
    run.buf.detach()
    fresh_compiler()
    assert captured.replays == 10
    if undone or wrong or not are_same(found, expected) or not moved:
        return f"not undone: {undone}, wrong after ten steps: {wrong}, results the same: {are_same(found, expected)}"
    return ""


def compare_all(rank: int, is_compiled: bool, counts: tuple[int, ...]) -> dict[str, str]:
    """By case; ``counts`` of micro-batches."""
    cases = itertools.product(MODES, counts, (torch.float32, torch.bfloat16))
    return {
        f"{mode}, {micro} micro-batches, {dtype}": compare(
            mode, rank=rank, is_compiled=is_compiled, micro_batches=micro, dtype=dtype
        )
        for mode, micro, dtype in cases
    }


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "eager_path"])
def test_replays_equal_steps(is_compiled: bool) -> None:
    for case, problem in compare_all(0, is_compiled, (1, 3)).items():
        assert not problem, (case, problem)


@pytest.mark.dist
@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "eager_path"])
def test_replays_equal_steps_on_two_ranks(ranks: Callable[[int], RankGroup], is_compiled: bool) -> None:
    for problems in ranks(2).run(compare_all, is_compiled, (1, 3) if is_compiled else (3,), timeout=200):
        for case, problem in problems.items():
            assert not problem, (case, problem)


OTHER_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("sharded", {"overlap_grad_reduce": False}),
    ("sharded", {"average_in_collective": True}),
    ("sharded", {"calculate_per_token_loss": True}),
    ("sharded", {"num_distributed_optimizer_instances": 2}),
    ("sharded", {"param_name_patterns_for_fp32_local_accumulation": ("fc1*",), "grad_reduce_in_fp32": False}),
    ("sharded", {"reduce_scatter_with_fp32_accumulation": True, "grad_reduce_in_fp32": False}),
    ("sharded", {"find_unused_parameters": False, "disable_bucketing": True}),
    ("sharded", {"gradient_accumulation_fusion": False}),
    ("sharded", {"check_for_nan_in_grad": True, "check_for_large_grads": True}),
    ("overlap", {"param_gather_prefetch": 1}),
    ("overlap", {"debug_nan_stale_params": True}),
    ("whole", {"dense_layout": True}),
    ("whole", {"grad_reduce_in_fp32": False, "overlap_grad_reduce": False}),
]


def compare_options(rank: int) -> dict[str, str]:
    return {
        f"{mode}, {options}": compare(
            mode, rank=rank, is_compiled=index % 2 == 0, micro_batches=2, dtype=torch.bfloat16, **options
        )
        for index, (mode, options) in enumerate(OTHER_OPTIONS)
    }


@pytest.mark.dist
def test_other_options(ranks: Callable[[int], RankGroup]) -> None:
    """Compiled and not, in turn."""
    for problems in ranks(2).run(compare_options, timeout=200):
        for case, problem in problems.items():
            assert not problem, (case, problem)


class Branches(nn.Module):
    """Dropout, BatchNorm, a graph break, and a parameter that gets no gradient; each where it is asked for."""

    def __init__(self, *, drops: bool = False, normalizes: bool = False, breaks: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(13, 21), nn.Linear(21, 5)
        self.norm = nn.BatchNorm1d(21) if normalizes else None
        self.drops, self.breaks = drops, breaks
        self.unused = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.norm is not None:
            x = self.norm(x)
        if self.breaks:
            torch._dynamo.graph_break()
        result: Tensor = self.second(nn.functional.dropout(x, 0.3) if self.drops else x)
        return result


def train_twice(make: Callable[[], Run], steps: int = 6) -> tuple[Run, Run]:
    """By ordinary steps, and by replays captured before any step; both runs, with the same numbers asserted."""
    runs, results = [], []
    for is_captured in (False, True):
        run = make()
        start = run.state()
        generator = torch.get_rng_state()
        step: Callable[[Any], Any] = run.step
        if is_captured:
            step = run.capture()
            assert torch.equal(torch.get_rng_state(), generator)
            after = run.state()
            assert not differences({name: after[name] for name in start}, start)
            # State that did not exist is as a new optimizer would make it.
            assert all(not value.any() for name, value in after.items() if name not in start)
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Detected call of|weights were written")
            results.append(run.train(step, range(steps), falling))
        runs.append(run)
    assert are_same(*results)
    assert not differences(runs[0].state(), runs[1].state())
    return runs[0], runs[1]


def test_with_inductor() -> None:
    _, run = train_twice(lambda: Run("overlap", is_compiled=True, micro_batches=3, inner="inductor"), steps=4)
    tape = run.capture().graph
    assert isinstance(tape, Tape)
    # A forward and a backward for each micro-batch.
    assert [entry.is_graph for entry in tape.entries].count(True) == 6


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "eager_path"])
def test_random_numbers_go_on(is_compiled: bool) -> None:
    """Every replay draws new ones, as the ordinary step would; nothing that the capture drew is missing after it."""
    _, run = train_twice(lambda: Run(build=lambda: Branches(drops=True), is_compiled=is_compiled, micro_batches=2))
    captured = run.capture()
    x = run.batch(0)
    assert len({captured(x)["loss"].item() for _ in range(3)}) == 3


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "eager_path"])
def test_module_buffers_are_undone(is_compiled: bool) -> None:
    _, run = train_twice(lambda: Run(build=lambda: Branches(normalizes=True), is_compiled=is_compiled))
    assert run.model.norm.num_batches_tracked == 6


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "eager_path"])
def test_a_parameter_without_gradient_is_left_alone(mode: str, is_compiled: bool) -> None:
    _, run = train_twice(lambda: Run(mode, build=Branches, is_compiled=is_compiled))
    assert torch.equal(run.model.unused, torch.ones(7))


class Recomputed(Mlp):
    """Recomputes dropout in the backward, so the compiled graphs keep states of the random generator."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(lambda x: super(Recomputed, self).forward(dropout(x, 0.3)), x, use_reentrant=False)
        return result


def test_recomputed_random_numbers() -> None:
    _, run = train_twice(lambda: Run(build=Recomputed, is_compiled=True))
    tape = run.capture().graph
    assert isinstance(tape, Tape)
    assert any("run_and_save_rng_state" in line[0] for line in tape.journal)


def test_capturable_only_while_a_gpu_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch insists on it then, and warns about it otherwise."""
    run = Run()
    run.step(run.batch(0))
    run.backward(run.batch(1))
    run.buf.flags.make_lr(1)
    (group,) = run.optimizer.inner.param_groups
    with monkeypatch.context() as patch, run.buf.buffers.capture.active():
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(run.buf.buffers, "token", mock.Mock(is_cuda=True))
        run.optimizer.step()
        assert group["capturable"] is True
        assert group["lr"] is run.buf.flags.lr[0]
    run.optimizer.zero_grad()
    run.step(run.batch(2))
    assert group["capturable"] is False
    assert group["lr"] == 0.01


def test_with_a_graph_break() -> None:
    train_twice(lambda: Run("overlap", build=lambda: Branches(breaks=True), is_compiled=True, micro_batches=2))


def test_other_optimizers() -> None:
    for kind, options in ((torch.optim.Adam, {}), (torch.optim.SGD, {"momentum": 0.9, "nesterov": True})):
        for mode in ("sharded", "plain"):
            train_twice(lambda: Run(mode, optimizer={"kind": kind, **options}))  # noqa: B023


def test_a_learning_rate_as_tensor() -> None:
    """Given to our optimizer, too: a scheduler then writes into it."""
    train_twice(lambda: Run(optimizer={"lr": torch.tensor(0.01)}))


def test_several_models_and_optimizers() -> None:
    """A game of two: one makes, one judges; each has an optimizer, and one step moves both."""

    def train(is_captured: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict[str, Tensor]]]:
        maker = Run("overlap", build=lambda: nn.Linear(13, 13), is_compiled=True)
        judge = Run("whole", is_compiled=True)

        def step(x: Tensor) -> dict[str, Tensor]:
            made = maker.call(x[0])
            judged = judge.call(made.detach()).square().mean() + judge.call(x[0]).mean()
            judged.backward()
            judge.update()
            fooled = judge.call(made).mean()
            fooled.backward()
            maker.update()
            judge.optimizer.zero_grad()
            return {"judged": judged.detach(), "fooled": fooled.detach()}

        both = [maker.optimizer, judge.optimizer]
        taken = mb.capture_step(step, maker.batch(0), optimizer=both) if is_captured else step
        results = [taken(maker.batch(index)) for index in range(5)]
        return maker.state(), judge.state(), results

    (maker, judge, results), (other_maker, other_judge, other_results) = train(False), train(True)
    assert not differences(maker, other_maker)
    assert not differences(judge, other_judge)
    assert are_same(results, other_results)


def test_batches_and_results_in_containers() -> None:
    run = Run()
    calls = []

    def step(batch: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        calls.append(batch)
        loss = run.backward(batch["pair"][0][None] * batch["pair"][1])
        run.update()
        return loss, {"name": batch["name"], "twice": [loss * 2]}

    def example(index: int) -> dict[str, Any]:
        return {"pair": (run.batch(index)[0], torch.tensor([1.0 + index])), "name": "text"}

    captured = run.capture(step, example(0))
    count = len(calls)
    first, rest = captured(example(1))
    value = first.item()
    second, _ = captured(example(2))
    assert len(calls) == count
    assert captured.replays == 2
    assert isinstance(captured.graph, Tape)
    # Results are copies: the second replay has left those of the first alone.
    assert first.item() == value != second.item()
    assert rest["name"] == "text"
    assert rest["twice"][0].item() == 2 * value


def test_the_example_and_later_batches_are_copied() -> None:
    run = Run()
    example = run.batch(0)
    captured = run.capture(example=example)
    expected = captured(run.batch(1))["loss"]
    run.restore(run.state())
    x = run.batch(1)
    captured(x)
    assert torch.equal(example, run.batch(0))
    assert torch.equal(x, run.batch(1))
    assert expected.isfinite()


def test_declared_memory() -> None:
    """``external``: what a step may use besides the model, and what changes it."""
    run = Run()
    scale, seen = torch.full((5,), 2.0), torch.zeros(3)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = (run.call(x[0]) * scale).square().mean()
        loss.backward()
        seen.add_(1)
        run.update()
        return loss.detach()

    captured = run.capture(step, external={"scale": scale, "seen": seen})
    assert seen.tolist() == [0.0] * 3
    first = captured(run.batch(1))
    assert seen.tolist() == [1.0] * 3
    scale.zero_()
    assert captured(run.batch(1)) == 0.0 != first


def test_ordinary_steps_and_evaluations_between_replays() -> None:
    run, other = Run("overlap", is_compiled=True, micro_batches=2), Run("overlap", is_compiled=True, micro_batches=2)

    def evaluate(run: Run) -> Tensor:
        run.model.eval()
        with torch.no_grad():
            loss = run.loss(run.call, batch(77, 0, 0, 4, 13))
        run.model.train()
        return loss

    captured = other.capture()
    found, expected = [], []
    for index in range(8):
        x = run.batch(index)
        expected.append(run.step(x)["loss"])
        found.append((other.step if index in (2, 3, 6) else captured)(x)["loss"])
        if index % 3 == 1:
            expected.append(evaluate(run))
            found.append(evaluate(other))
        if index == 4:
            other.buf.sync_params()
    assert found == expected
    assert not differences(run.state(), other.state())


def test_two_captures_of_one_model() -> None:
    """Of two shapes, used in turn."""
    run, other = Run(), Run()
    captures = {size: other.capture(example=batch(0, 0, 0, 1, size, 13)) for size in (4, 8)}
    for index in range(6):
        size = 4 if index % 3 else 8
        x = batch(index, 0, 0, 1, size, 13)
        assert run.step(x)["loss"] == captures[size](x)["loss"]
    assert not differences(run.state(), other.state())


def test_it_is_found_on_the_model_of_a_subset() -> None:
    """An optimizer of torch itself over some of the parameters."""
    model = Mlp()
    mb.attach(model, mb.MegabufConfig(use_distributed_optimizer=False))
    optimizer = torch.optim.AdamW(model.fc3.parameters(), lr=torch.tensor(0.1), fused=True)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        model.zero_grad()
        return loss.detach()

    captured = mb.capture_step(step, batch(0, 0, 0, 8, 13), optimizer=optimizer)
    before = model.fc1.weight.clone(), model.fc3.weight.clone()
    captured(batch(1, 0, 0, 8, 13))
    assert torch.equal(before[0], model.fc1.weight)
    assert not torch.equal(before[1], model.fc3.weight)
