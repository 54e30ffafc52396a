"""``passes/insert_grad_sync.py``: one launch per bucket group, behind its last write, in the order of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from graph_builders import (
    TABLES,
    Buffers,
    apply,
    code_line,
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
from megabuf_fx.passes.graph_utils import main_grad_nodes, placeholders, token_node, written_param
from megabuf_fx.passes.insert_grad_sync import find_last_writes, insert_grad_sync
from megabuf_fx.passes.write_main_grads import write_main_grads
from megabuf_fx.runtime.ops import start_grad_sync
from megabuf_fx.runtime.plan import GraphParam


class Gated(nn.Module):
    """Uses its layers in an order that is not that of definition, as the gated MLPs of Llama and Mixtral do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 8, bias=False)
        self.down = nn.Linear(8, 6, bias=False)
        self.up = nn.Linear(6, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.gate(x)) * self.up(x))
        return result


class Frozen(nn.Module):
    """``spare`` is an input of the graph but gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 4)
        self.spare = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.used(x) + self.spare.detach().sum()
        return result


def prepare(buffers: Buffers, *, fuse: bool = False, accumulate: bool = False, with_token: bool = True) -> GraphModule:
    """The backward with its gradients in buffers, but no launches."""
    gradients = buffers.gradients
    inputs = partial(add_buffer_inputs, extras=buffers.extras(with_token=with_token), writes=list(gradients.values()))
    write = partial(write_main_grads, gradients=gradients, write="accumulate" if accumulate else "overwrite")
    if not fuse:
        return apply(buffers.traced.backward, inputs, write)
    return apply(
        buffers.traced.backward, inputs, partial(fuse_wgrad, gradients=gradients, accumulate=accumulate), write
    )


def insert(buffers: Buffers, launches: Sequence[tuple[int, int]] | None = None, *, fuse: bool = False) -> GraphModule:
    chosen = buffers.launches if launches is None else launches
    return apply(prepare(buffers, fuse=fuse), partial(insert_grad_sync, launches=chosen))


def launched(gm: GraphModule) -> list[tuple[object, object]]:
    # args: (main_grads, token, handle, group)
    return [(node.args[2], node.args[3]) for node in find(gm, start_grad_sync)]


def writes_of(gm: GraphModule, group: int) -> list[Node]:
    return [n for n in gm.graph.nodes if (param := written_param(n)) is not None and param.group == group]


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("table", TABLES)
def test_launch_stands_directly_behind_the_last_write(table: str, fuse: bool) -> None:
    buffers = Buffers(traced_mlp(table), bucket_size=200)
    assert len(buffers.launches) > 2
    gm = insert(buffers, fuse=fuse)
    assert launched(gm) == list(buffers.launches)
    views = main_grad_nodes(gm)
    order = order_of(gm)
    for launch in find(gm, start_grad_sync):
        sent, token, _, group = launch.args
        assert isinstance(group, int)
        assert isinstance(sent, list)
        assert set(sent) == {views[buffers.handle, p] for p in buffers.bucket_plan.groups[group].params}
        assert token is token_node(gm)
        assert order[launch] == 1 + max(order[write] for write in writes_of(gm, group))
        assert launch.meta["val"] is None
    assert len(gm.graph.nodes) == len(prepare(buffers, fuse=fuse).graph.nodes) + len(buffers.launches)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("table", TABLES)
def test_gradients_are_final_when_they_are_sent(table: str, accumulate: bool, dense: bool) -> None:
    """Bitwise: what the target finds in the buckets is what is in them after the backward, and what eager computes."""
    buffers = Buffers(traced_mlp(table), bucket_size=200, dense=dense)
    gm = apply(prepare(buffers, accumulate=accumulate), partial(insert_grad_sync, launches=buffers.launches))
    before = buffers.randomize()
    buffers.run_backward(gm, buffers.extras())
    assert buffers.calls == [("start_grad_sync", group) for _, group in buffers.launches]
    for group, sent in buffers.sent.items():
        for param, tensor in zip(buffers.bucket_plan.groups[group].params, sent):
            expected = buffers.traced.reference(param)
            assert torch.equal(tensor, before[param] + expected if accumulate else expected)
            assert torch.equal(tensor, buffers.main_grads[param])


@pytest.mark.parametrize("table", TABLES)
def test_text(table: str) -> None:
    """The first bucket of two leaves before the second is complete: communication overlaps the rest."""
    buffers = Buffers(traced_mlp(table), bucket_size=600)
    handle = buffers.handle
    first = "main_grad_2, main_grad_3, main_grad_4, main_grad_5, main_grad_6"
    check = FileCheck().check_not("megabuf.start_grad_sync").check("copy_.default(main_grad_2")
    check.check(f"start_grad_sync.default([{first}], megabuf_token, {handle}, 0)")
    check.check("aten.mm.default").check("copy_.default(main_grad_0")
    check.check(f"start_grad_sync.default([main_grad_0, main_grad_1], megabuf_token, {handle}, 1)").run(
        insert(buffers).code
    )


@pytest.mark.parametrize("table", TABLES)
def test_group_never_starts_before_its_predecessor(table: str) -> None:
    """The gradient of ``down``, in the second bucket, is there before that of ``up``, in the first: it waits."""
    buffers = Buffers(trace(seeded(Gated), batch(0, 0, 0, 5, 6), table=table), bucket_size=1)
    names = [buffers.traced.specs[group.params[0]].name for group in buffers.bucket_plan.groups]
    assert names == ["up.weight", "down.weight", "gate.weight"]
    gm = insert(buffers)
    order = order_of(gm)
    last = {key[1]: order[node] for key, node in find_last_writes(gm).items()}
    assert last[1] < last[0] < last[2]
    assert launched(gm) == [(buffers.handle, 0), (buffers.handle, 1), (buffers.handle, 2)]
    assert [order[node] for node in find(gm, start_grad_sync)] == [last[0] + 1, last[0] + 2, last[2] + 1]
    buffers.run_backward(gm, buffers.extras())
    assert [group for _, group in buffers.calls] == [0, 1, 2]


def test_every_order_of_writes_keeps_the_order_of_launches() -> None:
    """Gradients that come in the reverse of the plan: all launches stand at the end, in order."""

    def function(grad: Tensor) -> tuple[Tensor, ...]:
        # The last parameter's bucket is the first of the plan, and its gradient comes last here.
        return tuple(grad * (index + 1.0) for index in range(4))

    buffers = Buffers(trace_backward(function, batch(0, 0, 0, 8)), bucket_size=1)
    gm = insert(buffers)
    assert launched(gm) == [(buffers.handle, group) for group in range(4)]
    nodes = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert nodes[-4:] == [start_grad_sync] * 4
    buffers.run_backward(gm, buffers.extras())
    for group, (sent,) in buffers.sent.items():
        assert torch.equal(sent, buffers.main_grads[3 - group])


def test_group_without_gradients_is_launched_too() -> None:
    """The host zeroes its slots; leaving it out would stop the others, which wait for their predecessors."""
    buffers = Buffers(trace(seeded(Frozen), batch(0, 0, 0, 5, 6), table="none"), bucket_size=1)
    spare = buffers.bucket_plan.group_of_param[0]
    assert buffers.traced.specs[0].name == "spare"
    # Whether or not Dynamo made it an input, the launch order can name its group.
    launches = [(buffers.handle, group) for group in range(3)]
    gm = insert(buffers, launches)
    assert launched(gm) == launches
    node = find(gm, start_grad_sync)[spare]
    assert node.args[0] == []
    buffers.run_backward(gm, buffers.extras())
    assert [group for _, group in buffers.calls] == [0, 1, 2]


def test_only_what_is_asked_for_is_launched() -> None:
    buffers = Buffers(traced_mlp("none"), bucket_size=200)
    chosen = buffers.launches[1::2]
    gm = insert(buffers, chosen)
    assert launched(gm) == list(chosen)
    buffers.run_backward(gm, buffers.extras())
    assert set(buffers.sent) == {group for _, group in chosen}


def test_dense_layout_names_the_whole_buffer() -> None:
    buffers = Buffers(traced_mlp("none"), bucket_size=200, dense=True)
    gm = insert(buffers)
    whole = placeholders(gm.graph)[-2]
    assert whole.name == "grad_data_0"
    assert [node.args[0] for node in find(gm, start_grad_sync)] == [[whole]] * len(buffers.launches)


def test_gradients_that_are_inputs() -> None:
    """The write of such a gradient is the first node behind the inputs; the launch follows it."""

    def function(grad: Tensor) -> tuple[Tensor, ...]:
        return (grad, grad)

    for dense in (False, True):
        buffers = Buffers(trace_backward(function, batch(0, 0, 0, 8)), bucket_size=1, dense=dense)
        gm = insert(buffers)
        buffers.run_backward(gm, buffers.extras())
        for group, (sent,) in buffers.sent.items():
            assert torch.equal(sent, buffers.traced.reference(1 - group))


def test_launches_survive_dead_code_elimination() -> None:
    buffers = Buffers(traced_mlp("none"), bucket_size=200)
    gm = insert(buffers)
    gm.graph.eliminate_dead_code()
    assert launched(gm) == list(buffers.launches)


def test_provenance_is_that_of_the_last_write() -> None:
    buffers = Buffers(traced_mlp("none"), bucket_size=600)
    lines = [code_line(node) for node in find(insert(buffers, fuse=True), start_grad_sync)]
    assert "self.fc2(" in lines[0]
    assert "self.fc1(" in lines[1]


def test_missing_token_is_refused() -> None:
    buffers = Buffers(traced_mlp("none"), bucket_size=600)
    gm = prepare(buffers, with_token=False)
    with pytest.raises(PassError, match=rf"insert_grad_sync: launches \(\({buffers.handle}, 0\), .* no token input"):
        insert_grad_sync(gm, launches=buffers.launches)


def test_nothing_to_do() -> None:
    gm = prepare(Buffers(traced_mlp("none")))
    before = text_of(gm)
    assert insert_grad_sync(gm, launches=()) is gm
    assert text_of(gm) == before


def test_same_graph_and_plan_give_the_same_graph() -> None:
    buffers = Buffers(traced_mlp("inductor"), bucket_size=200)
    assert len({text_of(insert(buffers)) for _ in range(2)}) == 1


def test_find_last_writes() -> None:
    buffers = Buffers(traced_mlp("none"), bucket_size=600)
    gm = prepare(buffers)
    order = order_of(gm)
    found = find_last_writes(gm)
    assert set(found) == set(buffers.launches)
    for (_, group), node in found.items():
        assert order[node] == max(order[write] for write in writes_of(gm, group))
        assert isinstance(written_param(node), GraphParam)
