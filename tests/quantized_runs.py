"""Models with quantized parameters, what their codes must be, and training runs that check it after every step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from helpers import batch, seeded
from torch import Tensor, nn

import megabuf_fx as mb
from megabuf_fx.runtime.quantize_fp8 import quantize_fp8, scale_from_amax, tensor_amax
from megabuf_fx.runtime.quantize_mx import ScaleRule, quantize_mxfp8
from megabuf_fx.runtime.quantize_nvfp4 import BlockShape, quantize_nvfp4
from megabuf_fx.runtime.quantized_formats import FORMATS

HISTORY, MARGIN = 3, 1

VARIANTS: dict[str, dict[str, Any]] = {
    "fp8": {"fp8_param_gather": True},
    "delayed": {
        "fp8_param_gather": True,
        "fp8_recipe": "delayed",
        "fp8_amax_history_len": HISTORY,
        "fp8_amax_compute_algo": "max",
        "fp8_margin": MARGIN,
    },
    "mxfp8": {"fp8_param_gather": True, "fp8_recipe": "mxfp8"},
    "shared": {"fp8_param_gather": True, "fp8_recipe": "mxfp8", "reuse_grad_buf_for_mxfp8_param_ag": True},
    "nvfp4": {"fp4_param_gather": True},
}
"""Options of ``MegabufConfig`` by name; ``shared`` gathers through the gradients' storage."""

IN, OUT, ROWS = 64, 32, 8


class Net(nn.Module):
    """Three quantized weights of unequal sizes between biases and a norm that stay in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(IN, 96)
        self.ln = nn.LayerNorm(96)
        self.fc2 = nn.Linear(96, 64, bias=False)
        self.fc3 = nn.Linear(64, OUT)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc3(torch.tanh(self.fc2(self.ln(torch.tanh(self.fc1(x))))))
        return result


def net() -> nn.Module:
    return Net().bfloat16()


def config(variant: str, **options: Any) -> mb.MegabufConfig:
    """Op by op, and several buckets."""
    return mb.MegabufConfig(**{"inner_compiler": "aot_eager", "bucket_size": 3000, **VARIANTS[variant], **options})


def quantized(variant: str, values: Tensor) -> Any:
    """Codes and scales of a whole matrix by the public quantizers (for ``delayed``, with a scale from itself)."""
    if variant in ("fp8", "delayed"):
        return quantize_fp8(values, scale_from_amax(tensor_amax(values)))
    if variant == "nvfp4":
        return quantize_nvfp4(values, BlockShape.TILE)
    return quantize_mxfp8(values, ScaleRule.RCEIL)


def dequantized(variant: str, stored: Any, dtype: torch.dtype) -> Tensor:
    name = {"delayed": "fp8", "shared": "mxfp8"}.get(variant, variant)
    return FORMATS[name].dequantize(stored, dtype)


class DelayedReference:
    """Delayed scaling of one parameter, in Python floats: the scale of a step is from the steps before it."""

    def __init__(self, values: Tensor) -> None:
        self.amaxes = [float(values.abs().max())]
        self.scale = self._next()

    def _next(self) -> Tensor:
        # 448 / 2**margin / the largest of the last steps; fp64 and one rounding, as fp32 division.
        return torch.tensor(448.0 / 2**MARGIN / max(self.amaxes[-HISTORY:]), dtype=torch.float64).float()

    def step(self, values: Tensor) -> Any:
        stored = quantize_fp8(values, self.scale)
        self.amaxes.append(float(values.abs().max()))
        self.scale = self._next()
        return stored


def gathered_masters(optimizer: mb.DistributedOptimizer) -> dict[str, Tensor]:
    """The whole fp32 masters of quantized parameters, put together from all ranks; collective."""
    handle = optimizer.handle
    plan = handle.plan
    pieces: list[tuple[str, int, Tensor]] = []
    for run in optimizer.runs:
        if run.is_quantized:
            position = run.start
            for (param, numel), values in zip(run.pieces, run.master.detach().split([n for _, n in run.pieces])):
                pieces.append((plan.params[param].name, position - plan.locations[param][1].start, values.clone()))
                position += numel
    answers: list[Any] = [pieces]
    if dist.is_initialized() and dist.get_world_size() > 1:
        answers = [None] * dist.get_world_size()
        dist.all_gather_object(answers, pieces)
    masters = {spec.name: torch.full((spec.numel,), torch.nan) for spec in plan.params if spec.quantized}
    for answer in answers:
        for name, start, values in answer:
            masters[name][start : start + values.numel()] = values
    return {spec.name: masters[spec.name].view(spec.shape) for spec in plan.params if spec.quantized}


def stored_of(buf: mb.MegabufHandle) -> dict[str, tuple[Tensor, ...]]:
    """Copies of codes and scales of every quantized parameter; parameters must be current."""
    weights = buf.buffers.weights
    assert weights is not None
    return {
        buf.plan.params[index].name: tuple(tensor.clone() for tensor in weights.stored(index))
        for index in weights.indices
    }


def current(buf: mb.MegabufHandle) -> None:
    """Finish gathers without showing parameters."""
    buf.buffers.sync_params()


def equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Bit for bit, NaN included."""
    return len(left) == len(right) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)) for a, b in zip(left, right)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Weights:
    """What codes and scales must be after each step, from whole masters: ``problems`` of the real ones."""

    def __init__(self, variant: str, buf: mb.MegabufHandle, model: nn.Module) -> None:
        self.variant = variant
        self.buf = buf
        self.dtype = {spec.name: spec.dtype for spec in buf.plan.params}
        self._delayed: dict[str, DelayedReference] = {}

    def begin(self, initial: Mapping[str, Tensor]) -> list[str]:
        """``initial``: the parameters before ``attach``."""
        expected = {}
        for name in self._names:
            values = initial[name]
            if self.variant == "delayed":
                self._delayed[name] = DelayedReference(values.float())
                expected[name] = quantize_fp8(values, self._delayed[name].scale)
            else:
                expected[name] = quantized(self.variant, values)
        return self._compare("attach", expected)

    def check(self, step: int, optimizer: mb.DistributedOptimizer) -> list[str]:
        """I7, after ``optimizer.step()`` and with parameters current; collective."""
        masters = gathered_masters(optimizer)
        expected = {}
        for name in self._names:
            values = masters[name].to(self.dtype[name])
            if self.variant == "delayed":
                expected[name] = self._delayed[name].step(values)
            else:
                expected[name] = quantized(self.variant, values)
        problems = self._compare(f"step {step}", expected)
        if dist.is_initialized() and dist.get_world_size() > 1:
            everywhere: list[Any] = [None] * dist.get_world_size()
            mine = stored_of(self.buf)
            dist.all_gather_object(everywhere, mine)
            problems += [
                f"step {step}: {name} differs from rank {rank}"
                for rank, other in enumerate(everywhere)
                for name in mine
                if not equal(mine[name], other[name])
            ]
        return problems

    @property
    def _names(self) -> list[str]:
        return [spec.name for spec in self.buf.plan.params if spec.quantized]

    def _compare(self, when: str, expected: Mapping[str, Any]) -> list[str]:
        found = stored_of(self.buf)
        problems = [] if found.keys() == expected.keys() else [f"{when}: quantized are {sorted(found)}"]
        for name, stored in expected.items():
            if not equal(found[name], tuple(stored)):
                # An all-zero matrix may have any scale.
                values = [dequantized(self.variant, s, torch.float32) for s in (stored, type(stored)(*found[name]))]
                if not torch.equal(*values) or values[0].count_nonzero():
                    problems.append(f"{when}: {name} is not quantize(master)")
        return problems


