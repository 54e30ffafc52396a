"""Compile time of ``backend="megabuf"`` against plain Inductor, with a cold and with a warm cache.

    python tests/bench/compile_bench.py                    # depths 2, 6 and 12; minutes per round

The model is the GPT of ``examples/train_gpt.py``. Counted is the time from ``torch.compile`` until gradients are there:
Dynamo, AOTAutograd, our passes, Inductor, the C++ compiler, and one step. Not counted: imports, ``attach``, and what
any first compile of a process does, since a ``Linear`` is compiled and trained before (with plain Inductor).

* *Inductor*: one forward and backward.
* *megabuf*: the same; attached, one process, ``use_distributed_optimizer=True``. One backward is compiled (overwrite).
* *megabuf, 2 micro-batches*: the first under ``no_sync``. Two backwards are compiled: overwrite, and accumulate.
* *process*: all of the process, imports and ``attach`` included; what starting it again takes.

Each run is a process with a cache directory of its own (*cold*), then another one with the directory that the first
left (*warm*). Time is CPU time of the process and its children, the C++ compiler among them, and Inductor compiles in
the process itself (``TORCHINDUCTOR_COMPILE_THREADS=1``): other work on the machine changes it little. Ratios are to
*Inductor* in the same round. *kernels* are those in the generated code, *C++ runs* how many of them had to be compiled:
equal kernels of several graphs are compiled once.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from train_gpt import GPT, VOCAB, GPTConfig

BASE = "Inductor"
CONTESTANTS = {BASE: 0, "megabuf": 1, "megabuf, 2 micro-batches": 2}
"""Name, and micro-batches of a step with megabuf."""
CACHES = ("cold", "warm")


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def work(args: argparse.Namespace) -> dict[str, float]:
    """One run, in a process of its own: seconds and counts."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    backend = "inductor" if args.inner == "inductor" else "aot_eager"
    torch.compile(nn.Linear(3, 3), backend=backend)(torch.randn(2, 3)).sum().backward()
    torch.compiler.reset()
    model = GPT(GPTConfig(context=args.context, layers=args.layers[0], n_embd=args.n_embd, heads=args.heads))
    window = torch.randint(VOCAB, (args.batch_size, args.context + 1))
    micro_batches = CONTESTANTS[args.work]
    buf = None
    if micro_batches:
        # Not at the top: plain Inductor's process has no use for it.
        import megabuf_fx as mb

        buf = mb.attach(model, mb.MegabufConfig(inner_compiler=args.inner))
    counters.clear()
    before = count_cached()
    wall, cpu = time.perf_counter(), cpu_seconds()
    if buf is None:
        torch.compile(model, backend=backend)(window).backward()
    else:
        compiled = torch.compile(model, backend="megabuf")
        for _ in range(micro_batches - 1):
            with buf.no_sync():
                compiled(window).backward()
        compiled(window).backward()
        buf.finish_grad_sync()
    found = {"cpu": cpu_seconds() - cpu, "wall": time.perf_counter() - wall}
    found["process"] = cpu_seconds()
    name = "grad" if buf is None else "main_grad"
    assert all(getattr(param, name) is not None for param in model.parameters())
    found |= {name: value - before[name] for name, value in count_cached().items()}
    return {**found, **{f"fx_{name}": counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss")}}


def count_cached() -> dict[str, int]:
    """``kernels`` in the generated code of the cache directory, ``cpp_runs`` compiled ones."""
    root = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    code = (path.read_text(errors="ignore") for path in root.rglob("*.py"))
    kernels = sum(text.count("async_compile.cpp_pybinding(") for text in code)
    return {"kernels": kernels, "cpp_runs": sum(1 for _ in root.rglob("*.so"))}


def run(name: str, layers: int, cache: str, args: argparse.Namespace) -> dict[str, float]:
    """Start ``work`` in a process."""
    command = [sys.executable, __file__, "--work", name, "--layers", str(layers), "--inner", args.inner]
    for option in ("context", "n_embd", "heads", "batch_size"):
        command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
    surroundings = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    answer = subprocess.run(command, env=surroundings, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, float] = json.loads(answer.splitlines()[-1])
    return found


def measure(layers: int, number: int, args: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """One round at one depth, by contestant and cache; ``number`` decides who comes first."""
    names = list(args.contestants)
    start = number % len(names)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in names[start:] + names[:start]:
        with tempfile.TemporaryDirectory(prefix="compile_bench") as cache:
            found[name] = {kind: run(name, layers, cache, args) for kind in args.caches}
    return found


def rows_of(layers: str, rounds: list[Any]) -> list[list[str]]:
    rows = []
    for name in rounds[0]:
        row = [layers, name]
        kinds = list(rounds[0][name])
        for kind, what in [*((kind, "cpu") for kind in kinds), (kinds[-1], "process")]:
            seconds = [entry[name][kind][what] for entry in rounds]
            ratios = [entry[name][kind][what] / entry[BASE][kind][what] for entry in rounds]
            row += [f"{statistics.median(seconds):.2f}", spread(ratios)]
        first, last = (list(rounds[-1][name].values())[place] for place in (0, -1))
        hits = f"{last['fx_hit']:.0f} of {last['fx_hit'] + last['fx_miss']:.0f}"
        rows.append([*row, f"{first['kernels']:.0f}", f"{first['cpp_runs']:.0f}", hits])
    return rows


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f} {max(values):.2f}]"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=5)
    add("--layers", type=int, nargs="+", default=[2, 6, 12], help="depths")
    add("--n-embd", type=int, default=64, help="as in examples/train_gpt.py, and so the next three")
    add("--heads", type=int, default=2)
    add("--context", type=int, default=32)
    add("--batch-size", type=int, default=4)
    add("--inner", choices=("inductor", "aot_eager"), default="inductor", help="aot_eager: against torch's aot_eager")
    add("--json", type=Path, help="write every sample here")
    add("--contestants", nargs="+", choices=tuple(CONTESTANTS), default=list(CONTESTANTS), help=f"with {BASE}")
    add("--caches", nargs="+", choices=CACHES, default=list(CACHES), help="warm only after cold")
    add("--work", choices=tuple(CONTESTANTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if BASE not in args.contestants or args.caches[0] != "cold":
        parser.error(f"--contestants must have {BASE}, and --caches begin with cold")
    return args


def main() -> None:
    args = parse_args()
    if args.work is not None:
        print(json.dumps(work(args)))
        return
    found: dict[str, list[Any]] = {str(layers): [] for layers in args.layers}
    for number in range(args.rounds):
        for layers in args.layers:
            found[str(layers)].append(measure(layers, number, args))
            if args.json is not None:  # after every round, as one takes minutes
                args.json.write_text(json.dumps({"torch": torch.__version__, "rounds": found}, indent=1) + "\n")
    rows = [row for layers, rounds in found.items() for row in rows_of(layers, rounds)]
    columns = [*args.caches, f"{args.caches[-1]} process"]
    timed = [header for column in columns for header in (f"{column} s", "ratio")]
    headers = ["layers", "", *timed, "kernels", "C++ runs", f"{args.caches[-1]} FX cache hits"]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
