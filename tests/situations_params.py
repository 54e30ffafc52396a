"""Situations that differ in their parameters: tied, unused, frozen, odd shapes, dtypes and strides, hooked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from pair import Pair, SmallMlp
from situations import ADAMW, Case, Side, Situation, is_sharded
from torch import Tensor, nn


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(7, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 7)
        self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.middle(self.token(x))))
        return result


def predict(side: Side) -> None:
    tokens = side.data().abs().mul(10).long() % 7
    side.call(tokens).square().mean().backward()


class Branched(SmallMlp):
    """A layer that only some calls use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(6, 3)
        self.unused = nn.Linear(5, 4)

    def forward(self, x: Tensor, with_extra: bool = False) -> Tensor:
        out = super().forward(x)
        return out + self.extra(x) if with_extra else out


def using_extra(when: Callable[[Side], bool]) -> Callable[[Side], None]:
    def step(side: Side) -> None:
        side.call(side.data(), with_extra=when(side)).square().mean().backward()

    return step


def check_untouched(pair: Pair, plain: Side, ours: Side) -> Iterator[str]:
    """What no rank ever used has no decay and no optimizer state, exactly."""
    found, expected = ours.model.unused.weight, plain.model.unused.weight
    if not torch.equal(found, expected):
        yield "the unused weight moved"
    kept = sum(entry["exp_avg"].numel() for entry in pair.reference.state.values())
    if pair.state_elements() != kept:
        yield f"optimizer state for {pair.state_elements()} elements, expected {kept}"


class Frozen(SmallMlp):
    def __init__(self) -> None:
        super().__init__()
        self.fc1.weight.requires_grad_(False)


def toggle(side: Side) -> None:
    """Frozen for steps 1 and 2."""
    if side.step in (0, 2):
        side.model.fc1.requires_grad_(side.step == 2)


def unfreeze(side: Side) -> None:
    if side.step == 0:
        side.model.fc1.weight.requires_grad_(True)


class Odd(nn.Module):
    """Empty parameters at both ends, a 0-dim one, a weight that is stored transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.empty_first = nn.Parameter(torch.empty(0))
        self.first = nn.Linear(6, 7)
        self.weight = nn.Parameter(torch.randn(3, 7).t())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty_last = nn.Parameter(torch.empty(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        extra = self.empty_first.sum() + self.empty_last.sum()
        result: Tensor = (torch.tanh(self.first(x)) @ self.weight) * self.scale + extra
        return result


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.last = nn.Linear(45, 3)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.conv(x)).flatten(1))
        return result


def on_images(side: Side) -> None:
    x = side.data(0, 4, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    side.call(x).square().mean().backward()


def check_strides(pair: Pair, plain: Side, ours: Side) -> Iterator[str]:
    """Of parameters, and of the gradients they were given."""
    for name, param in ours.model.named_parameters():
        expected = plain.model.get_parameter(name).stride()
        for found in (param.stride(), param.main_grad.stride()):
            if found != expected:
                yield f"{name} has strides {found}, expected {expected}"


class Mixed(SmallMlp):
    """The first layer in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc2(torch.tanh(self.fc1(x.bfloat16()).float()))
        return result


def add_hooks(model: Any) -> None:
    """One that changes the gradient and one that looks at it, which the model remembers."""
    model.seen = []
    model.fc1.weight.register_hook(lambda grad: grad * 0.5)
    model.fc2.bias.register_post_accumulate_grad_hook(
        lambda param: model.seen.append(param.grad is not None and bool(param.grad.abs().sum() > 0))
    )


def add_hooks_late(side: Side) -> None:
    if side.step == 1:
        add_hooks(side.model)


def check_hooks(pair: Pair, plain: Side, ours: Side) -> Iterator[str]:
    if len(ours.model.seen) * pair.world != len(plain.model.seen) or not all(ours.model.seen):
        yield f"the hook saw {ours.model.seen}, expected {len(plain.model.seen) // pair.world} gradients"


def not_sharded(case: Case) -> bool:
    return not is_sharded(case)


PARAMS: dict[str, Situation] = {
    "tied weights": Situation(builds=(Tied,), step=predict, is_exact=False),
    "unused parameter, AdamW": Situation(
        builds=(Branched,), optimizer=torch.optim.AdamW, options=ADAMW, check=check_untouched
    ),
    "used by some ranks only": Situation(
        builds=(Branched,),
        step=using_extra(lambda side: side.rank == 0),
        optimizer=torch.optim.AdamW,
        options=ADAMW,
        check=check_untouched,
    ),
    "used in some steps only": Situation(
        builds=(Branched,),
        step=using_extra(lambda side: side.step % 2 == 1),
        optimizer=torch.optim.AdamW,
        options=ADAMW,
        check=check_untouched,
        graphs=2,
    ),
    "frozen parameter": Situation(builds=(Frozen,)),
    "frozen and unfrozen later": Situation(after=toggle, steps=5, graphs=2),
    "unfrozen after attach": Situation(
        builds=(Frozen,),
        after=unfreeze,
        is_refused=lambda case: is_sharded(case) or case.world > 1,
        graphs=2,
        refused="was frozen when the model was attached",
    ),
    "empty, 0-dim, transposed parameters": Situation(builds=(Odd,), check=check_strides),
    "channels_last": Situation(builds=(Convolution,), step=on_images, check=check_strides),
    "bf16 and fp32 parameters": Situation(
        builds=(Mixed,),
        # bf16 weights below 0.5 are 2**-9 apart; each step may round to a neighbour, and shards keep fp32 masters.
        bound=4 * 2**-9,
        is_exact=False,
    ),
    "tensor hooks": Situation(before_attach=add_hooks, check=check_hooks),
    "tensor hooks added later": Situation(after=add_hooks_late, check=check_hooks),
}
