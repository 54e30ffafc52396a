"""A link that goes down in the middle of a run: every rank ends soon, with an error that names the collective.

The two ranks are in network namespaces of their own, joined by a pair of virtual devices; rank 1 sets its end down.
Unlike with a rank that dies, no connection is closed: whatever is sent gets lost, and only the timeouts notice.
Needs root and iproute2's ``ip``, which is why it is among the slow tests: a machine that runs the others need not have
them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_runs import ANY_GATHER, GATHER, NUMBER, REDUCTION, TIMEOUT, start_ranks

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


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str]]]:
    """Two namespaces and the name of the device in each, joined and up; skips where they cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need ip, from iproute2")
    # Names of devices have 15 characters at most.
    names = [(f"megabuf-{os.getpid()}-{side}", f"mb{os.getpid()}{side}") for side in "ab"]
    (first, device), (second, peer) = names
    try:
        try:
            for namespace, _ in names:
                run("ip", "netns", "add", namespace)
            run("ip", "link", "add", device, "netns", first, "type", "veth", "peer", "name", peer, "netns", second)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot make network namespaces joined by a veth pair: {error.stderr.strip()}")
        for number, (namespace, device) in enumerate(names):
            run("ip", "-n", namespace, "address", "add", f"10.77.0.{number + 1}/24", "dev", device)
            run("ip", "-n", namespace, "link", "set", device, "up")
            run("ip", "-n", namespace, "link", "set", "lo", "up")
        yield names
    finally:
        for namespace, _ in names:
            # The devices go with it.
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


@pytest.mark.parametrize("fault", FAULTS)
def test_both_ranks_end_with_an_error(tmp_path: Path, hosts: list[tuple[str, str]], fault: str) -> None:
    # A namespace has all ports to itself.
    meeting = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}
    processes = start_ranks(
        fault,
        tmp_path / "checkpoints",
        environments=[{**meeting, "GLOO_SOCKET_IFNAME": device} for _, device in hosts],
        prefixes=[["ip", "netns", "exec", namespace] for namespace, _ in hosts],
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
