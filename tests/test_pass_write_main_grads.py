"""``passes/write_main_grads.py``: gradients go into buffers. Nothing is reordered, so all numbers are bitwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import pytest
import torch
from graph_builders import (
    TABLES,
    Buffers,
    Traced,
    apply,
    code_line,
    copy_graph,
    find,
    order_of,
    text_of,
    trace,
    trace_backward,
    traced_mlp,
)
from helpers import batch, seeded
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.testing import FileCheck

from megabuf_fx.passes.add_buffer_inputs import add_buffer_inputs
from megabuf_fx.passes.contract import PassError
from megabuf_fx.passes.fuse_wgrad import fuse_wgrad
from megabuf_fx.passes.graph_utils import aten, main_grad_nodes, outputs, placeholders, written_param
from megabuf_fx.passes.write_main_grads import write_main_grads
from megabuf_fx.runtime.ops import accumulate_wgrad_
from megabuf_fx.runtime.plan import Write


class Offsets(nn.Module):
    """Gradients that are the incoming one itself (``whole``), and one that two parameters share."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.randn(4, 6))
        self.same = nn.Parameter(torch.randn(4, 6))
        self.row = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.whole + self.same + self.row


def rewrite(buffers: Buffers, *, write: Write) -> GraphModule:
    gradients = buffers.gradients
    extras = buffers.extras(with_token=False, with_flag=write == "flagged")
    return apply(
        buffers.traced.backward,
        partial(add_buffer_inputs, extras=extras, writes=list(gradients.values())),
        partial(write_main_grads, gradients=gradients, write=write),
    )


def check_numerics(traced: Traced, make: Callable[[Traced], Buffers] = Buffers) -> None:
    """Overwrite and accumulate, bitwise, in memory that holds NaN around the slots."""
    buffers = make(traced)
    extras = buffers.extras(with_token=False)
    assert set(buffers.run_backward(rewrite(buffers, write="overwrite"), extras)) <= {None}
    for index, main_grad in enumerate(buffers.main_grads):
        assert torch.equal(main_grad, traced.reference(index).to(main_grad.dtype)), traced.specs[index].name
    before = buffers.randomize()
    buffers.run_backward(rewrite(buffers, write="accumulate"), extras)
    for index, (main_grad, start) in enumerate(zip(buffers.main_grads, before)):
        assert torch.equal(main_grad, start + traced.reference(index)), traced.specs[index].name
    buffers.assert_padding_is_untouched()


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("table", TABLES)
def test_numerics_of_an_mlp(table: str, dense: bool) -> None:
    check_numerics(traced_mlp(table), partial(Buffers, dense=dense, bucket_size=600))


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("table", TABLES)
def test_numerics_of_bf16_parameters(table: str, fp32: bool) -> None:
    traced = trace(seeded(lambda: nn.Linear(7, 4, dtype=torch.bfloat16)), batch(0, 0, 0, 6, 7).bfloat16(), table=table)
    check_numerics(traced, partial(Buffers, grad_reduce_in_fp32=fp32))


@pytest.mark.parametrize("table", TABLES)
def test_numerics_of_gradients_that_are_inputs_or_shared(table: str) -> None:
    traced = trace(seeded(Offsets), batch(0, 0, 0, 4, 6), table=table)
    whole, same = (outputs(traced.backward.graph)[traced.inputs.index(index)] for index in (0, 1))
    assert whole is same
    assert whole.op == "placeholder"
    check_numerics(traced)
    check_numerics(traced, partial(Buffers, dense=True))


@pytest.mark.parametrize("table", TABLES)
def test_overwrite_is_a_copy_behind_the_gradient(table: str) -> None:
    buffers = Buffers(traced_mlp(table))
    gm = rewrite(buffers, write="overwrite")
    check_writes(buffers, gm)
    views = main_grad_nodes(gm)
    for write in find(gm, aten.copy_.default):
        # args: copy_(self, src)
        assert write.args[1] not in views.values()
    assert len(gm.graph.nodes) == len(buffers.traced.backward.graph.nodes) + 7 + 7
    FileCheck().check_not("aten.add.Tensor(main_grad").check_count("aten.copy_.default", 7, exactly=True).run(gm.code)


