"""Blocks of ``check.py``: whole steps, captured or on another stream, their numbers, memory and time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gpu_context import Context, compare, no_host_reads, require, time_ms
from gpu_training import STEPS, Kind, Training, make_net, replay_at
from torch import Tensor

import megabuf_fx as mb


def whole_step(context: Context) -> str:
    """Forward, backward, clipping, AdamW and gathers in one graph, against the ordinary step: bitwise."""
    # Both runs use the very same compiled graphs, and the same kernels give the same bits.
    cases: list[tuple[Kind, torch.dtype]] = [(kind, torch.float32) for kind in context.compilers]
    cases.append((context.compilers[0], torch.bfloat16))
    for kind, dtype in cases:
        config = {"bucket_size": 1000, "overlap_param_gather": True, "grad_reduce_in_fp32": True}
        net = make_net(context, dropout=0.125, dtype=dtype)
        training = Training(context, kind, net, config, max_skipped_steps=100)
        require(len(training.buf.plan.groups) > 1, "the model is too small for several buckets")
        batches = [context.randn(2, 32, 64, seed=step).to(dtype) for step in range(STEPS)]
        expected = training.run(training.step, batches)
        training.restart()
        captured = training.capture(batches[0])
        training.restart_seed()
        with no_host_reads(context):
            # Only in the replays: reading what they left is allowed again.
            losses = [replay_at(training, captured, step, batch) for step, batch in enumerate(batches)]
        what = f"{kind}, {dtype}"
        compare([*losses, *training.state()], expected, f"{what}: losses, parameters and masters")
        require(int(training.buf.flags.step) == STEPS, f"{what}: {int(training.buf.flags.step)} updates counted")
        skip_a_step(training, captured, batches[0])
    return f"{len(cases)} cases, {STEPS} replays bitwise; an Inf batch updates nothing, without a host read"


def skip_a_step(training: Training, captured: mb.CapturedStep, batch: Tensor) -> None:
    def everything() -> list[Tensor]:
        moments = [v for entries in training.optimizer.inner.state.values() for v in entries.values()]
        return [*training.state(), *(value.clone() for value in moments)]

    before = everything()
    with no_host_reads(training.context):
        captured(torch.full_like(batch, float("inf")))
    compare(everything(), before, "parameters and optimizer state after an Inf batch")
    flags = training.buf.flags
    require((float(flags.found_inf), int(flags.skipped)) == (1.0, 1), "the skipped step was not counted")
    captured(batch)
    after = everything()
    require(not any(torch.equal(a, b) for a, b in zip(after, before)), "the step after it did not update everything")
    require(all(bool(value.isfinite().all()) for value in after), "NaN was left behind")
    require((float(flags.found_inf), int(flags.skipped)) == (0.0, 1), "found_inf stayed set")


def large_step(context: Context) -> tuple[Training, mb.CapturedStep, Tensor]:
    """A step whose activations are most of its memory, compiled as for real use, and its capture."""
    training = Training(context, context.compilers[0], make_net(context, 1024), {"num_buckets": 3})
    batch = context.randn(2, 4096, 1024)
    for _ in range(3):
        training.step(batch)
    return training, training.capture(batch), batch


def peak_memory(context: Context) -> str:
    """A captured step needs no more than an ordinary one, and replays need no more each time."""
    training, captured, batch = large_step(context)
    graph = captured.graph
    assert isinstance(graph, torch.cuda.CUDAGraph)
    pool = sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == graph.pool())
    training.step(batch)
    captured(batch)
    torch.cuda.synchronize()
    rest = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    training.step(batch)
    torch.cuda.synchronize()
    ordinary = torch.cuda.max_memory_allocated() - rest
    require(torch.cuda.memory_allocated() == rest, "an ordinary step leaves memory behind")
    before = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    for _ in range(10):
        captured(batch)
    torch.cuda.synchronize()
    after = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    require(before == after, f"10 replays grew the memory (allocated, reserved) from {before} to {after}")
    # The allocator cuts memory into segments of 2 and 20 MiB, and cuBLAS has a workspace of its own in each pool.
    require(0 < pool <= 1.5 * ordinary + 128 * 2**20, f"the graph holds {pool:,} bytes, a step needs {ordinary:,}")
    mib = 2**20
    return f"above {rest / mib:.0f} MiB at rest: ordinary {ordinary / mib:.0f}, graph {pool / mib:.0f} MiB; no growth"


def step_time(context: Context) -> str:
    """A small step, where the host is the limit, and a large one; and how many kernels each launches."""
    small, large = (time_steps(context, width, rows) for width, rows in ((256, 64), (1024, 4096)))
    return f"small: {small}; large: {large}"


def time_steps(context: Context, width: int, rows: int) -> str:
    training = Training(context, context.compilers[0], make_net(context, width), {"num_buckets": 3})
    batch = context.randn(2, rows, width)
    for _ in range(3):
        training.step(batch)
    captured = training.capture(batch)
    steps: list[Callable[[], object]] = [lambda: training.step(batch), lambda: captured(batch)]
    ordinary, replayed = time_ms(steps, calls=10, rounds=9)
    kernels = " and ".join(map(count_kernels, steps))
    return (
        f"ordinary {ordinary:.2f} ms, captured {replayed:.2f} ms ({replayed / ordinary:.2f}x), {kernels} kernels "
        f"({2 * rows} rows, width {width})"
    )


def count_kernels(function: Callable[[], object]) -> str:
    """What ran on the device, copies included; "?" where the profiler is not to be had."""
    from torch.autograd.profiler_util import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            function()
            torch.cuda.synchronize()
        found = [event for event in profiled.events() if event.device_type == DeviceType.CUDA]
    except (RuntimeError, AssertionError):
        return "?"
    return str(len(found)) if found else "?"


def streams(context: Context) -> str:
    """Training on a stream of the user's gives the numbers of the default stream, though hooks live on that one."""
    kinds: list[Kind] = ["eager", *context.compilers]
    for kind in kinds:
        # Large products: whoever does not wait for them reads what was there before.
        training = Training(context, kind, make_net(context, 1024), {"num_buckets": 3, "overlap_param_gather": True})
        batches = [context.randn(2, 2048, 1024, seed=step) for step in range(3)]
        expected = training.run(training.step, batches)
        training.restart()
        stream = torch.cuda.Stream(context.device)
        stream.wait_stream(torch.cuda.current_stream(context.device))
        with torch.cuda.stream(stream):

            def late_step(windows: Tensor, training: Training = training) -> Tensor:
                # The stream lags behind the host by some 10 ms.
                torch.cuda._sleep(20_000_000)
                return training.step(windows)

            found = training.run(late_step, batches)
        torch.cuda.current_stream(context.device).wait_stream(stream)
        compare(found, expected, f"{kind}: losses, parameters and masters")
    return f"{', '.join(kinds)}: 3 steps on a stream of its own bitwise equal to the default stream"
