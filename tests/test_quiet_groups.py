"""[Note: quiet bucket groups] in ``leaf_hooks.py``: what a graph covers has no hooks, and gradients from outside graphs
are found all the same. One process, gradients not published, beside eager training of a plain model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import Mlp, batch, fresh_compiler, seeded, twin
from torch import Tensor

import megabuf_fx as mb

BOUND = 1e-6
"""Of gradients near 1: a graph adds its contributions in another order."""


class Run:
    """An attached model, compiled, and a plain one that gets the same gradients."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[int] = []
        """Parameters whose hooks have run."""
        accumulate = mb.MegabufHandle._after_accumulate

        def record(handle: mb.MegabufHandle, index: int) -> None:
            self.calls.append(index)
            accumulate(handle, index)

        monkeypatch.setattr(mb.MegabufHandle, "_after_accumulate", record)
        self.model: Any = seeded(Mlp)
        self.plain: Any = twin(self.model)
        self.buf = mb.attach(self.model, mb.MegabufConfig(bucket_size=600, inner_compiler="aot_eager"))
        self.call: Any = torch.compile(self.model, backend="megabuf")
        self.count = len(self.buf.plan.groups)

    @property
    def quiet(self) -> set[int]:
        return self.buf.buffers.writes.leaf_hooks.quiet

    def loss(self, call: Any, micro: int = 0) -> Tensor:
        result: Tensor = call(batch(0, micro, 0, 8, 13)).square().mean()
        return result

    def step(self) -> None:
        self.loss(self.call).backward()
        self.loss(self.plain).backward()
        self.check()
        self.next()

    def next(self) -> None:
        self.buf.zero_grad()
        self.plain.zero_grad()
        self.calls.clear()

    def check(self) -> None:
        """Finish, and compare the gradients of both."""
        self.buf.finish_grad_sync()
        for (name, param), other in zip(self.model.named_parameters(), self.plain.parameters()):
            assert other.grad is not None
            assert torch.allclose(param.main_grad, other.grad, rtol=0, atol=BOUND), name
            assert param.grad is None, name


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    yield Run(monkeypatch)
    fresh_compiler()


def penalty(model: Any) -> Tensor:
    result: Tensor = model.fc1.weight.square().sum()
    return result


def test_hooks_do_not_run_for_gradients_of_graphs(run: Run) -> None:
    assert run.count == 2
    for _ in range(3):
        run.loss(run.call).backward()
        run.loss(run.plain).backward()
        assert run.calls == []
        assert run.quiet == set(range(run.count))
        run.check()
        run.next()


def test_eager_training_before_compiling_has_hooks(run: Run) -> None:
    run.loss(run.model).backward()
    run.loss(run.plain).backward()
    assert sorted(run.calls) == list(range(len(run.buf.plan.params)))
    run.check()
    run.next()
    run.step()
    assert run.quiet == set(range(run.count)), "nothing outside graphs since then"


def test_a_penalty_from_the_first_step_on(run: Run) -> None:
    group = run.buf.buffers.group_of[0]
    for step in range(3):
        for call, model in ((run.call, run.model), (run.plain, run.plain)):
            (run.loss(call) + penalty(model)).backward()
        members = sorted(run.buf.buffers.writes.params_of[group])
        assert sorted(run.calls) == ([] if step == 0 else members), "it is found when the first step ends"
        run.check()
        assert run.quiet == set(range(run.count)) - {group}
        run.next()


def test_a_later_penalty_is_refused_where_its_bucket_was_reduced(run: Run) -> None:
    run.step()
    (run.loss(run.call) + penalty(run.model)).backward()
    with pytest.raises(RuntimeError, match=r"'fc1\.weight' got a gradient from outside the compiled graph after its"):
        run.buf.finish_grad_sync()
    run.next()
    for call, model in ((run.call, run.model), (run.plain, run.plain)):
        (run.loss(call) + penalty(model)).backward()
    run.check()


def test_a_later_penalty_under_no_sync(run: Run) -> None:
    run.step()
    with run.buf.no_sync():
        (run.loss(run.call) + penalty(run.model)).backward()
    run.loss(run.call, micro=1).backward()
    (run.loss(run.plain) + penalty(run.plain)).backward()
    run.loss(run.plain, micro=1).backward()
    run.check()


@pytest.mark.parametrize("eager_first", [True, False])
def test_eager_micro_batches(run: Run, *, eager_first: bool) -> None:
    """The model itself is called instead of the compiled one, for one micro-batch; the step is not refused."""
    run.step()
    optimizer = mb.DistributedOptimizer(run.model.parameters(), torch.optim.SGD, lr=0.0)
    first, last = (run.model, run.call) if eager_first else (run.call, run.model)
    with run.buf.no_sync():
        run.loss(first).backward()
    run.loss(last, micro=1).backward()
    for micro in range(2):
        run.loss(run.plain, micro).backward()
    optimizer.step()
    run.check()
    assert run.quiet == set()


