"""Planted bugs: what a CUDA graph could not hold, or would replay wrongly, is caught by the tape.

Steps are small and written by hand, without our buffers. A bug is noticed by one or more of three mechanisms:

* ``violation``: a recording itself says so;
* ``difference``: two recordings, made in different states of the host, are not the same;
* ``replay``: a replay gives other numbers than the same step run eagerly.

Bugs that show only when one micro-batch is replayed for all are in ``test_tape_micro_batches.py``, those of collectives
in ``test_tape_collectives.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tape_loop import REPLAYS, Loop, Step, examine
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megabuf_fx.tape import Tape, Violation


def flag_item(loop: Loop) -> None:
    assert loop.flag is not None
    if loop.flag.item():
        loop.grad.add_(loop.gradient())
    else:
        loop.grad.copy_(loop.gradient())


def clip_on_host(loop: Loop) -> None:
    loop.grad.copy_(loop.gradient())
    norm = loop.grad.norm()
    if bool(norm > 1e-3):
        loop.grad.mul_(1e-3 / norm)


def assert_finite(loop: Loop) -> None:
    loop.grad.copy_(loop.gradient())
    assert torch.isfinite(loop.grad).all()


def loss_as_float(loop: Loop) -> None:
    loop.gradient()
    float(loop.loss)


def loss_formatted(loop: Loop) -> None:
    loop.gradient()
    f"{loop.loss:.3f}"


def loss_printed(loop: Loop) -> None:
    loop.gradient()
    str(loop.loss)


def loss_tolist(loop: Loop) -> None:
    loop.gradient()
    loop.loss.tolist()


def loss_numpy(loop: Loop) -> None:
    loop.gradient()
    loop.loss.numpy()


def loss_cpu(loop: Loop) -> None:
    loop.gradient()
    loop.loss.cpu()


def loss_dlpack(loop: Loop) -> None:
    torch.utils.dlpack.to_dlpack(loop.gradient())  # type: ignore[attr-defined]


def compared_on_host(loop: Loop) -> None:
    torch.equal(loop.grad, loop.gradient())


def length_from_tensor(loop: Loop) -> None:
    assert loop.flag is not None
    loop.grad.copy_(loop.gradient(loop.x[: loop.flag + 2]))  # type: ignore[misc]


def mask_write(loop: Loop) -> None:
    loop.grad.copy_(loop.gradient())
    loop.grad[loop.grad > 0] = 0


def mask_read(loop: Loop) -> None:
    grad = loop.gradient()
    loop.loss.copy_(grad[grad > 0].sum())


def masked_select(loop: Loop) -> None:
    grad = loop.gradient()
    loop.loss.copy_(grad.masked_select(grad > 0).sum())


def nonzero(loop: Loop) -> None:
    loop.loss.copy_((loop.gradient() > 0).nonzero().sum())


def unique(loop: Loop) -> None:
    loop.loss.copy_(loop.gradient().unique().sum())


def repeated(loop: Loop) -> None:
    loop.loss.copy_(loop.gradient().repeat_interleave(loop.indices.bincount(minlength=5), dim=0).sum())


def python_lr(loop: Loop) -> None:
    loop.weight.detach().sub_(loop.gradient(), alpha=0.1 / (loop.iteration + 1))


def python_lr_as_tensor(loop: Loop) -> None:
    loop.weight.detach().sub_(loop.gradient() * torch.tensor(0.1 / (loop.iteration + 1)))


def python_lr_filled(loop: Loop) -> None:
    loop.lr.fill_(0.1 / (loop.iteration + 1))
    loop.update(loop.gradient())


def python_slice(loop: Loop) -> None:
    row = loop.iteration % 5
    loop.grad[row].copy_(loop.gradient()[row])


def python_loop(loop: Loop) -> None:
    for _ in range(1 + loop.iteration):
        loop.update(loop.gradient())


def host_list(loop: Loop) -> None:
    loop.grad.copy_(loop.gradient() * torch.tensor([1.0] * 6))


def undeclared(loop: Loop) -> None:
    loop.grad.copy_(loop.gradient() * loop.undeclared["matrix"])


def shared_number(loop: Loop) -> None:
    loop.grad.copy_(loop.gradient() * loop.undeclared["number"])
    loop.undeclared["number"].copy_(loop.grad.mean())


def next_batch(loop: Loop) -> None:
    loop.grad.copy_(loop.gradient(loop.batches[loop.iteration]))


def reallocated(loop: Loop) -> None:
    loop.grad = loop.gradient()
    loop.update(loop.grad)


def data_replaced(loop: Loop) -> None:
    loop.weight.data = loop.weight.data - loop.lr * loop.gradient()


def grad_kept(loop: Loop) -> None:
    torch.tanh(loop.x @ loop.weight.t()).square().mean().backward()
    assert loop.weight.grad is not None
    loop.grad.copy_(loop.weight.grad)


def resized(loop: Loop) -> None:
    scratch = loop.gradient()
    scratch.resize_(4 * scratch.numel())


def set_to_other(loop: Loop) -> None:
    loop.grad.set_(loop.gradient())  # type: ignore[call-overload]


def static_gone(loop: Loop) -> None:
    loop.update(loop.gradient())
    loop.flag = None


def reads_what_nobody_wrote(loop: Loop) -> None:
    scratch = torch.empty(5, 12)
    scratch[:, :6].copy_(loop.gradient())
    loop.grad.copy_(scratch[:, 3:9])


def reads_what_another_step_made(loop: Loop) -> None:
    if loop.kept is None:
        loop.kept = loop.gradient()
    loop.grad.copy_(loop.kept)


def seeded_inside(loop: Loop) -> None:
    torch.manual_seed(5)
    loop.grad.copy_(loop.gradient() + torch.randn(5, 6))


def dropout_recomputed(loop: Loop) -> None:
    """Checkpointing draws the same numbers twice, by resetting the generator."""

    def forward(x: Tensor) -> Tensor:
        return torch.tanh(F.dropout(x @ loop.weight.t(), 0.2))

    output: Tensor = checkpoint(forward, loop.x, use_reentrant=False)
    loop.grad.copy_(torch.autograd.grad(output.square().mean(), [loop.weight])[0])


@dataclass(frozen=True)
class Bug:
    step: Step
    mechanisms: str
    """Those that must notice it. What ``violation`` is not among must be recorded without one."""
    text: str
    """How what is said begins."""
    is_located: bool = True
    """The violation names a line of the step; others are found when it has ended."""


HOST_READ = "host read: aten::_local_scalar_dense reads a value on the host"
UNDECLARED = "undeclared memory: the step uses a {} tensor that is not declared"
MOVED = "address change: '{}' moved to other memory, or changed shape or dtype during the step"
BUGS = [
    Bug(flag_item, "violation difference replay", HOST_READ),
    Bug(clip_on_host, "violation", HOST_READ),
    Bug(assert_finite, "violation", HOST_READ),
    Bug(loss_as_float, "violation", HOST_READ),
    Bug(loss_formatted, "violation", HOST_READ),
    Bug(loss_printed, "violation", "host read: a tensor is printed"),
    Bug(loss_tolist, "violation", "host read: Tensor.tolist()"),
    Bug(loss_numpy, "violation", "host read: Tensor.numpy()"),
    Bug(loss_cpu, "violation", "host read: Tensor.cpu()"),
    Bug(loss_dlpack, "violation", "host read: Tensor._to_dlpack()"),
    Bug(compared_on_host, "violation", "host read: aten::equal reads a value on the host"),
    Bug(length_from_tensor, "violation difference replay", HOST_READ),
    Bug(mask_write, "violation", "data-dependent shape: aten::index_put_ with a mask"),
    Bug(mask_read, "violation", "data-dependent shape: aten::index with a mask"),
    Bug(masked_select, "violation", "data-dependent shape: aten::masked_select"),
    Bug(nonzero, "violation", "data-dependent shape: aten::nonzero"),
    Bug(unique, "violation", "data-dependent shape: aten::_unique2"),
    Bug(repeated, "violation", "data-dependent shape: aten::bincount"),
    Bug(python_lr, "difference replay", "op 21, aten.sub_.Tensor, differs between recordings: 0.1 and 0.05"),
    Bug(python_lr_as_tensor, "difference replay", "op 21, aten.lift_fresh.default, differs between recordings: number"),
    Bug(python_lr_filled, "difference", "op 0, aten.fill_.Scalar, differs between recordings: 0.1 and 0.05"),
    Bug(python_slice, "difference replay", "op 0, aten.select.int, differs between recordings: 0 and 1"),
    Bug(python_loop, "difference replay", "one recording goes on after op "),
    Bug(host_list, "violation", UNDECLARED.format("(6,) float32"), False),
    Bug(undeclared, "violation", UNDECLARED.format("(5, 6) float32"), False),
    Bug(next_batch, "violation replay", UNDECLARED.format("(8, 6) float32"), False),
    Bug(shared_number, "difference", "both recordings read the same undeclared () float32 tensor of the host"),
    Bug(reallocated, "violation", MOVED.format("grad"), False),
    Bug(data_replaced, "violation replay", MOVED.format("weight"), False),
    Bug(grad_kept, "violation difference", UNDECLARED.format("(5, 6) float32"), False),
    Bug(resized, "violation", "address change: aten::resize_ changes the memory of a tensor"),
    Bug(set_to_other, "violation", "address change: aten::set_ changes the memory of a tensor"),
    Bug(static_gone, "violation", "address change: 'flag' is gone during the step", False),
    Bug(reads_what_nobody_wrote, "replay", ""),
    Bug(reads_what_another_step_made, "violation difference", UNDECLARED.format("(5, 6) float32"), False),
    Bug(seeded_inside, "violation replay", "random numbers: Generator.manual_seed() in the step"),
    Bug(dropout_recomputed, "violation replay", "random numbers: Generator.set_state() in the step"),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.step.__name__)
def test_bugs_are_caught(bug: Bug) -> None:
    finding = examine(bug.step)
    expected = set(bug.mechanisms.split())
    assert expected <= finding.mechanisms()
    assert ("violation" in expected) == bool(finding.violations), finding.violations
    said = [str(violation) for violation in finding.violations] if "violation" in expected else [finding.difference]
    assert any((text or "").startswith(bug.text) for text in said), said
    if "violation" in expected and bug.is_located:
        assert any(is_in(bug.step, violation) for violation in finding.violations), finding.violations


def is_in(function: Callable[..., Any], violation: Violation) -> bool:
    """Whether the violation is located in a line of ``function``."""
    file, _, line = violation.where.rpartition(":")
    lines, first = inspect.getsourcelines(function)
    return file == __file__ and first <= int(line) < first + len(lines)


def test_what_nobody_wrote_is_nan_in_every_replay() -> None:
    """And not by chance what the allocator, the recording or the last replay left there."""
    loop = Loop()
    tape = Tape(loop.statics)
    loop.begin(0)
    with tape:
        reads_what_nobody_wrote(loop)
    for replay in range(REPLAYS):
        loop.begin(1 + replay)
        loop.grad.zero_()
        tape.replay()
        assert loop.grad[:, :3].isfinite().all()
        assert loop.grad[:, 3:].isnan().all()
