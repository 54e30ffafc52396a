"""Checkpoints that cannot be written, are damaged, or are not what they should be: one clear error, nothing changed."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_runs import Run, Zoo, differences
from helpers import Mlp, RankGroup, error_text, seeded
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import megabuf_fx as mb
from megabuf_fx import checkpoint_files

CORRUPTIONS = 200


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[tuple[Path, Any, Any]]:
    """A saved checkpoint of a small model that was trained for a step, model and optimizer."""
    model = seeded(Small).to(torch.bfloat16)
    buf = mb.attach(model)
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    take_step(model, optimizer)
    path = mb.save_checkpoint(tmp_path / "runs", 1, model, optimizer, rank_state={"random": torch.get_rng_state()})
    yield path, model, optimizer
    buf.detach()


def take_step(model: Any, optimizer: Any) -> None:
    model.fc(torch.ones(1, 3, dtype=torch.bfloat16)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            state[f"{key} {name}"] = torch.as_tensor(getattr(value, "pieces", [[value]])[0][-1]).clone()
    return state


def test_no_damage_goes_unnoticed(small: tuple[Path, Any, Any], tmp_path: Path) -> None:
    """Byte flips and truncations of all files: an error that names the checkpoint, and not one changed value."""
    path, model, optimizer = small
    take_step(model, optimizer)
    before = state_of(model, optimizer)
    names = sorted(file.name for file in path.iterdir())
    assert len(names) == 3
    generator = random.Random(0)
    for number in range(CORRUPTIONS):
        broken = tmp_path / "step-00000007"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(path, broken)
        file = broken / names[number % 3]
        data = bytearray(file.read_bytes())
        if number % 4 == 3:
            file.write_bytes(data[: generator.randrange(len(data))])
        else:
            data[generator.randrange(len(data))] ^= generator.randrange(1, 256)
            file.write_bytes(data)
        with pytest.raises(mb.CheckpointError, match="step-00000007"):
            mb.load_checkpoint(broken, model, optimizer)
    assert not differences(state_of(model, optimizer), before)
    take_step(model, optimizer)
    mb.load_checkpoint(path, model, optimizer)


def test_missing_files_are_named(small: tuple[Path, Any, Any], tmp_path: Path) -> None:
    path, model, optimizer = small
    for file in sorted(path.iterdir()):
        broken = tmp_path / "step-00000007"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(path, broken)
        (broken / file.name).unlink()
        with pytest.raises(mb.CheckpointError, match=rf"step-00000007 is .*{file.name}"):
            mb.load_checkpoint(broken, model, optimizer)
    for nowhere in (tmp_path / "absent", tmp_path, path / "__0_0.distcp"):
        with pytest.raises(mb.CheckpointError, match=r"no complete checkpoint: cannot read checkpoint\.json"):
            mb.load_checkpoint(nowhere, model, optimizer)


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def seal(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the index as somebody would who knows how it is made: sizes and checksums fit."""
    index = json.loads((path / "checkpoint.json").read_text())
    content = json.loads(index["body"])
    change(content)
    content["files"] = checkpoint_files.checksums(path, sorted(content["files"]))
    (path / "checkpoint.json").unlink()
    content.pop("format")
    content.pop("version")
    path.rename(checkpoint_files.partial_of(path))
    checkpoint_files.complete(path, content)


def test_nothing_is_unpickled(small: tuple[Path, Any, Any], tmp_path: Path) -> None:
    path, model, optimizer = small
    mark = tmp_path / "exploded"
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists()
    mark.rmdir()
    (path / ".metadata").write_bytes(pickle.dumps(Bomb(mark)))
    seal(path, lambda content: None)
    mb.load_checkpoint(path, model, optimizer)
    assert not mark.exists()

    torch.save(Bomb(mark), path / "__0_0.distcp")
    size = (path / "__0_0.distcp").stat().st_size

    def point_at_bomb(content: dict[str, Any]) -> None:
        for tensor in content["tensors"].values():
            for chunk in tensor["chunks"]:
                chunk[3:] = [0, size]

    before = state_of(model, optimizer)
    seal(path, point_at_bomb)
    with pytest.raises(mb.CheckpointError, match=r"cannot read .*step-00000001"):
        mb.load_checkpoint(path, model, optimizer)
    assert not mark.exists()
    assert not differences(state_of(model, optimizer), before)


def test_what_interrupted_saves_left_goes_with_the_next_save(small: tuple[Path, Any, Any]) -> None:
    path, model, optimizer = small
    left = path.parent / "step-00000007.partial"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half")
    assert mb.latest_checkpoint(path.parent) == path
    mb.save_checkpoint(path.parent, 8, model, optimizer)
    assert sorted(p.name for p in path.parent.glob("step-*")) == ["step-00000001", "step-00000008"]


