"""What a CPU cannot show, in one script for one GPU: captured steps, NCCL inside a graph, kernels, memory, times.

    python tests/gpu/check.py [--device cuda|cpu] [--blocks NAME,...] [--out FILE.json]

Each block prints PASS, FAIL or SKIP, none stops the others, and a table comes last; the exit code is 1 if any failed.
Needs torch and the project, nothing else. On a CPU the same blocks run as far as they can, with the tape
(``megabuf_fx/tape.py``) in place of the CUDA graph; ``tests/test_gpu_check.py`` does that in CI.

A further block is a function of ``Context`` that returns a short note or raises. It goes into the ``blocks_*.py`` of
its idea, or into a new one, and gets a line in ``BLOCKS`` below, which is the order of running:

    check.py                   the list of blocks; runs them; table and options
    gpu_context.py             Context, Block, Result; require, compare, no_host_reads, time_ms
    gpu_training.py            Training, a model with all that makes up a step; Net, a small one
    blocks_versions.py         what it runs on
    blocks_micro_batch.py      one captured micro-batch that serves all
    blocks_steps.py            whole steps: captured, their memory and time, on another stream
    blocks_reduce_overhead.py  Inductor's own CUDA graphs
    blocks_kernels.py          odd sizes, the accumulating product and rows, the optimizer
    blocks_quantizers.py       casts and quantizers, their numbers and bandwidth
    blocks_quantized.py        steps with quantized parameters
    blocks_quantized_memory.py what these save
    quantized_oracles.py       what quantized tensors must be, in fp64 on the host
    blocks_nccl_memory.py      buffers in memory that NCCL has registered
    blocks_collectives.py      collectives inside a captured step
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib.util
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch

if importlib.util.find_spec("megabuf_fx") is None:
    # A bare checkout on a machine where nothing can be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# They lie beside this script, where Python looks first; they need megabuf_fx, so they come after it.
from blocks_collectives import HUNG, collectives
from blocks_kernels import accumulate_gemm, accumulate_rows, odd_sizes, optimizer_step
from blocks_micro_batch import micro_batch
from blocks_nccl_memory import nccl_memory
from blocks_quantized import quantized_step
from blocks_quantized_memory import saved_memory
from blocks_quantizers import casts, quantize_speed, quantizers
from blocks_reduce_overhead import reduce_overhead
from blocks_steps import peak_memory, step_time, streams, whole_step
from blocks_versions import versions
from gpu_context import Block, Context, Result

FILES = frozenset(Path(__file__).resolve().parent.glob("*.py"))
"""This script and what lies beside it."""

BLOCKS = (
    Block("versions", versions, limit_s=20),
    Block("micro_batch", micro_batch, limit_s=40),
    Block("whole_step", whole_step, limit_s=60),
    Block("reduce_overhead", reduce_overhead, limit_s=45, needs_gpu=True),
    Block("odd_sizes", odd_sizes, limit_s=45),
    Block("accumulate_gemm", accumulate_gemm, limit_s=20),
    Block("accumulate_rows", accumulate_rows, limit_s=20),
    Block("optimizer_step", optimizer_step, limit_s=20),
    Block("casts", casts, limit_s=20),
    Block("quantizers", quantizers, limit_s=90),
    Block("quantize_speed", quantize_speed, limit_s=75),
    Block("quantized_step", quantized_step, limit_s=120),
    Block("saved_memory", saved_memory, limit_s=90),
    Block("peak_memory", peak_memory, limit_s=30, needs_gpu=True),
    Block("step_time", step_time, limit_s=45, needs_gpu=True),
    Block("streams", streams, limit_s=30, needs_gpu=True),
    Block("nccl_memory", nccl_memory, limit_s=30, needs_gpu=True),
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
    """Type, message and the innermost line of ``FILES``; what came before it, too: ending a failed capture raises again
    and would hide why it failed."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve() in FILES and frame.name not in ("require", "compare")
    ]
    where = f" (line {frames[-1].lineno} of {Path(frames[-1].filename).name})" if frames else ""
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}{where}"
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
