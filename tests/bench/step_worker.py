"""One rank of ``step_bench.py``: runs all contestants of one cell in interleaved rounds."""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from contestants import ALONE, OURS, PEERS, Contestant, Work, without_collectives
from train_gpt import GPT, VOCAB, GPTConfig

from megabuf_fx.runtime.transports import choose_reduce_scatter, make_comm_pair

WARM_UP = 2
"""Steps before the first round; both kinds of micro-batch are compiled in the first."""
BATCHES = 4
"""Different batches that a contestant goes through."""


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", 0))
    if hasattr(os, "sched_setaffinity"):
        # One core for each rank, its gloo threads included.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    is_alone = "RANK" not in os.environ
    if not is_alone:
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    result = run(args, rank, is_alone=is_alone)
    if rank == 0:
        args.out.write_text(json.dumps(result))
    if not is_alone:
        dist.barrier()
    # Peers and their process groups come apart in no order of their own; there is nothing left to do.
    sys.stdout.flush()
    os._exit(0)


def run(args: argparse.Namespace, rank: int, *, is_alone: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    base = GPT(GPTConfig(context=args.context, layers=args.layers, n_embd=args.n_embd, heads=args.heads))
    torch.manual_seed(1 + rank)
    shape = (BATCHES, args.micro_batches, args.batch_size, args.context + 1)
    batches = torch.randint(VOCAB, shape)
    makers = ALONE if is_alone else {**OURS, **PEERS, "no collectives": without_collectives}
    work = Work(args.precision, args.inner, (args.batch_size, args.context + 1))
    names = [name for name in makers if not args.only or any(part in name for part in args.only.split(";"))]
    contestants: dict[str, Contestant] = {}
    losses: dict[str, list[float]] = {}
    # One contestant must not compile less than another because of what came before it.
    with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=1024):  # type: ignore[attr-defined]
        for name in names:
            contestants[name] = contestant = makers[name](copy.deepcopy(base), work)
            with contestant.first_step():
                losses[name] = [float(contestant.step(batches[i])) for i in range(WARM_UP)]
            contestant.drain()
            report(rank, f"{name}: losses {losses[name]}")
        barrier: Callable[[], object] = (lambda: None) if is_alone else dist.barrier
        times: dict[str, list[float]] = {name: [] for name in names}
        cpu: dict[str, list[float]] = {name: [] for name in names}
        for number in range(args.rounds):
            # Another order in every round: what one leaves behind in caches is not always met by the same next.
            for name in names[number % len(names) :] + names[: number % len(names)]:
                seconds, used = time_steps(contestants[name], batches, args.steps, barrier)
                times[name].append(seconds)
                cpu[name].append(used)
    result: dict[str, Any] = {"seconds": times, "cpu_seconds": cpu, "losses": losses}
    if not is_alone:
        result["collectives"] = collectives_alone(contestants["megabuf"], args.rounds) if "megabuf" in names else None
        if "no collectives" in contestants:
            result["windows"] = contestants["no collectives"].windows[-args.rounds * args.steps :]
    return result


def time_steps(
    contestant: Contestant, batches: Tensor, steps: int, barrier: Callable[[], object]
) -> tuple[float, float]:
    """Seconds and CPU seconds of one of ``steps`` steps between barriers, the first of which finds the caches warm."""
    contestant.step(batches[0])
    contestant.drain()
    barrier()
    begin, used = time.perf_counter(), time.process_time()
    for number in range(steps):
        contestant.step(batches[number % BATCHES])
    contestant.drain()
    barrier()
    return (time.perf_counter() - begin) / steps, (time.process_time() - used) / steps


def collectives_alone(ours: Contestant, rounds: int) -> dict[str, list[float]]:
    """Seconds, CPU seconds and bytes of the collectives of one step with nothing else to do: those of ``ours``, bucket
    by bucket, on memory of their own."""
    optimizer: Any = ours.optimizer
    handle = optimizer.handle
    pair = make_comm_pair(dist.group.WORLD, name="bench")
    parts: list[tuple[Any, Tensor, Tensor, Tensor, Tensor]] = []
    for buffer in handle.buffers.buffers:
        reduce = choose_reduce_scatter(pair.grads, buffer.grad_data.dtype, with_fp32_accumulation=False)
        for start, end in buffer.layout.buckets:
            grads = torch.zeros(end - start, dtype=buffer.grad_data.dtype)
            params = torch.zeros(end - start, dtype=buffer.param_data.dtype)
            size = (end - start) // pair.grads.size
            own = slice(pair.grads.rank * size, (pair.grads.rank + 1) * size)
            parts.append((reduce, grads, grads[own], params, params[own]))
    found: dict[str, list[float]] = {"reduce_cpu": [], "reduce": [], "gather_cpu": [], "gather": []}
    for number in range(rounds + 1):
        for kind in ("reduce", "gather"):
            dist.barrier()
            begin, used = time.perf_counter(), time.process_time()
            if kind == "reduce":
                pending = [reduce(own, full, False) for reduce, full, own, _, _ in parts]
            else:
                pending = [pair.params.all_gather(full, own) for _, _, _, full, own in parts]
            for work in pending:
                work.wait()
            if number:
                found[kind].append(time.perf_counter() - begin)
                found[f"{kind}_cpu"].append(time.process_time() - used)
    # Each rank sends, and receives, so much of every bucket.
    share = (pair.grads.size - 1) / pair.grads.size
    found["reduce_bytes"] = [share * sum(full.nbytes for _, full, _, _, _ in parts)]
    found["gather_bytes"] = [share * sum(full.nbytes for _, _, _, full, _ in parts)]
    pair.close()
    return found


def report(rank: int, text: str) -> None:
    if rank == 0:
        print(text, file=sys.stderr, flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="where rank 0 writes JSON")
    add("--precision", choices=("fp32", "bf16"), default="fp32")
    add("--micro-batches", type=int, default=1)
    add("--rounds", type=int, default=9)
    add("--steps", type=int, default=5, help="steps of a round")
    add("--only", default="", help="parts of the names of contestants, separated by semicolons")
    add("--batch-size", type=int, default=4)
    add("--context", type=int, default=64)
    add("--layers", type=int, default=6)
    add("--n-embd", type=int, default=384)
    add("--heads", type=int, default=6)
    add("--inner", choices=("inductor", "aot_eager"), default="inductor", help="what compiles, ours and the peers'")
    return parser.parse_args()


if __name__ == "__main__":
    main()
