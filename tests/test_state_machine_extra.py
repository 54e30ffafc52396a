"""The ``extra`` results of ``oracle/state_machine.json.gz``: fp32 accumulation, aliases, experts, two instances.

Each test says what Megatron did (read from the oracle), what we do, and why where that differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import RankGroup
from oracle_data import load
from replay import Replay, Sent, Two, recorded
from torch import Tensor, nn

import megabuf_fx as mb


def extra(world: int) -> list[dict[str, Any]]:
    return [entry for entry in load("state_machine")["extra"] if entry["world_size"] == world]


def result_of(prefix: str) -> list[Any]:
    (found,) = [entry["result"] for entry in extra(2) if entry["result"][0].startswith(prefix)]
    return list(found)


def named(name: str) -> Any:
    (found,) = [entry["result"] for entry in extra(4) if entry["name"].startswith(name)]
    return found


# fp32 accumulation


def fp32_accumulation(rank: int) -> dict[bool, list[str]]:
    """Operations of one step, by overlap."""
    found = {}
    with recorded() as sent:
        for overlap in (False, True):
            options = {"use_distributed_optimizer": True, "reduce_scatter_with_fp32_accumulation": True}
            model = Two(dtype=torch.bfloat16)
            bucket_size = 1 if overlap else None
            r = Replay(rank, sent, model, overlap_grad_reduce=overlap, bucket_size=bucket_size, **options)
            r.step("step", r.fill, r.finish)
            found[overlap] = [call.op for call in r.seen[0].sent]
            r.buf.detach()
    return found


@pytest.mark.dist
def test_fp32_accumulation(ranks: Callable[[int], RankGroup]) -> None:
    for found in ranks(2).run(fp32_accumulation):
        for overlap in (False, True):
            _, outcome, ops = result_of(f"fp32acc distopt=True overlap={overlap}")
            assert (outcome, ops) == ("ok", found[overlap])


@pytest.mark.parametrize("overlap", [False, True])
def test_fp32_accumulation_needs_shards(overlap: bool) -> None:
    """Megatron accepts it and then ignores it, or with overlap fails after it has sent."""
    _, outcome, ops = result_of(f"fp32acc distopt=False overlap={overlap}")
    assert (outcome, ops) == ("AssertionError: " if overlap else "ok", ["all_reduce"])
    with pytest.raises(ValueError, match="reduce_scatter_with_fp32_accumulation=True needs use_distributed_optimizer"):
        mb.MegabufConfig(
            use_distributed_optimizer=False,
            reduce_scatter_with_fp32_accumulation=True,
            overlap_grad_reduce=overlap,
        )


# What the optimizer's tensors share memory with


def aliases(bf16: bool, g32: bool) -> tuple[bool, bool, bool]:
    """Whether the inner optimizer's gradients and masters lie in the buffers, and whether clipping changed those."""
    model = Two(dtype=torch.bfloat16 if bf16 else torch.float32)
    buf = mb.attach(model, mb.MegabufConfig(grad_reduce_in_fp32=g32))
    (buffer,) = buf.buffers.buffers
    seen: list[Tensor] = []

    class Sgd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.extend(param.grad for group in self.param_groups for param in group["params"])
            return super().step(closure)

    optimizer = mb.DistributedOptimizer(model.parameters(), Sgd, lr=0.1)
    (model(torch.ones(1, 3, dtype=next(model.parameters()).dtype)).sum() * 100).backward()
    buf.finish_grad_sync()
    before = buffer.grad_data.clone()
    optimizer.clip_grad_norm_(1.0)
    is_changed = not torch.equal(buffer.grad_data, before)
    optimizer.step()
    grad_storage = buffer.grad_data.untyped_storage().data_ptr()
    assert buffer.param_data is not None
    masters = [param for group in optimizer.inner.param_groups for param in group["params"]]
    param_storage = buffer.param_data.untyped_storage().data_ptr()
    return (
        all(grad.untyped_storage().data_ptr() == grad_storage for grad in seen),
        is_changed,
        all(master.untyped_storage().data_ptr() == param_storage for master in masters),
    )


@pytest.mark.parametrize(("bf16", "g32"), [(False, True), (True, True), (True, False)])
def test_what_clipping_changes(bf16: bool, g32: bool) -> None:
    """fp32 gradients are the buffer itself, 16-bit ones an fp32 copy, and clipping scales what the optimizer gets."""
    _, is_alias, _, is_clipped = result_of(f"bf16={bf16} g32={g32}")
    assert aliases(bf16, g32)[:2] == (is_alias, is_clipped) == (g32, g32)


def test_fp32_masters_are_the_parameters() -> None:
    assert result_of("fp32 main param shard aliases param_data")[1] is aliases(bf16=False, g32=True)[2] is True


# Experts


