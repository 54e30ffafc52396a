"""What ``attach`` and the optimizer refuse: one clear error on every rank, never a hang."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import Mlp, RankGroup, batch, error_text, max_difference, params_of, seeded, twin
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import megabuf_fx as mb

EAGER = mb.MegabufConfig(inner_compiler="aot_eager")


def complex_model() -> nn.Module:
    model = nn.Linear(3, 3)
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    return model


def frozen_model() -> nn.Module:
    return nn.Linear(3, 3).requires_grad_(False)


def two_devices() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no_trainable": (frozen_model, "ValueError: Linear has no trainable parameters"),
    "complex": (complex_model, "ValueError: parameter 'phase' is complex"),
    "sparse": (lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)), "ValueError: module '0' makes sparse gradients"),
    "devices": (two_devices, "ValueError: parameters are on several devices ('0.bias' on cpu, '1.bias' on meta)"),
    "meta": (lambda: nn.Linear(3, 3, device="meta"), "NotImplementedError: parameter 'weight' is on the meta device"),
    "not_a_module": (lambda: "model", "TypeError: attach takes a torch.nn.Module, got str"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_models(name: str) -> None:
    build, expected = REFUSED[name]
    assert error_text(lambda: mb.attach(build())).startswith(expected)


def test_refused_config() -> None:
    assert error_text(lambda: mb.attach(nn.Linear(2, 2), {"bucket_size": 3})) == (  # type: ignore[arg-type]
        "TypeError: config must be a MegabufConfig, got dict"
    )


def test_attached_twice() -> None:
    model = nn.Linear(3, 3)
    buf = mb.attach(model, EAGER)
    assert "parameter 'weight' is already attached" in error_text(lambda: mb.attach(model))
    assert "parameter '0.weight' is already attached" in error_text(lambda: mb.attach(nn.Sequential(model)))
    buf.detach()
    mb.attach(model)


def on_numpy(model: nn.Module) -> list[weakref.ref[Any]]:
    """Give parameters memory of numpy's, which tells when nothing holds it any more."""
    references = []
    for param in model.parameters():
        array = param.detach().numpy().copy()
        param.data = torch.from_numpy(array)
        references.append(weakref.ref(array))
    return references


def test_no_copy_of_the_parameters_is_left() -> None:
    """Sharded, they are views of the buffer, and nothing holds what they were before: not the handle, the optimizer,
    compiled graphs or the autograd nodes that ``attach`` looks up."""
    model = seeded(Mlp)
    references = on_numpy(model)
    assert all(reference() is not None for reference in references)
    buf = mb.attach(model, EAGER)
    gc.collect()
    assert all(reference() is None for reference in references)
    buf.detach()


def test_unsharded_parameters_stay_where_they_are() -> None:
    model = seeded(Mlp)
    references = on_numpy(model)
    buf = mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager", use_distributed_optimizer=False))
    gc.collect()
    assert all(reference() is not None for reference in references)
    buf.detach()


def test_wide_gradients_are_for_the_distributed_optimizer() -> None:
    """Without shards, too: ``.grad`` must have the parameter's dtype, so torch's own optimizer finds nothing."""
    model = nn.Linear(3, 3, dtype=torch.bfloat16)
    mb.attach(model, mb.MegabufConfig(use_distributed_optimizer=False, grad_reduce_in_fp32=True))
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.grad is None
    assert "AdamW steps parameters of an attached model whose .grad is None" in error_text(
        torch.optim.AdamW(model.parameters()).step
    )
    before = model.weight.detach().clone()
    mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1).step()
    assert not torch.equal(model.weight, before)


def test_optimizer_that_would_do_nothing_is_refused() -> None:
    model = nn.Linear(3, 3)
    mb.attach(model, EAGER)
    model(torch.ones(2, 3)).sum().backward()
    message = error_text(torch.optim.SGD(model.parameters(), lr=0.1).step)
    assert "SGD steps parameters of an attached model whose .grad is None (its shards live in the buffer)" in message
    assert "use megabuf_fx.DistributedOptimizer(model.parameters(), SGD, ...)" in message
    # Parameters of other models are nobody's business.
    torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1).step()


def test_started_by_torchrun_without_init_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    assert "WORLD_SIZE is 2 but torch.distributed is not initialized" in error_text(lambda: mb.attach(nn.Linear(2, 2)))


def test_sparse_gradient_in_the_eager_path() -> None:
    model = nn.Embedding(4, 2)
    mb.attach(model, EAGER)
    model.sparse = True
    assert "parameter 'weight' got a torch.sparse_coo gradient" in error_text(
        lambda: model(torch.tensor([1])).sum().backward()
    )


