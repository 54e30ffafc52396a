"""The tape: steps that a CUDA graph can hold replay bitwise, and a recording keeps and leaves what it should.

What is caught is in ``test_tape_bugs.py``.
"""

from __future__ import annotations

import gc
import inspect
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tape_loop import Finding, Loop, Step, examine, is_equal
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from megabuf_fx.tape import Tape, TapeError


def device_flag(loop: Loop) -> None:
    assert loop.flag is not None
    grad = loop.gradient()
    loop.grad.copy_(torch.where(loop.flag != 0, loop.grad + grad, grad))


def device_clip(loop: Loop) -> None:
    loop.grad.copy_(loop.gradient())
    loop.grad.mul_((1e-3 / (loop.grad.norm() + 1e-6)).clamp(max=1.0))
    loop.update(loop.grad)


def zeroed_inside(loop: Loop) -> None:
    loop.grad.zero_()
    loop.grad.add_(loop.gradient(loop.x[:4]))
    loop.grad.add_(loop.gradient(loop.x[4:]))
    loop.update(loop.grad)


def grad_dropped(loop: Loop) -> None:
    """``.grad`` is made anew in every step."""
    torch.tanh(loop.x @ loop.weight.t()).square().mean().backward()
    assert loop.weight.grad is not None
    loop.grad.copy_(loop.weight.grad)
    loop.weight.grad = None


def dropout(loop: Loop) -> None:
    loop.grad.copy_(loop.gradient(F.dropout(loop.x, 0.5)))
    loop.update(loop.grad + 0.1 * torch.randn_like(loop.grad))


def random_in_place(loop: Loop) -> None:
    noise = torch.zeros(5, 6).uniform_(-1, 1)
    noise[:2].normal_()
    loop.grad.bernoulli_(0.5).mul_(noise).add_(torch.randint(3, (5, 6)) * loop.gradient())


def in_place_views(loop: Loop) -> None:
    loop.grad.view(-1)[7:19].add_(loop.gradient().view(-1)[7:19])
    loop.grad.t()[1, 2:].mul_(0.5)
    loop.grad.as_strided((2, 3), (12, 2), 1).sub_(loop.lr)


def views_of_fresh(loop: Loop) -> None:
    fresh = loop.gradient() * 2
    fresh.unflatten(1, (2, 3))[:, 1].transpose(0, 1).mul_(3)
    rows = list(fresh.unbind())
    rows[1].add_(rows[0])
    loop.grad.copy_(fresh)


def constants_inside(loop: Loop) -> None:
    """The same in every step, and made by the device."""
    steps = torch.arange(6) * torch.full((5, 6), 0.1) + torch.ones(6) - torch.eye(5, 6)
    loop.grad.copy_(loop.gradient() * steps * torch.tensor(0.5))


def several_outputs(loop: Loop) -> None:
    grad = loop.gradient()
    std, mean = torch.std_mean(grad, dim=1, keepdim=True)
    largest, where = grad.max(dim=1, keepdim=True)
    top = grad.topk(2, dim=1)
    loop.grad.copy_((grad - mean) / std + largest * where + top.values.sum() + top.indices[:, :1])
    left, right = loop.grad.split([2, 4], dim=1)
    left.add_(F.layer_norm(right, (4,))[:, :2])


def into_given_outputs(loop: Loop) -> None:
    grad = loop.gradient()
    torch.mul(grad, 2, out=loop.grad)
    fresh = torch.add(grad, 1, out=torch.empty(5, 6))
    torch.addmm(loop.grad, fresh, grad.t() @ grad, out=loop.grad)


def foreach(loop: Loop) -> None:
    grads = [loop.gradient(), loop.gradient(loop.x[:3])]
    norms = torch._foreach_norm(grads)
    torch._foreach_mul_(grads, [norms[0], norms[1]])
    loop.grad.copy_(torch.stack(torch._foreach_add(grads, 1.0)).sum(0))


def fused_adamw(loop: Loop) -> None:
    loop.updates.add_(1)
    torch._fused_adamw_(
        [loop.weight.detach()],
        [loop.gradient()],
        [loop.exp_avg],
        [loop.exp_avg_sq],
        [],
        [loop.updates],
        lr=loop.lr,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.1,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )


def indexed(loop: Loop) -> None:
    """By numbers, never by a mask."""
    rows = F.embedding(loop.indices, loop.weight)
    (grad,) = torch.autograd.grad(rows.square().sum(), [loop.weight])
    loop.grad.copy_(grad).index_add_(0, loop.indices, loop.x[:4])
    loop.grad.index_put_((loop.indices,), loop.x[4:], accumulate=True)
    loop.grad[loop.indices[:1]] = loop.x.gather(1, loop.indices[None]).sum()


def masked_without_counting(loop: Loop) -> None:
    grad = loop.gradient()
    loop.grad.copy_(torch.where(grad > 0, grad, 0)).masked_fill_(grad > 0.01, 0.5)


def batch_norm(loop: Loop) -> None:
    loop.grad.copy_(loop.gradient(loop.norm(loop.x).detach()))


def lower_precision(loop: Loop) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        grad = loop.gradient()
    loop.grad.copy_(grad.bfloat16().float())


def checkpointed(loop: Loop) -> None:
    def forward(x: Tensor) -> Tensor:
        return torch.tanh(x @ loop.weight.t())

    output: Tensor = checkpoint(forward, loop.x, use_reentrant=False, preserve_rng_state=False)
    loss = output.square().mean()
    loop.grad.copy_(torch.autograd.grad(loss, [loop.weight])[0])


def twice_differentiated(loop: Loop) -> None:
    loss = torch.tanh(loop.x @ loop.weight.t()).square().mean()
    (grad,) = torch.autograd.grad(loss, [loop.weight], create_graph=True)
    loop.grad.copy_(torch.autograd.grad(grad.square().sum(), [loop.weight])[0])


