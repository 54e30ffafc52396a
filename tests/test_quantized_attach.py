"""Quantized parameters as the user sees them: which are chosen, what a parameter holds, saving, loading and copying."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import RankGroup, batch, error_text, fresh_compiler, params_of, seeded, twin
from quantized_runs import (
    IN,
    ROWS,
    VARIANTS,
    DelayedReference,
    Net,
    config,
    current,
    dequantized,
    equal,
    net,
    quantized,
    stored_of,
)
from torch import Tensor, nn

import megabuf_fx as mb
from megabuf_fx.runtime.quantize_fp8 import quantize_fp8

KINDS = pytest.mark.parametrize("variant", VARIANTS)


def chosen(model: nn.Module, variant: str = "fp8", **options: Any) -> list[str]:
    """Names of the weights that ``attach`` quantizes."""
    buf = mb.attach(model, config(variant, **options))
    names = [spec.name for spec in buf.plan.params if spec.quantized]
    assert {spec.quantized for spec in buf.plan.params if spec.quantized} == {buf.config.quantization}
    buf.detach()
    return names


class Subclass(nn.Linear):
    pass


class Everything(nn.Module):
    """Weights of all kinds; only ``plain`` and ``again`` are of ``nn.Linear`` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.plain = nn.Linear(32, 64)
        self.subclass = Subclass(64, 32)
        self.conv = nn.Conv1d(32, 32, 1)
        self.norm = nn.LayerNorm(32)
        self.again = nn.ModuleDict({"inner": nn.Linear(32, 32, bias=False)})
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.loose = nn.Parameter(torch.zeros(32, 32))


@KINDS
def test_weights_of_linear_itself_are_chosen(variant: str) -> None:
    assert chosen(Everything().bfloat16(), variant) == ["plain.weight", "again.inner.weight"]


def test_weight_that_a_subclass_shares_is_not_chosen() -> None:
    model: Any = nn.ModuleDict({"a": nn.Linear(32, 32), "b": Subclass(32, 32), "c": nn.Linear(32, 32)}).bfloat16()
    model["b"].weight = model["a"].weight
    assert chosen(model) == ["c.weight"]


def test_weight_that_two_linears_share_is_chosen() -> None:
    model: Any = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)}).bfloat16()
    model["b"].weight = model["a"].weight
    assert chosen(model) == ["a.weight"]


def test_bias_that_is_a_matrix_elsewhere_is_not_chosen() -> None:
    """Every place must be a ``weight``."""
    model: Any = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32), "c": nn.Linear(32, 32)}).bfloat16()
    model["b"].register_parameter("extra", model["a"].weight)
    assert chosen(model) == ["b.weight", "c.weight"]


PATTERNS: dict[tuple[str, ...], list[str]] = {
    ("all",): ["plain.weight", "again.inner.weight"],
    ("plain*",): ["plain.weight"],
    ("*.inner.*", "nothing"): ["again.inner.weight"],
    ("again.inner.weight", "all"): ["plain.weight", "again.inner.weight"],
    ("*",): ["plain.weight", "again.inner.weight"],
}


@pytest.mark.parametrize("patterns", PATTERNS)
def test_patterns(patterns: tuple[str, ...]) -> None:
    assert chosen(Everything().bfloat16(), quantized_param_name_patterns=patterns) == PATTERNS[patterns]


