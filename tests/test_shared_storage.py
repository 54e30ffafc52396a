"""``runtime/shared_storage.py``: every operation in every phase, then the orders that lose gradients or weights, each
tried on the buffers of an attached model and caught by the invariant it breaks (I1 to I5)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from helpers import batch, error_text, fresh_compiler, seeded
from quantized_runs import IN, ROWS, config, net
from torch import Tensor, nn

import megabuf_fx as mb
from megabuf_fx.runtime.bucket_groups import ParamGatherer
from megabuf_fx.runtime.buffers import ParamGradBuffer
from megabuf_fx.runtime.shared_storage import SharedPhase, SharedStorage, SharedStorageError

GRADIENTS, STAGED, GATHERED, COPIED = SharedPhase
NAMES = ("0 (c ... b)", "1 (a)")

MOVES: dict[str, tuple[SharedPhase, SharedPhase, str]] = {
    "gather": (STAGED, GATHERED, "gathered"),
    "copy_out": (GATHERED, COPIED, "copied out"),
    "clear": (COPIED, GRADIENTS, "cleared"),
}
"""Phase before, phase after, and the word in messages; ``stage`` is apart, as it may be repeated."""


def storage_in(phase: SharedPhase, bucket: int, *, are_needed: bool = False) -> SharedStorage:
    """Bucket ``bucket`` of two is in ``phase``, reached by legal moves; the other holds gradients."""
    storage = SharedStorage(NAMES)
    for name, reached in (("stage", STAGED), ("gather", GATHERED), ("copy_out", COPIED)):
        if storage.phases[bucket] is not phase:
            getattr(storage, name)(bucket)
            assert storage.phases[bucket] is reached
    assert storage.phases[bucket] is phase
    storage.are_gradients_needed = are_needed
    return storage


EVERY = list(itertools.product(SharedPhase, (0, 1), (False, True)))


@pytest.mark.parametrize(("phase", "bucket", "are_needed"), EVERY)
@pytest.mark.parametrize("move", MOVES)
def test_moves(move: str, phase: SharedPhase, bucket: int, are_needed: bool) -> None:
    storage = storage_in(phase, bucket, are_needed=are_needed)
    before, after, word = MOVES[move]
    phases = list(storage.phases)
    if phase is before:
        getattr(storage, move)(bucket)
        phases[bucket] = after
    else:
        message = error_text(lambda: getattr(storage, move)(bucket))
        expected = (
            f"SharedStorageError: bucket {NAMES[bucket]} is {word} while it holds {phase.value}, "
            f"expected {before.value}"
        )
        assert message == expected + (" (I3)" if move == "clear" else "")
    assert storage.phases == phases
    assert storage.are_gradients_needed is are_needed


@pytest.mark.parametrize(("phase", "bucket", "are_needed"), EVERY)
def test_stage(phase: SharedPhase, bucket: int, are_needed: bool) -> None:
    storage = storage_in(phase, bucket, are_needed=are_needed)
    phases = list(storage.phases)
    if are_needed:
        message = error_text(lambda: storage.stage(bucket))
        assert message.startswith(f"SharedStorageError: parameters of bucket {NAMES[bucket]} are staged while it holds")
        assert phase.value in message
        assert "(I2)" in message
    elif phase in (GRADIENTS, STAGED):
        storage.stage(bucket)
        phases[bucket] = STAGED
    else:
        message = error_text(lambda: storage.stage(bucket))
        assert message == (
            f"SharedStorageError: bucket {NAMES[bucket]} is staged while it holds {phase.value}, "
            f"expected {GRADIENTS.value}"
        )
    assert storage.phases == phases
    assert storage.are_gradients_needed is are_needed


@pytest.mark.parametrize(("phase", "bucket", "are_needed"), EVERY)
def test_write_gradients(phase: SharedPhase, bucket: int, are_needed: bool) -> None:
    storage = storage_in(phase, bucket, are_needed=are_needed)
    phases = list(storage.phases)
    if phase is GRADIENTS:
        storage.write_gradients()
        assert storage.are_gradients_needed
    else:
        message = error_text(storage.write_gradients)
        assert message.startswith(
            f"SharedStorageError: gradients are written, but bucket {NAMES[bucket]} still holds {phase.value} "
        )
        assert ("(I1)" if phase is COPIED else "(I4)") in message
        assert storage.are_gradients_needed is are_needed
    assert storage.phases == phases


@pytest.mark.parametrize(("phase", "bucket", "are_needed"), EVERY)
def test_read_gradients(phase: SharedPhase, bucket: int, are_needed: bool) -> None:
    storage = storage_in(phase, bucket, are_needed=are_needed)
    if phase is GRADIENTS:
        storage.read_gradients("somebody looks")
    else:
        message = error_text(lambda: storage.read_gradients("somebody looks"))
        assert message.startswith(
            f"SharedStorageError: somebody looks, but bucket {NAMES[bucket]} already holds {phase.value} (I2)"
        )
    assert storage.are_gradients_needed is are_needed


@pytest.mark.parametrize(("phase", "bucket", "are_needed"), EVERY)
def test_release_gradients(phase: SharedPhase, bucket: int, are_needed: bool) -> None:
    storage = storage_in(phase, bucket, are_needed=are_needed)
    phases = list(storage.phases)
    storage.release_gradients()
    assert not storage.are_gradients_needed
    assert storage.phases == phases


def test_errors_are_runtime_errors() -> None:
    assert issubclass(SharedStorageError, RuntimeError)


def test_gradients_that_a_step_has_used_up_are_not_read() -> None:
    """After a whole round the storage holds zeros, which are nobody's gradients (I2)."""
    storage = SharedStorage(NAMES)
    storage.read_gradients("nothing was written yet")
    for _ in range(2):
        storage.write_gradients()
        storage.read_gradients("the norm")
        storage.release_gradients()
        for move, bucket in itertools.product(("stage", "gather", "copy_out", "clear"), (0, 1)):
            getattr(storage, move)(bucket)
        message = error_text(lambda: storage.read_gradients("gradients are clipped"))
        assert message.startswith("SharedStorageError: gradients are clipped, but bucket 0 (c ... b)")
        assert "(I2)" in message


