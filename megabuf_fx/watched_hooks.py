"""Hooks of compiled modules, which torch.compile reads once.

A hook that is added to a module after it was compiled silently does not run, and one that is removed still does. So the
hooks of compiled modules are remembered and looked at in every step. Looking at a module costs a microsecond; adding a
hook anywhere takes a new number from a counter of torch's, so as long as that stands still, only modules that have
hooks, which may be removed, are looked at.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

import megabuf_fx._compat as _compat


class _Entry(NamedTuple):
    module: nn.Module
    hooks: tuple[int, ...]
    """Their numbers when the module was compiled."""

    @property
    def has_changed(self) -> bool:
        return _compat.module_hook_ids(self.module) != self.hooks


class WatchedHooks:
    """The hooks of the modules in compiled graphs, as long as the graphs live."""

    def __init__(self) -> None:
        self._entries: weakref.WeakKeyDictionary[object, list[_Entry]] = weakref.WeakKeyDictionary()
        self._hooked: weakref.WeakKeyDictionary[object, list[_Entry]] = weakref.WeakKeyDictionary()
        """Of those the ones that have hooks."""
        self._registered = -1
        """Hooks that anybody had registered when every entry was looked at last."""

    def watch(self, graph: object, modules: Sequence[nn.Module]) -> None:
        """Remember the hooks of these modules for ``graph``."""
        renewed = set(map(id, modules))
        for entries in [*self._entries.values(), *self._hooked.values()]:
            # A module that was compiled anew counts with its hooks of now, even if old code still waits for collection.
            entries[:] = [entry for entry in entries if id(entry.module) not in renewed]
        found = [_Entry(module, _compat.module_hook_ids(module)) for module in modules]
        self._entries[graph] = found
        self._hooked[graph] = [entry for entry in found if entry.hooks]

    def find_changed(self) -> nn.Module | None:
        """A module whose hooks are not those that were compiled."""
        registered = _compat.registered_hooks()
        suspects = self._hooked if registered == self._registered else self._entries
        for entries in suspects.values():
            for entry in entries:
                if entry.has_changed:
                    return entry.module
        self._registered = registered
        return None
