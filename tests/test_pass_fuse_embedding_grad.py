"""``passes/fuse_embedding_grad.py``: rows that are added into ``main_grad``.

Overwriting with one table of fp32 is bitwise equal to the untouched graph: the same rows are added in the same order to
zeros. Where the rows are added to something, a product or an earlier micro-batch, each row is rounded into the sum, and
not the sum of the rows: a few dozen roundings of fp32 in another order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from embedding_models import (
    VOCAB,
    WIDTH,
    Bag,
    Indexed,
    Positions,
    Single,
    Sliced,
    Tied,
    TiedDecay,
    TiedTwice,
    Twice,
    TwoReaders,
    VocabParallel,
    tokens,
)
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
from torch.fx import GraphModule

from megabuf_fx.dump import GraphDump
from megabuf_fx.graph_nodes import describe_nodes
from megabuf_fx.passes.add_buffer_inputs import add_buffer_inputs
from megabuf_fx.passes.contract import PassError
from megabuf_fx.passes.fuse_embedding_grad import fuse_embedding_grad
from megabuf_fx.passes.graph_utils import MAIN_GRAD, aten, is_view, outputs
from megabuf_fx.passes.verify import verify_backward
from megabuf_fx.pipeline import backward_passes, run_passes
from megabuf_fx.runtime.ops import accumulate_embedding_, accumulate_wgrad_, start_grad_sync
from megabuf_fx.runtime.plan import Role, Write

BF16 = torch.bfloat16
BOUND = 2e-6
"""Of fp32 sums of a few dozen terms, relative to the largest term."""


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    lookups: int
    """Fused tables."""
    products: int = 0
    is_exact: bool = True
    """Overwriting gives the bits of the untouched graph."""
    dtype: torch.dtype = torch.int64


CASES = {
    "single": Case(Single, 1),
    "int32": Case(Single, 1, dtype=torch.int32),
    "padding": Case(lambda: Single(padding_idx=2), 1),
    "positions": Case(Positions, 2),
    "sliced": Case(Sliced, 1),
    "vocab_parallel": Case(VocabParallel, 1),
    "indexed": Case(Indexed, 1),
    "tied": Case(Tied, 1, 1, is_exact=False),
    "tied_twice": Case(TiedTwice, 2, 1, is_exact=False),
    "tied_decay": Case(TiedDecay, 1, 0, is_exact=False),
    "twice": Case(Twice, 2, is_exact=False),
}


def traced_case(name: str, table: str) -> Traced:
    case = CASES[name]
    return trace(seeded(case.build), tokens().to(case.dtype), table=table)


def rewrite(buffers: Buffers, write: Write = "overwrite", *, launching: bool = False) -> GraphModule:
    """The whole backward pipeline."""
    role = Role(write, buffers.launches if launching else ())
    extras = buffers.extras(with_token=launching, with_flag=write == "flagged")
    steps = backward_passes(buffers.gradients, role=role, extras=extras, fuse=True)
    return run_passes(copy_graph(buffers.traced.backward), steps, dump=GraphDump())


def fuse_only(buffers: Buffers) -> GraphModule:
    """The pass alone."""
    gradients = buffers.gradients
    inputs = partial(add_buffer_inputs, extras=buffers.extras(with_token=False), writes=list(gradients.values()))
    return apply(buffers.traced.backward, inputs, partial(fuse_embedding_grad, gradients=gradients, accumulate=False))


def run(buffers: Buffers, gm: GraphModule) -> list[Tensor]:
    """All ``main_grad`` after one backward; nothing comes back."""
    assert set(buffers.run_backward(gm, buffers.extras(with_token=False))) <= {None}
    buffers.assert_padding_is_untouched()
    return [main_grad.clone() for main_grad in buffers.main_grads]


def computed_tables(gm: GraphModule) -> list[str]:
    """Nodes that compute a tensor of a table's shape."""
    shapes = ((VOCAB, WIDTH), (VocabParallel.last - VocabParallel.first, WIDTH))
    return [
        node.name
        for node in gm.graph.nodes
        if node.op == "call_function"
        and isinstance(node.meta["val"], Tensor)
        and tuple(node.meta["val"].shape) in shapes
        and not is_view(node)
    ]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", CASES)
