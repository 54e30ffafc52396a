"""What a block of ``check.py`` is, what it is told, and how it compares and measures."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Compiler = Literal["aot_eager", "inductor"]


@dataclass(frozen=True)
class Context:
    """What a block is told."""

    device: torch.device
    seed: int = 0
    compilers: tuple[Compiler, ...] = ("aot_eager",)
    """Inner compilers that blocks go through."""

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def randn(self, *shape: int, seed: int = 0) -> Tensor:
        """The same on every device and in every run."""
        generator = torch.Generator().manual_seed(self.seed * 1009 + seed)
        return torch.randn(*shape, generator=generator).to(self.device)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Block:
    """``run`` returns a note or raises. ``limit_s`` is reported when it is passed, and where the block was then."""

    name: str
    run: Callable[[Context], str]
    limit_s: float = 30.0
    needs_gpu: bool = False


@dataclass(frozen=True)
class Result:
    name: str
    result: Literal["PASS", "FAIL", "SKIP"]
    seconds: float
    note: str


# Comparing and measuring.


class CheckError(Exception):
    """What a block has found wrong."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise CheckError(message)


def compare(found: Sequence[Tensor], expected: Sequence[Tensor], what: str, *, bound: float = 0.0) -> float:
    """The largest difference relative to the largest value; bitwise with ``bound`` 0.

    Raises:
        CheckError: above the bound, other shapes or dtypes, or anything not finite.
    """
    require(len(found) == len(expected), f"{what}: {len(found)} tensors, expected {len(expected)}")
    worst = 0.0
    for index, (mine, other) in enumerate(zip(found, expected)):
        require(
            mine.shape == other.shape and mine.dtype == other.dtype, f"{what}[{index}]: {mine.shape}, {other.shape}"
        )
        require(bool(mine.isfinite().all()) and bool(other.isfinite().all()), f"{what}[{index}] is not finite")
        if not torch.equal(mine, other):
            scale = other.double().abs().max().clamp(min=1e-30)
            difference = float((mine.double() - other.double()).abs().max() / scale)
            require(difference <= bound, f"{what}[{index}] differs by {difference:.1e} of its maximum, bound {bound:g}")
            worst = max(worst, difference)
    return worst


@contextlib.contextmanager
def no_host_reads(context: Context, *, is_on: bool = True) -> Iterator[None]:
    """On a GPU, whatever makes the host wait for the device is an error."""
    if not (context.is_cuda and is_on):
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def time_ms(functions: Sequence[Callable[[], object]], *, calls: int, rounds: int = 7) -> list[float]:
    """Median milliseconds of each function on the device, from interleaved rounds of ``calls`` calls."""
    samples: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    for _ in range(rounds):
        for function, sample in zip(functions, samples):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(calls):
                function()
            end.record()
            end.synchronize()
            sample.append(begin.elapsed_time(end) / calls)
    return [statistics.median(sample) for sample in samples]
