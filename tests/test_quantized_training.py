"""Training with quantized parameters: codes and scales after every step, on every rank, against whole masters.

Compiled graphs, the eager path and the shared buffer agree bit for bit. Losses stay near those of the plain 16-bit
model; their bounds are wide, as a few steps of other rounding may lead elsewhere.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import RankGroup, batch, error_text, fresh_compiler, seeded
from quantized_runs import (
    IN,
    OUT,
    ROWS,
    VARIANTS,
    Net,
    compare_outcomes,
    config,
    current,
    equal,
    net,
    quantized,
    stored_of,
    train,
)
from torch import Tensor, nn

import megabuf_fx as mb

pytestmark = pytest.mark.dist

CLOSE = {"fp8": 0.05, "delayed": 0.05, "mxfp8": 0.05, "shared": 0.05, "nvfp4": 0.15}
"""Largest relative difference of any loss from the plain model's. e4m3 has 3 bits of mantissa, e2m1 one."""

Case = Callable[[], Iterable[str]]


def run_cases(cases: Mapping[str, Case]) -> list[str]:
    problems = []
    for name, case in cases.items():
        try:
            problems += [f"{name}: {problem}" for problem in case()]
        except Exception:
            problems.append(f"{name}: {traceback.format_exc()}")
            break  # Other ranks may wait for this one.
        fresh_compiler()
    return problems


def check_on(
    ranks: Callable[[int], RankGroup], world: int, cases: Callable[..., list[str]], *args: Any, timeout: float = 200
) -> None:
    answers = ranks(world).run(cases, *args, timeout=timeout)
    lines = [f"rank {rank}: {problem}" for rank, problems in enumerate(answers) for problem in problems]
    assert not lines, "\n".join(lines)


# Every format


def every_path(rank: int, variant: str, **options: Any) -> list[str]:
    """Compiled and eager, of one configuration."""
    found = train(rank, variant, **options)
    problems = list(found.problems)
    fresh_compiler()
    eager = train(rank, variant, is_compiled=False, **options)
    problems += [f"eager path: {problem}" for problem in eager.problems]
    problems += compare_outcomes(eager, found, "eager path")
    fresh_compiler()
    plain = train(rank, None, **options)
    for loss, reference in zip(found.losses, plain.losses):
        if not abs(loss - reference) <= CLOSE[variant] * reference:
            problems.append(f"loss {loss}, of the plain model {reference}")
    return problems


def formats(rank: int, world: int) -> list[str]:
    """Gradient dtype and overlap change places from world to world, so that each format meets all four."""
    cases: dict[str, Case] = {}
    for number, variant in enumerate(VARIANTS):
        for turn in (0, 1) if world == 2 else (0,):
            choice = number + world + turn * 3
            options: dict[str, Any] = {
                "grad_reduce_in_fp32": bool(choice & 1),
                "overlap_param_gather": bool(choice & 2),
                "micros": 1 + (choice & 1),
            }
            cases[f"{variant} {options}"] = functools.partial(every_path, rank, variant, **options)
    return run_cases(cases)


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_formats(ranks: Callable[[int], RankGroup], world: int) -> None:
    check_on(ranks, world, formats, world)


def shared_equals_separate(rank: int, **options: Any) -> list[str]:
    separate = train(rank, "mxfp8", **options)
    fresh_compiler()
    shared = train(rank, "shared", **options)
    return [*separate.problems, *shared.problems, *compare_outcomes(shared, separate, "shared")]


SHARED: dict[str, dict[str, Any]] = {
    "fp32": {"grad_reduce_in_fp32": True, "overlap_param_gather": True, "micros": 2},
    "bf16": {"grad_reduce_in_fp32": False, "overlap_param_gather": True},
    "fp32, in step": {"grad_reduce_in_fp32": True, "is_compiled": False},
    "bf16, in step": {"grad_reduce_in_fp32": False, "micros": 3},
    "one bucket, floor": {
        "bucket_size": None,
        "overlap_param_gather": True,
        "check": False,
        "mxfp8_scale_rule": "floor",
    },
    "sums in fp32": {"param_name_patterns_for_fp32_local_accumulation": ("fc2*",), "micros": 2},
    "fp32 weights": {"build": Net},
}


def shared_runs(rank: int) -> list[str]:
    return run_cases(
        {name: functools.partial(shared_equals_separate, rank, **options) for name, options in SHARED.items()}
    )


