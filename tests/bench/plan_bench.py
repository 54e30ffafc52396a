"""Time and peak memory of ``megabuf plan`` for large models, each in a process of its own.

The bound is 20 s and 1 GiB for 70B parameters at 1,024 data-parallel ranks. It is a script because time on a shared
machine means little to a test; the test holds the memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tabulate import tabulate

BOUND_S = 20.0
BOUND_MIB = 1024

CASES = (
    "plan llama-7b --dp 1024",
    "plan llama-70b --dp 1024",
    "plan llama-70b --dp 1024 --fp8-param-gather --fp8-recipe mxfp8",
    "plan llama-70b --world 16384 --bucket-size 1 --json",
    "ledger llama-70b --dp 1024 --compare",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", help="only this one")
    parser.add_argument("--json", type=Path, help="write every sample here")
    options = parser.parse_args()
    found: dict[str, list[float]] = {}
    rows = []
    for case in [options.case] if options.case else CASES:
        command = [sys.executable, "-c", "from megabuf_fx.cli.app import main; main()", *case.split()]
        seconds = []
        for _ in range(options.rounds):
            start = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            seconds.append(time.perf_counter() - start)
        # The largest of all children so far: enough for a bound.
        mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        found[case] = seconds
        spread = f"{statistics.median(seconds):.2f} [{min(seconds):.2f} {max(seconds):.2f}]"
        rows.append((f"megabuf {case}", spread, f"{mib:.0f}"))
        if max(seconds) > BOUND_S or mib > BOUND_MIB:
            raise SystemExit(
                f"megabuf {case}: {max(seconds):.1f} s and {mib:.0f} MiB; bound {BOUND_S} s, {BOUND_MIB} MiB"
            )
    print(tabulate(rows, headers=("command", "seconds", "MiB so far"), tablefmt="github", disable_numparse=True))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
