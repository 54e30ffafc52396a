"""Situations that differ in how the model compiles: graph breaks, eager parts, checkpointing, changing shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from helpers import max_difference
from pair import Pair, SmallMlp
from situations import Side, Situation, is_sharded
from situations_loops import three_micro_batches
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, is_broken: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)
        self.is_broken = is_broken

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.is_broken:
            torch._dynamo.graph_break()
        return torch.tanh(self.last(x))


class BrokenLoop(nn.Module):
    """Graph breaks inside a loop: Dynamo runs this frame eagerly and compiles what it calls, piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Block(is_broken=True), Block(is_broken=True)])
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.last(x)
        return result


class Broken(SmallMlp):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.fc1(x))
        torch._dynamo.graph_break()
        result: Tensor = self.fc2(hidden)
        return result


class Repeated(nn.Module):
    """One layer used twice, in one graph or on both sides of a break."""

    def __init__(self, is_broken: bool) -> None:
        super().__init__()
        self.block = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)
        self.is_broken = is_broken

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.block(x))
        if self.is_broken:
            torch._dynamo.graph_break()
        result: Tensor = self.last(torch.tanh(self.block(hidden)))
        return result


class EagerLinear(nn.Linear):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class WithEagerLayer(nn.Module):
    """Three layers, one of them outside every graph."""

    def __init__(self, position: int) -> None:
        super().__init__()
        kinds = [EagerLinear if i == position else nn.Linear for i in range(3)]
        self.first = kinds[0](6, 7)
        self.middle = kinds[1](7, 5)
        self.last = kinds[2](5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.first(x))))
        result: Tensor = self.last(hidden)
        return result


