"""Pipelines of two stages against the same model in one process: 1F1B, and interleaved with two chunks per rank.

Compared after every step: every parameter within ``BOUND``, and the norm before clipping to 1e-5. Messages are real
sends between processes. The loss is a sum over tokens, divided by their number in ``finalize_model_grads``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import RankGroup, error_text, fresh_compiler, max_difference, params_of, seeded
from parallel_models import Action, Chain, Pipeline, Place, Stage, loss_sum, place, schedule, text
from torch import nn

import megabuf_fx as mb

pytestmark = pytest.mark.dist

BOUND = 2e-5
STEPS, MICROS, MAX_NORM = 3, 4, 0.3
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}

MODES: dict[str, dict[str, Any]] = {
    "sharded": {},
    "overlap": {"overlap_param_gather": True},
    "plain": {"use_distributed_optimizer": False},
}


class Reference:
    """The chain in one piece, trained on everybody's tokens."""

    def __init__(self, stages: int) -> None:
        self.chain = Chain(stages)
        self.optimizer = torch.optim.AdamW(self.chain.parameters(), **ADAMW)

    def step(self, step: int, dp_size: int) -> tuple[float, int]:
        """The norm before clipping, and the number of tokens."""
        count = 0
        for dp_rank in range(dp_size):
            for micro in range(MICROS):
                tokens, mask = text(step, micro, dp_rank)
                loss_sum(self.chain(tokens), tokens, mask).backward()
                count += int(mask.sum())
        for param in self.chain.parameters():
            assert param.grad is not None
            param.grad.div_(count)
        norm = nn.utils.clip_grad_norm_(self.chain.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.item(), count


class Training:
    """This rank's chunks."""

    def __init__(self, at: Place, chunks: int, mode: str, *, is_compiled: bool, is_aligned: bool = False) -> None:
        self.at, self.is_aligned = at, is_aligned
        stages = at.groups.size("pp")
        self.numbers = [chunk * stages + at.axis_rank for chunk in range(chunks)]
        self.reference = Reference(chunks * stages)
        self.models: list[Any] = []
        self.handles: list[mb.MegabufHandle] = []
        options = {**MODES[mode], "calculate_per_token_loss": True, "inner_compiler": "aot_eager", "bucket_size": 40}
        if is_aligned and mode == "overlap":
            options["align_param_gather"] = True
        for number in self.numbers:
            model = seeded(lambda n=number: Stage(n, chunks * stages), seed=number)  # type: ignore[misc]
            model.load_state_dict(self.reference.chain.stage_params(number))
            model.mark()  # type: ignore[operator]
            self.models.append(model)
            self.handles.append(mb.attach(model, mb.MegabufConfig(**options), process_group=at.dp))
        self.optimizers = [
            mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, groups=at.groups, **ADAMW)
            for model in self.models
        ]
        calls = [torch.compile(m, backend="megabuf") for m in self.models] if is_compiled else self.models
        self.pipeline = Pipeline(at, calls, MICROS)

    def step(self, step: int) -> str | None:
        self.poison()
        tokens = torch.zeros(())
        with contextlib.ExitStack() as stack:
            for handle in self.handles:
                # The schedule says when collectives start; see ``after``.
                stack.enter_context(handle.no_sync())
                if self.is_aligned:
                    handle.start_param_sync()
            self.pipeline.run(step, tokens, self.after if self.is_aligned else None)
        if self.is_aligned:
            for handle in reversed(self.handles):
                handle.start_grad_sync()
        mb.finalize_model_grads(self.handles, tokens, groups=self.at.groups)
        norm = mb.clip_grad_norm_(self.optimizers, MAX_NORM)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        expected, count = self.reference.step(step, self.at.dp_size)
        if tokens != count:
            return f"step {step}: {tokens} tokens, expected {count}"
        if abs(norm.item() - expected) > 1e-5 * expected:
            return f"step {step}: norm {norm.item()}, expected {expected}"
        return None

    def after(self, k: int, action: Action) -> None:
        """Reductions of a chunk start at the same time on all stages (Megatron ``align_grad_reduce``): stage ``s`` is
        ``s`` backwards ahead of the first."""
        stages, chunks = self.pipeline.stages, len(self.models)
        aligned = k - self.at.axis_rank
        if aligned < 0:
            return
        backwards = [a for a in schedule(self.at.axis_rank, stages, chunks, MICROS) if not a.is_forward]
        done = backwards[aligned]
        if not any(a.chunk == done.chunk for a in backwards[aligned + 1 :]):
            self.handles[done.chunk].start_grad_sync()

    def poison(self) -> None:
        """Nothing may depend on what a slot held before."""
        for model in self.models:
            for param in model.parameters():
                if param.grad is None:
                    param.main_grad.fill_(float("nan"))

    def compare(self) -> str | None:
        for number, model, handle in zip(self.numbers, self.models, self.handles):
            handle.sync_params()
            difference = max_difference(params_of(model), self.reference.chain.stage_params(number))
            if not difference <= BOUND:
                return f"stage {number} differs by {difference}"
        return None

    def ends(self) -> list[float]:
        """This rank's copy of the tied weight, if it has one."""
        return [value for model in self.models if model.tied is not None for value in model.tied.flatten().tolist()]


def train(at: Place, chunks: int, mode: str, is_compiled: bool, is_aligned: bool) -> tuple[str | None, list[float]]:
    """What is wrong, and the tied weight."""
    training = Training(at, chunks, mode, is_compiled=is_compiled, is_aligned=is_aligned)
    problem = None
    for step in range(STEPS):
        problem = problem or training.step(step)
        if not (mode == "overlap" and step + 1 < STEPS):
            # Comparing gathers by hand, so with the overlap only the last step is.
            problem = problem or training.compare()
    values = training.ends()
    for handle in training.handles:
        handle.detach()
    return problem, values


