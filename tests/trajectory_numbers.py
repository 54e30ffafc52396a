"""Comparison of a run with ``oracle/trajectory.json.gz``: how far numbers may differ, and what must be equal."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from helpers import max_difference
from torch import Tensor, nn
from trajectory_models import decode, make_model, mean_loss
from trajectory_runs import (
    EPS,
    GPTS,
    LR,
    Observed,
    Run,
    Sent,
    adamw_groups,
    covered_runs,
    data_of,
    dtype_of,
    is_changed_by_fusion,
    is_sharded,
    train,
)

GRAD_NOISE = 3e-9
"""How far other rounding may move an element of the first gradient; measured 1.3e-9 over four sets of CPU kernels."""


class Bounds(NamedTuple):
    """Largest absolute differences allowed. The oracle was made on a machine whose matrix products round differently.

    For a parameter that is ``final`` plus, in ``gpt``, what the first step of AdamW, ``lr * g / (|g| + eps)``, makes of
    ``GRAD_NOISE``: its derivative is ``lr * eps / (|g| + eps)**2``, 1e6 at zero. One or two of 16008 elements have a
    gradient near ``eps`` by chance and end up to 1.2e-4 apart; all others are within 1.2e-5.
    """

    loss: float = 5e-6
    """Of sums up to 7.1, where neighbouring fp32 numbers are 4.8e-7 apart; measured 8e-7."""
    grad_norm: float = 5e-6
    """Measured 1.1e-6, norms up to 4.1."""
    final: float = 5e-6
    """Measured 7e-7."""
    main_grad_owned: float = 1e-6
    """Measured 1.2e-7; the largest gradients are near 0.69, where neighbouring fp32 numbers are 6e-8 apart."""
    main_grad_rest: float = 1e-6
    """Measured 6e-8."""


GPT_BOUNDS = Bounds(loss=3e-5, grad_norm=2e-4, final=1e-4)
"""After the first step the few elements above act on everything else: measured 2.9e-6, 2.1e-5 and 1.1e-5, with the
least alike kernels (``ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE``) 1.0e-5, 6.9e-5 and 3.0e-5. Plain torch differs
from the oracle as much (1.2e-4, 2.4e-5 in norm), and these runs are held to it within 5e-6: measured 4.8e-7, 2.6e-6
and 1.3e-6, zero at world 1."""

BF16_BOUNDS = Bounds(final=0.0, main_grad_owned=0.0, main_grad_rest=0.0)
"""``mlp`` and ``expert``: products are rounded to bf16 before anything is summed, so other rounding inside them is
gone, and every bit of five steps is Megatron's, with three sets of CPU kernels. Sums over four ranks are in the
oracle's order, too. Losses and norms are fp32."""

GPT_BF16_BOUNDS = Bounds(loss=3e-3, grad_norm=2e-2, final=4e-2)
"""A product that other kernels round to the neighbouring bf16 number (2**-8 apart, relatively) changes all that
follows, and an element whose gradient is that small may go the other way: 0.01 instead of -0.01 in one step. Measured
4.8e-7, 1e-6 and 1e-9 here, with the least alike kernels 1.4e-3, 9e-3 and 2.05e-2. Held to plain torch, too."""

PLAIN_BF16_BOUNDS = Bounds(loss=1e-4, grad_norm=1e-3, final=4e-3)
"""Plain torch sums the ranks in another order, so now and then a parameter is rounded to the neighbouring bf16 number:
2**-8 apart between 0.5 and 1. Measured once in 7 runs, 2**-10 at the last step; losses and norms as in fp32."""

FUSED_BOUNDS = Bounds(loss=3e-3, grad_norm=2e-2, final=1e-2, main_grad_owned=2**-8, main_grad_rest=2**-8)
"""16-bit gradients with ``gradient_accumulation_fusion``: a product is added to ``main_grad`` before it is rounded, not
after. That is at most a bf16 number up or down where gradients are largest (0.5 to 1, so 2**-8), and from then on it is
another run: measured 8.1e-4, 3.4e-3 times the norm (up to 4) and 3.9e-3."""


GPT_BF16_FUSED_BOUNDS = Bounds(loss=5e-3, grad_norm=5e-2, final=4e-2)
"""Rows of embeddings are added to fp32 tables as they are, plain torch rounds their sums to bf16 first: other bits
from the first step on, with what ``GPT_BF16_BOUNDS`` says of them. Measured 1.8e-3, 2.5e-2 and 2.2e-2."""


def bounds_of(config: dict[str, Any], *, fused: bool) -> Bounds:
    is_gpt = config["model"] in GPTS
    if config["param_dtype"] == "bf16":
        if is_gpt:
            return GPT_BF16_FUSED_BOUNDS if fused else GPT_BF16_BOUNDS
        return FUSED_BOUNDS if fused else BF16_BOUNDS
    return GPT_BOUNDS if is_gpt and config["steps"] > 1 else Bounds()


