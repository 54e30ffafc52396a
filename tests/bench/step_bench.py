"""Step time of megabuf_fx beside its peers and beside the limit, on two emulated hosts.

    python tests/bench/step_bench.py                          # every cell; root and iproute2 for the emulated hosts
    python tests/bench/step_bench.py --link 1gbit --micro-batches 4 --precision fp32 --only "megabuf;DDP"

A *cell* is a link (two hosts at 1 or 4 Gbit/s, plain loopback, or ``none``: one process without communication), a
precision and a number of micro-batches. In each cell all contestants (``contestants.py``) share two processes, one core
each. A round goes through all of them, several steps between two barriers each, so that what else the machine
does meets all alike and what a step leaves to the next one counts; the table has medians over the rounds.

[Note: limit]
What one core and the link cannot beat, measured in the same run:

    limit = compute + cpu + exposed
    compute   the same compiled step without collectives
    cpu       CPU time of the same collectives run alone: one core serves both
    exposed   max(0, reduce_bytes / rate - backward window) + max(0, gather_bytes / rate - forward window)

Bytes are those per direction and rank. The windows are the last backward and the first forward of the step without
collectives, each longer by the CPU time of the collectives that run in it. *Link limit* is the same without the CPU
time, what a machine with a network card that works by itself could reach.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from contestants import ALONE, OURS, PEERS
from tabulate import tabulate
from two_ranks import LOOPBACK, run_two_ranks

HERE = Path(__file__).parent
ALONE_LINK = "none"
LINKS = {"1gbit": 1e9 / 8, "4gbit": 4e9 / 8, LOOPBACK: None, ALONE_LINK: None}
"""Bytes per second in each direction, None where nothing limits them."""


class Cell(NamedTuple):
    link: str
    precision: str
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.link}, {self.precision}, {self.micro_batches} micro-batches"


class Limit(NamedTuple):
    """Seconds of a step; see [Note: limit]."""

    compute: float
    cpu: float
    exposed: float
    exposed_without_cpu: float

    @property
    def total(self) -> float:
        return self.compute + self.cpu + self.exposed

    @property
    def link_total(self) -> float:
        return self.compute + self.exposed_without_cpu


def limit_of(result: Mapping[str, Any], rate: float | None) -> Limit:
    """The limit of a cell from what its worker measured."""
    alone = result["collectives"]
    forward, backward = (statistics.median(window) for window in zip(*result["windows"]))
    reduce_cpu, gather_cpu = statistics.median(alone["reduce_cpu"]), statistics.median(alone["gather_cpu"])

    def exposed(reduce_window: float, gather_window: float) -> float:
        if rate is None:
            return 0.0
        reduce, gather = (float(alone[f"{kind}_bytes"][0]) / rate for kind in ("reduce", "gather"))
        return max(0.0, reduce - reduce_window) + max(0.0, gather - gather_window)

    return Limit(
        compute=statistics.median(result["seconds"]["no collectives"]),
        cpu=reduce_cpu + gather_cpu,
        exposed=exposed(backward + reduce_cpu, forward + gather_cpu),
        exposed_without_cpu=exposed(backward, forward),
    )


def measure(cell: Cell, options: Sequence[str]) -> dict[str, Any]:
    """Run one cell; returns what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, str(HERE / "step_worker.py"), "--out", str(out), *options]
        command += ["--precision", cell.precision, "--micro-batches", str(cell.micro_batches)]
        if cell.link == ALONE_LINK:
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"})
        else:
            run_two_ranks(command, link=cell.link, timeout=5400)
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def summarize(cell: Cell, result: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Numbers of a cell, and its table."""
    medians = {name: statistics.median(samples) for name, samples in result["seconds"].items()}
    cpu = {name: statistics.median(samples) for name, samples in result["cpu_seconds"].items()}
    peers = {name: medians[name] for name in medians if name in PEERS or (name in ALONE and name not in OURS)}
    fastest = min(peers, key=peers.__getitem__) if peers else None
    has_limit = result.get("collectives") and result.get("windows")
    limit = limit_of(result, LINKS[cell.link]) if has_limit else None
    rows = []
    for name, samples in result["seconds"].items():
        row: list[Any] = [name, f"{medians[name] * 1e3:.0f} [{min(samples) * 1e3:.0f} {max(samples) * 1e3:.0f}]"]
        row.append(f"{cpu[name] * 1e3:.0f}")
        row.append(medians[name] / medians[fastest] if fastest else None)
        row += [medians[name] / limit.total, medians[name] / limit.link_total] if limit else [None, None]
        rows.append(row)
    headers = [str(cell), "ms [least most]", "CPU ms", "to the fastest peer", "to the limit", "to the link limit"]
    text = tabulate(rows, headers, tablefmt="github", floatfmt=".2f")
    summary: dict[str, Any] = {"medians": medians, "fastest_peer": fastest}
    if limit:
        summary["limit"] = {**limit._asdict(), "total": limit.total, "link_total": limit.link_total}
        text += (
            f"\n\nlimit {limit.total * 1e3:.0f} ms = compute {limit.compute * 1e3:.0f} + CPU of collectives "
            f"{limit.cpu * 1e3:.0f} + exposed {limit.exposed * 1e3:.0f}; without CPU {limit.link_total * 1e3:.0f} ms"
        )
    return summary, text


def main() -> None:
    args, options = parse_args()
    cells = [Cell(link, p, int(m)) for p in args.precision for link in args.link for m in args.micro_batches]
    found: dict[str, Any] = {}
    for cell in cells:
        result = measure(cell, options)
        summary, text = summarize(cell, result)
        print(f"{text}\n", flush=True)
        found[str(cell)] = {"summary": summary, **result}
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description="Step time of megabuf_fx, peers and the limit.",
        epilog="Further options go to step_worker.py: --rounds, --steps, --only, and the size of the model.",
    )
    parser.add_argument("--link", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--micro-batches", nargs="+", default=["1", "4"])
    parser.add_argument("--json", type=Path, help="keeps every sample")
    return parser.parse_known_args()


if __name__ == "__main__":
    main()
