"""Rates of the cost model, from the config or measured while a model is attached."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from megabuf_fx.config import MegabufConfig
from megabuf_fx.cost_model import Device, Link, Route
from megabuf_fx.runtime.collectives import Comm
from megabuf_fx.runtime.transports import choose_reduce_scatter

_REPEATS = 5
_LEAST_US = 1e-3
"""Clocks see nothing shorter; also what a fake process group takes."""


def find_rates(config: MegabufConfig, comm: Comm, like: Tensor) -> tuple[Device, Link]:
    """The rates that the config gives, and measured ones for the others; equal on all ranks.

    Collective, if anything is measured. ``comm`` carries the gradients, ``like`` is one of the parameters.
    """
    grad_dtype = torch.float32 if config.grad_reduce_in_fp32 else like.dtype
    needs_device = None in (config.device_tflops, config.device_memory_gbs, config.device_op_us)
    device = _measure_device(like) if needs_device else Device(1, 1, 0)
    link = Link(gbps=float("inf"), alpha_us=0.0)
    if None in (config.link_gbps, config.link_alpha_us) and comm.size * config.num_distributed_optimizer_instances > 1:
        link = _measure_link(config, comm, like.device, grad_dtype)
    answers = comm.all_gather_object((device.tflops, device.memory_gbs, device.op_us, link.gbps, link.alpha_us))
    ranks = [answer for answer in answers if isinstance(answer, tuple)]
    # The step waits for the slowest.
    tflops, memory_gbs, gbps = (min(rank[place] for rank in ranks) for place in (0, 1, 3))
    op_us, alpha_us = (max(rank[place] for rank in ranks) for place in (2, 4))
    return (
        Device(
            _given(config.device_tflops, tflops),
            _given(config.device_memory_gbs, memory_gbs),
            _given(config.device_op_us, op_us),
        ),
        Link(_given(config.link_gbps, gbps), _given(config.link_alpha_us, alpha_us)),
    )


def _given(value: float | None, measured: float) -> float:
    return measured if value is None else float(value)


def _measure_device(like: Tensor) -> Device:
    side, count = (4096, 2**27) if like.is_cuda else (512, 2**23)
    square = torch.ones(side, side, dtype=like.dtype, device=like.device)
    source, target, few = (torch.zeros(n, device=like.device) for n in (count, count, 64))

    def many_ops() -> None:
        for _ in range(100):
            few.add_(1)

    matmul_us = _time(lambda: square @ square, like.device)
    copy_us = _time(lambda: target.copy_(source), like.device)
    ops_us = _time(many_ops, like.device)
    return Device(
        tflops=2 * side**3 / matmul_us / 1e6,
        memory_gbs=2 * source.nbytes / copy_us / 1e3,
        op_us=ops_us / 100,
    )


def _measure_link(config: MegabufConfig, comm: Comm, device: torch.device, grad_dtype: torch.dtype) -> Link:
    """The line through the times of a small and a large reduction; what starting one costs is in the latency."""
    instances = config.num_distributed_optimizer_instances
    route = Route(comm.size, instances, sharded=config.use_distributed_optimizer)
    small, large = 2**12, 2**26 if device.type == "cuda" else 2**23
    times, sizes = [], []
    for nbytes in (small, large):
        # A multiple of 128 elements for every rank.
        chunk = max(1, nbytes // grad_dtype.itemsize // comm.size // 128) * 128
        full = torch.zeros(chunk * comm.size, dtype=grad_dtype, device=device)
        times.append(_time(_reduction(config, comm, full), device))
        sizes.append(full.nbytes)
    slope = max(_LEAST_US, times[1] - times[0]) / (sizes[1] - sizes[0])
    latency = max(0.0, times[0] - slope * sizes[0])
    return Link(gbps=8e-3 * route.reduce_share / slope, alpha_us=latency / route.reduce_messages)


def _reduction(config: MegabufConfig, comm: Comm, full: Tensor) -> Callable[[], object]:
    if not config.use_distributed_optimizer:
        return lambda: comm.all_reduce(full, average=False).wait()
    start = choose_reduce_scatter(comm, full.dtype, with_fp32_accumulation=config.reduce_scatter_with_fp32_accumulation)
    shard = full.view(comm.size, -1)[comm.rank]
    return lambda: start(shard, full, False).wait()


def _time(run: Callable[[], object], device: torch.device) -> float:
    """Microseconds, the median of a few runs after one that warms up."""

    def once() -> float:
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) * 1e6

    once()
    return max(_LEAST_US, statistics.median(once() for _ in range(_REPEATS)))
