"""``pipeline.py``: all passes together, against the untouched graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from graph_builders import TABLES, Buffers, copy_graph, find, text_of, trace, traced_mlp
from helpers import batch, seeded
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.node import map_arg
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from megabuf_fx.dump import GraphDump
from megabuf_fx.passes import fuse_embedding_grad, insert_grad_sync
from megabuf_fx.passes.contract import GraphPass, PassError, validate_order
from megabuf_fx.passes.graph_utils import aten, output_node, outputs, placeholders
from megabuf_fx.pipeline import Step, backward_passes, forward_passes, run_passes
from megabuf_fx.runtime.ops import accumulate_wgrad_, start_grad_sync, wait_param_sync
from megabuf_fx.runtime.plan import GraphPlan, Role


class Block(nn.Module):
    """Attention-free transformer block: products of every kind, norms, a residual and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 24, bias=False)
        self.mixer = nn.Parameter(torch.randn(24, 8))
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        result: Tensor = x + torch.nn.functional.gelu(self.up(self.norm(x))) @ self.mixer * self.scale
        # The head is the embedding: that weight is used twice.
        return result @ self.embed.weight.t()


class Recording(GraphDump):
    """Keeps the names in the order in which graphs are written."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.texts: list[str] = []

    def write_graph(self, gm: GraphModule, name: str) -> None:
        self.names.append(name)
        self.texts.append(text_of(gm))


def rewrite(buffers: Buffers, role: Role, *, fuse: bool = True) -> GraphModule:
    extras = buffers.extras(with_token=bool(role.launches))
    steps = backward_passes(buffers.gradients, role=role, extras=extras, fuse=fuse)
    return run_passes(copy_graph(buffers.traced.backward), steps, dump=GraphDump())


def names(steps: Sequence[Step]) -> list[str]:
    return [contract.name for contract, _ in steps]


def test_order_of_passes() -> None:
    buffers = Buffers(traced_mlp("none"), bucket_size=600)
    locate, token = "locate_params", (buffers.token_input,)
    assert names(forward_passes(buffers.plan, extras=())) == [locate]
    waiting = [locate, "add_buffer_inputs", "insert_param_sync", "verify_forward"]
    assert names(forward_passes(buffers.plan, extras=token)) == waiting
    role = Role("overwrite", buffers.launches)
    fusions = ["fuse_embedding_grad", "fuse_wgrad"]
    backward = ["add_buffer_inputs", *fusions, "write_main_grads", "insert_grad_sync", "verify_backward"]
    for fuse in (True, False):
        steps = backward_passes(buffers.gradients, role=role, extras=buffers.extras(), fuse=fuse)
        assert names(steps) == [name for name in backward if fuse or name not in fusions]
        validate_order([contract for contract, _ in steps])
        # What can change rounding are the passes that can be switched off, and no other.
        assert [contract.name for contract, _ in steps if not contract.preserves_numerics] == fusions * fuse


@pytest.mark.parametrize("launching", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("model", ["mlp", "block"])
@pytest.mark.parametrize("table", TABLES)
def test_every_role(table: str, model: str, dense: bool, fuse: bool, launching: bool) -> None:
    """Bitwise that of the untouched graph, but for two things that fused products do: accumulating rounds once less,
    and in the dense layout MKL adds in another order where the output is misaligned."""
    traced = traced_mlp(table)
    if model == "block":
        traced = trace(seeded(Block), torch.arange(10).view(2, 5), table=table)
    buffers = Buffers(traced, bucket_size=200, dense=dense)
    launches = buffers.launches if launching else ()
    for accumulate in (False, True):
        gm = rewrite(buffers, Role("accumulate" if accumulate else "overwrite", launches), fuse=fuse)
        buffers.poison()
        before = buffers.randomize()
        buffers.calls.clear()
        results = buffers.run_backward(gm, buffers.extras(with_token=launching))
        assert set(results) == {None}
        for index, (main_grad, start) in enumerate(zip(buffers.main_grads, before)):
            expected = start + traced.reference(index) if accumulate else traced.reference(index)
            if not fuse or not (accumulate or dense):
                assert torch.equal(main_grad, expected), traced.specs[index].name
            else:
                torch.testing.assert_close(main_grad, expected, rtol=1e-5, atol=1e-5)
        assert buffers.calls == [("start_grad_sync", group) for _, group in launches]
        buffers.assert_padding_is_untouched()
        for group, sent in buffers.sent.items():
            for param, tensor in zip(buffers.bucket_plan.groups[group].params, sent):
                assert not launching or torch.equal(tensor, buffers.main_grads[param])


@pytest.mark.parametrize("table", TABLES)
def test_what_a_step_no_longer_does(table: str) -> None:
    """No gradient leaves the graph, no matrix is copied, no memory is zeroed, one launch per bucket."""
    buffers = Buffers(traced_mlp(table), bucket_size=600)
    gm = rewrite(buffers, Role("overwrite", buffers.launches))
    assert outputs(gm.graph) == [None] * 8
    assert len(find(gm, start_grad_sync)) == 2
    assert len(find(gm, accumulate_wgrad_)) == 3
    for write in find(gm, aten.copy_.default):
        assert write.args[0].meta["val"].dim() == 1  # type: ignore[union-attr]
    assert not find(gm, aten.zero_.default)
    assert not find(gm, aten.add.Tensor) or table == "inductor"


@pytest.mark.parametrize("table", TABLES)
def test_untouched_role_is_the_traced_graph(table: str) -> None:
    buffers = Buffers(traced_mlp(table))
    assert backward_passes(buffers.gradients, role=Role(None), extras=(), fuse=True) == []
    assert backward_passes({}, role=Role("overwrite", buffers.launches), extras=(), fuse=True) == []
    gm = run_passes(copy_graph(buffers.traced.backward), [], dump=GraphDump())
    assert text_of(gm) == text_of(buffers.traced.backward)
    for result, expected in zip(buffers.run_backward(gm, ()), buffers.traced.backward_results):
        assert (result is None and expected is None) or torch.equal(result, expected)


@pytest.mark.parametrize("table", TABLES)
def test_forward(table: str) -> None:
    """Results are bitwise those of the untouched graph; every group is waited for once, head of the model first."""
    buffers = Buffers(traced_mlp(table), sharded=True, bucket_size=600)
    for extras in ((), (buffers.token_input,)):
        gm = run_passes(
            copy_graph(buffers.traced.forward), forward_passes(buffers.plan, extras=extras), dump=GraphDump()
        )
        results = buffers.run_forward(gm, extras)
        for result, expected in zip(results, buffers.traced.forward_results, strict=True):
            assert torch.equal(result, expected)
        assert len(find(gm, wait_param_sync)) == 2 * len(extras)
    assert buffers.calls == [("wait_param_sync", 1), ("wait_param_sync", 0)]


@pytest.mark.parametrize("table", TABLES)
def test_symbolic_sizes(table: str) -> None:
    """Sizes are inputs that shift the parameters, and their gradient is None. Bitwise, as above."""
    traced = trace(seeded(Block), torch.arange(10).view(2, 5), table=table, dynamic=True)
    symbols = [n for n in placeholders(traced.forward.graph) if isinstance(n.meta["val"], torch.SymInt)]
    assert symbols
    buffers = Buffers(traced, bucket_size=200, sharded=True)
    forward = forward_passes(buffers.plan, extras=(buffers.token_input,))
    gm = run_passes(copy_graph(traced.forward), forward, dump=GraphDump())
    results = buffers.run_forward(gm, (buffers.token_input,))
    for result, expected in zip(results, traced.forward_results, strict=True):
        assert torch.equal(result, expected) if isinstance(result, Tensor) else result == expected
    gm = rewrite(buffers, Role("overwrite", buffers.launches))
    assert set(buffers.run_backward(gm, buffers.extras())) == {None}
    for index, main_grad in enumerate(buffers.main_grads):
        assert torch.equal(main_grad, traced.reference(index)), traced.specs[index].name


def storages(value: object) -> set[StorageWeakRef]:
    """The storages in a (nested) value."""
    return {StorageWeakRef(x.untyped_storage()) for x in tree_leaves(value) if isinstance(x, Tensor)}


def find_wrong_values(gm: GraphModule, old: set[str]) -> Iterator[str]:
    """New nodes whose ``meta["val"]`` is not what their op gives on fake tensors."""
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.name in old:
            continue
        args = map_arg(node.args, lambda source: source.meta["val"])
        with placeholders(gm.graph)[0].meta["val"].fake_mode:
            expected = node.target(*args)
        value = node.meta.get("val", "nothing")
        if not isinstance(expected, Tensor) or not isinstance(value, Tensor):
            if value is not expected:
                yield f"{node.name} has {value}, expected {expected}"
            continue
        found, right = ((x.shape, x.stride(), x.dtype, x.device) for x in (value, expected))
        if found != right:
            yield f"{node.name} has {found}, expected {right}"
        shares = bool(storages(expected) & storages(args))
        if bool(storages(value) & storages(args)) != shares:
            yield f"{node.name} shares storage with what it reads: {not shares}, expected {shares}"


@pytest.mark.parametrize("accumulate", [False, True])
def test_values_of_new_nodes_are_right(accumulate: bool) -> None:
    """Inductor plans memory and aliases from them."""
    for table in TABLES:
        for dense in (False, True):
            buffers = Buffers(traced_mlp(table), bucket_size=600, dense=dense)
            gm = rewrite(buffers, Role("accumulate" if accumulate else "overwrite", buffers.launches))
            old = {node.name for node in buffers.traced.backward.graph.nodes}
            assert list(find_wrong_values(gm, old)) == []


def test_every_step_is_dumped() -> None:
    buffers = Buffers(traced_mlp("none"), bucket_size=600)
    dump = Recording()
    role = Role("accumulate", buffers.launches)
    steps = backward_passes(buffers.gradients, role=role, extras=buffers.extras(), fuse=True)
    gm = run_passes(copy_graph(buffers.traced.backward), steps, dump=dump)
    assert dump.names == ["traced", *names(steps)]
    assert dump.texts[0] == text_of(buffers.traced.backward)
    assert len(set(dump.texts)) == 5, "each pass but the verifier changes this graph"
    assert dump.texts[-1] == dump.texts[-2] == text_of(gm)


def test_contracts_are_checked_before_anything_runs() -> None:
    buffers = Buffers(traced_mlp("none"), bucket_size=600)
    role = Role("overwrite", buffers.launches)
    steps = backward_passes(buffers.gradients, role=role, extras=buffers.extras(), fuse=True)
    gm = copy_graph(buffers.traced.backward)
    dump = Recording()
    with pytest.raises(ValueError, match=rf"pass {fuse_embedding_grad.PASS.name} requires \['buffers'\]"):
        run_passes(gm, steps[1:], dump=dump)
    with pytest.raises(ValueError, match=rf"pass {insert_grad_sync.PASS.name} requires \['main_grads_written'\]"):
        run_passes(gm, [steps[0], steps[4]], dump=dump)
    assert dump.names == []
    assert text_of(gm) == text_of(buffers.traced.backward)


def test_graph_is_checked_after_each_pass() -> None:
    def spoil(gm: GraphModule) -> GraphModule:
        # Moves an input behind its readers.
        output_node(gm.graph).prepend(placeholders(gm.graph)[0])
        return gm

    dump = Recording()
    steps = [(GraphPass(name="spoil"), spoil), (GraphPass(name="never"), spoil)]
    with pytest.raises(RuntimeError, match=r"before it has been defined|was used before"):
        run_passes(copy_graph(traced_mlp("none").backward), steps, dump=dump)
    assert "never" not in dump.names


def test_errors_of_passes_come_through() -> None:
    traced = traced_mlp("none")
    with pytest.raises(PassError, match="pass locate_params: the graph has 8 inputs, the traced model 0"):
        run_passes(copy_graph(traced.forward), forward_passes(GraphPlan((), ()), extras=()), dump=GraphDump())


def test_result_is_compiled() -> None:
    """``run_passes`` recompiles, so that the module runs what its graph says."""
    buffers = Buffers(traced_mlp("none"), bucket_size=600)
    gm = rewrite(buffers, Role("overwrite", buffers.launches))
    code = gm.code
    gm.recompile()
    assert gm.code == code


def test_same_graph_and_plan_give_the_same_graph() -> None:
    buffers = Buffers(traced_mlp("inductor"), bucket_size=200)
    role = Role("accumulate", buffers.launches)
    assert len({text_of(rewrite(buffers, role)) for _ in range(2)}) == 1


def test_identical_layers_keep_identical_code() -> None:
    """One input per parameter, no offsets in the graph: layers of equal shape are rewritten to equal nodes."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layers(x)
            return result

    buffers = Buffers(trace(seeded(Stack), batch(0, 0, 0, 5, 6), table="none"), bucket_size=1)
    gm = rewrite(buffers, Role("overwrite", buffers.launches))
    writes = find(gm, accumulate_wgrad_)
    assert len(writes) == 4
    assert {write.args[3] for write in writes} == {False}
    assert not find(gm, aten.slice.Tensor)
    assert [write.next.target for write in writes] == [start_grad_sync] * 4
