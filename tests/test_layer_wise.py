"""Layer-wise optimizers: Muon on several ranks is Muon on one process, with shards and without."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import RankGroup, batch, error_text, fresh_compiler, seeded
from torch import Tensor, nn

import megabuf_fx as mb
from megabuf_fx.runtime.shared_storage import SharedStorageError

EAGER: dict[str, Any] = {"inner_compiler": "aot_eager"}

MODES: dict[str, dict[str, Any]] = {
    "layout": {"overlap_param_gather": True},
    "layout_sync": {},
    "legacy": {"use_distributed_optimizer": False, "overlap_param_gather": True},
    "legacy_sync": {"use_distributed_optimizer": False},
    "legacy_dense": {"use_distributed_optimizer": False, "dense_layout": True, "overlap_param_gather": True},
}


class Net(nn.Sequential):
    """An embedding and vectors, which AdamW updates, and four matrices for Muon."""

    def __init__(self) -> None:
        super().__init__(
            nn.Embedding(16, 32),
            nn.Linear(32, 64),
            nn.ReLU(),
            nn.Linear(64, 32),
            nn.LayerNorm(32),
            nn.Linear(32, 48, bias=False),
            nn.Linear(48, 16),
        )


def loss_of(call: Any, step: int, rank: int) -> Tensor:
    tokens = batch(step, 0, rank, 8).mul(50).long().remainder(16)
    loss: Tensor = call(tokens).float().square().mean()
    return loss


def is_matrix(param: Tensor, model: nn.Module) -> bool:
    return param.dim() == 2 and param is not next(iter(model.parameters()))


class Run:
    def __init__(self, mode: str, *, rank: int, dtype: torch.dtype, is_compiled: bool, **config: Any) -> None:
        self.rank = rank
        self.model: Any = seeded(Net).to(dtype)
        options = {**EAGER, "layer_wise_optimizer": True, "bucket_size": 3000, "grad_reduce_in_fp32": True}
        self.buf = mb.attach(self.model, mb.MegabufConfig(**{**options, **MODES[mode], **config}))
        matrices = self.buf.layer_wise_params()
        assert {id(p) for p in matrices} == {id(p) for p in self.model.parameters() if is_matrix(p, self.model)}
        others = [param for param in self.model.parameters() if not is_matrix(param, self.model)]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "optimizer_class": torch.optim.Muon, "lr": 0.02, "weight_decay": 0.1},
            {"params": others},
        ]
        self.optimizer = mb.DistributedOptimizer(groups, torch.optim.AdamW, lr=0.01)
        self.call: Any = torch.compile(self.model, backend="megabuf") if is_compiled else self.model

    def train(self, steps: range, *, max_norm: float = 1e9) -> list[float]:
        norms = []
        for step in steps:
            loss_of(self.call, step, self.rank).backward()  # type: ignore[no-untyped-call]
            norms.append(float(self.optimizer.clip_grad_norm_(max_norm)))
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.buf.sync_params()
        return norms

    def values(self) -> list[Tensor]:
        return [param.detach().float().clone() for param in self.model.parameters()]

    def close(self) -> None:
        self.buf.detach()
        fresh_compiler()


def train_plain(ranks: list[int], dtype: torch.dtype, steps: int) -> tuple[list[Tensor], list[float]]:
    """One process, the data of ``ranks``, torch's own optimizers over fp32 masters; parameters and gradient norms."""
    model = seeded(Net).to(dtype)
    params = list(model.parameters())
    masters = [nn.Parameter(param.detach().float().clone()) for param in params]
    chosen = [is_matrix(param, model) for param in params]
    optimizers = [
        torch.optim.Muon([m for m, is_chosen in zip(masters, chosen) if is_chosen], lr=0.02, weight_decay=0.1),
        torch.optim.AdamW([m for m, is_chosen in zip(masters, chosen) if not is_chosen], lr=0.01),
    ]
    norms = []
    for step in range(steps):
        for master in masters:
            master.grad = torch.zeros_like(master)
        for rank in ranks:
            model.zero_grad()
            loss_of(model, step, rank).backward()  # type: ignore[no-untyped-call]
            for master, param in zip(masters, params):
                assert master.grad is not None
                assert param.grad is not None
                master.grad += param.grad.float() / len(ranks)
        norms.append(float(nn.utils.get_total_norm([m.grad for m in masters if m.grad is not None])))
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, params):
                param.copy_(master)
    return [param.detach().float() for param in params], norms


def compare(rank: int, world: int, modes: list[str]) -> list[str]:
    """Bit for bit. torch's Muon orthogonalizes in bf16, so the last bit of a gradient moves an update by far more:
    ranks must be added in one order. Two addends have only one, a reduce-scatter adds in that of the ranks; an
    all-reduce of four does not, so there all ranks have the same data."""
    problems = []
    for dtype, mode in itertools.product((torch.float32, torch.bfloat16), modes):
        is_alike = world > 2 and mode.startswith("legacy")
        expected, norms = train_plain([0] * world if is_alike else list(range(world)), dtype, 4)
        for is_compiled in (True, False):
            run = Run(mode, rank=0 if is_alike else rank, dtype=dtype, is_compiled=is_compiled)
            found = run.train(range(4))
            of_norms = max(abs(a - b) for a, b in zip(found, norms))
            if not all(map(torch.equal, run.values(), expected)) or of_norms > 1e-5:
                difference = max(float((a - b).abs().max()) for a, b in zip(run.values(), expected))
                problems.append(f"{dtype} {mode} compiled {is_compiled}: {difference:.1e}, norms {of_norms:.1e}")
            run.close()
    return problems


