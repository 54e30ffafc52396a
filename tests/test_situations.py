"""Models and training loops that break simple assumptions, against eager training on the data of all ranks.

Within 2e-5 per parameter and step (lr 1e-3 with AdamW), or one clear error on every rank.
"""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import (
    Mlp,
    RankGroup,
    batch,
    error_text,
    free_port,
    fresh_compiler,
    max_difference,
    params_of,
    seeded,
    twin,
)
from torch import Tensor, nn
from torch.func import functional_call

import megabuf_fx as mb

pytestmark = pytest.mark.dist

LR = 1e-3
BOUND = 2e-5

MODES: dict[str, dict[str, Any]] = {
    "sharded": {},
    "sharded_overlap": {"overlap_param_gather": True},
    "plain": {"use_distributed_optimizer": False},
    "plain_dense": {"use_distributed_optimizer": False, "dense_layout": True},
}


def prepare(model: nn.Module, mode: str, optimizer_class: Any = torch.optim.AdamW, **options: Any) -> Any:
    """Handle, compiled call and optimizer of ``model``."""
    buf = mb.attach(model, mb.MegabufConfig(bucket_size=60, inner_compiler="aot_eager", **MODES[mode]))
    call = torch.compile(model, backend="megabuf")
    options = {"lr": LR, **options}
    if buf.plan.sharded:
        return buf, call, mb.DistributedOptimizer(model.parameters(), optimizer_class, **options)
    return buf, call, optimizer_class(model.parameters(), **options)


def reference_step(plain: nn.Module, optimizer: Any, loss: Callable[[nn.Module, int], Tensor]) -> None:
    """One step on every rank's data, gradients averaged."""
    world = dist.get_world_size()
    for rank in range(world):
        loss(plain, rank).backward()
    for param in plain.parameters():
        if param.grad is not None:
            param.grad.div_(world)
    optimizer.step()
    optimizer.zero_grad()


def loss_of(module: nn.Module, rank: int, step: int) -> Tensor:
    result: Tensor = module(batch(step, 0, rank, 8, 6)).square().mean()
    return result


