"""``passes/scale_main_grads.py``: what is sent is multiplied where it is written."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from graph_builders import TABLES, Buffers, copy_graph, find, traced_mlp
from torch.fx import GraphModule, Node

from megabuf_fx.dump import GraphDump
from megabuf_fx.passes.contract import PassError
from megabuf_fx.passes.graph_utils import SCALED, aten, main_grad_nodes, written_param
from megabuf_fx.passes.scale_main_grads import scale_main_grads
from megabuf_fx.passes.verify import verify_backward
from megabuf_fx.pipeline import backward_passes, run_passes
from megabuf_fx.runtime.ops import ACCUMULATING_OPS, start_grad_sync
from megabuf_fx.runtime.plan import Role, Write

SOME = 0
"""The bucket group that is multiplied; the other is not."""


def make(buffers: Buffers, factor: float | None, write: Write, *, fuse: bool) -> GraphModule:
    factors = {} if factor is None else {(buffers.handle, SOME): factor}
    steps = backward_passes(
        buffers.gradients,
        role=Role(write, buffers.launches),
        extras=buffers.extras(with_flag=write == "flagged"),
        fuse=fuse,
        factors=factors,
    )
    return run_passes(copy_graph(buffers.traced.backward), steps, dump=GraphDump())


def sent_by(buffers: Buffers, gm: GraphModule, write: Write) -> dict[int, list[torch.Tensor]]:
    """What each launch finds in the buckets, and what the graph leaves there."""
    buffers.poison()
    if write != "overwrite":
        buffers.randomize()
    buffers.flag.fill_(1)
    buffers.run_backward(gm, buffers.extras(with_flag=write == "flagged"))
    for group, sent in buffers.sent.items():
        for param, tensor in zip(buffers.bucket_plan.groups[group].params, sent):
            assert torch.equal(tensor, buffers.main_grads[param])
    return dict(buffers.sent)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("write", ["overwrite", "accumulate", "flagged"])
@pytest.mark.parametrize("table", TABLES)
def test_half_is_bitwise_what_one_more_pass_gives(table: str, write: Write, fuse: bool) -> None:
    buffers = Buffers(traced_mlp(table), bucket_size=600)
    plain = sent_by(buffers, make(buffers, None, write, fuse=fuse), write)
    scaled = sent_by(buffers, make(buffers, 0.5, write, fuse=fuse), write)
    assert plain.keys() == scaled.keys() == {0, 1}
    for group, tensors in plain.items():
        for before, after in zip(tensors, scaled[group]):
            assert torch.equal(after, before * 0.5 if group == SOME else before)
    buffers.assert_padding_is_untouched()


@pytest.mark.parametrize("fuse", [False, True])
def test_a_third_rounds_once_more_at_most(fuse: bool) -> None:
    buffers = Buffers(traced_mlp("none"), bucket_size=600)
    plain = sent_by(buffers, make(buffers, None, "accumulate", fuse=fuse), "accumulate")
    scaled = sent_by(buffers, make(buffers, 1 / 3, "accumulate", fuse=fuse), "accumulate")
    for before, after in zip(plain[SOME], scaled[SOME]):
        # A product inside the sum is rounded where the sum would have been: two units in the last place of either term.
        torch.testing.assert_close(after, before / 3, rtol=2.0**-21, atol=2.0**-21)


def test_launches_say_what_was_multiplied() -> None:
    buffers = Buffers(traced_mlp("none"), bucket_size=600)
    gm = make(buffers, 0.5, "accumulate", fuse=True)
    first, second = find(gm, start_grad_sync)
    # args: (main_grads, token, handle, group, scaled=False)
    assert first.args[3:] == (0, True)
    assert second.args[3:] == (1,)
    kinds = {node.target for node in gm.graph.nodes if (p := written_param(node)) is not None and p.group == SOME}
    assert kinds > {aten.copy_.default}, "both kinds of write are multiplied here"


def test_only_the_first_write_multiplies_what_was_there() -> None:
    buffers = Buffers(traced_mlp("none"), bucket_size=600)
    gm = make(buffers, None, "overwrite", fuse=True)
    first = next(n for n in gm.graph.nodes if n.target in ACCUMULATING_OPS and in_group(n, SOME))
    with gm.graph.inserting_after(first):
        gm.graph.call_function(first.target, (*first.args[:3], True))
    scale_main_grads(gm, factors={(buffers.handle, SOME): 0.5})
    one, two = (n for n in gm.graph.nodes if n.target is first.target and n.args[0] is first.args[0])
    assert one.kwargs == {"alpha": 0.5, "beta": 0.5}
    assert two.kwargs == {"alpha": 0.5}


def test_another_write_is_refused() -> None:
    buffers = Buffers(traced_mlp("none"), bucket_size=600)
    gm = make(buffers, None, "overwrite", fuse=False)
    last = [n for n in gm.graph.nodes if in_group(n, SOME)][-1]
    with gm.graph.inserting_after(last):
        gm.graph.call_function(aten.add_.Tensor, (last.args[0], last.args[0]))
    with pytest.raises(PassError, match="cannot multiply what is written to main_grad of '"):
        scale_main_grads(gm, factors={(buffers.handle, SOME): 0.5})


def in_group(node: Node, group: int) -> bool:
    param = written_param(node)
    return param is not None and param.group == group


def unscale_product(gm: GraphModule) -> None:
    write = next(n for n in gm.graph.nodes if n.target in ACCUMULATING_OPS and "alpha" in n.kwargs)
    write.kwargs = {}


def unscale_copy(gm: GraphModule) -> None:
    product = next(n for n in gm.graph.nodes if n.meta.get(SCALED))
    product.replace_all_uses_with(product.args[0])


def unscale_what_was_there(gm: GraphModule) -> None:
    write = next(n for n in gm.graph.nodes if n.target in ACCUMULATING_OPS and "beta" in n.kwargs)
    write.kwargs = {"alpha": 0.5}


def multiply_more(gm: GraphModule) -> None:
    write = next(n for n in gm.graph.nodes if n.target in ACCUMULATING_OPS and in_group(n, 1))
    write.kwargs = {"alpha": 0.5}


def forget_to_say(gm: GraphModule) -> None:
    launch = find(gm, start_grad_sync)[0]
    launch.args = launch.args[:4]


def say_too_much(gm: GraphModule) -> None:
    launch = find(gm, start_grad_sync)[1]
    launch.args = (*launch.args, True)


@pytest.mark.parametrize(
    "mutate", [unscale_product, unscale_copy, unscale_what_was_there, multiply_more, forget_to_say, say_too_much]
)
def test_verifier_sees_a_wrong_factor(mutate: object) -> None:
    buffers = Buffers(traced_mlp("none"), bucket_size=600)
    gm = make(buffers, 0.5, "accumulate", fuse=True)
    check = partial(
        verify_backward,
        gradients=buffers.gradients,
        write="accumulate",
        launches=buffers.launches,
        factors={(buffers.handle, SOME): 0.5},
    )
    check(gm)
    assert callable(mutate)
    mutate(gm)
    assert main_grad_nodes(gm)
    with pytest.raises(PassError, match=r"is not written times|says the wrong thing of its factor"):
        check(gm)
