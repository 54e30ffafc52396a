"""``runtime/ops.py``: the ops that graphs call, and the registry that they look their target up in."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import batch
from torch import Tensor

from megabuf_fx.runtime.ops import (
    accumulate_embedding_,
    accumulate_wgrad_,
    live_targets,
    register_target,
    start_grad_sync,
    unregister_target,
    wait_param_sync,
)

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = [(FP32, FP32), (BF16, BF16), (FP32, BF16)]
"""Of ``main_grad`` and of the factors."""


class Recorder:
    """A target that logs its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def start_grad_sync(self, group: int, *, scaled: bool = False) -> None:
        self.calls.append(("start", group))

    def wait_param_sync(self, group: int) -> None:
        self.calls.append(("wait", group))


def factors(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return batch(0, 0, 0, 4, 6).to(dtype), batch(0, 1, 0, 6, 5).to(dtype)


def slot(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A buffer and the ``[4, 5]`` view of it that is a ``main_grad``."""
    data = torch.full((128,), torch.nan, dtype=dtype)
    return data, data[64:84].view(4, 5)


# accumulate_wgrad_


@pytest.mark.parametrize(("main_dtype", "dtype"), DTYPES)
def test_overwrite(main_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Bitwise the product in the dtype of the factors; what was there does not matter, nor is anything else written."""
    lhs, rhs = factors(dtype)
    data, main_grad = slot(main_dtype)
    accumulate_wgrad_(main_grad, lhs, rhs, False)
    assert torch.equal(main_grad, torch.mm(lhs, rhs).to(main_dtype))
    assert data[:64].isnan().all()
    assert data[84:].isnan().all()


@pytest.mark.parametrize(
    ("main_dtype", "dtype", "bound"), [(*DTYPES[0], 1e-6), (*DTYPES[1], 2.0**-7), (*DTYPES[2], 0.0)]
)
def test_accumulate(main_dtype: torch.dtype, dtype: torch.dtype, bound: float) -> None:
    """One dtype: added inside the product, one rounding less. Wider ``main_grad`` on CPU: rounded, then added."""
    lhs, rhs = factors(dtype)
    data, main_grad = slot(main_dtype)
    before = batch(0, 2, 0, 4, 5).to(main_dtype)
    main_grad.copy_(before)
    accumulate_wgrad_(main_grad, lhs, rhs, True)
    expected = before + torch.mm(lhs, rhs)
    assert expected.dtype == main_dtype
    assert (main_grad - expected).abs().max() <= bound * expected.abs().max()
    assert data[:64].isnan().all()
    assert data[84:].isnan().all()


def test_accumulating_in_bf16_rounds_once() -> None:
    """The sum is that of fp32 rounded to bf16, which adding a rounded product is not."""
    lhs, rhs = factors(BF16)
    before = batch(0, 2, 0, 4, 5).to(BF16)
    main_grad = before.clone()
    accumulate_wgrad_(main_grad, lhs, rhs, True)
    exact = before.double() + lhs.double() @ rhs.double()
    unfused = before + torch.mm(lhs, rhs)
    # Half a unit in the last place of bf16, and the error of fp32 sums.
    assert ((main_grad.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()
    assert (main_grad.double() - exact).abs().mean() <= (unfused.double() - exact).abs().mean()


@pytest.mark.parametrize("accumulate", [False, True])
def test_transposed_and_empty_factors(accumulate: bool) -> None:
    lhs, rhs = factors(FP32)
    main_grad = torch.ones(5, 4)
    accumulate_wgrad_(main_grad, rhs.t(), lhs.t(), accumulate)
    torch.testing.assert_close(main_grad, (lhs @ rhs).t() + float(accumulate), rtol=1e-6, atol=1e-6)
    # No tokens in the batch: a gradient of zeros.
    main_grad = torch.ones(4, 5)
    accumulate_wgrad_(main_grad, torch.empty(4, 0), torch.empty(0, 5), accumulate)
    assert torch.equal(main_grad, torch.full((4, 5), float(accumulate)))


@pytest.mark.parametrize("accumulate", [False, True])
def test_wrong_shapes_raise(accumulate: bool) -> None:
    lhs, rhs = factors(FP32)
    with pytest.raises(RuntimeError):
        accumulate_wgrad_(torch.zeros(4, 5), rhs, lhs, accumulate)
    with pytest.raises(RuntimeError):
        accumulate_wgrad_(torch.zeros(4, 5), lhs, rhs.to(BF16), accumulate)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("main_dtype", "dtype"), DTYPES)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_product_that_does_not_fit_writes_nothing(
    main_dtype: torch.dtype, dtype: torch.dtype, accumulate: bool
) -> None:
    """``out=`` resizes a tensor that does not fit; a view of a buffer would then grow into its neighbours."""
    lhs, rhs = factors(dtype)
    data = torch.zeros(128, dtype=main_dtype)
    main_grad = data[64:80].view(4, 4)
    with pytest.raises(RuntimeError):
        accumulate_wgrad_(main_grad, lhs, rhs, accumulate)
    assert not data.any()
    assert main_grad.shape == (4, 4)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("main_dtype", "dtype"), DTYPES)
def test_opcheck_of_accumulate_wgrad(main_dtype: torch.dtype, dtype: torch.dtype, accumulate: bool) -> None:
    main_grad = torch.zeros(4, 5, dtype=main_dtype)
    torch.library.opcheck(accumulate_wgrad_, (main_grad, *factors(dtype), accumulate))


# accumulate_embedding_


ROWS, WIDTH = 4, 5
"""Of the ``main_grad`` that ``slot`` makes."""


def rows_of(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    """Gradient rows, and indices of which all occur, some are out of bounds, and 1 is to be left out."""
    count = math.prod(shape)
    indices = torch.tensor([0, 3, 1, 3, 2, -1, 4, 3] * count, dtype=torch.int64)[:count].view(shape)
    return batch(0, 0, 0, *shape, WIDTH).to(dtype), indices


def added(grad: Tensor, indices: Tensor, padding_idx: int, start: Tensor) -> Tensor:
    """Row by row, in fp64."""
    result = start.double()
    for row, index in zip(grad.flatten(0, -2), indices.flatten().tolist()):
        if 0 <= index < ROWS and index != padding_idx:
            result[index] += row.double()
    return result


@pytest.mark.parametrize("shape", [(3,), (24,), (2, 12), (2, 3, 4), (0,), (3, 0)])
@pytest.mark.parametrize("padding_idx", [-1, 1])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("main_dtype", "dtype"), DTYPES)
def test_rows_are_added(
    main_dtype: torch.dtype, dtype: torch.dtype, accumulate: bool, padding_idx: int, shape: tuple[int, ...]
) -> None:
    """fp32 within its rounding; a sum of 16 bits is the exact one, rounded once, and once more when accumulating."""
    grad, indices = rows_of(dtype, *shape)
    data, main_grad = slot(main_dtype)
    before = batch(0, 2, 0, ROWS, WIDTH).to(main_dtype)
    if accumulate:
        main_grad.copy_(before)
    accumulate_embedding_(main_grad, grad, indices, padding_idx, accumulate)
    start = before if accumulate else torch.zeros_like(before)
    expected = added(grad, indices, padding_idx, start)
    step = 2.0**-8 if main_dtype == BF16 else 1e-6
    size = expected.abs() + (added(grad, indices, padding_idx, torch.zeros_like(before)).abs() if accumulate else 0)
    assert ((main_grad.double() - expected).abs() <= step * size + 1e-6).all()
    assert data[:64].isnan().all()
    assert data[84:].isnan().all()
    # Again in int32, and with a gradient that is no contiguous memory.
    again = slot(main_dtype)[1].copy_(before)
    scattered = grad.movedim(-1, 0).contiguous().movedim(0, -1)
    accumulate_embedding_(again, scattered, indices.int(), padding_idx, accumulate)
    assert torch.equal(again, main_grad)


@pytest.mark.parametrize("count", [3, 64])
def test_overwriting_rows_is_bitwise_that_of_aten(count: int) -> None:
    grad, indices = batch(0, 0, 0, count, WIDTH), torch.arange(count) % ROWS
    main_grad = slot(FP32)[1]
    for padding_idx in (-1, 2):
        accumulate_embedding_(main_grad, grad, indices, padding_idx, False)
        expected = torch.ops.aten.embedding_dense_backward(grad, indices, ROWS, padding_idx, False)
        assert torch.equal(main_grad, expected)


def test_rows_that_are_left_out_leak_no_nan() -> None:
    main_grad = torch.zeros(ROWS, WIDTH)
    grad = torch.full((3, WIDTH), torch.nan)
    accumulate_embedding_(main_grad, grad, torch.tensor([1, -1, 9]), 1, True)
    assert not main_grad.any()


@pytest.mark.parametrize("main_dtype", [FP32, BF16])
def test_rows_of_vectors_and_of_blocks(main_dtype: torch.dtype) -> None:
    for shape in ((), (2, 3)):
        indices = torch.tensor([2, 0, 2])
        grad = torch.ones(3, *shape)
        main_grad = torch.full((4, *shape), torch.nan, dtype=main_dtype)
        accumulate_embedding_(main_grad, grad, indices, -1, False)
        assert torch.equal(
            main_grad, torch.zeros(4, *shape, dtype=main_dtype).index_add_(0, indices, grad.to(main_dtype))
        )


def test_nothing_of_the_size_of_the_table_is_allocated() -> None:
    main_grad = torch.zeros(1000, 64)
    grad, indices = torch.ones(8, 64), torch.arange(8)
    for dtype in (FP32, BF16):
        table = main_grad.to(dtype)
        with torch.profiler.profile(profile_memory=True) as profile:
            accumulate_embedding_(table, grad, indices, -1, False)
        allocated = [event.cpu_memory_usage for event in profile.events() or ()]
        assert max(allocated, default=0) <= 2 * grad.nbytes


@pytest.mark.parametrize("accumulate", [False, True])
def test_rows_that_do_not_fit_are_refused(accumulate: bool) -> None:
    main_grad = torch.zeros(ROWS, WIDTH)
    grad, indices = batch(0, 0, 0, 3, WIDTH), torch.tensor([0, 1, 2])
    for wrong in ((grad[:2], indices), (grad[:, :4], indices), (grad, indices.view(1, 3))):
        with pytest.raises(RuntimeError, match="accumulate_embedding_ of rows"):
            accumulate_embedding_(main_grad, *wrong, -1, accumulate)
    with pytest.raises(RuntimeError, match=r"indices of torch.bool, expected int32 or int64"):
        accumulate_embedding_(main_grad, grad, indices.bool(), -1, accumulate)
    assert not main_grad.any()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("main_dtype", "dtype"), DTYPES)
def test_accumulate_embedding_bumps_no_version(main_dtype: torch.dtype, dtype: torch.dtype, accumulate: bool) -> None:
    data, main_grad = slot(main_dtype)
    before = data._version, main_grad._version
    with torch.no_grad():
        accumulate_embedding_(main_grad, *rows_of(dtype, 3, 4), -1, accumulate)
    assert (data._version, main_grad._version) == before
    torch.library.opcheck(accumulate_embedding_, (main_grad.zero_(), *rows_of(dtype, 3, 4), -1, accumulate))


# Collectives.


def test_target_gets_handle_and_group() -> None:
    first, second = Recorder(), Recorder()
    handles = register_target(first), register_target(second)
    token = torch.zeros(1)
    start_grad_sync([torch.zeros(3)], token, handles[0], 2)
    start_grad_sync([], token, handles[1], 0)
    wait_param_sync([torch.zeros(3), torch.zeros(2)], token, handles[0], 1)
    assert first.calls == [("start", 2), ("wait", 1)]
    assert second.calls == [("start", 0)]


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("op", [start_grad_sync, wait_param_sync], ids=["start", "wait"])
def test_opcheck_of_collectives(op: Any, count: int) -> None:
    recorder = Recorder()
    arguments = ([torch.zeros(2, 3) for _ in range(count)], torch.zeros(1), register_target(recorder), 1)
    torch.library.opcheck(op, arguments)
    assert recorder.calls


def test_schemas_declare_what_is_mutated() -> None:
    """Buffers or parameters, and the token that orders the collectives; no result that could be dropped."""
    for op, mutated in (
        (start_grad_sync, ["main_grads", "token"]),
        (wait_param_sync, ["params", "token"]),
        (accumulate_wgrad_, ["main_grad"]),
        (accumulate_embedding_, ["main_grad"]),
    ):
        assert [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write] == mutated
        assert list(op._schema.returns) == []


def test_errors_of_the_target_come_through() -> None:
    class Broken(Recorder):
        def start_grad_sync(self, group: int, *, scaled: bool = False) -> None:
            raise RuntimeError(f"bucket {group} is already reducing")

    broken = Broken()
    handle = register_target(broken)
    with pytest.raises(RuntimeError, match="bucket 3 is already reducing"):
        start_grad_sync([torch.zeros(1)], torch.zeros(1), handle, 3)


# Version counters: a bump would make autograd refuse a backward whose forward saved the tensor.


@pytest.mark.parametrize("op", [start_grad_sync, wait_param_sync], ids=["start", "wait"])
def test_collectives_bump_no_version(op: Any) -> None:
    recorder = Recorder()
    handle = register_target(recorder)
    token = torch.zeros(1)
    data = torch.zeros(8)
    tensors = [data[:4], data[4:], torch.zeros(3), torch.nn.Parameter(torch.zeros(2))]
    before = [tensor._version for tensor in (*tensors, data, token)]
    with torch.no_grad():
        op(tensors, token, handle, 0)
    assert [tensor._version for tensor in (*tensors, data, token)] == before
    assert len(recorder.calls) == 1


def test_wait_between_two_calls_of_a_module() -> None:
    """The reason for the rule: a weight saved by the first call is waited for before the second."""
    recorder = Recorder()
    handle = register_target(recorder)
    weight = torch.nn.Parameter(torch.ones(3, 3))
    first = torch.tanh(batch(0, 0, 0, 2, 3) @ weight)
    with torch.no_grad():
        wait_param_sync([weight], torch.zeros(1), handle, 0)
    (first @ weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("main_dtype", "dtype"), DTYPES)
def test_accumulate_wgrad_bumps_no_version(main_dtype: torch.dtype, dtype: torch.dtype, accumulate: bool) -> None:
    data, main_grad = slot(main_dtype)
    before = data._version, main_grad._version
    with torch.no_grad():
        accumulate_wgrad_(main_grad, *factors(dtype), accumulate)
    assert (data._version, main_grad._version) == before


# Registry. Other targets can be alive, those of a model that has not been collected yet, so ids are relative.


def used_ids() -> set[int]:
    gc.collect()
    return {handle for handle, _ in live_targets()}


def test_lowest_free_id() -> None:
    taken = used_ids()
    free = [handle for handle in range(len(taken) + 5) if handle not in taken]
    targets = [Recorder() for _ in range(4)]
    assert [register_target(target) for target in targets] == free[:4]
    unregister_target(free[1])
    unregister_target(free[2])
    again = Recorder()
    assert register_target(again) == free[1]
    last = Recorder()
    assert register_target(last) == free[2]
    assert used_ids() == taken | set(free[:4])
    unregister_target(free[0])
    unregister_target(free[0])  # harmless
    assert used_ids() == taken | set(free[1:4])


def test_targets_are_listed_by_id() -> None:
    taken = used_ids()
    targets = {register_target(target): target for target in [Recorder() for _ in range(3)]}
    ours = [(handle, target) for handle, target in live_targets() if handle not in taken]
    assert ours == sorted(targets.items(), key=lambda item: item[0])


def test_registry_does_not_keep_targets_alive() -> None:
    taken = used_ids()
    target = Recorder()
    handle = register_target(target)
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None
    assert used_ids() == taken
    assert register_target(Recorder()) == handle, "the id is free again"


def run_start(handle: int) -> None:
    start_grad_sync([torch.zeros(1)], torch.zeros(1), handle, 0)


def run_wait(handle: int) -> None:
    wait_param_sync([torch.zeros(1)], torch.zeros(1), handle, 0)


@pytest.mark.parametrize("run", [run_start, run_wait])
@pytest.mark.parametrize("way", ["never", "unregistered", "collected"])
def test_unknown_handle(run: Callable[[int], None], way: str) -> None:
    target = Recorder()
    handle = register_target(target)
    if way == "never":
        handle += 1000
    elif way == "unregistered":
        unregister_target(handle)
    else:
        del target
        gc.collect()
    with pytest.raises(
        RuntimeError,
        match=rf"refers to megabuf buffers {handle}, which were detached; call torch.compiler.reset\(\) and compile",
    ):
        run(handle)
