"""Step time with the default bucket size, fixed ones and "auto", on two emulated hosts, beside what is predicted.

    python tests/bench/buckets_bench.py --rate 400mbit      # needs root and iproute2 (ip, tc); a few minutes

``--rate loopback`` runs both ranks on this host, so that a machine without root can run the script. Every contestant
has the same model, buffers of its own and an AdamW. A round goes through all of them, so that what else the machine
does meets all alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tabulate import tabulate
from two_ranks import run_two_ranks

import megabuf_fx as mb

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from train_gpt import GPT, VOCAB, GPTConfig

HALVINGS = (1, 3, 5, 7)
"""Fixed sizes: all elements, halved so many times. ``auto`` predicts these, too."""


class Contestant(NamedTuple):
    name: str
    handle: mb.MegabufHandle
    model: Any
    optimizer: Any


def make_contestant(name: str, size: Any, args: argparse.Namespace, tokens: torch.Tensor) -> Contestant:
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=args.context, layers=args.layers, n_embd=args.n_embd, heads=args.heads))
    config = mb.MegabufConfig(bucket_size=size, inner_compiler=args.inner)
    handle = mb.attach(model, config, example_inputs=(tokens,))
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)
    return Contestant(name, handle, torch.compile(model, backend="megabuf"), optimizer)


def seconds_of_steps(contestant: Contestant, steps: int, tokens: torch.Tensor) -> float:
    """Seconds of one step, the mean of ``steps``, until both ranks are done."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        contestant.model(tokens).backward()
        contestant.optimizer.step()
        contestant.optimizer.zero_grad()
    dist.barrier()
    return (time.perf_counter() - begin) / steps


def work(args: argparse.Namespace) -> None:
    """What each rank does; the first one writes what was measured to ``args.found``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tokens = torch.randint(VOCAB, (args.batch_size, args.context + 1))
    auto = make_contestant("auto", "auto", args, tokens)
    numel = sum(spec.numel for spec in auto.handle.plan.params)
    sizes = {"default": None} | {f"size {numel >> halvings}": numel >> halvings for halvings in HALVINGS}
    contestants = [auto, *(make_contestant(name, size, args, tokens) for name, size in sizes.items())]
    for contestant in contestants:
        seconds_of_steps(contestant, 2, tokens)  # compiles
    samples: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for _ in range(args.rounds):
        for contestant in contestants:
            samples[contestant.name].append(seconds_of_steps(contestant, args.steps, tokens))
    choice = auto.handle.bucket_choice
    assert choice is not None
    if dist.get_rank() == 0:
        predicted = {candidate.name: candidate.waiting_us / 1e3 for candidate in choice.candidates}
        predicted["auto"] = choice.candidates[0].waiting_us / 1e3
        found = {
            "numel": numel,
            "rates": [f"{choice.device}", f"{choice.link}"],
            "backward_ms": choice.backward_us / 1e3,
            "buckets": {contestant.name: len(contestant.handle.plan.groups) for contestant in contestants},
            "predicted_ms": predicted,
            "samples_s": samples,
        }
        args.found.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(args: argparse.Namespace, found: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--found", str(found)]
    run_two_ranks(command, link=args.rate, timeout=args.timeout)
    return dict(json.loads(found.read_text()))


def table(found: dict[str, Any]) -> str:
    base = statistics.median(found["samples_s"]["default"]) * 1e3
    rows = []
    for name, samples in found["samples_s"].items():
        ms = [sample * 1e3 for sample in samples]
        median, waiting = statistics.median(ms), found["predicted_ms"][name]
        rows.append(
            [
                name,
                found["buckets"][name],
                f"{median:.1f} [{min(ms):.1f} {max(ms):.1f}]",
                f"{median - base:+.1f}",
                f"{waiting - found['predicted_ms']['default']:+.1f}",
                f"{waiting:.1f}",
            ]
        )
    headers = ["", "buckets", "step ms", "against default", "predicted", "predicted waiting ms"]
    return tabulate(rows, headers=headers, disable_numparse=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description='Compare bucket_size="auto" with fixed sizes.',
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rate", default="400mbit", help="of the link, as tc writes it; loopback: two processes on this host")
    add("--rounds", type=int, default=7, help="rounds through all contestants")
    add("--steps", type=int, default=3, help="steps of each contestant in a round")
    add("--batch-size", type=int, default=8, help="windows in a batch")
    add("--context", type=int, default=64, help="as in examples/train_gpt.py, and so the next three")
    add("--layers", type=int, default=6, help="transformer blocks")
    add("--n-embd", type=int, default=256, help="width of the model")
    add("--heads", type=int, default=4, help="attention heads in a block")
    add("--inner", choices=("aot_eager", "inductor"), default="aot_eager", help="inner_compiler")
    add("--timeout", type=float, default=900, help="seconds until the ranks are killed")
    add("--json", type=Path, default=None, help="file for everything that was measured")
    add("--found", type=Path, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.found is not None:
        work(args)
        return
    with tempfile.TemporaryDirectory(prefix="buckets_bench") as folder:
        found = measure(args, Path(folder) / "found.json")
    print(
        f"{found['numel']:,} parameters, two ranks on {os.cpu_count()} cores, link {args.rate}, gloo, "
        f"torch {torch.__version__}, {args.rounds} rounds of {args.steps} steps: median [least most]\n"
        f"measured rates: {', '.join(found['rates'])}; predicted backward {found['backward_ms']:.1f} ms"
    )
    print(table(found))
    if args.json is not None:
        args.json.write_text(json.dumps({"torch": torch.__version__, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