def test_optimizer_refuses() -> None:
    adamw = torch.optim.AdamW
    plain, attached, other = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    assert "call megabuf_fx.attach(model) before" in error_text(
        lambda: mb.DistributedOptimizer(plain.parameters(), adamw, lr=0.1)
    )
    mb.attach(attached, EAGER)
    mb.attach(other, EAGER)
    both = [*attached.parameters(), *other.parameters()]
    assert "belong to 2 attached models" in error_text(lambda: mb.DistributedOptimizer(both, adamw, lr=0.1))
    mixed = [*attached.parameters(), *plain.parameters()]
    assert "belongs to no attached model" in error_text(lambda: mb.DistributedOptimizer(mixed, adamw, lr=0.1))
    assert "empty parameter list" in error_text(lambda: mb.DistributedOptimizer([], adamw, lr=0.1))
    assert "LBFGS does not update each parameter by itself" in error_text(
        lambda: mb.DistributedOptimizer(attached.parameters(), torch.optim.LBFGS)
    )
    optimizer = mb.DistributedOptimizer(attached.parameters(), adamw, lr=0.1)
    assert "add_param_group" in error_text(lambda: optimizer.add_param_group({"params": list(other.parameters())}))


# On two ranks: the same error everywhere, and the group works afterwards.


def different_shapes(rank: int) -> str:
    return error_text(lambda: mb.attach(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4 + rank)), EAGER))


def different_names(rank: int) -> str:
    model = nn.Module()
    model.register_parameter("a" if rank == 0 else "b", nn.Parameter(torch.zeros(3)))
    return error_text(lambda: mb.attach(model, EAGER))


def different_dtypes(rank: int) -> str:
    return error_text(lambda: mb.attach(nn.Linear(3, 3, dtype=torch.float32 if rank else torch.bfloat16), EAGER))


def different_configs(rank: int) -> str:
    return error_text(lambda: mb.attach(nn.Linear(3, 3), mb.MegabufConfig(bucket_size=100 + rank)))


def different_counts(rank: int) -> str:
    return error_text(lambda: mb.attach(nn.Linear(3, 3, bias=rank == 0), EAGER))


def refused_on_one_rank(rank: int) -> str:
    return error_text(lambda: mb.attach(nn.Linear(3, 3) if rank == 0 else complex_model(), EAGER))


def wrapped_by_ddp(rank: int) -> str:
    return error_text(lambda: mb.attach(DistributedDataParallel(nn.Linear(3, 3)), EAGER))


def wrapped_by_fsdp2(rank: int) -> str:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return error_text(lambda: mb.attach(model, EAGER))


def dtensor_parameters(rank: int) -> str:
    from torch.distributed.tensor import distribute_tensor

    model = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh))
    return error_text(lambda: mb.attach(model, EAGER))


def two_dimensional_mesh(rank: int) -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    return error_text(lambda: mb.attach(nn.Linear(3, 3), EAGER, process_group=mesh))


def group_without_this_rank(rank: int) -> str:
    """Rank 1 is not a member and is refused; rank 0 trains alone in its group of one."""
    group = dist.new_group([0])
    if rank == 1:
        return error_text(lambda: mb.attach(nn.Linear(3, 3), EAGER, process_group=group))
    buf = mb.attach(nn.Linear(3, 3), EAGER, process_group=group)
    size = buf.dp_size
    buf.detach()
    return f"attached with {size} rank"


def destroyed_group(rank: int) -> str:
    buf = mb.attach(seeded(Mlp), EAGER)
    buf.model(batch(0, 0, rank, 8, 13)).sum().backward()
    dist.destroy_process_group()
    return error_text(buf.finish_grad_sync)


def reduced_twice(rank: int) -> str:
    buf = mb.attach(seeded(Mlp), EAGER)
    call = torch.compile(buf.model, backend="megabuf")
    call(batch(0, 0, rank, 8, 13)).sum().backward()
    text = error_text(lambda: call(batch(0, 1, rank, 8, 13)).sum().backward())
    buf.zero_grad()
    call(batch(0, 1, rank, 8, 13)).sum().backward()
    buf.finish_grad_sync()
    buf.detach()
    return text


def unsynchronized_step(rank: int) -> str:
    buf = mb.attach(seeded(Mlp), EAGER)
    optimizer = mb.DistributedOptimizer(buf.model.parameters(), torch.optim.AdamW, lr=0.1)
    with buf.no_sync():
        buf.model(batch(0, 0, rank, 8, 13)).sum().backward()
    text = error_text(optimizer.step)
    buf.detach()
    return text


ON_EVERY_RANK: dict[str, tuple[Callable[[int], str], list[str]]] = {
    "shapes": (different_shapes, ["ValueError: ranks attach different models or configs: rank 0 has", "1.weight"]),
    "names": (different_names, ["rank 0 has parameter", "name='a'", "rank 1 has parameter", "name='b'"]),
    "dtypes": (different_dtypes, ["torch.bfloat16", "torch.float32"]),
    "configs": (different_configs, ["bucket_size=100", "bucket_size=101"]),
    "counts": (different_counts, ["name='bias'", "rank 1 has nothing"]),
    "one_rank": (refused_on_one_rank, ["ValueError", "parameter 'phase' is complex"]),
    "ddp": (wrapped_by_ddp, ["NotImplementedError: the model is already wrapped by DistributedDataParallel"]),
    "fsdp2": (wrapped_by_fsdp2, ["NotImplementedError: the model is already wrapped by FSDP"]),
    "dtensor": (dtensor_parameters, ["NotImplementedError: parameter 'weight' is a DTensor"]),
    "mesh": (two_dimensional_mesh, ["ValueError: process_group is a 2-dimensional DeviceMesh", "mesh['dp']"]),
    "reduced_twice": (reduced_twice, ["RuntimeError: backward writes bucket 0", "no_sync"]),
    "unsynchronized": (unsynchronized_step, ["RuntimeError: step with gradients that were not reduced"]),
}


