"""Several process groups: optimizer instances (HSDP), expert-parallel parameters; and complete gradients on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import Mlp, RankGroup, batch, error_text, fresh_compiler, max_difference, params_of, seeded, twin
from torch import Tensor, nn

import megabuf_fx as mb
from megabuf_fx.runtime.transports import HybridComm

pytestmark = pytest.mark.dist

LR = 1e-2
VARIANTS: dict[str, dict[str, Any]] = {
    "overlap": {"overlap_param_gather": True},
    "sync": {"overlap_grad_reduce": False},
    "average": {"average_in_collective": True},
}


def train(rank: int, variant: str, instances: int, is_compiled: bool) -> list[str]:
    world = dist.get_world_size()
    plain = seeded(Mlp)
    model = twin(plain)
    buf = mb.attach(
        model,
        mb.MegabufConfig(
            inner_compiler="aot_eager",
            bucket_size=300,
            num_distributed_optimizer_instances=instances,
            **VARIANTS[variant],
        ),
    )
    call = torch.compile(model, backend="megabuf") if is_compiled else model
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=LR)
    reference = torch.optim.AdamW(plain.parameters(), lr=LR)
    problems = []
    if (buf.dp_size, buf.plan.dp_size) != (world, world // instances):
        problems.append(f"{buf.dp_size} ranks, shards for {buf.plan.dp_size}")
    for step in range(3):
        torch.stack([plain(batch(step, 0, r, 8, 13)).square().mean() for r in range(world)]).mean().backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        reference.step()
        reference.zero_grad()
        call(batch(step, 0, rank, 8, 13)).square().mean().backward()
        norm = optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        if not torch.allclose(norm, expected, rtol=1e-5):
            problems.append(f"norm {norm}, expected {expected}")
    buf.sync_params()
    if not max_difference(params_of(model), params_of(plain)) <= 2e-5:
        problems.append(f"parameters differ by {max_difference(params_of(model), params_of(plain))}")
    buf.detach()
    return [f"{variant}, {instances} instances, compiled {is_compiled}: {problem}" for problem in problems]


def train_all(rank: int) -> list[str]:
    problems = []
    for variant in VARIANTS:
        for instances in (2, 4):
            for is_compiled in (True, False):
                problems += train(rank, variant, instances, is_compiled)
                fresh_compiler()
    return problems


def test_instances_equal_eager(ranks: Callable[[int], RankGroup]) -> None:
    for problems in ranks(4).run(train_all, timeout=150):
        assert not problems, "\n".join(problems)


def complete_gradients(rank: int, instances: int, is_compiled: bool) -> str | None:
    """Every rank's whole ``main_grad``, with several instances too, where Megatron reduces shards only."""
    world = dist.get_world_size()
    plain = seeded(Mlp)
    model = twin(plain)
    config = mb.MegabufConfig(
        inner_compiler="aot_eager", bucket_size=300, num_distributed_optimizer_instances=instances
    )
    buf = mb.attach(model, config)
    call = torch.compile(model, backend="megabuf") if is_compiled else model
    buf.force_all_reduce = True
    torch.stack([plain(batch(0, 0, r, 8, 13)).square().mean() for r in range(world)]).mean().backward()
    call(batch(0, 0, rank, 8, 13)).square().mean().backward()
    buf.finish_grad_sync()
    difference = max(
        (p.main_grad - q.grad).abs().max().item()  # type: ignore[operator, attr-defined]
        for p, q in zip(model.parameters(), plain.parameters())
    )
    buf.force_all_reduce = False
    buf.zero_grad()
    call(batch(0, 0, rank, 8, 13)).square().mean().backward()
    text = error_text(lambda: buf.finish_grad_sync(force_all_reduce=True)) if is_compiled else ""
    buf.finish_grad_sync()
    buf.detach()
    if is_compiled and "bucket 0 was already reduce-scattered" not in text:
        return text
    return None if difference <= 1e-6 else f"gradients differ by {difference}"


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("instances", [1, 2])
def test_force_all_reduce_gives_complete_gradients(
    ranks: Callable[[int], RankGroup], instances: int, is_compiled: bool
) -> None:
    assert ranks(4).run(complete_gradients, instances, is_compiled) == [None] * 4


def different_configs(rank: int) -> list[str]:
    """Instances that do not divide the ranks, and ranks that disagree: an error on all, and the group works on."""
    texts = []
    for instances in (3, 2 if rank == 0 else 1):
        config = mb.MegabufConfig(num_distributed_optimizer_instances=instances)
        texts.append(error_text(lambda config=config: mb.attach(seeded(Mlp), config)))  # type: ignore[misc]
    mb.attach(seeded(Mlp), mb.MegabufConfig(num_distributed_optimizer_instances=2)).detach()
    return texts


def test_unfit_instances_are_refused_on_every_rank(ranks: Callable[[int], RankGroup]) -> None:
    for indivisible, different in ranks(4).run(different_configs):
        assert "num_distributed_optimizer_instances=3 does not divide the 4 ranks of process_group" in indivisible
        assert different.startswith("ValueError: ranks attach different models or configs: rank 0 has config")


