"""A rank that dies, hangs or raises: the others end with an error that names the collective, and a restart goes on.

The runs are processes of their own, as a hang or a kill must not reach the test's groups.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fault_runs import ANY_GATHER, GATHER, NUMBER, REDUCTION, start_ranks
from helpers import free_port

pytestmark = pytest.mark.dist

FAULTS = {
    "kill in forward": f"{GATHER} 2",
    "hang in forward": f"{GATHER} 2",
    "raise in forward": f"{GATHER} 2",
    "kill in backward": REDUCTION,
    "hang in backward": REDUCTION,
    "raise in backward": REDUCTION,
    # All ranks have sent their buckets; the others wait for what comes next.
    "hang in reduce": NUMBER,
    "kill in step": ANY_GATHER,
    # The model's state_dict gathers what the step has updated.
    "hang in save": f"{GATHER} 3",
}
"""Part of what rank 0 says when rank 1 fails so in step 2."""


@pytest.mark.parametrize("fault", FAULTS)
def test_the_others_end_with_an_error(tmp_path: Path, fault: str) -> None:
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = start_ranks(fault, tmp_path / "checkpoints", environments=[environment] * 2)
    try:
        output, errors = processes[0].communicate(timeout=120)
        if fault.startswith("raise"):
            assert "ValueError: planned" in processes[1].communicate(timeout=30)[1]
            assert processes[1].returncode != 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert processes[0].returncode != 0, output
    assert FAULTS[fault] in errors, errors
    assert "rank 0 finished step 1" in output
    assert "rank 0 finished step 3" not in output
    assert not list((tmp_path / "checkpoints").glob("step-*2"))


EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt.py"
OPTIONS = (
    "--steps 40 --save-every 4 --resume auto --inner aot_eager --layers 2 --n-embd 48 --heads 4 --context 16 "
    "--batch-size 4 --check-steps 0"
)
KILLS = 50


def start_example(out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", str(EXAMPLE), *OPTIONS.split(), "--out", str(out)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen[str], timeout: float) -> str:
    """What it printed; its whole session is killed when it takes longer."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"no end within {timeout} s:\n{output}")
    assert process.returncode == 0, output
    return output


def losses_of(out: Path) -> list[float]:
    losses: list[float] = json.loads((out / "log.json").read_text())["losses"]
    return losses


def workers(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks."""
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def kill_once(out: Path, moment: float, victim: int) -> bool:
    """Whether a rank was there to be killed ``moment`` seconds after the start; the run then ends by itself."""
    process = start_example(out)
    time.sleep(moment)
    ranks = workers(process)
    if victim < len(ranks):
        os.kill(ranks[victim], signal.SIGKILL)
    finish(process, 120)
    return victim < len(ranks)


def check_kills(tmp_path: Path, count: int) -> None:
    begin = time.perf_counter()
    finish(start_example(tmp_path / "whole"), 120)
    seconds = time.perf_counter() - begin
    expected = losses_of(tmp_path / "whole")
    assert len(expected) == 40
    chance = random.Random(0)
    killed = 0
    for number in range(count):
        # From before the first import to after the last step.
        out, moment = tmp_path / f"killed{number}", chance.uniform(0.5, seconds)
        killed += kill_once(out, moment, chance.randrange(2))
        assert losses_of(out) == expected, f"killed after {moment:.1f} of {seconds:.1f} s"
        print(f"kill {number} after {moment:.1f} of {seconds:.1f} s: equal")
    assert killed >= count // 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    check_kills(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.timeout(6000)
def test_kills_at_random_moments(tmp_path: Path) -> None:
    check_kills(tmp_path, KILLS)