@pytest.mark.parametrize(
    ("variant", "shape", "fits"),
    [
        ("fp8", (7, 5), True),
        ("mxfp8", (7, 32), True),
        ("mxfp8", (32, 48), False),
        ("nvfp4", (16, 48), True),
        ("nvfp4", (16, 40), False),
        ("nvfp4", (24, 32), False),
    ],
)
def test_shapes_that_do_not_divide_stay(
    variant: str, shape: tuple[int, int], fits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rows, columns = shape
    model = nn.ModuleDict({"odd": nn.Linear(columns, rows), "even": nn.Linear(64, 64)}).bfloat16()
    with caplog.at_level(logging.WARNING, logger="megabuf_fx.quantization"):
        assert chosen(model, variant) == (["odd.weight", "even.weight"] if fits else ["even.weight"])
    expected = (
        f"'odd.weight' of shape {shape} stays in torch.bfloat16: {variant} needs rows and columns in multiples of"
    )
    assert [expected in record.getMessage() for record in caplog.records] == ([] if fits else [True])


def test_nothing_to_quantize() -> None:
    only_odd = nn.Linear(31, 32).bfloat16()
    message = error_text(lambda: mb.attach(only_odd, config("mxfp8")))
    assert message.startswith("ValueError: mxfp8: no weight can be quantized; it needs nn.Linear weights")
    assert "rows in multiples of 1 and columns of 32" in message
    message = error_text(lambda: mb.attach(net(), config("fp8", quantized_param_name_patterns=("no_*",))))
    assert message.startswith("ValueError: fp8: no weight can be quantized")
    assert "('no_*',)" in message
    # The model is as it was.
    model = nn.LayerNorm(8)
    assert "no weight can be quantized" in error_text(lambda: mb.attach(model, config("fp8")))
    mb.attach(model).detach()


def test_dtypes() -> None:
    assert "found torch.float16; choose some" in error_text(lambda: mb.attach(Net().half(), config("fp8")))
    assert "found torch.float64; choose some" in error_text(lambda: mb.attach(Net().double(), config("fp8")))
    mixed = net()
    mixed.fc2.float()  # type: ignore[union-attr,operator]
    message = error_text(lambda: mb.attach(mixed, config("fp8")))
    assert "must be all bf16 or all fp32, found torch.bfloat16, torch.float32; choose some" in message
    assert chosen(mixed, quantized_param_name_patterns=("fc2*",)) == ["fc2.weight"]
    assert chosen(Net()) == ["fc1.weight", "fc2.weight", "fc3.weight"]


# What parameters hold


class Run:
    """A model attached by itself, trained for some steps."""

    def __init__(self, variant: str, *, steps: int = 0, build: Callable[[], nn.Module] = net, **options: Any) -> None:
        self.variant = variant
        self.model: Any = seeded(build)
        self.initial = params_of(self.model)
        self.buf = mb.attach(self.model, config(variant, **options))
        self.opt = mb.DistributedOptimizer(self.model.parameters(), torch.optim.AdamW, lr=1e-2)
        self.dtype = next(self.model.parameters()).dtype
        self.steps = 0
        for _ in range(steps):
            self.step()

    @property
    def names(self) -> list[str]:
        return [spec.name for spec in self.buf.plan.params if spec.quantized]

    def loss(self, call: Any = None) -> Tensor:
        x = batch(self.steps, 0, 0, ROWS, IN).to(self.dtype)
        loss: Tensor = (self.model if call is None else call)(x).float().square().mean()
        return loss

    def step(self, call: Any = None) -> None:
        self.loss(call).backward()
        self.opt.step()
        self.opt.zero_grad()
        self.steps += 1

    def values(self) -> dict[str, Tensor]:
        """Dequantized, straight from codes and scales."""
        current(self.buf)
        weights = self.buf.buffers.weights
        assert weights is not None
        return {self.buf.plan.params[i].name: weights.stored_values(i) for i in weights.indices}

    def holds(self, values: dict[str, Tensor]) -> bool:
        return all(torch.equal(self.model.get_parameter(name), value) for name, value in values.items())

    def are_hidden(self) -> bool:
        pointers = {self.model.get_parameter(name).data_ptr() for name in self.names}
        return len(pointers) == 1 and all(self.model.get_parameter(name).isnan().all() for name in self.names)

    def masters(self) -> dict[str, Tensor]:
        found: dict[str, list[Tensor]] = {}
        for run in self.opt.runs:
            if run.is_quantized:
                for (param, _), part in zip(run.pieces, run.master.detach().split([n for _, n in run.pieces])):
                    found.setdefault(self.buf.plan.params[param].name, []).append(part.clone())
        return {name: torch.cat(found[name]).view_as(self.model.get_parameter(name)) for name in self.names}


@KINDS
def test_hidden_parameters(variant: str) -> None:
    run = Run(variant)
    assert run.are_hidden()
    largest = max(run.model.get_parameter(name).numel() for name in run.names)
    storage = run.model.fc1.weight.untyped_storage()
    assert storage.nbytes() == 2 * largest
    for name in run.names:
        param = run.model.get_parameter(name)
        assert (param.shape, param.dtype, param.requires_grad) == (run.initial[name].shape, torch.bfloat16, True)
    # Masters are the values from before, not what is left of them.
    assert all(torch.equal(master, run.initial[name].float()) for name, master in run.masters().items())
    call: Any = torch.compile(run.model, backend="megabuf")
    run.step(call)
    assert run.are_hidden()
    run.buf.sync_params()
    values = run.values()
    assert run.holds(values)
    assert not any(value.isnan().any() for value in values.values())
    run.loss(call)
    assert run.holds(values)
    run.step(call)
    assert run.are_hidden()
    # Biases and norms never hide.
    assert not any(param.isnan().any() for name, param in run.model.named_parameters() if name not in run.names)


@KINDS
def test_eager_forward_shows_what_it_reads(variant: str) -> None:
    run = Run(variant)
    run.model.fc1(torch.zeros(1, IN, dtype=torch.bfloat16))
    assert torch.equal(run.model.fc1.weight, run.values()["fc1.weight"])
    assert run.model.fc2.weight.isnan().all()


def test_optimizer_built_late_or_twice() -> None:
    """A second optimizer has what is stored; a first one, after loading, what was loaded."""
    run = Run("nvfp4", steps=1)
    values = run.values()
    second = mb.DistributedOptimizer(run.model.parameters(), torch.optim.SGD, lr=0.0)
    run.opt = second
    assert all(torch.equal(master, values[name].float()) for name, master in run.masters().items())
    model: Any = seeded(net)
    buf = mb.attach(model, config("nvfp4"))
    loaded = {name: value * 3 for name, value in params_of(seeded(net, 4)).items()}
    model.load_state_dict(loaded)
    run.model, run.buf = model, buf
    run.opt = mb.DistributedOptimizer(model.parameters(), torch.optim.SGD, lr=0.0)
    assert all(torch.equal(master, loaded[name].float()) for name, master in run.masters().items())


# Saving


@pytest.mark.parametrize("overlap", [False, True])
@KINDS
def test_state_dict_has_values_of_its_own(variant: str, overlap: bool) -> None:
    run = Run(variant, steps=2, overlap_param_gather=overlap)
    state = run.model.state_dict()
    values = run.values()
    assert list(state) == list(run.initial)
    assert all(torch.equal(state[name], value) for name, value in values.items())
    assert run.are_hidden()
    kept = {name: value.clone() for name, value in state.items() if name in run.names}
    pointers = {state[name].untyped_storage().data_ptr() for name in run.names}
    assert len(pointers) == len(run.names)
    for name in run.names:
        state[name].add_(1)
    assert all(torch.equal(run.values()[name], value) for name, value in kept.items())
    run.step()
    assert not any(torch.equal(run.values()[name], value) for name, value in kept.items())
    plain: Any = net()
    plain.load_state_dict(run.model.state_dict())
    x = batch(9, 0, 0, ROWS, IN).bfloat16()
    assert torch.equal(plain(x), run.model(x))


def test_state_dict_of_a_part_and_of_variables() -> None:
    run = Run("mxfp8", steps=1)
    assert torch.equal(run.model.fc2.state_dict()["weight"], run.values()["fc2.weight"])
    # With keep_vars the caller has asked for the parameters themselves.
    assert run.model.state_dict(keep_vars=True)["fc2.weight"] is run.model.fc2.weight


# Loading


@pytest.mark.parametrize("fp32", [False, True], ids=["bf16", "fp32"])
@KINDS
def test_load_state_dict(variant: str, fp32: bool) -> None:
    build = Net if fp32 else net
    run = Run(variant, steps=2, build=build)
    loaded = {name: value * 1.7 for name, value in params_of(seeded(build, seed=5)).items()}
    run.model.load_state_dict(loaded)
    expected = {name: _quantized(variant, loaded[name]) for name in run.names}
    assert all(equal(stored_of(run.buf)[name], stored) for name, stored in expected.items())
    values = {name: _values(variant, loaded[name]) for name in run.names}
    state = run.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in values.items())
    # Eager code and compiled graphs see the same.
    x = batch(9, 0, 0, ROWS, IN).to(run.dtype)
    plain: Any = build()
    plain.load_state_dict({**loaded, **values})
    call: Any = torch.compile(run.model, backend="megabuf")
    assert torch.equal(run.model(x), plain(x))
    assert torch.equal(call(x), plain(x))
    run.opt.reload_model_params()
    # Exactly what was loaded, not what became of it.
    assert all(torch.equal(master, loaded[name].float()) for name, master in run.masters().items())
    run.opt.reload_model_params()
    assert all(torch.equal(master, loaded[name].float()) for name, master in run.masters().items())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.step()
    # What was loaded is over now: nothing was written since.
    masters = run.masters()
    assert not any(torch.equal(master, loaded[name].float()) for name, master in masters.items())
    run.opt.reload_model_params()
    assert all(torch.equal(master, masters[name]) for name, master in run.masters().items())