class Outcome(NamedTuple):
    """What one training run leaves."""

    losses: tuple[float, ...]
    stored: dict[str, tuple[Tensor, ...]]
    values: dict[str, Tensor]
    """The parameters, dequantized."""
    problems: list[str]


def train(
    rank: int,
    variant: str | None,
    *,
    build: Callable[[], nn.Module] = net,
    is_compiled: bool = True,
    steps: int = 3,
    micros: int = 1,
    max_norm: float | None = 1.0,
    attach: Mapping[str, Any] | None = None,
    check: bool = True,
    between: Callable[[Any, Any, Any, int], Sequence[str]] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    lr: float = 1e-2,
    compile: Mapping[str, Any] | None = None,
    process_groups: Mapping[str, Any] | None = None,
    **options: Any,
) -> Outcome:
    """Train ``build()``; None for ``variant`` is the plain 16-bit model. ``between`` is called after every step."""
    model = seeded(build)
    initial = {name: param.detach().clone() for name, param in model.named_parameters()}
    chosen = {"inner_compiler": "aot_eager", "bucket_size": 3000, **(VARIANTS[variant] if variant else {}), **options}
    buf = mb.attach(model, mb.MegabufConfig(**chosen), **(process_groups or {}))
    call: Any = torch.compile(model, backend="megabuf", **(compile or {})) if is_compiled else model
    opt = mb.DistributedOptimizer(model.parameters(), optimizer, lr=lr)
    problems, losses = [], []
    weights = None
    if variant and check:
        weights = Weights(variant, buf, model)
        problems += weights.begin(initial)
    overlaps = buf.config.overlap_param_gather
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        total = 0.0
        for micro in range(micros):
            with buf.no_sync() if micro + 1 < micros else contextlib.nullcontext():
                loss = call(batch(step, micro, rank, ROWS, IN).to(dtype)).float().square().mean() / micros
                if weights is not None and overlaps and step and not micro:
                    # Only now, so that the forward has gathered by itself.
                    current(buf)
                    problems += weights.check(step - 1, opt)
                loss.backward()
            total += loss.item()
        if max_norm is not None:
            opt.clip_grad_norm_(max_norm)
        opt.step()
        opt.zero_grad()
        losses.append(total)
        if weights is not None and not overlaps:
            problems += weights.check(step, opt)
        if between is not None:
            problems += between(model, buf, opt, step)
    current(buf)
    if weights is not None and overlaps:
        problems += weights.check(steps - 1, opt)
    stored = stored_of(buf) if variant else {}
    values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    buf.detach()
    return Outcome(tuple(losses), stored, values, problems)


def compare_outcomes(found: Outcome, expected: Outcome, what: str) -> list[str]:
    """Bit for bit."""
    problems = [] if found.losses == expected.losses else [f"{what}: losses {found.losses}, not {expected.losses}"]
    for name in expected.stored:
        if not equal(found.stored[name], expected.stored[name]):
            problems.append(f"{what}: codes or scales of {name} differ")
    for name in expected.values:
        if not equal([found.values[name]], [expected.values[name]]):
            problems.append(f"{what}: {name} differs")
    return problems
