"""One recorded micro-batch, replayed for all of them: what the host decides before it is decided for good.

The reference is the same loop run eagerly. It zeroes and adds, or overwrites in the first micro-batch of a step; the
numbers are the same, because adding to zeros is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from helpers import batch
from torch import Tensor

from megabuf_fx.tape import Tape, diff

STEPS, MICRO_BATCHES = 5, 3
RECORDED_STEP = 1


class Accumulation:
    """A weight whose gradient goes to ``main_grad`` in every micro-batch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight = torch.randn(5, 6).requires_grad_()
        self.main_grad = torch.zeros(5, 6)
        self.x = torch.zeros(8, 6)
        self.accumulate = torch.zeros((), dtype=torch.int32)
        self.is_first = True

    def statics(self) -> Mapping[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def gradient(self) -> Tensor:
        return torch.autograd.grad(torch.tanh(self.x @ self.weight.t()).square().mean(), [self.weight])[0]


Policy = Callable[[Accumulation], None]
"""One micro-batch: how it accumulates."""


def python_flag(loop: Accumulation) -> None:
    if loop.is_first:
        loop.main_grad.copy_(loop.gradient())
    else:
        loop.main_grad.add_(loop.gradient())


def read_flag(loop: Accumulation) -> None:
    if loop.accumulate.item():
        loop.main_grad.add_(loop.gradient())
    else:
        loop.main_grad.copy_(loop.gradient())


def device_flag(loop: Accumulation) -> None:
    grad = loop.gradient()
    loop.main_grad.copy_(torch.where(loop.accumulate != 0, loop.main_grad + grad, grad))


def always_add(loop: Accumulation) -> None:
    """The host zeroes between steps."""
    loop.main_grad.add_(loop.gradient())


def train(policy: Policy, recorded_micro: int | None) -> tuple[list[Tensor], Tape | None]:
    """``main_grad`` after every step. From the recording on, micro-batches are replayed; None records nothing."""
    loop = Accumulation()
    tape: Tape | None = None
    sums = []
    for step in range(STEPS):
        if policy is always_add:
            loop.main_grad.zero_()
        for micro in range(MICRO_BATCHES):
            loop.is_first = micro == 0
            loop.accumulate.fill_(min(micro, 1))
            loop.x.copy_(batch(step, micro, 0, 8, 6))
            if tape is not None:
                tape.replay()
            elif (step, micro) == (RECORDED_STEP, recorded_micro):
                tape = Tape(loop.statics)
                with tape:
                    policy(loop)
            else:
                policy(loop)
        sums.append(loop.main_grad.clone())
        with torch.no_grad():
            loop.weight.sub_(loop.main_grad)
    return sums, tape


def wrong_steps(sums: list[Tensor]) -> list[int]:
    expected, _ = train(always_add, None)
    return [step for step, (found, correct) in enumerate(zip(sums, expected)) if not torch.equal(found, correct)]


def difference(policy: Policy) -> str | None:
    """Between recordings of the first two micro-batches of a step."""
    loop = Accumulation()
    tapes = []
    for micro in range(2):
        loop.is_first = micro == 0
        tapes.append(Tape(loop.statics, keeps=False))
        with tapes[-1]:
            policy(loop)
    return diff(*tapes)


@pytest.mark.parametrize("policy", [python_flag, read_flag, device_flag, always_add])
def test_all_policies_are_right_without_replays(policy: Policy) -> None:
    assert wrong_steps(train(policy, None)[0]) == []


@pytest.mark.parametrize("policy", [device_flag, always_add])
@pytest.mark.parametrize("recorded_micro", [0, 1, 2])
def test_a_decision_on_the_device_is_safe_wherever_it_is_recorded(policy: Policy, recorded_micro: int) -> None:
    sums, tape = train(policy, recorded_micro)
    assert tape is not None
    assert tape.violations == []
    assert wrong_steps(sums) == []
    assert difference(policy) is None


def test_a_python_flag_recorded_in_the_first_micro_batch_overwrites_for_ever() -> None:
    sums, _ = train(python_flag, 0)
    assert wrong_steps(sums)[0] == RECORDED_STEP
    assert difference(python_flag) == "op 18 is aten.copy_.default in one recording, aten.add_.Tensor in the other"


def test_a_python_flag_recorded_in_the_second_one_is_wrong_one_step_later() -> None:
    """The rest of that step adds, as it should; so comparing needs further steps."""
    sums, _ = train(python_flag, 1)
    assert wrong_steps(sums)[0] == RECORDED_STEP + 1
    assert torch.equal(sums[RECORDED_STEP], train(always_add, None)[0][RECORDED_STEP])


def test_a_flag_that_the_host_reads_is_a_violation() -> None:
    for recorded_micro in (0, 1):
        sums, tape = train(read_flag, recorded_micro)
        assert tape is not None
        assert [violation.kind for violation in tape.violations] == ["host read"]
        assert wrong_steps(sums)[0] == RECORDED_STEP + recorded_micro


# Megatron's fused weight gradients: a kernel adds to main_grad and tells so by an attribute on the host.


class FusedLinear(torch.autograd.Function):
    """The product of its backward goes to ``main_grad``; what it returns stands for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        output: Tensor = x @ weight.t()
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        product = grad.t() @ x
        ctx.weight.main_grad.add_(product)
        ctx.weight.grad_added_to_main_grad = True
        return grad @ weight, product


def train_fused(policy: str) -> list[Tensor]:
    """``main_grad`` of four steps of two micro-batches; the layer is recorded in step 1 and replayed after that.

    What becomes of the attribute when a step begins: ``eager`` replays nothing; ``reset`` is Megatron's
    ``zero_grad_buffer``; ``keep`` leaves it; ``restore`` puts back, after each replay, what it was in the recording
    (Megatron ``core/transformer/cuda_graphs.py``, ``groundtruth_grad_added_to_main_grad``).
    """
    torch.manual_seed(0)
    weight: Any = torch.randn(4, 6).requires_grad_()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(4, 6), False
    x, returned = torch.zeros(8, 6), torch.zeros(4, 6)
    tape: Tape | None = None
    was_added = False
    sums = []

    def layer() -> None:
        output: Tensor = FusedLinear.apply(x, weight)  # type: ignore[no-untyped-call]
        returned.copy_(torch.autograd.grad(output.square().mean(), [weight])[0])

    for step in range(4):
        weight.main_grad.zero_()
        if tape is None or policy != "keep":
            weight.grad_added_to_main_grad = False
        for micro in range(2):
            x.copy_(batch(step, micro, 0, 8, 6))
            if tape is not None:
                tape.replay()
                if policy == "restore":
                    weight.grad_added_to_main_grad = was_added
            elif policy == "eager" or step == 0:
                layer()
            else:
                tape = Tape(lambda: {"weight": weight, "main_grad": weight.main_grad, "x": x, "returned": returned})
                with tape:
                    layer()
                assert tape.violations == []
                was_added = weight.grad_added_to_main_grad
            # The hook of the data-parallel wrapper, outside the graph.
            if not weight.grad_added_to_main_grad:
                weight.main_grad.add_(returned)
        sums.append(weight.main_grad.clone())
    return sums


def test_resetting_the_attribute_accumulates_twice() -> None:
    """In the step of the recording the attribute is still set; from then on gradients are doubled, up to the rounding
    of a sum in another order."""
    eager, found = train_fused("eager"), train_fused("reset")
    for step, factor in enumerate([1.0, 1.0, 2.0, 2.0]):
        torch.testing.assert_close(found[step], factor * eager[step], rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("policy", ["keep", "restore"])
def test_keeping_or_restoring_the_attribute_is_safe(policy: str) -> None:
    for found, expected in zip(train_fused(policy), train_fused("eager")):
        assert torch.equal(found, expected)
