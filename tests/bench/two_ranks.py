"""Runs a command as two ranks of ``torch.distributed``, on one host or on two emulated ones."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from two_hosts import two_hosts

LOOPBACK = "loopback"


def run_two_ranks(command: Sequence[str], *, link: str, timeout: float) -> None:
    """Run ``command`` on both ranks, one thread each. ``link`` is a rate that ``tc`` understands, or ``LOOPBACK``.

    Raises:
        RuntimeError: a rank failed; the others are killed.
        subprocess.TimeoutExpired: they take longer than ``timeout`` seconds; they are killed.
        CannotEmulateError: this machine cannot emulate two hosts.
    """
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with _places(link) as places:
        processes = [
            subprocess.Popen([*prefix, *command], env={**os.environ, **world, **own, "RANK": str(rank)})
            for rank, (prefix, own) in enumerate(places)
        ]
        try:
            codes = [process.wait(timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}")


@contextlib.contextmanager
def _places(link: str) -> Iterator[list[tuple[list[str], Mapping[str, str]]]]:
    """Of each rank what goes before its command line, and how it finds the other."""
    if link != LOOPBACK:
        with two_hosts(link) as hosts:
            yield [(host.prefix, host.environment) for host in hosts]
        return
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    yield [([], {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"})] * 2
