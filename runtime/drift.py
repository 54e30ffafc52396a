"""Ranks whose parameters have come apart: found by comparing digests, at little cost, every so many steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megabuf_fx.runtime.collectives import Comm
from megabuf_fx.runtime.plan import BucketPlan
from megabuf_fx.runtime.transports import Communicators

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes per element."""

_CHUNK = 2**20
"""Elements digested at once, which bounds the temporary."""


class DriftCheck:
    """Compares all parameters with those of the other ranks in every ``every``-th step; ``values_of`` a parameter are
    the tensors that hold its value."""

    def __init__(
        self, plan: BucketPlan, comms: Communicators, values_of: Callable[[int], Sequence[Tensor]], every: int
    ) -> None:
        self._plan = plan
        self._comms = comms
        self._values_of = values_of
        self._every = every
        self._steps = 0

    def is_due(self) -> bool:
        """Whether to check in the step that just ended its backward; counts it."""
        self._steps += 1
        return self._steps % self._every == 0

    def check(self) -> None:
        """Compare; every rank calls it, with parameters gathered.

        Raises:
            RuntimeError: the parameters of some ranks differ; the message names the first and the ranks.
        """
        for is_expert in (False, True):
            # Experts of one name are others on other ranks; they are compared where they are shared.
            indices = [i for i, spec in enumerate(self._plan.params) if spec.allreduce is not is_expert and spec.numel]
            if indices:
                self._compare(self._comms.pair(is_expert=is_expert).grads, indices)

    def _compare(self, comm: Comm, indices: Sequence[int]) -> None:
        digests = torch.stack([digest(*self._values_of(index)) for index in indices])
        # One maximum gives the largest and the smallest digest; they are equal exactly when all ranks have the same.
        bounds = torch.cat([digests, ~digests])
        comm.all_reduce_max(bounds).wait()
        highest, lowest = bounds.chunk(2)
        differs = (highest != ~lowest).nonzero().flatten()
        if not differs.numel():
            return
        first = int(differs[0])
        answers = comm.all_gather_object(int(digests[first]))
        common, _ = Counter(answers).most_common(1)[0]
        ranks = [rank for rank, answer in enumerate(answers) if answer != common]
        name = self._plan.params[indices[first]].name
        raise RuntimeError(
            f"ranks have come apart after {self._steps} steps: parameter '{name}' (and {differs.numel() - 1} more) of "
            f"rank(s) {', '.join(map(str, ranks))} differ from the others. Restart from a checkpoint; look for "
            "operations that are not deterministic, or for faulty hardware on those ranks"
        )


def digest(*tensors: Tensor) -> Tensor:
    """A number that depends on every bit of ``tensors``: 0-dim int64, the weighted sum of elements read as integers.

    Weights are odd, so that no bit of an element is lost where the sum wraps around.
    """
    if len(tensors) > 1:
        return digest(torch.stack([digest(tensor) for tensor in tensors]))
    (tensor,) = tensors
    flat = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    weights = 2 * torch.arange(min(_CHUNK, flat.numel()), device=flat.device) + 1
    sums = torch.stack([(chunk * weights[: chunk.numel()]).sum(dtype=torch.int64) for chunk in flat.split(_CHUNK)])
    return (sums * (2 * torch.arange(len(sums), device=flat.device) + 1)).sum()
