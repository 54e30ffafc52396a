"""Recipes from public reports, the part about parameters: which there are, where they lie, what becomes of them.

The recipes are V01-V04, V08, V20 and V23 of ``shared/cases/public_reports.md``; see
``test_public_reports.py``. Bucket sizes there are bytes, here elements of fp32.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import RankGroup, batch, error_text, params_of, seeded
from pair import MODES, Pair, SmallMlp, check_on, owned, recorded_collectives, run_cases, square_loss, tokens
from torch import Tensor, nn
from torch.nn import functional as F

import megabuf_fx as mb

pytestmark = pytest.mark.dist

Ranks = Callable[[int], RankGroup]


# V01


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(13, 6)
        self.mid = nn.Linear(6, 6)
        self.out = nn.Linear(6, 13)
        self.out.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.out(torch.tanh(self.mid(self.emb(ids))))
        return result


def tied(mode: str) -> list[str]:
    pair = Pair(Tied, mode, attach={"bucket_size": 16}, lr=0.1, momentum=0.9)

    def loss(model: Any, step: int, micro: int, rank: int) -> Tensor:
        ids, targets = tokens(step, micro, rank, 2, 6 // pair.world, high=13)
        return F.cross_entropy(model(ids), targets)

    for step in range(10):
        if step in (0, 5):
            pair.expect(pair.model.out.weight is pair.model.emb.weight, f"untied before step {step}")
        pair.step(loss, step, micros=1 if step < 5 else 2)
    pair.expect(pair.model.out.weight is pair.model.emb.weight, "untied at the end")
    entries = [p for group in pair.optimizer.param_groups for p in group["params"]]
    pair.expect(sum(p is pair.model.emb.weight for p in entries) == 1, "the tied weight is not one optimizer entry")
    state = pair.model.state_dict()
    pair.expect(torch.equal(state["out.weight"], state["emb.weight"]), "state_dict has two values of one weight")
    return pair.finish()


def tied_cases(rank: int) -> list[str]:
    return run_cases({mode: partial(tied, mode) for mode in MODES})


# V02


class OddSizes(nn.Module):
    """Parameters of 1, 3, 7, 35 and 11 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.p1, self.p3, self.p7, self.p35, self.p11 = (nn.Parameter(torch.rand(n) + 0.5) for n in (1, 3, 7, 35, 11))

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x * self.p7) @ self.p35.view(7, 5)
        wide = torch.tanh(hidden.sum(1, keepdim=True) * self.p11).sum(1)
        return self.p1 * (wide + (torch.tanh(hidden[:, :3]) * self.p3).sum(1))


def two_groups(model: Any) -> list[dict[str, Any]]:
    return [{"params": [model.p1], "lr": 2e-3}, {"params": [p for n, p in model.named_parameters() if n != "p1"]}]


def odd_sizes(mode: str, bucket_size: int) -> list[str]:
    def loss(model: Any, step: int, micro: int, rank: int) -> Tensor:
        result: Tensor = model(batch(step, micro, rank, 4, 7)).square().mean()
        return result

    options = {"bucket_size": bucket_size}
    pair = Pair(OddSizes, mode, optimizer=torch.optim.AdamW, groups=two_groups, attach=options, lr=1e-3)
    for step in range(4):
        pair.step(loss, step)
        pair.expect(pair.padding_is_zero(), f"step {step}: padding is not zero")
    return pair.finish()


def odd_size_cases(rank: int) -> list[str]:
    sizes = {"1 B": 1, "64 B": 16, "1 MB": 2**18}
    return run_cases({f"{mode} {size}": partial(odd_sizes, mode, sizes[size]) for mode in MODES for size in sizes})


# V03


