"""Models that nobody here wrote, from ``transformers``, train as in eager mode: compiled, and by hooks alone.

The reference is one eager process that sees the data of all ranks and averages their losses. Compared after each of
five steps, within 2e-5: every parameter (measured 5e-7), this rank's losses, and the module buffers, which belong to a
rank: BatchNorm in training mode normalizes with the rank's own batch and keeps its own running statistics, so the
reference swaps in the rank's buffers for its forward. Every second step has two micro-batches.

Run with ``-s`` to see the tables of results, graphs and seconds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers import RankGroup, fresh_compiler, max_difference, params_of, seeded
from real_models import MODELS, Batch, RealModel
from tabulate import tabulate
from torch import Tensor, nn
from torch._dynamo.utils import counters

import megabuf_fx as mb

pytestmark = pytest.mark.dist

STEPS = 5
BOUND = 2e-5
NUM_BUCKETS = 4

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    # With decay, so that a parameter without gradient moves unless it is left alone.
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
}

MODES: dict[str, dict[str, Any]] = {
    "sharded": {"overlap_param_gather": True},
    "plain": {"use_distributed_optimizer": False},
}

WAYS = ("aot_eager", "inductor", "eager path", "bare form")
"""Attached and compiled with either inner compiler; attached alone; compiled (``aot_eager``) without attaching."""

LONG = ("Mixtral, batched", "Mixtral, loop", "Switch")
"""Compiled in slow tests only: the last two have 14 to 22 graphs, the first differs from "Mixtral" in one operator."""


class Case(NamedTuple):
    model: str
    way: str
    mode: str
    optimizer: str = "SGD"


class Outcome(NamedTuple):
    """What one rank saw of one case."""

    case: Case
    problem: str | None
    """None: equal to the reference, and reductions and graphs are as they should be."""
    difference: float
    graphs: tuple[int, ...]
    """Dynamo graphs so far, after each step."""
    launched_in_graph: str
    """Bucket groups whose reduction a compiled graph starts, of how many."""
    seconds: float


class Reference(NamedTuple):
    """The eager run, as one rank should see it."""

    params: list[dict[str, Tensor]]
    """By step."""
    buffers: dict[str, Tensor]
    losses: list[float]
    """By micro-batch."""
    untouched: frozenset[str]
    """Parameters that never had a gradient."""
    n_without_gradient: int
    """Of parameters and steps."""
    least_moved: float
    """How far the least moved of all other parameters is from its start, those with zero gradients apart."""


def micro_batches(step: int) -> int:
    return 1 + step % 2


def data(model: RealModel, step: int, micro: int, rank: int) -> Batch:
    return model.batch(torch.Generator().manual_seed(step * 10007 + micro * 101 + rank))


def has_zero_gradient(model: RealModel, name: str) -> bool:
    return bool(model.zero_gradients) and name.endswith(model.zero_gradients)


def train_reference(model: RealModel, optimizer_name: str, rank: int, world: int) -> Reference:
    plain = seeded(model.build)
    optimizer_class, options = OPTIMIZERS[optimizer_name]
    optimizer: Any = optimizer_class(plain.parameters(), **options)
    start = params_of(plain)
    buffers = [{name: buffer.clone() for name, buffer in plain.named_buffers()} for _ in range(world)]
    params: list[dict[str, Tensor]] = []
    losses: list[float] = []
    without: list[set[str]] = []
    for step in range(STEPS):
        for micro in range(micro_batches(step)):
            for r in range(world):
                out = torch.func.functional_call(plain, buffers[r], (), data(model, step, micro, r))
                (out["loss"] / world).backward()
                if r == rank:
                    losses.append(out["loss"].item())
        without.append({name for name, param in plain.named_parameters() if param.grad is None})
        optimizer.step()
        optimizer.zero_grad()
        params.append(params_of(plain))
    untouched = frozenset.intersection(*map(frozenset, without))
    least_moved = min(
        (params[-1][name] - start[name]).abs().max().item()
        for name in start
        if name not in untouched and not has_zero_gradient(model, name)
    )
    return Reference(params, buffers[rank], losses, untouched, sum(map(len, without)), least_moved)


@contextlib.contextmanager
def prepared(model: nn.Module, case: Case) -> Iterator[tuple[Callable[..., Any], Callable[[], mb.MegabufHandle]]]:
    """The callable to train with, and the model's handle: without ``attach`` only there after the first forward."""
    inner = "inductor" if case.way == "inductor" else "aot_eager"
    options: dict[str, Any] = {"num_buckets": NUM_BUCKETS, "inner_compiler": inner}
    if case.way == "bare form":
        call = torch.compile(model, backend="megabuf", options=options)
    else:
        mb.attach(model, mb.MegabufConfig(**options, **MODES[case.mode]))
        call = model if case.way == "eager path" else torch.compile(model, backend="megabuf")
    try:
        yield call, lambda: mb.handle(model)
    finally:
        with contextlib.suppress(ValueError):
            mb.handle(model).detach()
        if case.way != "eager path":
            fresh_compiler()


