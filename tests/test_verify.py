"""``passes/verify.py`` proved by mutation: correct graphs are accepted, and each way to break one is named.

A mutation takes a correct final graph and spoils it as a wrong pass could. The messages must name the parameter or the
bucket group concerned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, get_args

import pytest
import torch
from graph_builders import TABLES, Buffers, apply, copy_graph, find, text_of, traced_mlp
from torch.fx import GraphModule, Node

from megabuf_fx.dump import GraphDump
from megabuf_fx.passes.add_buffer_inputs import add_buffer_inputs
from megabuf_fx.passes.contract import PassError
from megabuf_fx.passes.graph_utils import (
    MAIN_GRAD,
    PARAM,
    TOKEN,
    aten,
    main_grad_nodes,
    output_node,
    outputs,
    placeholders,
    set_outputs,
    token_node,
    written_param,
)
from megabuf_fx.passes.insert_param_sync import insert_param_sync
from megabuf_fx.passes.locate_params import locate_params
from megabuf_fx.passes.verify import verify_backward, verify_forward
from megabuf_fx.pipeline import backward_passes, run_passes
from megabuf_fx.runtime.ops import accumulate_wgrad_, start_grad_sync, wait_param_sync
from megabuf_fx.runtime.plan import Role, Write


class Backward(NamedTuple):
    """A final backward graph: groups 0 (fc3, ln, fc2) and 1 (fc1); fc1.weight is fused, fc1.bias copied."""

    buffers: Buffers
    gm: GraphModule

    @property
    def launches(self) -> list[Node]:
        return find(self.gm, start_grad_sync)

    @property
    def token(self) -> Node:
        token = token_node(self.gm)
        assert token is not None
        return token

    def view(self, name: str) -> Node:
        """The ``main_grad`` node of a parameter."""
        return main_grad_nodes(self.gm)[self.buffers.handle, self.place(name)]

    def place(self, name: str) -> int:
        return [spec.name for spec in self.buffers.traced.specs].index(name)

    def write(self, name: str) -> Node:
        (node,) = [n for n in self.gm.graph.nodes if (p := written_param(n)) is not None and p.name == name]
        assert isinstance(node, Node)
        return node

    def launch(self, group: int) -> Node:
        """One more launch of ``group``, to be put somewhere."""
        node = self.launches[0]
        with self.gm.graph.inserting_after(node):
            copy: Node = self.gm.graph.call_function(start_grad_sync, (node.args[0], self.token, node.args[2], group))
        return copy

    def after_last(self, target: object, *args: object) -> Node:
        """A new call at the end of the graph."""
        with self.gm.graph.inserting_before(output_node(self.gm.graph)):
            node: Node = self.gm.graph.call_function(target, args)  # type: ignore[arg-type]
        return node

    def verify(self) -> None:
        buffers = self.buffers
        verify_backward(self.gm, gradients=buffers.gradients, write="overwrite", launches=buffers.launches)


def make_backward(table: str, *, dense: bool = False, accumulate: bool = False, fuse: bool = True) -> Backward:
    buffers = Buffers(traced_mlp(table), bucket_size=600, dense=dense)
    role = Role("accumulate" if accumulate else "overwrite", buffers.launches)
    steps = backward_passes(buffers.gradients, role=role, extras=buffers.extras(), fuse=fuse)
    return Backward(buffers, run_passes(copy_graph(buffers.traced.backward), steps, dump=GraphDump()))


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("table", TABLES)
def test_correct_backward_is_accepted(table: str, dense: bool, accumulate: bool, fuse: bool) -> None:
    case = make_backward(table, dense=dense, accumulate=accumulate, fuse=fuse)
    before = text_of(case.gm)
    gradients, launches = case.buffers.gradients, case.buffers.launches
    write: Write = "accumulate" if accumulate else "overwrite"
    assert verify_backward(case.gm, gradients=gradients, write=write, launches=launches) is case.gm
    assert text_of(case.gm) == before
    for other in set(get_args(Write)) - {write}:
        with pytest.raises(PassError, match=f"is written by {write}, expected {other}"):
            verify_backward(case.gm, gradients=gradients, write=other, launches=launches)


def test_graph_without_launches_is_accepted() -> None:
    buffers = Buffers(traced_mlp("none"), bucket_size=600)
    extras = buffers.extras(with_token=False)
    steps = backward_passes(buffers.gradients, role=Role("overwrite"), extras=extras, fuse=True)
    gm = run_passes(copy_graph(buffers.traced.backward), steps, dump=GraphDump())
    assert verify_backward(gm, gradients=buffers.gradients, write="overwrite", launches=()) is gm


# Mutations of a backward graph. Group 0 is launched first; its last write is that of fc2.weight.


def delete_first_launch(case: Backward) -> None:
    case.gm.graph.erase_node(case.launches[0])


def delete_last_launch(case: Backward) -> None:
    case.gm.graph.erase_node(case.launches[-1])


def duplicate_launch(case: Backward) -> None:
    case.launch(0)


def launch_another_group(case: Backward) -> None:
    launch = case.launches[0]
    launch.args = (*launch.args[:3], 2)


def launch_of_another_model(case: Backward) -> None:
    launch = case.launches[0]
    launch.args = (*launch.args[:2], case.buffers.handle + 1, launch.args[3])


def launch_before_a_write(case: Backward) -> None:
    case.write("fc2.weight").prepend(case.launches[0])


def launch_before_every_write(case: Backward) -> None:
    case.token.append(case.launches[0])


def swap_launches(case: Backward) -> None:
    first, second = case.launches
    second.append(first)


def swap_what_launches_send(case: Backward) -> None:
    first, second = case.launches
    first.args, second.args = (second.args[0], *first.args[1:]), (first.args[0], *second.args[1:])


def drop_view_from_launch(case: Backward) -> None:
    launch = case.launches[0]
    sent = launch.args[0]
    assert isinstance(sent, list)
    launch.args = ([view for view in sent if view is not case.view("ln.bias")], *launch.args[1:])


def drop_all_views_from_launch(case: Backward) -> None:
    launch = case.launches[1]
    launch.args = ([], *launch.args[1:])


def drop_token(case: Backward) -> None:
    launch = case.launches[0]
    launch.args = (launch.args[0], None, *launch.args[2:])


def use_another_token(case: Backward) -> None:
    launch = case.launches[1]
    other = case.after_last(aten.clone.default, case.token)
    launch.prepend(other)
    launch.args = (launch.args[0], other, *launch.args[2:])


def unmark_token(case: Backward) -> None:
    del case.token.meta[TOKEN]


def remove_token_everywhere(case: Backward) -> None:
    token = case.token
    for launch in case.launches:
        launch.args = (launch.args[0], None, *launch.args[2:])
    case.gm.graph.erase_node(token)


def move_write_behind_launch(case: Backward) -> None:
    case.launches[0].append(case.write("ln.weight"))


def move_product_behind_launch(case: Backward) -> None:
    case.launches[0].append(case.write("fc3.weight"))


def add_write_behind_launch(case: Backward) -> None:
    view = case.view("fc3.bias")
    case.after_last(aten.copy_.default, view, view)


def write_twice(case: Backward) -> None:
    write = case.write("ln.bias")
    with case.gm.graph.inserting_after(write):
        case.gm.graph.call_function(aten.copy_.default, write.args)


def write_product_twice(case: Backward) -> None:
    write = case.write("fc1.weight")
    with case.gm.graph.inserting_after(write):
        case.gm.graph.call_function(accumulate_wgrad_, write.args)


def drop_write(case: Backward) -> None:
    case.gm.graph.erase_node(case.write("fc1.bias"))


def drop_product(case: Backward) -> None:
    case.gm.graph.erase_node(case.write("fc3.weight"))


def write_into_another_parameter(case: Backward) -> None:
    write = case.write("ln.weight")
    write.args = (case.view("ln.bias"), *write.args[1:])


def add_product(case: Backward) -> None:
    write = case.write("fc1.weight")
    write.args = (*write.args[:-1], True)


def add_copy(case: Backward) -> None:
    write = case.write("ln.bias")
    with case.gm.graph.inserting_before(write):
        total = case.gm.graph.call_function(aten.add.Tensor, (case.view("ln.bias"), write.args[1]))
    write.args = (write.args[0], total)


def restore_gradient_output(case: Backward) -> None:
    write = case.write("fc3.bias")
    values = outputs(case.gm.graph)
    values[6] = write.args[1]
    set_outputs(case.gm.graph, values)


def unmark_main_grad(case: Backward) -> None:
    del case.view("ln.bias").meta[MAIN_GRAD]


def write_in_place_behind_launch(case: Backward) -> None:
    """Any op that writes counts, not only the two that the passes insert."""
    case.after_last(aten.mul_.Tensor, case.view("fc3.bias"), 2.0)


def write_view_behind_launch(case: Backward) -> None:
    view = case.after_last(aten.view.default, case.view("fc3.bias"), [5])
    view.meta["val"] = case.view("fc3.bias").meta["val"]
    case.after_last(aten.zero_.default, view)


def write_view_behind_launch_by_copy(case: Backward) -> None:
    view = case.after_last(aten.view.default, case.view("fc3.bias"), [5])
    view.meta["val"] = case.view("fc3.bias").meta["val"]
    case.after_last(aten.copy_.default, view, view)


BackwardMutation = Callable[[Backward], None]
BACKWARD_MUTATIONS: dict[BackwardMutation, str] = {
    # mutation: what the message must say; H is the handle
    delete_first_launch: r"launched as \[\(H, 1\)\], expected \[\(H, 0\), \(H, 1\)\]",
    delete_last_launch: r"launched as \[\(H, 0\)\], expected \[\(H, 0\), \(H, 1\)\]",
    duplicate_launch: r"launched as \[\(H, 0\), \(H, 0\), \(H, 1\)\]",
    launch_another_group: r"launched as \[\(H, 2\), \(H, 1\)\]",
    launch_of_another_model: r"launched as \[\(\d+, 0\), \(H, 1\)\], expected \[\(H, 0\)",
    launch_before_a_write: r"'fc2.weight' is written after its bucket group \(H, 0\) was launched",
    launch_before_every_write: r"' is written after its bucket group \(H, 0\) was launched",
    swap_launches: r"launched as \[\(H, 1\), \(H, 0\)\]",
    swap_what_launches_send: r"launch of bucket group \(H, 0\) does not name '",
    drop_view_from_launch: r"launch of bucket group \(H, 0\) does not name 'ln.bias'",
    drop_all_views_from_launch: r"launch of bucket group \(H, 1\) does not name 'fc1",
    drop_token: r"token",
    use_another_token: r"token",
    unmark_token: r"token",
    remove_token_everywhere: r"token",
    move_write_behind_launch: r"'ln.weight' is written after its bucket group \(H, 0\) was launched",
    move_product_behind_launch: r"'fc3.weight' is written after its bucket group \(H, 0\) was launched",
    add_write_behind_launch: r"fc3.bias",
    write_twice: r"main_grad of 'ln.bias' is written 2 times",
    write_product_twice: r"main_grad of 'fc1.weight' is written 2 times",
    drop_write: r"main_grad of 'fc1.bias' is written 0 times",
    drop_product: r"main_grad of 'fc3.weight' is written 0 times",
    write_into_another_parameter: r"main_grad of 'ln.(weight|bias)' is written (0|2) times",
    add_product: r"main_grad of 'fc1.weight' is written by accumulate, expected overwrite",
    add_copy: r"main_grad of 'ln.bias' is written by accumulate, expected overwrite",
    restore_gradient_output: r"gradient of 'fc3.weight' is still output 6",
    unmark_main_grad: r"main_grad of 'ln.bias' is written 0 times",
    write_in_place_behind_launch: r"'fc3.bias'",
    write_view_behind_launch: r"'fc3.bias'",
    write_view_behind_launch_by_copy: r"'fc3.bias'",
}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("mutation", BACKWARD_MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_spoiled_backward_is_refused(mutation: BackwardMutation, table: str) -> None:
    case = make_backward(table)
    before = text_of(case.gm), [sorted(node.meta) for node in case.gm.graph.nodes]
    mutation(case)
    assert (text_of(case.gm), [sorted(node.meta) for node in case.gm.graph.nodes]) != before
    pattern = BACKWARD_MUTATIONS[mutation].replace("H", str(case.buffers.handle))
    with pytest.raises(PassError, match=f"^pass verify_backward.*{pattern}"):
        case.verify()


# The same for whole buffers: there a launch names the buffer, and a write goes through a slice of it.


def drop_buffer_from_launch(case: Backward) -> None:
    launch = case.launches[0]
    launch.args = ([], *launch.args[1:])


def send_slice_of_another_parameter(case: Backward) -> None:
    launch = case.launches[0]
    launch.args = ([case.view("fc1.bias")], *launch.args[1:])


DENSE_MUTATIONS: dict[BackwardMutation, str] = {
    delete_first_launch: r"launched as",
    swap_launches: r"launched as",
    launch_before_a_write: r"'fc2.weight' is written after its bucket group \(H, 0\)",
    move_write_behind_launch: r"'ln.weight' is written after its bucket group \(H, 0\)",
    drop_buffer_from_launch: r"launch of bucket group \(H, 0\) does not name '",
    send_slice_of_another_parameter: r"launch of bucket group \(H, 0\) does not name '",
    write_twice: r"main_grad of 'ln.bias' is written 2 times",
    drop_write: r"main_grad of 'fc1.bias' is written 0 times",
}


@pytest.mark.parametrize("mutation", DENSE_MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_spoiled_dense_backward_is_refused(mutation: BackwardMutation) -> None:
    case = make_backward("none", dense=True)
    mutation(case)
    pattern = DENSE_MUTATIONS[mutation].replace("H", str(case.buffers.handle))
    with pytest.raises(PassError, match=f"^pass verify_backward.*{pattern}"):
        case.verify()


def test_spoiled_graphs_would_compute_something_else() -> None:
    """What the verifier guards against is real: a launch before a write sends an old gradient."""
    case = make_backward("none")
    launch_before_a_write(case)
    case.gm.graph.lint()
    case.gm.recompile()
    case.buffers.run_backward(case.gm, case.buffers.extras())
    sent = dict(zip(case.buffers.bucket_plan.groups[0].params, case.buffers.sent[0]))
    assert sent[case.place("fc2.weight")].isnan().all()
    assert torch.equal(sent[case.place("ln.bias")], case.buffers.traced.reference(case.place("ln.bias")))


# Forward.


class Forward(NamedTuple):
    """A final forward graph: first the wait of group 1 (fc1), then that of group 0 (fc2, ln, fc3)."""

    buffers: Buffers
    gm: GraphModule

    def wait(self, group: int) -> Node:
        # args: (params, token, handle, group)
        (node,) = [node for node in find(self.gm, wait_param_sync) if node.args[3] == group]
        return node

    def param(self, name: str) -> Node:
        (node,) = [n for n in placeholders(self.gm.graph) if (p := n.meta.get(PARAM)) is not None and p.name == name]
        return node

    def users(self, name: str) -> Iterator[Node]:
        """Readers of a parameter, in order."""
        reads = self.param(name).users
        return (node for node in self.gm.graph.nodes if node in reads and node.target is not wait_param_sync)


def make_forward(table: str, *, bucket_size: int | None = 600) -> Forward:
    buffers = Buffers(traced_mlp(table), sharded=True, bucket_size=bucket_size)
    gm = apply(
        buffers.traced.forward,
        partial(locate_params, plan=buffers.plan),
        partial(add_buffer_inputs, extras=(buffers.token_input,), writes=()),
        insert_param_sync,
    )
    return Forward(buffers, gm)


@pytest.mark.parametrize("bucket_size", [None, 600, 1])
@pytest.mark.parametrize("table", TABLES)
def test_correct_forward_is_accepted(table: str, bucket_size: int | None) -> None:
    case = make_forward(table, bucket_size=bucket_size)
    before = text_of(case.gm)
    assert verify_forward(case.gm) is case.gm
    assert text_of(case.gm) == before


def test_forward_without_parameters_is_accepted() -> None:
    gm = copy_graph(traced_mlp("none").forward)
    assert verify_forward(gm) is gm


def delete_wait(case: Forward) -> None:
    case.gm.graph.erase_node(case.wait(0))


def delete_all_waits(case: Forward) -> None:
    for group in (0, 1):
        case.gm.graph.erase_node(case.wait(group))


def move_wait_behind_first_use(case: Forward) -> None:
    next(case.users("fc2.weight")).append(case.wait(0))


def move_wait_to_the_end(case: Forward) -> None:
    output_node(case.gm.graph).prepend(case.wait(1))


def move_use_before_wait(case: Forward) -> None:
    reader = next(case.users("fc3.weight"))
    assert reader.all_input_nodes == [case.param("fc3.weight")]
    case.wait(1).prepend(reader)


def add_read_before_wait(case: Forward) -> None:
    with case.gm.graph.inserting_before(case.wait(1)):
        case.gm.graph.call_function(aten.sin.default, (case.param("ln.bias"),))


def wait_twice(case: Forward) -> None:
    wait = case.wait(0)
    with case.gm.graph.inserting_after(wait):
        case.gm.graph.call_function(wait_param_sync, wait.args)


def wait_for_another_group(case: Forward) -> None:
    wait = case.wait(0)
    wait.args = (*wait.args[:3], 2)


def wait_for_another_model(case: Forward) -> None:
    wait = case.wait(1)
    wait.args = (*wait.args[:2], case.buffers.handle + 1, wait.args[3])


def swap_groups(case: Forward) -> None:
    first, second = case.wait(1), case.wait(0)
    first.args, second.args = (*first.args[:3], 0), (*second.args[:3], 1)


def drop_parameter_from_wait(case: Forward) -> None:
    wait = case.wait(0)
    named = wait.args[0]
    assert isinstance(named, list)
    wait.args = ([node for node in named if node is not case.param("ln.bias")], *wait.args[1:])


def drop_token_from_wait(case: Forward) -> None:
    wait = case.wait(0)
    wait.args = (wait.args[0], None, *wait.args[2:])


def wait_with_another_token(case: Forward) -> None:
    wait = case.wait(1)
    wait.args = (wait.args[0], placeholders(case.gm.graph)[2], *wait.args[2:])


def return_parameter_without_wait(case: Forward) -> None:
    """Group 0 is not waited for, and all that is left of its uses is to save it for backward."""
    for name in ("fc2.weight", "ln.weight", "ln.bias", "fc3.weight", "fc3.bias"):
        for user in list(case.users(name)):
            if user.op != "output":
                user.replace_input_with(case.param(name), placeholders(case.gm.graph)[2])
    case.gm.graph.erase_node(case.wait(0))


ForwardMutation = Callable[[Forward], None]
FORWARD_MUTATIONS: dict[ForwardMutation, str] = {
    delete_wait: r"'fc2.weight' is read before bucket group \(H, 0\) is waited",
    delete_all_waits: r"'fc1.weight' is read before bucket group \(H, 1\) is waited",
    move_wait_behind_first_use: r"'fc2.weight' is read before bucket group \(H, 0\) is waited",
    move_wait_to_the_end: r"'fc1.weight' is read before bucket group \(H, 1\) is waited",
    move_use_before_wait: r"'fc3.weight' is read before bucket group \(H, 0\) is waited",
    add_read_before_wait: r"'ln.bias' is read before bucket group \(H, 0\) is waited",
    wait_twice: r"bucket group \(H, 0\) is waited for twice",
    wait_for_another_group: r"' is read before bucket group \(H, 0\) is waited",
    wait_for_another_model: r"'fc1.weight' is read before bucket group \(H, 1\) is waited",
    swap_groups: r"'fc1.weight' is read before bucket group \(H, 1\) is waited",
    drop_parameter_from_wait: r"wait of bucket group \(H, 0\) does not name 'ln.bias'",
    drop_token_from_wait: r"token",
    wait_with_another_token: r"token",
    return_parameter_without_wait: r"' is read before bucket group \(H, 0\) is waited",
}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("mutation", FORWARD_MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_spoiled_forward_is_refused(mutation: ForwardMutation, table: str) -> None:
    case = make_forward(table)
    before = text_of(case.gm)
    mutation(case)
    assert text_of(case.gm) != before
    pattern = FORWARD_MUTATIONS[mutation].replace("H", str(case.buffers.handle))
    with pytest.raises(PassError, match=f"^pass verify_forward.*{pattern}"):
        verify_forward(case.gm)


def test_collective_without_token_is_named() -> None:
    backward, forward = make_backward("none"), make_forward("none")
    drop_token(backward)
    launch = backward.launches[0]
    with pytest.raises(PassError, match=re.escape(f"at node '{launch.name}'")) as caught:
        backward.verify()
    assert str((backward.buffers.handle, 0)) in str(caught.value), "the message names the bucket group"
    drop_token_from_wait(forward)
    with pytest.raises(PassError, match=re.escape(f"at node '{forward.wait(0).name}'")) as caught:
        verify_forward(forward.gm)
    assert str((forward.buffers.handle, 0)) in str(caught.value), "the message names the bucket group"
