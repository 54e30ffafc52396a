"""Tables that say which test covers what, and keep saying the truth."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def find_test(name: str) -> Callable[..., Any]:
    """The test function that ``test_file.py::test_name`` names.

    Raises:
        AssertionError: there is none.
    """
    file, _, function = name.partition("::")
    assert all(part.startswith("test_") for part in (file, function)), name
    found = getattr(importlib.import_module(file.removesuffix(".py")), function, None)
    assert callable(found), f"there is no test {name}"
    return found  # type: ignore[no-any-return]
