"""The house rules that a reader of one file cannot see: who imports whom, and what lies where."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

REPO = Path(__file__).resolve().parent.parent
FRONT_DOOR = "megabuf_fx"
ALLOWED_IMPORTS = {
    "runtime": ("torch", "megabuf_fx.runtime"),
    "passes": ("torch", "megabuf_fx.runtime", "megabuf_fx.passes"),
}
"""Besides the standard library: imports point down, front door -> passes -> runtime -> torch."""
LINKED_ROOMS = tuple(ALLOWED_IMPORTS)
ROOMS = (FRONT_DOOR, *LINKED_ROOMS)
PRIVATE_TORCH_FILE = "megabuf_fx/_compat.py"
TOP_LEVEL = {"pyproject.toml", "megabuf_fx", "passes", "runtime", "tests", "examples", "README.md"}


class Import(NamedTuple):
    line: int
    module: str
    """``a.b`` of ``import a.b`` and of ``from a.b import c``; with leading dots if relative."""


def find_imports(tree: ast.AST) -> Iterator[Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            yield Import(node.lineno, "." * node.level + (node.module or ""))


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def is_allowed_import(module: str, room: str) -> bool:
    if module.split(".")[0] in sys.stdlib_module_names:
        return True
    return any(is_within(module, package) for package in ALLOWED_IMPORTS[room])


def private_prefix(name: str) -> str | None:
    """``torch.a._b`` of ``torch.a._b.c``, None for a name that is public or not torch's."""
    root, *parts = name.split(".")
    # Under torch.ops are schema names: aten::_to_copy is what a graph contains and has no public spelling.
    if root != "torch" or parts[:1] == ["ops"]:
        return None
    for count, part in enumerate(parts, start=1):
        is_dunder = part.startswith("__") and part.endswith("__")
        if part.startswith("_") and not is_dunder and not part.startswith("_foreach_"):
            return ".".join([root, *parts[:count]])
    return None