def train_all(
    rank: int, stages: int, chunks: int, cases: list[tuple[str, bool, bool]]
) -> list[tuple[str, str | None, list[float]]]:
    at = place(rank, "pp", stages)
    answers = []
    for mode, is_compiled, is_aligned in cases:
        answers.append((f"{mode} {is_compiled=} {is_aligned=}", *train(at, chunks, mode, is_compiled, is_aligned)))
        fresh_compiler()
    return answers


def check(answers: list[list[tuple[str, str | None, list[float]]]]) -> None:
    problems = [f"rank {rank}, {case}: {text}" for rank, each in enumerate(answers) for case, text, _ in each if text]
    assert not problems, "\n".join(problems)
    for ends in zip(*answers):
        # Copies of one weight stay the same, bit for bit, on both stages of every replica.
        assert all(values == ends[0][2] for _, _, values in ends if values)


@pytest.mark.parametrize("world", [2, 4])
def test_1f1b_equals_one_process(ranks: Callable[[int], RankGroup], world: int) -> None:
    cases = [("sharded", True, False), ("plain", False, False), ("overlap", True, False)]
    check(ranks(world).run(train_all, 2, 1, cases, timeout=120))


def without_embedding_group(rank: int) -> str:
    at = place(rank, "pp", 3)
    training = Training(at, 1, "sharded", is_compiled=False)
    groups = mb.ModelParallelGroups(dp_cp=at.groups.dp_cp, pp=at.groups.pp)
    text = error_text(lambda: mb.finalize_model_grads(training.handles, groups=groups))
    training.handles[0].detach()
    return text


def test_a_stage_between(ranks: Callable[[int], RankGroup]) -> None:
    """The second of three stages has no part of the embedding, and is told of what is wrong at its ends."""
    check(ranks(3).run(train_all, 3, 1, [("sharded", False, False)]))
    line = "finalize_model_grads needs ModelParallelGroups(embd=...) for word embedding gradients "
    assert ranks(3).run(without_embedding_group) == [
        f"ValueError: {line}('embedding.weight')",
        f"ValueError: rank 0 of pp: {line}('embedding.weight')",
        f"ValueError: {line}('output.weight')",
    ]


def test_interleaved_equals_one_process(ranks: Callable[[int], RankGroup]) -> None:
    cases = [("sharded", True, True), ("overlap", True, True), ("overlap", False, False)]
    check(ranks(4).run(train_all, 2, 2, cases, timeout=120))


def order_of_starts(rank: int) -> tuple[list[str], list[str]]:
    """Collectives of a later step in the order in which they start, by chunk: gathers, reductions."""
    training = Training(place(rank, "pp"), 2, "overlap", is_compiled=False, is_aligned=True)
    training.step(0)
    log: list[str] = []
    for chunk, handle in enumerate(training.handles):
        for target, name in ((handle.buffers.gatherer, "start_gather"), (handle.buffers.reducer, "_launch")):
            original = getattr(target, name)

            def watched(
                group: int, chunk: int = chunk, name: str = name, original: Any = original, **options: bool
            ) -> None:
                log.append(f"{name} {chunk}")
                original(group, **options)

            setattr(target, name, watched)
    original_run = training.pipeline.run

    def run(step: int, tokens: torch.Tensor, after: Any) -> None:
        def logged(k: int, action: Action) -> None:
            log.append(f"backward {k}")
            after(k, action)

        log.append("schedule")
        original_run(step, tokens, logged)

    training.pipeline.run = run  # type: ignore[assignment, method-assign]
    training.step(1)
    gathers, rest = log[: log.index("schedule")], log[log.index("schedule") :]
    for handle in training.handles:
        handle.detach()
    kept = [entry for i, entry in enumerate(rest) if not (entry.startswith("_launch") and rest[i - 1] == entry)]
    return sorted(set(gathers)), kept


def test_collectives_are_aligned(ranks: Callable[[int], RankGroup]) -> None:
    """All gathers start before the schedule. A chunk's reductions start after its last backward on the first stage, and
    on the second one backward later, which is when the first is there."""
    for rank, (gathers, log) in enumerate(ranks(4).run(order_of_starts)):
        assert gathers == ["start_gather 0", "start_gather 1"]
        assert not any(entry.startswith("start_gather") for entry in log)
        # Backwards 0, 1, 4, 5 are of chunk 1, the others of chunk 0.
        position = log.index("_launch 1")
        assert log[position - 1] == f"backward {5 + rank % 2}"
        assert log[log.index("_launch 0") - 1] == "backward 7"


def sends_of_finalize(rank: int) -> list[tuple[str, int]]:
    """What ``finalize_model_grads`` sends of parameters in a later step."""
    training = Training(place(rank, "pp"), 1, "sharded", is_compiled=False, is_aligned=True)
    training.step(0)
    found: list[tuple[str, int]] = []
    original = mb.ModelParallelGroups.reduce

    def watched(self: Any, name: str, value: torch.Tensor, *args: Any) -> torch.Tensor:
        found.append((name, value.numel()))
        return original(self, name, value, *args)

    with mock.patch.object(mb.ModelParallelGroups, "reduce", watched):
        training.step(1)
    for handle in training.handles:
        handle.detach()
    return found


def test_only_what_is_owned_is_sent(ranks: Callable[[int], RankGroup]) -> None:
    """Megatron sends all 90 elements of the embedding on every data-parallel rank."""
    found = ranks(4).run(sends_of_finalize)
    sent = [[numel for name, numel in each if name == "embd"] for each in found]
    # One more says whether it was used. The bucket has 128 elements, of which the first rank owns 64.
    assert sent == [[65], [65], [27], [27]]
    ranks(4).close()