# The buffers of an attached model


def attached(**options: Any) -> tuple[Any, mb.MegabufHandle, Any, mb.DistributedOptimizer]:
    model: Any = seeded(net)
    buf = mb.attach(model, config("shared", **options))
    call = torch.compile(model, backend="megabuf")
    return model, buf, call, mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)


def shared_buffer(buf: mb.MegabufHandle) -> ParamGradBuffer:
    (buffer,) = [buffer for buffer in buf.buffers.buffers if buffer.shared is not None]
    return buffer


def loss_of(call: Any, step: int) -> Tensor:
    loss: Tensor = call(batch(step, 0, 0, ROWS, IN).bfloat16()).float().square().mean()
    return loss


@pytest.fixture(params=[True, False], ids=["fp32_grads", "bf16_grads"])
def fp32_grads(request: pytest.FixtureRequest) -> Iterator[bool]:
    yield bool(request.param)
    fresh_compiler()


class Path(NamedTuple):
    """What runs the model, and when parameters are gathered."""

    is_compiled: bool
    overlap: bool


@pytest.fixture(params=[Path(True, True), Path(False, False)], ids=["compiled_overlap", "eager_path"])
def path(request: pytest.FixtureRequest) -> Path:
    return Path(*request.param)


LAST = r"1 \(fc1.weight\)"
FIRST = r"0 \(fc3.weight ... fc2.weight\)"
"""Of the two buckets, in the order of gradients; gathers run the other way round."""


def clear_all(buffer: ParamGradBuffer, bucket: int) -> None:
    """Zero the whole storage as soon as the first bucket is copied out."""
    clear_nothing(buffer, bucket)
    for each in range(len(buffer.layout.buckets)) if buffer.shared is not None else ():
        assert buffer.shared is not None
        buffer.shared.clear(each)
        buffer.grad_data.zero_()


def clear_nothing(buffer: ParamGradBuffer, bucket: int) -> None:
    # The buffer of biases and norms is gathered, too.
    if buffer.shared is not None and buffer.stored is not None:
        buffer.shared.copy_out(bucket)
        buffer.stored.copy_out(bucket)


def finish_nothing_of(group: int) -> Callable[..., None]:
    def wait(gatherer: ParamGatherer, which: int, wait: Callable[..., None] = ParamGatherer.wait) -> None:
        if which != group:
            wait(gatherer, which)

    return wait


