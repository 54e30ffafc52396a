"""``passes/fuse_wgrad.py``: products that write straight into ``main_grad``.

Overwriting is bitwise equal to the untouched graph: the same product into another place. Two exceptions, where BLAS may
add in another order: a product that is stored transposed is computed from swapped factors, and in the dense layout the
place can be misaligned (MKL: results differ where the output is not 16-byte aligned). Accumulating in one dtype adds
inside the product, one rounding less; with wider ``main_grad`` the CPU rounds the product as before, so it is bitwise.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from graph_builders import (
    TABLES,
    Buffers,
    Traced,
    apply,
    code_line,
    copy_graph,
    find,
    node_named,
    order_of,
    text_of,
    trace,
    trace_backward,
    traced_mlp,
)
from helpers import batch, seeded
from torch import Tensor, nn
from torch.fx import GraphModule

from megabuf_fx.passes.add_buffer_inputs import add_buffer_inputs
from megabuf_fx.passes.contract import PassError
from megabuf_fx.passes.fuse_wgrad import find_weight_grad, fuse_wgrad
from megabuf_fx.passes.graph_utils import aten, main_grad_nodes, outputs, written_param
from megabuf_fx.passes.write_main_grads import write_main_grads
from megabuf_fx.runtime.ops import accumulate_wgrad_

BF16 = torch.bfloat16
# One rounding of fp32 more or less in each of a few dozen additions; bf16 keeps eight bits.
FP32_BOUND, BF16_BOUND = 1e-6, 2.0**-7


class Twice(nn.Module):
    """One weight in two products: its gradient is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 7))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight)), self.weight)


class Broadcast(nn.Module):
    """The product that is the gradient of ``weight`` is also summed to that of ``row``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 7))
        self.row = nn.Parameter(torch.randn(1, 7))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.row)


class Shifted(nn.Module):
    """``weight`` and the input ``shift`` have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 7))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return F.linear(x, self.weight + shift)


class Sum(nn.Module):
    """Two parameters have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(4, 7))
        self.right = nn.Parameter(torch.randn(4, 7))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.left + self.right)


class Transposed(nn.Module):
    """Weights stored ``[in, out]`` and used as they are, from the right and from the left."""

    def __init__(self) -> None:
        super().__init__()
        self.right = nn.Parameter(torch.randn(7, 5))
        self.left = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.left @ torch.tanh(x @ self.right)


class Autocast(nn.Module):
    """fp32 parameters whose products run in bf16, so that gradients are widened."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            result: Tensor = self.fc(x)
        return result


def rewrite(buffers: Buffers, *, accumulate: bool, fuse: bool = True) -> GraphModule:
    """The backward with all gradients in buffers."""
    gradients = buffers.gradients
    inputs = partial(add_buffer_inputs, extras=buffers.extras(with_token=False), writes=list(gradients.values()))
    rest = partial(write_main_grads, gradients=gradients, write="accumulate" if accumulate else "overwrite")
    if not fuse:
        return apply(buffers.traced.backward, inputs, rest)
    return apply(buffers.traced.backward, inputs, partial(fuse_wgrad, gradients=gradients, accumulate=accumulate), rest)


def run(buffers: Buffers, gm: GraphModule) -> list[Tensor]:
    """Copies of all ``main_grad`` after one backward; nothing that is bound may come back."""
    results = buffers.run_backward(gm, buffers.extras(with_token=False))
    for position, result in enumerate(results):
        expected = buffers.traced.backward_results[position]
        if position in buffers.gradients or expected is None:
            assert result is None
        else:
            assert torch.equal(result, expected)
    return [main_grad.clone() for main_grad in buffers.main_grads]


def check_overwrite(buffers: Buffers, *, fused: int) -> GraphModule:
    """Overwriting is equal to the untouched graph, bitwise in the aligned layout, whatever the buffers held."""
    gm = rewrite(buffers, accumulate=False)
    assert len(find(gm, accumulate_wgrad_)) == fused
    assert all(node.args[3] is False for node in find(gm, accumulate_wgrad_))
    buffers.poison()
    products = {param.param for node in find(gm, accumulate_wgrad_) if (param := written_param(node)) is not None}
    for index, result in enumerate(run(buffers, gm)):
        expected = buffers.traced.reference(index).to(result.dtype)
        if buffers.bucket_plan.aligned or index not in products:
            assert torch.equal(result, expected), buffers.traced.specs[index].name
        else:
            assert (result - expected).abs().max() <= FP32_BOUND * expected.abs().max()
    return gm


