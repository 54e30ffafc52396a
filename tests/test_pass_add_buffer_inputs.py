"""``passes/add_buffer_inputs.py``: which inputs a graph gets, in which order, and what stands on them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from graph_builders import TABLES, Buffers, apply, copy_graph, find, order_of, text_of, trace, traced_mlp
from helpers import batch, seeded
from torch import Tensor, nn
from torch.fx import GraphModule

from megabuf_fx.passes.add_buffer_inputs import ExtraInput, add_buffer_inputs, extra_inputs
from megabuf_fx.passes.graph_utils import MAIN_GRAD, TOKEN, aten, main_grad_nodes, placeholders, token_node

CPU = torch.device("cpu")


class Mixed(nn.Module):
    """Parameters of two dtypes, so of two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(5, 3, dtype=torch.bfloat16)
        self.high = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.high(self.low(x.bfloat16()).float())
        return result


def with_inputs(buffers: Buffers, extras: tuple[ExtraInput, ...]) -> GraphModule:
    writes = list(buffers.gradients.values())
    return apply(buffers.traced.backward, partial(add_buffer_inputs, extras=extras, writes=writes))


@pytest.mark.parametrize("table", TABLES)
def test_one_input_per_parameter_then_the_token(table: str) -> None:
    buffers = Buffers(traced_mlp(table), bucket_size=600)
    extras = buffers.extras()
    gm = with_inputs(buffers, extras)
    old = [node.name for node in placeholders(buffers.traced.backward.graph)]
    names = [node.name for node in placeholders(gm.graph)]
    assert names == [*old, *(f"main_grad_{i}" for i in range(7)), "megabuf_token"]
    added = placeholders(gm.graph)[len(old) :]
    for node, extra in zip(added, extras):
        value = node.meta["val"]
        assert (tuple(value.shape), value.dtype, value.device) == (extra.shape, extra.dtype, extra.device)
        assert value.fake_mode is placeholders(gm.graph)[0].meta["val"].fake_mode
    assert [node.meta.get(MAIN_GRAD) for node in added] == [*buffers.gradients.values(), None]
    assert [TOKEN in node.meta for node in added] == [False] * 7 + [True]
    assert token_node(gm) is added[-1]
    assert main_grad_nodes(gm) == {(buffers.handle, index): node for index, node in enumerate(added[:-1])}


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("table", TABLES)
def test_results_stay(table: str, dense: bool) -> None:
    """Bitwise: the buffers are only handed in."""
    buffers = Buffers(traced_mlp(table), dense=dense)
    extras = buffers.extras()
    results = buffers.run_backward(with_inputs(buffers, extras), extras)
    for result, expected in zip(results, buffers.traced.backward_results):
        assert (result is None and expected is None) or torch.equal(result, expected)


@pytest.mark.parametrize("table", TABLES)
def test_dense_layout_takes_the_buffer_and_slices_it(table: str) -> None:
    buffers = Buffers(traced_mlp(table), dense=True, bucket_size=600)
    extras = buffers.extras()
    numel = buffers.grad_data[0].numel()
    assert extras == (
        ExtraInput("grad_data", buffers.handle, 0, (numel,), (1,), torch.float32, CPU),
        ExtraInput("token", buffers.handle, 0, (1,), (1,), torch.float32, CPU),
    )
    gm = with_inputs(buffers, extras)
    whole, token = placeholders(gm.graph)[-2:]
    assert (whole.name, token.name) == ("grad_data_0", "megabuf_token")
    assert MAIN_GRAD not in whole.meta
    assert len(find(gm, aten.slice.Tensor)) == len(whole.users) == 7
    order = order_of(gm)
    views = main_grad_nodes(gm)
    assert len(views) == 7
    for (_, index), view in views.items():
        (piece,) = view.all_input_nodes
        slot = buffers.bucket_plan.locations[index][1]
        assert piece.args == (whole, 0, slot.start, slot.end)
        assert tuple(view.meta["val"].shape) == buffers.traced.specs[index].shape
        assert order[token] < order[piece] < order[view]
    # Nothing of the graph itself comes before the views: any node can write into them.
    first = next(node for node in gm.graph.nodes if node.op == "call_function" and node.target is not aten.slice.Tensor)
    assert MAIN_GRAD in first.meta
    last_view = max(order[view] for view in views.values())
    assert last_view == len(placeholders(gm.graph)) + 2 * 7 - 1


