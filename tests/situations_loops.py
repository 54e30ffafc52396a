"""Situations that differ in their loop: order of forwards and backwards, errors, optimizer, several models."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from helpers import error_text, params_of, seeded
from pair import Pair, SmallMlp
from situations import Side, Situation, is_sharded, one
from torch import Tensor, nn

# Several forwards and backwards


def micro_batches(side: Side, count: int) -> None:
    for micro in range(count):
        value = side.loss(micro) / count
        with side.sync(micro + 1 == count):
            value.backward()


def three_micro_batches(side: Side) -> None:
    micro_batches(side, 3)


def changing_micro_batches(side: Side) -> None:
    micro_batches(side, (2, 1, 3, 1)[side.step])


def forwards_first(side: Side) -> None:
    losses = [side.loss(micro) for micro in range(3)]
    for micro, value in enumerate(losses):
        with side.sync(micro == 2):
            value.backward()


def reversed_backwards(side: Side) -> None:
    losses = [side.loss(micro) for micro in range(3)]
    for micro, value in enumerate(reversed(losses)):
        with side.sync(micro == 2):
            value.backward()


def without_no_sync(side: Side) -> None:
    losses = [side.loss(micro) for micro in range(2)]
    for value in losses:
        value.backward()


def two_forwards_summed(side: Side) -> None:
    (side.loss(0) + side.call(side.data(1)).abs().mean()).backward()


def two_losses(side: Side) -> None:
    out = side.call(side.data())
    torch.autograd.backward([out[:, :2].square().mean(), out[:, 1:].abs().mean()])


def kept_graph(side: Side) -> None:
    out = side.call(side.data())
    with side.sync(False):
        out.square().mean().backward(retain_graph=True)
    out.abs().mean().backward()


def kept_graph_without_no_sync(side: Side) -> None:
    out = side.call(side.data())
    out.square().mean().backward(retain_graph=True)
    out.abs().mean().backward()


def dropped_forward(side: Side) -> None:
    side.call(side.data(1))
    kept = side.call(side.data(2))
    one(side)
    del kept


def evaluating(context: Callable[[], contextlib.AbstractContextManager[object]]) -> Callable[[Side], None]:
    def step(side: Side) -> None:
        for _ in range(2):
            with context():
                side.call(side.data(1))
            if not _:
                one(side)

    return step


def eager_penalty(side: Side) -> None:
    """Weights get gradients from the graph and from eager code in one backward."""
    weights = [param for param in side.model.parameters() if param.dim() == 2]
    (side.loss() + 0.1 * sum(weight.square().sum() for weight in weights)).backward()


def asked_for_gradients(side: Side) -> None:
    torch.autograd.grad(side.loss(1), list(side.model.parameters()))
    one(side)


# Errors in the middle


class Fragile(torch.autograd.Function):
    """Identity whose backward raises when told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise ValueError("planned")
        return grads[0], None


class FragileMlp(SmallMlp):
    """Two graphs with eager code between them that can raise."""

    fails_in = ""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc2(self.middle(torch.tanh(self.fc1(x))))
        return result

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def middle(self, hidden: Tensor) -> Tensor:
        if self.fails_in == "forward":
            raise ValueError("planned")
        return Fragile.apply(hidden, self.fails_in == "backward")  # type: ignore[no-any-return, no-untyped-call]


def failing(where: str) -> Callable[[Side], None]:
    """Steps 1 and 2 begin with an attempt that fails on every rank."""

    def step(side: Side) -> None:
        if side.step in (1, 2) and not side.is_plain:
            side.model.fails_in = where
            text = error_text(lambda: side.loss(9).backward())
            assert text == "ValueError: planned", text
            side.model.fails_in = ""
            side.optimizers[0].zero_grad()
            side.launched[0].clear()
        one(side)

    return step


# The optimizer changes


def make_schedule(side: Side) -> None:
    side.kept["schedule"] = torch.optim.lr_scheduler.OneCycleLR(side.optimizers[0], max_lr=0.2, total_steps=8)


def step_schedule(side: Side) -> None:
    side.kept["schedule"].step()


def change_options(side: Side) -> None:
    for group in side.optimizers[0].param_groups:
        group.update(lr=0.05 * (side.step + 1), weight_decay=0.1 * side.step)


def clip(side: Side) -> None:
    """At a norm that is always exceeded. The plain side has the gradients of all ranks only after the last."""
    one(side)
    if not side.is_plain and is_sharded(side.case):
        side.optimizers[0].clip_grad_norm_(0.01)
    elif not side.is_plain:
        torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.01)
    elif side.rank + 1 == side.case.world:
        # The sum over ranks, so that their mean has the norm.
        torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.01 * side.case.world)


def empty_last_batch(side: Side) -> None:
    """A sum, as the mean over no rows is not a number."""
    is_empty = side.step % 2 == 1 and side.rank + 1 == side.case.world
    for micro in range(2):
        rows = 0 if is_empty and micro == 1 else 4
        value = 0.1 * side.call(side.data(micro, rows, 6)).square().sum()
        with side.sync(micro == 1):
            value.backward()


# Several models


def make_teacher(side: Side) -> None:
    side.kept["teacher"] = copy.deepcopy(side.model)


def learn(side: Side) -> None:
    teacher = side.kept["teacher"]
    if not side.is_plain and side.case.way != "eager path":
        # By this backend, too: a graph without gradients attaches nothing.
        teacher = torch.compile(teacher, backend="megabuf", options={"inner_compiler": "aot_eager"})
    with torch.no_grad():
        target = teacher(side.data(1))
    (side.loss() + (side.call(side.data(1)) - target).square().mean()).backward()