class Strides(nn.Module):
    """A channels_last convolution, a weight stored transposed, one expanded, a 0-dim and two empty parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.empty_first = nn.Parameter(torch.empty(0))
        self.conv = nn.Conv2d(3, 5, 3)
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.weight = nn.Parameter(torch.randn(7, 45).t())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.bias = nn.Parameter(torch.randn(1).expand(7))
        self.empty_last = nn.Parameter(torch.empty(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.conv(x)).flatten(1)
        extra = self.empty_first.sum() + self.empty_last.sum()
        return (hidden @ self.weight) * self.scale + self.bias.clone() + extra


def train_strides(rank: int, mode: str, optimizer_class: Any) -> str | None:
    plain, model = seeded(Strides), seeded(Strides)
    # No optimizer steps an expanded tensor in place; a sharded buffer gives it memory of its own.
    for module in (plain,) if mode.startswith("sharded") else (plain, model):
        bias = module.get_parameter("bias")
        bias.data = bias.data.clone()
    strides = {name: p.stride() for name, p in model.named_parameters()}
    buf, call, optimizer = prepare(model, mode, optimizer_class)
    reference = optimizer_class(plain.parameters(), lr=LR)

    def loss(module: Any, r: int, step: int) -> Tensor:
        result: Tensor = module(batch(step, 0, r, 4, 3, 5, 5)).square().mean()
        return result

    for step in range(3):
        reference_step(plain, reference, partial(loss, step=step))
        loss(call, rank, step).backward()
        if not buf.plan.sharded:
            for name, param in model.named_parameters():
                if param.grad is not None and param.grad.stride() != param.stride() and name != "bias":
                    return f"{mode}: gradient of {name} has strides {param.grad.stride()}, not {param.stride()}"
        optimizer.step()
        optimizer.zero_grad()
        buf.sync_params()
        difference = max_difference(params_of(model), params_of(plain))
        if not difference <= BOUND:
            return f"{mode} step {step}: differs by {difference}"
    kept = {name: p.stride() for name, p in model.named_parameters()}
    buf.detach()
    del strides["bias"], kept["bias"]
    return None if kept == strides else f"{mode}: strides {strides} became {kept}"


def train_all_strides(rank: int) -> list[str]:
    problems = []
    for mode in MODES:
        for optimizer_class in (torch.optim.AdamW, torch.optim.SGD):
            problem = train_strides(rank, mode, optimizer_class)
            if problem:
                problems.append(problem)
            fresh_compiler()
    return problems


@pytest.mark.parametrize("world", [1, 2])
def test_memory_formats_and_empty_parameters(ranks: Callable[[int], RankGroup], world: int) -> None:
    for problems in ranks(world).run(train_all_strides):
        assert not problems, "\n".join(problems)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def replaced_data(rank: int) -> str:
    model = seeded(small)
    _, call, optimizer = prepare(model, "sharded")
    call(batch(0, 0, rank, 8, 6)).square().mean().backward()
    model[0].weight.data = model[0].weight.data.clone()  # type: ignore[index, union-attr]
    return error_text(optimizer.step)


def test_replaced_data_is_refused(ranks: Callable[[int], RankGroup]) -> None:
    for text in ranks(2).run(replaced_data):
        assert text.startswith("RuntimeError: the data of parameter '0.weight' was replaced after attach")


def hooked(rank: int, mode: str, when: str) -> list[str]:
    """Tensor and post-accumulate hooks see the true gradient once per step, and what they return is used."""
    problems: list[str] = []
    plain = seeded(small)
    model = twin(plain)
    counts = {"plain": 0, "ours": 0}

    def add_hooks(module: nn.Module, key: str) -> None:
        module[0].weight.register_hook(lambda grad: grad * 0.5)  # type: ignore[index, union-attr]

        def count(param: Tensor) -> None:
            counts[key] += 1
            if param.grad is None or not param.grad.abs().sum() > 0:
                problems.append(f"{key}: the hook saw no gradient")

        module[2].bias.register_post_accumulate_grad_hook(count)  # type: ignore[index, union-attr]

    if when == "before":
        add_hooks(plain, "plain")
        add_hooks(model, "ours")
    buf, call, optimizer = prepare(model, mode)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    for step in range(4):
        if step == 2 and when == "after":
            add_hooks(plain, "plain")
            add_hooks(model, "ours")
        reference_step(plain, reference, partial(loss_of, step=step))
        call(batch(step, 0, rank, 8, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        buf.sync_params()
        difference = max_difference(params_of(model), params_of(plain))
        if not difference <= BOUND:
            problems.append(f"{mode} hooks {when} step {step}: differs by {difference}")
    if counts["ours"] * dist.get_world_size() != counts["plain"]:
        problems.append(f"hook ran {counts}")
    buf.detach()
    return problems


def all_hooked(rank: int) -> list[str]:
    problems = []
    for mode in MODES:
        for when in ("before", "after"):
            problems += hooked(rank, mode, when)
            fresh_compiler()
    return problems


@pytest.mark.parametrize("world", [1, 2])
def test_hooks_on_parameters(ranks: Callable[[int], RankGroup], world: int) -> None:
    for problems in ranks(world).run(all_hooked):
        assert not problems, "\n".join(problems)


class Fragile(torch.autograd.Function):
    """Identity whose backward raises when told to."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Fragile.armed:
            raise ValueError("planned")
        return grad