def check_accumulate(buffers: Buffers, *, fused: int, bound: float) -> GraphModule:
    """Accumulating adds; ``bound`` is relative to the terms, 0 asks for bits equal to a separate addition."""
    gm = rewrite(buffers, accumulate=True)
    assert len(find(gm, accumulate_wgrad_)) == fused
    assert all(node.args[3] is True for node in find(gm, accumulate_wgrad_))
    before = buffers.randomize()
    for index, (result, start) in enumerate(zip(run(buffers, gm), before)):
        expected = start + buffers.traced.reference(index)
        scale = start.abs().max() + buffers.traced.reference(index).abs().max()
        difference = (result - expected.to(result.dtype)).abs().max()
        assert difference <= bound * scale, buffers.traced.specs[index].name
    return gm


Build = Callable[[], nn.Module]
MODULES: dict[str, tuple[Build, tuple[int, ...], int, float]] = {
    # name: (module, input shape, fused products, bound when accumulating)
    "linear": (lambda: nn.Linear(7, 4), (6, 7), 1, FP32_BOUND),
    "linear_3d": (lambda: nn.Linear(7, 4), (2, 3, 7), 1, FP32_BOUND),
    "bias_free": (lambda: nn.Linear(7, 4, bias=False), (6, 7), 1, FP32_BOUND),
    "bf16": (lambda: nn.Linear(7, 4, dtype=BF16), (6, 7), 1, BF16_BOUND),
    "transposed": (Transposed, (6, 7), 2, FP32_BOUND),
    "autocast": (Autocast, (6, 7), 1, 0.0),
    "twice": (Twice, (6, 7), 0, 0.0),
    "broadcast": (Broadcast, (6, 7), 0, 0.0),
}


def traced_module(name: str, table: str) -> Traced:
    build, shape, _, _ = MODULES[name]
    dtype = BF16 if name == "bf16" else torch.float32
    return trace(seeded(build), batch(0, 0, 0, *shape).to(dtype), table=table)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, table: str) -> None:
    _, _, fused, bound = MODULES[name]
    traced = traced_module(name, table)
    for dense in (False, True):
        gm = check_overwrite(Buffers(traced, dense=dense), fused=fused)
        assert len(find(gm, aten.mm.default)) == len(find(traced.backward, aten.mm.default)) - fused
        # See above: the product for a misaligned place may differ in rounding.
        check_accumulate(Buffers(traced, dense=dense), fused=fused, bound=max(bound, FP32_BOUND * dense))


@pytest.mark.parametrize("table", TABLES)
def test_every_matrix_of_an_mlp(table: str) -> None:
    buffers = Buffers(traced_mlp(table))
    gm = check_overwrite(buffers, fused=3)
    assert len(find(buffers.traced.backward, aten.mm.default)) == 5
    assert len(find(gm, aten.mm.default)) == 2, "the products for the inputs of fc2 and fc3 stay"
    written = [node.args[0] for node in find(gm, accumulate_wgrad_)]
    views = main_grad_nodes(gm)
    # fc3, fc2, fc1 in the order of the backward, each where its product was.
    assert written == [views[buffers.handle, index] for index in (5, 2, 0)]
    # No copy of a matrix is left, and no transpose behind a product.
    copied = {node.args[0] for node in find(gm, aten.copy_.default)}
    assert copied == {views[buffers.handle, index] for index in (1, 3, 4, 6)}
    check_accumulate(buffers, fused=3, bound=FP32_BOUND)


@pytest.mark.parametrize("table", TABLES)
def test_bf16_parameters_with_fp32_main_grads(table: str) -> None:
    """``main_grad`` is wider than the product: bitwise, also when accumulating."""
    buffers = Buffers(traced_module("bf16", table), grad_reduce_in_fp32=True)
    assert {main_grad.dtype for main_grad in buffers.main_grads} == {torch.float32}
    check_overwrite(buffers, fused=1)
    check_accumulate(buffers, fused=1, bound=0.0)


