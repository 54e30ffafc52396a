"""Several models of one job, each trained over ranks of its own: a checkpoint belongs to the group, not to the job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import Mlp, RankGroup, batch, max_difference, params_of, seeded
from torch import Tensor

import megabuf_fx as mb

pytestmark = pytest.mark.dist


class Run:
    """Ranks ``[0, 1]`` and ``[2, 3]`` train a model each, on data of their own."""

    def __init__(self, rank: int, seed: int) -> None:
        self.number, self.place = divmod(rank, 2)
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        self.model = seeded(Mlp, seed + self.number)
        config = mb.MegabufConfig(bucket_size=300)
        self.buf = mb.attach(self.model, config, process_group=groups[self.number])
        self.optimizer = mb.DistributedOptimizer(self.model.parameters(), torch.optim.AdamW, lr=1e-2)

    def train(self, start: int, end: int, data: int) -> None:
        for step in range(start, end):
            self.model(batch(step, data, self.place, 8, 13)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def save_and_go_on(rank: int, root: str, is_async: bool) -> dict[str, Tensor]:
    run = Run(rank, 0)
    run.train(0, 3, run.number)
    save: Any = mb.async_save_checkpoint if is_async else mb.save_checkpoint
    pending = save(
        f"{root}/{run.number}", 3, run.model, run.optimizer, rank_state={"place": torch.tensor([10 * run.number, rank])}
    )
    if is_async:
        pending.result()
    run.train(3, 5, run.number)
    run.buf.detach()
    return params_of(run.model)


def load_that_of_the_others(rank: int, root: str) -> tuple[dict[str, Tensor], list[int]]:
    """Ranks ``[2, 3]`` go on with what ``[0, 1]`` saved, and the other way round."""
    run = Run(rank, 7)
    other = 1 - run.number
    path = mb.latest_checkpoint(f"{root}/{other}")
    assert path is not None
    loaded = mb.load_checkpoint(path, run.model, run.optimizer)
    run.train(3, 5, other)
    run.buf.detach()
    return params_of(run.model), loaded.rank_state["place"].tolist()


@pytest.mark.parametrize("is_async", [False, True])
def test_groups_of_one_job_save_and_load_apart(
    ranks: Callable[[int], RankGroup], tmp_path: Path, is_async: bool
) -> None:
    expected = ranks(4).run(save_and_go_on, str(tmp_path), is_async)
    found = ranks(4).run(load_that_of_the_others, str(tmp_path))
    for rank, (params, place) in enumerate(found):
        counterpart = (rank + 2) % 4
        assert place == [10 * (counterpart // 2), counterpart]
        assert max_difference(params, expected[counterpart]) == 0.0