def place(oracle: Run, rank: int, kind: str) -> tuple[int, int]:
    """Number of shards of a ``dense`` or ``expert`` bucket, and which of them is this rank's."""
    config, world = oracle["config"], oracle["world_size"]
    if kind == "expert":
        return world // config["ep"], rank // config["ep"]
    size = world // config.get("instances", 1)
    return size, rank % size


def owned(oracle: Run, rank: int, name: str, shape: torch.Size) -> Tensor:
    """Which elements of a parameter's gradient are reduced on this rank: its shards, or everything if not sharded."""
    if not is_sharded(oracle["config"]):
        return torch.ones(shape, dtype=torch.bool)
    kind, buffer = next(
        (kind, buffer) for kind, buffers in oracle["layout"].items() for buffer in buffers if name in buffer["map"]
    )
    size, position = place(oracle, rank, kind)
    start, end, bucket = buffer["map"][name]
    bucket_start, bucket_end = buffer["buckets"][bucket]
    shard = (torch.arange(start, end) - bucket_start) // ((bucket_end - bucket_start) // size)
    is_owned: Tensor = shard == position
    return is_owned.view(shape)


def first_step_allowance(rank: int, oracle: Run, observed: Observed, name: str) -> Tensor:
    """See ``Bounds``. Collective: the gradient is gathered from the ranks that own it."""
    grad = observed.main_grads[name]
    if is_sharded(oracle["config"]):
        grad = torch.where(owned(oracle, rank, name, grad.shape), grad, 0.0)
        dist.all_reduce(grad)
    max_norm = oracle["config"]["clip"] or math.inf
    clipped = grad * min(1.0, max_norm / observed.grad_norms[0])
    return LR * EPS / (clipped.abs() + EPS).square() * GRAD_NOISE


def largest(left: list[float], right: list[float]) -> float:
    assert len(left) == len(right)
    # Tensors, because Python's max can lose a NaN.
    return (torch.tensor(left, dtype=torch.float64) - torch.tensor(right, dtype=torch.float64)).abs().max().item()


def _of_sums(oracle: Run, observed: Observed) -> Tensor:
    """Where the oracle keeps only sums of each parameter: the largest difference, per element."""
    excess = []
    for name, value in observed.final.items():
        found = torch.stack([value.double().sum(), value.double().abs().sum()])
        expected = torch.tensor([oracle[kind][name] for kind in ("final_sum", "final_abs_sum")], dtype=torch.float64)
        excess.append((found - expected).abs().max() / value.numel())
    return torch.stack(excess).max()


def differences(rank: int, oracle: Run, observed: Observed) -> dict[str, float]:
    """Largest absolute difference of each kind, by field of ``Bounds``; of ``final`` what exceeds its allowance."""
    config = oracle["config"]
    model = make_model(config["model"])
    stored = oracle.get("final") or oracle.get("final_per_rank", {rank: None})[rank]
    final = decode(stored, model) if stored is not None else {}
    excess = [] if final else [_of_sums(oracle, observed)]
    for name, value in observed.final.items() if final else ():
        difference = (value.float() - final[name]).abs()
        if config["model"] in ("gpt", "gpt_untied"):
            difference = difference - first_step_allowance(rank, oracle, observed, name)
        excess.append(difference.max())
    found = {
        "loss": largest(observed.losses, oracle["loss_per_rank"][rank]),
        "grad_norm": largest(observed.grad_norms, oracle["grad_norm"]),
        "final": max(torch.stack(excess).max().item(), 0.0),
    }
    if "main_grad_step0_per_rank" in oracle:
        expected = decode(oracle["main_grad_step0_per_rank"][rank], model)
        parts: dict[str, list[Tensor]] = {"main_grad_owned": [], "main_grad_rest": []}
        for name, grad in observed.main_grads.items():
            is_owned = owned(oracle, rank, name, grad.shape)
            difference = (grad.float() - expected[name]).abs()
            parts["main_grad_owned"].append(difference[is_owned])
            # Scaled, but not reduced: Megatron's reduction writes this rank's shards only, and so does ours.
            parts["main_grad_rest"].append(difference[~is_owned])
        found |= {kind: torch.cat([*part, torch.zeros(1)]).max().item() for kind, part in parts.items()}
    return found