@pytest.mark.parametrize("table", TABLES)
def test_widening_cast_goes(table: str) -> None:
    traced = traced_module("autocast", table)
    casts = {"aten._to_copy.default", "prims.convert_element_type.default"}

    def is_weight_cast(shape: tuple[int, ...], gm: GraphModule) -> list[str]:
        return [n.name for n in gm.graph.nodes if str(n.target) in casts and tuple(n.meta["val"].shape) == shape]

    assert len(is_weight_cast((4, 7), traced.backward)) == 1
    gm = check_overwrite(Buffers(traced), fused=1)
    assert is_weight_cast((4, 7), gm) == []
    (write,) = find(gm, accumulate_wgrad_)
    assert [node.meta["val"].dtype for node in write.all_input_nodes] == [torch.float32, BF16, BF16]


# Hand-made chains between product and gradient.


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    result: Tensor = aten._to_copy.default(x, dtype=dtype)
    return result


def convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    result: Tensor = torch.ops.prims.convert_element_type.default(x, dtype)
    return result


Chain = Callable[[Tensor], Tensor]
STRAIGHT: dict[str, Chain] = {
    "nothing": lambda mm: mm,
    "t_t": lambda mm: aten.t.default(aten.t.default(mm)),
    "permute_01": lambda mm: aten.permute.default(mm, [0, 1]),
    "permute_negative_01": lambda mm: aten.permute.default(mm, [-2, -1]),
    "transpose_00": lambda mm: aten.transpose.int(mm, 0, 0),
    "transpose_1_minus_1": lambda mm: aten.transpose.int(mm, 1, -1),
    "t_permute": lambda mm: aten.permute.default(aten.t.default(mm), [1, 0]),
    "cast": lambda mm: cast(mm, torch.float64),
    "convert": lambda mm: convert(mm, torch.float64),
    "t_cast_t": lambda mm: aten.t.default(cast(aten.t.default(mm), torch.float64)),
}
SWAPPED: dict[str, Chain] = {
    "t": aten.t.default,
    "permute_10": lambda mm: aten.permute.default(mm, [1, 0]),
    "permute_negative_10": lambda mm: aten.permute.default(mm, [-1, -2]),
    "transpose_01": lambda mm: aten.transpose.int(mm, 0, 1),
    "transpose_10": lambda mm: aten.transpose.int(mm, 1, 0),
    "transpose_negative": lambda mm: aten.transpose.int(mm, -1, 0),
    "three": lambda mm: aten.t.default(aten.permute.default(aten.transpose.int(mm, 0, 1), [1, 0])),
    "cast_t": lambda mm: aten.t.default(cast(mm, torch.float64)),
}
OTHER: dict[str, Chain] = {
    "scaled": lambda mm: mm * 2.0,
    "narrowed": lambda mm: cast(mm, torch.float16),
    "view": lambda mm: mm.view(-1),
    "view_after_t": lambda mm: mm.t().reshape(2, -1),
    "sum": lambda mm: mm + mm.sin(),
    "activation": torch.tanh,
    "three_dim_permute": lambda mm: aten.permute.default(mm.view(2, 2, 5), [1, 0, 2]),
}


def traced_chain(chain: Chain) -> Traced:
    factors = batch(0, 0, 0, 4, 6), batch(0, 1, 0, 6, 5)
    return trace_backward(lambda lhs, rhs: (chain(torch.mm(lhs, rhs)),), *factors)


@pytest.mark.parametrize("name", STRAIGHT)
def test_chains_that_keep_the_product_as_it_is(name: str) -> None:
    buffers = Buffers(traced_chain(STRAIGHT[name]))
    gm = check_overwrite(buffers, fused=1)
    (write,) = find(gm, accumulate_wgrad_)
    assert [node.name for node in write.all_input_nodes] == ["main_grad_0", "lhs_1", "rhs_1"]
    assert [node.op for node in gm.graph.nodes if node.op == "call_function"] == ["call_function"], "one node is left"
    check_accumulate(buffers, fused=1, bound=FP32_BOUND)


def test_cast_to_another_16_bit_type_goes() -> None:
    """Neither wider nor narrower: the same rounding happens when the product is stored."""
    factors = batch(0, 0, 0, 4, 6).to(BF16), batch(0, 1, 0, 6, 5).to(BF16)
    buffers = Buffers(trace_backward(lambda lhs, rhs: (cast(torch.mm(lhs, rhs), torch.float16),), *factors))
    check_overwrite(buffers, fused=1)
    check_accumulate(buffers, fused=1, bound=2.0**-10)


