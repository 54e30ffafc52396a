"""What the host knows of the current step: which slots are written, who will still contribute, what is complete.

Nothing here touches a tensor. Roles of compiled graphs are chosen from this state before they run (``roles.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from megabuf_fx.runtime.plan import BucketPlan


class ForwardToken:
    """A forward with gradient whose backward has not run. It hangs on the autograd node and dies with it.

    ``groups`` are the bucket groups ``(handle, group)`` that its backward will write.
    """

    __slots__ = ("__weakref__", "groups")

    def __init__(self, groups: Iterable[tuple[int, int]]) -> None:
        self.groups = frozenset(groups)


class StepState:
    """State of one attached model between two resets (``zero_grad``)."""

    def __init__(self, plan: BucketPlan) -> None:
        self.plan = plan
        self.group_of = plan.group_of_param
        self.written: set[int] = set()
        """Parameters whose slots hold a gradient of this step; the others hold anything."""
        self.no_sync_depth = 0
        """How many ``no_sync`` contexts are open."""
        self.is_unsynced = False
        """The last backward accumulated under ``no_sync``."""
        self.is_compiled = False
        """Some compiled graph uses this model."""
        self.is_reduced = False
        """Where ``.grad`` is published: nothing was accumulated since the last reduction."""
        self.is_finalized = False
        """Gradients were reduced over other axes, too (``finalize_model_grads``); once in a step."""
        self.used_elsewhere: set[int] = set()
        """Parameters without gradient here whose copies on other axes have one."""
        self.eager_params: set[int] = set()
        """Parameters that have had gradients from outside compiled graphs; kept over resets."""
        self.eager_groups: set[int] = set()
        """Bucket groups with a parameter that code outside compiled graphs differentiates; kept over resets."""
        self._counts = [0] * len(plan.params)
        """Backward passes that have contributed to each parameter since the last reset."""
        self._golden: list[int] | None = None
        self._sizes = [len(group.params) for group in plan.groups]
        self._missing = list(self._sizes)
        """Of each group, parameters that nothing has reached yet."""
        self._missing_golden = list(self._missing)
        """Of each group, parameters that were reached less often than in the first step."""
        self._outstanding: weakref.WeakSet[ForwardToken] = weakref.WeakSet()

    def reset(self) -> None:
        """A new step begins. Forwards without backward and what was learned of eager parts stay."""
        self.written.clear()
        self.is_unsynced = False
        self.is_reduced = False
        self.reopen_axes()
        self.reopen()

    def reopen(self) -> None:
        """Forget which contributions of this step have arrived; what is written stays written."""
        if self._golden is None and any(self._counts):
            self._golden = self._counts
        self._counts = [0] * len(self._counts)
        self._missing = list(self._sizes)
        self._missing_golden = list(self._sizes)

    def reopen_axes(self) -> None:
        """Other axes have not seen the gradients that come now."""
        self.is_finalized = False
        self.used_elsewhere.clear()

    def open_forward(self, token: ForwardToken) -> None:
        """A forward ran whose backward may come."""
        self._outstanding.add(token)

    def close_forward(self, token: ForwardToken) -> None:
        """The backward of this forward runs and frees its graph: nothing further can come from it."""
        self._outstanding.discard(token)

    @property
    def outstanding(self) -> int:
        """Forwards whose backward may still come."""
        return len(self._outstanding)

    def awaited(self, *, besides: ForwardToken) -> set[tuple[int, int]]:
        """The bucket groups ``(handle, group)`` that forwards other than ``besides`` may still write."""
        return {key for token in self._outstanding if token is not besides for key in token.groups}

    def is_awaited(self, key: tuple[int, int]) -> bool:
        """Whether a forward may still write the bucket group ``(handle, group)``."""
        return any(key in token.groups for token in self._outstanding)

    def mark_arrived(self, param: int) -> None:
        """All contributions of one backward pass to ``param`` have come (its AccumulateGrad node ran)."""
        self._counts[param] = count = self._counts[param] + 1
        if count == 1:
            self._missing[self.group_of[param]] -= 1
        if self._golden is not None and count == self._golden[param]:
            self._missing_golden[self.group_of[param]] -= 1

    def is_complete(self, group: int, *, by_count: bool) -> bool:
        """Whether every parameter of the group has had its contributions.

        ``by_count`` is for models without compiled graphs, where nobody announces what is still to come: the first step
        counts the backward passes that reach each parameter (Megatron's golden counts, semantics §6) and completes
        nothing; later steps are complete when they reach those counts. A group with a parameter that the first step did
        not reach never is.
        """
        return (self._missing_golden if by_count else self._missing)[group] == 0
