"""Time and space of checkpoints: megabuf_fx against FSDP2 with ``torch.distributed.checkpoint`` (DCP), side by side.

    python tests/bench/checkpoint_bench.py                 # two gloo processes, the example's GPT, a minute or two

Every contestant has the same model and an AdamW with state. A round goes through all of them, so that what else the
machine does meets all alike; the table has medians over the rounds, and in brackets the least and the most.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn

import megabuf_fx as mb

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from train_gpt import GPT, VOCAB, GPTConfig

BASE = "FSDP2 + DCP, fp32"
MEASURED = ("save", "load", "async", "sha256")


class Contestant(Protocol):
    """A trained model with its way to save."""

    @property
    def model(self) -> nn.Module: ...

    def save(self, directory: Path) -> object: ...

    def start_save(self, directory: Path) -> Callable[[], object]:
        """Save in the background; returns what waits for the end."""
        ...

    def load(self, directory: Path) -> object: ...


class Ours:
    def __init__(self, args: argparse.Namespace, dtype: torch.dtype) -> None:
        self.model = make_model(args).to(dtype)
        mb.attach(self.model, mb.MegabufConfig(grad_reduce_in_fp32=True))
        self.optimizer = mb.DistributedOptimizer(self.model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
        take_step(self.model, self.optimizer, args)

    def save(self, directory: Path) -> Path:
        return mb.save_checkpoint(directory, 1, self.model, self.optimizer)

    def start_save(self, directory: Path) -> Callable[[], object]:
        return mb.async_save_checkpoint(directory, 1, self.model, self.optimizer).result

    def load(self, directory: Path) -> object:
        newest = mb.latest_checkpoint(directory)
        assert newest is not None
        return mb.load_checkpoint(newest, self.model, self.optimizer)


class Fsdp:
    def __init__(self, args: argparse.Namespace) -> None:
        model = make_model(args)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        # For the thread that writes: on the group that times, its collectives would come between ours and block both.
        self._group = dist.new_group()
        take_step(model, self.optimizer, args)

    def save(self, directory: Path) -> object:
        return save(self._state(), checkpoint_id=directory)

    def start_save(self, directory: Path) -> Callable[[], object]:
        return async_save(self._state(), checkpoint_id=directory, process_group=self._group).result  # type: ignore[union-attr]

    def load(self, directory: Path) -> object:
        state = self._state()
        load(state, checkpoint_id=directory)
        return set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


CONTESTANTS: dict[str, Callable[[argparse.Namespace], Contestant]] = {
    "megabuf_fx, fp32": lambda args: Ours(args, torch.float32),
    "megabuf_fx, bf16 with fp32 masters": lambda args: Ours(args, torch.bfloat16),
    # FSDP2 keeps fp32 parameters for bf16 training, too, so it has one form only.
    BASE: Fsdp,
}


def make_model(args: argparse.Namespace) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(context=args.context, layers=args.layers, n_embd=args.n_embd, heads=args.heads))


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> None:
    model(torch.randint(VOCAB, (2, args.context + 1))).backward()
    optimizer.step()
    optimizer.zero_grad()


def timed(function: Callable[[], object]) -> float:
    """Seconds until the last rank is done."""
    if dist.get_rank() == 0:
        os.sync()  # what was written or removed before is not this one's work
    gc.collect()
    dist.barrier()
    # As timeit does: a collection takes as long as a save, and comes when it likes.
    gc.disable()
    begin = time.perf_counter()
    function()
    seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    gc.enable()
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def measure(contestant: Contestant, directory: Path) -> dict[str, float]:
    """One round: seconds, and bytes on disk."""
    found: dict[str, float] = {}
    with scratch(directory):
        found["save"] = timed(lambda: contestant.save(directory))
        found["bytes"] = float(sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()))
        found["load"] = timed(lambda: contestant.load(directory))
        found["sha256"] = timed(lambda: hash_own_files(directory))
    with scratch(directory):
        waits: list[Callable[[], object]] = []
        found["async"] = timed(lambda: waits.append(contestant.start_save(directory)))
        waits[0]()
    return found


def hash_own_files(directory: Path) -> None:
    for path in directory.rglob(f"__{dist.get_rank()}_*"):
        with path.open("rb") as file:
            hashlib.file_digest(file, "sha256")


@contextlib.contextmanager
def scratch(directory: Path) -> Iterator[None]:
    """A directory that was not there before and is not there afterwards."""
    dist.barrier()
    yield
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory)
    dist.barrier()


def check(contestant: Contestant, directory: Path) -> None:
    """What is loaded is what was saved; also the round that warms up.

    Raises:
        RuntimeError: it is not.
    """
    with scratch(directory):
        contestant.save(directory)
        expected = [local(param).clone() for param in contestant.model.parameters()]
        for param in contestant.model.parameters():
            local(param).zero_()
        contestant.load(directory)
        if not all(map(torch.equal, map(local, contestant.model.parameters()), expected)):
            raise RuntimeError(f"{type(contestant).__name__} does not load what it saved")


def local(param: Tensor) -> Tensor:
    return (param.to_local() if isinstance(param, DTensor) else param).detach()


def work(rank: int, args: argparse.Namespace, folder: Path) -> None:
    """What every process does; the first one writes what was measured into ``folder``."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.world, timeout=timedelta(minutes=1)
    )
    contestants = {name: make(args) for name, make in CONTESTANTS.items()}
    for contestant in contestants.values():
        check(contestant, folder / "check")
    gc.freeze()  # so that the collections between the timings are short
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    for number in range(args.rounds):
        for name, contestant in contestants.items():
            rounds[name].append(measure(contestant, folder / f"round{number}"))
    if rank == 0:
        numel = sum(param.numel() for param in make_model(args).parameters())
        (folder / "found.json").write_text(json.dumps({"numel": numel, "rounds": rounds}))
    dist.barrier()
    dist.destroy_process_group()


