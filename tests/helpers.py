"""Builders and process groups shared by the tests."""

from __future__ import annotations

import copy
import gc
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn


class RankError(AssertionError):
    """Some rank failed, or none answered in time."""


class RankGroup:
    """Long-lived gloo processes that run test functions, so that a group is started once for many cases.

    A function runs on every rank at the same time and its results come back in rank order. When a rank raises, or none
    answers within the timeout, all processes are killed and the next call starts fresh ones: no test can hang.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 150.0) -> list[Any]:
        """``[function(rank, *args) for each rank]``; ``function`` must be importable, ``args`` picklable."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        pending = dict(enumerate(self._pipes))
        while pending and not failures:
            ready = wait(list(pending.values()), timeout)
            if not ready:
                failures = dict.fromkeys(pending, f"no answer within {timeout} s")
            for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
                try:
                    is_ok, value = pending.pop(rank).recv()
                except EOFError:
                    is_ok, value = False, "process died"
                (results if is_ok else failures)[rank] = value
        if failures:
            self.close()
            raise RankError("\n".join(f"rank {rank} of {self.world}: {text}" for rank, text in failures.items()))
        return [results[rank] for rank in range(self.world)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = mp.get_context("spawn")
        port = free_port()
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.world, port), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(pipe: Connection, rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(rank, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        fresh_compiler()
        pipe.send(answer)


def fresh_compiler() -> None:
    """Forget all compiled graphs, and with them the models they hold."""
    torch.compiler.reset()
    gc.collect()


def error_text(function: Callable[[], Any]) -> str:
    """``"ErrorType: message"`` of what ``function`` raises, for comparing ranks; fails when it raises nothing."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("expected an error")


class Mlp(nn.Module):
    """Odd sizes, a LayerNorm, and no parameter whose true gradient is zero."""

    def __init__(self, width: int = 13, hidden: int = 37, out: int = 5) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, 29, bias=False)
        self.ln = nn.LayerNorm(29)
        self.fc3 = nn.Linear(29, out)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.fc2(torch.tanh(self.fc1(x))))
        result: Tensor = self.fc3(self.ln(hidden))
        return result


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """``build()`` with equal parameters on every rank and every call."""
    torch.manual_seed(seed)
    return build()


def batch(step: int, micro: int, rank: int, *shape: int) -> Tensor:
    """Data that depends on its place in the run alone."""
    generator = torch.Generator().manual_seed(step * 10007 + micro * 101 + rank)
    return torch.randn(*shape, generator=generator)


def params_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def max_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left if left[name].numel())


def twin(model: nn.Module) -> nn.Module:
    """A copy with storage of its own, for the reference run."""
    return copy.deepcopy(model)


Losses = Sequence[float]
