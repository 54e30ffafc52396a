"""``capture_step`` refuses by name what a replay would not do. What changes later: ``test_capture_validity.py``."""

from __future__ import annotations

import itertools

import pytest
import torch
from capture_runs import Run, differences, refusal
from helpers import Mlp, batch, fresh_compiler
from torch import Tensor

import megabuf_fx as mb

BAD_STEP = "this step cannot be captured:\n* the step does not end as it began, "


# Steps.


def test_a_backward_outside() -> None:
    run = Run(is_compiled=True)

    def step(x: Tensor) -> Tensor:
        run.step(x)
        result: Tensor = run.call(x[0])
        return result

    text = refusal(lambda: run.capture(step))
    assert text.startswith(BAD_STEP + "forwards without backward was ")
    assert "run every backward inside the step, or the forward under torch.no_grad()" in text


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "eager_path"])
def test_no_zero_grad(is_compiled: bool) -> None:
    """The second of two such steps is refused as an ordinary one."""
    run = Run(is_compiled=is_compiled)

    def step(x: Tensor) -> None:
        run.backward(x)
        run.optimizer.step()

    text = refusal(lambda: run.capture(step), RuntimeError)
    assert "whose gradients were already reduced" in text
    assert "call zero_grad() after every step" in text


def test_no_zero_grad_where_gradients_are_published() -> None:
    """Ordinary steps add up; replays would add to what the capture left."""
    run = Run("plain")

    def step(x: Tensor) -> None:
        run.backward(x)
        run.optimizer.step()

    text = refusal(lambda: run.capture(step))
    assert "the step leaves gradients in 'fc1.weight' for the next one: end the step with zero_grad()" in text


def test_gradients_before_the_capture() -> None:
    run = Run()
    with run.buf.no_sync():
        run.backward(run.batch(0))
    text = refusal(run.capture)
    assert text.startswith(
        "call zero_grad() before capture_step:\n* gradients of an earlier backward are in 'fc1.weight'"
    )
    run.optimizer.zero_grad()
    run.capture()


def test_zero_grad_every_other_step() -> None:
    run = Run("plain")
    count = iter(range(100))

    def step(x: Tensor) -> None:
        run.backward(x)
        run.optimizer.step()
        if next(count) % 2:
            run.optimizer.zero_grad()

    assert "two runs of the step differ" in refusal(lambda: run.capture(step))


def test_a_schedule_inside() -> None:
    run = Run()

    def step(x: Tensor) -> None:
        run.step(x)
        run.optimizer.param_groups[0]["weight_decay"] *= 0.9

    text = refusal(lambda: run.capture(step))
    assert text.startswith(BAD_STEP + "param_groups[0]['weight_decay'] was ")
    assert "change hyper-parameters between replays (lr), or capture again (all others)" in text


def test_a_schedule_of_the_learning_rate_inside() -> None:
    run = Run()
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1.0 / (1 + step))

    def step(x: Tensor) -> None:
        run.step(x)
        scheduler.step()

    text = refusal(lambda: run.capture(step))
    assert "the step changes its learning rate; step schedulers between replays" in text


def test_a_schedule_inside_of_an_optimizer_of_torch() -> None:
    run = Run("plain")
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1.0 / (1 + step))

    def step(x: Tensor) -> None:
        run.step(x)
        scheduler.step()

    assert "two runs of the step differ" in refusal(lambda: run.capture(step))


def test_a_loss_that_is_printed() -> None:
    run = Run()

    def step(x: Tensor) -> None:
        print(run.step(x)["loss"].item())

    text = refusal(lambda: run.capture(step))
    assert text.startswith(
        f"this step cannot be captured:\n* host read: aten::_local_scalar_dense reads a value on the host ({__file__}:"
    )


def test_all_that_is_wrong_is_said_at_once() -> None:
    run = Run()
    mask = torch.ones(8, dtype=torch.bool)

    def step(x: Tensor) -> None:
        run.backward(x[:, mask])
        run.optimizer.step()
        run.optimizer.param_groups[0]["eps"] *= 2
        run.optimizer.zero_grad()
        for row in x[0]:
            row.sum().item()

    lines = refusal(lambda: run.capture(step)).splitlines()
    assert lines[1].startswith("* the step does not end as it began, param_groups[0]['eps'] was ")
    assert lines[2].startswith("* data-dependent shape: aten::index with a mask (")
    assert lines[3].startswith("* host read: ")
    assert any(line.startswith("* undeclared memory: the step uses a (8,) bool tensor") for line in lines)


def test_numbers_that_python_computes() -> None:
    run = Run()
    count = iter(range(100))

    def step(x: Tensor) -> None:
        run.step(x * (1.0 + next(count)))

    text = refusal(lambda: run.capture(step))
    assert "two runs of the step differ: op 0, aten.mul.Tensor, differs between recordings: " in text
    assert text.endswith("A replay would repeat the first")


def test_memory_that_nobody_declared() -> None:
    run = Run()
    table = torch.ones(8, 13)
    text = refusal(lambda: run.capture(lambda x: run.step(x * table)))
    assert "* undeclared memory: the step uses a (8, 13) float32 tensor that is not declared" in text


def test_a_step_that_compiles_at_last() -> None:
    run = Run(is_compiled=True)
    torch._dynamo.reset()
    count = iter(range(100))

    def step(x: Tensor) -> None:
        # The fourth run, in which the first recording is made, meets another shape.
        run.step(x if next(count) < 2 else x[:, :5])

    assert "something was compiled in the last steps; raise `warmup`" in refusal(lambda: run.capture(step))