def test_overwrite(name: str, table: str) -> None:
    case, traced = CASES[name], traced_case(name, table)
    for dense in (False, True):
        buffers = Buffers(traced, dense=dense)
        gm = rewrite(buffers)
        assert (len(find(gm, accumulate_embedding_)), len(find(gm, accumulate_wgrad_))) == (case.lookups, case.products)
        if name != "tied_decay":
            assert computed_tables(gm) == []
        buffers.poison()
        for index, result in enumerate(run(buffers, gm)):
            expected = traced.reference(index)
            bound = 0.0 if case.is_exact else BOUND * expected.abs().max()
            assert (result - expected).abs().max() <= bound, traced.specs[index].name


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", CASES)
def test_accumulate(name: str, table: str) -> None:
    case, traced = CASES[name], traced_case(name, table)
    buffers = Buffers(traced)
    gm = rewrite(buffers, "accumulate")
    writes = find(gm, accumulate_embedding_)
    assert [node.args[4] for node in writes] == [True] * case.lookups
    before = buffers.randomize()
    for index, (result, start) in enumerate(zip(run(buffers, gm), before)):
        expected = start + traced.reference(index)
        assert (result - expected).abs().max() <= BOUND * expected.abs().max(), traced.specs[index].name
        # Rows that no token reads keep their bits.
        unread = (traced.reference(index) == 0).all(1)
        assert torch.equal(result[unread], start[unread])


@pytest.mark.parametrize("table", TABLES)
def test_padding_row(table: str) -> None:
    """No gradient, although its token is in the batch, and nothing of a NaN there."""
    traced = traced_case("padding", table)
    assert (tokens() == 2).any()
    buffers = Buffers(traced)
    (before,) = buffers.randomize()
    (result,) = run(buffers, rewrite(buffers, "accumulate"))
    assert torch.equal(result[2], before[2])
    (result,) = run(buffers, rewrite(buffers, "overwrite"))
    assert not result[2].any()
    (write,) = find(rewrite(buffers), accumulate_embedding_)
    # Inductor's decomposition of torch 2.11 sets these rows to zero beforehand.
    assert write.args[3] in ((2,) if table == "none" else (2, -1))


@pytest.mark.parametrize("table", TABLES)
def test_first_write_decides(table: str) -> None:
    """In the order of the graph; all others add."""
    expected = {"twice": [False, True], "tied": [True], "tied_twice": [True, True], "positions": [False, False]}
    for name, adds in expected.items():
        gm = rewrite(Buffers(traced_case(name, table)))
        assert [node.args[4] for node in find(gm, accumulate_embedding_)] == adds, name
    gm = rewrite(Buffers(traced_case("tied", table)), launching=True)
    writes = [*find(gm, accumulate_wgrad_), *find(gm, accumulate_embedding_), *find(gm, start_grad_sync)]
    places = [order_of(gm)[node] for node in writes]
    assert places == sorted(places)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("fp32", [False, True])
def test_16_bit_rows(table: str, fp32: bool) -> None:
    """The sum of the rows in fp32, and rounded once where ``main_grad`` has 16 bits."""
    traced = trace(seeded(lambda: Single(dtype=BF16)), tokens(), table=table)
    buffers = Buffers(traced, grad_reduce_in_fp32=fp32)
    gm = rewrite(buffers)
    assert len(find(gm, accumulate_embedding_)) == 1
    buffers.poison()
    (result,) = run(buffers, gm)
    assert result.dtype == (torch.float32 if fp32 else BF16)
    tangent, output = traced.backward_args[-1], traced.forward_results[0]
    rows = aten.tanh_backward(tangent, output).float()
    expected = torch.zeros(VOCAB, WIDTH).index_add_(0, tokens().flatten(), rows.flatten(0, 1))
    assert torch.equal(result, expected.to(result.dtype))


# What is left alone.


OTHER: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    # In Inductor's graph the rows are divided already; see the pass.
    "scale_grad_by_freq": (lambda: Single(scale_grad_by_freq=True), ("none",)),
    "bag": (Bag, TABLES),
    "two_readers": (TwoReaders, TABLES),
    "mlp": (lambda: nn.Linear(6, 3), TABLES),
}