@pytest.mark.dist
@pytest.mark.parametrize("name", ON_EVERY_RANK)
def test_error_on_every_rank(ranks: Callable[[int], RankGroup], name: str) -> None:
    function, expected = ON_EVERY_RANK[name]
    for rank, text in enumerate(ranks(2).run(function)):
        for part in expected:
            assert part in text, (rank, text)


@pytest.mark.dist
def test_rank_outside_of_the_group(ranks: Callable[[int], RankGroup]) -> None:
    inside, outside = ranks(2).run(group_without_this_rank)
    assert inside == "attached with 1 rank"
    assert outside.startswith("ValueError: process_group must be a ProcessGroup or DeviceMesh of which this rank")


@pytest.mark.dist
def test_process_group_destroyed_under_an_attached_model(ranks: Callable[[int], RankGroup]) -> None:
    for text in ranks(2).run(destroyed_group):
        assert text.startswith("RuntimeError: the process group of megabuf_grads is gone")
    ranks(2).close()


def data_parallel_axis(rank: int) -> float:
    """Two data-parallel groups of two ranks; each is a sub-group of the world. Differences from DDP over the axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    model = seeded(Mlp)
    plain = DistributedDataParallel(twin(model), process_group=mesh.get_group())
    buf = mb.attach(model, EAGER, process_group=mesh)
    assert buf.dp_size == 2
    assert buf.process_group is mesh.get_group()
    call = torch.compile(model, backend="megabuf")
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for step in range(3):
        for forward, update in ((call, optimizer), (plain, reference)):
            forward(batch(step, 0, rank, 8, 13)).square().mean().backward()
            update.step()
            update.zero_grad()
    result = max_difference(params_of(model), params_of(plain.module))
    buf.detach()
    # A second attach over the same sub-group must not meet what the first left in the store.
    mb.attach(model, EAGER, process_group=mesh).detach()
    return result


@pytest.mark.dist
def test_device_mesh_axis(ranks: Callable[[int], RankGroup]) -> None:
    assert ranks(4).run(data_parallel_axis) == [0.0] * 4


@pytest.fixture
def fake_world() -> Iterator[int]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=3, world_size=64, store=FakeStore())
    yield 64
    dist.destroy_process_group()


def test_fake_process_group_stands_for_any_world(fake_world: int) -> None:
    """Sizes, order and shards of a large world on one machine; no data moves, so values mean nothing."""
    model = seeded(Mlp)
    buf = mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=600, overlap_param_gather=True))
    assert buf.dp_size == fake_world
    assert all(bucket.numel % fake_world == 0 for group in buf.plan.groups for bucket in group.buckets)
    call = torch.compile(model, backend="megabuf")
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    for step in range(2):
        call(batch(step, 0, 0, 8, 13)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    owned = sum(param.numel() for group in optimizer.inner.param_groups for param in group["params"])
    assert owned <= buf.buffers.buffers[0].layout.numel // fake_world
    buf.detach()


def init_sync_makes_ranks_equal(rank: int) -> float:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(rank)  # type: ignore[operator, union-attr]
    buf = mb.attach(model, EAGER)
    total = sum(t.double().sum().item() for t in [*model.parameters(), *model.buffers()])
    buf.detach()
    return total


@pytest.mark.dist
def test_attach_broadcasts_the_first_ranks_model(ranks: Callable[[int], RankGroup]) -> None:
    left, right = ranks(2).run(init_sync_makes_ranks_equal)
    assert left == right


def threads_after_detach(rank: int, is_sharded: bool) -> list[int]:
    """Each communicator has threads of its own."""
    counts = []
    for _ in range(4):
        config = mb.MegabufConfig(inner_compiler="aot_eager", use_distributed_optimizer=is_sharded)
        buf = mb.attach(seeded(Mlp), config)
        buf.detach()
        del buf
        gc.collect()
        counts.append(count_threads())
    return counts


def count_threads() -> int:
    """Threads of this process, those of C++ too."""
    return len(os.listdir("/proc/self/task"))


@pytest.mark.dist
@pytest.mark.parametrize("is_sharded", [True, False])
def test_detach_leaves_no_communicator(ranks: Callable[[int], RankGroup], is_sharded: bool) -> None:
    for first, *later in ranks(2).run(threads_after_detach, is_sharded):
        # Some threads end a moment after their group.
        assert max(later) < first + 3, (first, later)
