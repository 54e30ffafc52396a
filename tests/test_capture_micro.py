"""``capture_micro_batch``: one captured forward and backward serves all micro-batches of a step, and says when not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Mlp, RankGroup, batch, fresh_compiler, max_difference, params_of, seeded
from torch import Tensor, nn

import megabuf_fx as mb
from megabuf_fx.tape import Tape

MICRO_BATCHES = 3
MODES: dict[str, dict[str, Any]] = {
    "sharded": {},
    "overlap": {"overlap_param_gather": True},
    "whole": {"use_distributed_optimizer": False},
}


class Dropped(Mlp):
    """With random numbers, and a parameter that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(nn.functional.dropout(x, 0.2, self.training))
        return result


class Run:
    """``has_penalty`` gives one matrix a gradient from outside the graph, too."""

    def __init__(
        self,
        mode: str,
        *,
        is_compiled: bool,
        rank: int = 0,
        dtype: torch.dtype = torch.float32,
        has_penalty: bool = False,
        inner: Any = "aot_eager",
    ) -> None:
        self.rank, self.dtype, self.has_penalty = rank, dtype, has_penalty
        self.model: Any = seeded(Dropped).to(dtype)
        # Fused products round a sum of micro-batches once less, and a flagged graph has none.
        config = mb.MegabufConfig(
            inner_compiler=inner,
            bucket_size=300,
            grad_reduce_in_fp32=True,
            gradient_accumulation_fusion=False,
            **MODES[mode],
        )
        self.buf = mb.attach(self.model, config)
        self.call: Any = torch.compile(self.model, backend="megabuf") if is_compiled else self.model
        self.optimizer = mb.DistributedOptimizer(self.model.parameters(), torch.optim.AdamW, lr=0.01)

    def micro_batch(self, x: Tensor) -> Tensor:
        loss: Tensor = self.call(x).float().square().mean()
        if self.has_penalty:
            loss = loss + 0.1 * self.model.fc1.weight.float().square().sum()
        loss.backward()
        return loss.detach()

    def batch(self, step: int, micro: int) -> Tensor:
        return batch(step, micro, self.rank, 8, 13).to(self.dtype)

    def train(self, micro_batch: Callable[[Tensor], Tensor], steps: range) -> list[Tensor]:
        losses = []
        for step in steps:
            for micro in range(MICRO_BATCHES):
                is_last = micro + 1 == MICRO_BATCHES and not self.has_penalty
                with contextlib.nullcontext() if is_last else self.buf.no_sync():
                    losses.append(micro_batch(self.batch(step, micro)))
            self.buf.finish_grad_sync()
            self.optimizer.clip_grad_norm_(0.05)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.buf.sync_params()
        return losses


def compare(rank: int, mode: str, is_compiled: bool, **options: Any) -> list[str]:
    """What differs between training with a captured micro-batch and without."""
    runs: list[tuple[list[Tensor], dict[str, Tensor]]] = []
    for is_captured in (False, True):
        fresh_compiler()
        run = Run(mode, is_compiled=is_compiled, rank=rank, **options)
        # What an earlier step or nobody has left in the buffers must not matter.
        for main_grad in run.buf.buffers.main_grads:
            main_grad.fill_(float("nan"))
        torch.manual_seed(1 + rank)
        function: Callable[[Tensor], Tensor] = run.micro_batch
        if is_captured:
            function = mb.capture_micro_batch(run.micro_batch, run.batch(9, 9), model=run.call)
        losses = run.train(function, range(4))
        runs.append((losses, params_of(run.model)))
        run.buf.detach()
    (losses, params), (replayed, others) = runs
    problems = [f"loss {index}" for index, (a, b) in enumerate(zip(losses, replayed)) if not torch.equal(a, b)]
    difference = max_difference(params, others)
    return [*problems, f"parameters by {difference}"] if difference else problems


def compare_all(rank: int, is_compiled: bool) -> dict[str, list[str]]:
    found = {}
    for mode in MODES:
        found[mode] = compare(rank, mode, is_compiled)
        found[f"{mode} bf16"] = compare(rank, mode, is_compiled, dtype=torch.bfloat16)
        found[f"{mode} penalty"] = compare(rank, mode, is_compiled, has_penalty=True)
    return {name: problems for name, problems in found.items() if problems}


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "eager_path"])
def test_bitwise_as_without(is_compiled: bool) -> None:
    assert compare_all(0, is_compiled) == {}


@pytest.mark.dist
@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "eager_path"])
def test_bitwise_as_without_on_two_ranks(ranks: Callable[[int], RankGroup], is_compiled: bool) -> None:
    assert ranks(2).run(compare_all, is_compiled) == [{}, {}]