def summarize(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By contestant: of what was measured ``[median, least, most]``, ratios to FSDP2's medians, bytes per parameter."""
    summary: dict[str, dict[str, Any]] = {}
    for name, rounds in found["rounds"].items():
        samples = {key: [entry[key] for entry in rounds] for key in MEASURED}
        summary[name] = {key: [statistics.median(x), min(x), max(x)] for key, x in samples.items()}
        summary[name]["bytes_per_parameter"] = rounds[-1]["bytes"] / found["numel"]
    for entry in summary.values():
        for key in ("save", "load", "async"):
            entry[f"{key}_ratio"] = entry[key][0] / summary[BASE][key][0]
    return summary


def table(summary: dict[str, dict[str, Any]]) -> str:
    def cells(entry: dict[str, Any], key: str) -> list[str]:
        median, least, most = entry[key]
        return [f"{median:.3f} [{least:.3f} {most:.3f}]", f"{entry[key + '_ratio']:.2f}"]

    rows = [
        [
            name,
            *cells(entry, "save"),
            *cells(entry, "load"),
            *cells(entry, "async"),
            f"{entry['sha256'][0]:.3f}",
            f"{entry['bytes_per_parameter']:.2f}",
        ]
        for name, entry in summary.items()
    ]
    headers = ["", "save s", "ratio", "load s", "ratio", "async returns s", "ratio", "sha256 s", "bytes/param"]
    return tabulate(rows, headers=headers, disable_numparse=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare checkpoints of megabuf_fx with those of FSDP2.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rounds", type=int, default=7, help="rounds through all contestants, after one that warms up")
    add("--world", type=int, default=2, help="processes")
    add("--context", type=int, default=64, help="as in examples/train_gpt.py, and so the next three")
    add("--layers", type=int, default=6, help="transformer blocks")
    add("--n-embd", type=int, default=384, help="width of the model")
    add("--heads", type=int, default=6, help="attention heads in a block")
    add("--folder", type=Path, default=None, help="where a temporary directory is made; None: the system's place")
    add("--json", type=Path, default=None, help="file for everything that was measured")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory(prefix="checkpoint_bench", dir=args.folder) as name:
        spawn(work, args=(args, Path(name)), nprocs=args.world)  # type: ignore[no-untyped-call]
        found = json.loads((Path(name) / "found.json").read_text())
    summary = summarize(found)
    print(
        f"{found['numel']:,} parameters with AdamW, {args.world} processes on {os.cpu_count()} cores, gloo, "
        f"torch {torch.__version__}, {args.rounds} rounds: median [least most]; ratio to {BASE}"
    )
    print(table(summary))
    if args.json is not None:
        args.json.write_text(json.dumps({"torch": torch.__version__, **found, "summary": summary}, indent=1) + "\n")


if __name__ == "__main__":
    main()