@pytest.mark.parametrize("name", SWAPPED)
def test_chains_that_transpose_the_product(name: str) -> None:
    """(a b)^T = b^T a^T: the factors are transposed, which is a view."""
    buffers = Buffers(traced_chain(SWAPPED[name]))
    gm = rewrite(buffers, accumulate=False)
    (write,) = find(gm, accumulate_wgrad_)
    assert not find(gm, aten.mm.default)
    lhs, rhs = write.args[1:3]
    assert isinstance(lhs, torch.fx.Node)
    assert isinstance(rhs, torch.fx.Node)
    assert [node.name for node in (*lhs.all_input_nodes, *rhs.all_input_nodes)] == ["rhs_1", "lhs_1"]
    assert (tuple(lhs.meta["val"].shape), tuple(rhs.meta["val"].shape)) == ((5, 6), (6, 4))
    buffers.poison()
    (result,) = run(buffers, gm)
    expected = buffers.traced.reference(0).to(result.dtype)
    # A sum of six terms, perhaps in another order.
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
    check_accumulate(buffers, fused=1, bound=FP32_BOUND)


def test_transposed_factors_lose_their_transposes() -> None:
    """(a^T b)^T = b^T a: the factor that was transposed is read as it is stored."""

    def function(lhs: Tensor, rhs: Tensor) -> tuple[Tensor, ...]:
        return (aten.t.default(torch.mm(aten.permute.default(lhs, [1, 0]), aten.transpose.int(rhs, 0, 1))),)

    buffers = Buffers(trace_backward(function, batch(0, 0, 0, 6, 4), batch(0, 1, 0, 5, 6)))
    gm = rewrite(buffers, accumulate=False)
    (write,) = find(gm, accumulate_wgrad_)
    assert [node.name for node in write.all_input_nodes] == ["main_grad_0", "rhs_1", "lhs_1"]
    assert len(list(gm.graph.nodes)) == 2 + 1 + 1 + 1, "two factors, main_grad, the write, the output"
    (result,) = run(buffers, gm)
    torch.testing.assert_close(result, buffers.traced.reference(0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", OTHER)
def test_other_chains_are_left_alone(name: str) -> None:
    buffers = Buffers(traced_chain(OTHER[name]))
    gradients = buffers.gradients
    inputs = partial(add_buffer_inputs, extras=buffers.extras(with_token=False), writes=list(gradients.values()))
    gm = apply(buffers.traced.backward, inputs)
    (grad,) = outputs(gm.graph)
    assert find_weight_grad(grad) is None
    before = text_of(gm)
    assert fuse_wgrad(gm, gradients=gradients, accumulate=False) is gm
    assert text_of(gm) == before
    check_overwrite(buffers, fused=0)
    check_accumulate(buffers, fused=0, bound=0.0)


@pytest.mark.parametrize("reader", ["other gradient", "chain"])
def test_product_with_two_readers_is_left_alone(reader: str) -> None:
    def function(lhs: Tensor, rhs: Tensor) -> tuple[Tensor, ...]:
        mm = torch.mm(lhs, rhs)
        if reader == "other gradient":
            return (aten.t.default(mm), mm.sum(0))
        transposed = aten.t.default(mm)
        return (aten.t.default(transposed), transposed.sum(0))

    buffers = Buffers(trace_backward(function, batch(0, 0, 0, 4, 6), batch(0, 1, 0, 6, 5)))
    check_overwrite(buffers, fused=0)
    check_accumulate(buffers, fused=0, bound=0.0)


@pytest.mark.parametrize("table", TABLES)
def test_gradient_shared_with_an_input_of_the_user(table: str) -> None:
    """``weight + shift``: one product is the gradient of both, and the user gets that of ``shift``."""
    shift = batch(0, 2, 0, 4, 7).requires_grad_()
    buffers = Buffers(trace(seeded(Shifted), batch(0, 0, 0, 6, 7), shift, table=table))
    check_overwrite(buffers, fused=0)


@pytest.mark.parametrize("table", TABLES)
def test_gradient_shared_by_two_parameters(table: str) -> None:
    """``left + right``: one product is the gradient of both."""
    buffers = Buffers(trace(seeded(Sum), batch(0, 0, 0, 6, 7), table=table))
    assert len(set(map(id, buffers.traced.backward_results)) - {id(None)}) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gm = rewrite(buffers, accumulate=False)
    for index, result in enumerate(run(buffers, gm)):
        assert torch.equal(result, buffers.traced.reference(index))


def test_dense_layout_writes_into_slices() -> None:
    buffers = Buffers(traced_mlp("none"), dense=True)
    gm = check_overwrite(buffers, fused=3)
    for write in find(gm, accumulate_wgrad_):
        view = write.args[0]
        assert isinstance(view, torch.fx.Node)
        assert view.target is aten.view.default
        assert view.all_input_nodes[0].all_input_nodes == [node_named(gm, "grad_data_0")]
    order = order_of(gm)
    views = [node for node in gm.graph.nodes if node in main_grad_nodes(gm).values()]
    assert max(order[view] for view in views) < min(order[write] for write in find(gm, accumulate_wgrad_))


@pytest.mark.parametrize("table", TABLES)
def test_provenance_is_that_of_the_product(table: str) -> None:
    buffers = Buffers(traced_mlp(table))
    gm = rewrite(buffers, accumulate=False)
    # A weight's gradient is the product with the shape of the weight.
    shapes = {(37, 13): "fc1", (29, 37): "fc2", (5, 29): "fc3"}
    products = {tuple(n.meta["val"].shape): n for n in find(buffers.traced.backward, aten.mm.default)}
    seq_nrs = {layer: products[shape].meta["seq_nr"] for shape, layer in shapes.items()}
    writes = find(gm, accumulate_wgrad_)
    for write, layer in zip(writes, ("fc3", "fc2", "fc1")):
        assert f"self.{layer}(" in code_line(write)
        assert write.meta["seq_nr"] == seq_nrs[layer]


@pytest.mark.parametrize("table", TABLES)
def test_module_is_that_of_the_product(table: str) -> None:
    """In a backward graph the module stands in ``fwd_nn_module_stack``."""
    gm = rewrite(Buffers(traced_mlp(table)), accumulate=False)
    modules = [
        list(node.meta.get("fwd_nn_module_stack", {"": ("unknown",)}).values()) for node in find(gm, accumulate_wgrad_)
    ]
    assert [entries[-1][0] for entries in modules] == ["L['self'].fc3", "L['self'].fc2", "L['self'].fc1"]


def test_product_of_something_else_is_refused() -> None:
    buffers = Buffers(traced_chain(STRAIGHT["nothing"]))
    gradients = buffers.gradients
    inputs = partial(add_buffer_inputs, extras=buffers.extras(with_token=False), writes=list(gradients.values()))
    gm = apply(buffers.traced.backward, inputs)
    (product,) = find(gm, aten.mm.default)
    product.args = (product.args[0], None)
    with pytest.raises(PassError, match=r"fuse_wgrad at node 'mm' .*mm of lhs_1 and None, expected two tensors"):
        fuse_wgrad(gm, gradients=gradients, accumulate=False)


def test_product_of_another_shape_is_refused() -> None:
    """``write_main_grads`` checks the shapes of what is left to it; what is fused never gets there."""
    buffers = Buffers(traced_chain(STRAIGHT["nothing"]))
    gradients = {0: dataclasses.replace(buffers.gradients[0], shape=(5, 4), name="layer.weight")}
    inputs = partial(add_buffer_inputs, extras=buffers.extras(with_token=False), writes=list(gradients.values()))
    gm = apply(buffers.traced.backward, inputs)
    with pytest.raises(PassError, match=r"fuse_wgrad at node 'mm' .*'layer.weight'"):
        fuse_wgrad(gm, gradients=gradients, accumulate=False)


def test_nothing_to_do() -> None:
    gm = copy_graph(traced_mlp("none").backward)
    before = text_of(gm)
    assert fuse_wgrad(gm, gradients={}, accumulate=False) is gm
    assert text_of(gm) == before


def test_same_graph_and_plan_give_the_same_graph() -> None:
    buffers = Buffers(traced_mlp("inductor"))
    assert len({text_of(rewrite(buffers, accumulate=True)) for _ in range(2)}) == 1
