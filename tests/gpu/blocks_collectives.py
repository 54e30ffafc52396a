"""Block of ``check.py``: real collectives inside a captured step."""

from __future__ import annotations

import contextlib
import gc
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from gpu_context import Context, compare, require
from gpu_training import STEPS, Training, make_net, replay_at

from megabuf_fx.runtime.collectives import Comm, ProcessGroupComm

HUNG = "hung"
"""Name of threads that may never come back."""


def collectives(context: Context) -> str:
    """Real collectives inside the captured step, on communicators of one rank."""
    backend = "nccl" if context.is_cuda else "gloo"
    if context.is_cuda:
        torch.cuda.set_device(context.device)
    store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
    try:
        started = train_with_collectives(context)
    except Exception as error:
        # Frames of the traceback hold the graph.
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        # A communicator waits for ever for graphs that still hold its collectives, so they go first.
        torch.compiler.reset()
        gc.collect()
        context.synchronize()
        in_time(dist.destroy_process_group, "destroy_process_group", limit_s=30.0)
    return f"{backend}, world 1: {started}; {STEPS} replays bitwise"


def train_with_collectives(context: Context) -> str:
    started: Counter[str] = Counter()

    def make(group: object, *, name: str, timeout: timedelta | None, instances: int) -> Comm:
        # The project uses the identity for a group of one.
        return ProcessGroupComm([0], name=name, timeout=timeout)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("megabuf_fx.runtime.transports._make_comm", make))
        for name in ("all_reduce", "reduce_scatter", "all_gather", "exchange", "reduce_scalar"):
            stack.enter_context(counted(ProcessGroupComm, name, started))
        config = {"bucket_size": 1000, "overlap_param_gather": True}
        training = Training(context, context.compilers[0], make_net(context, dropout=0.125), config)
        # Also gives the graph back: a communicator waits for it.
        stack.callback(in_time, training.buf.detach, "detach", limit_s=30.0)
        batches = [context.randn(2, 32, 64, seed=step) for step in range(STEPS)]
        expected = training.run(training.step, batches)
        training.restart()
        captured = training.capture(batches[0])
        training.restart_seed()
        found = [replay_at(training, captured, step, batch) for step, batch in enumerate(batches)]
        compare([*found, *training.state()], expected, "losses, parameters and masters")
        # On gloo a reduce-scatter is made of messages and a sum.
        reduce = "reduce_scatter" if context.is_cuda else "exchange"
        for name in (reduce, "all_gather", "reduce_scalar"):
            require(started[name] > 0, f"no {name} was started, only {dict(started)}")
        context.synchronize()
    return ", ".join(f"{count} {name}" for name, count in sorted(started.items()))


def counted(cls: type, name: str, calls: Counter[str]) -> Any:
    """Count calls of a method of ``cls``."""
    original = getattr(cls, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return original(*args, **kwargs)

    return mock.patch.object(cls, name, call)


def in_time(function: Callable[[], object], what: str, *, limit_s: float) -> None:
    """Call ``function`` in a thread of its own; what hangs there is an error here."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=HUNG, daemon=True)
    thread.start()
    thread.join(limit_s)
    require(not thread.is_alive(), f"{what} did not return within {limit_s:.0f} s")
    if errors:
        raise errors[0]
