"""What a CPU cannot show, in one script for one GPU: captured steps, NCCL inside a graph, kernels, memory, times.

    python tests/gpu/check.py [--device cuda|cpu] [--blocks NAME,...] [--out FILE.json]

Each block prints PASS, FAIL or SKIP, none stops the others, and a table comes last; the exit code is 1 if any failed.
Needs torch and the project, nothing else. On a CPU the same blocks run as far as they can, with the tape
(``megabuf_fx/tape.py``) in place of the CUDA graph; ``tests/test_gpu_check.py`` does that in CI.

A further block is a function of ``Context`` that returns a short note or raises, and a line in ``BLOCKS``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

if importlib.util.find_spec("megabuf_fx") is None:
    # A bare checkout on a machine where nothing can be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import megabuf_fx as mb
from megabuf_fx.runtime.collectives import Comm, ProcessGroupComm
from megabuf_fx.runtime.ops import accumulate_wgrad_
from megabuf_fx.tape import Tape

Compiler = Literal["aot_eager", "inductor"]
Kind = Literal["eager", "aot_eager", "inductor"]
"""How a model runs: by hooks alone, or compiled by one of the inner compilers."""

STEPS = 5
LR = 2.0**-7
FACTORS = (1.0, 0.5, 0.75, 0.25, 0.625)
"""Of the learning rate, step by step. Powers of two and their sums, so that the rate is the same number in fp32 (a
captured step's table on a GPU) and as a Python float (an ordinary step): then both steps can be compared bitwise."""
HUNG = "hung"
"""Name of threads that may never come back."""
INDUCTOR_BOUND = 1e-6
"""Relative. Variants of one graph may contract a product and a sum differently (FMA)."""


@dataclass(frozen=True)
class Context:
    """What a block is told."""

    device: torch.device
    seed: int = 0
    compilers: tuple[Compiler, ...] = ("aot_eager",)
    """Inner compilers that blocks go through."""

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def randn(self, *shape: int, seed: int = 0) -> Tensor:
        """The same on every device and in every run."""
        generator = torch.Generator().manual_seed(self.seed * 1009 + seed)
        return torch.randn(*shape, generator=generator).to(self.device)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Block:
    """``run`` returns a note or raises. ``limit_s`` is reported when it is passed, and where the block was then."""

    name: str
    run: Callable[[Context], str]
    limit_s: float = 30.0
    needs_gpu: bool = False


@dataclass(frozen=True)
class Result:
    name: str
    result: Literal["PASS", "FAIL", "SKIP"]
    seconds: float
    note: str


@dataclass
class Training:
    """A model, attached and perhaps compiled, with steps of clipping, AdamW and several micro-batches."""

    context: Context
    kind: Kind
    model: nn.Module
    config: Mapping[str, Any] = field(default_factory=dict)
    max_skipped_steps: int | None = None

    def __post_init__(self) -> None:
        # Dynamo would make sizes symbolic that differ from those of an earlier model.
        torch.compiler.reset()
        inner = self.kind if self.kind != "eager" else "aot_eager"
        self.buf = mb.attach(self.model, mb.MegabufConfig(inner_compiler=inner, **self.config))
        self.call: Any = self.model if self.kind == "eager" else torch.compile(self.model, backend="megabuf")
        self._start = [param.detach().clone() for param in self.model.parameters()]
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Parameters of the beginning, a new optimizer, the seed anew. Compiled graphs stay, so both runs use them."""
        self.buf.sync_params()
        self.buf.zero_grad()
        for param, value in zip(self.model.parameters(), self._start):
            param.data.copy_(value)
        options: dict[str, Any] = {"lr": LR, "weight_decay": 0.125, "fused": True}
        self.optimizer = mb.DistributedOptimizer(
            self.model.parameters(), torch.optim.AdamW, max_skipped_steps=self.max_skipped_steps, **options
        )
        self.restart_seed()

    def restart_seed(self) -> None:
        torch.manual_seed(self.context.seed)

    def backward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.call(x).float().square().mean()
        loss.backward()
        # Not the loss itself: whoever keeps that keeps the autograd nodes of the parameters.
        return loss.detach()

    def step(self, windows: Tensor) -> Tensor:
        """One micro-batch for each of ``windows``; the sum of their losses."""
        with no_host_reads(self.context, is_on=self.buf.buffers.capture.is_active):
            total = torch.zeros((), device=self.context.device)
            for micro, x in enumerate(windows):
                is_last = micro + 1 == len(windows)
                with contextlib.nullcontext() if is_last else self.buf.no_sync():
                    total += self.backward(x)
            self.optimizer.clip_grad_norm_(0.125)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return total

    def run(self, take_step: Callable[[Tensor], Tensor], batches: Sequence[Tensor]) -> list[Tensor]:
        """The losses of all steps under a schedule, then parameters and masters."""
        schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: FACTORS[step % len(FACTORS)])
        results = []
        for batch in batches:
            results.append(take_step(batch))
            schedule.step()
        return [*results, *self.state()]

    def state(self) -> list[Tensor]:
        self.buf.sync_params()
        masters = [run.master.detach().clone() for run in self.optimizer.runs]
        return [*(param.detach().clone() for param in self.model.parameters()), *masters]

    def capture(self, example: Tensor) -> mb.CapturedStep:
        return mb.capture_step(self.step, example, optimizer=self.optimizer)


class Net(nn.Module):
    """Linear layers with and without bias, dropout, a LayerNorm, and no parameter whose true gradient is zero."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.fc3 = nn.Linear(width, 24)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(torch.tanh(self.fc1(x)), self.dropout, self.training)
        result: Tensor = self.fc3(self.norm(torch.tanh(self.fc2(h))))
        return result


def make_net(context: Context, width: int = 64, *, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(context.seed)
    return Net(width, dropout).to(context.device, dtype)


# Comparing and measuring.


class CheckError(Exception):
    """What a block has found wrong."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise CheckError(message)


def compare(found: Sequence[Tensor], expected: Sequence[Tensor], what: str, *, bound: float = 0.0) -> float:
    """The largest difference relative to the largest value; bitwise with ``bound`` 0.

    Raises:
        CheckError: above the bound, other shapes or dtypes, or anything not finite.
    """
    require(len(found) == len(expected), f"{what}: {len(found)} tensors, expected {len(expected)}")
    worst = 0.0
    for index, (mine, other) in enumerate(zip(found, expected)):
        require(
            mine.shape == other.shape and mine.dtype == other.dtype, f"{what}[{index}]: {mine.shape}, {other.shape}"
        )
        require(bool(mine.isfinite().all()) and bool(other.isfinite().all()), f"{what}[{index}] is not finite")
        if not torch.equal(mine, other):
            scale = other.double().abs().max().clamp(min=1e-30)
            difference = float((mine.double() - other.double()).abs().max() / scale)
            require(difference <= bound, f"{what}[{index}] differs by {difference:.1e} of its maximum, bound {bound:g}")
            worst = max(worst, difference)
    return worst


@contextlib.contextmanager
def no_host_reads(context: Context, *, is_on: bool = True) -> Iterator[None]:
    """On a GPU, whatever makes the host wait for the device is an error."""
    if not (context.is_cuda and is_on):
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def time_ms(functions: Sequence[Callable[[], object]], *, calls: int, rounds: int = 7) -> list[float]:
    """Median milliseconds of each function on the device, from interleaved rounds of ``calls`` calls."""
    samples: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    for _ in range(rounds):
        for function, sample in zip(functions, samples):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(calls):
                function()
            end.record()
            end.synchronize()
            sample.append(begin.elapsed_time(end) / calls)
    return [statistics.median(sample) for sample in samples]


# Blocks.


def versions(context: Context) -> str:
    triton = importlib.util.find_spec("triton")
    parts = [f"Python {sys.version.split()[0]}", f"torch {torch.__version__}"]
    if triton is not None:
        parts.append(f"triton {importlib.import_module('triton').__version__}")
    if context.is_cuda:
        major, minor = torch.cuda.get_device_capability(context.device)
        memory = torch.cuda.get_device_properties(context.device).total_memory / 2**30
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        parts += [torch.cuda.get_device_name(context.device), f"capability {major}.{minor}", f"{memory:.0f} GiB"]
        parts += [f"CUDA {torch.version.cuda}", f"NCCL {nccl}", f"driver {find_driver()}"]
        require((major, minor) >= (8, 0), "bf16 needs capability 8.0")
    return ", ".join(parts)


def find_driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def micro_batch(context: Context) -> str:
    """One captured micro-batch adds or overwrites as a number on the device says; with a Python flag it cannot."""
    worst = 0.0
    kinds: list[Kind] = ["eager", *context.compilers]
    for kind in kinds:
        config = {"bucket_size": 1000, "gradient_accumulation_fusion": False}
        training = Training(context, kind, make_net(context), config)
        batches = [[context.randn(32, 64, seed=10 * step + micro) for micro in range(4)] for step in range(3)]
        expected = accumulate(training, training.backward, batches)
        before = [grad.data_ptr() for grad in main_grads(training)]
        captured = mb.capture_micro_batch(training.backward, batches[0][0], model=training.model)
        found = accumulate(training, captured, batches)
        bound = INDUCTOR_BOUND if kind == "inductor" else 0.0
        worst = max(worst, compare(found, expected, f"{kind}: losses and main_grads", bound=bound))
        require(captured.replays == 12, f"{kind}: {captured.replays} replays, expected 12")
        require([grad.data_ptr() for grad in main_grads(training)] == before, f"{kind}: main_grad has moved")
        if kind == "eager":
            refuse_other_captures(training, batches[0][0])
            freeze_flag(training, batches[0], expected)
    exact = f"within {worst:.0e}" if "inductor" in kinds else "bitwise"
    return f"{', '.join(kinds)}: 3 steps of 4, {exact}; a Python flag gives wrong numbers"


def main_grads(training: Training) -> list[Tensor]:
    return list(training.buf.buffers.main_grads)


def accumulate(
    training: Training, backward: Callable[[Tensor], Tensor], batches: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Losses and gradients of each step, in buffers that held NaN before."""
    results = []
    for micros in batches:
        for grad in main_grads(training):
            grad.fill_(float("nan"))
        for x in micros:
            with training.buf.no_sync():
                results.append(backward(x))
        results += [grad.clone() for grad in main_grads(training)]
        training.buf.zero_grad()
    return results


def refuse_other_captures(training: Training, x: Tensor) -> None:
    """The library refuses to be captured by other means than its own."""
    if not training.context.is_cuda:
        return
    try:
        with warnings.catch_warnings(), torch.cuda.graph(torch.cuda.CUDAGraph()):
            warnings.simplefilter("ignore")
            training.backward(x)
    except RuntimeError as error:
        require("captured by other means" in f"{error} {error.__context__}", f"another error: {error}")
    else:
        raise CheckError("the model was captured without a check")
    training.buf.zero_grad()


def freeze_flag(training: Training, micros: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Captured by hand at the first micro-batch, the host's decision to overwrite is frozen: only the last one counts.

    ``expected`` begins with the losses of the micro-batches and what their gradients really add up to.
    """
    static = micros[0].clone()

    def backward() -> None:
        with training.buf.no_sync():
            training.backward(static)

    replay = record_by_hand(training, backward, {"x": static})
    for x in micros:
        static.copy_(x)
        replay()
    found = [grad.clone() for grad in main_grads(training)]
    training.buf.zero_grad()
    with training.buf.no_sync():
        training.backward(micros[-1])
    compare(found, main_grads(training), "a frozen overwrite leaves the gradients of the last micro-batch")
    training.buf.zero_grad()
    wanted = expected[len(micros) : len(micros) + len(found)]
    require(
        not any(torch.equal(mine, other) for mine, other in zip(found, wanted)),
        "a capture with a Python flag gave right sums, so this block proves nothing",
    )


def record_by_hand(
    training: Training, function: Callable[[], None], inputs: Mapping[str, Tensor]
) -> Callable[[], None]:
    """What somebody would do without the library's help: warm up, record, replay."""
    context, buf = training.context, training.buf

    def statics() -> dict[str, Tensor]:
        return {**dict(training.model.named_parameters()), **buf.buffers.tensors(), **inputs}

    with buf.buffers.capture.active():
        if not context.is_cuda:
            tape = Tape(statics)
            with tape:
                function()
            return tape.replay
        stream = torch.cuda.Stream(context.device)
        stream.wait_stream(torch.cuda.current_stream(context.device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            buf.renew_hooks()
            for _ in range(2):
                function()
                buf.zero_grad()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                function()
        torch.cuda.current_stream(context.device).wait_stream(stream)
        return graph.replay


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


def replay_at(training: Training, captured: mb.CapturedStep, step: int, batch: Tensor) -> Tensor:
    """A replay with the learning rate that the schedule of ``Training.run`` has in that step."""
    for group in training.optimizer.param_groups:
        group["lr"] = LR * FACTORS[step % len(FACTORS)]
    loss: Tensor = captured(batch)
    return loss


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
        for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "reduce_scalar"):
            stack.enter_context(counted(ProcessGroupComm, name, started))
        config = {"bucket_size": 1000, "overlap_param_gather": True}
        training = Training(context, context.compilers[0], make_net(context, dropout=0.125), config)
        batches = [context.randn(2, 32, 64, seed=step) for step in range(STEPS)]
        expected = training.run(training.step, batches)
        training.restart()
        captured = training.capture(batches[0])
        training.restart_seed()
        found = [replay_at(training, captured, step, batch) for step, batch in enumerate(batches)]
        compare([*found, *training.state()], expected, "losses, parameters and masters")
        # On gloo a reduce-scatter is an all-to-all and a sum.
        reduce = "reduce_scatter" if context.is_cuda else "all_to_all"
        for name in (reduce, "all_gather", "reduce_scalar"):
            require(started[name] > 0, f"no {name} was started, only {dict(started)}")
        context.synchronize()
        if context.is_cuda:
            graph = captured.graph
            assert isinstance(graph, torch.cuda.CUDAGraph)
            graph.reset()
        in_time(training.buf.detach, "detach", limit_s=30.0)
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


class Recorded(NamedTuple):
    """What became of a run, and of Inductor's own CUDA graphs in it."""

    values: list[Tensor]
    """Losses and parameters."""
    groups: int
    parts: int
    """Of all graphs: what Inductor wants to record."""
    recordings: list[int]
    """After each step, in all."""
    skips: int


def reduce_overhead(context: Context) -> str:
    """``mode="reduce-overhead"``: Inductor records every part of every graph, cut at collectives and nowhere else."""
    expected = train_recorded(context, None)
    found = train_recorded(context, "reduce-overhead")
    groups, parts, recordings = found.groups, found.parts, found.recordings
    require(found.skips == 0, f"Inductor left {found.skips} graphs unrecorded")
    require(0 < parts <= recordings[-1], f"{recordings} recordings of {parts} parts")
    require(recordings[-1] == recordings[-3], f"still recording in the last steps: {recordings}")
    worst = compare(found.values, expected.values, "losses and parameters", bound=1e-5)
    # The first wait stands before any kernel, the last launch after all of them: as many parts as groups, each way.
    require(
        groups > 1 and parts == 2 * groups,
        f"forward and backward were cut into {parts} parts in all, expected {groups} each, one for each bucket group "
        f"(everything else is right: all recorded, within {worst:.0e} of the default mode)",
    )
    return f"{groups} bucket groups, {parts} parts, {recordings[-1]} recordings, 0 skips; {worst:.0e} from default mode"


def train_recorded(context: Context, mode: str | None) -> Recorded:
    from torch._dynamo.utils import counters
    from torch._inductor.cudagraph_trees import get_manager

    torch.compiler.reset()
    counters.clear()
    index = context.device.index or 0
    model = make_net(context)
    buf = mb.attach(model, mb.MegabufConfig(bucket_size=1000, overlap_param_gather=True))
    call = torch.compile(model, backend="megabuf", mode=mode)
    # SGD, because AdamW turns the rounding of a tiny gradient into an update of full size.
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.SGD, lr=2.0**-3, momentum=0.5)
    recordings, values = [], []
    addresses = [tensor.data_ptr() for tensor in buf.buffers.tensors().values()]
    for step in range(STEPS):
        loss = call(context.randn(32, 64, seed=step)).square().mean()
        loss.backward()
        values.append(loss.detach().clone())
        del loss
        optimizer.step()
        optimizer.zero_grad()
        recordings.append(count_recordings(get_manager(index, create_if_none_exists=False)))
    buf.sync_params()
    require([tensor.data_ptr() for tensor in buf.buffers.tensors().values()] == addresses, "buffers have moved")
    values += [param.detach().clone() for param in model.parameters()]
    # Now, because the manager goes with the last compiled function.
    manager = get_manager(index, create_if_none_exists=False)
    parts = len(manager.ids_to_funcs) if manager is not None else 0
    return Recorded(values, len(buf.plan.groups), parts, recordings, counters["inductor"]["cudagraph_skips"])


def count_recordings(manager: Any) -> int:
    """Nodes in the trees of recorded CUDA graphs."""
    if manager is None:
        return 0
    nodes = [node for roots in manager.roots.values() for node in roots]
    count = 0
    while nodes:
        node = nodes.pop()
        count += 1
        nodes += [child for children in node.children.values() for child in children]
    return count


class Odd(nn.Module):
    """Sizes that leave no view in a dense buffer aligned."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.matrix = nn.Parameter(torch.randn(5, 7))
        self.shift = nn.Parameter(torch.randn(1))
        self.inner = nn.Linear(7, 13)
        self.outer = nn.Linear(13, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.outer(torch.tanh(self.inner(x @ self.matrix))) * self.scale + self.shift
        return result


def odd_sizes(context: Context) -> str:
    """Gradients of two micro-batches equal eager ones, whatever the alignment of their views."""
    worst = {torch.float32: 0.0, torch.bfloat16: 0.0}
    kind = context.compilers[0]
    cases = [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)]
    for dense, dtype in cases:
        torch.manual_seed(context.seed)
        model = Odd().to(context.device, dtype)
        plain = copy.deepcopy(model)
        mb.attach(model, mb.MegabufConfig(use_distributed_optimizer=False, dense_layout=dense, inner_compiler=kind))
        compiled = torch.compile(model, backend="megabuf")
        for seed in range(2):
            x = context.randn(11, 5, seed=seed).to(dtype)
            for module in (compiled, plain):
                module(x).float().square().sum().backward()
        grads, expected = ([p.grad for p in module.parameters() if p.grad is not None] for module in (model, plain))
        # Eager rounds every op's result to bf16, Inductor only what it stores.
        bound = 1e-5 if dtype == torch.float32 else 3e-2
        what = f"{'dense' if dense else 'padded'} {dtype} gradients"
        worst[dtype] = max(worst[dtype], compare(grads, expected, what, bound=bound))
    low, high = worst.values()
    return f"{kind}, padded and dense: within {low:.0e} (fp32) and {high:.0e} (bf16) of eager"


def accumulate_gemm(context: Context) -> str:
    """bf16 x bf16 -> fp32, written or added inside the product; against fp64, and against what it replaces."""
    m, n, k = (4096, 4096, 8192) if context.is_cuda else (48, 40, 96)
    # As in a backward: the output's gradient is transposed, a view.
    lhs = context.randn(k, m, seed=1).bfloat16().t()
    rhs = context.randn(k, n, seed=2).bfloat16()
    product = lhs.double() @ rhs.double()
    base = context.randn(m, n, seed=3)
    # On a GPU the sum stays in fp32 throughout; a CPU has no such kernel and rounds the product to bf16 first.
    bound = 1e-4 if context.is_cuda else 2.0**-8
    main = torch.full((m, n), float("nan"), device=context.device)
    accumulate_wgrad_(main, lhs, rhs, False)
    worst = compare([main.double()], [product], "overwriting", bound=bound)
    main.copy_(base)
    accumulate_wgrad_(main, lhs, rhs, True)
    worst = max(worst, compare([main.double()], [product + base.double()], "accumulating", bound=bound))
    if not context.is_cuda:
        return f"[{m}, {k}] x [{k}, {n}]: within {worst:.0e} of fp64"
    del product
    addmm = torch.ops.aten.addmm.dtype
    rivals: list[Callable[[], object]] = [
        lambda: accumulate_wgrad_(main, lhs, rhs, True),
        lambda: main.copy_(addmm(main, lhs, rhs, torch.float32)),
        lambda: main.add_(torch.mm(lhs, rhs)),
    ]
    fused, copied, rounded = time_ms(rivals, calls=10)
    return (
        f"[{m}, {k}] x [{k}, {n}]: within {worst:.0e} of fp64; {fused:.2f} ms; addmm + copy {copied / fused:.2f}x, "
        f"bf16 mm + add {rounded / fused:.2f}x"
    )


def optimizer_step(context: Context) -> str:
    """Fused AdamW on flat shards: the same numbers as on plain parameters, and its time next to copying as much."""
    rows, columns = (2**14, 2**13) if context.is_cuda else (64, 48)
    notes = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(context.seed)
        model = nn.Linear(columns, rows, bias=False, device=context.device, dtype=dtype)
        plain = nn.Linear(columns, rows, bias=False, device=context.device)
        plain.weight.data.copy_(model.weight.data)
        options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "fused": True}
        mb.attach(model, mb.MegabufConfig(grad_reduce_in_fp32=True))
        optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, **options)
        reference = torch.optim.AdamW(plain.parameters(), **options)
        grad = torch.randn(rows, columns, device=context.device)
        for _ in range(2):
            model.weight.backward(grad.to(dtype))
            plain.weight.grad = grad.to(dtype).float()
            optimizer.step()
            reference.step()
            optimizer.zero_grad()
        (run,) = optimizer.runs
        compare([run.master.view(rows, columns)], [plain.weight.data], f"{dtype} masters")
        compare([model.weight.data], [plain.weight.data.to(dtype)], f"{dtype} parameters")
        del reference, plain
        if context.is_cuda:
            notes.append(time_step(model, optimizer, grad))
        del model, optimizer, grad, run
        gc.collect()
    return f"{rows * columns:,} elements, bitwise equal to plain AdamW" + "".join(f"; {note}" for note in notes)


def time_step(model: nn.Linear, optimizer: mb.DistributedOptimizer, grad: Tensor) -> str:
    dtype = model.weight.dtype
    model.weight.backward(grad.to(dtype))
    # fp32: read gradient, master and two moments, write the last three. bf16: write the parameters, too.
    nbytes = model.weight.numel() * (28 if dtype == torch.float32 else 30)
    source = torch.zeros(nbytes // 2, dtype=torch.uint8, device=grad.device)
    target = torch.empty_like(source)
    step, copying = time_ms([optimizer.step, lambda: target.copy_(source)], calls=10)
    name = str(dtype).removeprefix("torch.")
    return f"{name} {step:.2f} ms = {step / copying:.2f}x a copy of its bytes ({nbytes / step / 1e6:.0f} GB/s)"


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


BLOCKS = (
    Block("versions", versions, limit_s=20),
    Block("micro_batch", micro_batch, limit_s=40),
    Block("whole_step", whole_step, limit_s=60),
    Block("reduce_overhead", reduce_overhead, limit_s=45, needs_gpu=True),
    Block("odd_sizes", odd_sizes, limit_s=45),
    Block("accumulate_gemm", accumulate_gemm, limit_s=20),
    Block("optimizer_step", optimizer_step, limit_s=20),
    Block("peak_memory", peak_memory, limit_s=30, needs_gpu=True),
    Block("step_time", step_time, limit_s=45, needs_gpu=True),
    Block("streams", streams, limit_s=30, needs_gpu=True),
    # Last, because a communicator that hangs would take what comes after it along.
    Block("collectives", collectives, limit_s=40),
)


# Running them.


def run_blocks(blocks: Sequence[Block], context: Context) -> list[Result]:
    """Run all, print a line for each; no failure stops the others."""
    results = []
    for block in blocks:
        result = run_block(block, context)
        seconds = f" [{result.seconds:.1f}s]" if result.result != "SKIP" else ""
        mark = ":" if result.result != "PASS" else ""
        print(f"{result.result} {block.name}{mark} {result.note}{seconds}", flush=True)
        results.append(result)
    return results


def run_block(block: Block, context: Context) -> Result:
    if block.needs_gpu and not context.is_cuda:
        return Result(block.name, "SKIP", 0.0, "needs a GPU")
    begin = time.monotonic()
    faulthandler.dump_traceback_later(block.limit_s, exit=False, file=sys.__stderr__ or sys.stderr)
    try:
        note = block.run(context)
        # What failed on the device only shows when somebody waits for it.
        context.synchronize()
        outcome: Literal["PASS", "FAIL"] = "PASS"
    except Exception as error:
        outcome, note = "FAIL", describe(error)
    finally:
        faulthandler.cancel_dump_traceback_later()
    seconds = time.monotonic() - begin
    clean_up(context)
    if seconds > block.limit_s:
        note += f" (over its {block.limit_s:.0f} s)"
    return Result(block.name, outcome, seconds, note)


def describe(error: BaseException) -> str:
    """Type, message and the innermost line of this file; what came before it, too: ending a failed capture raises again
    and would hide why it failed."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [
        frame.lineno for frame in frames if frame.filename == __file__ and frame.name not in ("require", "compare")
    ]
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}" + (f" (line {lines[-1]})" if lines else "")
    earlier = error.__context__
    return text if earlier is None else f"{text}, after {describe(earlier)}"


def clean_up(context: Context) -> None:
    """Drop what a block has left, compiled graphs and the models that they hold."""
    torch.compiler.reset()
    gc.collect()
    if context.is_cuda:
        # After an illegal access every call fails; the blocks that follow will say so.
        with contextlib.suppress(RuntimeError):
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize(context.device)
            torch.cuda.empty_cache()


def table(results: Sequence[Result]) -> str:
    rows = [("block", "result", "seconds", "note")]
    rows += [(r.name, r.result, f"{r.seconds:.1f}", r.note) for r in results]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    rows.insert(1, ("-" * widths[0], "-" * widths[1], "-" * widths[2], "----"))
    return "\n".join(
        f"{name:{widths[0]}}  {result:{widths[1]}}  {seconds:>{widths[2]}}  {note}"
        for name, result, seconds, note in rows
    )


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks", default="", help="names, separated by commas; all of them without it")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compilers",
        help="inductor, aot_eager or both; both on a GPU, aot_eager on a CPU, where Inductor takes a minute to start",
    )
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device was found; --device cpu runs what a CPU can")
    args.compilers = (args.compilers or ("inductor,aot_eager" if args.device == "cuda" else "aot_eager")).split(",")
    if not {"inductor", "aot_eager"}.issuperset(args.compilers):
        parser.error(f"unknown compiler among {args.compilers}")
    names = [block.name for block in BLOCKS]
    args.blocks = [name for name in args.blocks.split(",") if name] or names
    unknown = sorted(set(args.blocks) - set(names))
    if unknown:
        parser.error(f"unknown blocks {unknown}; there are {', '.join(names)}")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    device = torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    begin = time.monotonic()
    chosen = [block for block in BLOCKS if block.name in args.blocks]
    results = run_blocks(chosen, Context(device, args.seed, tuple(args.compilers)))
    print(f"\n{table(results)}\n\n{time.monotonic() - begin:.0f} seconds in all", flush=True)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return int(any(result.result == "FAIL" for result in results))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    if any(thread.name == HUNG for thread in threading.enumerate()):
        # A communicator that never came back would block the interpreter's end, too.
        os._exit(code)
    sys.exit(code)