@torch.no_grad()
def average_teacher(side: Side) -> None:
    side.sync_params()
    for average, param in zip(side.kept["teacher"].parameters(), side.model.parameters()):
        average.lerp_(param, 0.1)


def check_teacher(pair: Pair, plain: Side, ours: Side) -> Iterator[str]:
    pair.compare(params_of(ours.kept["teacher"]), params_of(plain.kept["teacher"]), "teacher")
    yield from ()


def make_judge(side: Side) -> None:
    side.kept["judge"] = seeded(lambda: nn.Linear(3, 2)).requires_grad_(False)


def judged(side: Side) -> None:
    side.kept["judge"](side.call(side.data())).square().mean().backward()


def adversaries(side: Side) -> None:
    """Each model is in the other's loss: the second frozen there, the first detached."""
    maker, judge = side.calls
    made = maker(side.data(0, 4, 4))
    if side.step % 2 == 0:
        side.models[1].requires_grad_(False)
        value = judge(made).square().mean()
        side.models[1].requires_grad_(True)
    else:
        value = judge(made.detach()).mean() + judge(side.data(7)).square().mean()
    value.backward()


def chunks(is_scheduled: bool) -> Callable[[Side], None]:
    """Two chunks as virtual pipeline stages, 1F1B; scheduled, the loop says when collectives start."""

    def forward(side: Side, micro: int) -> tuple[Tensor, Tensor, Tensor]:
        sent = side.calls[0](side.data(micro))
        received = sent.detach().requires_grad_()
        return sent, received, side.calls[1](torch.tanh(received)).square().mean()

    def backward(side: Side, sent: Tensor, received: Tensor, loss: Tensor, *, is_last: bool) -> None:
        with side.sync(is_last):
            loss.backward()
            sent.backward(received.grad)

    def step(side: Side) -> None:
        for handle in side.handles if is_scheduled else ():
            handle.start_param_sync()
        waiting = [forward(side, 0)]
        for micro in range(1, 4):
            waiting.append(forward(side, micro))
            backward(side, *waiting.pop(0), is_last=False)
        backward(side, *waiting.pop(0), is_last=not is_scheduled)
        for handle in reversed(side.handles) if is_scheduled else ():
            handle.start_grad_sync()

    return step


def both_models(step: int) -> Sequence[int]:
    return (0, 1)


CHUNKS = (lambda: seeded(lambda: nn.Linear(6, 6), 1), lambda: seeded(lambda: nn.Linear(6, 3), 2))

LOOPS: dict[str, Situation] = {
    "three micro-batches": Situation(step=three_micro_batches, is_exact=False),
    "changing number of micro-batches": Situation(step=changing_micro_batches, is_exact=False),
    "all forwards, then all backwards": Situation(step=forwards_first, is_exact=False),
    "backwards in reverse order": Situation(step=reversed_backwards, is_exact=False),
    "two forwards, two backwards, no no_sync": Situation(
        step=without_no_sync,
        is_exact=False,
        # Averages of averages add up; with shards a graph keeps its buckets open for the forward still to come, and
        # hooks alone count the passes of the first step.
        reductions=lambda case, step: 1 if is_sharded(case) else 2,
    ),
    "two forwards, summed loss": Situation(step=two_forwards_summed, is_exact=False),
    "two losses": Situation(step=two_losses),
    "retain_graph, two backwards": Situation(step=kept_graph, is_exact=False),
    "retain_graph, no no_sync": Situation(
        step=kept_graph_without_no_sync,
        is_exact=False,
        # A kept graph may be used again, so with shards its buckets stay open.
        reductions=lambda case, step: 1 if is_sharded(case) else 2,
    ),
    "forward without backward": Situation(step=dropped_forward),
    "no_grad forwards between": Situation(step=evaluating(torch.no_grad), graphs=2),
    "inference_mode forwards between": Situation(step=evaluating(torch.inference_mode), graphs=2),
    "eager weight penalty": Situation(
        step=eager_penalty,
        is_exact=False,
        # In the first step nobody knows yet that something comes after the graph's own gradient.
        reductions=lambda case, step: 2 if case.way != "eager path" and step == 0 else 1,
    ),
    "autograd.grad of parameters": Situation(step=asked_for_gradients),
    "exception in forward": Situation(builds=(FragileMlp,), step=failing("forward"), graphs=2),
    "exception in backward": Situation(builds=(FragileMlp,), step=failing("backward"), graphs=2),
    "learning-rate schedule": Situation(begin=make_schedule, after=step_schedule),
    "changing optimizer options": Situation(after=change_options),
    "clipped gradients": Situation(step=clip, is_exact=False),
    "empty batch on one rank": Situation(
        step=empty_last_batch, is_exact=False, graphs=lambda case, rank: 2 if rank + 1 == case.world else 1
    ),
    "averaged teacher (deepcopy)": Situation(
        begin=make_teacher, step=learn, after=average_teacher, check=check_teacher, graphs=2, is_exact=False
    ),
    "frozen model in the loss": Situation(begin=make_judge, step=judged),
    "two models, alternating updates": Situation(
        builds=(lambda: seeded(lambda: nn.Linear(4, 6), 1), lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh())),
        step=adversaries,
        updated=lambda step: (step % 2,),
        graphs=3,
        is_exact=False,
    ),
    "interleaved chunks (1F1B)": Situation(
        builds=CHUNKS, step=chunks(False), updated=both_models, graphs=2, is_exact=False
    ),
    "interleaved chunks, scheduled": Situation(
        builds=CHUNKS, step=chunks(True), updated=both_models, graphs=2, is_exact=False
    ),
}
