"""Memory of a training step, at rest and at its peak: megabuf_fx, DDP and FSDP2 in the same modes.

    python tests/bench/memory_bench.py                    # two gloo processes, the example's GPT, about twenty minutes

Tracked allocations decide: torch's profiler records every allocation of the CPU allocator, those of code that Inductor
generates included, from before the model is built. Resident memory (``--rss``) is of a second run without profiler.
Each contestant has processes of its own.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import megabuf_fx as mb
from megabuf_fx.cli.counting import setup_of, terms_of
from megabuf_fx.cli.ledger import make_rows

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from train_gpt import GPT, VOCAB, GPTConfig

PHASES = ("forward", "backward", "step", "zero_grad")
COMPUTE = "compute alone"
"""The contestant that shows what activations take; with gradients nobody keeps."""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A model ready to train."""

    forward: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
    ledger: int | None = None
    """Resident bytes that ``megabuf ledger`` predicts; ours only."""


def megabuf(
    model: GPT, args: argparse.Namespace, *, whole: bool = False, plain: bool = False, **options: Any
) -> Contestant:
    """``whole``: no shards; ``plain``: an optimizer of torch, without masters."""
    config = mb.MegabufConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=not whole,
        bucket_size=numel_of(model) // args.buckets,
        inner_compiler=args.inner,
        **options,
    )
    buf = mb.attach(model, config)
    params = list(model.parameters())
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(params, lr=1e-3, fused=args.fused)
        if plain
        else mb.DistributedOptimizer(params, torch.optim.AdamW, lr=1e-3, fused=args.fused)
    )
    terms = terms_of(buf.plan, config, dp_rank=dist.get_rank())
    rows = {row.name: row.amount for row in make_rows(setup_of(buf.plan, config), terms)}
    return Contestant(
        forward=torch.compile(model, backend="megabuf"),
        optimizer=optimizer,
        no_sync=buf.no_sync,
        ledger=int(rows["resident"] - (rows["fp32 masters"] if plain else 0)),
    )


def ddp(model: GPT, args: argparse.Namespace, *, zero: bool = False) -> Contestant:
    nbytes = sum(param.nbytes for param in model.parameters())
    # Its first bucket has 1 MiB, and the others must not be smaller.
    cap_mb = max(nbytes / args.buckets / 2**20, 1)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=cap_mb)
    params = list(model.parameters())
    optimizer: torch.optim.Optimizer = (
        ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=1e-3, fused=args.fused)
        if zero
        else torch.optim.AdamW(params, lr=1e-3, fused=args.fused)
    )
    return Contestant(forward=compiled(wrapped, args), optimizer=optimizer, no_sync=wrapped.no_sync)


