"""``DistributedOptimizer(compile_step=True)``: one pass over memory, with the numbers of torch's optimizers.

Masters within 1e-6 of those of the ordinary step: the compiled one may round a sum of products once less or more.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Mlp, RankGroup, batch, error_text, fresh_compiler, params_of, seeded
from quantized_runs import IN, Weights, net
from quantized_runs import config as quantized_config
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import megabuf_fx as mb
import megabuf_fx._compat as _compat

ADAM: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, ADAM),
    "Adam, amsgrad": (torch.optim.Adam, {**ADAM, "amsgrad": True, "betas": (0.7, 0.9)}),
    "Adam, maximize": (torch.optim.Adam, {**ADAM, "maximize": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "SGD, momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "SGD, nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}
MODES: dict[str, dict[str, Any]] = {
    "sharded": {},
    "overlap": {"overlap_param_gather": True},
    "whole": {"use_distributed_optimizer": False},
}
PRECISIONS = {
    "fp32": (torch.float32, True),
    "bf16, fp32 grads": (torch.bfloat16, True),
    "bf16": (torch.bfloat16, False),
}


class Run:
    """An attached model, trained by hooks, with its optimizer."""

    def __init__(
        self,
        compile_step: bool,
        optimizer: str = "AdamW",
        precision: str = "bf16",
        *,
        build: Callable[[], nn.Module] = Mlp,
        inner_compiler: str = "aot_eager",
        rank: int = 0,
        max_skipped_steps: int | None = None,
        **config: Any,
    ) -> None:
        self.dtype, fp32 = PRECISIONS[precision]
        self.rank = rank
        self.model = seeded(build).to(self.dtype)
        self.buf = mb.attach(
            self.model, mb.MegabufConfig(**{"grad_reduce_in_fp32": fp32, "inner_compiler": inner_compiler, **config})
        )
        kind, options = OPTIMIZERS[optimizer]
        self.optimizer = mb.DistributedOptimizer(
            self.model.parameters(), kind, compile_step=compile_step, max_skipped_steps=max_skipped_steps, **options
        )

    def backward(self, step: int, scale: float = 1.0) -> None:
        loss = self.model(batch(step, 0, self.rank, 8, 13).to(self.dtype)).square().mean()
        (loss * scale).backward()

    def step(self, step: int, scale: float = 1.0) -> None:
        """Learning rate and weight decay change at every step, and gradients are clipped."""
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
            group["weight_decay"] = 0.03 * step
        self.backward(step, scale)
        self.optimizer.clip_grad_norm_(0.05)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> dict[str, Tensor]:
        """Masters by the element they begin with, and what the model computes with."""
        self.buf.sync_params()
        masters = {f"{run.buffer}:{run.start}": run.flat.clone() for run in self.optimizer.runs}
        for run in self.optimizer.runs:
            if run.params:
                assert torch.equal(torch.cat(run.params), run.flat.to(self.dtype)), "a parameter is not its master"
        return masters


def compare(found: Run, expected: Run) -> None:
    left, right = found.values(), expected.values()
    assert left.keys() == right.keys()
    torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)
    states = [[each.optimizer.inner.state[run.master] for run in each.optimizer.runs] for each in (found, expected)]
    for mine, theirs in zip(*states):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            torch.testing.assert_close(mine[key], value, rtol=1e-5, atol=1e-9)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    fresh_compiler()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_same_numbers_and_one_graph(optimizer: str, precision: str) -> None:
    for mode in MODES.values():
        found, expected = (Run(is_compiled, optimizer, precision, **mode) for is_compiled in (True, False))
        before = _compat.compiled_graphs()
        for step in range(5):
            found.step(step)
            expected.step(step)
        compare(found, expected)
        # One graph for runs of all lengths, and for all steps.
        assert len({run.master.numel() for run in found.optimizer.runs}) > 1
        assert _compat.compiled_graphs() - before <= 1
        found.buf.detach()
        expected.buf.detach()


def test_something_is_compiled_from_the_second_step_on() -> None:
    run = Run(True)
    before = _compat.compiled_graphs()
    run.step(0)
    assert _compat.compiled_graphs() == before
    run.step(1)
    assert _compat.compiled_graphs() == before + 1


def test_one_pass_in_generated_code() -> None:
    """Of 16-bit parameters and gradients each element is read and written once, 28 bytes in all: by one kernel."""
    found, expected = Run(True, inner_compiler="inductor"), Run(False)
    found.step(0)
    _, codes = run_and_get_code(lambda: found.step(1))
    (code,) = codes
    (kernel,) = re.findall(r"cpp_fused\w+ = async_compile.*?'''\)", code, flags=re.DOTALL)
    main = kernel[kernel.index("C10_LIKELY") :].split("C10_UNLIKELY")[0]
    loads = re.findall(r"Vectorized<([\w:]+)>::loadu\((\w+)", main)
    stores = re.findall(r"\.store\((\w+)", main)
    sizes = {"float": 4, "at::BFloat16": 2}
    assert sorted(sizes[dtype] for dtype, _ in loads) == [2, 4, 4, 4]
    assert len({name for _, name in loads}) == 4
    types = {name: dtype for dtype, name in re.findall(r"([\w:]+)\* (out_ptr\d+)", kernel)}
    assert sorted(sizes[types[name]] for name in stores) == [2, 4, 4, 4]
    before = _compat.compiled_graphs()
    expected.step(0)
    expected.step(1)
    for step in range(2, 6):
        found.step(step)
        expected.step(step)
    compare(found, expected)
    assert _compat.compiled_graphs() == before


class Branches(nn.Module):
    """Its middle layer is used when ``uses`` says so. One run, as all sizes are multiples of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, 64)
        self.middle = nn.Linear(64, 64)
        self.last = nn.Linear(64, 64)
        self.uses = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        result: Tensor = self.last(torch.tanh(self.middle(hidden)) if self.uses else hidden)
        return result


