"""Recipes from public reports, the part about what else holds a model's parameters: hooks, checkpoints and copies
(V16, V21 and V22); see ``test_public_reports.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from helpers import RankGroup, params_of, seeded
from pair import MODES, Pair, SmallMlp, check_on, recorded_collectives, run_cases, square_loss
from torch import Tensor, nn

pytestmark = pytest.mark.dist

Ranks = Callable[[int], RankGroup]

# V16

Install = Callable[[Any, list[Tensor]], object]
"""Register a hook on a model that appends each gradient it sees to the list."""


def halve_weight_gradient(model: Any, seen: list[Tensor]) -> object:
    def hook(grad: Tensor) -> Tensor:
        seen.append(grad.clone())
        return grad * 0.5

    return model.fc1.weight.register_hook(hook)


def count_accumulations(model: Any, seen: list[Tensor]) -> object:
    def hook(param: Any) -> None:
        seen.append((param.main_grad if param.grad is None else param.grad).clone())

    return model.fc1.weight.register_post_accumulate_grad_hook(hook)


def halve_module_gradient(model: Any, seen: list[Tensor]) -> object:
    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        seen.append(grad_output[0].clone())
        return (grad_input[0] * 0.5,)

    return model.fc2.register_full_backward_hook(hook)


HOOKS: dict[str, tuple[Install, str]] = {
    "tensor": (halve_weight_gradient, "fc1.weight"),
    "post_accumulate": (count_accumulations, "fc1.weight"),
    "module": (halve_module_gradient, "fc2"),
}


def hooks(mode: str, kind: str, first: int) -> Iterator[str]:
    """Train with a hook registered before step ``first``; what is wrong, nothing if it is refused by name."""
    install, name = HOOKS[kind]
    pair = Pair(SmallMlp, mode, lr=0.1)
    seen: list[Tensor] = []
    expected: list[Tensor] = []
    for step in range(3):
        true_grads: list[Tensor] = []
        if step == first:
            install(pair.plain, expected)
        for rank in range(pair.world):
            expected.clear()
            pair.plain.zero_grad()
            square_loss(pair.plain, step, 0, rank).backward()
            true_grads += expected
        own = true_grads[pair.rank] if true_grads else None
        pair.plain.zero_grad()
        pair.reference_backward(square_loss, step)
        seen.clear()
        start = params_of(pair.plain)
        try:
            if step == first:
                install(pair.model, seen)
            pair.backward(square_loss, step)
            pair.update(step)
        except Exception as error:
            if f"'{name}'" not in str(error):
                yield f"refused without its name: {type(error).__name__}: {error}"
            pair.forget()
            pair.buf.sync_params()
            pair.compare(params_of(pair.model), start, "after the refusal")
            break
        pair.expect(len(seen) == len(true_grads[:1]), f"step {step}: ran {len(seen)} times")
        if seen and own is not None:
            averaged = torch.stack(true_grads).mean(0)
            # Before or after averaging over ranks, but all of it.
            miss = min((seen[0] - wanted).abs().max().item() for wanted in (own, averaged))
            pair.expect(miss < 1e-6, f"step {step}: the hook saw a gradient that misses the true one by {miss:.2g}")
    yield from pair.finish()


def hook_cases(rank: int) -> list[str]:
    """V16: a hook runs once per step with the true gradient and its result is used, or is refused by name; registered
    before compilation or after the first step."""
    return run_cases(
        {f"{m} {k} {first}": partial(hooks, m, k, first) for m in MODES for k in HOOKS for first in (0, 1)}
    )


# V21


def names_in_checkpoints(mode: str, in_place: bool) -> list[str]:
    pair = Pair(SmallMlp, mode, attach={"bucket_size": 16}, in_place=in_place, lr=0.1)
    for step in range(2):
        pair.step(square_loss, step)
    pair.forget()
    # No sync_params before: state_dict makes parameters current by itself.
    saved = pair.buf.model.state_dict()
    pair.expect(list(saved) == list(pair.plain.state_dict()), f"names are {list(saved)}")
    plain = seeded(SmallMlp, seed=5)
    plain.load_state_dict(saved, strict=True)
    pair.compare(params_of(plain), params_of(pair.plain), "saved and loaded into the plain model")
    for step, seed in ((2, 7), (3, 8)):
        other = seeded(SmallMlp, seed=seed).state_dict()
        pair.plain.load_state_dict(other, strict=True)
        pair.forget()
        pair.model.load_state_dict(other, strict=True)
        # With the overlap the second load comes while the gathers of the last step are still to start.
        pair.step(square_loss, step)
    return pair.finish()


def masters_follow_a_checkpoint() -> list[str]:
    pair = Pair(lambda: SmallMlp().bfloat16(), "sharded", lr=0.0)

    def loss(model: Any, step: int, micro: int, rank: int) -> Tensor:
        result: Tensor = model(torch.ones(2, 6, dtype=torch.bfloat16)).square().mean()
        return result

    pair.step(loss, 0)
    other = seeded(lambda: SmallMlp().bfloat16(), seed=7).state_dict()
    pair.model.load_state_dict(other, strict=True)
    pair.optimizer.reload_model_params()
    pair.plain.load_state_dict(other, strict=True)
    pair.step(loss, 1)
    return pair.finish()


def name_cases(rank: int) -> list[str]:
    """V21: ``buf.model.state_dict()`` has plain names and full tensors, for both forms of compiling; loading works in
    both directions, and fp32 masters follow loaded bf16 weights with ``reload_model_params``."""
    forms = {"torch.compile": False, "model.compile": True}
    cases: dict[str, Callable[[], list[str]]] = {
        f"{mode} {form}": partial(names_in_checkpoints, mode, forms[form]) for mode in MODES for form in forms
    }
    return run_cases({**cases, "bf16 masters": masters_follow_a_checkpoint})


# V22


def averaged_teacher(mode: str, is_compiled: bool) -> list[str]:
    pair = Pair(SmallMlp, mode, attach={"bucket_size": 16}, lr=0.1)
    teacher, plain_teacher = copy.deepcopy(pair.model), copy.deepcopy(pair.plain)
    options: dict[str, Any] = {"inner_compiler": "aot_eager"}
    teacher_call: Any = torch.compile(teacher, backend="megabuf", options=options) if is_compiled else teacher
    for step in range(4):
        pair.step(square_loss, step)
        pair.buf.sync_params()
        pair.check()
        with torch.no_grad():
            for average, current in ((teacher, pair.model), (plain_teacher, pair.plain)):
                for mean, value in zip(average.parameters(), current.parameters()):
                    mean.lerp_(value, 0.1)
            with recorded_collectives() as collectives:
                found = square_loss(teacher_call, step, 0, pair.rank)
            expected = square_loss(plain_teacher, step, 0, pair.rank)
        names = sorted({name for name, _ in collectives})
        pair.expect(not names, f"step {step}: the teacher's forward started {names}")
        pair.expect(abs(found - expected).item() <= 2e-5, f"step {step}: the teacher computes something else")
        pair.compare(params_of(teacher), params_of(plain_teacher), f"teacher after step {step}")
    storages = {p.untyped_storage().data_ptr() for p in pair.model.parameters()}
    shared = [name for name, p in teacher.named_parameters() if p.untyped_storage().data_ptr() in storages]
    pair.expect(not shared, f"teacher and student share {shared}")
    before = [*params_of(pair.model).values(), *(grad.clone() for grad in pair.main_grads().values())]
    is_attached = hasattr(teacher.fc1.weight, "main_grad")
    pair.expect(not is_attached, "the teacher was attached")
    if pair.rank == 0 and not is_attached:
        # One rank only: a collective in here would never end.
        optimizer = torch.optim.SGD(teacher.parameters(), lr=0.1)
        square_loss(teacher, 0, 0, 0).backward()
        optimizer.step()
        pair.expect(all(p.grad is not None for p in teacher.parameters()), "the teacher got no gradient")
    after = [*params_of(pair.model).values(), *pair.main_grads().values()]
    pair.expect(all(map(torch.equal, before, after)), "training the teacher changed the student")
    pair.step(square_loss, 4)
    return pair.finish()


def teacher_cases(rank: int) -> list[str]:
    """V22: a deep copy is a plain model: own storage, no collectives, no effect on the student."""
    kinds = {"eager": False, "compiled": True}
    return run_cases(
        {f"{mode} {kind}": partial(averaged_teacher, mode, kinds[kind]) for mode in MODES for kind in kinds}
    )


@pytest.mark.parametrize("cases", [hook_cases, name_cases, teacher_cases])
def test_recipe(ranks: Ranks, cases: Callable[[int], list[str]]) -> None:
    check_on(2, ranks, cases)
