"""Recipes from public reports, the part about what the optimizer updates: V06, V07 and V19 of
``shared/cases/public_reports.md``; see ``test_public_reports.py``. Bucket sizes there are bytes, here elements of fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import RankGroup, params_of
from pair import MODES, Pair, SmallMlp, check_on, owned, run_cases, square_loss
from torch import Tensor, nn

pytestmark = pytest.mark.dist

Ranks = Callable[[int], RankGroup]


# V06


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 7)
        self.spare = nn.Linear(3, 3)
        self.fc2 = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc2(torch.tanh(self.fc1(x)))
        return result


def unused(mode: str, bucket_size: int | None) -> list[str]:
    options = {"bucket_size": bucket_size}
    pair = Pair(Spare, mode, optimizer=torch.optim.AdamW, attach=options, lr=1e-3, weight_decay=0.3)
    names = [{pair.buf.plan.params[p].name for p in group.params} for group in pair.buf.plan.groups]
    is_alone = {"spare.weight", "spare.bias"} in names
    pair.expect(is_alone == (bucket_size is not None), f"not the buckets that were meant: {names}")
    start = params_of(pair.model.spare)
    for step in range(8):
        pair.step(square_loss, step, micros=1 if step < 4 else 2)
    pair.check()
    for name, value in params_of(pair.model.spare).items():
        pair.expect(torch.equal(value, start[name]), f"spare.{name} has moved")
    count = sum(p.numel() for layer in (pair.model.fc1, pair.model.fc2) for p in layer.parameters())
    pair.expect(pair.state_elements() == count, f"state of {pair.state_elements()} elements, used are {count}")
    return pair.finish()


def unused_cases(rank: int) -> list[str]:
    sizes = {"bucket of its own": 12, "shared bucket": None}
    return run_cases({f"{mode} {name}": partial(unused, mode, sizes[name]) for mode in MODES for name in sizes})


# V07


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(6, 2))
        self.b = nn.Parameter(torch.zeros(2, 6))
        self.last = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.base(x) + x @ self.a @ self.b)) * self.scale
        return result


def adapters(mode: str) -> list[str]:
    pair = Pair(Adapted, mode, optimizer=torch.optim.AdamW, attach={"bucket_size": 16}, lr=1e-3, weight_decay=0.1)
    flags = {name: p.requires_grad for name, p in pair.plain.named_parameters()}
    found = {name: p.requires_grad for name, p in pair.model.named_parameters()}
    pair.expect(found == flags, f"requires_grad is {found}")
    start = params_of(pair.model)
    for step in range(5):
        pair.step(square_loss, step)
    pair.check()
    trainable = 0
    for name, param in pair.model.named_parameters():
        if flags[name]:
            trainable += param.numel()
            continue
        pair.expect(torch.equal(param, start[name]), f"{name} is frozen and has moved")
        pair.expect(not hasattr(param, "main_grad"), f"{name} is frozen and has a main_grad")
        pair.expect(param not in pair.optimizer.state, f"{name} is frozen and has optimizer state")
    pair.expect(pair.state_elements() == trainable, f"optimizer state of {pair.state_elements()} elements")
    return pair.finish()


def adapter_cases(rank: int) -> list[str]:
    return run_cases({mode: partial(adapters, mode) for mode in MODES})


# V19


class WideMlp(SmallMlp):
    def __init__(self) -> None:
        super().__init__(6, 47, 3)


def by_kind(model: Any) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name.endswith("weight")], "lr": 0.05, "weight_decay": 0.2},
        {"params": [p for name, p in named if name.endswith("bias")], "lr": 0.02, "weight_decay": 0.0},
    ]


def all_but_last(model: Any) -> list[dict[str, Any]]:
    last = list(model.fc2.parameters())
    return [
        {**group, "params": [p for p in group["params"] if p is not last[0] and p is not last[1]]}
        for group in by_kind(model)
    ]


def schedules(mode: str, adds_group: bool) -> list[str]:
    groups = all_but_last if adds_group else by_kind
    pair = Pair(WideMlp, mode, optimizer=torch.optim.AdamW, groups=groups, attach={"bucket_size": 25})
    kinds = [{pair.buf.plan.params[p].name[-4:] for p in group.params} for group in pair.buf.plan.groups]
    pair.expect(any(len(kind) == 2 for kind in kinds), "no bucket holds both groups")
    if pair.is_sharded:
        is_cut = any(
            0 < part.start < part.stop or part.stop < p.numel()
            for (_, _, part), p in zip(owned(pair), pair.model.parameters())
            if part.start < part.stop
        )
        pair.expect(is_cut, "no shard border cuts a parameter")
    for step in range(5):
        if step == 3:
            for optimizer in (pair.reference, pair.optimizer):
                optimizer.param_groups[0]["weight_decay"] = 0.0
        if step == 4 and adds_group:
            try:
                pair.optimizer.add_param_group({"params": list(pair.model.fc2.parameters()), "lr": 0.01})
            except NotImplementedError as error:
                pair.expect("add_param_group" in str(error), f"unclear refusal: {error}")
            else:
                pair.reference.add_param_group({"params": list(pair.plain.fc2.parameters()), "lr": 0.01})
        pair.step(square_loss, step)
        for optimizer in (pair.reference, pair.optimizer):
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
    return pair.finish()


def schedule_cases(rank: int) -> list[str]:
    variants = {"": False, " add_param_group": True}
    return run_cases({mode + v: partial(schedules, mode, variants[v]) for mode in MODES for v in variants})


def test_unused_parameters(ranks: Ranks) -> None:
    """V06: trainable but never used weights are bit-identical and have no optimizer state."""
    check_on(2, ranks, unused_cases)


def test_frozen_parameters(ranks: Ranks) -> None:
    """V07: frozen weights stay, with their flags, and have neither main_grad nor state."""
    check_on(2, ranks, adapter_cases)


def test_groups_and_schedules(ranks: Ranks) -> None:
    """V19: two groups mixed in one bucket, changing lr and decay, add_param_group works or is refused."""
    check_on(3, ranks, schedule_cases)
