"""Checkpoints: resuming equals never having stopped, bit for bit, and plain PyTorch checkpoints go both ways."""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_runs import Run, Zoo, content, differences, is_same
from helpers import RankGroup, fresh_compiler, seeded
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import megabuf_fx as mb

BF16 = torch.bfloat16
RESUMED: list[dict[str, Any]] = [
    {"mode": mode, "dtype": dtype, "optimizer": optimizer}
    for mode in ("sharded", "overlap", "plain", "whole")
    for dtype in (torch.float32, BF16)
    for optimizer in (torch.optim.AdamW, torch.optim.SGD)
]


def directory_for_all(root: str, number: int) -> Path:
    return Path(root) / f"{dist.get_world_size() if dist.is_initialized() else 1}-{number}"


def resume(rank: int, root: str, cases: list[dict[str, Any]]) -> list[str]:
    problems = []
    for number, case in enumerate(cases):
        run = Run(**case)
        run.train(0, 3)
        path = run.save(directory_for_all(root, number), 3, rank_state={"random": torch.tensor(rank)})
        saved = run.snapshot()
        run.train(3, 6)
        expected = run.snapshot()
        run.close()
        if case.get("is_compiled"):
            fresh_compiler()
        resumed = Run(**case, seed=1, lr=0.5)
        # Its own history must not shine through.
        resumed.train(10, 12)
        loaded = resumed.load(path)
        found = differences(resumed.snapshot(), saved)
        resumed.train(3, 6)
        found += [f"after training: {name}" for name in differences(resumed.snapshot(), expected)]
        if loaded.step != 3 or loaded.rank_state["random"].item() != rank:
            found.append(f"loaded {loaded}")
        resumed.close()
        problems += [f"{case}: {problem}" for problem in found]
        if case.get("is_compiled"):
            fresh_compiler()
    return problems


@pytest.mark.dist
@pytest.mark.parametrize("world", [1, 2, 3])
def test_resuming_equals_no_interruption(ranks: Callable[[int], RankGroup], tmp_path: Path, world: int) -> None:
    cases = RESUMED if world == 1 else RESUMED[::3]
    if world == 2:
        cases = [
            *RESUMED[::2],
            *RESUMED[1::6],
            *({"mode": "overlap", "dtype": dtype, "is_compiled": True} for dtype in (torch.float32, BF16)),
        ]
    args = (str(tmp_path), cases)
    for problems in [resume(0, *args)] if world == 1 else ranks(world).run(resume, *args, timeout=120):
        assert not problems, "\n".join(problems)