class Breaking(nn.Module):
    """Two graphs with eager code between them that can raise in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        result: Tensor = self.last(self.middle(hidden))
        return result

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def middle(self, hidden: Tensor) -> Tensor:
        return Fragile.apply(hidden)  # type: ignore[no-any-return, no-untyped-call]


def aborted(rank: int, mode: str) -> str | None:
    plain = seeded(Breaking)
    model = twin(plain)
    buf, call, optimizer = prepare(model, mode)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    for step in range(4):
        reference_step(plain, reference, partial(loss_of, step=step))
        if step in (1, 2):
            Fragile.armed = True
            text = error_text(lambda: call(batch(9, 0, rank, 8, 6)).square().mean().backward())
            Fragile.armed = False
            if text != "ValueError: planned":
                return f"{mode}: {text}"
            optimizer.zero_grad()
        call(batch(step, 0, rank, 8, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        buf.sync_params()
        difference = max_difference(params_of(model), params_of(plain))
        if not difference <= BOUND:
            return f"{mode} step {step}: differs by {difference}"
    buf.detach()
    return None


def all_aborted(rank: int) -> list[str]:
    problems = []
    for mode in MODES:
        problem = aborted(rank, mode)
        if problem:
            problems.append(problem)
        fresh_compiler()
    return problems


@pytest.mark.parametrize("world", [1, 2])
def test_step_after_an_aborted_backward(ranks: Callable[[int], RankGroup], world: int) -> None:
    for problems in ranks(world).run(all_aborted):
        assert not problems, "\n".join(problems)


def adversaries(rank: int, mode: str) -> str | None:
    """Two attached models with alternating updates; each is used in the other's loss, and one is frozen there."""
    world = dist.get_world_size()
    plain = [seeded(lambda: nn.Linear(4, 6), 1), seeded(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh()), 2)]
    ours = [twin(model) for model in plain]
    prepared = [prepare(model, mode) for model in ours]
    references = [torch.optim.AdamW(model.parameters(), lr=LR) for model in plain]

    def losses(maker: Any, judge: Any, frozen: nn.Module, step: int, r: int, turn: int) -> Tensor:
        noise = batch(step, turn, r, 8, 4)
        if turn == 0:
            frozen.requires_grad_(False)
            loss: Tensor = judge(maker(noise)).square().mean()
            frozen.requires_grad_(True)
            return loss
        result: Tensor = judge(maker(noise).detach()).mean() + judge(batch(step, 7, r, 8, 6)).square().mean()
        return result

    for step in range(3):
        for turn in (0, 1):
            for r in range(world):
                losses(plain[0], plain[1], plain[1], step, r, turn).backward()
            for param in plain[turn].parameters():
                param.grad.div_(world)  # type: ignore[union-attr]
            references[turn].step()
            references[turn].zero_grad()
            losses(prepared[0][1], prepared[1][1], ours[1], step, rank, turn).backward()
            prepared[turn][2].step()
            prepared[turn][2].zero_grad()
        for model, other, (buf, _, _) in zip(ours, plain, prepared):
            buf.sync_params()
            difference = max_difference(params_of(model), params_of(other))
            if not difference <= BOUND:
                return f"{mode} step {step}: differs by {difference}"
    for buf, _, _ in prepared:
        buf.detach()
    return None


def all_adversaries(rank: int) -> list[str]:
    problems = []
    for mode in MODES:
        problem = adversaries(rank, mode)
        if problem:
            problems.append(problem)
        fresh_compiler()
    return problems


@pytest.mark.parametrize("world", [1, 2])
def test_two_models_with_alternating_updates(ranks: Callable[[int], RankGroup], world: int) -> None:
    for problems in ranks(world).run(all_adversaries):
        assert not problems, "\n".join(problems)