def _quantized(variant: str, values: Tensor) -> Any:
    """What ``values`` become when nothing is known but them."""
    if variant == "delayed":
        return quantize_fp8(values, DelayedReference(values.float()).scale)
    return quantized(variant, values)


def _values(variant: str, values: Tensor) -> Tensor:
    return dequantized(variant, _quantized(variant, values), values.dtype)


@KINDS
def test_loading_what_is_there(variant: str) -> None:
    """Masters lose what they knew beyond it, as after any loading."""
    run = Run(variant, steps=1)
    values = run.values()
    run.model.load_state_dict(run.model.state_dict())
    run.opt.reload_model_params()
    assert all(torch.equal(master, values[name].float()) for name, master in run.masters().items())


@KINDS
def test_step_after_loading_without_reloading_masters_warns(variant: str) -> None:
    run = Run(variant, steps=1)
    masters = run.masters()
    run.model.load_state_dict(params_of(seeded(net, seed=5)))
    with pytest.warns(UserWarning, match=r"weights were written since the last step .* opt.reload_model_params\(\)"):
        run.step()
    # The change is undone: masters moved by one step of AdamW, at most lr and its decay.
    assert all((master - masters[name]).abs().max() < 0.03 for name, master in run.masters().items())


def test_loading_a_part() -> None:
    run = Run("shared", steps=1, overlap_param_gather=True)
    before = run.values()
    values = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    run.model.fc2.load_state_dict({"weight": values})
    after = run.values()
    assert torch.equal(after["fc2.weight"], _values("shared", values))
    assert all(torch.equal(after[name], before[name]) for name in ("fc1.weight", "fc3.weight"))
    masters = run.masters()
    run.opt.reload_model_params()
    reloaded = run.masters()
    assert torch.equal(reloaded["fc2.weight"], values.float())
    # What was not loaded keeps masters that are finer than what is stored.
    assert all(torch.equal(reloaded[name], masters[name]) for name in ("fc1.weight", "fc3.weight"))