WRONG: dict[str, tuple[type[Any], str, Callable[..., None], str]] = {
    "whole zero too early": (
        ParamGradBuffer,
        "finish_gather",
        clear_all,
        rf"bucket {FIRST} is cleared while it holds gathered parameters that are not copied out, expected parameters "
        rf"that are copied out and not cleared \(I3\)",
    ),
    "no zero": (
        ParamGradBuffer,
        "finish_gather",
        clear_nothing,
        rf"gradients are written, but bucket {FIRST} still holds parameters that are copied out and not cleared \(I1\)",
    ),
    "bucket 0 unfinished": (
        ParamGatherer,
        "wait",
        finish_nothing_of(0),
        rf"gradients are written, but bucket {FIRST} still holds gathered parameters that are not copied out \(I4\)",
    ),
    "bucket 1 unfinished": (
        ParamGatherer,
        "wait",
        finish_nothing_of(1),
        rf"gradients are written, but bucket {LAST} still holds gathered parameters that are not copied out \(I4\)",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_orders_are_caught(wrong: str, fp32_grads: bool, path: Path) -> None:
    """The second step at the latest raises: gradients meet what the first left."""
    model, _, call, opt = attached(grad_reduce_in_fp32=fp32_grads, overlap_param_gather=path.overlap)
    call = call if path.is_compiled else model
    where, name, function, message = WRONG[wrong]
    loss_of(call, 0).backward()

    def rest() -> None:
        opt.step()
        opt.zero_grad()
        loss_of(call, 1).backward()

    with mock.patch.object(where, name, function), pytest.raises(SharedStorageError, match=message):
        rest()


def test_staging_before_the_gradient_norm_is_caught(fp32_grads: bool) -> None:
    _, buf, call, opt = attached(grad_reduce_in_fp32=fp32_grads)
    loss_of(call, 0).backward()
    message = rf"parameters of bucket {FIRST} are staged while it holds gradients that are still needed \(I2\)"
    with pytest.raises(SharedStorageError, match=message):
        opt.stage_params()
    # Nothing is lost: the step goes on.
    assert opt.clip_grad_norm_(1.0) > 0
    opt.step()
    opt.zero_grad()
    opt.stage_params()
    loss_of(call, 1).backward()
    opt.step()
    buf.detach()


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_end_with_step(overlap: bool, fp32_grads: bool) -> None:
    """Whether their storage is staged, as with the overlap, or gathered and cleared again (I2)."""
    _, buf, call, opt = attached(grad_reduce_in_fp32=fp32_grads, overlap_param_gather=overlap)
    loss_of(call, 0).backward()
    buf.finish_grad_sync()
    buf.scale_gradients(0.5)
    assert opt.clip_grad_norm_(1.0) > 0
    opt.step()
    before = [run.master.detach().clone() for run in opt.runs]
    refused: dict[str, tuple[Callable[[], Any], str]] = {
        "clip": (lambda: opt.clip_grad_norm_(1.0), "the optimizer uses gradients"),
        "scale": (lambda: buf.scale_gradients(2.0), "gradients are scaled"),
        "step": (opt.step, "the optimizer uses gradients"),
    }
    for function, what in refused.values():
        message = error_text(function)
        assert re.match(rf"SharedStorageError: {what}, but bucket {FIRST} already ", message), message
        assert "(I2)" in message
        assert "with a shared buffer gradients end with step" in message
    assert all(torch.equal(run.master, was) for run, was in zip(opt.runs, before))
    # A new step has gradients again, whether its backward comes or not.
    opt.zero_grad()
    loss_of(call, 1).backward()
    assert opt.clip_grad_norm_(1.0) > 0
    opt.step()
    opt.zero_grad()
    assert opt.clip_grad_norm_(1.0) == 0
    opt.step()
    buf.detach()


def with_padding() -> nn.Module:
    """Rows of 32 whose number is odd leave gaps between parameters and at the ends of buckets."""
    return nn.Sequential(nn.Linear(IN, 96), nn.Tanh(), nn.Linear(96, 35), nn.Linear(35, 2)).bfloat16()


def test_storage_is_clear_when_the_first_gradient_is_written(fp32_grads: bool, path: Path) -> None:
    """Where gathered parameters lay all is zero, and padding everywhere (I1, I5), in every step.

    Above them fp32 storage may hold old gradients, because the first ones of a step overwrite.
    """
    model: Any = seeded(with_padding)
    options = {"grad_reduce_in_fp32": fp32_grads, "overlap_param_gather": path.overlap}
    buf = mb.attach(model, config("shared", **options))
    call = torch.compile(model, backend="megabuf") if path.is_compiled else model
    opt = mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    buffer = shared_buffer(buf)
    assert buffer.param_data is not None
    assert buffer.param_data.data_ptr() == buffer.grad_data.data_ptr()
    assert buffer.param_data.nbytes == 2 * buffer.layout.numel
    is_padding = torch.ones(buffer.layout.numel, dtype=torch.bool)
    for slot in buffer.layout.slots:
        is_padding[slot.start : slot.end] = False
    assert is_padding.sum() > 64
    found: list[tuple[int, int]] = []
    original = SharedStorage.write_gradients

    def write_gradients(shared: SharedStorage) -> None:
        if not shared.are_gradients_needed:
            assert buffer.param_data is not None
            left = (buffer.param_data.count_nonzero(), buffer.grad_data[is_padding].count_nonzero())
            found.append((int(left[0]), int(left[1])))
        original(shared)

    for step in range(3):
        with mock.patch.object(SharedStorage, "write_gradients", write_gradients):
            loss_of(call, step).backward()
        assert found == [(0, 0)] * (step + 1)
        assert buffer.grad_data.count_nonzero() > 0
        assert buffer.grad_data[is_padding].count_nonzero() == 0
        opt.step()
        opt.zero_grad()
    buf.detach()