class Empties(nn.Module):
    """Parameters without elements: first, in the middle and last."""

    def __init__(self, is_used: bool) -> None:
        super().__init__()
        self.is_used = is_used
        self.first_grid, self.first = nn.Parameter(torch.empty(0, 8)), nn.Parameter(torch.empty(0))
        self.fc1 = nn.Linear(4, 4)
        self.middle_grid, self.middle = nn.Parameter(torch.empty(0, 8)), nn.Parameter(torch.empty(0))
        self.fc2 = nn.Linear(4, 2)
        self.last_grid, self.last = nn.Parameter(torch.empty(0, 8)), nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc2(torch.tanh(self.fc1(x)))
        if self.is_used:
            for empty in (self.first_grid, self.first, self.middle_grid, self.middle, self.last_grid, self.last):
                result = result + empty.sum() * 0
        return result


def empties(mode: str, is_used: bool, bucket_size: int | None) -> list[str]:
    def loss(model: Any, step: int, micro: int, rank: int) -> Tensor:
        result: Tensor = model(batch(step, micro, rank, 4, 4)).square().mean()
        return result

    build = partial(Empties, is_used)
    pair = Pair(build, mode, optimizer=torch.optim.AdamW, attach={"bucket_size": bucket_size}, lr=1e-3)
    shapes = {name: tuple(p.shape) for name, p in pair.plain.named_parameters()}
    for step in range(3):
        pair.step(loss, step)
        found = {name: tuple(p.shape) for name, p in pair.model.named_parameters()}
        pair.expect(found == shapes, f"step {step}: shapes are {found}")
        # Round trips of both checkpoints, between steps that go on from them.
        saved = copy.deepcopy((pair.model.state_dict(), pair.optimizer.state_dict()))
        fresh = seeded(build, seed=5)
        fresh.load_state_dict(saved[0], strict=True)
        pair.compare(params_of(fresh), params_of(pair.plain), f"checkpoint of step {step}")
        pair.model.load_state_dict(saved[0], strict=True)
        pair.optimizer.load_state_dict(saved[1])
    return pair.finish()


def empty_cases(rank: int) -> list[str]:
    cases: dict[str, Callable[[], list[str]]] = {}
    for mode in MODES:
        cases[f"{mode} used"] = partial(empties, mode, True, 16)
        cases[f"{mode} unused"] = partial(empties, mode, False, None)
        # A bucket that closes after every element may hold an empty parameter alone.
        cases[f"{mode} tiny buckets"] = partial(empties, mode, False, 1)
    return run_cases(cases)


# V04


def eight_layers() -> nn.Module:
    widths = (5, 7, 3, 11, 6, 13, 4, 9, 2)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def order_of_everything(rank: int) -> tuple[int, list[str], list[str]]:
    """A hash that differs by process, what this rank did and in which order, and problems."""

    def loss(model: Any, step: int, micro: int, rank: int) -> Tensor:
        result: Tensor = model(batch(step, micro, rank, 4, 5)).square().mean()
        return result

    dump: list[str] = []

    def one(mode: str) -> Iterator[str]:
        pair = Pair(eight_layers, mode, attach={"bucket_size": 32}, lr=0.1)
        with recorded_collectives() as collectives:
            for step in range(2):
                pair.step(loss, step)
            pair.check()
        dump.append(f"{mode}\n{pair.buf.bucket_table()}")
        # Work of gloo's own threads is in no order.
        dump.extend(f"{name} {json.dumps(shapes)}" for name, shapes in collectives if name.startswith("c10d::"))
        dump.append(f"{sorted(shapes[0][0] for name, shapes in collectives if name.startswith('gloo:'))}")
        yield from pair.finish()

    problems = run_cases({mode: partial(one, mode) for mode in MODES})
    return hash("megabuf"), dump, problems


