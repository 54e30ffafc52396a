"""``runtime/buffers.py``: views, padding, and fp32 sums beside a 16-bit buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megabuf_fx as mb
from megabuf_fx.runtime.buffers import ParamGradBuffer
from megabuf_fx.runtime.layout import ParamSpec
from megabuf_fx.runtime.plan import BucketPlan, plan_buckets

FP32, BF16 = torch.float32, torch.bfloat16

SHAPES = [(5, 13), (13,), (64,), (3, 7), (1,), (130,)]


def build(
    *, sharded: bool = True, bucket_size: int | None = 100, promoted: Sequence[int] = (), dtype: torch.dtype = FP32
) -> tuple[BucketPlan, ParamGradBuffer, list[nn.Parameter]]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    plan = plan_buckets(
        [ParamSpec(f"p{i}", shape, dtype) for i, shape in enumerate(SHAPES)],
        dp_size=2,
        sharded=sharded,
        bucket_size=bucket_size,
        grad_reduce_in_fp32=False,
        dense=not sharded,
    )
    (layout,) = plan.layouts
    return plan, ParamGradBuffer(layout, params, device=torch.device("cpu"), sharded=sharded, promoted=promoted), params


@pytest.mark.parametrize("bucket_size", [None, 1, 100])
def test_parameters_lie_where_the_layout_says(bucket_size: int | None) -> None:
    """Megatron's ``param_to_index``: position in the bucket is position in the buffer less the bucket's start, starts
    are multiples of 64, and that slice of ``param_data`` is the parameter."""
    before = [param.detach().clone() for param in build(bucket_size=bucket_size)[2]]
    plan, buffer, params = build(bucket_size=bucket_size)
    assert buffer.param_data is not None
    for group in plan.groups:
        (bucket,) = group.buckets
        in_bucket = buffer.param_data[bucket.start : bucket.end]
        for index in bucket.params:
            slot = plan.locations[index][1]
            start, end = slot.start - bucket.start, slot.end - bucket.start
            assert slot.start % 64 == start % 64 == 0
            assert 0 <= start < end <= bucket.numel
            assert torch.equal(in_bucket[start:end].view(params[index].shape), before[index])
            assert params[index].data_ptr() == in_bucket[start:end].data_ptr()
            assert main_grad(params[index]).data_ptr() == buffer.grad_data[slot.start : slot.end].data_ptr()


def main_grad(param: Tensor) -> Tensor:
    found: Tensor = param.main_grad  # type: ignore[attr-defined]
    return found


def test_writes_go_both_ways_and_padding_stays_zero() -> None:
    _, buffer, params = build()
    assert buffer.param_data is not None
    with torch.no_grad():
        for param in params:
            param.fill_(2)
            main_grad(param).fill_(3)
    total = sum(param.numel() for param in params)
    assert buffer.param_data.count_nonzero() == buffer.grad_data.count_nonzero() == total
    buffer.param_data.zero_()
    assert all(not param.any() for param in params)


def test_dense_buffers_have_no_padding_and_leave_parameters_alone() -> None:
    _, buffer, params = build(sharded=False)
    assert buffer.param_data is None
    assert buffer.grad_data.numel() == sum(param.numel() for param in params)
    assert all(param.untyped_storage().nbytes() == param.numel() * 4 for param in params)


def test_release_gives_parameters_their_own_storage() -> None:
    _, buffer, params = build()
    before = [param.detach().clone() for param in params]
    buffer.release()
    assert buffer.param_data is not None
    buffer.param_data.zero_()
    for param, value in zip(params, before):
        assert torch.equal(param, value)
        assert not hasattr(param, "main_grad")


# fp32 local accumulation


class Named(nn.Module):
    def __init__(self, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4, dtype=dtype)
        self.second = nn.Linear(4, 2, dtype=dtype)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ((), set()),
        (("*.weight",), {"first.weight", "second.weight"}),
        (("all",), {"first.weight", "first.bias", "second.weight", "second.bias"}),
        (("first.*", "nothing"), {"first.weight", "first.bias"}),
        (("second.bias", "*bias"), {"first.bias", "second.bias"}),
    ],
)
def test_patterns_choose_parameters(patterns: tuple[str, ...], expected: set[str]) -> None:
    model = Named()
    buf = mb.attach(model, mb.MegabufConfig(param_name_patterns_for_fp32_local_accumulation=patterns))
    names = [name for name, _ in model.named_parameters()]
    (buffer,) = buf.buffers.buffers
    assert {names[index] for index in buffer.promoted} == expected
    for name, param in model.named_parameters():
        assert main_grad(param).dtype == (FP32 if name in expected else BF16)
        assert hasattr(param, "main_grad_copy_in_grad_buffer") == (name in expected)
        view = getattr(param, "main_grad_copy_in_grad_buffer", main_grad(param))
        assert view.dtype == BF16
        assert view.untyped_storage().data_ptr() == buffer.grad_data.untyped_storage().data_ptr()
        assert view.shape == param.shape


def test_fp32_gradients_need_no_sums_of_their_own() -> None:
    model = Named(FP32)
    buf = mb.attach(model, mb.MegabufConfig(param_name_patterns_for_fp32_local_accumulation=("all",)))
    assert buf.buffers.buffers[0].promoted == ()


def sums(model: nn.Module, buf: mb.MegabufHandle, small: float) -> None:
    """1 and a small gradient for every element, in two micro-batches."""
    for index, value in enumerate((1.0, small)):
        total: Any = sum(param.float().sum() for param in model.parameters())
        if index == 0:
            with buf.no_sync():
                (total * value).backward()
        else:
            (total * value).backward()


def test_micro_batches_are_summed_in_fp32_and_rounded_once() -> None:
    """What is left of 1 + 2**-9 after the reduction is a bf16 number, as in Megatron (semantics section 9)."""
    model = Named()
    config = mb.MegabufConfig(param_name_patterns_for_fp32_local_accumulation=("*.weight",), overlap_grad_reduce=False)
    buf = mb.attach(model, config)
    (buffer,) = buf.buffers.buffers
    for step in range(2):
        small = 2.0**-9 if step == 0 else 2.0**-6
        sums(model, buf, small)
        assert (main_grad(model.first.weight) == 1 + small).all()
        # In bf16 the small one is lost.
        assert (main_grad(model.first.bias) == (1 if step == 0 else 1 + small)).all()
        buf.finish_grad_sync()
        for index in buffer.promoted:
            assert torch.equal(buffer.main_grads[index], buffer.grad_views[index].float())
        assert (main_grad(model.first.weight) == (1 if step == 0 else 1 + small)).all()
        # Megatron zeroes the sums; here the next step's first gradient overwrites them.
        buf.zero_grad()


def test_scale_gradients_reaches_the_sums() -> None:
    model = Named()
    buf = mb.attach(model, mb.MegabufConfig(param_name_patterns_for_fp32_local_accumulation=("*.weight",)))
    sums(model, buf, 1.0)
    buf.finish_grad_sync()
    buf.scale_gradients(0.25)
    for param in model.parameters():
        assert (main_grad(param) == 0.5).all()
        assert (getattr(param, "main_grad_copy_in_grad_buffer", main_grad(param)) == 0.5).all()


def test_an_unused_parameters_sum_is_zero() -> None:
    """Nothing of an earlier step is sent for it."""
    model = Named()
    config = mb.MegabufConfig(param_name_patterns_for_fp32_local_accumulation=("all",), overlap_grad_reduce=False)
    buf = mb.attach(model, config)
    sums(model, buf, 1.0)
    buf.finish_grad_sync()
    buf.zero_grad()
    model.first.weight.float().sum().backward()
    buf.finish_grad_sync()
    values = {name: main_grad(param).unique().tolist() for name, param in model.named_parameters()}
    assert values == {"first.weight": [1.0], "first.bias": [0.0], "second.weight": [0.0], "second.bias": [0.0]}