def test_shared_equals_separate(ranks: Callable[[int], RankGroup]) -> None:
    check_on(ranks, 2, shared_runs)


# Gathers


GATHERS: dict[str, dict[str, Any]] = {
    "prefetch 0": {"param_gather_prefetch": 0},
    "prefetch 1": {"param_gather_prefetch": 1},
    "aligned": {"align_param_gather": True},
    "with optimizer step": {"overlap_param_gather_with_optimizer_step": True},
    "nan": {"debug_nan_stale_params": True},
    "drift": {"check_for_drift_every": 1, "check_for_nan_in_grad": True},
}


def gathers(rank: int) -> list[str]:
    cases: dict[str, Case] = {}

    def case(variant: str, options: dict[str, Any]) -> list[str]:
        common: dict[str, Any] = {"overlap_param_gather": True, "grad_reduce_in_fp32": True}
        plain = train(rank, variant, check=False, **common)
        fresh_compiler()
        found = train(rank, variant, **common, **options)
        return [*found.problems, *compare_outcomes(found, plain, "without the option")]

    for number, (name, options) in enumerate(GATHERS.items()):
        for variant in VARIANTS if name == "nan" else (list(VARIANTS)[number % 5], "shared"):
            cases[f"{name} {variant}"] = functools.partial(case, variant, options)
    return run_cases(cases)


def test_gathers(ranks: Callable[[int], RankGroup]) -> None:
    check_on(ranks, 2, gathers)


def stale_reads(rank: int) -> list[str]:
    """With ``debug_nan_stale_params`` values are NaN from ``step`` to the gather, and right after it."""

    def case(variant: str) -> list[str]:
        problems: list[str] = []

        def between(model: Any, buf: Any, opt: Any, step: int) -> list[str]:
            weights = buf.buffers.weights
            values = torch.cat([weights.stored_values(index).flatten() for index in weights.indices])
            return [] if values.isnan().any() else [f"step {step}: a stale read shows nothing"]

        options: dict[str, Any] = {
            "overlap_param_gather": True,
            "debug_nan_stale_params": True,
            "between": between,
            "steps": 2,
        }
        found = train(rank, variant, **options)
        problems += found.problems
        if any(value.isnan().any() for value in found.values.values()):
            problems.append("values are NaN after the gather")
        return problems

    return run_cases({variant: functools.partial(case, variant) for variant in VARIANTS})


def test_stale_reads_show(ranks: Callable[[int], RankGroup]) -> None:
    check_on(ranks, 2, stale_reads)


def drifted(rank: int) -> list[str]:
    """A scale that differs on one rank is found, and the parameter named."""
    problems = []
    for variant in ("fp8", "mxfp8", "nvfp4"):
        model: Any = seeded(net)
        buf = mb.attach(model, config(variant, check_for_drift_every=1))
        weights = buf.buffers.weights
        assert weights is not None
        (index,) = [i for i, spec in enumerate(buf.plan.params) if spec.name == "fc2.weight"]
        if rank == 1:
            weights.stored(index)[-1].view(-1)[:1].view(torch.uint8)[0] ^= 1
        model(batch(0, 0, rank, ROWS, IN).bfloat16()).float().square().mean().backward()
        message = error_text(buf.finish_grad_sync)
        if "parameter 'fc2.weight' (and 0 more) of rank(s)" not in message:
            problems.append(f"{variant}: {message}")
        buf.detach()
    return problems


def test_drift_is_found(ranks: Callable[[int], RankGroup]) -> None:
    check_on(ranks, 2, drifted)


# Groups


def instances(rank: int) -> list[str]:
    return run_cases(
        {
            f"{variant} {count}": functools.partial(
                every_path, rank, variant, num_distributed_optimizer_instances=count, grad_reduce_in_fp32=True, **more
            )
            for variant, count, more in (
                ("fp8", 2, {"overlap_param_gather": True}),
                ("shared", 2, {"overlap_param_gather": True}),
                ("nvfp4", 4, {}),
            )
        }
    )


def test_optimizer_instances(ranks: Callable[[int], RankGroup]) -> None:
    check_on(ranks, 4, instances)