@pytest.mark.parametrize("name", OTHER)
def test_others_are_left_alone(name: str) -> None:
    build, tables = OTHER[name]
    for table in tables:
        x = batch(0, 0, 0, 4, 6) if name == "mlp" else tokens()
        buffers = Buffers(trace(seeded(build), x, table=table))
        gm = rewrite(buffers)
        assert not find(gm, accumulate_embedding_)
        for index, result in enumerate(run(buffers, gm)):
            assert torch.equal(result, buffers.traced.reference(index)), buffers.traced.specs[index].name


def test_counts_that_the_graph_divides_by() -> None:
    buffers = Buffers(trace(seeded(lambda: Single(scale_grad_by_freq=True)), tokens(), table="inductor"))
    gm = rewrite(buffers)
    assert len(find(gm, accumulate_embedding_)) == 1
    assert torch.equal(run(buffers, gm)[0], buffers.traced.reference(0))


def put(rows: Tensor, x: Tensor, base: Tensor, *, accumulate: bool = True) -> Tensor:
    result: Tensor = aten.index_put.default(base, [x], rows, accumulate)
    return result


def dense(rows: Tensor, x: Tensor) -> Tensor:
    result: Tensor = aten.embedding_dense_backward.default(rows, x, VOCAB, -1, False)
    return result


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape or (VOCAB, WIDTH))


Function = Callable[[Tensor, Tensor], Tensor]
HAND_MADE: dict[str, tuple[Function, int]] = {
    # name: (gradient of rows and tokens, fused tables)
    "put": (lambda rows, x: put(rows, x, zeros()), 1),
    "cast": (lambda rows, x: dense(rows, x).double(), 1),
    "put_without_adding": (lambda rows, x: put(rows, x, zeros(), accumulate=False), 0),
    "put_into_ones": (lambda rows, x: put(rows, x, zeros() + 1), 0),
    "put_one_row_for_all": (lambda rows, x: put(rows[0, 0], x, zeros()), 0),
    "put_by_mask": (lambda rows, x: put(rows[0, 0], torch.arange(VOCAB) < 3, zeros()), 0),
    "scaled": (lambda rows, x: dense(rows, x) * 2, 0),
    "sum_with_factor": (lambda rows, x: torch.add(dense(rows, x), dense(rows, x.flip(0)), alpha=2), 0),
    "doubled": (lambda rows, x: (lambda e: e + e)(dense(rows, x)), 0),
    "broadcast_sum": (lambda rows, x: dense(rows, x) + rows[0, 0], 0),
    # Equal terms: one of them stays a table, for the verifier's sake.
    "equal_terms": (lambda rows, x: dense(rows, x) + dense(rows, x), 1),
    "three": (lambda rows, x: dense(rows, x) + (dense(rows, x.flip(0)) + dense(rows, x.flip(1))), 3),
}


@pytest.mark.parametrize("name", HAND_MADE)
def test_hand_made_gradients(name: str) -> None:
    function, fused = HAND_MADE[name]
    traced = trace_backward(lambda rows, x: (function(rows, x),), batch(0, 0, 0, 4, 6, WIDTH), tokens())
    buffers = Buffers(traced)
    gm = rewrite(buffers)
    assert len(find(gm, accumulate_embedding_)) == fused
    buffers.poison()
    (result,) = run(buffers, gm)
    torch.testing.assert_close(result, traced.reference(0).to(result.dtype), rtol=1e-6, atol=2e-6)


def test_another_memory_format_is_left_alone() -> None:
    buffers = Buffers(traced_case("single", "none"))
    gradients = {p: dataclasses.replace(param, stride=(1, VOCAB)) for p, param in buffers.gradients.items()}
    inputs = partial(add_buffer_inputs, extras=buffers.extras(with_token=False), writes=list(gradients.values()))
    gm = apply(buffers.traced.backward, inputs, partial(fuse_embedding_grad, gradients=gradients, accumulate=False))
    assert not find(gm, accumulate_embedding_)


