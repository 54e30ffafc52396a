"""NaN, Inf and large gradients: found before they are sent, reported on every rank, and training goes on afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Mlp, RankGroup, batch, error_text, fresh_compiler, max_difference, params_of, seeded
from torch import Tensor

import megabuf_fx as mb

MODES: dict[str, dict[str, Any]] = {
    "sharded": {},
    "sharded_no_overlap": {"overlap_grad_reduce": False},
    "plain": {"use_distributed_optimizer": False},
}


def prepare(mode: str, is_compiled: bool, **checks: bool) -> tuple[Any, mb.MegabufHandle, Any, Any]:
    model = seeded(Mlp)
    buf = mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=300, **{**MODES[mode], **checks}))
    call = torch.compile(model, backend="megabuf") if is_compiled else model
    if buf.plan.sharded:
        return model, buf, call, mb.DistributedOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
    return model, buf, call, torch.optim.SGD(model.parameters(), lr=0.01)


def backward(call: Any, x: Tensor, factor: float) -> None:
    (call(x).square().mean() * factor).backward()


def one_rank_is_bad(rank: int, mode: str, is_compiled: bool, bad: float) -> list[str]:
    """The error on this rank, and what is wrong afterwards."""
    model, buf, call, optimizer = prepare(mode, is_compiled, check_for_nan_in_grad=True)
    before = params_of(model)

    def step(factor: float) -> None:
        backward(call, batch(0, 0, rank, 8, 13), factor)
        optimizer.step()

    text = error_text(lambda: step(bad if rank == 1 else 1.0))
    buf.sync_params()
    problems = [] if max_difference(params_of(model), before) == 0.0 else ["the step was taken"]
    optimizer.zero_grad()
    step(1.0)
    buf.sync_params()
    if not 0.0 < max_difference(params_of(model), before) < 1.0:
        problems.append("the next step is wrong")
    buf.detach()
    return [text, *problems]


def all_modes(rank: int, bad: float) -> dict[str, list[str]]:
    answers = {}
    for mode in MODES:
        for is_compiled in (True, False):
            answers[f"{mode}, compiled {is_compiled}"] = one_rank_is_bad(rank, mode, is_compiled, bad)
            fresh_compiler()
    return answers


@pytest.mark.dist
@pytest.mark.parametrize(("bad", "kind"), [(float("nan"), "NaN"), (float("inf"), "NaN|Inf")])
def test_every_rank_names_the_parameter(ranks: Callable[[int], RankGroup], bad: float, kind: str) -> None:
    for rank, answers in enumerate(ranks(2).run(all_modes, bad)):
        for case, (text, *problems) in answers.items():
            assert not problems, (case, problems)
            assert text.startswith("RuntimeError: found NaN or Inf in local gradients before their reduction"), case
            where = "this rank" if rank == 1 else "another rank"
            assert any(f"'fc3.bias' (bucket 0, {word}, {where})" in text for word in kind.split("|")), (case, text)
            assert "call zero_grad()" in text


def test_only_the_bad_parameters_are_named() -> None:
    _, buf, call, _ = prepare("sharded", False, check_for_nan_in_grad=True)
    backward(call, batch(0, 0, 0, 8, 13), 1.0)
    buf.buffers.main_grads[1].view(-1)[3] = float("-inf")
    text = error_text(buf.finish_grad_sync)
    assert "'fc1.bias' (bucket" in text
    assert "Inf, this rank" in text
    assert "fc2" not in text


def test_a_huge_finite_gradient_is_no_inf() -> None:
    """The square of 1e30 is no fp32 number, but the gradient is."""
    _, buf, call, _ = prepare("sharded", False, check_for_nan_in_grad=True, check_for_large_grads=True)
    backward(call, batch(0, 0, 0, 8, 13), 1e30)
    buf.finish_grad_sync()


def test_large_gradients_are_reported_and_do_not_stop(caplog: pytest.LogCaptureFixture) -> None:
    _, buf, call, optimizer = prepare("sharded", True, check_for_large_grads=True)
    seen = []
    with caplog.at_level(logging.WARNING, "megabuf_fx"):
        for factor in (1.0, 2.0, 100.0, 2.0):
            caplog.clear()
            backward(call, batch(0, 0, 0, 8, 13), factor)
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(sorted(record.getMessage() for record in caplog.records))
    assert seen[0] == seen[1] == seen[3] == []
    assert len(seen[2]) == len(buf.plan.groups)
    assert seen[2][0].startswith("found unexpectedly large gradients in bucket 0 (fc3")


def test_without_the_option_nothing_is_looked_at() -> None:
    _, buf, call, _ = prepare("sharded", False)
    backward(call, batch(0, 0, 0, 8, 13), float("nan"))
    buf.finish_grad_sync()