def test_strange_indices_are_refused(small: tuple[Path, Any, Any], tmp_path: Path) -> None:
    """Valid checksums do not make valid content."""

    def swap(content: dict[str, Any]) -> None:
        content["tensors"]["model.fc.weight"]["chunks"] = content["tensors"]["model.fc.bias"]["chunks"]

    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        "unknown dtype 'load'": lambda c: c["tensors"]["model.fc.bias"].update(dtype="load"),
        "does not say where all of 'model.fc.weight' is": swap,
        "names files without a checksum": lambda c: c["tensors"]["model.fc.bias"]["chunks"][0].__setitem__(2, "/etc/x"),
        "damaged: entries are missing": lambda c: c.pop("world_size"),
        "checkpoint.json is damaged: entries are missing": lambda c: c.pop("tensors"),
        "where all of 'optimizer.exp_avg.fc.weight' is": lambda c: c["tensors"]["optimizer.exp_avg.fc.weight"].update(
            chunks=[]
        ),
        "of another model: it has no 'fc.bias'": lambda c: c["tensors"].pop("model.fc.bias"),
    }
    path, model, optimizer = small
    before = state_of(model, optimizer)
    for number, (text, change) in enumerate(changes.items()):
        other = tmp_path / f"step-{number}"
        shutil.copytree(path, other)
        seal(other, change)
        with pytest.raises(mb.CheckpointError, match=text):
            mb.load_checkpoint(other, model, optimizer)
        assert not differences(state_of(model, optimizer), before), text


def refusals(rank: int, root: str) -> list[str]:
    """What is wrong with refusing foreign checkpoints and places that cannot be written, on every rank alike."""
    problems = []
    place = Path(root) / str(dist.get_world_size() if dist.is_initialized() else 1)
    run = Run("sharded", dtype=torch.bfloat16)
    run.train(0, 2)
    good = run.save(place, 2)
    other = seeded(Mlp)
    other_path = mb.save_checkpoint(place / "other", 1, other, torch.optim.SGD(other.parameters()))
    torch.save({}, place / f"file{rank}")
    wide = seeded(Zoo)
    wide.last = nn.Linear(7, 4)
    wide_path = mb.save_checkpoint(place / "wide", 1, wide, torch.optim.SGD(wide.parameters()))
    whole = seeded(Zoo).to(torch.bfloat16)
    whole.seen = whole.seen.float()
    whole_path = mb.save_checkpoint(place / "whole", 1, whole, torch.optim.SGD(whole.parameters()))
    one_group = seeded(Zoo)
    group_path = mb.save_checkpoint(place / "group", 1, one_group, torch.optim.AdamW(one_group.parameters()))
    sgd_path = mb.save_checkpoint(place / "sgd", 1, one_group, torch.optim.SGD(one_group.parameters()))
    if rank == 0:
        (place / "foreign").mkdir()
        (place / "foreign" / "checkpoint.json").write_text('{"iteration": 5}')
        (place / "listing").mkdir()
        (place / "listing" / "checkpoint.json").write_text("[1, 2]")
    if dist.is_initialized():
        dist.barrier()
    before = run.snapshot()
    cases: dict[str, Callable[[], Any]] = {
        "is of another model: it has no 'scale'": lambda: run.load(other_path),
        "'last.weight' has shape (4, 7), here (3, 7)": lambda: run.load(wide_path),
        "'seen' is torch.float32, here torch.int64": lambda: run.load(whole_path),
        "other param groups: 2 here, 1 saved": lambda: run.load(group_path),
        "holds the state of SGD, which AdamW cannot go on from": lambda: run.load(sgd_path),
        "foreign/checkpoint.json is damaged or was not written by megabuf_fx": lambda: run.load(place / "foreign"),
        "listing/checkpoint.json is damaged or was not written by megabuf_fx": lambda: run.load(place / "listing"),
        "no complete checkpoint": lambda: run.load(place / "step-00000003"),
        "Not a directory": lambda: run.save(place / "file0", 3),
        "No space left on device": lambda: run.save(Path(root) / "full", 3),
        "Read-only file system": lambda: run.save(Path(root) / "readonly", 3),
    }
    for text, function in cases.items():
        if not (Path(root) / "full").exists() and ("space" in text or "Read-only" in text):
            continue
        found = error_text(function)
        if not found.startswith("CheckpointError: ") or text not in found:
            problems.append(f"expected '{text}', got '{found}'")
        problems += [f"{text}: {name} changed" for name in differences(run.snapshot(), before)]
    if (Path(root) / "full").exists() and rank == 0 and list((Path(root) / "full").iterdir()):
        problems.append("the full disk stays full")
    for failing_rank in range(dist.get_world_size() if dist.is_initialized() else 1):
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing_rank:
                patch.setattr(FileSystemWriter, "write_data", disk_full)
            found = error_text(lambda: run.save(place, 3))
        if not found.startswith("CheckpointError: ") or "No space left on device" not in found:
            problems.append(f"rank {failing_rank} cannot write: {found}")
        problems += [f"disk full: {name} changed" for name in differences(run.snapshot(), before)]
    if mb.latest_checkpoint(place) != good:
        problems.append(f"the latest is {mb.latest_checkpoint(place)}")
    run.train(2, 3)
    run.load(run.save(place, 3))
    run.load(good)
    problems += [f"after all: {name} changed" for name in differences(run.snapshot(), before)]
    run.close()
    return problems


