"""A link that goes down in the middle of a run: every rank ends soon, with an error that names the collective.

The two ranks are in network namespaces of their own, joined by a pair of virtual devices; rank 1 sets its end down.
Unlike with a rank that dies, no connection is closed: whatever is sent gets lost, and only the timeouts notice.
Needs root and iproute2's ``ip``, which is why it is among the slow tests: a machine that runs the others need not have
them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_runs import ANY_GATHER, GATHER, NUMBER, REDUCTION, TIMEOUT, start_ranks
from two_hosts import CannotEmulateError, Host, two_hosts

pytestmark = [pytest.mark.dist, pytest.mark.slow]

MARGIN = 12
"""Seconds from the timeout to the end of the processes, at most."""

ANY = f"({ANY_GATHER}|{REDUCTION}) \\d+ \\([\\w .]+\\) failed in step [23]"
FAULTS = {
    # Rank 1 may have got rank 0's part before; then it waits for something later.
    "unplug in forward": (f"{re.escape(GATHER)} 2", ANY),
    "unplug in backward": (f"{REDUCTION} \\d+ \\([\\w .]+\\) failed in step 2",) * 2,
    "unplug in reduce": (re.escape(NUMBER),) * 2,
    "unplug in gather": (f"{ANY_GATHER} \\d+ \\([\\w .]+\\) failed in step 2",) * 2,
    "unplug in step": (ANY,) * 2,
    "unplug in save": (ANY,) * 2,
    "unplug in write": (r"CollectiveError: saving \S+step-00000002 failed: ",) * 2,
}
"""What rank 0 and rank 1 say when the link goes down so in step 2."""


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts() as both:
            yield both
    except CannotEmulateError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("fault", FAULTS)
def test_both_ranks_end_with_an_error(tmp_path: Path, hosts: tuple[Host, Host], fault: str) -> None:
    processes = start_ranks(
        fault,
        tmp_path / "checkpoints",
        environments=[host.environment for host in hosts],
        prefixes=[host.prefix for host in hosts],
    )
    ends: dict[int, float] = {}
    deadline = time.monotonic() + 120
    try:
        while len(ends) < 2 and time.monotonic() < deadline:
            for rank, process in enumerate(processes):
                if process.poll() is not None:
                    ends.setdefault(rank, time.monotonic())
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
        results = [process.communicate() for process in processes]
    found = re.search(r"link down at ([\d.]+)", results[1][0])
    assert found, results
    for rank, (process, (output, errors)) in enumerate(zip(processes, results)):
        assert rank in ends, f"rank {rank} did not end: {errors}"
        seconds = ends[rank] - float(found[1])
        print(f"rank {rank} ended {seconds:.1f} s after the link went down")
        assert process.returncode > 0, errors
        assert re.search(FAULTS[fault][rank], errors), errors
        assert seconds < TIMEOUT + MARGIN
        assert f"rank {rank} finished step 1" in output
        assert f"rank {rank} finished step 3" not in output
    assert not list((tmp_path / "checkpoints").glob("step-*2"))
