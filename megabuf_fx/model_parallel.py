"""The process groups of a model that is split over ranks, and sums over them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import megabuf_fx._compat as _compat
from megabuf_fx.runtime.collectives import ADVICE, CollectiveError
from megabuf_fx.runtime.flags import AxisFlags

Group = dist.ProcessGroup | DeviceMesh | None

_NON_MEMBER: object = dist.GroupMember.NON_GROUP_MEMBER if dist.is_available() else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParallelGroups:
    """Process groups of every axis (Megatron ``ProcessGroupCollection``), as this rank sees them.

    Each is optional: None says that the axis is not there. A field also takes a one-dimensional ``DeviceMesh``, and
    what ``dist.new_group`` returns on ranks that are no members. The order of ranks counts: the first rank of ``pp`` is
    the first pipeline stage.

    Raises:
        TypeError: a field that is no process group.
    """

    dp_cp: Group = None
    """Data and context parallel: the ranks over which ``attach`` reduces gradients."""
    tp: Group = None
    """Tensor parallel: the ranks that hold parts of the same layers."""
    pp: Group = None
    """Pipeline: the stages of one model, first to last."""
    embd: Group = None
    """The stages that hold a copy of the word embeddings: first and last. Others are no members."""
    pos_embd: Group = None
    """The stages that hold a copy of the position embeddings. Others are no members."""
    expert: Group = None
    """The ranks that hold the same experts: ``expert_process_group`` of ``attach``. Only compared with that."""
    tp_dp_cp: Group = None
    """All ranks of one stage: those whose tokens the experts' loads are counted over."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, DeviceMesh) and value.ndim != 1:
                raise TypeError(f"{field.name} is a {value.ndim}-dimensional DeviceMesh; pass one axis, as mesh['tp']")
            known = isinstance(value, dist.ProcessGroup | DeviceMesh)
            if not known and value is not None and value != _NON_MEMBER:
                raise TypeError(f"{field.name} must be a ProcessGroup or a DeviceMesh, got {value!r}")

    def is_given(self, name: str) -> bool:
        """Whether the axis is there, perhaps without this rank."""
        return getattr(self, name) is not None

    def find(self, name: str) -> dist.ProcessGroup | None:
        """The group of this name, None where it is not given or this rank is no member."""
        value: Any = getattr(self, name)
        if isinstance(value, DeviceMesh):
            return value.get_group()
        return value if isinstance(value, dist.ProcessGroup) else None

    def size(self, name: str) -> int:
        """Ranks of the group; 1 where there is none."""
        group = self.find(name)
        return 1 if group is None else group.size()

    def rank(self, name: str) -> int:
        """This rank's position in the group; 0 where there is none."""
        group = self.find(name)
        return 0 if group is None else group.rank()

    def reduce(self, name: str, value: Tensor, what: str, op: Literal["sum", "max"] = "sum") -> Tensor:
        """``value`` summed, or its maximum, over the ranks of a group, as a new tensor; itself where there is one rank.

        Raises:
            CollectiveError: the collective failed; names ``what``.
        """
        group = self.find(name)
        if group is None or group.size() == 1:
            return value
        try:
            return _compat.functional_all_reduce(value.contiguous(), op, group)
        except RuntimeError as error:
            raise CollectiveError(f"{what} over {name} ({group.size()} ranks) failed: {error}\n{ADVICE}") from error

    def counts_in_norm(self, flags: AxisFlags) -> bool:
        """Whether this rank's gradient of a parameter is part of the norm over all ranks of the model: every parameter
        counts once (Megatron ``param_is_not_shared``, ``param_is_not_tensor_parallel_duplicate``)."""
        if flags.shared or (flags.is_pipeline_copy and self.rank("pp") > 0):
            return False
        return flags.tensor_model_parallel or self.rank("tp") == 0