class Experts(nn.Module):
    """``expert`` is another on every rank, ``fc2`` is shared; both linear."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(IN, 96)
        self.expert = nn.Linear(96, 96, bias=False)
        self.fc3 = nn.Linear(96, OUT)
        self.expert.weight.allreduce = False  # type: ignore[attr-defined, assignment]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc3(torch.tanh(self.expert(torch.tanh(self.fc1(x)))))
        return result


def experts_of(rank: int) -> nn.Module:
    model = Experts().bfloat16()
    model.expert.weight.allreduce = False  # type: ignore[attr-defined, assignment]
    with torch.no_grad():
        model.expert.weight.mul_(1 + rank)
    return model


def experts(rank: int) -> list[str]:
    """Each rank's experts are its own: an amax over all ranks would give rank 0 the scale of rank 1."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    problems = []
    for variant in VARIANTS:
        for overlap in (False, True):
            model: Any = seeded(functools.partial(experts_of, rank))
            expert = model.expert.weight
            initial = expert.detach().clone()
            buf = mb.attach(model, config(variant, overlap_param_gather=overlap), expert_process_group=groups[rank])
            call: Any = torch.compile(model, backend="megabuf")
            opt = mb.DistributedOptimizer(model.parameters(), torch.optim.SGD, lr=1e-2)
            weights = buf.buffers.weights
            assert weights is not None
            index = buf.buffers.index_of(expert)
            assert index is not None
            amax = initial
            for step in range(2):
                call(batch(step, 0, rank, ROWS, IN).bfloat16()).float().square().mean().backward()
                opt.step()
                opt.zero_grad()
                current(buf)
                (master,) = [run.master.detach() for run in opt.runs if run.is_quantized and index in dict(run.pieces)]
                values = master[: expert.numel()].view(expert.shape).bfloat16()
                if variant == "delayed":
                    # One step back; the margin is 1 bit. The largest of the window.
                    found = weights.stored(index).scale_inv
                    expected = torch.tensor(float(amax.abs().max()) / (448 / 2), dtype=torch.float64).float()
                    if not torch.allclose(found, expected, rtol=1e-6):
                        problems.append(f"{variant} {overlap}: scale {found}, expected {expected}")
                    amax = torch.maximum(amax.abs(), values.abs())
                elif not equal(tuple(weights.stored(index)), tuple(quantized(variant, values))):
                    problems.append(f"{variant} {overlap}: step {step}")
            dense = [stored for name, stored in stored_of(buf).items() if name != "expert.weight"]
            answers: list[Any] = [None, None]
            dist.all_gather_object(answers, dense)
            if not all(equal(a, b) for a, b in zip(*answers)):
                problems.append(f"{variant} {overlap}: dense weights differ between ranks")
            buf.detach()
            fresh_compiler()
    return problems


def test_experts(ranks: Callable[[int], RankGroup]) -> None:
    check_on(ranks, 2, experts)


# Models


class Partly(nn.Module):
    """``frozen`` gets no gradient by ``requires_grad``, ``unused`` by never being called."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(IN, 64)
        self.frozen = nn.Linear(64, 64)
        self.unused = nn.Linear(64, 32)
        self.fc2 = nn.Linear(64, OUT, bias=False)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc2(torch.tanh(self.frozen(torch.tanh(self.fc1(x)))))
        return result


class Broken(nn.Module):
    """A graph break between the layers, and a layer that is never compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(IN, 64)
        self.eager = nn.Linear(64, 64)
        self.fc2 = nn.Linear(64, OUT, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.fc1(x))
        torch._dynamo.graph_break()
        hidden = torch.tanh(self._outside(hidden))
        result: Tensor = self.fc2(hidden)
        return result

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _outside(self, x: Tensor) -> Tensor:
        result: Tensor = self.eager(x)
        return result


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False)
        return result


class Reused(nn.Module):
    """One weight twice, and once more transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(IN, 64)
        self.again = nn.Linear(64, 64, bias=False)
        self.fc2 = nn.Linear(64, OUT)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.again(torch.tanh(self.fc1(x))))
        hidden = torch.tanh(self.again(hidden))
        result: Tensor = self.fc2(hidden)
        return result


class Tied(nn.Module):
    """The same ``Linear`` weight in two modules: both are plain, so it is quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(IN, 64)
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.fc2 = nn.Linear(64, OUT)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(torch.tanh(self.fc1(x))))
        result: Tensor = self.fc2(torch.tanh(self.second(hidden)))
        return result


BUILDS: dict[str, type[nn.Module]] = {
    "partly": Partly,
    "broken": Broken,
    "checkpointed": Checkpointed,
    "reused": Reused,
    "tied": Tied,
}


