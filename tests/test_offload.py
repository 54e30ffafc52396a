"""Buffers are offloaded and restored in the middle of training: numbers stay, memory goes, misuse is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Mlp, RankGroup, batch, fresh_compiler, seeded
from torch import Tensor, nn

import megabuf_fx as mb
from megabuf_fx.runtime.offload import OffloadedError

PAGE = 4096

CONFIGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "overlap": {"overlap_param_gather": True},
    "bf16": {"grad_reduce_in_fp32": True},
    "sums": {"param_name_patterns_for_fp32_local_accumulation": ("all",)},
    "mxfp8": {"fp8_param_gather": True, "fp8_recipe": "mxfp8", "reuse_grad_buf_for_mxfp8_param_ag": True},
    "nvfp4": {"fp4_param_gather": True, "overlap_param_gather": True},
}
FP32 = ("fp32", "overlap")


class Wide(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))


class Run:
    def __init__(self, name: str, *, rank: int = 0, is_compiled: bool = True, **config: Any) -> None:
        self.rank, self.dtype = rank, torch.float32 if name in FP32 else torch.bfloat16
        self.model: Any = seeded(Wide).to(self.dtype)
        options = {"inner_compiler": "aot_eager", "bucket_size": 5000, **CONFIGS[name], **config}
        self.buf = mb.attach(self.model, mb.MegabufConfig(**options))
        self.optimizer = mb.DistributedOptimizer(self.model.parameters(), torch.optim.AdamW, lr=0.01, fused=True)
        self.call: Any = torch.compile(self.model, backend="megabuf") if is_compiled else self.model

    def batch(self, step: int) -> Tensor:
        return batch(step, 0, self.rank, 8, 64).to(self.dtype)

    def backward(self, step: int) -> Tensor:
        loss: Tensor = self.call(self.batch(step)).float().square().mean()
        loss.backward()
        return loss.detach()

    def step(self, step: int) -> float:
        loss = self.backward(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def memory(self) -> list[int]:
        """Bytes that the storages of gradients and of parameters have now."""
        buffers = self.buf.buffers
        tensors = [(buffer.grad_data, buffer.param_data) for buffer in buffers.buffers]
        return [sum(t.untyped_storage().nbytes() for t in kind if t is not None) for kind in zip(*tensors)]

    def close(self) -> None:
        self.buf.detach()
        fresh_compiler()


def train(rank: int, name: str, is_compiled: bool, is_offloaded: bool) -> tuple[list[float], list[Tensor], int]:
    """Twenty steps, offloading after each; losses, parameters, compiled graphs."""
    run = Run(name, rank=rank, is_compiled=is_compiled)
    losses = []
    for step in range(20):
        losses.append(run.step(step))
        if not is_offloaded:
            continue
        before = run.memory()
        freed = run.buf.offload_grad_buffers() + run.buf.offload_param_buffers()
        assert run.memory() == [0, 0], (name, run.memory())
        assert freed >= max(before), (name, freed, before)
        run.buf.restore_param_buffers()
        # Forwards need no gradient buffers.
        with torch.no_grad():
            run.call(run.batch(step))
        run.buf.restore_grad_buffers()
        assert run.memory() == before, (name, run.memory(), before)
        for param, main_grad in zip(run.buf.buffers.params, run.buf.buffers.main_grads):
            assert param.main_grad is main_grad  # type: ignore[attr-defined]
            assert not main_grad.any()
    compiles = run.buf.buffers.compiles
    values = [value.clone() for value in run.model.state_dict().values()]
    run.close()
    return losses, values, compiles


@pytest.mark.dist
@pytest.mark.parametrize("world", [1, 2])
def test_numbers_are_those_without(ranks: Callable[[int], RankGroup], world: int) -> None:
    names = list(CONFIGS) if world == 1 else ["overlap", "mxfp8"]
    assert ranks(world).run(compare, names, timeout=150) == [[]] * world


def compare(rank: int, names: list[str]) -> list[str]:
    problems = []
    for name in names:
        for is_compiled in (True, False):
            plain = train(rank, name, is_compiled, False)
            found = train(rank, name, is_compiled, True)
            # The forward without gradients is one more graph.
            extra = found[2] - plain[2]
            if found[0] != plain[0] or not all(map(torch.equal, found[1], plain[1])) or extra not in (0, 1):
                problems.append(f"{name}, compiled {is_compiled}: {found[0][-1]}, {plain[0][-1]}, {extra} graphs more")
    return problems


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def test_memory_is_given_back_to_the_system() -> None:
    # Above 32 MiB glibc maps every block and unmaps it when it is freed.
    model = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 4096, bias=False))
    buf = mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager"))
    buf.zero_grad_buffer()
    expected = 2 * 4096 * 4096 * 4
    before = resident()
    assert buf.offload_grad_buffers() == expected
    without = resident()
    assert abs(before - without - expected) < 2**21
    buf.restore_grad_buffers()
    assert abs(resident() - before) < 2**21
    values = [param.detach().clone() for param in model.parameters()]
    # The first time the host copy takes as much; without a GPU nothing is gained but by the caller's further plans.
    assert buf.offload_param_buffers() == expected
    kept = resident()
    buf.restore_param_buffers()
    assert abs(resident() - kept - expected) < 2**21
    assert all(map(torch.equal, model.parameters(), values))
    buf.detach()


def test_addresses_are_bound_anew() -> None:
    run = Run("fp32")
    run.step(0)
    (buffer,) = run.buf.buffers.buffers
    run.buf.offload_grad_buffers()
    run.buf.offload_param_buffers()
    # Somebody else takes the memory.
    others = [torch.ones(buffer.layout.numel) for _ in range(4)]
    run.buf.restore_param_buffers()
    run.buf.restore_grad_buffers()
    assert buffer.param_data is not None
    for index, param in buffer.params.items():
        offset = 4 * buffer.slots[index].start
        assert param.data_ptr() == buffer.param_data.data_ptr() + offset
        assert param.main_grad.data_ptr() == buffer.grad_data.data_ptr() + offset  # type: ignore[attr-defined]
    run.step(1)
    assert all(bool((other == 1).all()) for other in others)
    run.close()


def test_it_is_harmless_to_repeat() -> None:
    run = Run("bf16")
    run.buf.restore_grad_buffers()
    run.buf.restore_param_buffers()
    assert run.buf.offload_grad_buffers() > 0
    assert run.buf.offload_grad_buffers() == 0
    assert run.buf.offload_param_buffers() > 0
    assert run.buf.offload_param_buffers() == 0
    run.buf.restore_param_buffers()
    run.buf.restore_param_buffers()
    run.buf.restore_grad_buffers()
    run.step(0)
    run.close()


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "eager_path"])
def test_misuse_is_refused_by_name(is_compiled: bool, tmp_path: Path) -> None:
    run = Run("overlap", is_compiled=is_compiled)
    run.step(0)
    loss = run.call(run.batch(1)).sum()
    run.buf.offload_grad_buffers()
    gradients: list[Callable[[], object]] = [
        lambda: loss.backward(),  # type: ignore[no-untyped-call]
        lambda: run.optimizer.step(),
        lambda: run.optimizer.clip_grad_norm_(1.0),
        lambda: run.buf.finish_grad_sync(),
        lambda: run.buf.scale_gradients(0.5),
        lambda: run.buf.zero_grad_buffer(),
    ]
    for use in gradients:
        with pytest.raises(OffloadedError, match=r"gradients are offloaded; call buf.restore_grad_buffers\(\) first"):
            use()
    run.buf.restore_grad_buffers()
    run.buf.zero_grad()
    run.buf.offload_param_buffers()
    parameters: list[Callable[[], object]] = [
        lambda: run.call(run.batch(1)),
        lambda: run.optimizer.step(),
        lambda: run.buf.sync_params(),
        lambda: run.model.state_dict(),
        lambda: mb.save_checkpoint(tmp_path, 1, run.model, run.optimizer),
        lambda: run.buf.broadcast_params(),
    ]
    for use in parameters:
        with pytest.raises(OffloadedError, match=r"parameters are offloaded; call buf.restore_param_buffers\(\) first"):
            use()
    run.buf.restore_param_buffers()
    run.step(2)
    run.close()


def test_detach_brings_parameters_back() -> None:
    run = Run("overlap")
    run.step(0)
    run.buf.sync_params()
    expected = [param.detach().clone() for param in run.model.parameters()]
    run.buf.offload_param_buffers()
    run.buf.offload_grad_buffers()
    run.close()
    assert all(map(torch.equal, run.model.parameters(), expected))
    run.model(run.batch(0)).sum().backward()
    assert all(param.grad is not None for param in run.model.parameters())


def test_captured_steps_say_why_they_end() -> None:
    for call, reason in (
        ("offload_grad_buffers", "gradient buffers were offloaded"),
        ("offload_param_buffers", "parameter buffers were offloaded"),
    ):
        run = Run("bf16")

        def take_step(x: Tensor, run: Run = run) -> Tensor:
            loss: Tensor = run.call(x).float().square().mean()
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            return loss.detach()

        step = mb.capture_step(take_step, run.batch(0), optimizer=run.optimizer)
        step(run.batch(0))
        getattr(run.buf, call)()
        run.buf.restore_grad_buffers()
        run.buf.restore_param_buffers()
        with pytest.raises(mb.CaptureError, match=f"{reason}. Capture again"):
            step(run.batch(1))
        again = mb.capture_step(take_step, run.batch(0), optimizer=run.optimizer)
        assert bool(again(run.batch(1)).isfinite())
        run.close()


def test_gradients_that_were_accumulated_are_dropped() -> None:
    run = Run("fp32")
    with run.buf.no_sync():
        run.backward(0)
    run.buf.offload_grad_buffers()
    run.buf.restore_grad_buffers()
    run.backward(1)
    (buffer,) = run.buf.buffers.buffers
    found = buffer.grad_data.clone()
    run.optimizer.zero_grad()
    run.backward(1)
    assert torch.equal(buffer.grad_data, found)
    run.close()


def test_published_gradients() -> None:
    """Without shards parameters are in no buffer, and ``.grad`` goes with the gradients."""
    model = seeded(Mlp)
    buf = mb.attach(model, mb.MegabufConfig(use_distributed_optimizer=False, inner_compiler="aot_eager"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = batch(0, 0, 0, 8, 13)
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        buf.offload_grad_buffers()
        assert all(param.grad is None for param in model.parameters())
        buf.restore_grad_buffers()
    plain = seeded(Mlp)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        plain(x).square().mean().backward()
        reference.step()
        reference.zero_grad()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    with pytest.raises(ValueError, match="parameters are in no buffer"):
        buf.offload_param_buffers()
    buf.detach()


def broadcast(rank: int) -> list[list[float]]:
    model: Any = seeded(Wide).bfloat16()
    model[0].bias.requires_grad_(False)
    found = []
    for name in ("bf16", "nvfp4"):
        config = {"inner_compiler": "aot_eager", **CONFIGS[name]}
        buf = mb.attach(model, mb.MegabufConfig(**config))
        buf.sync_params()
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(rank + 1)
        if buf.buffers.weights is not None:
            buf.buffers.weights.absorb(buf.buffers.weights.indices)
        buf.broadcast_params()
        buf.sync_params()
        found.append(sorted({float(value) for param in model.parameters() for value in param.flatten()}))
        buf.detach()
    return found


@pytest.mark.dist
def test_broadcast_params(ranks: Callable[[int], RankGroup]) -> None:
    assert ranks(2).run(broadcast) == [[[1.0], [1.0]]] * 2


def test_zero_grad_buffer_zeroes_everything() -> None:
    run = Run("sums")
    run.backward(0)
    for buffer in run.buf.buffers.buffers:
        buffer.grad_data.fill_(3)
    run.buf.zero_grad_buffer()
    for buffer in run.buf.buffers.buffers:
        assert not buffer.grad_data.any()
        assert not any(buffer.main_grads[index].any() for index in buffer.promoted)
    run.close()