@pytest.mark.dist
@pytest.mark.parametrize("world", [1, 2, 4])
def test_muon_is_that_of_one_process(ranks: Callable[[int], RankGroup], world: int) -> None:
    modes = list(MODES) if world == 2 else ["layout", "legacy"]
    assert ranks(world).run(compare, world, modes, timeout=150) == [[]] * world


def count(rank: int) -> list[list[int]]:
    """Elements of masters on this rank, by mode."""
    found = []
    for mode in ("layout", "legacy"):
        run = Run(mode, rank=rank, dtype=torch.float32, is_compiled=False)
        found.append([sum(r.master.numel() for r in run.optimizer.runs)])
        shapes = [tuple(r.master.shape) for r in run.optimizer.runs if r.master.dim() == 2]
        assert all(shape in [tuple(p.shape) for p in run.model.parameters()] for shape in shapes)
        run.close()
    return found


@pytest.mark.dist
def test_every_parameter_is_updated_once(ranks: Callable[[int], RankGroup]) -> None:
    answers = ranks(4).run(count)
    total = sum(param.numel() for param in Net().parameters())
    for index in range(2):
        owned = [answer[index][0] for answer in answers]
        assert sum(owned) == total
        assert max(owned) < 0.6 * total


def save_and_resume(rank: int, root: str) -> list[str]:
    """Through a checkpoint into every mode; with shards and without the state is the same."""
    problems = []
    for saved in ("layout", "legacy"):
        run = Run(saved, rank=rank, dtype=torch.bfloat16, is_compiled=False)
        run.train(range(3))
        path = mb.save_checkpoint(Path(root) / saved, 3, run.model, run.optimizer)
        run.train(range(3, 5))
        expected = run.values()
        run.close()
        for loaded in ("layout", "legacy", "layout_sync"):
            run = Run(loaded, rank=rank, dtype=torch.bfloat16, is_compiled=False, bucket_size=500)
            mb.load_checkpoint(path, run.model, run.optimizer)
            run.train(range(3, 5))
            if not all(map(torch.equal, run.values(), expected)):
                problems.append(f"{saved} into {loaded}")
            run.close()
    return problems


@pytest.mark.dist
def test_checkpoints(ranks: Callable[[int], RankGroup], tmp_path: Path) -> None:
    assert ranks(2).run(save_and_resume, str(tmp_path), timeout=100) == [[], []]


def test_clipping() -> None:
    """The norm of all, matrices and others, scales them alike."""
    runs = [Run("layout", rank=0, dtype=torch.float32, is_compiled=False) for _ in range(2)]
    for run in runs:
        loss_of(run.call, 0, 0).backward()  # type: ignore[no-untyped-call]
    norm = float(runs[0].optimizer.clip_grad_norm_(0.01))
    assert norm > 0.02
    for mine, other in zip(runs[0].optimizer.runs, runs[1].optimizer.runs):
        torch.testing.assert_close(mine.grad, other.grad * (0.01 / norm), rtol=1e-5, atol=0)
    for run in runs:
        run.close()


def test_what_is_managed() -> None:
    model: Any = Net()
    model[1].weight.is_managed_by_layer_wise_optimizer = False
    model[6].weight.is_embedding_or_output_parameter = True
    buf = mb.attach(model, mb.MegabufConfig(layer_wise_optimizer=True, **EAGER))
    assert [id(param) for param in buf.layer_wise_params()] == [id(model[3].weight), id(model[5].weight)]
    buf.detach()
    buf = mb.attach(Net(), mb.MegabufConfig(**EAGER))
    assert buf.layer_wise_params() == []
    buf.detach()


def test_what_shards_cut_is_refused_by_name() -> None:
    model: Any = Net()
    buf = mb.attach(model, mb.MegabufConfig(**EAGER))
    matrices: Any = [param for param in model.parameters() if is_matrix(param, model)]
    message = error_text(lambda: mb.DistributedOptimizer(matrices, torch.optim.Muon))
    assert "Muon looks at whole parameters, but shards cut '1.weight'; attach with layer_wise_optimizer=True" in message
    buf.detach()
    buf = mb.attach(model, mb.MegabufConfig(layer_wise_optimizer=True, **EAGER))
    message = error_text(lambda: mb.DistributedOptimizer([model[0].weight], torch.optim.Adafactor))
    assert "Adafactor looks at whole parameters, but shards cut '0.weight'" in message
    assert "LBFGS does not update" in error_text(lambda: mb.DistributedOptimizer(matrices, torch.optim.LBFGS))
    buf.detach()


def test_gradients_end_with_the_step_where_they_share_storage() -> None:
    run = Run("legacy_sync", rank=0, dtype=torch.float32, is_compiled=False)
    loss_of(run.call, 0, 0).backward()  # type: ignore[no-untyped-call]
    run.optimizer.step()
    with pytest.raises(SharedStorageError, match=r"gradients are scaled, but bucket 0 .* \(I2\)"):
        run.buf.scale_gradients(0.5)
    run.optimizer.zero_grad()
    run.train(range(1, 2))
    run.close()


def test_groups_keep_their_hyper_parameters() -> None:
    """A scheduler reaches both optimizers; each has its own defaults."""
    run = Run("layout", rank=0, dtype=torch.float32, is_compiled=False)
    first, second = run.optimizer.param_groups
    assert (first["lr"], first["momentum"], first["ns_steps"]) == (0.02, 0.95, 5)
    assert (second["lr"], second["betas"]) == (0.01, (0.9, 0.999))
    assert "optimizer_class" not in first
    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.5**step)
    run.train(range(1))
    schedule.step()
    assert [group["lr"] for group in run.optimizer.inner.param_groups] == [0.02, 0.01]
    run.train(range(1, 2))
    assert [group["lr"] for group in run.optimizer.inner.param_groups] == [0.01, 0.005]
    run.close()