def train_plainly(oracle: Run) -> tuple[list[list[float]], list[float], dict[str, Tensor]]:
    """Losses by rank, norms and final parameters of the run in plain torch: one process, the data of all ranks.

    Gradients are summed in fp32, and AdamW updates fp32 masters.
    """
    config, world = oracle["config"], oracle["world_size"]
    model = make_model(config["model"], dtype_of(config))
    masters = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    optimizer = torch.optim.AdamW(adamw_groups(masters), lr=LR, betas=(0.9, 0.95), eps=EPS)
    losses: list[list[float]] = [[] for _ in range(world)]
    norms: list[float] = []
    for step in range(config["steps"]):
        sums = []
        for rank in range(world):
            total = 0.0
            own = [torch.zeros_like(master) for master in masters]
            for micro in range(config["nmb"]):
                inputs, targets = data_of(config, step, micro, rank)
                loss = mean_loss(model(inputs), targets) / config["nmb"]
                for grad_sum, grad in zip(own, torch.autograd.grad(loss, list(model.parameters()))):
                    grad_sum.add_(grad)
                total += loss.item()
            losses[rank].append(total)
            sums.append([grad_sum / world for grad_sum in own])
        for master, *grads in zip(masters, *sums):
            master.grad = torch.stack(grads).sum(dim=0)
        norms.append(nn.utils.clip_grad_norm_(masters, config["clip"] or math.inf).item())
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters):
                param.copy_(master)
    return losses, norms, {name: param.detach() for name, param in model.named_parameters()}


def differences_from_plain_torch(rank: int, oracle: Run, observed: Observed) -> dict[str, float]:
    """Largest absolute differences from plain torch on this machine, by field of ``Bounds``."""
    losses, norms, final = train_plainly(oracle)
    return {
        "loss": largest(observed.losses, losses[rank]),
        "grad_norm": largest(observed.grad_norms, norms),
        "final": max_difference(observed.final, final),
    }


def find_problems(
    rank: int, oracle: Run, observed: Observed, compiled: bool, bounds: Bounds | None = None, *, fused: bool = False
) -> list[str]:
    """Everything in which a run is not the oracle's; empty when all is well. ``bounds`` replace those of the run."""
    config = oracle["config"]
    is_default = bounds is None
    bounds = bounds or bounds_of(config, fused=fused)
    problems = [
        f"{kind} differs by {value:.2e}, more than {getattr(bounds, kind):.0e}"
        for kind, value in differences(rank, oracle, observed).items()
        if not value <= getattr(bounds, kind)  # so that NaN is a problem
    ]
    if is_default and bounds in (GPT_BOUNDS, GPT_BF16_BOUNDS):
        # What differs from the oracle is this machine's rounding: plain torch here differs from it as much.
        plain = Bounds() if bounds is GPT_BOUNDS else PLAIN_BF16_BOUNDS
        problems += [
            f"{kind} differs from plain torch by {value:.2e}, more than {getattr(plain, kind):.0e}"
            for kind, value in differences_from_plain_torch(rank, oracle, observed).items()
            if not value <= getattr(plain, kind)
        ]
    layout: dict[str, list[dict[str, Any]]] = oracle["layout"]
    buffers = [buffer for kind in layout.values() for buffer in kind]
    starts = {name: start for buffer in buffers for name, (start, _, _) in buffer["map"].items()}
    groups = range(sum(len(buffer["buckets"]) for buffer in buffers))
    exact = {
        "layout and scaling": (observed.layout, layout),
        "places of main_grad": (observed.main_grad_starts, starts),
        "places of parameters": (observed.param_starts, starts if is_sharded(config) else {}),
        "groups launched in graphs": (observed.launched, set(groups) if compiled and config["overlap"] else set()),
    }
    problems += [f"{what}: {found}, expected {wanted}" for what, (found, wanted) in exact.items() if found != wanted]
    return problems


class Outcome(NamedTuple):
    """Of one run on one rank."""

    problems: list[str]
    sent: list[list[Sent]]
    """Collectives by step, of the first two steps."""


def check_runs(rank: int, world: int, compiled: bool) -> dict[str, Outcome]:
    """All runs of one world, by name; compiled ones that fused accumulation changes once more with it."""
    outcomes = {}
    for oracle in covered_runs():
        if oracle["world_size"] != world:
            continue
        for fused in (False, True) if compiled and is_changed_by_fusion(oracle["config"]) else (False,):
            try:
                observed = train(rank, oracle, compiled, fused=fused)
                problems = find_problems(rank, oracle, observed, compiled, fused=fused)
            except Exception as error:
                error.add_note(f"in run {oracle['id']}")
                raise
            outcomes[oracle["id"] + "_fused" * fused] = Outcome(problems, observed.sent[:2])
            # Models are of the same classes, so Dynamo would soon stop compiling them. Nothing else needs a clean-up
            # after each run, and a collection takes as long as a run.
            torch.compiler.reset()
    return outcomes