@pytest.mark.parametrize("table", TABLES)
def test_accumulate_is_a_copy_of_the_sum(table: str) -> None:
    """One in-place store under Inductor: the sum is read by the copy alone."""
    buffers = Buffers(traced_mlp(table))
    gm = rewrite(buffers, write="accumulate")
    check_writes(buffers, gm)
    order = order_of(gm)
    for write in find(gm, aten.copy_.default):
        main_grad, total = write.args
        assert isinstance(total, Node)
        assert total.target is aten.add.Tensor
        assert total.args[0] is main_grad
        assert set(total.users) == {write}
        assert order[write] == order[total] + 1
        assert isinstance(main_grad, Node)
        assert total.meta["val"].dtype == main_grad.meta["val"].dtype


def check_writes(buffers: Buffers, gm: GraphModule) -> None:
    """One write per parameter directly behind its gradient, and no bound output."""
    writes = [node for node in gm.graph.nodes if written_param(node) is not None]
    assert {written_param(node) for node in writes} == set(buffers.gradients.values())
    assert len(writes) == len(buffers.gradients) == 7
    assert outputs(gm.graph) == [None] * len(buffers.traced.inputs)
    grads = {
        param.param: outputs(buffers.traced.backward.graph)[position].name
        for position, param in buffers.gradients.items()
    }
    for write in writes:
        param = written_param(write)
        assert param is not None
        source = write
        while source.name != grads[param.param]:
            source = source.prev
            assert source.op != "placeholder"
        between = [write]
        while between[-1] is not source:
            between.append(between[-1].prev)
        assert {node.target for node in between[:-1]} <= {aten.add.Tensor, aten.copy_.default}


@pytest.mark.parametrize("table", TABLES)
def test_what_fuse_wgrad_wrote_is_left_alone(table: str) -> None:
    buffers = Buffers(traced_mlp(table))
    gradients = buffers.gradients
    gm = apply(
        buffers.traced.backward,
        partial(add_buffer_inputs, extras=buffers.extras(with_token=False), writes=list(gradients.values())),
        partial(fuse_wgrad, gradients=gradients, accumulate=False),
        partial(write_main_grads, gradients=gradients, write="overwrite"),
    )
    assert len(find(gm, accumulate_wgrad_)) == 3
    assert len(find(gm, aten.copy_.default)) == 4
    assert outputs(gm.graph) == [None] * 8


@pytest.mark.parametrize("table", TABLES)
def test_other_gradients_stay_outputs(table: str) -> None:
    """The batch requires a gradient, and ``fc2.weight`` belongs to no buffer."""
    traced = trace(seeded(lambda: nn.Linear(7, 4)), batch(0, 0, 0, 6, 7).requires_grad_(), table=table)
    buffers = Buffers(traced)
    gradients = {position: param for position, param in buffers.gradients.items() if param.name == "bias"}
    extras = [extra for extra in buffers.extras(with_token=False) if extra.index == 1]
    gm = apply(
        traced.backward,
        partial(add_buffer_inputs, extras=extras, writes=list(gradients.values())),
        partial(write_main_grads, gradients=gradients, write="overwrite"),
    )
    results = buffers.run_backward(gm, extras)
    for position, (result, expected) in enumerate(zip(results, traced.backward_results)):
        if position in gradients:
            assert result is None
        else:
            assert torch.equal(result, expected)
    assert torch.equal(buffers.main_grads[1], traced.reference(1))
    assert buffers.main_grads[0].isnan().all()


def test_inputs_stay_together() -> None:
    """A gradient that is an input is written behind the last input, views of a whole buffer included."""
    traced = trace(seeded(Offsets), batch(0, 0, 0, 4, 6), table="none")
    for dense in (False, True):
        gm = rewrite(Buffers(traced, dense=dense), write="accumulate")
        order = order_of(gm)
        inputs = placeholders(gm.graph)
        assert [order[node] for node in inputs] == list(range(len(inputs)))
        last_view = max(order[node] for node in main_grad_nodes(gm).values())
        assert all(order[write] > last_view for write in find(gm, aten.copy_.default))