class Cube(torch.autograd.Function):
    """A custom function with a custom gradient (half of the true one)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result: Tensor = 1.5 * x * x * grads[0]
        return result


class Cubic(SmallMlp):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc2(Cube.apply(self.fc1(x)))  # type: ignore[no-untyped-call]
        return result


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.block = Block()
        self.last = nn.Linear(6, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(checkpoint(self.block, torch.tanh(self.first(x)), use_reentrant=self.use_reentrant))
        return result


def checkpointed_call(use_reentrant: bool) -> Callable[[Side], None]:
    """The compiled model itself is recomputed in backward."""

    def step(side: Side) -> None:
        x = side.data().requires_grad_()
        checkpoint(side.call, x, use_reentrant=use_reentrant).square().mean().backward()

    return step


def compile_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="megabuf")
    return model


def compile_block(model: Any) -> nn.Module:
    model[0].compile(backend="megabuf")
    return model  # type: ignore[no-any-return]


def compile_blocks(model: Any) -> nn.Module:
    for block in (model[0], model[1]):
        block.compile(backend="megabuf")
    return model  # type: ignore[no-any-return]


def blocks() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(6, 3))


# Changing shapes


ROWS = (4, 7, 3, 9)


def changing_rows(side: Side) -> None:
    """Rows differ by step and, later on, by rank."""
    rows = ROWS[side.step] + (side.rank if side.step > 1 else 0)
    side.call(side.data(0, rows, 6)).square().mean().backward()


def marked_rows(side: Side) -> None:
    x = side.data(0, ROWS[side.step], 6)
    torch._dynamo.mark_dynamic(x, 0)
    side.call(x).square().mean().backward()


# Ways to call


def in_bf16(side: Side) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        out = side.call(side.data())
    out.float().square().mean().backward()


class Dropped(SmallMlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.3, self.training))


def own_seed(side: Side) -> None:
    torch.manual_seed(100 * side.step + side.rank)
    side.loss().backward()


def eval_between(side: Side) -> None:
    side.model.eval()
    side.call(side.data(1))
    side.model.train()
    own_seed(side)


def functionally(side: Side) -> None:
    functional_call(side.call, dict(side.call.named_parameters()), (side.data(),)).square().mean().backward()


def past_the_root(side: Side) -> None:
    """Submodules by hand: eager, past every compiled graph."""
    side.model.fc2(torch.tanh(side.model.fc1(side.data()))).square().mean().backward()


# Module buffers


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7, bias=False)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return result


def keep_statistics(side: Side) -> None:
    """Running statistics belong to a rank, which normalizes with its own batch: the plain side has a set for each."""
    if side.is_plain:
        names = dict(side.model.named_buffers())
        side.kept["buffers"] = [{name: b.clone() for name, b in names.items()} for _ in range(side.case.world)]


def own_statistics(side: Side) -> None:
    x = side.data(0, 8, 6)
    if side.is_plain:
        out = functional_call(side.model, side.kept["buffers"][side.rank], (x,))
    else:
        out = side.call(x)
    out.square().mean().backward()


def check_statistics(pair: Pair, plain: Side, ours: Side) -> Iterator[str]:
    found = {name: b.double() for name, b in ours.model.named_buffers()}
    expected = {name: b.double() for name, b in plain.kept["buffers"][pair.rank].items()}
    if not max_difference(found, expected) <= 2e-5:
        yield f"running statistics differ: {found}, expected {expected}"


GRAPHS: dict[str, Situation] = {
    "one graph": Situation(),
    "graph break": Situation(builds=(Broken,), graphs=2),
    "graph break inside a bucket": Situation(builds=(Broken,), graphs=2, bucket_size=10_000),
    "graph break, micro-batches": Situation(builds=(Broken,), step=three_micro_batches, graphs=2, is_exact=False),
    "graph breaks in a loop of blocks": Situation(
        builds=(BrokenLoop,),
        # The blocks share theirs; layers that wait for a gather in a hook are compiled as graphs of their own.
        graphs=lambda case, rank: 4 if case.mode == "overlap" else 2,
    ),
    "weight used twice": Situation(builds=(lambda: Repeated(is_broken=False),), is_exact=False),
    "weight on both sides of a break": Situation(builds=(lambda: Repeated(is_broken=True),), graphs=2, is_exact=False),
    "eager first layer": Situation(builds=(lambda: WithEagerLayer(0),)),
    "eager middle layer": Situation(builds=(lambda: WithEagerLayer(1),), graphs=2),
    "eager last layer": Situation(builds=(lambda: WithEagerLayer(2),)),
    "model.compile()": Situation(compile=compile_in_place),
    "one submodule compiled": Situation(builds=(blocks,), compile=compile_block),
    "blocks compiled one by one": Situation(builds=(blocks,), compile=compile_blocks, graphs=2),
    "custom autograd.Function": Situation(builds=(Cubic,)),
    "checkpointing inside": Situation(builds=(lambda: Checkpointed(use_reentrant=False),)),
    "checkpointing inside, reentrant": Situation(
        builds=(lambda: Checkpointed(use_reentrant=True),),
        # The backward within the backward ends with a reduction of its own where .grad has to be complete.
        reductions=lambda case, step: 2 if case.way == "eager path" and not is_sharded(case) else 1,
    ),
    "checkpointed call": Situation(step=checkpointed_call(use_reentrant=False)),
    "checkpointed call, reentrant": Situation(step=checkpointed_call(use_reentrant=True), graphs=2),
    "changing batch size": Situation(step=changing_rows, graphs=2),
    "changing batch size, dynamic=True": Situation(
        step=changing_rows, compile=lambda model: torch.compile(model, backend="megabuf", dynamic=True)
    ),
    "changing batch size, marked": Situation(step=marked_rows),
    "autocast": Situation(
        step=in_bf16,
        # Inductor keeps fp32 between operations where eager rounds to bf16, which has 8 bits.
        inductor_bound=2e-3,
    ),
    "dropout": Situation(
        builds=(Dropped,),
        step=own_seed,
        compile=lambda model: torch.compile(model, backend="megabuf", options={"fallback_random": True}),
    ),
    "eval() between": Situation(
        builds=(Dropped,),
        step=eval_between,
        graphs=2,
        compile=lambda model: torch.compile(model, backend="megabuf", options={"fallback_random": True}),
    ),
    "functional_call": Situation(step=functionally),
    "submodules called by hand": Situation(step=past_the_root, graphs=0),
    "BatchNorm": Situation(builds=(Normalized,), begin=keep_statistics, step=own_statistics, check=check_statistics),
}