def disk_full(*args: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Path]:
    """``full``, a disk of 16 KB, and ``readonly``; absent where nothing can be mounted."""
    options = {"full": "size=16k", "readonly": "ro"}
    mounted = []
    for name, option in options.items():
        (tmp_path / name).mkdir()
        command = ["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(tmp_path / name)]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            mounted.append(tmp_path / name)
    if len(mounted) < len(options):
        for name in options:
            if tmp_path / name not in mounted:
                (tmp_path / name).rmdir()
    yield tmp_path
    for path in mounted:
        subprocess.run(["umount", str(path)], check=False)


@pytest.mark.dist
@pytest.mark.parametrize("world", [1, 2])
def test_what_does_not_fit_or_cannot_be_written(ranks: Callable[[int], RankGroup], mounts: Path, world: int) -> None:
    for problems in [refusals(0, str(mounts))] if world == 1 else ranks(world).run(refusals, str(mounts)):
        assert not problems, "\n".join(problems)


@pytest.mark.parametrize("is_replacing", [False, True])
def test_an_interrupted_save_is_no_checkpoint(
    small: tuple[Path, Any, Any], monkeypatch: pytest.MonkeyPatch, is_replacing: bool
) -> None:
    """Ended before any of the calls that touch the disk, a save leaves the newest complete checkpoint to be found."""
    path, model, optimizer = small
    take_step(model, optimizer)
    step = 1 if is_replacing else 2
    saved = state_of(model, optimizer)
    places: list[tuple[Any, str]] = [
        (FileSystemWriter, "write_data"),
        (FileSystemWriter, "finish"),
        (checkpoint_files, "checksums"),
        (json, "dump"),
        (checkpoint_files, "_sync"),
        (Path, "rename"),
        (shutil, "rmtree"),
    ]
    for owner, name in places:
        for count in range(4):
            calls = Interrupted(getattr(owner, name), count)
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, lambda *a, calls=calls, **k: calls(*a, **k))
                try:
                    mb.save_checkpoint(path.parent, step, model, optimizer)
                except (KeyboardInterrupt, mb.CheckpointError):
                    # Torch makes its own exception of whatever happens in it.
                    pass
                else:
                    continue
            found = mb.latest_checkpoint(path.parent)
            assert found is not None, (name, count)
            mb.load_checkpoint(found, model, optimizer)
            optimizer.state_dict()
            mb.load_checkpoint(mb.save_checkpoint(path.parent / "good", 1, model, optimizer), model, optimizer)
    mb.load_checkpoint(path, model, optimizer)
    del saved
    take_step(model, optimizer)
    saved = state_of(model, optimizer)
    newest = mb.save_checkpoint(path.parent, step, model, optimizer)
    assert mb.latest_checkpoint(path.parent) == newest
    mb.load_checkpoint(newest, model, optimizer)
    assert not differences(state_of(model, optimizer), saved)
    assert not [file for file in path.parent.iterdir() if "." in file.name]


class Interrupted:
    """Ends the process, as far as anybody can tell, at call number ``count``."""

    def __init__(self, function: Callable[..., Any], count: int) -> None:
        self._function = function
        self._count = count

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._count -= 1
        if self._count < 0:
            raise KeyboardInterrupt
        return self._function(*args, **kwargs)


def test_the_latest_is_of_the_highest_step(tmp_path: Path) -> None:
    assert mb.latest_checkpoint(tmp_path / "absent") is None
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    paths = [mb.save_checkpoint(tmp_path, step, model, optimizer) for step in (123456789, 5, 99999999)]
    (tmp_path / "step-987654321").mkdir()
    (tmp_path / "step-best").mkdir()
    assert mb.latest_checkpoint(tmp_path) == paths[0]
    (paths[0] / "__0_0.distcp").write_bytes(b"damaged")
    with pytest.raises(mb.CheckpointError, match=f"{paths[0]} is damaged: __0_0.distcp has 7 bytes"):
        mb.load_checkpoint(paths[0], model, optimizer)
    with pytest.raises(TypeError, match="not JSON serializable"):
        mb.save_checkpoint(tmp_path, 6, model, optimizer, extra={"x": model})
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-00000005",
        "step-123456789",
        "step-987654321",
        "step-99999999",
        "step-best",
    ]
