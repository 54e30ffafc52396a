"""Host time per step in our wrappers around compiled graphs, on a model of many tiny parameters.

    python tests/bench/overhead_bench.py                   # 1,000 parameters in 1, 10 and 100 buckets

The model is a row of ``Linear(2, 2)``, attached in one process, so that no collective runs; graphs run op by op
(``inner_compiler="aot_eager"``). Timers stand around our functions and around what they call, so that a wrapper is
counted without what it wraps:

* *forward*: around AOTAutograd (which parameters came, gathers, the token for backward), and choosing the variant;
* *backward*: choosing the role and the variant, and noting what it writes;
* *hooks*: after each parameter's AccumulateGrad node; none where a graph writes the gradient, unless ``.grad`` is
  published (``--replicated``);
* *launches*: ``start_grad_sync`` of the buckets, called in the graph;
* *finish*: ``finish_grad_sync`` and ``zero_grad``;
* *graph*: what was wrapped, for comparison: the compiled forward and backward without launches.

A round is one step of every case. Medians over the rounds; the first steps, which compile, are left out. A timer itself
costs about 0.1 us, once per parameter in *hooks*.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import megabuf_fx as mb
from megabuf_fx.runtime.model_buffers import ModelBuffers
from megabuf_fx.traced_graph import TracedGraph

COLUMNS = ("forward", "backward", "hooks", "launches", "finish", "graph")
BOUND_CALL_US, BOUND_BUCKET_US = 20, 15
"""What a wrapper may take for a call, and in addition for each bucket."""


class Clock:
    """Nanoseconds by column. Time inside an inner function is taken off the column around it."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._around: list[str] = []

    def timed(self, column: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which counts as ``column``."""
        spent, around, now = self.spent, self._around, time.perf_counter_ns

        def call(*args: Any, **kwargs: Any) -> Any:
            around.append(column)
            begin = now()
            try:
                return function(*args, **kwargs)
            finally:
                duration = now() - begin
                around.pop()
                spent[column] += duration
                if around:
                    spent[around[-1]] -= duration

        return call

    def install(self) -> None:
        """Put timers into classes of ours, for the rest of the process; before any model is attached."""
        handle = importlib.import_module("megabuf_fx.handle").MegabufHandle  # the package has a function of that name
        wrap, compile_ = TracedGraph.wrap, TracedGraph._compile

        def timed_wrap(graph: TracedGraph, compiled: Callable[..., Any]) -> Callable[..., Any]:
            # What AOTAutograd and autograd do is nobody's; autograd runs nothing of ours in here but `_run_forward`.
            return self.timed("forward", wrap(graph, self.timed("torch", compiled)))

        def timed_compile(graph: TracedGraph, *args: Any) -> Any:
            variant, boundaries = compile_(graph, *args)
            return self.timed("graph", variant), boundaries

        replaced: list[tuple[object, str, Callable[..., Any]]] = [
            (TracedGraph, "wrap", timed_wrap),
            (TracedGraph, "_compile", timed_compile),
            (TracedGraph, "_run_forward", self.timed("forward", TracedGraph._run_forward)),
            (TracedGraph, "_run_backward", self.timed("backward", TracedGraph._run_backward)),
            (handle, "_after_accumulate", self.timed("hooks", handle._after_accumulate)),
            (ModelBuffers, "start_grad_sync", self.timed("launches", ModelBuffers.start_grad_sync)),
        ]
        for owner, name, function in replaced:
            # A plain function, so that it binds as the method it replaces.
            setattr(owner, name, function)


class Case:
    """An attached, compiled model with ``params`` parameters in about ``buckets`` buckets."""

    def __init__(self, params: int, buckets: int, *, rows: int, sharded: bool) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(params // 2)))
        # Every parameter starts at a multiple of 64 elements.
        config = mb.MegabufConfig(
            use_distributed_optimizer=sharded, bucket_size=64 * params // buckets, inner_compiler="aot_eager"
        )
        self.params = params
        self.handle = mb.attach(model, config)
        self.buckets = len(self.handle.plan.groups)
        # Models of one shape would share a graph, which binds its parameters anew when they take turns; but not with
        # inputs of different shapes.
        self._x = torch.randn(rows, 2)
        self._model = torch.compile(model, backend="megabuf", dynamic=False)

    def step(self, clock: Clock) -> dict[str, int]:
        """Nanoseconds by column."""
        clock.spent.clear()
        loss: Tensor = self._model(self._x).sum()
        loss.backward()
        clock.timed("finish", self._finish)()
        return {column: clock.spent[column] for column in COLUMNS}

    def _finish(self) -> None:
        self.handle.finish_grad_sync()
        self.handle.zero_grad()


def rows_of(case: Case, rounds: list[dict[str, int]]) -> list[str]:
    median = {column: statistics.median(sample[column] for sample in rounds) / 1e3 for column in COLUMNS}
    calls = [median["forward"], median["backward"]]
    ours = sum(median.values()) - median["graph"]
    per_bucket = (median["launches"] + median["finish"]) / case.buckets
    return [
        *(f"{value:.0f}" for value in calls),
        f"{median['hooks'] / case.params:.2f}",
        f"{per_bucket:.1f}",
        f"{median['graph']:.0f}",
        f"{ours / median['graph']:.2f}",
    ]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=200, help="steps of every case")
    add("--params", type=int, default=1000, help="parameters of the model")
    add("--buckets", type=int, nargs="+", default=[1, 10, 100])
    add("--replicated", action="store_true", help="use_distributed_optimizer=False: .grad is published")
    add("--json", type=Path, help="write every sample here, in nanoseconds")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    torch._dynamo.config.cache_size_limit = max(8, len(args.buckets) + 1)
    clock = Clock()
    clock.install()
    cases = [
        Case(args.params, buckets, rows=rows, sharded=not args.replicated)
        for rows, buckets in enumerate(args.buckets, 2)
    ]
    found: list[list[dict[str, int]]] = [[] for _ in cases]
    for _ in range(2):  # the first compiles; in the second everything has been seen
        for case in cases:
            case.step(clock)
    for _ in range(args.rounds):
        for case, samples in zip(cases, found):
            samples.append(case.step(clock))
    rows = [[f"{case.buckets}", *rows_of(case, samples)] for case, samples in zip(cases, found)]
    headers = [
        "buckets",
        "forward us",
        "backward us",
        "hooks us/param",
        "launch + finish us/bucket",
        "graph us",
        "ratio",
    ]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))
    print(f"bounds: {BOUND_CALL_US} us for a forward or backward, {BOUND_BUCKET_US} us for a bucket")
    if args.json is not None:
        samples_by_case = {str(case.buckets): samples for case, samples in zip(cases, found)}
        args.json.write_text(json.dumps({"torch": torch.__version__, **samples_by_case}, indent=1) + "\n")


if __name__ == "__main__":
    main()