def dotted_name(node: ast.expr) -> str | None:
    """``a.b.c`` of the expression ``a.b.c``."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (value := dotted_name(node.value)) is not None:
        return f"{value}.{node.attr}"
    return None


def find_private_torch_names(tree: ast.AST) -> list[tuple[int, str]]:
    """Lines and private names: imported, or reached by attributes from a name that an import bound."""
    found: set[tuple[int, str]] = set()
    bound: dict[str, str] = {}

    def note(line: int, name: str) -> None:
        if (private := private_prefix(name)) is not None:
            found.add((line, private))

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                note(node.lineno, alias.name)
                root = alias.name.split(".")[0]
                bound[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            for alias in node.names:
                note(node.lineno, f"{node.module}.{alias.name}")
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted_name(node)) is not None:
            root, _, rest = name.partition(".")
            if root in bound:
                note(node.lineno, f"{bound[root]}.{rest}")
    return sorted(found)


def python_files(room: str) -> list[Path]:
    """Files of a room; the links inside ``megabuf_fx`` are not followed."""
    return sorted(
        Path(folder) / name
        for folder, _, names in os.walk(REPO / room, followlinks=False)
        for name in names
        if name.endswith(".py")
    )


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def relative(path: Path) -> str:
    return path.relative_to(REPO).as_posix()


@pytest.mark.parametrize("room", LINKED_ROOMS)
def test_imports_point_down(room: str) -> None:
    files = python_files(room)
    assert REPO / room / "__init__.py" in files
    violations = [
        f"{relative(path)}:{line} imports {module}"
        for path in files
        for line, module in find_imports(parse(path))
        if not is_allowed_import(module, room)
    ]
    assert not violations, f"allowed: standard library, {ALLOWED_IMPORTS[room]}\n" + "\n".join(violations)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_are_absolute_and_name_a_room(room: str) -> None:
    violations = [
        f"{relative(path)}:{line} imports {module}"
        for path in python_files(room)
        if relative(path) != "megabuf_fx/__init__.py"
        for line, module in find_imports(parse(path))
        if module == FRONT_DOOR or module.startswith(".") or module.split(".")[0] in LINKED_ROOMS
    ]
    assert not violations, "expected megabuf_fx.<module>, absolute\n" + "\n".join(violations)


@pytest.mark.parametrize("room", ROOMS)
def test_private_torch_names_are_in_compat_only(room: str) -> None:
    violations = [
        f"{relative(path)}:{line} uses {name}"
        for path in python_files(room)
        if relative(path) != PRIVATE_TORCH_FILE
        for line, name in find_private_torch_names(parse(path))
    ]
    assert not violations, f"private names of torch belong into {PRIVATE_TORCH_FILE}\n" + "\n".join(violations)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch._inductor.config", ["torch._inductor"]),
        ("import torch._dynamo as d", ["torch._dynamo"]),
        ("from torch._C import _distributed_c10d", ["torch._C"]),
        ("from torch import _guards", ["torch._guards"]),
        ("from torch.distributed import _tensor as t", ["torch.distributed._tensor"]),
        ("def f():\n    from torch._functorch import config", ["torch._functorch"]),
        ("import torch\nx = torch._foo.bar(1)", ["torch._foo"]),
        ("import torch.distributed as dist\ndist._sym()", ["torch.distributed._sym"]),
        ("import torch.fx\ntorch.utils._pytree.tree_map", ["torch.utils._pytree"]),
        ("from torch import Tensor\nTensor._make_subclass", ["torch.Tensor._make_subclass"]),
        ("import torch\ntorch.ops.megabuf.reduce(torch._foreach_add, torch.__version__)", []),
        ("import torch\ntorch.ops.aten._to_copy.default", []),
        ("from torch import fx\nfrom torch.fx import Node\nNode.meta\nself._torch._x", []),
        ("from megabuf_fx._compat import make_boxed\nmake_boxed._x", []),
    ],
)
def test_private_names_are_found(source: str, expected: list[str]) -> None:
    assert [name for _, name in find_private_torch_names(ast.parse(source))] == expected


@pytest.mark.parametrize(
    ("source", "rooms"),
    [
        ("from __future__ import annotations", ["runtime", "passes"]),
        ("import os.path, torch.fx", ["runtime", "passes"]),
        ("from megabuf_fx.runtime.layout import BufferLayout", ["runtime", "passes"]),
        ("import megabuf_fx.passes", ["passes"]),
        ("from megabuf_fx.runtime_x import y", []),
        ("from megabuf_fx import runtime", []),
        ("import megabuf_fx", []),
        ("from megabuf_fx.config import MegabufConfig", []),
        ("from . import layout", []),
        ("if TYPE_CHECKING:\n    import numpy", []),
        ("import torchvision", []),
    ],
)
def test_imports_are_judged(source: str, rooms: list[str]) -> None:
    imports = list(find_imports(ast.parse(source)))
    assert imports
    assert [room for room in LINKED_ROOMS if all(is_allowed_import(i.module, room) for i in imports)] == rooms


@pytest.mark.parametrize("room", LINKED_ROOMS)
def test_bare_room_refuses_to_be_imported(room: str) -> None:
    command = f"import sys; sys.path.insert(0, {str(REPO)!r}); import {room}"
    result = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    assert result.stderr.strip().splitlines()[-1] == f"ImportError: import megabuf_fx.{room}, not {room}"


@pytest.mark.parametrize("room", LINKED_ROOMS)
def test_rooms_are_linked_relatively(room: str) -> None:
    link = REPO / FRONT_DOOR / room
    assert link.is_symlink()
    assert link.readlink() == Path("..") / room
    assert link.resolve() == REPO / room


def test_top_level_is_as_agreed() -> None:
    try:
        listed = subprocess.run(
            ["git", "-C", str(REPO), "ls-files", "-z"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    if not listed:
        pytest.skip("nothing is tracked yet")
    entries = {path.split("/")[0] for path in listed.split("\0") if path}
    unexpected = {entry for entry in entries if not entry.startswith(".")} - TOP_LEVEL
    assert not unexpected, f"top-level entries {sorted(unexpected)}; agreed are {sorted(TOP_LEVEL)} and dot files"
