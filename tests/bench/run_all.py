"""Every benchmark, one after the other: their tables, and all samples in one folder.

    python tests/bench/run_all.py --out bench_results                  # an hour and a half on two quiet cores
    python tests/bench/run_all.py --out bench_results --only step wrapper

A benchmark that fails does not stop the others; the exit code says so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NAMES = sorted(path.stem.removesuffix("_bench") for path in HERE.glob("*_bench.py"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the benchmarks of megabuf_fx.")
    parser.add_argument("--out", type=Path, required=True, help="folder for NAME.json and NAME.txt")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in args.only:
        print(f"== {name} ==", flush=True)
        command = [sys.executable, str(HERE / f"{name}_bench.py"), "--json", str(args.out / f"{name}.json")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
        (args.out / f"{name}.txt").write_text("".join(lines))
        if process.returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