def test_python_values_that_change() -> None:
    run = Run()
    counted = itertools.count()
    text = refusal(lambda: run.capture(lambda x: (run.step(x), next(counted))))
    assert "the step returns ['2'] and then ['3']; only tensors can change in a replay" in text


def test_a_graph_that_another_backend_compiled() -> None:
    """Its kernels are on no tape."""
    fresh_compiler()
    run = Run()
    average = torch.zeros(())

    @torch.compile
    def follow(average: Tensor, x: Tensor) -> None:
        average.mul_(0.9).add_(x.sum())

    def step(x: Tensor) -> None:
        run.step(x)
        follow(average, x)

    text = refusal(lambda: run.capture(step, external={"average": average}))
    assert "unseen graph: torch.compile with another backend; compile it with backend='megabuf'" in text
    fresh_compiler()
    follow = torch.compile(follow.__wrapped__, backend="megabuf")  # type: ignore[attr-defined]
    captured = run.capture(step, external={"average": average})
    average.zero_()
    expected = torch.zeros(())
    for index in range(3):
        captured(run.batch(index))
        expected.mul_(0.9).add_(run.batch(index).sum())
    assert torch.allclose(average, expected)


def test_what_a_failed_capture_changed_is_undone() -> None:
    run = Run()
    run.train(run.step, range(2))
    before, generator = run.state(), torch.get_rng_state()

    def step(x: Tensor) -> None:
        run.step(x + torch.randn(()))
        raise ZeroDivisionError

    refusal(lambda: run.capture(step), ZeroDivisionError)
    assert not differences(run.state(), before)
    assert torch.equal(torch.get_rng_state(), generator)
    # An ordinary step is an ordinary one again, and one without the mistake is captured.
    run.step(run.batch(0))
    run.capture()(run.batch(0))


def test_gathers_that_go_on_after_the_step() -> None:
    run = Run("overlap", overlap_param_gather_with_optimizer_step=True)
    text = refusal(run.capture)
    assert "\n* collective: the parameter gather of bucket group 1 is not waited for in the step" in text

    def step(x: Tensor) -> dict[str, Tensor]:
        result = run.step(x)
        run.buf.sync_params()
        return result

    run.capture(step)(run.batch(0))


# Arguments.


def test_optimizers_that_do_not_fit() -> None:
    for mode in ("sharded", "plain"):
        run = Run(mode, optimizer={"fused": False})
        text = refusal(run.capture, ValueError)
        assert text.startswith("AdamW keeps numbers of its update on the host")
        assert "build it with fused=True" in text


def test_an_optimizer_of_torch_with_a_number_as_lr() -> None:
    run = Run("plain")
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.1, fused=True)
    text = refusal(lambda: run.capture(optimizer=optimizer), ValueError)
    assert text == "the lr of AdamW must be a tensor (lr=torch.tensor(...)), or replays keep its value"


def test_a_model_that_is_not_attached() -> None:
    optimizer = torch.optim.AdamW(Mlp().parameters(), lr=torch.tensor(0.1), fused=True)
    text = refusal(lambda: mb.capture_step(lambda x: None, torch.zeros(1), optimizer=optimizer), ValueError)
    assert text == "capture_step needs optimizers over attached models; call megabuf_fx.attach(model) first"


def test_too_little_warmup() -> None:
    run = Run()
    assert refusal(lambda: run.capture(warmup=1), ValueError).startswith("warmup must be at least 2")


def test_checks_need_our_optimizer() -> None:
    run = Run("plain", check_for_nan_in_grad=True)
    assert refusal(run.capture, ValueError).startswith("gradient checks inside a captured step need megabuf_fx.Dist")


def test_an_optimizer_that_makes_its_state_in_the_first_step() -> None:
    """It would begin as zeros; with dampening the first momentum is the gradient."""
    options = {"kind": torch.optim.SGD, "momentum": 0.9, "dampening": 0.5}
    run, other = Run(optimizer=options), Run(optimizer=options)
    text = refusal(run.capture, ValueError)
    assert text == "take one ordinary step before capture_step, so that SGD has made its state"
    for each in (run, other):
        each.step(run.batch(0))
    run.capture()(run.batch(1))
    other.step(run.batch(1))
    assert not differences(run.state(), other.state())


def test_batches_that_do_not_fit() -> None:
    run = Run()
    captured = run.capture(lambda batch: run.step(batch[0]), (run.batch(0), "name", None))
    for given, text in (
        (batch(0, 0, 0, 1, 9, 13), "leaf 0 of the batch is (1, 9, 13) torch.float32, captured was (1, 8, 13) torch"),
        (run.batch(0).double(), "leaf 0 of the batch is (1, 8, 13) torch.float64, captured was"),
        (3.0, "leaf 0 of the batch is 3.0, captured was (1, 8, 13) torch.float32"),
    ):
        assert refusal(lambda: captured((given, "name", None))).startswith(text)  # noqa: B023
    assert refusal(lambda: captured((run.batch(0), "other", None))) == (
        "leaf 1 of the batch is 'other', but 'name' was captured"
    )
    assert refusal(lambda: captured((run.batch(0),))) == "the batch has 1 leaves, the example had 3"
    assert captured.replays == 0
    captured((run.batch(0), "name", None))