@pytest.mark.parametrize("accumulate", [False, True])
def test_writes_survive_dead_code_elimination(accumulate: bool) -> None:
    buffers = Buffers(traced_mlp("none"))
    gm = rewrite(buffers, write="accumulate" if accumulate else "overwrite")
    gm.graph.eliminate_dead_code()
    assert len(find(gm, aten.copy_.default)) == 7


@pytest.mark.parametrize("table", TABLES)
def test_provenance_is_that_of_the_gradient(table: str) -> None:
    buffers = Buffers(traced_mlp(table))
    gm = rewrite(buffers, write="accumulate")
    lines = {}
    for node in find(gm, aten.copy_.default):
        param = written_param(node)
        assert param is not None
        lines[param.name] = code_line(node)
        total = node.args[1]
        assert isinstance(total, Node)
        assert code_line(total) == lines[param.name]
    assert "self.fc1(" in lines["fc1.bias"]
    assert "self.fc2(" in lines["fc2.weight"]
    for name in ("ln.weight", "ln.bias", "fc3.weight", "fc3.bias"):
        assert "self.fc3(self.ln(" in lines[name]


def test_another_shape_is_refused() -> None:
    def function(grad: Tensor) -> tuple[Tensor, ...]:
        return (grad.sin(),)

    buffers = Buffers(trace_backward(function, batch(0, 0, 0, 4, 6)))
    gradients = {0: dataclasses.replace(buffers.gradients[0], shape=(6, 4), name="layer.weight")}
    with pytest.raises(
        PassError, match=r"write_main_grads at node 'sin'.*gradient of 'layer.weight' is .*4, 6.*\(6, 4\)"
    ):
        apply(
            buffers.traced.backward,
            partial(add_buffer_inputs, extras=buffers.extras(with_token=False), writes=list(gradients.values())),
            partial(write_main_grads, gradients=gradients, write="overwrite"),
        )


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("make", [lambda: seeded(Offsets), None], ids=["offsets", "mlp"])
def test_one_graph_overwrites_or_accumulates_by_its_flag(
    table: str, make: Callable[[], nn.Module] | None, dense: bool
) -> None:
    traced = traced_mlp(table) if make is None else trace(make(), batch(0, 0, 0, 4, 6), table=table)
    buffers = Buffers(traced, dense=dense)
    gm = rewrite(buffers, write="flagged")
    assert not any(node.target is accumulate_wgrad_ for node in gm.graph.nodes)
    extras = buffers.extras(with_token=False, with_flag=True)
    assert [extra.kind for extra in extras].count("flag") == 1
    params = [param.param for param in buffers.gradients.values()]
    expected = [traced.reference(param) for param in params]
    # NaN selects as well as any number: a flag that multiplied would let it through.
    buffers.poison()
    buffers.run_backward(gm, extras)
    assert all(torch.equal(buffers.main_grads[param], grad) for param, grad in zip(params, expected))
    buffers.assert_padding_is_untouched()
    earlier = buffers.randomize()
    buffers.flag.fill_(1)
    buffers.run_backward(gm, extras)
    for param, grad in zip(params, expected):
        assert torch.equal(buffers.main_grads[param], earlier[param] + grad)
    buffers.flag.fill_(0)
    buffers.run_backward(gm, extras)
    assert all(torch.equal(buffers.main_grads[param], grad) for param, grad in zip(params, expected))


def test_a_missing_flag_is_refused() -> None:
    buffers = Buffers(traced_mlp("none"))
    gradients = buffers.gradients
    with pytest.raises(PassError, match="a flag that is not among the graph's inputs"):
        apply(
            buffers.traced.backward,
            partial(add_buffer_inputs, extras=buffers.extras(with_token=False), writes=list(gradients.values())),
            partial(write_main_grads, gradients=gradients, write="flagged"),
        )


def test_nothing_to_do() -> None:
    gm = copy_graph(traced_mlp("none").backward)
    before = text_of(gm)
    assert write_main_grads(gm, gradients={}, write="accumulate") is gm
    assert text_of(gm) == before


def test_same_graph_and_plan_give_the_same_graph() -> None:
    buffers = Buffers(traced_mlp("inductor"))
    assert len({text_of(rewrite(buffers, write="accumulate")) for _ in range(2)}) == 1
