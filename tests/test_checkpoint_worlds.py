"""Checkpoints load at another world size, bucket size and sharding; experts and instances."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from checkpoint_runs import Run, content, differences
from helpers import RankGroup, batch, error_text, max_difference, params_of, seeded
from test_instances import Experts
from torch import Tensor

import megabuf_fx as mb

pytestmark = pytest.mark.dist

BF16 = torch.bfloat16
LANES: dict[str, list[tuple[str, torch.dtype, dict[str, Any]]]] = {
    # What each stage of the chain trains with, fp32; the worlds are 2, 3, 1, 4.
    "sharded": [("sharded", torch.float32, {"bucket_size": size}) for size in (40, 100, None, 60)],
    "mixed": [(mode, torch.float32, {}) for mode in ("overlap", "plain", "alone", "instances")],
    "whole": [(mode, torch.float32, {}) for mode in ("whole", "overlap", "sharded", "whole")],
}
WORLDS = (2, 3, 1, 4)
SAME = {"sharded": ["sharded", "overlap", "sharded"], "mixed": ["overlap", "whole", "instances"]}
SAME_STAGES = (0, 2, 3)
DTYPES = ("float32", "bfloat16")
STEPS = 2
BOUND = 1e-5
"""Against the uninterrupted run on one process; sums over ranks come in another order."""


def run_stage(rank: int, root: str, stage: int) -> list[str]:
    """Load what the stage before left, train, save."""
    problems = []
    for lane, modes in LANES.items():
        for optimizer in (torch.optim.AdamW, torch.optim.SGD):
            mode, dtype, config = modes[stage]
            directory = Path(root) / lane / optimizer.__name__
            run = Run(mode, dtype=dtype, optimizer=optimizer, seed=stage, **(config if mode != "alone" else {}))
            if stage:
                loaded = run.load(directory / f"step-{STEPS * stage:08d}")
                if loaded.step != STEPS * stage or loaded.rank_state:
                    problems.append(f"loaded {loaded}")
            run.train(STEPS * stage, STEPS * (stage + 1))
            run.save(directory, STEPS * (stage + 1), rank_state={"rank": torch.tensor(rank)})
            run.close()
    return problems


def save_as_it_is(rank: int, root: str, stage: int, dtype_name: str) -> None:
    """Load and save again, without training in between: bit for bit the same content, in whatever form."""
    dtype = getattr(torch, dtype_name)
    for lane, modes in SAME.items():
        run = Run(modes[stage], dtype=dtype, seed=stage)
        directory = Path(root) / dtype_name / lane
        if stage:
            run.load(directory / f"step-{stage:08d}")
        else:
            run.train(0, 3)
        run.save(directory, stage + 1)
        run.close()


class ManyExperts(Experts):
    """Also a frozen expert, a buffer of an expert's, and a second name for an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.old = torch.nn.Linear(8, 8)
        self.old.requires_grad_(False)
        self.other = torch.nn.ModuleList([self.experts[1]])
        self.register_buffer("load", torch.zeros(2))


class ExpertRun:
    """Ranks of one parity share their experts."""

    def __init__(self, dtype: torch.dtype, seed: int, **config: Any) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        groups = [dist.new_group(list(range(parity, world, 2))) for parity in (0, 1)]
        self.parity = rank % 2
        self.model = cast("Any", seeded(ManyExperts, seed).to(dtype))
        for param in (*self.model.experts.parameters(), self.model.old.weight, self.model.load):
            param.allreduce = False
            with torch.no_grad():
                param.add_(self.parity)
        config = {"bucket_size": 60, **config}
        self.buf = mb.attach(self.model, mb.MegabufConfig(**config), expert_process_group=groups[self.parity])
        self.optimizer = mb.DistributedOptimizer(self.model.parameters(), torch.optim.AdamW, lr=1e-2)
        self.dtype = dtype

    def train(self, start: int, end: int) -> None:
        """All ranks of one parity see the same rows, so that the number of ranks does not matter."""
        for step in range(start, end):
            x = batch(step, 0, self.parity, 8, 6).to(self.dtype)
            self.model(x, 0 if self.parity else step % 2).float().square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def save_experts(rank: int, root: str, config: dict[str, Any]) -> list[dict[str, Tensor]]:
    found = []
    for dtype in (torch.float32, BF16):
        run = ExpertRun(dtype, 0, **config)
        run.train(0, 4)
        mb.save_checkpoint(Path(root) / str(dtype), 4, run.model, run.optimizer)
        found.append({n: v.clone() for n, v in run.model.state_dict().items()})
        run.train(4, 6)
        found.append(params_of(run.model))
        run.buf.detach()
    return found


def load_experts(rank: int, root: str, config: dict[str, Any]) -> list[dict[str, Tensor]]:
    found = []
    for dtype in (torch.float32, BF16):
        run = ExpertRun(dtype, 3, **config)
        mb.load_checkpoint(Path(root) / str(dtype) / "step-00000004", run.model, run.optimizer)
        found.append({n: v.clone() for n, v in run.model.state_dict().items()})
        run.train(4, 6)
        found.append(params_of(run.model))
        run.buf.detach()
    return found