def test_with_inductor() -> None:
    """Variants of one graph may contract a product and a sum differently, so not bitwise."""
    results = []
    for is_captured in (False, True):
        fresh_compiler()
        run = Run("sharded", is_compiled=True, inner="inductor")
        torch.manual_seed(1)
        function: Any = run.micro_batch
        if is_captured:
            function = mb.capture_micro_batch(run.micro_batch, run.batch(9, 9), model=run.model)
        run.train(function, range(3))
        results.append(params_of(run.model))
        run.buf.detach()
    assert max_difference(*results) <= 1e-6


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "eager_path"])
def test_ordinary_micro_batches_between_replays(is_compiled: bool) -> None:
    results = []
    for captured_ones in ((), (0,), (1,), (0, 2), (1, 2)):
        fresh_compiler()
        run = Run("sharded", is_compiled=is_compiled)
        run.model.eval()
        captured = mb.capture_micro_batch(run.micro_batch, run.batch(9, 9), model=run.model)
        for step in range(2):
            for micro in range(MICRO_BATCHES):
                with run.buf.no_sync():
                    (captured if micro in captured_ones else run.micro_batch)(run.batch(step, micro))
            run.buf.finish_grad_sync()
            run.optimizer.step()
            run.optimizer.zero_grad()
        results.append(params_of(run.model))
        run.buf.detach()
    assert [max_difference(results[0], other) for other in results[1:]] == [0.0] * 4


def test_any_optimizer_finds_the_gradients() -> None:
    run = Run("whole", is_compiled=True)
    captured = mb.capture_micro_batch(run.micro_batch, run.batch(9, 9), model=run.model)
    assert all(param.grad is None for param in run.model.parameters())
    torch.manual_seed(5)
    captured(run.batch(0, 0))
    run.buf.finish_grad_sync()
    assert run.model.unused.grad is None
    assert run.model.fc1.weight.grad.data_ptr() == run.model.fc1.weight.main_grad.data_ptr()
    first = run.model.fc1.weight.grad.clone()
    for param in run.model.parameters():
        param.grad = None
    run.model.eval()
    with pytest.raises(mb.CaptureError, match=r"modules in eval mode was \[\] and is \['the model', "):
        captured(run.batch(0, 0))
    run.model.train()
    torch.manual_seed(5)
    captured(run.batch(0, 0))
    run.buf.finish_grad_sync()
    # Nothing is left of the first gradient.
    assert torch.equal(run.model.fc1.weight.grad, first)


def test_a_replay_after_the_reduction_is_refused() -> None:
    run = Run("sharded", is_compiled=False)
    captured = mb.capture_micro_batch(run.micro_batch, run.batch(9, 9), model=run.model)
    captured(run.batch(0, 0))
    run.buf.finish_grad_sync()
    with pytest.raises(RuntimeError, match="whose gradients were already reduced"):
        captured(run.batch(0, 1))


def test_nothing_is_communicated_inside_and_one_number_decides() -> None:
    fresh_compiler()
    run = Run("overlap", is_compiled=True)
    captured = mb.capture_micro_batch(run.micro_batch, run.batch(9, 9), model=run.model)
    assert isinstance(captured.graph, Tape)
    names = [line[0] for line in captured.graph.journal]
    assert not any("start_" in name or "all_reduce" in name for name in names)
    used = [line for line in captured.graph.journal if any("flags.accumulate" in str(value) for value in line)]
    assert used
    flags = run.buf.flags
    values = []
    for micro in range(2):
        captured(run.batch(0, micro))
        values.append(int(flags.accumulate))
    run.optimizer.step()
    run.optimizer.zero_grad()
    captured(run.batch(1, 0))
    assert [*values, int(flags.accumulate)] == [0, 1, 0]


def test_a_graph_with_parameters_of_two_models_is_refused() -> None:
    fresh_compiler()
    models = [seeded(Mlp), seeded(Mlp, 1)]
    _, other = (mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager")) for model in models)

    @torch.compile(backend="megabuf")
    def both(x: Tensor) -> Tensor:
        result: Tensor = models[0](x).square().mean() + models[1](x).square().mean()
        return result

    with other.no_sync(), pytest.raises(NotImplementedError, match="spans several attached models"):
        mb.capture_micro_batch(lambda x: both(x).backward(), batch(0, 0, 0, 8, 13), model=models[0])


def test_what_a_micro_batch_reads_on_the_host_is_named() -> None:
    run = Run("sharded", is_compiled=False)
    with pytest.raises(mb.CaptureError, match=r"host read: aten::_local_scalar_dense.*test_capture_micro\.py"):
        mb.capture_micro_batch(lambda x: run.micro_batch(x).item(), run.batch(0, 0), model=run.model)
