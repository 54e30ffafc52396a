"""What lies in a checkpoint directory, and how it comes to be there whole or not at all.

    step-00000100/
        __0_0.distcp, __1_0.distcp, ...   tensors, as torch.distributed.checkpoint (DCP) writes them
        .metadata                         DCP's own index, a pickle: for other readers, never read here
        checkpoint.json                   our index, what is no tensor, and a checksum of every file

Everything is written into a directory of another name, which is renamed when it is complete; ``checkpoint.json`` is
written last. Nothing is unpickled when a checkpoint is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

INDEX = "checkpoint.json"
FORMAT = "megabuf_fx checkpoint"
VERSION = 2
_PARTIAL = ".partial"
_REPLACED = ".replaced"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or is not what it should be; the message names it."""


def partial_of(directory: Path) -> Path:
    """Where ``directory`` is written before it is complete."""
    return directory.with_name(directory.name + _PARTIAL)


def clear_partial(directory: Path) -> None:
    """Make an empty place to write to; what interrupted saves left, of whatever step, goes: one save runs at a time."""
    for left in directory.parent.glob(f"step-*{_PARTIAL}"):
        shutil.rmtree(left)
    partial_of(directory).mkdir(parents=True)


def remove_partial(directory: Path) -> None:
    """After a failure: give the space back, so that the next save finds it."""
    shutil.rmtree(partial_of(directory), ignore_errors=True)


def find_latest(root: Path) -> Path | None:
    """The complete checkpoint of the highest step. One that was being replaced when the process ended counts."""
    found: dict[int, Path] = {}
    for path in root.glob("step-*"):
        number, _, suffix = path.name.removeprefix("step-").partition(".")
        is_complete = number.isdecimal() and suffix in ("", _REPLACED[1:]) and (path / INDEX).exists()
        if is_complete and (suffix == "" or int(number) not in found):
            found[int(number)] = path
    return found[max(found)] if found else None


def checksums(directory: Path, names: list[str]) -> dict[str, list[Any]]:
    """``[bytes, sha256]`` of files, by name."""
    found: dict[str, list[Any]] = {}
    for name in names:
        with (directory / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[name] = [file.tell(), digest]
    return found


def complete(directory: Path, content: Mapping[str, Any]) -> None:
    """Write the index and give the directory its name: from now on it is a checkpoint."""
    partial = partial_of(directory)
    body = json.dumps({"format": FORMAT, "version": VERSION, **content})
    index = {"sha256": hashlib.sha256(body.encode()).hexdigest(), "body": body}
    with (partial / INDEX).open("w") as file:
        json.dump(index, file)
        file.flush()
        os.fsync(file.fileno())
    _sync(partial)
    replaced = directory.with_name(directory.name + _REPLACED)
    if directory.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        directory.rename(replaced)
    partial.rename(directory)
    _sync(directory.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def read_index(directory: Path) -> dict[str, Any]:
    """The content of ``checkpoint.json``.

    Raises:
        CheckpointError: no checkpoint, one of another format, or a damaged index; the message names the directory.
    """
    try:
        index = json.loads((directory / INDEX).read_bytes())
        body = index["body"]
        if hashlib.sha256(body.encode()).hexdigest() != index["sha256"]:
            raise CheckpointError(f"{directory / INDEX} is damaged: its checksum does not fit")
        content = json.loads(body)
    except OSError as error:
        reason = f"cannot read {INDEX} ({error.strerror})"
        raise CheckpointError(f"{directory} is no complete checkpoint: {reason}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CheckpointError(f"{directory / INDEX} is damaged or was not written by megabuf_fx") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{directory / INDEX} was not written by megabuf_fx")
    if content.get("version") != VERSION:
        raise CheckpointError(f"{directory} has checkpoint version {content.get('version')}, this is version {VERSION}")
    try:
        named = {chunk[2] for tensor in content["tensors"].values() for chunk in tensor["chunks"]}
        has_all = content.keys() >= {"step", "extra", "param_groups", "world_size"}
        is_checked = named <= content["files"].keys()
    except (KeyError, TypeError, AttributeError, IndexError):
        has_all = is_checked = False
    if not has_all:
        raise CheckpointError(f"{directory / INDEX} is damaged: entries are missing")
    if not is_checked:
        raise CheckpointError(f"{directory / INDEX} is damaged: it names files without a checksum")
    return content


def check_files(directory: Path, files: Mapping[str, Any], names: list[str]) -> None:
    """Compare files with their checksums.

    Raises:
        CheckpointError: a file is missing, truncated or changed.
    """
    for name in names:
        size, digest = files[name]
        try:
            (found_size, found_digest) = checksums(directory, [name])[name]
        except OSError as error:
            raise CheckpointError(f"{directory} is damaged: cannot read {name} ({error.strerror})") from None
        if found_size != size:
            raise CheckpointError(f"{directory} is damaged: {name} has {found_size} bytes, expected {size}")
        if found_digest != digest:
            raise CheckpointError(f"{directory} is damaged: the checksum of {name} does not fit")


def _sync(directory: Path) -> None:
    # A rename is lasting only once its directory is on disk.
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