def test_a_flag_is_left_alone() -> None:
    """Graphs of captured micro-batches choose on the device."""
    assert not find(rewrite(Buffers(traced_case("single", "none")), "flagged"), accumulate_embedding_)


def test_nothing_to_do() -> None:
    gm = copy_graph(traced_mlp("inductor").backward)
    before = text_of(gm)
    assert fuse_embedding_grad(gm, gradients={}, accumulate=False) is gm
    assert text_of(gm) == before
    gm = fuse_only(Buffers(traced_mlp("inductor")))
    assert not find(gm, accumulate_embedding_)


@pytest.mark.parametrize("table", TABLES)
def test_what_is_left_of_a_sum_stays_an_output(table: str) -> None:
    buffers = Buffers(traced_case("tied", table))
    gm = fuse_only(buffers)
    ((position, _),) = buffers.gradients.items()
    rest = outputs(gm.graph)[position]
    assert rest.target in (aten.t.default, aten.permute.default)
    (write,) = find(gm, accumulate_embedding_)
    assert code_line(write) == "return F.linear(torch.tanh(self.emb(x)), self.emb.weight)"
    assert len({text_of(rewrite(buffers)) for _ in range(2)}) == 1


def test_another_shape_is_refused() -> None:
    buffers = Buffers(traced_case("single", "none"))
    gradients = {
        position: dataclasses.replace(param, shape=(WIDTH, VOCAB), stride=(VOCAB, 1), name="layer.emb")
        for position, param in buffers.gradients.items()
    }
    inputs = partial(add_buffer_inputs, extras=buffers.extras(with_token=False), writes=list(gradients.values()))
    gm = apply(buffers.traced.backward, inputs)
    with pytest.raises(PassError, match=r"fuse_embedding_grad at node 'embedding_dense_backward' .*'layer.emb'"):
        fuse_embedding_grad(gm, gradients=gradients, accumulate=False)


# The verifier.


def launch_first(gm: GraphModule) -> None:
    find(gm, accumulate_embedding_)[-1].prepend(find(gm, start_grad_sync)[0])


def write_twice(gm: GraphModule) -> None:
    write = find(gm, accumulate_embedding_)[-1]
    with gm.graph.inserting_after(write):
        gm.graph.call_function(accumulate_embedding_, write.args)


def overwrite_last(gm: GraphModule) -> None:
    write = find(gm, accumulate_embedding_)[-1]
    write.args = (*write.args[:4], False)


def product_last(gm: GraphModule) -> None:
    find(gm, accumulate_embedding_)[-1].append(find(gm, accumulate_wgrad_)[0])


def copy_last(gm: GraphModule) -> None:
    write = find(gm, accumulate_embedding_)[-1]
    with gm.graph.inserting_after(write):
        gm.graph.call_function(aten.copy_.default, (write.args[0], write.args[0]))


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("mutation", [launch_first, write_twice, overwrite_last, product_last, copy_last])
def test_verifier_refuses(mutation: Callable[[GraphModule], None], dense: bool) -> None:
    buffers = Buffers(traced_case("tied", "none"), dense=dense)
    gm = rewrite(buffers, launching=True)
    verify = partial(verify_backward, gradients=buffers.gradients, write="overwrite", launches=buffers.launches)
    assert verify(gm) is gm
    assert any(MAIN_GRAD in node.meta for node in gm.graph.nodes)
    mutation(gm)
    problem = "is written after its bucket group" if mutation is launch_first else r"written \d times, expected once"
    with pytest.raises(PassError, match=problem):
        verify(gm)


def test_bytes_of_the_op() -> None:
    """Overwriting touches the whole ``main_grad``, adding only the rows."""
    rows, indices, table = 4 * 4 * 6 * WIDTH, 8 * 4 * 6, 4 * VOCAB * WIDTH
    expected: dict[Write, int] = {"overwrite": table + rows + indices, "accumulate": 2 * rows + indices}
    for write, nbytes in expected.items():
        gm = rewrite(Buffers(traced_case("single", "none")), write)
        (record,) = [r for r in describe_nodes(gm) if r["op"] == "megabuf.accumulate_embedding_.default"]
        assert (record["kind"], record["params"], record["nbytes"]) == ("write", ["emb.weight"], nbytes)