def attention(loop: Loop) -> None:
    query = (loop.x @ loop.weight.t()).view(1, 1, 8, 5)
    loss = F.scaled_dot_product_attention(query, query, query, is_causal=True).square().mean()
    loop.grad.copy_(torch.autograd.grad(loss, [loop.weight])[0])


def nothing_happens(loop: Loop) -> None:
    """Conversions that return their input."""
    grad = loop.gradient().contiguous().to(torch.float32).reshape(5, 6).expand(5, 6)
    loop.grad.copy_(grad)


SAFE: list[Step] = [
    device_flag,
    device_clip,
    zeroed_inside,
    grad_dropped,
    dropout,
    random_in_place,
    in_place_views,
    views_of_fresh,
    constants_inside,
    several_outputs,
    into_given_outputs,
    foreach,
    fused_adamw,
    indexed,
    masked_without_counting,
    batch_norm,
    lower_precision,
    checkpointed,
    twice_differentiated,
    attention,
    nothing_happens,
]


@pytest.mark.parametrize("step", SAFE, ids=lambda step: step.__name__)
def test_safe_steps_replay_bitwise(step: Step) -> None:
    assert examine(step) == Finding([], None, [])


def test_the_comparison_can_fail() -> None:
    """Every safe step changes something that depends on the batch."""
    for step in SAFE:
        loops = Loop(), Loop()
        for iteration, loop in enumerate(loops):
            loop.begin(0)
            loop.x.add_(iteration)
            step(loop)
            loop.x.zero_()
        assert not is_equal(loops[0].statics(), loops[1].statics()), step.__name__


# The recording itself.


def test_poison_fills_every_internal_storage() -> None:
    loop = Loop()
    loop.begin(0)
    made: list[Tensor] = []
    before = {name: value.detach().clone() for name, value in loop.statics().items()}
    tape = Tape(loop.statics)
    with tape:
        made += [loop.gradient(), torch.arange(4), torch.ones(3, dtype=torch.bool), torch.ones(3, dtype=torch.bfloat16)]
        made.append((made[0] * 2)[1:, 2:])
    tape.poison()
    for tensor in made:
        assert all(byte == 0xFF for byte in tensor.untyped_storage())
    assert made[0].isnan().all()
    assert made[3].isnan().all()
    assert made[1].tolist() == [-1] * 4
    before["loss"] = loop.loss
    assert is_equal(loop.statics(), before)


def test_a_replay_writes_the_outputs_of_the_recording() -> None:
    loop = Loop()
    loop.begin(0)
    tape = Tape(loop.statics)
    with tape:
        tape.outputs = loop.gradient()
    loop.begin(1)
    tape.replay()
    assert torch.equal(tape.outputs, loop.gradient())


@pytest.mark.parametrize("keeps", [True, False])
def test_without_keeping_no_memory_is_held(keeps: bool) -> None:
    loop = Loop()
    loop.begin(0)
    alive: list[StorageWeakRef] = []

    def step() -> None:
        made = [loop.gradient(), loop.x.cos()]
        made.append(made[0] * 2)
        alive.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in made)

    tape = Tape(loop.statics, keeps=keeps)
    with tape:
        step()
    gc.collect()
    assert [not reference.expired() for reference in alive] == [keeps] * 3
    # What is wrong and what was done are known all the same.
    assert len(tape.journal) > 10
    assert tape.violations == []
    if keeps:
        assert len(tape.entries) > 10
        return
    assert tape.entries == []
    with pytest.raises(TapeError, match=r"made to check a step, not to replay it \(keeps=False\)"):
        tape.replay()


def test_both_kinds_of_recording_say_the_same() -> None:
    """Although memory is used again in one of them, and in the other not."""
    for step in (device_clip, zeroed_inside, several_outputs, fused_adamw):
        journals = []
        for keeps in (True, False):
            loop = Loop()
            loop.begin(0)
            tape = Tape(loop.statics, keeps=keeps)
            with tape:
                step(loop)
            # Autograd detaches a gradient that somebody else holds, too.
            journals.append([line for line in tape.journal if line[0] != "aten.detach.default"])
        assert journals[0] == journals[1], step.__name__


def test_violations_name_the_line() -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad * grad.sum().item()

    loop = Loop()
    tape = Tape(loop.statics)
    with tape:
        F.linear(loop.x, loop.weight).sum().item()
        Reads.apply(loop.weight).sum().backward()  # type: ignore[no-untyped-call]
    lines, first = inspect.getsourcelines(test_violations_name_the_line)
    expected = [first + i for i, line in enumerate(lines) if ".item()" in line and "in line" not in line]
    assert sorted(violation.where for violation in tape.violations[:2]) == [f"{__file__}:{line}" for line in expected]


def test_an_exception_leaves_nothing_behind() -> None:
    def profiler(*unused: object) -> None:
        pass

    loop = Loop()
    tape = Tape(loop.statics)
    sys.setprofile(profiler)
    try:
        with pytest.raises(RuntimeError), tape:
            loop.gradient(loop.lr)
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    length = len(tape.journal)
    loop.gradient()
    assert len(tape.journal) == length


def test_replays_do_not_depend_on_what_surrounds_them() -> None:
    loop, eager = Loop(), Loop()
    tape = Tape(loop.statics)
    loop.begin(0)
    with tape:
        device_clip(loop)
    eager.begin(0)
    device_clip(eager)
    for surrounding in (torch.enable_grad(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
        eager.begin(1)
        device_clip(eager)
        loop.begin(1)
        with surrounding:
            tape.replay()
        assert is_equal(loop.statics(), eager.statics()), surrounding