def record_launches(buf: mb.MegabufHandle) -> list[int]:
    """The list to which every reduction from now on adds its bucket group."""
    launched: list[int] = []
    original = buf.buffers.reducer._launch

    def recorded(group: int, *, scaled: bool) -> None:
        launched.append(group)
        original(group, scaled=scaled)

    buf.buffers.reducer._launch = recorded  # type: ignore[method-assign]
    return launched


class Run:
    """Trains one case and compares as it goes."""

    def __init__(self, case: Case, rank: int, reference: Reference) -> None:
        self.case = case
        self.real = MODELS[case.model]
        self.rank = rank
        self.reference = reference
        self.problems: list[str] = []
        self.difference = 0.0
        self.graphs: list[int] = []
        self.launched_in_graph = "none"
        self.losses: list[float] = []

    def train(self) -> Outcome:
        begin = time.perf_counter()
        model = seeded(self.real.build)
        start = params_of(model)
        graphs_before = counters["stats"]["unique_graphs"]
        try:
            with prepared(model, self.case) as (call, handle):
                optimizer = self._optimizer(model)
                launched: list[int] | None = None
                for step in range(STEPS):
                    if launched is None and self.case.way != "bare form":
                        launched = record_launches(handle())
                    self._step(call, handle, step)
                    optimizer.step()
                    optimizer.zero_grad()
                    buf = handle()
                    buf.sync_params()
                    if launched is None:
                        launched = record_launches(buf)
                    elif launched != list(range(len(buf.plan.groups))):
                        self.problems.append(f"step {step}: reductions of bucket groups {launched}")
                    launched.clear()
                    self.graphs.append(counters["stats"]["unique_graphs"] - graphs_before)
                    self._compare_params(model, step)
                self._finish(model, start, buf)
        except Exception as error:
            self.problems.append(f"refused: {type(error).__name__}: {error}")
        problem = "; ".join(self.problems) or None
        seconds = time.perf_counter() - begin
        return Outcome(self.case, problem, self.difference, tuple(self.graphs), self.launched_in_graph, seconds)

    def _optimizer(self, model: nn.Module) -> Any:
        optimizer_class, options = OPTIMIZERS[self.case.optimizer]
        if self.case.mode == "sharded":
            return mb.DistributedOptimizer(model.parameters(), optimizer_class, **options)
        return optimizer_class(model.parameters(), **options)

    def _step(self, call: Callable[..., Any], handle: Callable[[], mb.MegabufHandle], step: int) -> None:
        if step or self.case.way != "bare form":
            for buffer in handle().buffers.buffers:
                # Nothing may depend on what the buffer held before.
                buffer.grad_data.fill_(float("nan"))
        count = micro_batches(step)
        for micro in range(count):
            out = call(**data(self.real, step, micro, self.rank))
            with contextlib.nullcontext() if micro + 1 == count else handle().no_sync():
                out["loss"].backward()
            self.losses.append(out["loss"].item())

    def _compare_params(self, model: nn.Module, step: int) -> None:
        params, expected = params_of(model), self.reference.params[step]
        for name, param in params.items():
            if self.case.optimizer == "AdamW" and has_zero_gradient(self.real, name):
                continue
            difference = (param - expected[name]).abs().max().item()
            # The first comparison must not swallow a NaN.
            self.difference = difference if not difference <= self.difference else self.difference
            if not difference <= BOUND:
                self.problems.append(f"step {step}: {name} differs by {difference:.1e}")
                return

    def _finish(self, model: nn.Module, start: dict[str, Tensor], buf: mb.MegabufHandle) -> None:
        for loss, expected in zip(self.losses, self.reference.losses, strict=True):
            if not abs(loss - expected) <= BOUND:
                self.problems.append(f"loss {loss}, expected {expected}")
        for name in self.reference.untouched:
            if not torch.equal(model.get_parameter(name), start[name]):
                self.problems.append(f"{name} has no gradient but moved")
        if self.reference.buffers:
            difference = max_difference(
                {name: buffer.double() for name, buffer in model.named_buffers()},
                {name: buffer.double() for name, buffer in self.reference.buffers.items()},
            )
            if not difference <= BOUND:
                self.problems.append(f"module buffers differ by {difference:.1e}")
        if self.graphs[-1] != self.graphs[1] and not self.real.is_data_dependent:
            self.problems.append(f"new graphs after step 2: {self.graphs}")
        if bool(self.graphs[-1]) != (self.case.way != "eager path"):
            self.problems.append(f"{self.graphs[-1]} graphs")
        self.launched_in_graph = f"{len(buf.buffers.boundaries)}/{len(buf.plan.groups)}"