@KINDS
def test_writing_after_sync_params(variant: str) -> None:
    """The documented way: show, write, let masters follow."""
    run = Run(variant, steps=1)
    masters = run.masters()
    run.buf.sync_params()
    with torch.no_grad():
        run.model.fc2.weight.mul_(2)
    written = run.model.fc2.weight.detach().clone()
    run.opt.reload_model_params()
    assert torch.equal(run.masters()["fc2.weight"], written.float())
    assert torch.equal(run.masters()["fc1.weight"], masters["fc1.weight"])
    assert equal(stored_of(run.buf)["fc2.weight"], _quantized(variant, written))
    assert run.holds(run.values())
    run.step()


# Writes that codes do not see


def test_write_to_a_hidden_parameter_is_refused() -> None:
    run = Run("fp8", steps=1)
    assert run.model.fc1.weight is not None
    call: Any = torch.compile(run.model, backend="megabuf")
    with torch.no_grad():
        run.model.fc2.weight.fill_(1.0)
    run.loss(call).backward()
    message = error_text(run.opt.step)
    assert "RuntimeError: quantized parameter 'fc2.weight' was written in place, which its codes do not see" in message
    assert "Call buf.sync_params() first, then write, then opt.reload_model_params()" in message


def test_write_to_a_shown_parameter_without_reload_is_refused() -> None:
    run = Run("mxfp8", steps=1)
    run.buf.sync_params()
    with torch.no_grad():
        run.model.fc3.weight.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The optimizer warns of its masters, too.
        assert "quantized parameter 'fc3.weight' was written in place" in error_text(run.step)


