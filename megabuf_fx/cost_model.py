"""How long computing and sending take: a device, a link, and rings of ranks.

A collective of ``n`` ranks is a ring: ``n - 1`` messages one after the other, each of an ``n``-th of the bytes, and
twice as many for an all-reduce (Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations
in MPICH", table 1). All times are microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Cost(Protocol):
    """What is known of a node of a graph; ``graph_nodes.py`` says what the fields mean."""

    @property
    def kind(self) -> str: ...
    @property
    def flops(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Device:
    """How fast one rank computes."""

    tflops: float
    """10**12 floating-point operations per second."""
    memory_gbs: float
    """10**9 bytes per second."""
    op_us: float
    """Least time of one operation."""

    def time_of_bytes(self, nbytes: float) -> float:
        return nbytes / (self.memory_gbs * 1e3)

    def time_of(self, node: Cost) -> float:
        """The longer of arithmetic and memory traffic; each node counts by itself, without fusion."""
        if node.kind not in ("compute", "write"):
            return 0.0
        return max(self.op_us, node.flops / (self.tflops * 1e6), self.time_of_bytes(node.nbytes))


@dataclass(frozen=True, slots=True)
class Link:
    """What carries the collectives of one rank."""

    gbps: float
    """10**9 *bits* per second and direction, as links are sold."""
    alpha_us: float
    """From sending a message to its arrival, whatever its size."""
    launch_us: float = 0.0
    """How long a launch holds up computing: of weight where the host computes, too."""

    def time_of(self, messages: float, nbytes: float) -> float:
        """``messages`` one after the other, of ``nbytes`` each."""
        return messages * (self.alpha_us + self.time_of_bytes(nbytes))

    def time_of_bytes(self, nbytes: float) -> float:
        return nbytes * 8 / (self.gbps * 1e3)


def ring_messages(ranks: int, *, is_all_reduce: bool) -> int:
    """Messages that a ring sends one after the other, each of a rank's share; none for a single rank."""
    return (ranks - 1) * (2 if is_all_reduce else 1)


@dataclass(frozen=True, slots=True)
class Route:
    """The collectives of one bucket: rings of ``ranks``, and rings across ``instances`` of them (HSDP)."""

    ranks: int
    instances: int = 1
    sharded: bool = True
    """Reduce-scatter and gather inside an instance; otherwise all-reduce."""
    gathered: bool = True
    """Updated parameters are gathered."""

    @property
    def reduce_messages(self) -> int:
        inside = ring_messages(self.ranks, is_all_reduce=not self.sharded)
        return inside + ring_messages(self.instances, is_all_reduce=True)

    @property
    def reduce_share(self) -> float:
        """Bytes on the link for each byte of the bucket's gradients."""
        inside = ring_messages(self.ranks, is_all_reduce=not self.sharded) / self.ranks
        # Only a rank's shard goes across.
        part = self.ranks if self.sharded else 1
        return inside + ring_messages(self.instances, is_all_reduce=True) / self.instances / part

    @property
    def gather_messages(self) -> int:
        return ring_messages(self.ranks, is_all_reduce=False) if self.gathered else 0

    def reduce_time(self, link: Link, nbytes: float) -> float:
        """From the start of the reduction of ``nbytes`` of gradients to its end."""
        return self.reduce_messages * link.alpha_us + link.time_of_bytes(self.reduce_share * nbytes)

    def gather_time(self, link: Link, nbytes: float) -> float:
        """From the start of the gather of ``nbytes`` of parameters to its end, when it has the link to itself."""
        return self.gather_latency(link) + link.time_of_bytes(self.gather_messages / self.ranks * nbytes)

    def gather_latency(self, link: Link) -> float:
        """What a gather takes beyond its bytes."""
        return self.gather_messages * link.alpha_us