def test_zero_grad_drops_what_was_left(run: Run) -> None:
    run.step()
    with run.buf.no_sync():
        penalty(run.model).backward()
    run.buf.zero_grad()
    assert all(param.grad is None for param in run.model.parameters())
    assert run.buf.buffers.group_of[0] not in run.quiet
    run.step()


def test_what_was_left_is_scaled(run: Run) -> None:
    run.step()
    with run.buf.no_sync():
        run.loss(run.call).backward()
        penalty(run.model).backward()
        run.buf.scale_gradients(0.5)
    ((run.loss(run.plain) + penalty(run.plain)) / 2).backward()
    run.check()


def test_left_gradients_are_no_reason_for_a_foreign_step(run: Run) -> None:
    """An optimizer of torch would step one parameter of many."""
    run.step()
    penalty(run.model).backward()
    with pytest.raises(RuntimeError, match="steps parameters of an attached model"):
        torch.optim.SGD(run.model.parameters(), lr=0.1).step()


def test_hooks_of_the_user_run_first(run: Run) -> None:
    run.step()
    seen: list[float] = []

    def look(param: Tensor) -> None:
        assert param.grad is not None
        seen.append(param.grad.sum().item())

    run.model.fc1.weight.register_post_accumulate_grad_hook(look)
    with run.buf.no_sync():
        penalty(run.model).backward()  # before any forward that could notice the hook
    run.loss(run.call).backward()
    (run.loss(run.plain) + penalty(run.plain)).backward()
    run.check()
    assert len(seen) == 2
    assert run.buf.buffers.group_of[0] not in run.quiet


@pytest.mark.parametrize("asked", [True, False])
def test_plain_gradients(run: Run, *, asked: bool) -> None:
    """``torch.autograd.grad`` leaves buffers alone, ``backward(inputs=...)`` accumulates by itself."""
    run.step()
    models = ((run.call, run.model), (run.plain, run.plain))
    if asked:
        found, expected = (torch.autograd.grad(run.loss(call), [*model.parameters()]) for call, model in models)
        assert all(map(torch.allclose, found, expected))
    else:
        with run.buf.no_sync():
            for call, model in models:
                run.loss(call).backward(inputs=[model.fc1.weight])
    for call, _ in models:
        run.loss(call, micro=1).backward()
    run.check()


def test_kernels_that_add_by_themselves_are_refused(run: Run) -> None:
    """They may give autograd nothing, so that no hook would run either."""
    run.step()
    run.loss(run.call).backward()
    run.model.fc2.weight.grad_added_to_main_grad = True
    with pytest.raises(NotImplementedError, match=r"added the gradient of 'fc2\.weight' to main_grad by itself"):
        run.buf.finish_grad_sync()


@pytest.mark.parametrize("forwards", [1, 2])
def test_what_no_graph_launches_starts_after_the_last_graph(
    run: Run, monkeypatch: pytest.MonkeyPatch, forwards: int
) -> None:
    monkeypatch.setattr("megabuf_fx.traced_graph.MAX_LAUNCH_SETS", 0)
    losses = [run.loss(run.call, micro) for micro in range(forwards)]
    for micro, loss in enumerate(losses, 1):
        loss.backward()
        started = [run.buf.buffers.reducer.is_started(group) for group in range(run.count)]
        assert started == [micro == forwards] * run.count
    assert not any(run.buf.buffers.boundaries.values())
    for micro in range(forwards):
        run.loss(run.plain, micro).backward()
    run.check()


def test_renewed_nodes(run: Run) -> None:
    run.step()
    run.buf.renew_hooks()
    assert run.quiet == set(range(run.count))
    run.step()
    run.buf.buffers.writes.wake(run.quiet)
    run.buf.renew_hooks()
    run.step()
    assert run.quiet == set()


def test_a_parameter_that_is_frozen_for_the_first_step(run: Run) -> None:
    for model in (run.model, run.plain):
        model.fc2.weight.requires_grad_(False)
    run.loss(run.call).backward()
    assert run.quiet == set(range(run.count)) - {run.buf.buffers.group_of[2]}
    run.next()
    for model in (run.model, run.plain):
        model.fc2.weight.requires_grad_(True)
    fresh_compiler()  # torch 2.11 does not compile again by itself, so a plainly compiled model gets no gradient either
    run.step()
    assert run.quiet == set(range(run.count))


def test_a_graph_through_a_frozen_model_starts_nothing(run: Run) -> None:
    run.step()
    run.model.requires_grad_(False)
    x = batch(0, 0, 0, 8, 13).requires_grad_()
    run.call(x).sum().backward()
    assert x.grad is not None
    run.model.requires_grad_(True)
    assert not any(run.buf.buffers.reducer.is_started(group) for group in range(run.count))
    run.step()


def test_detached_models_have_no_hooks(run: Run) -> None:
    run.step()
    run.buf.detach()
    run.loss(run.model).backward()
    run.loss(run.plain).backward()
    assert run.calls == []
    for param, other in zip(run.model.parameters(), run.plain.parameters()):
        assert param.grad is not None
        assert other.grad is not None
        assert torch.equal(param.grad, other.grad)