def test_dense_views_are_those_of_the_buffer() -> None:
    buffers = Buffers(traced_mlp("none"), dense=True)
    extras = buffers.extras(with_token=False)
    gm = with_inputs(buffers, extras)
    gm.graph.output_node().args = (tuple(main_grad_nodes(gm)[buffers.handle, index] for index in range(7)),)
    gm.recompile()
    for view, expected in zip(buffers.run_backward(gm, extras), buffers.main_grads):
        assert (view.data_ptr(), view.shape, view.stride()) == (expected.data_ptr(), expected.shape, expected.stride())


@pytest.mark.parametrize("dense", [False, True])
def test_two_buffers(dense: bool) -> None:
    buffers = Buffers(trace(seeded(Mixed), batch(0, 0, 0, 4, 5), table="none"), dense=dense)
    extras = buffers.extras()
    kinds = [(extra.kind, extra.index, extra.dtype) for extra in extras]
    low, high = torch.bfloat16, torch.float32
    if dense:
        assert kinds == [("grad_data", 0, low), ("grad_data", 1, high), ("token", 0, high)]
    else:
        parts = [("main_grad", 0, low), ("main_grad", 1, low), ("main_grad", 2, high), ("main_grad", 3, high)]
        assert kinds == [*parts, ("token", 0, high)]
    nodes = main_grad_nodes(with_inputs(buffers, extras))
    assert [nodes[buffers.handle, index].meta["val"].dtype for index in range(4)] == [low, low, high, high]


def test_forward_takes_the_token_alone() -> None:
    buffers = Buffers(traced_mlp("none"))
    gm = apply(buffers.traced.forward, partial(add_buffer_inputs, extras=(buffers.token_input,), writes=()))
    assert [node.name for node in placeholders(gm.graph)][-2:] == ["primals_8", "megabuf_token"]
    assert main_grad_nodes(gm) == {}
    assert token_node(gm) is placeholders(gm.graph)[-1]


def test_two_models_share_one_token() -> None:
    """A graph over two attached models: its collectives are ordered by one token, that of the first."""
    traced = traced_mlp("none")
    one, two = Buffers(traced), Buffers(traced)
    half = list(one.gradients.values())[:3], list(two.gradients.values())[3:]
    extras = extra_inputs([*half[0], *half[1]], buffer_numels={}, device=CPU, with_token=True)
    assert [(extra.kind, extra.handle, extra.index) for extra in extras] == [
        *(("main_grad", one.handle, index) for index in range(3)),
        *(("main_grad", two.handle, index) for index in range(3, 7)),
        ("token", one.handle, 0),
    ]
    gm = apply(traced.backward, partial(add_buffer_inputs, extras=extras, writes=[*half[0], *half[1]]))
    assert set(main_grad_nodes(gm)) == {(one.handle, i) for i in range(3)} | {(two.handle, i) for i in range(3, 7)}


def test_no_token_without_launches_or_writes() -> None:
    buffers = Buffers(traced_mlp("none"))
    assert [extra.kind for extra in buffers.extras(with_token=False)] == ["main_grad"] * 7
    assert extra_inputs([], buffer_numels={}, device=CPU, with_token=True) == ()


def test_nothing_to_do() -> None:
    gm = copy_graph(traced_mlp("none").backward)
    before = text_of(gm)
    assert add_buffer_inputs(gm, extras=(), writes=()) is gm
    assert text_of(gm) == before


def test_same_graph_and_plan_give_the_same_graph() -> None:
    buffers = Buffers(traced_mlp("inductor"), dense=True)
    texts = {text_of(with_inputs(buffers, buffers.extras())) for _ in range(2)}
    assert len(texts) == 1