class DenseAndExpert(nn.Module):
    """Two layers of 600 elements: 640 with padding, as the oracle's."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(24, 24)
        self.expert = nn.Linear(24, 24)
        for param in self.expert.parameters():
            param.allreduce = False  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.expert(self.dense(x))
        return result


def expert_gathers(rank: int) -> list[Sent]:
    model = DenseAndExpert()
    buf = mb.attach(model, mb.MegabufConfig(overlap_grad_reduce=False), expert_process_group=dist.group.WORLD)
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model(torch.ones(1, 24)).sum().backward()
    with recorded() as sent:
        optimizer.step()
    buf.detach()
    return [call for call in sent if call.op == "all_gather"]


@pytest.mark.dist
def test_expert_buffers_are_gathered_once(ranks: Callable[[int], RankGroup]) -> None:
    """Megatron's chained optimizers gather every buffer of the model each, so twice."""
    theirs = result_of("MoE (dense + expert DistributedOptimizer), no overlap")[1]
    assert theirs == [["all_gather", 640]] * 4
    for sent in ranks(2).run(expert_gathers):
        assert [[call.op, call.numel] for call in sent] == theirs[:2]


# Two optimizer instances of two ranks


def instances(rank: int) -> dict[str, Any]:
    options: dict[str, Any] = {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2}
    found: dict[str, Any] = {}
    with recorded() as sent:
        for force in (False, True):
            r = Replay(rank, sent, **options)
            r.step("finish", r.fill, r.force if force else r.finish)
            # Element 128 begins l1.bias, so both halves begin with a parameter.
            (buffer,) = r.seen[0].buffers
            found[f"force_all_reduce={force}"] = (r.seen[0].sent, [buffer[0], buffer[128]])
            found["numel"] = len(buffer)
            r.buf.detach()
        r = Replay(rank, sent, overlap_grad_reduce=True, **options)
        r.fill_unsynced()
        r.step("start twice", r.buf.start_grad_sync, r.buf.start_grad_sync, r.finish)
        r.zero()
        r.step("missing", r.backward_l1, r.finish)
        found["twice"], found["missing"] = (seen.sent for seen in r.seen)
        grads = [param.main_grad.flatten()[0].item() for param in r.model.parameters()]
        found["grads"] = grads
        r.buf.detach()
    return found


@pytest.fixture(scope="module")
def instances_found(ranks: Callable[[int], RankGroup]) -> list[dict[str, Any]]:
    return ranks(4).run(instances)


def sent_of(rows: list[list[Any]]) -> list[Sent]:
    return [Sent(op, numel, dtype, redop) for op, numel, dtype, _, redop in rows]


@pytest.mark.dist
def test_instances_reduce_as_megatron(instances_found: list[dict[str, Any]]) -> None:
    theirs = named("force_all_reduce=False")
    for rank, found in enumerate(instances_found):
        assert found["numel"] == theirs["numel"]
        sent, halves = found["force_all_reduce=False"]
        assert sent == sent_of(theirs["collectives"])
        assert halves == theirs["ranks"][rank]["first_of_each_half"]


@pytest.mark.dist
def test_instances_with_force_all_reduce_have_complete_gradients(instances_found: list[dict[str, Any]]) -> None:
    """Megatron reduces only this rank's shard across instances, so the rest is the sum of one instance."""
    theirs = named("force_all_reduce=True")
    for rank, found in enumerate(instances_found):
        assert theirs["ranks"][rank]["first_of_each_half"] != [2.5, 2.5]
        sent, halves = found["force_all_reduce=True"]
        assert sent == [Sent("all_reduce", 256, "float32", "SUM")] * 2
        assert halves == [2.5, 2.5]


@pytest.mark.dist
def test_instances_start_once(instances_found: list[dict[str, Any]]) -> None:
    """Megatron has no handle to look at with several instances, and reduces twice."""
    theirs = sent_of(named("overlap first batch: start_grad_sync twice"))
    for found in instances_found:
        assert found["twice"] == theirs[:2]


@pytest.mark.dist
def test_instances_reduce_missing_gradients(instances_found: list[dict[str, Any]]) -> None:
    """Megatron's finish waits for a stream, finds nothing wrong, and leaves everything unreduced."""
    assert named("overlap later batch: finish_grad_sync with 1/4 params ready") == ["ok", []]
    for rank, found in enumerate(instances_found):
        assert [call.op for call in found["missing"]] == ["reduce_scatter", "all_reduce"]
        weight, bias, weight2, bias2 = found["grads"]
        # l1 is in the second half, l2, which got nothing, in the first.
        assert (weight2, bias2) == (0.0, 0.0)
        assert weight == (2.5 if rank % 2 else (rank + 1) / 4)
        assert bias == (1.0 if rank % 2 else 0.25)
