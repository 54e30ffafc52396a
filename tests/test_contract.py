"""``passes/contract.py``: what passes promise, and how they fail."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from torch import nn
from torch.fx import Graph

from megabuf_fx.passes import (
    add_buffer_inputs,
    contract,
    fuse_embedding_grad,
    fuse_wgrad,
    insert_grad_sync,
    insert_param_sync,
    locate_params,
    verify,
    write_main_grads,
)
from megabuf_fx.passes.contract import GraphPass, PassError, validate_order

MODULES = (
    add_buffer_inputs,
    fuse_embedding_grad,
    fuse_wgrad,
    insert_grad_sync,
    insert_param_sync,
    locate_params,
    write_main_grads,
)


def test_error_without_a_node() -> None:
    error = PassError("fuse_wgrad", "expected 3 things, got 2")
    assert str(error) == "pass fuse_wgrad: expected 3 things, got 2"
    assert isinstance(error, RuntimeError)


def test_error_at_a_node_names_it_and_its_op() -> None:
    graph = Graph()
    node = graph.call_function(nn.functional.relu, (graph.placeholder("x"),))
    text = str(PassError("locate_params", "shape (3,), expected (4,)", node))
    assert text.startswith("pass locate_params at node 'relu' (call_function <function relu")
    assert text.endswith("): shape (3,), expected (4,)")


A = GraphPass(name="a", provides=("x",))
B = GraphPass(name="b", requires=("x",), provides=("y", "z"))
C = GraphPass(name="c", requires=("x", "z"), preserves_numerics=False)


def test_order_that_fits() -> None:
    validate_order([])
    validate_order([A, B, C])
    validate_order([B, C], given=["x"])
    validate_order([A, A, B])


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ([B], r"pass b requires \['x'\], but only \[\] hold before it"),
        ([B, A], r"pass b requires \['x'\], but only \[\] hold before it"),
        ([A, C], r"pass c requires \['z'\], but only \['x'\] hold before it"),
        ([C], r"pass c requires \['x', 'z'\], but only \[\] hold before it"),
    ],
)
def test_order_that_does_not_fit(passes: list[GraphPass], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_order(passes)


def test_a_pass_does_not_provide_for_itself() -> None:
    with pytest.raises(ValueError, match="pass loop requires"):
        validate_order([GraphPass(name="loop", requires=("x",), provides=("x",))])


def test_contracts_are_values() -> None:
    assert GraphPass(name="a", provides=("x",)) == A
    assert len({A, B, C, GraphPass(name="a", provides=("x",))}) == 3
    assert (A.requires, A.preserves_numerics) == ((), True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        A.name = "b"  # type: ignore[misc]


def test_modules_follow_the_convention() -> None:
    """A file is a pass: the function and its contract have the file's name, and the docstring has the sections."""
    for module in MODULES:
        name = module.__name__.rpartition(".")[2]
        assert module.PASS.name == name
        parameters = list(inspect.signature(getattr(module, name)).parameters.values())
        assert parameters[0].name == "gm"
        assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters[1:])
        text = inspect.getdoc(module) or ""
        for section in ("before", "after", "Requires:", "Ensures:"):
            assert section in text, f"{name} has no {section}"
    assert [p.name for p in (verify.BACKWARD, verify.FORWARD)] == ["verify_backward", "verify_forward"]
    changing = {module.PASS.name for module in MODULES if not module.PASS.preserves_numerics}
    assert changing == {"fuse_embedding_grad", "fuse_wgrad"}
    assert contract.GraphPass is GraphPass