# V08


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(16, 16, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(16)
        self.fc2 = nn.Linear(16, 16, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc2(self.norm(self.fc1(x).float()).bfloat16())
        return result


def one_signed_loss(model: Any, step: int, micro: int, rank: int) -> Tensor:
    """Small gradients that hardly change sign from one micro-batch to the next, so that a bf16 sum loses their ends."""
    x = (batch(0, 0, 0, 8, 16) + 0.3 * batch(step, micro, rank, 8, 16)).bfloat16()
    target = torch.linspace(0.5, 2.0, 16)
    return ((model(x).float() - target) * target).mean() * 0.02


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def mixed_dtypes(fuse: bool) -> list[str]:
    options = {"grad_reduce_in_fp32": True, "gradient_accumulation_fusion": fuse}
    pair = Pair(MixedDtypes, "sharded", attach=options, lr=0.1)
    keys = sorted(f"{layout.key.param_dtype} {layout.key.grad_dtype}" for layout in pair.buf.plan.layouts)
    pair.expect(keys == ["torch.bfloat16 torch.float32", "torch.float32 torch.float32"], f"buffers are {keys}")
    sums: list[dict[str, Tensor]] = []
    narrow: dict[str, Tensor] = {}
    params = dict(pair.plain.named_parameters())
    for rank in range(pair.world):
        wide: dict[str, Tensor] = {}
        for micro in range(64):
            grads = torch.autograd.grad(one_signed_loss(pair.plain, 0, micro, rank), list(params.values()))
            for name, grad in zip(params, grads):
                pair.expect(grad.dtype == params[name].dtype, f"{name}: plain gradient is {grad.dtype}")
                wide[name] = wide[name] + grad.float() if micro else grad.float()
                if rank == pair.rank:
                    narrow[name] = narrow[name] + grad.bfloat16() if micro else grad.bfloat16()
        sums.append(wide)
    pair.poison()
    for micro in range(64):
        with pair.buf.no_sync():
            one_signed_loss(pair.call, 0, micro, pair.rank).backward()
    for name, grad in pair.main_grads().items():
        pair.expect(grad.dtype == torch.float32, f"{name}: main_grad is {grad.dtype}")
        miss = relative(grad, sums[pair.rank][name])
        pair.expect(miss <= 1e-6, f"{name}: main_grad misses the sum of micro-batches by {miss:.2g}")
    typical = sums[pair.rank]["fc2.weight"].abs().mean().item() / 64
    pair.expect(2e-4 < typical < 5e-3, f"gradients are about {typical:.2g}, not 1e-3")
    worst = max(relative(narrow[name], sums[pair.rank][name]) for name in narrow)
    pair.expect(worst > 1e-3, f"a bf16 sum misses by {worst:.2g} only, the check tells nothing apart")
    pair.buf.finish_grad_sync()
    for name, found, slot in owned(pair):
        average = torch.stack([wide[name] for wide in sums]).mean(0).flatten()[slot]
        miss = relative(found, average) if len(found) else 0.0
        pair.expect(miss <= 1e-6, f"{name}: reduced main_grad misses the average by {miss:.2g}")
    pair.optimizer.step()
    dtypes = {name: p.dtype for name, p in pair.model.named_parameters()}
    pair.expect(dtypes == {name: p.dtype for name, p in params.items()}, f"the model became {dtypes}")
    return pair.finish()


def mixed_dtype_cases(rank: int) -> list[str]:
    return run_cases({f"fusion {fuse}": partial(mixed_dtypes, fuse) for fuse in (False, True)})


# V20 and V23: refused by name, on every rank, and the group works afterwards.


class Expert(SmallMlp):
    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(3, 3)
        for param in self.expert.parameters():
            param.allreduce = False  # type: ignore[attr-defined]


class ComplexNextToReal(SmallMlp):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        turned = x[:, :4].to(torch.complex64) @ self.phase
        result: Tensor = super().forward(torch.cat([turned.real, turned.imag], 1)[:, :6])
        return result


class SparseEmbedding(SmallMlp):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(self.emb(x[:, 0].abs().long() % 11), (0, 2)))


def refused(build: Callable[[], nn.Module], mode: str, name: str) -> Iterator[str]:
    config = mb.MegabufConfig(inner_compiler="aot_eager", **MODES[mode])
    text = error_text(lambda: mb.attach(seeded(build), config))
    if f"'{name}'" not in text:
        yield f"attach says {text}"
    if mode == "plain":
        call = torch.compile(seeded(build), backend="megabuf", options={"inner_compiler": "aot_eager"})
        text = error_text(lambda: call(torch.ones(2, 6)))
        if f"'{name}'" not in text:
            yield f"the first compiled forward says {text}"
        pair = Pair(SmallMlp, mode, lr=0.1)
        pair.step(square_loss, 0)
        yield from pair.finish()


def expert_cases(rank: int) -> list[str]:
    return run_cases({mode: partial(refused, Expert, mode, "expert.weight") for mode in MODES})


def complex_and_sparse_cases(rank: int) -> list[str]:
    cases = {"complex": (ComplexNextToReal, "phase"), "sparse": (SparseEmbedding, "emb")}
    return run_cases({f"{m} {c}": partial(refused, cases[c][0], m, cases[c][1]) for m in MODES for c in cases})


# Worlds in order, because a group of another size has to be started.


@pytest.mark.parametrize("size", [0, -1])
def test_bucket_size_must_be_positive(size: int) -> None:
    """V02: the error names the option."""
    with pytest.raises(ValueError, match="bucket_size must be a positive"):
        mb.MegabufConfig(bucket_size=size)
    call = torch.compile(nn.Linear(2, 2), backend="megabuf", options={"bucket_size": size})
    with pytest.raises(Exception, match="bucket_size must be a positive"):
        call(torch.ones(1, 2))


def test_empty_parameters(ranks: Ranks) -> None:
    """V03: parameters without elements keep their shapes; the rest trains; checkpoints of model and (rank-local)
    optimizer go round."""
    check_on(2, ranks, empty_cases)


def test_mixed_dtypes(ranks: Ranks) -> None:
    """V08: bf16 gradients are accumulated in fp32, 64 of them within 1e-6 of the sum by hand, before and after the
    reduction. There is no bf16 transport with fp32 sums."""
    check_on(2, ranks, mixed_dtype_cases)


def test_wide_gradients_without_shards_are_refused(ranks: Ranks) -> None:
    """V08: without sharding .grad is the buffer and cannot be wider than its parameter."""
    config = mb.MegabufConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    assert "parameter 'fc1.weight' is torch.bfloat16" in error_text(lambda: mb.attach(MixedDtypes(), config))


def test_complex_and_sparse(ranks: Ranks) -> None:
    """V23: refused by name at setup, with and without attach."""
    check_on(2, ranks, complex_and_sparse_cases)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_tied_weights(ranks: Ranks, world: int) -> None:
    """V01: embedding and output stay one parameter, with one optimizer entry and two equal names."""
    check_on(world, ranks, tied_cases)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_odd_sizes(ranks: Ranks, world: int) -> None:
    """V02: sizes that do not divide, a group of one element, buckets of 1 B, 64 B and 1 MB; padding stays zero."""
    check_on(world, ranks, odd_size_cases)


def test_experts_are_refused(ranks: Ranks) -> None:
    """V20: expert weights on a sub-group of ranks are not supported yet; refused by name."""
    check_on(4, ranks, expert_cases)


def test_order_does_not_depend_on_hashes(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """V04: buckets, trigger nodes and collectives are the same on all ranks and in two runs of processes with hash
    seeds of their own."""
    runs = ranks(4).run(order_of_everything, timeout=120)
    ranks(4).close()
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    runs += ranks(4).run(order_of_everything, timeout=120)
    assert not [problem for _, _, problems in runs for problem in problems]
    assert len({seed for seed, _, _ in runs}) > 4
    for _, dump, _ in runs:
        assert dump == runs[0][1]
    assert any("reduce_scatter" in line for line in runs[0][1])
