"""Parameters that one buffer stores in a quantized format: what the three formats have in common.

[Note: quantized step]
After the optimizer's update each rank holds fp32 masters of its shard. ``write_shard`` makes that shard's part of
``param_data``, what the gather then moves; ``copy_out`` follows it, bucket by bucket. Masters are rounded to the
parameter's own dtype first, so that on every rank

    stored == quantize(master.to(dtype)), bit for bit

whichever ranks hold which part of a matrix. Scales that depend on elements of several ranks come from a maximum over
them, in which every rank takes part whether it holds anything or not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from megabuf_fx.runtime.layout import BufferLayout, ParamSpec
from megabuf_fx.runtime.quantize_fp8 import round_to_bf16
from megabuf_fx.runtime.quantized_formats import FORMATS

SLOT_ALIGNMENT = 16
"""Bytes. A tensor that a graph mutates must start at a multiple, or Inductor clones it on CUDA."""

F = TypeVar("F", bound=Callable[..., Any])


class Compiler(Protocol):
    """Makes a fast version of a function of tensors; the identity where graphs run op by op."""

    def __call__(self, function: F, /) -> F: ...


class ShardPiece(NamedTuple):
    """New values of the part of a parameter that this rank owns."""

    param: int
    start: int
    """First element within the parameter."""
    values: Tensor
    """fp32, 1-D."""


class StoredParams(ABC):
    """The parameters of one buffer in a quantized format.

    ``param_data`` is what gathers move; ``stored[param]`` are the tensors that graphs read, each 16-byte aligned.
    """

    param_data: Tensor
    is_staged = False
    """What a gather moves is used up by it."""
    nan_code: int | None = None
    """The byte in ``param_data`` that is NaN."""

    def __init__(self, layout: BufferLayout, params: Sequence[ParamSpec]) -> None:
        self.layout = layout
        self.specs: Mapping[int, ParamSpec] = {index: params[index] for index in layout.params}
        self.slots = dict(zip(layout.params, layout.slots))
        names = {spec.quantized for spec in self.specs.values()}
        dtypes = {spec.dtype for spec in self.specs.values()}
        if len(names) != 1 or len(dtypes) != 1:
            raise ValueError(f"one buffer stores parameters of one format and dtype, not {names} of {dtypes}")
        (name,), (self.dtype,) = names, dtypes
        self.format = FORMATS[str(name)]
        self.stored: dict[int, Any] = {}

    @abstractmethod
    def quantize(self, param: int, values: Tensor) -> None:
        """Store a whole parameter: ``values`` in its shape and dtype. Local; equal values give equal codes anywhere."""

    @abstractmethod
    def write_shard(self, pieces: Sequence[ShardPiece], reduce_max: Callable[[Tensor], None]) -> None:
        """Store what this rank owns. ``reduce_max`` takes the maximum over the ranks that share the buffer, in place;
        every rank calls this, with pieces or without. A parameter of which no rank has a piece stays as it is."""

    def copy_out(self, bucket: int) -> None:
        """The gather of a bucket is complete: make what graphs read of it. Nothing where that is what was gathered."""
        return

    def poison(self, bucket: int) -> None:
        """Debugging aid where there is no ``nan_code``: make every value of a bucket NaN until ``copy_out``."""
        return

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Everything besides ``param_data`` that lives from step to step, by name."""

    def scaling_state(self, param: int) -> dict[str, Tensor]:
        """What the stored form of a parameter depends on besides its master, by name; saved in checkpoints."""
        return {}

    def resume(self, param: int, state: Mapping[str, Tensor]) -> None:
        """Have the next ``write_shard`` store a parameter as it was when ``scaling_state`` gave this ``state``."""
        return

    def values(self, param: int) -> Tensor:
        """The values of a parameter as forward sees them, in its shape and dtype."""
        return self.format.dequantize(self.stored[param], self.dtype)

    def codes_of(self, piece: ShardPiece) -> Tensor:
        """The slice of ``param_data`` that belongs to ``piece``."""
        each = self.format.elements_per_byte
        start = self.slots[piece.param].start + piece.start
        return self.param_data[start // each : (start + piece.values.numel()) // each]

    def code_views(self) -> dict[int, Tensor]:
        """Of each parameter, its codes in ``param_data`` as a matrix."""
        each = self.format.elements_per_byte
        return {
            index: self.param_data[slot.start // each : slot.end // each].view(
                self.specs[index].shape[0], self.specs[index].shape[1] // each
            )
            for index, slot in self.slots.items()
        }


def aligned_slots(
    shapes: Mapping[int, tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, dict[int, Tensor]]:
    """One storage, and in it a tensor of each shape, zero at first and aligned to 16 bytes."""
    unit = SLOT_ALIGNMENT // dtype.itemsize
    starts, end = {}, 0
    for index, shape in shapes.items():
        starts[index] = end
        end += -(-torch.Size(shape).numel() // unit) * unit
    storage = torch.zeros(end, dtype=dtype, device=device)
    views = {
        index: storage[start : start + torch.Size(shapes[index]).numel()].view(shapes[index])
        for index, start in starts.items()
    }
    return storage, views


def finite_or_inf(amax: Tensor) -> Tensor:
    """``amax`` with infinity for NaN: a maximum over ranks may drop a NaN, never an infinity."""
    return torch.where(amax.isfinite(), amax, torch.inf)


def as_stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """``values`` rounded to a parameter's ``dtype`` (bf16 or fp32), as fp32, in a way that no compiler undoes."""
    return round_to_bf16(values) if dtype == torch.bfloat16 else values.float()