class Delayed:
    """A communicator whose collectives only count; the first of two stages."""

    size, rank = 2, 0

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def reduce_scatter(self, shard: Tensor, full: Tensor, *, average: bool) -> Any:
        return self._work(f"reduce_scatter {full.numel()}")

    def all_reduce(self, full: Tensor, *, average: bool) -> Any:
        return self._work(f"all_reduce {full.numel()}")

    def close(self) -> None:
        self._log.append(f"{self._name} close")

    def _work(self, what: str) -> Any:
        from megabuf_fx.runtime.collectives import PendingWork

        self._log.append(f"{self._name} start {what}")
        return PendingWork(lambda: self._log.append(f"{self._name} wait {what}"), ())


def test_the_second_collective_follows_the_first_without_blocking() -> None:
    log: list[str] = []
    comm = HybridComm(Delayed(log, "intra"), Delayed(log, "inter"))  # type: ignore[arg-type]
    works = [comm.reduce_scatter(torch.zeros(n), torch.zeros(2 * n), average=False) for n in (1, 2, 3)]
    for work in works:
        work.wait()
    across = [entry for entry in log if entry.startswith("inter start")]
    assert across == [f"inter start all_reduce {n}" for n in (1, 2, 3)]
    for n in (1, 2, 3):
        assert log.index(f"intra wait reduce_scatter {2 * n}") < log.index(f"inter start all_reduce {n}")
    comm.close()


class Experts(nn.Module):
    """A dense layer, two experts of which the input chooses, and a dense head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.last = nn.Linear(8, 3)
        for param in self.experts.parameters():
            param.allreduce = False  # type: ignore[attr-defined]

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.experts[chosen](torch.tanh(self.first(x)))))
        return result


def train_experts(rank: int, mode: dict[str, Any]) -> list[str]:
    """Experts of name ``i`` are others on even and odd ranks. Expert 1 is used by even ranks only, in odd steps."""
    world = dist.get_world_size()
    groups = [dist.new_group(list(range(parity, world, 2))) for parity in (0, 1)]
    plain = [seeded(Experts, seed=parity) for parity in (0, 1)]
    for name in ("first", "last"):
        plain[1].get_submodule(name).load_state_dict(plain[0].get_submodule(name).state_dict())
    # Not a deep copy: that would lose the attributes of the parameters.
    model = seeded(Experts)
    model.load_state_dict(plain[rank % 2].state_dict())
    start = params_of(model)
    config = mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=60, **mode)
    buf = mb.attach(model, config, expert_process_group=groups[rank % 2])
    call = torch.compile(model, backend="megabuf")
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, weight_decay=0.1)
    dense = [*plain[0].first.parameters(), *plain[0].last.parameters()]  # type: ignore[union-attr, operator]
    every = [*dense, *(p for module in plain for p in module.get_submodule("experts").parameters())]
    reference = torch.optim.AdamW(every, lr=LR, weight_decay=0.1)
    problems = []
    for step in range(4):
        for r in range(world):
            chosen = step % 2 if r % 2 == 0 else 0
            hidden = torch.tanh(plain[0].first(batch(step, 0, r, 8, 6)))  # type: ignore[operator, union-attr]
            routed = plain[r % 2].experts[chosen](hidden)  # type: ignore[index, operator, union-attr]
            loss = plain[0].last(torch.tanh(routed)).square().mean()  # type: ignore[operator, union-attr]
            (loss / world).backward()
        expected = nn.utils.clip_grad_norm_(every, 0.1)
        reference.step()
        reference.zero_grad()
        call(batch(step, 0, rank, 8, 6), step % 2 if rank % 2 == 0 else 0).square().mean().backward()
        norm = optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        if not torch.allclose(norm, expected, rtol=1e-5):
            problems.append(f"step {step}: norm {norm}, expected {expected}")
    buf.sync_params()
    found = params_of(model)
    wanted = {**params_of(plain[rank % 2]), **{n: p for n, p in params_of(plain[0]).items() if "experts" not in n}}
    if not max_difference(found, wanted) <= 2e-5:
        problems.append(f"parameters differ by {max_difference(found, wanted)}")
    if rank % 2 and not torch.equal(found["experts.1.weight"], start["experts.1.weight"]):
        problems.append("an expert without tokens moved")
    buf.detach()
    return [f"{mode}: {problem}" for problem in problems]


def train_experts_in_all_modes(rank: int) -> list[str]:
    problems = []
    modes: list[dict[str, Any]] = [
        {},
        {"overlap_param_gather": True},
        {"average_in_collective": True},
        {"use_distributed_optimizer": False},
    ]
    if dist.get_world_size() == 4:
        modes.append({"num_distributed_optimizer_instances": 2})
    for mode in modes:
        problems += train_experts(rank, mode)
        fresh_compiler()
    return problems


@pytest.mark.parametrize("world", [2, 4])
def test_experts_equal_eager(ranks: Callable[[int], RankGroup], world: int) -> None:
    for problems in ranks(world).run(train_experts_in_all_modes, timeout=120):
        assert not problems, "\n".join(problems)
    ranks(world).close()


def without_group(rank: int) -> list[str]:
    model = seeded(Experts)
    texts = [error_text(lambda: mb.attach(model))]
    group = dist.new_group([rank], use_local_synchronization=True)
    texts.append(error_text(lambda: mb.attach(seeded(Mlp), expert_process_group=group)))
    return texts


def test_expert_groups_are_checked(ranks: Callable[[int], RankGroup]) -> None:
    for missing, useless in ranks(2).run(without_group):
        assert "parameter 'experts.0.weight' is an expert parameter (allreduce=False); pass the ranks" in missing
        assert "expert_process_group was passed, but no parameter has allreduce=False" in useless
    ranks(2).close()