def forward_chunks(prepared: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the first chunk sends, what the second receives, and the loss."""
    sent = prepared[0][1](x)
    received = sent.detach().requires_grad_()
    return sent, received, prepared[1][1](torch.tanh(received)).square().mean()


def backward_chunks(prepared: Any, sent: Tensor, received: Tensor, loss: Tensor, *, is_synced: bool) -> None:
    with contextlib.nullcontext() if is_synced else prepared[1][0].no_sync():
        loss.backward()
    with contextlib.nullcontext() if is_synced else prepared[0][0].no_sync():
        sent.backward(received.grad)


def interleaved(rank: int, mode: str, is_scheduled: bool) -> str | None:
    """Two chunks as virtual pipeline stages, 1F1B: forwards and backwards in schedule order, one handle each."""
    world = dist.get_world_size()
    plain = [seeded(lambda: nn.Linear(6, 6), 1), seeded(lambda: nn.Linear(6, 3), 2)]
    ours = [twin(chunk) for chunk in plain]
    prepared = [prepare(chunk, mode) for chunk in ours]
    references = [torch.optim.AdamW(chunk.parameters(), lr=LR) for chunk in plain]
    micro_batches = 4
    for step in range(3):
        for r in range(world):
            for micro in range(micro_batches):
                plain[1](torch.tanh(plain[0](batch(step, micro, r, 8, 6)))).square().mean().backward()
        for chunk, reference in zip(plain, references):
            for param in chunk.parameters():
                param.grad.div_(world)  # type: ignore[union-attr]
            reference.step()
            reference.zero_grad()
        if is_scheduled:
            for buf, _, _ in prepared:
                buf.start_param_sync()
        waiting = [forward_chunks(prepared, batch(step, 0, rank, 8, 6))]
        for micro in range(1, micro_batches):
            waiting.append(forward_chunks(prepared, batch(step, micro, rank, 8, 6)))
            backward_chunks(prepared, *waiting.pop(0), is_synced=False)
        backward_chunks(prepared, *waiting.pop(0), is_synced=not is_scheduled)
        if is_scheduled:
            for buf, _, _ in reversed(prepared):
                buf.start_grad_sync()
        for buf, _, optimizer in prepared:
            optimizer.step()
            optimizer.zero_grad()
            buf.sync_params()
        for chunk, other in zip(ours, plain):
            difference = max_difference(params_of(chunk), params_of(other))
            if not difference <= BOUND:
                return f"{mode} step {step}: differs by {difference}"
    for buf, _, _ in prepared:
        buf.detach()
    return None


def all_interleaved(rank: int) -> list[str]:
    problems = []
    for mode in MODES:
        for is_scheduled in (False, True):
            problem = interleaved(rank, mode, is_scheduled)
            if problem:
                problems.append(f"scheduled {is_scheduled}: {problem}")
            fresh_compiler()
    return problems


@pytest.mark.parametrize("world", [1, 2])
def test_interleaved_chunks(ranks: Callable[[int], RankGroup], world: int) -> None:
    for problems in ranks(world).run(all_interleaved):
        assert not problems, "\n".join(problems)


def averaged_teacher(rank: int, mode: str) -> str | None:
    """A deep copy after setup shares nothing with the student and joins no collective."""
    plain = seeded(small)
    plain_teacher = copy.deepcopy(plain)
    model = twin(plain)
    buf, call, optimizer = prepare(model, mode)
    teacher = copy.deepcopy(model)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    for step in range(4):
        reference_step(plain, reference, partial(loss_of, step=step))
        call(batch(step, 0, rank, 8, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        buf.sync_params()
        with torch.no_grad():
            for average, param in zip(teacher.parameters(), model.parameters()):
                average.lerp_(param, 0.1)
            for average, param in zip(plain_teacher.parameters(), plain.parameters()):
                average.lerp_(param, 0.1)
            torch.compile(teacher, backend="megabuf", options={"inner_compiler": "aot_eager"})(batch(step, 1, 0, 8, 6))
        if not max_difference(params_of(teacher), params_of(plain_teacher)) <= BOUND:
            return f"{mode}: teacher differs"
    buf.detach()
    return None


def all_teachers(rank: int) -> list[str]:
    problems = []
    for mode in MODES:
        problem = averaged_teacher(rank, mode)
        if problem:
            problems.append(problem)
        fresh_compiler()
    return problems


def test_averaged_teacher(ranks: Callable[[int], RankGroup]) -> None:
    for problems in ranks(2).run(all_teachers):
        assert not problems, "\n".join(problems)


def module_hook_added_late(rank: int, mode: str) -> list[str]:
    """The error on the next step, and that a step after ``torch.compiler.reset`` runs the hook."""
    model = seeded(small)
    buf, call, optimizer = prepare(model, mode)

    def step() -> None:
        call(batch(0, 0, rank, 8, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    seen: list[int] = []
    model[1].register_forward_hook(lambda *unused: seen.append(1))  # type: ignore[index, union-attr, operator]
    text = error_text(step)
    optimizer.zero_grad()
    torch.compiler.reset()
    step()
    buf.detach()
    return [text, f"{len(seen)} calls"]


@pytest.mark.parametrize("mode", ["sharded", "plain"])
def test_module_hook_added_after_compilation(ranks: Callable[[int], RankGroup], mode: str) -> None:
    for text, calls in ranks(2).run(module_hook_added_late, mode):
        assert text.startswith("RuntimeError: hooks of module '1' changed after it was compiled")
        assert calls == "1 calls"


class BrokenBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return torch.tanh(self.last(x))


class BrokenLoop(nn.Module):
    """A graph break inside a loop: Dynamo runs this frame eagerly and compiles what it calls, piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([BrokenBlock(), BrokenBlock()])
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.last(x)
        return result


def bare_pieces(rank: int, form: str) -> str | None:
    plain = seeded(BrokenLoop)
    model = twin(plain)
    options = {"inner_compiler": "aot_eager", "bucket_size": 60}
    call: Any = model
    if form == "torch.compile":
        call = torch.compile(model, backend="megabuf", options=options)  # type: ignore[arg-type]
    elif form == "model.compile":
        model.compile(backend="megabuf", options=options)
    else:
        call = torch.compile(model.forward, backend="megabuf", options=options)  # type: ignore[arg-type]
    optimizer, reference = (torch.optim.AdamW(m.parameters(), lr=LR) for m in (model, plain))
    for step in range(3):
        reference_step(plain, reference, partial(loss_of, step=step))
        loss_of(call, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not max_difference(params_of(model), params_of(plain)) <= BOUND:
            return f"{form} step {step}: differs by {max_difference(params_of(model), params_of(plain))}"
    if mb.handle(model).model is not model:
        return f"{form}: {type(mb.handle(model).model).__name__} is attached"
    mb.handle(model).detach()
    return None


@pytest.mark.parametrize("form", ["torch.compile", "model.compile", "model.forward"])
def test_bare_form_attaches_the_whole_model(ranks: Callable[[int], RankGroup], form: str) -> None:
    assert ranks(2).run(bare_pieces, form) == [None, None]


# In one process.


class Dropped(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.3, self.training))


def call_in_bf16(model: Any, call: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        result: Tensor = call(x)
    return result


def call_after_inference(model: Any, call: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        call(x)
    result: Tensor = call(x)
    return result


def call_after_eval(model: Any, call: Any, x: Tensor) -> Tensor:
    model.eval()
    call(x)
    model.train()
    result: Tensor = call(x)
    return result


def call_functionally(model: Any, call: Any, x: Tensor) -> Tensor:
    result: Tensor = functional_call(call, dict(call.named_parameters()), (x,))
    return result


def call_past_the_root(model: Any, call: Any, x: Tensor) -> Tensor:
    """Submodules by hand: eager, past every compiled graph."""
    result: Tensor = model.fc3(model.ln(torch.tanh(model.fc2(torch.tanh(model.fc1(x))))))
    return result


def call_plainly(model: Any, call: Any, x: Tensor) -> Tensor:
    result: Tensor = call(x)
    return result


CALLS: dict[str, tuple[Callable[..., Tensor], Callable[[], nn.Module]]] = {
    "autocast": (call_in_bf16, Mlp),
    "dropout": (call_plainly, Dropped),
    "inference_mode": (call_after_inference, Mlp),
    "eval": (call_after_eval, Dropped),
    "functional_call": (call_functionally, Mlp),
    "past_the_root": (call_past_the_root, Mlp),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_ways_to_call(name: str, mode: str) -> None:
    """Bitwise: nothing is reordered."""
    forward, build = CALLS[name]
    plain = seeded(build)
    model = twin(plain)
    buf, call, optimizer = prepare(model, mode)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    for step in range(3):
        for module, callee, update in ((plain, plain, reference), (model, call, optimizer)):
            torch.manual_seed(step)
            forward(module, callee, batch(step, 0, 0, 8, 13)).float().square().mean().backward()
            update.step()
            update.zero_grad()
        buf.sync_params()
        # Without alignment, CPU products round by where they write.
        bound = 1e-6 if mode == "plain_dense" else 0.0
        assert max_difference(params_of(model), params_of(plain)) <= bound


def scaled_steps(model: nn.Module, call: Any, optimizer: Any) -> list[float]:
    """Three steps through GradScaler, the second with an infinite loss; the scale after each."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scales = []
    for step in range(3):
        loss = call(batch(step, 0, 0, 8, 13)).square().mean() * (float("inf") if step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def test_grad_scaler_without_sharding() -> None:
    plain = seeded(Mlp)
    model = twin(plain)
    _, call, optimizer = prepare(model, "plain")
    expected = scaled_steps(plain, plain, torch.optim.AdamW(plain.parameters(), lr=LR))
    assert scaled_steps(model, call, optimizer) == expected == [8.0, 4.0, 4.0]
    assert max_difference(params_of(model), params_of(plain)) == 0.0


def test_grad_scaler_is_refused_with_sharding() -> None:
    _, call, optimizer = prepare(seeded(Mlp), "sharded")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(call(batch(0, 0, 0, 8, 13)).square().mean()).backward()
    with pytest.raises(NotImplementedError, match=r"GradScaler .*use_distributed_optimizer=False"):
        scaler.step(optimizer)


class EagerHead(nn.Module):
    """The first layer runs outside every graph, before any compiled code of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first = EagerLinear(6, 7)
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        result: Tensor = self.last(hidden)
        return result


class EagerLinear(nn.Linear):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def eager_head(rank: int, mode: str) -> str | None:
    plain = seeded(EagerHead)
    model = twin(plain)
    buf, call, optimizer = prepare(model, mode)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    for step in range(4):
        reference_step(plain, reference, partial(loss_of, step=step))
        loss_of(call, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            buf.sync_params()
            if not max_difference(params_of(model), params_of(plain)) <= BOUND:
                return f"{mode}: differs by {max_difference(params_of(model), params_of(plain))}"
    buf.detach()
    return None


def all_eager_heads(rank: int) -> list[str]:
    problems = []
    for mode in MODES:
        problem = eager_head(rank, mode)
        if problem:
            problems.append(problem)
        fresh_compiler()
    return problems


def test_eager_part_before_any_graph(ranks: Callable[[int], RankGroup]) -> None:
    for problems in ranks(2).run(all_eager_heads):
        assert not problems, "\n".join(problems)


ONE_RANK_RAISES = """
import datetime, sys, torch, torch.distributed as dist, megabuf_fx as mb
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 3))
buf = mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=30, overlap_param_gather=True))
call = torch.compile(model, backend="megabuf")
optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
for step in range(3):
    output = call(torch.randn(4, 6))
    if step == 1 and dist.get_rank() == 1:
        raise ValueError("planned on rank 1")
    output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {dist.get_rank()} finished step {step}", flush=True)
"""


@pytest.mark.timeout(150)
@pytest.mark.parametrize("launcher", ["torchrun", "bare"])
def test_one_rank_raises_and_all_end(tmp_path: Path, launcher: str) -> None:
    """Nobody hangs: torchrun ends the others, and without it their collectives fail."""
    script = tmp_path / "script.py"
    script.write_text(ONE_RANK_RAISES)
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode != 0
        assert "planned on rank 1" in done.stderr
        return
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode != 0 for process in processes)
    assert "planned on rank 1" in outputs[1][1]
    assert "rank 0 finished step 0" in outputs[0][0]
    assert "rank 0 finished step 1" not in outputs[0][0]
