"""Two emulated hosts on one machine: network namespaces joined by a pair of virtual devices, as fast as one says.

Communication then takes time without taking a core. Needs root and iproute2 (``ip``, ``tc``).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

MASTER_ADDR = "10.77.0.1"


class CannotEmulateError(RuntimeError):
    """This machine or user cannot make network namespaces; the message says why."""


@dataclass(frozen=True)
class Host:
    """One of the two, and how to run something on it."""

    rank: int
    namespace: str
    device: str

    @property
    def prefix(self) -> list[str]:
        """What goes before a command line."""
        return ["ip", "netns", "exec", self.namespace]

    @property
    def environment(self) -> dict[str, str]:
        """For ``torch.distributed`` over gloo. A namespace has all ports to itself."""
        return {"MASTER_ADDR": MASTER_ADDR, "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": self.device}


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def two_hosts(rate: str | None = None, *, burst: str = "1mb") -> Iterator[tuple[Host, Host]]:
    """Both hosts, up, and gone afterwards. ``rate`` is what ``tc`` understands ("1gbit"); None does not limit.

    ``burst`` is how much may leave at once: a large one follows the rate on machines with a coarse clock.

    Raises:
        CannotEmulateError: no root, no iproute2, or no right to make namespaces.
    """
    if os.geteuid() != 0:
        raise CannotEmulateError("network namespaces need root")
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise CannotEmulateError("network namespaces need ip and tc, from iproute2")
    # Names of devices have 15 characters at most.
    hosts = tuple(
        Host(rank, f"megabuf-{os.getpid()}-{side}", f"mb{os.getpid()}{side}") for rank, side in enumerate("ab")
    )
    first, second = hosts
    try:
        try:
            for host in hosts:
                _run("ip", "netns", "add", host.namespace)
            ends = (first.device, "netns", first.namespace, "type", "veth", "peer", "name", second.device)
            _run("ip", "link", "add", *ends, "netns", second.namespace)
        except subprocess.CalledProcessError as error:
            reason = error.stderr.strip()
            raise CannotEmulateError(f"cannot make network namespaces joined by a veth pair: {reason}") from error
        for host in hosts:
            _run("ip", "-n", host.namespace, "address", "add", f"10.77.0.{host.rank + 1}/24", "dev", host.device)
            _run("ip", "-n", host.namespace, "link", "set", host.device, "up")
            _run("ip", "-n", host.namespace, "link", "set", "lo", "up")
            if rate is not None:
                shape = ["tbf", "rate", rate, "burst", burst, "latency", "400ms"]
                _run(*host.prefix, "tc", "qdisc", "add", "dev", host.device, "root", *shape)
        yield first, second
    finally:
        for host in hosts:
            # The devices go with it.
            subprocess.run(["ip", "netns", "delete", host.namespace], check=False, capture_output=True)