@pytest.mark.parametrize("is_shown", [False, True])
def test_replaced_data_is_refused(is_shown: bool) -> None:
    run = Run("nvfp4", steps=1)
    if is_shown:
        run.buf.sync_params()
    call: Any = torch.compile(run.model, backend="megabuf")
    run.loss(call).backward()
    run.model.fc2.weight.data = torch.ones(64, 96, dtype=torch.bfloat16)
    message = error_text(run.opt.step)
    assert "the data of quantized parameter 'fc2.weight' was replaced after attach" in message
    assert "use load_state_dict" in message


def test_torch_optimizer_is_refused() -> None:
    model: Any = seeded(net)
    buf = mb.attach(model, config("fp8"))
    model(batch(0, 0, 0, ROWS, IN).bfloat16()).float().sum().backward()
    message = error_text(torch.optim.AdamW(model.parameters()).step)
    assert message.startswith("RuntimeError: AdamW steps parameters of an attached model whose .grad is None")
    assert "use megabuf_fx.DistributedOptimizer(model.parameters(), AdamW, ...)" in message
    buf.detach()


# Leaving


@pytest.mark.parametrize("overlap", [False, True])
@KINDS
def test_deepcopy_is_a_plain_model(variant: str, overlap: bool) -> None:
    run = Run(variant, steps=2, overlap_param_gather=overlap)
    copied: Any = copy.deepcopy({"nested": run.model})["nested"]
    values = run.values()
    assert all(torch.equal(copied.get_parameter(name), value) for name, value in values.items())
    assert not hasattr(copied.fc1.weight, "main_grad")
    assert "__deepcopy__" not in vars(copied)
    x = batch(9, 0, 0, ROWS, IN).bfloat16()
    assert torch.equal(copied(x), run.model(x))
    torch.optim.SGD(copied.parameters(), lr=1.0)
    copied(x).float().sum().backward()
    torch.optim.SGD(copied.parameters(), lr=1.0).step()
    assert not torch.equal(copied.fc1.weight, values["fc1.weight"])
    assert all(torch.equal(run.values()[name], value) for name, value in values.items())
    copied.load_state_dict(run.initial)
    assert all(torch.equal(run.values()[name], value) for name, value in values.items())
    # And it can be attached.
    again = mb.attach(copied, config(variant))
    again.detach()
    run.step()
    twin(run.model)


@pytest.mark.parametrize("overlap", [False, True])
@KINDS
def test_detach_gives_values_back(variant: str, overlap: bool) -> None:
    run = Run(variant, steps=2, overlap_param_gather=overlap)
    state = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.step()
    expected = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.buf.detach()
    assert all(torch.equal(param, expected[name]) for name, param in run.model.named_parameters())
    assert not all(torch.equal(state[name], expected[name]) for name in run.names)
    pointers = [param.untyped_storage().data_ptr() for param in run.model.parameters()]
    assert len(set(pointers)) == len(pointers)
    # A plain model: no hook of ours acts, and torch's optimizer trains it.
    run.model.load_state_dict(run.initial)
    assert all(torch.equal(param, run.initial[name]) for name, param in run.model.named_parameters())
    assert torch.equal(run.model.state_dict()["fc1.weight"], run.initial["fc1.weight"])
    run.loss().backward()
    torch.optim.SGD(run.model.parameters(), lr=0.1).step()
    assert not torch.equal(run.model.fc1.weight, run.initial["fc1.weight"])
    # Once more, in another format.
    again = Run("nvfp4")
    again.step()


def refusals(rank: int) -> list[str]:
    """A rank with nothing to quantize does not let the other wait."""
    model = net() if rank == 0 else nn.Sequential(nn.LayerNorm(8))
    messages = [error_text(lambda: mb.attach(model, config("fp8")))]
    messages.append(error_text(lambda: mb.attach(net(), config("fp8" if rank == 0 else "nvfp4"))))
    fresh_compiler()
    return messages


@pytest.mark.dist
def test_ranks_refuse_together(ranks: Callable[[int], RankGroup]) -> None:
    (first, second) = ranks(2).run(refusals)
    assert "no weight can be quantized" in first[0]
    assert "no weight can be quantized" in second[0]
    assert "ValueError" in first[1]
    assert "ValueError" in second[1]
