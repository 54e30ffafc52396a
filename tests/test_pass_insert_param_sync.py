"""``passes/insert_param_sync.py``: waits for gathered parameters ahead of their first use. Results stay bitwise."""

from __future__ import annotations

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
    traced_mlp,
)
from helpers import batch, seeded
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.testing import FileCheck

from megabuf_fx.passes.add_buffer_inputs import add_buffer_inputs
from megabuf_fx.passes.contract import PassError
from megabuf_fx.passes.graph_utils import PARAM, output_node, placeholders, token_node
from megabuf_fx.passes.insert_param_sync import find_group_params, insert_param_sync
from megabuf_fx.passes.locate_params import locate_params
from megabuf_fx.runtime.ops import wait_param_sync


class Saved(nn.Module):
    """``weight`` is read late, ``scale`` only by the backward of a product with a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale) * self.weight


class Gathering(Buffers):
    """Parameters hold NaN until their group has been waited for."""

    def __init__(self, traced: Traced, *, bucket_size: int | None) -> None:
        super().__init__(traced, bucket_size=bucket_size, sharded=True)
        self.arguments = [x.detach().clone() if isinstance(x, Tensor) else x for x in traced.forward_args]
        for position, index in enumerate(traced.inputs):
            if index is not None:
                self.arguments[position].fill_(torch.nan)

    def wait_param_sync(self, group: int) -> None:
        super().wait_param_sync(group)
        for position, index in enumerate(self.traced.inputs):
            if index is not None and self.bucket_plan.group_of_param[index] == group:
                self.arguments[position].copy_(self.traced.forward_args[position])

    @torch.no_grad()
    def run(self, gm: GraphModule) -> tuple[Tensor, ...]:
        return tuple(gm(*self.arguments, self.token))


def prepare(buffers: Buffers) -> GraphModule:
    return apply(
        buffers.traced.forward,
        partial(locate_params, plan=buffers.plan),
        partial(add_buffer_inputs, extras=(buffers.token_input,), writes=()),
    )


def insert(buffers: Buffers) -> GraphModule:
    return apply(prepare(buffers), insert_param_sync)


def group_of(wait: Node) -> int:
    # args: (params, token, handle, group)
    group = wait.args[3]
    assert isinstance(group, int)
    return group


@pytest.mark.parametrize("bucket_size", [None, 600, 200, 1])
@pytest.mark.parametrize("table", TABLES)
def test_one_wait_per_group_before_its_first_use(table: str, bucket_size: int | None) -> None:
    buffers = Buffers(traced_mlp(table), sharded=True, bucket_size=bucket_size)
    gm = insert(buffers)
    waits = find(gm, wait_param_sync)
    assert sorted(map(group_of, waits)) == list(range(len(buffers.bucket_plan.groups)))
    order = order_of(gm)
    inputs = {p.param: node for node in placeholders(gm.graph) if (p := node.meta.get(PARAM)) is not None}
    for wait in waits:
        named, token, handle, group = wait.args
        assert isinstance(named, list)
        assert isinstance(group, int)
        assert set(named) == {inputs[param] for param in buffers.bucket_plan.groups[group].params}
        assert (token, handle, wait.meta["val"]) == (token_node(gm), buffers.handle, None)
        readers = {user for node in named for user in node.users} - {wait}
        first = min(readers, key=lambda node: order[node])
        # Directly before it, but for waits of other groups that the same node reads.
        between = [node for node in gm.graph.nodes if order[wait] < order[node] < order[first]]
        assert {node.target for node in between} <= {wait_param_sync}
    assert len(gm.graph.nodes) == len(prepare(buffers).graph.nodes) + len(waits)


@pytest.mark.parametrize("bucket_size", [None, 600, 1])
@pytest.mark.parametrize("table", TABLES)
def test_every_read_sees_gathered_parameters(table: str, bucket_size: int | None) -> None:
    buffers = Gathering(traced_mlp(table), bucket_size=bucket_size)
    results = buffers.run(insert(buffers))
    assert len(buffers.calls) == len(buffers.bucket_plan.groups)
    for result, expected in zip(results, buffers.traced.forward_results, strict=True):
        assert torch.equal(result, expected)
    # The test can fail: without waits the result is NaN.
    assert Gathering(traced_mlp(table), bucket_size=bucket_size).run(prepare(buffers))[0].isnan().all()


@pytest.mark.parametrize("table", TABLES)
def test_text(table: str) -> None:
    """The head of the model is in the last group; it runs before anything else is waited for."""
    buffers = Buffers(traced_mlp(table), sharded=True, bucket_size=600)
    handle = buffers.handle
    check = FileCheck().check_not("aten.")
    check.check(f"wait_param_sync.default([primals_1, primals_2], megabuf_token, {handle}, 1)")
    check.check("aten.addmm.default(primals_2").check("aten.tanh.default")
    names = "primals_4, primals_5, primals_6, primals_7, primals_8"
    check.check(f"wait_param_sync.default([{names}], megabuf_token, {handle}, 0)")
    check.check_not("torch.ops.megabuf").run(insert(buffers).code)


@pytest.mark.parametrize("table", TABLES)
def test_saving_for_backward_is_a_use(table: str) -> None:
    """An output can be a parameter itself; here that is not its first use, so the wait stands before the other."""
    traced = trace(seeded(Saved), batch(0, 0, 0, 4, 6), table=table)
    buffers = Gathering(traced, bucket_size=1)
    results = buffers.run(insert(buffers))
    assert len(buffers.calls) == 2
    for result, expected in zip(results, traced.forward_results, strict=True):
        assert torch.equal(result, expected)


def test_output_alone_is_a_use() -> None:
    buffers = Buffers(traced_mlp("none"), sharded=True, bucket_size=1)
    gm = prepare(buffers)
    unused = placeholders(gm.graph)[0]
    for user in list(unused.users):
        user.replace_input_with(unused, placeholders(gm.graph)[6])
    (values,) = output_node(gm.graph).args
    assert isinstance(values, tuple)
    output_node(gm.graph).args = ((*values, unused),)
    gm = apply(gm, insert_param_sync)
    (wait,) = [node for node in find(gm, wait_param_sync) if node.args[0] == [placeholders(gm.graph)[0]]]
    assert wait.next is output_node(gm.graph)


def test_unused_parameters_are_not_waited_for() -> None:
    """Their gather is started and finished by the host; a wait in the graph would have no reason."""
    buffers = Buffers(traced_mlp("none"), sharded=True, bucket_size=1)
    gm = prepare(buffers)
    unused, other = placeholders(gm.graph)[4:6]
    for user in list(unused.users):
        user.replace_input_with(unused, other)
    groups = find_group_params(gm)
    assert len(groups) == len(buffers.bucket_plan.groups) - 1
    gm = apply(gm, insert_param_sync)
    assert {(buffers.handle, group_of(wait)) for wait in find(gm, wait_param_sync)} == set(groups)


def test_waits_survive_dead_code_elimination() -> None:
    gm = insert(Buffers(traced_mlp("none"), sharded=True, bucket_size=1))
    count = len(find(gm, wait_param_sync))
    gm.graph.eliminate_dead_code()
    assert len(find(gm, wait_param_sync)) == count > 1


def test_provenance_is_that_of_the_first_use() -> None:
    waits = find(insert(Buffers(traced_mlp("none"), sharded=True, bucket_size=600)), wait_param_sync)
    assert "self.fc1(" in code_line(waits[0])
    assert "self.fc2(" in code_line(waits[1])


def test_missing_token_is_refused() -> None:
    buffers = Buffers(traced_mlp("none"), sharded=True, bucket_size=600)
    gm = apply(buffers.traced.forward, partial(locate_params, plan=buffers.plan))
    with pytest.raises(
        PassError, match=rf"insert_param_sync: waits for groups \[\({buffers.handle}, 0\), .*no token input"
    ):
        insert_param_sync(gm)


def test_nothing_to_do() -> None:
    gm = copy_graph(traced_mlp("none").forward)
    before = text_of(gm)
    assert insert_param_sync(gm) is gm
    assert text_of(gm) == before


def test_same_graph_and_plan_give_the_same_graph() -> None:
    buffers = Buffers(traced_mlp("inductor"), sharded=True, bucket_size=200)
    assert len({text_of(insert(buffers)) for _ in range(2)}) == 1