def fsdp(model: GPT, args: argparse.Namespace, *, reshard: bool, dtype: torch.dtype) -> Contestant:
    """fp32 shards; 16-bit ``dtype`` is that of compute. Blocks are compiled one by one, as is usual."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        block.compile(backend=args.inner)
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    root = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        root.set_requires_gradient_sync(False)
        yield
        root.set_requires_gradient_sync(True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=args.fused)
    return Contestant(forward=model, optimizer=optimizer, no_sync=no_sync)


def compute_alone(model: GPT, args: argparse.Namespace) -> Contestant:
    return Contestant(forward=compiled(model, args), optimizer=torch.optim.SGD(model.parameters(), lr=0.0))


def compiled(module: nn.Module, args: argparse.Namespace) -> Callable[[Tensor], Tensor]:
    return torch.compile(module, backend=args.inner)


FP32, BF16 = torch.float32, torch.bfloat16
Make = Callable[[GPT, argparse.Namespace], Contestant]
CONTESTANTS: dict[str, dict[str, tuple[torch.dtype, Make]]] = {
    # By mode; the dtype is that of the model before it is wrapped.
    "fp32": {
        COMPUTE: (FP32, compute_alone),
        "megabuf, sharded": (FP32, megabuf),
        "megabuf, sharded, overlap_param_gather": (FP32, lambda m, a: megabuf(m, a, overlap_param_gather=True)),
        "megabuf, unsharded": (FP32, lambda m, a: megabuf(m, a, whole=True, plain=True)),
        "DDP": (FP32, ddp),
        "DDP + ZeroRedundancyOptimizer": (FP32, lambda m, a: ddp(m, a, zero=True)),
        "FSDP2, reshard": (FP32, lambda m, a: fsdp(m, a, reshard=True, dtype=FP32)),
        "FSDP2, no reshard": (FP32, lambda m, a: fsdp(m, a, reshard=False, dtype=FP32)),
    },
    "bf16": {
        COMPUTE: (BF16, compute_alone),
        "megabuf, sharded": (BF16, megabuf),
        "megabuf, sharded, overlap_param_gather": (BF16, lambda m, a: megabuf(m, a, overlap_param_gather=True)),
        "megabuf, unsharded": (BF16, lambda m, a: megabuf(m, a, whole=True)),
        "DDP (bf16 gradients and moments)": (BF16, ddp),
        "DDP + ZeroRedundancyOptimizer (the same)": (BF16, lambda m, a: ddp(m, a, zero=True)),
        "FSDP2, reshard": (FP32, lambda m, a: fsdp(m, a, reshard=True, dtype=BF16)),
        "FSDP2, no reshard": (FP32, lambda m, a: fsdp(m, a, reshard=False, dtype=BF16)),
    },
}


def numel_of(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def take_step(contestant: Contestant, args: argparse.Namespace) -> None:
    for micro in range(args.micro_batches):
        with contestant.no_sync() if micro + 1 < args.micro_batches else nullcontext():
            with record_function("bench forward"):
                loss = contestant.forward(torch.randint(VOCAB, (args.batch_size, args.tokens + 1)))
            with record_function("bench backward"):
                loss.backward()
    del loss
    with record_function("bench step"):
        contestant.optimizer.step()
    with record_function("bench zero_grad"):
        contestant.optimizer.zero_grad()


def train(mode: str, name: str, args: argparse.Namespace) -> Contestant:
    """Build, warm up, and take the steps that are measured; marks for the profile on the way."""
    dtype, make = CONTESTANTS[mode][name]
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=args.context, layers=args.layers, n_embd=args.n_embd, heads=args.heads)).to(dtype)
    mark("built")
    contestant = make(model, args)
    del model
    gc.collect()
    mark("wrapped")
    for _ in range(3):
        take_step(contestant, args)
    gc.collect()
    return contestant


def mark(name: str) -> None:
    with record_function(f"bench {name}"):
        pass


def tracked(mode: str, name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run under the profiler. Only the first rank is profiled; the others do the same."""
    is_first = dist.get_rank() == 0
    recorder = profile(activities=[ProfilerActivity.CPU], profile_memory=True) if is_first else nullcontext()
    with recorder:
        contestant = train(mode, name, args)
        mark("rest")
        found: dict[str, Any] = {"ledger": contestant.ledger, "visible": visible_bytes()}
        take_step(contestant, args)
        mark("rest after")
    if isinstance(recorder, profile):
        file = folder / "trace.json"
        recorder.export_chrome_trace(str(file))
        found |= read_trace(json.loads(file.read_text())["traceEvents"])
    return found