def plain_checkpoint(rank: int, mode: str, dtype: torch.dtype) -> list[str]:
    """A plain run's two state dicts go into ours, and what follows is what it would have been."""
    plain = Run("alone", dtype=dtype)
    plain.world, plain.rank = 1, 0
    plain.train(0, 3)
    model_state, optimizer_state = plain.model.state_dict(), plain.optimizer.state_dict()
    run = Run(mode, dtype=dtype, seed=1, lr=0.5)
    run.train(10, 11)
    run.model.load_state_dict(model_state)
    run.optimizer.load_state_dict(optimizer_state)
    problems = [
        f"{name} was loaded wrong"
        for name, value in run.model.state_dict().items()
        if not is_same(value, model_state[name])
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.train(3, 6)
    plain.train(3, 6)
    # Sums over ranks come in another order, and a 16-bit plain run has no masters: one rounding a step.
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    for name, value in plain.model.state_dict().items():
        difference = (run.model.state_dict()[name].float() - value.float()).abs()
        if difference.numel() and not difference.max() <= bound:
            problems.append(f"{name} differs by {difference.max()}")
    if [g["betas"] for g in run.optimizer.param_groups] != [g["betas"] for g in plain.optimizer.param_groups]:
        problems.append("betas differ")
    run.close()
    return [f"{mode}, {dtype}: {problem}" for problem in problems]


def plain_checkpoints(rank: int) -> list[str]:
    return [
        problem
        for mode in ("sharded", "whole", "overlap")
        for dtype in (torch.float32, BF16)
        for problem in plain_checkpoint(rank, mode, dtype)
    ]


@pytest.mark.dist
@pytest.mark.parametrize("world", [1, 2])
def test_plain_state_dicts_load_into_ours(ranks: Callable[[int], RankGroup], world: int) -> None:
    for problems in [plain_checkpoints(0)] if world == 1 else ranks(world).run(plain_checkpoints):
        assert not problems, "\n".join(problems)


@pytest.mark.parametrize("target", ["sharded", "whole", "plain", "alone"])
@pytest.mark.parametrize("source", ["sharded", "whole", "plain", "alone"])
@pytest.mark.parametrize("dtypes", [(torch.float32, BF16), (BF16, torch.float32), (BF16, BF16)], ids=str)
def test_any_form_loads_into_any_other(
    source: str, target: str, dtypes: tuple[torch.dtype, torch.dtype], tmp_path: Path
) -> None:
    run = Run(source, dtype=dtypes[0])
    run.train(0, 3)
    saved = content(run.save(tmp_path, 3))
    other = Run(target, dtype=dtypes[1], seed=1)
    other.train(10, 12)
    other.load(tmp_path / "step-00000003")
    fine = {n.removeprefix("optimizer.master."): v for n, v in saved.items() if n.startswith("optimizer.master.")}
    fine["again.weight"] = fine.get("mid.weight", saved["model.again.weight"])
    for name, value in other.model.state_dict().items():
        best = fine.get(name) if dtypes[1] == torch.float32 else None
        expected = (saved[f"model.{name}"] if best is None else best).to(value.dtype).view(value.shape)
        assert torch.equal(value, expected), name
    again = content(other.save(tmp_path, 4))
    for name in saved.keys() & again.keys() - {n for n in saved if n.startswith(("model.", "optimizer.master."))}:
        assert torch.equal(again[name], saved[name].to(again[name].dtype)), name
    if target in ("sharded", "whole") and dtypes[1] == BF16:
        for name in (n for n in again if n.startswith("optimizer.master.")):
            model_value = saved[name.replace("optimizer.master.", "model.")].flatten().float()
            assert torch.equal(again[name], saved.get(name, model_value)), name
    other.train(3, 5)
    for closed in (run, other):
        closed.close()


def test_names_are_plain_and_nothing_is_padded(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = Zoo()
        model.mid.compile(backend="eager")
        model.last = torch.compile(model.last, backend="eager")  # type: ignore[assignment]
        return model

    run = Run("sharded", build=build)
    run.train(0, 2)
    path = run.save(tmp_path, 2, extra={"rows": 24})
    found = content(path)
    plain = seeded(Zoo)
    assert {n.removeprefix("model.") for n in found if n.startswith("model.")} == plain.state_dict().keys()
    used = {n: p for n, p in plain.named_parameters() if p.requires_grad and p.numel() and n != "idle"}
    for key in ("exp_avg", "exp_avg_sq"):
        shapes = {n.removeprefix(f"optimizer.{key}."): v.shape for n, v in found.items() if f"optimizer.{key}." in n}
        assert shapes == {name: (param.numel(),) for name, param in used.items()}
    assert found["optimizer.step.last.weight"] == 2
    assert found["optimizer.step.side.weight"] == 1
    other = Run("alone", seed=1)
    assert other.load(path).extra == {"rows": 24}
    assert torch.equal(other.optimizer.state[other.model.last.bias]["exp_avg"], found["optimizer.exp_avg.last.bias"])
    run.close()
    back = Run("sharded", build=build, seed=1)
    back.load(path)
    assert torch.equal(back.model.last.weight, other.model.last.weight)
    back.close()


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("mode", ["sharded", "whole"])
def test_state_dict_behaves_as_in_torch(mode: str, dtype: torch.dtype) -> None:
    """It goes through ``torch.save`` without pickle, and later training leaves what was loaded from it alone."""
    run = Run(mode, dtype=dtype)
    run.train(0, 3)
    file = io.BytesIO()
    torch.save([run.model.state_dict(), run.optimizer.state_dict()], file)
    saved = run.snapshot()
    file.seek(0)
    model_state, optimizer_state = torch.load(file, weights_only=True)
    other = Run(mode, dtype=dtype, seed=1)
    other.train(10, 11)
    other.model.load_state_dict(model_state)
    other.optimizer.load_state_dict(optimizer_state)
    assert not differences(other.snapshot(), saved)
    other.train(3, 5)
    run.train(3, 5)
    assert not differences(other.snapshot(), run.snapshot())
    run.optimizer.load_state_dict(optimizer_state)
    run.model.load_state_dict(model_state)
    run.optimizer.reload_model_params()
    for closed in (run, other):
        closed.close()


def test_unfit_states_are_refused_and_change_nothing() -> None:
    run = Run("sharded")
    run.train(0, 2)
    before = run.snapshot()
    good = run.optimizer.state_dict()
    wide = torch.optim.AdamW(nn.Linear(3, 9).parameters())
    with pytest.raises(ValueError, match="saved param groups do not fit"):
        run.optimizer.load_state_dict(wide.state_dict())
    plain = Run("alone")
    plain.train(0, 1)
    other = plain.optimizer.state_dict()
    other["state"][1]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"saved 'exp_avg' of '[\w.]+' has shape \(3,\)"):
        run.optimizer.load_state_dict(other)
    lacking = {**good, "state": {**good["state"], "last.weight": {**good["state"]["last.weight"]}}}
    shard = lacking["state"]["last.weight"]["exp_avg"]
    lacking["state"]["last.weight"]["exp_avg"] = type(shard)(shard.numel, shard.dtype, [])
    with pytest.raises(ValueError, match=r"the state of 'last.weight' lacks elements .* loads on the rank it came"):
        run.optimizer.load_state_dict(lacking)
    lacking["state"]["last.weight"]["exp_avg"] = type(shard)(shard.numel + 1, shard.dtype, shard.pieces)
    with pytest.raises(ValueError, match=r"saved 'exp_avg' of 'last.weight' has 22 elements, here 21"):
        run.optimizer.load_state_dict(lacking)
    with pytest.raises(ValueError, match="a parameter 'gone' that the model does not have"):
        run.optimizer.load_state_dict({**good, "state": {"gone": {}}})
    assert not differences(run.snapshot(), before)
    run.train(2, 4)
    run.close()


def forgotten_reloads(rank: int) -> list[str]:
    """A warning where the masters were not told of new weights, and none anywhere else."""
    problems = []
    for mode in ("sharded", "overlap", "instances", "whole"):
        if mode == "instances" and not dist.is_initialized():
            continue
        for dtype in (torch.float32, BF16):
            run = Run(mode, dtype=dtype)
            weights = seeded(Zoo, 5).to(dtype).state_dict()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run.train(0, 2)
                run.model.eval()
                with torch.no_grad():
                    run.loss(7)
                run.model.train()
                run.train(2, 3)
                run.model.load_state_dict(weights)
                run.optimizer.reload_model_params()
                run.train(3, 5)
                run.optimizer.load_state_dict(run.optimizer.state_dict())
                run.model.state_dict()
                run.train(5, 7)
            problems += [f"{mode}, {dtype}: unwanted {w.message}" for w in caught if "masters" in str(w.message)]
            run.model.load_state_dict(weights)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run.train(7, 10)
            # fp32 parameters in a buffer are their own masters; without sharding, masters are copies.
            expected = 0 if dtype == torch.float32 and mode != "whole" else 1
            count = sum("call opt.reload_model_params() after writing weights" in str(w.message) for w in caught)
            if count != expected:
                problems.append(f"{mode}, {dtype}: {count} warnings, expected {expected}")
            run.close()
    return problems


@pytest.mark.dist
@pytest.mark.parametrize("world", [1, 2])
def test_written_weights_are_warned_of(ranks: Callable[[int], RankGroup], world: int) -> None:
    for problems in [forgotten_reloads(0)] if world == 1 else ranks(world).run(forgotten_reloads):
        assert not problems, "\n".join(problems)


def fresh_state_dicts(rank: int) -> list[str]:
    """With the gather overlap most parameters are stale after a step; state dicts and checkpoints are not."""
    overlap, sharded = Run("overlap"), Run("sharded")
    for run in (overlap, sharded):
        run.train(0, 2)
    found, expected = overlap.model.state_dict(), sharded.model.state_dict()
    problems = [name for name in expected if not torch.equal(found[name], expected[name])]
    for run in (overlap, sharded):
        run.close()
    return problems


@pytest.mark.dist
def test_state_dicts_are_never_stale(ranks: Callable[[int], RankGroup]) -> None:
    assert ranks(2).run(fresh_state_dicts) == [[], []]


class SlowWriter:
    """Holds back writing until training has gone on."""

    def __init__(self, is_failing: bool) -> None:
        self.release = threading.Event()
        self._write = FileSystemWriter.write_data
        self._is_failing = is_failing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self.release.wait(30)
        if self._is_failing:
            raise OSError(28, "No space left on device")
        return self._write(*args, **kwargs)


def save_in_background(rank: int, root: str) -> list[str]:
    problems = []
    patch = pytest.MonkeyPatch()
    for number, (mode, dtype) in enumerate(
        [("sharded", BF16), ("overlap", torch.float32), ("plain", torch.float32), ("whole", BF16)]
    ):
        run = Run(mode, dtype=dtype)
        run.train(0, 2)
        slow = SlowWriter(is_failing=False)
        patch.setattr(FileSystemWriter, "write_data", lambda *a, slow=slow, **k: slow(*a, **k))
        pending = mb.async_save_checkpoint(Path(root) / str(number), 2, run.model, run.optimizer)
        before = run.snapshot()
        run.train(2, 4)
        if mb.latest_checkpoint(Path(root) / str(number)) is not None:
            problems.append(f"{mode}: there before it was written")
        slow.release.set()
        path = pending.result()
        after = run.snapshot()
        run.load(path)
        problems += [f"{mode}: {name}" for name in differences(run.snapshot(), before)]
        run.train(2, 4)
        problems += [f"{mode}, trained: {name}" for name in differences(run.snapshot(), after)]
        slow = SlowWriter(is_failing=rank == 0)
        slow.release.set()
        patch.setattr(FileSystemWriter, "write_data", lambda *a, slow=slow, **k: slow(*a, **k))
        pending = mb.async_save_checkpoint(Path(root) / str(number), 4, run.model, run.optimizer)
        run.train(4, 5)
        try:
            pending.result()
        except mb.CheckpointError as error:
            if "No space left on device" not in str(error):
                problems.append(str(error))
        else:
            problems.append(f"{mode}: no error")
        if dist.is_initialized():
            # The first rank clears up what was written.
            dist.barrier()
        if mb.latest_checkpoint(Path(root) / str(number)) != path or len(list(Path(root, str(number)).iterdir())) != 1:
            problems.append(f"{mode}: found {sorted(Path(root, str(number)).iterdir())}")
        patch.undo()
        run.train(5, 6)
        run.close()
    return problems


@pytest.mark.dist
@pytest.mark.parametrize("world", [1, 2])
def test_a_save_in_the_background_has_the_state_of_its_call(
    ranks: Callable[[int], RankGroup], tmp_path: Path, world: int
) -> None:
    args = (str(tmp_path),)
    for problems in [save_in_background(0, *args)] if world == 1 else ranks(world).run(save_in_background, *args):
        assert not problems, "\n".join(problems)