def half(build: Callable[[], nn.Module]) -> nn.Module:
    return build().bfloat16()


def models(rank: int) -> list[str]:
    cases: dict[str, Case] = {}
    for number, (name, build) in enumerate(BUILDS.items()):
        for turn, variant in enumerate(("shared", list(VARIANTS)[number])):
            options: dict[str, Any] = {
                "build": functools.partial(half, build),
                "grad_reduce_in_fp32": bool(turn),
                "overlap_param_gather": bool((number + turn) % 2),
            }
            cases[f"{name} {variant}"] = functools.partial(every_path, rank, variant, **options)
    return run_cases(cases)


def test_models(ranks: Callable[[int], RankGroup]) -> None:
    check_on(ranks, 2, models)


def subset(rank: int) -> list[str]:
    """Weights that the optimizer was not given stay as they are, whatever the others do."""

    def case(variant: str, overlap: bool) -> list[str]:
        model: Any = seeded(net)
        buf = mb.attach(model, config(variant, overlap_param_gather=overlap))
        call: Any = torch.compile(model, backend="megabuf")
        params = [param for name, param in model.named_parameters() if name != "fc2.weight"]
        opt = mb.DistributedOptimizer(params, torch.optim.AdamW, lr=1e-2)
        weights = buf.buffers.weights
        assert weights is not None
        index = buf.buffers.index_of(model.fc2.weight)
        assert index is not None
        before = weights.stored_values(index)
        problems = []
        for step in range(3):
            call(batch(step, 0, rank, ROWS, IN).bfloat16()).float().square().mean().backward()
            opt.step()
            opt.zero_grad()
            current(buf)
            if not torch.equal(weights.stored_values(index), before):
                problems.append(f"step {step}: changed")
        buf.detach()
        return problems

    return run_cases(
        {
            f"{v} {o}": functools.partial(case, v, o)
            for v in VARIANTS
            for o in ((True, False) if v == "shared" else (False,))
        }
    )


def test_weights_that_no_optimizer_has_stay(ranks: Callable[[int], RankGroup]) -> None:
    check_on(ranks, 2, subset)


def inference(rank: int) -> list[str]:
    """Evaluations between steps: no gradient, eval mode, compiled or not; and again after more training."""

    def case(variant: str, overlap: bool) -> list[str]:
        model: Any = seeded(net)
        buf = mb.attach(model, config(variant, overlap_param_gather=overlap, grad_reduce_in_fp32=True))
        call: Any = torch.compile(model, backend="megabuf")
        opt = mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
        problems = []
        x = batch(7, 0, 0, ROWS, IN).bfloat16()
        for step in range(2):
            loss = call(batch(step, 0, rank, ROWS, IN).bfloat16()).float().square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            model.eval()
            with torch.no_grad():
                compiled = call(x)
                eager = model(x)
            with torch.inference_mode():
                inferred = call(x)
            model.train()
            reference: Any = net()
            reference.load_state_dict(model.state_dict())
            expected = reference(x)
            for name, found in {"compiled": compiled, "eager": eager, "inference mode": inferred}.items():
                if not torch.equal(found, expected):
                    problems.append(f"step {step}: {name} differs by {(found - expected).abs().max()}")
        buf.detach()
        return problems

    return run_cases(
        {f"{v} {o}": functools.partial(case, v, o) for v, o in zip(VARIANTS, (True, False, True, True, False))}
    )


def test_inference(ranks: Callable[[int], RankGroup]) -> None:
    check_on(ranks, 2, inference)


# Inductor


def inductor(rank: int) -> list[str]:
    """Codes are those of whole masters, quantized op by op; products may be rounded otherwise than eager ones."""

    def case(variant: str) -> list[str]:
        options: dict[str, Any] = {"overlap_param_gather": True, "grad_reduce_in_fp32": True, "steps": 2}
        found = train(rank, variant, inner_compiler="inductor", **options)
        fresh_compiler()
        eager = train(rank, variant, **options)
        problems = list(found.problems)
        for loss, reference in zip(found.losses, eager.losses):
            if not abs(loss - reference) <= 1e-2 * reference:
                problems.append(f"loss {loss}, op by op {reference}")
        return problems

    return run_cases({variant: functools.partial(case, variant) for variant in ("nvfp4", "shared")})


def test_inductor(ranks: Callable[[int], RankGroup]) -> None:
    check_on(ranks, 2, inductor)