def visible_bytes() -> int:
    """Of all tensors that Python knows."""
    tensors = (each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter))
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def read_trace(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Live bytes at the marks of ``train`` and ``tracked``, and the most in each phase of the last step."""
    blocks: dict[int, int] = {}
    times, live, total = [0.0], [0], 0
    memory = [event for event in events if event.get("name") == "[memory]"]
    for event in sorted(memory, key=lambda event: (event["ts"], event["args"]["Ev Idx"])):
        address, nbytes = event["args"]["Addr"], event["args"]["Bytes"]
        # A thread that is not profiled may have freed what was here; an address in use again tells.
        total -= blocks.pop(address, 0)
        if nbytes > 0:
            blocks[address] = nbytes
            total += nbytes
        times.append(event["ts"])
        live.append(total)

    def at(time: float) -> int:
        return live[bisect.bisect_right(times, time) - 1]

    spans: dict[str, tuple[float, float]] = {}
    for event in sorted((e for e in events if str(e.get("name")).startswith("bench ")), key=lambda event: event["ts"]):
        # The last of each name counts.
        spans[event["name"].removeprefix("bench ")] = event["ts"], event["ts"] + event["dur"]
    peaks = {}
    for phase in PHASES:
        begin, end = spans[phase]
        inside = live[bisect.bisect_left(times, begin) : bisect.bisect_right(times, end)]
        peaks[phase] = max([at(begin), *inside])
    begin, end = spans["forward"]
    marks = {name: at(spans[name][0]) for name in ("built", "wrapped", "rest", "rest after")}
    return {**marks, "peaks": peaks, "saved": at(end) - at(begin)}


def resident(mode: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run without profiler: bytes of the process that are in memory at rest, and at the peak of one step."""
    contestant = train(mode, name, args)
    at_rest = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    take_step(contestant, args)
    return {"rss": at_rest, "rss_peak": status("VmHWM")}


def status(field: str) -> int:
    """An amount of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def work(rank: int, mode: str, name: str, is_tracked: bool, args: argparse.Namespace, folder: Path) -> None:
    """What every process does; the first one writes what was measured into ``folder``."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.world, timeout=timedelta(minutes=5)
    )
    found = tracked(mode, name, args, folder) if is_tracked else resident(mode, name, args)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    # A reducer of DDP must be gone before its process group is; see examples/train_gpt.py.
    torch.compiler.reset()
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def measure(mode: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for is_tracked in (True, False) if args.rss else (True,):
        with tempfile.TemporaryDirectory(prefix="memory_bench") as folder:
            arguments = (mode, name, is_tracked, args, Path(folder))
            spawn(work, args=arguments, nprocs=args.world)  # type: ignore[no-untyped-call]
            found |= json.loads((Path(folder) / "found.json").read_text())
    return found


def summarize(found: dict[str, dict[str, Any]], numel: int) -> dict[str, dict[str, Any]]:
    """By contestant, in bytes per parameter: at rest, of that by the ledger, above rest without activations, in all."""
    saved = found[COMPUTE]["saved"]
    summary = {}
    for name, entry in found.items():
        phase = max(PHASES, key=lambda each: entry["peaks"][each])
        # Some blocks are freed by a thread of gloo, which the profiler does not see: then more seems to be there after
        # a step than before it. What is at rest is counted from tensors then, and the peak may be less by so much.
        lost = max(entry["rest after"] - entry["rest"], 0)
        rest = entry["visible"] if lost else entry["rest"]
        above = {each: (entry["peaks"][each] - entry["rest"]) / numel for each in PHASES}
        summary[name] = {
            "wrapped": entry["wrapped"] / numel,
            "rest": rest / numel,
            "ledger": entry["ledger"] / numel if entry["ledger"] is not None else None,
            "above": {each: bytes_above - saved / numel for each, bytes_above in above.items()},
            "unsure": lost / numel,
            "phase": phase,
            "peak": rest / numel + above[phase],
        }
    return summary


def table(summary: dict[str, dict[str, Any]], found: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, entry in summary.items():
        ledger = f"{entry['ledger']:.2f}" if entry["ledger"] is not None else ""
        above = f"{max(entry['above'].values()):.2f}"
        if entry["unsure"]:
            above += f" or {entry['unsure']:.2f} less"
        row = [name, f"{entry['rest']:.2f}", ledger, above, entry["phase"], f"{entry['peak']:.2f}"]
        if "rss" in found[name]:
            row += [f"{found[name][key] / 2**20:.0f}" for key in ("rss", "rss_peak")]
        rows.append(row)
    headers = ["", "at rest", "ledger", "above rest", "peak is in", "peak", "RSS MiB", "its peak"]
    return tabulate(rows, headers=headers[: len(rows[0])], tablefmt="github", disable_numparse=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare the memory of training steps.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    flag = argparse.BooleanOptionalAction
    add("--world", type=int, default=2, help="processes")
    add("--mode", choices=tuple(CONTESTANTS), default=None, help="only this one; bf16 has fp32 gradients and masters")
    add("--only", default="", help="only contestants with this in their name, and the one that computes alone")
    add("--batch-size", type=int, default=1, help="windows in a micro-batch; few, so that activations are small")
    add("--tokens", type=int, default=8, help="in a window")
    add("--micro-batches", type=int, default=1, help="in a step")
    add("--buckets", type=int, default=7, help="of gradients, about; FSDP2 has one per block")
    add("--context", type=int, default=64, help="as in examples/train_gpt.py, and so the next three")
    add("--layers", type=int, default=6, help="transformer blocks")
    add("--n-embd", type=int, default=384, help="width of the model")
    add("--heads", type=int, default=6, help="attention heads in a block")
    add("--inner", choices=("inductor", "aot_eager"), default="inductor", help="what compiles the graphs")
    add("--fused", action=flag, default=True, help="AdamW in one kernel, of all contestants")
    add("--rss", action=flag, default=False, help="also resident memory, in a second run")
    add("--json", type=Path, default=None, help="file for everything that was measured")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    model = GPT(GPTConfig(context=args.context, layers=args.layers, n_embd=args.n_embd, heads=args.heads))
    numel = numel_of(model)
    result: dict[str, Any] = {"torch": torch.__version__, "numel": numel}
    print(
        f"{numel:,} parameters with AdamW, {args.world} processes, gloo, torch {torch.__version__}, "
        f"{args.micro_batches} micro-batches of {args.batch_size} x {args.tokens} tokens; bytes per parameter"
    )
    for mode in [args.mode] if args.mode else CONTESTANTS:
        names = [name for name in CONTESTANTS[mode] if name == COMPUTE or args.only in name]
        found: dict[str, dict[str, Any]] = {}
        for name in names:
            found[name] = measure(mode, name, args)
            summary = summarize(found, numel)
            result[mode] = {"found": found, "summary": summary}
            if args.json is not None:
                args.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\n{mode}, activations {found[COMPUTE]['saved'] / numel:.2f}\n\n{table(summary, found)}", flush=True)


if __name__ == "__main__":
    main()
