"""Which parameters got a gradient on any rank.

A parameter that no rank used must be left alone by the optimizer (no decay, no state), one that only some ranks used
must not, and no rank knows this by itself. One small collective per step and process group tells, behind the
reductions.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch

from megabuf_fx.runtime.collectives import Comm, PendingWork
from megabuf_fx.runtime.plan import BucketPlan
from megabuf_fx.runtime.transports import Communicators


class UsageExchange:
    """The maximum over the ranks of ``comm`` of one flag for each of ``params``: ``[n]``, uint8.

    A rank that used everything need not look at the answer, so usually nothing waits for the device.
    """

    def __init__(self, comm: Comm, params: Sequence[int], device: torch.device) -> None:
        self.params = tuple(params)
        """Whose flags these are, as indices into the model's parameters."""
        self._members = frozenset(params)
        self._comm = comm
        self._flags = torch.zeros(len(self.params), dtype=torch.uint8, device=device)
        self._work: PendingWork | None = None
        self._answer: list[bool] | None = None

    def start(self, used_here: Set[int]) -> None:
        """Send this rank's flags; ``used_here`` are parameters of the model. A second start before ``reset`` adds to
        the answer, as gradients do."""
        self._finish()
        if self._members <= used_here:
            self._flags.fill_(1)
            self._answer = [True] * len(self.params)
        else:
            self._flags.copy_(torch.tensor([param in used_here for param in self.params], dtype=torch.uint8))
            self._answer = None
        self._work = self._comm.all_reduce_max(self._flags)

    def wait(self) -> list[bool]:
        """One flag for each of ``params``. Reads from the device only where this rank left something unused."""
        if self._answer is None:
            self._finish()
            self._answer = [bool(flag) for flag in self._flags.tolist()]
        return self._answer

    def reset(self) -> None:
        """Forget the answer; every collective that was started is waited for."""
        self._finish()
        self._answer = None

    def _finish(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


class UsedParams:
    """The exchanges of one model: which of its parameters got a gradient on some rank."""

    def __init__(self, plan: BucketPlan, comms: Communicators, device: torch.device) -> None:
        self._count = len(plan.params)
        self._exchanges = []
        for is_expert in (False, True):
            params = [index for index, spec in enumerate(plan.params) if spec.allreduce is not is_expert]
            if params:
                # Expert parameters of one name are different ones on ranks with other experts.
                self._exchanges.append(UsageExchange(comms.pair(is_expert=is_expert).grads, params, device))

    def start(self, used_here: Set[int]) -> None:
        """Send this rank's flags; see ``UsageExchange.start``."""
        for exchange in self._exchanges:
            exchange.start(used_here)

    def wait(self) -> list[bool]:
        """One flag for each parameter."""
        used = [False] * self._count
        for exchange in self._exchanges:
            for param, is_used in zip(exchange.params, exchange.wait()):
                used[param] = is_used
        return used

    def reset(self) -> None:
        """Forget the answer; every collective that was started is waited for."""
        for exchange in self._exchanges:
            exchange.reset()
