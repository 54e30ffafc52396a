"""``nccl_ub`` without a GPU: where it is refused, and how a pool is made, filled, registered and given up."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import Mlp, RankGroup, error_text
from torch import nn

import megabuf_fx as mb
import megabuf_fx._compat as _compat
from megabuf_fx import nccl_memory
from megabuf_fx.nccl_memory import NcclMemory, check_nccl_ub

UB = mb.MegabufConfig(nccl_ub=True, inner_compiler="aot_eager")
CUDA = torch.device("cuda", 0)


def test_refused_on_a_cpu() -> None:
    with pytest.raises(ValueError, match=r"nccl_ub=True needs parameters on a GPU, they are on cpu; drop it here"):
        mb.attach(Mlp(), UB)


def refuse(rank: int) -> list[str]:
    found = [error_text(lambda: mb.attach(Mlp(), UB))]
    found.append(error_text(lambda: check_nccl_ub(UB, CUDA, dist.group.WORLD)))
    return found


@pytest.mark.dist
def test_refused_on_every_rank(ranks: Callable[[int], RankGroup]) -> None:
    for on_cpu, on_gloo in ranks(2).run(refuse):
        assert "nccl_ub=True needs parameters on a GPU" in on_cpu
        assert "of several ranks over NCCL, this one has 2 rank(s) of gloo" in on_gloo


def test_refused_alone_and_with_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="of several ranks over NCCL, there is none"):
        check_nccl_ub(UB, CUDA, None)
    group: Any = mock.Mock(size=lambda: 2)
    monkeypatch.setattr(dist, "get_backend", lambda group: "cpu:gloo,cuda:nccl")
    check_nccl_ub(UB, CUDA, group)
    check_nccl_ub(mb.MegabufConfig(), torch.device("cpu"), None)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(ValueError, match="expandable segments; take them out of PYTORCH_CUDA_ALLOC_CONF"):
        check_nccl_ub(UB, CUDA, group)


class Backend:
    """Says what it is asked for."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls
        self.mem_allocator = f"allocator of {name}"

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.calls.append(f"{self.name} connect {device}")

    def register_mem_pool(self, pool: object) -> None:
        self.calls.append(f"{self.name} register {pool}")

    def deregister_mem_pool(self, pool: object) -> None:
        self.calls.append(f"{self.name} deregister {pool}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    @contextlib.contextmanager
    def use(pool: object, device: torch.device) -> Iterator[None]:
        calls.append(f"use {pool} on {device}")
        yield
        calls.append("used")

    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator}")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    return calls


def test_buffers_lie_in_the_pool(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocated first, registered with every communicator then, the other way round at the end."""
    memory = NcclMemory([Backend("grads", calls), Backend("params", calls)], CUDA)
    # The package has a function of the module's name.
    module = importlib.import_module("megabuf_fx.attach")
    monkeypatch.setattr(module, "check_nccl_ub", lambda *unused: None)
    monkeypatch.setattr(module, "make_memory", lambda *unused: memory)
    zeros = torch.zeros

    def noting(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dtype") is torch.float32 and args and args[0] == 128:
            calls.append("allocate")
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", noting)
    buf = mb.attach(nn.Linear(9, 7), UB)
    monkeypatch.setattr(torch, "zeros", zeros)
    pool = "pool of allocator of grads"
    use = [f"use {pool} on cuda:0"]
    assert calls == [
        *use,
        "allocate",
        "allocate",
        "used",
        "grads connect cuda:0",
        f"grads register {pool}",
        "params connect cuda:0",
        f"params register {pool}",
    ]
    calls.clear()
    buf.offload_grad_buffers()
    buf.restore_grad_buffers()
    assert calls == [*use, "used"]
    calls.clear()
    buf.detach()
    assert calls == [f"params deregister {pool}", f"grads deregister {pool}"]


@pytest.mark.dist
def test_every_communicator_is_registered(ranks: Callable[[int], RankGroup]) -> None:
    """Gradients and parameters each have one; several instances have one inside and one across."""
    assert ranks(4).run(count_groups) == [[2, 4]] * 4


def count_groups(rank: int) -> list[int]:
    found = []
    for instances in (1, 2):
        config = mb.MegabufConfig(inner_compiler="aot_eager", num_distributed_optimizer_instances=instances)
        buf = mb.attach(Mlp(), config)
        taken: list[Any] = []

        def take(backends: Any, device: Any, taken: list[Any] = taken) -> None:
            taken.extend(backends)

        with (
            mock.patch.object(nccl_memory, "NcclMemory", take),
            mock.patch.object(_compat, "nccl_backend", lambda group, device: group),
        ):
            nccl_memory.make_memory(UB, CUDA, buf.buffers.comms)
        assert len(set(taken)) == len(taken)
        found.append(len(taken))
        buf.detach()
    return found