def load_without_experts(rank: int, root: str) -> list[str]:
    """Ranks that all hold the same experts, and all of them different ones, are refused everywhere."""
    texts = []
    path = Path(root) / str(torch.float32) / "step-00000004"
    model = cast("Any", seeded(ManyExperts))
    model.old.weight.allreduce = model.load.allreduce = False
    before = params_of(model)
    texts.append(error_text(lambda: mb.load_checkpoint(path, model)))
    same = [dist.new_group([0, 1])]
    buf = mb.attach(model, expert_process_group=same[0])
    texts.append(error_text(lambda: mb.load_checkpoint(path, model)))
    if max_difference(params_of(model), before) != 0:
        texts.append("the model changed")
    buf.detach()
    return texts


EXPERTS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "instances": {"num_distributed_optimizer_instances": 2},
    "whole": {"use_distributed_optimizer": False},
}


def stage_of_all(rank: int, root: str, stage: int) -> tuple[list[str], dict[str, list[dict[str, Tensor]]]]:
    """All that one world has to do; the experts are saved by four ranks."""
    problems = run_stage(rank, root, stage)
    if stage in SAME_STAGES:
        for dtype in DTYPES:
            save_as_it_is(rank, root, SAME_STAGES.index(stage), dtype)
    saved = {}
    if WORLDS[stage] == 4:
        saved = {name: save_experts(rank, f"{root}/{name}", config) for name, config in EXPERTS.items()}
    return problems, saved


def load_all_experts(rank: int, root: str) -> tuple[dict[str, list[dict[str, Tensor]]], list[str]]:
    """Two ranks hold each set of experts once; there are no two instances of one."""
    loaded = {
        name: load_experts(rank, f"{root}/{name}", config if name == "whole" else {})
        for name, config in EXPERTS.items()
    }
    return loaded, load_without_experts(rank, f"{root}/sharded")


class Chain(NamedTuple):
    """What the processes of all worlds have done."""

    root: Path
    problems: list[str]
    saved: list[dict[str, list[dict[str, Tensor]]]]
    loaded: list[dict[str, list[dict[str, Tensor]]]]
    refused: list[list[str]]


@pytest.fixture(scope="module")
def chain(ranks: Callable[[int], RankGroup], tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """Every world is started once."""
    root = tmp_path_factory.mktemp("chain")
    problems: list[str] = []
    answers: list[Any] = []
    for stage, world in enumerate(WORLDS):
        args = (str(root), stage)
        answers = [stage_of_all(0, *args)] if world == 1 else ranks(world).run(stage_of_all, *args, timeout=120)
        problems += [problem for found, _ in answers for problem in found]
    loaded = ranks(2).run(load_all_experts, str(root))
    ranks(2).close()
    return Chain(root, problems, [a[1] for a in answers], [a[0] for a in loaded], [a[1] for a in loaded])


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_other_worlds_go_on_as_one_process_would(
    chain: Chain, tmp_path: Path, optimizer: type[torch.optim.Optimizer]
) -> None:
    assert not chain.problems, "\n".join(chain.problems)
    reference = Run("alone", optimizer=optimizer)
    for stage, world in enumerate(WORLDS):
        reference.train(STEPS * stage, STEPS * (stage + 1))
        expected = comparable(content(reference.save(tmp_path, STEPS * (stage + 1))))
        for lane in LANES:
            directory = chain.root / lane / optimizer.__name__ / f"step-{STEPS * (stage + 1):08d}"
            difference = max_difference(comparable(content(directory)), expected)
            assert difference <= BOUND, (lane, world, difference)


def comparable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    # Parameters without elements have no state in our optimizer.
    is_skipped = re.compile(r"rank\..*|optimizer\..*\.empty")
    return {name: value.double() for name, value in tensors.items() if not is_skipped.fullmatch(name)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_elsewhere_changes_no_bit(chain: Chain, dtype: str) -> None:
    for lane in SAME:
        directory = chain.root / dtype / lane
        first = content(directory / "step-00000001")
        for stage in (2, 3):
            assert not differences(content(directory / f"step-{stage:08d}"), first)


@pytest.mark.parametrize("mode", EXPERTS)
def test_experts_at_another_world(chain: Chain, mode: str) -> None:
    names = content(chain.root / mode / "torch.bfloat16" / "step-00000004")
    for name in ("experts.0.weight", "experts.1.bias", "old.weight", "load", "other.0.weight"):
        for number in (0, 1):
            assert torch.equal(names[f"model.{name}@expert{number}"], chain.saved[number][mode][2][name])
    for key in ("exp_avg", "step", "master"):
        assert f"optimizer.{key}.experts.0.weight@expert0" in names
    assert "optimizer.exp_avg.experts.0.weight@expert1" in names
    assert "optimizer.exp_avg.experts.1.weight@expert1" not in names, "expert 1 of odd ranks got no tokens"
    for rank in (0, 1):
        # Loaded, and trained after that: four ranks see the same rows as two.
        for index, bound in ((0, 0.0), (1, 1e-5), (2, 0.0), (3, 1e-2)):
            difference = max_difference(chain.loaded[rank][mode][index], chain.saved[rank][mode][index])
            assert difference <= bound, (rank, index)


def test_lost_experts_are_refused(chain: Chain) -> None:
    for absent, uncovered in chain.refused:
        assert "is of another model: it has no '" in absent
        assert "is of another model: this one has no '" in uncovered
        assert "@expert1'" in uncovered