def test_unused_parameters_are_left_alone() -> None:
    """Runs are cut, and the parts count their steps by themselves; a part without state begins as it would have."""
    runs = [Run(is_compiled, "Adam, amsgrad", build=Branches) for is_compiled in (True, False)]
    before = _compat.compiled_graphs()
    for step, uses in enumerate([False, True, True, False, True]):
        for run in runs:
            assert isinstance(run.model, Branches)
            run.model.uses = uses
            run.step(step)
    compare(*runs)
    assert len(runs[0].optimizer.runs) == 3
    assert _compat.compiled_graphs() == before + 1


def test_state_loads_and_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    run = Run(True)
    before = _compat.compiled_graphs()
    for step in range(3):
        run.step(step)
    mb.save_checkpoint(tmp_path, 3, run.model, run.optimizer)
    run.step(3)
    expected = run.values()
    resumed = Run(True)
    newest = mb.latest_checkpoint(tmp_path)
    assert newest is not None
    mb.load_checkpoint(newest, resumed.model, resumed.optimizer)
    resumed.step(3)
    assert all(torch.equal(value, expected[name]) for name, value in resumed.values().items())
    assert _compat.compiled_graphs() == before + 1


def test_state_of_the_ordinary_step_loads() -> None:
    run, ordinary = Run(True), Run(False)
    for step in range(3):
        ordinary.step(step)
    run.optimizer.load_state_dict(ordinary.optimizer.state_dict())
    for step in range(3, 5):
        run.step(step)
        ordinary.step(step)
    compare(run, ordinary)


def test_steps_with_nan_are_skipped() -> None:
    runs = [Run(is_compiled, max_skipped_steps=2) for is_compiled in (True, False)]
    for step in range(4):
        for run in runs:
            run.step(step, scale=float("nan") if step == 2 else 1.0)
    assert [run.optimizer.skipped_steps for run in runs] == [1, 1]
    compare(*runs)


def test_grad_scaler() -> None:
    runs = [Run(is_compiled, precision="bf16, fp32 grads") for is_compiled in (True, False)]
    for run in runs:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            loss = run.model(batch(step, 0, 0, 8, 13).bfloat16()).float().square().mean()
            scaler.scale(loss * float("inf") if step == 2 else loss).backward()
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
        assert scaler.get_scale() == 4.0
    compare(*runs)


def test_groups_of_other_optimizers_are_updated_as_always() -> None:
    results = []
    for is_compiled in (True, False):
        model = seeded(Mlp)
        mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager"))
        both: list[list[nn.Parameter]] = [[], []]
        for name, param in model.named_parameters():
            both["fc1" in name].append(param)
        others: dict[str, Any] = {"params": both[1], "optimizer_class": torch.optim.RMSprop, "lr": 1e-3}
        groups = [others, {"params": both[0]}]
        optimizer = mb.DistributedOptimizer(groups, torch.optim.AdamW, lr=1e-2, compile_step=is_compiled)
        for step in range(3):
            model(batch(step, 0, 0, 8, 13)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(dict(model.named_parameters()))
    found, expected = results
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)


def test_quantized_weights_are_quantized_from_the_masters() -> None:
    results = []
    for is_compiled in (True, False):
        model = seeded(net)
        initial = params_of(model)
        buf = mb.attach(model, quantized_config("mxfp8"))
        weights = Weights("mxfp8", buf, model)
        problems = weights.begin(initial)
        optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, compile_step=is_compiled)
        for step in range(3):
            model(batch(step, 0, 0, 4, IN).bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            problems += weights.check(step, optimizer)
        assert not problems, "\n".join(problems)
        results.append([run.flat.clone() for run in optimizer.runs])
        assert any(run.is_quantized for run in optimizer.runs)
    # A rounding can change a code, and that changes the next gradients by more.
    for mine, theirs in zip(*results):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def test_refusals() -> None:
    def build(kind: Any, **options: Any) -> mb.DistributedOptimizer:
        model = seeded(Mlp)
        mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager"))
        return mb.DistributedOptimizer(model.parameters(), kind, lr=1e-2, compile_step=True, **options)

    class Own(torch.optim.SGD):
        pass

    assert "SGD, Adam and AdamW of torch.optim, not RMSprop" in error_text(lambda: build(torch.optim.RMSprop))
    # What a subclass computes is not known.
    assert "not Own" in error_text(lambda: build(Own))
    for option in ("fused", "capturable", "differentiable"):
        text = error_text(functools.partial(build, torch.optim.AdamW, **{option: True}))
        assert text.startswith("ValueError: compile_step=True and ")
        assert f"{option}=True" in text
    optimizer = build(torch.optim.AdamW)
    text = error_text(lambda: mb.capture_step(lambda x: None, torch.zeros(1), optimizer=optimizer))
    assert "compile_step=True keeps numbers of the update on the host" in text
    assert "fused=True instead" in text


def compare_on(rank: int) -> None:
    for mode in MODES.values():
        runs = [Run(is_compiled, rank=rank, **mode) for is_compiled in (True, False)]
        for step in range(4):
            for run in runs:
                run.step(step)
        compare(*runs)
        for run in runs:
            run.buf.detach()


@pytest.mark.dist
def test_two_ranks(ranks: Callable[[int], RankGroup]) -> None:
    ranks(2).run(compare_on, timeout=120)