def run_cases(rank: int, cases: Sequence[Case]) -> list[Outcome]:
    """All cases, one eager run for all those that share model and optimizer."""
    world = dist.get_world_size()
    references: dict[tuple[str, str], Reference] = {}
    outcomes = []
    for case in cases:
        key = (case.model, case.optimizer)
        if key not in references:
            references[key] = train_reference(MODELS[case.model], case.optimizer, rank, world)
        reference = references[key]
        # What would make the comparison an empty one.
        assert reference.least_moved > 10 * BOUND, f"{case}: a parameter moved only {reference.least_moved}"
        assert bool(reference.n_without_gradient) == MODELS[case.model].has_unused, f"{case}: unused parameters"
        outcomes.append(Run(case, rank, reference).train())
    return outcomes


def show(results: Sequence[Sequence[Outcome]]) -> None:
    """Print model by way, then each case in detail; ``results`` by rank."""
    cases = [outcome.case for outcome in results[0]]
    summary = []
    for model in dict.fromkeys(case.model for case in cases):
        row = {"model": model}
        for way in WAYS:
            mine = [outcome for rank in results for outcome in rank if outcome.case[:2] == (model, way)]
            problems = [outcome.problem for outcome in mine if outcome.problem]
            if mine:
                row[way] = " ".join(problems[0].split())[:160] if problems else "equal"
        summary.append(row)
    details = [
        {
            **outcome.case._asdict(),
            "difference": f"{max(rank[i].difference for rank in results):.1e}",
            "graphs after each step": " ".join(map(str, outcome.graphs)),
            "launched in graph": outcome.launched_in_graph,
            "seconds": round(outcome.seconds, 1),
        }
        for i, outcome in enumerate(results[0])
    ]
    print("", tabulate(summary, headers="keys"), tabulate(details, headers="keys"), sep="\n\n")


def check(results: Sequence[Sequence[Outcome]]) -> None:
    show(results)
    problems = [
        f"rank {rank}, {outcome.case}: {outcome.problem}"
        for rank, outcomes in enumerate(results)
        for outcome in outcomes
        if outcome.problem
    ]
    assert not problems, "\n".join(problems)


def both_modes(models: Iterable[str], *ways: str) -> list[Case]:
    return [Case(model, way, mode) for model in models for way in ways for mode in MODES]


@pytest.mark.parametrize("world", [1, 2])
def test_equals_eager(ranks: Callable[[int], RankGroup], world: int) -> None:
    models = [name for name in MODELS if name not in LONG]
    cases = both_modes(models, "aot_eager", "eager path") + both_modes(LONG, "eager path")
    cases += [Case("Llama", "aot_eager", "sharded", "AdamW"), Case("BERT", "aot_eager", "plain", "AdamW")]
    check(ranks(world).run(run_cases, cases, timeout=280))


@pytest.mark.parametrize("model", ["GPT-2", "Llama"])
def test_inductor_equals_eager(ranks: Callable[[int], RankGroup], model: str) -> None:
    check(ranks(1).run(run_cases, both_modes([model], "inductor"), timeout=200))


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("model", LONG)
def test_experts_equal_eager(ranks: Callable[[int], RankGroup], model: str, world: int) -> None:
    check(ranks(world).run(run_cases, both_modes([model], "aot_eager"), timeout=600))


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_with_inductor(ranks: Callable[[int], RankGroup], model: str, world: int) -> None:
    check(ranks(world).run(run_cases, both_modes([model], "inductor"), timeout=600))


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("world", [1, 2])
def test_bare_form_equals_eager(ranks: Callable[[int], RankGroup], world: int) -> None:
    check(ranks(world).run(run_cases, [Case(model, "bare form", "plain") for model in MODELS], timeout=600))


def count_graphs(rank: int, model: str) -> list[list[int]]:
    """Dynamo graphs after each step with torch's own ``aot_eager``, and through buffers in both modes."""
    real = MODELS[model]
    reference = train_reference(real, "SGD", rank, 1)
    results = [list(Run(case, rank, reference).train().graphs) for case in both_modes([model], "aot_eager")]
    call = torch.compile(seeded(real.build), backend="aot_eager")
    before = counters["stats"]["unique_graphs"]
    own = []
    for step in range(STEPS):
        for micro in range(micro_batches(step)):
            call(**data(real, step, micro, rank))["loss"].backward()
        own.append(counters["stats"]["unique_graphs"] - before)
    return [own, *results]


@pytest.mark.slow
@pytest.mark.parametrize("model", [name for name in MODELS if not MODELS[name].is_data_dependent])
def test_graphs_are_those_of_torch_compile(ranks: Callable[[int], RankGroup], model: str) -> None:
    (counts,) = ranks(1).run(count_graphs, model, timeout=200)
    assert counts[1:] == [counts[0]] * len(MODES)
