"""Which parameters got a gradient on any rank.

A parameter that no rank used must be left alone by the optimizer (no decay, no state), one that only some ranks used
must not, and no rank knows this by itself. One small collective per step and process group tells, behind the
reductions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megabuf_fx.runtime.collectives import Comm, PendingWork


class UsageExchange:
    """The maximum over the ranks of ``comm`` of one flag for each of ``params``: ``[n]``, uint8.

    A rank that used everything need not look at the answer, so usually nothing waits for the device.
    """

    def __init__(self, comm: Comm, params: Sequence[int], device: torch.device) -> None:
        self.params = tuple(params)
        """Whose flags these are, as indices into the model's parameters."""
        self._comm = comm
        self._flags = torch.zeros(len(self.params), dtype=torch.uint8, device=device)
        self._work: PendingWork | None = None
        self._answer: list[bool] | None = None

    def start(self, used_here: Sequence[bool]) -> None:
        """Send this rank's flags, one for each parameter of the model. A second start before ``reset`` adds to the
        answer, as gradients do."""
        self._finish()
        own = [used_here[param] for param in self.params]
        if all(own):
            self._flags.fill_(1)
        else:
            self._flags.copy_(torch.tensor(own, dtype=torch.uint8))
        self._answer = [True] * len(own) if all(own) else None
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
