"""Tensor-wise fp8 parameters: one byte per element in ``param_data``, one scale per parameter.

Scales follow from the amax over all ranks: of the values that are stored (*tensorwise*, current scaling), or of those
of earlier steps (*delayed*, with a history; what is stored may then saturate). TransformerEngine's recipes of these
names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megabuf_fx.runtime.layout import BufferLayout, ParamSpec
from megabuf_fx.runtime.quantize_fp8 import (
    NAN_CODE,
    AmaxAlgorithm,
    DelayedScale,
    Fp8Tensor,
    encode_fp8,
    exact_quotient,
    new_delayed_scale,
    record_amax,
    scale_from_amax,
    tensor_amax,
    update_delayed_scale,
)
from megabuf_fx.runtime.stored_params import (
    Compiler,
    ShardPiece,
    StoredParams,
    aligned_slots,
    as_stored,
    finite_or_inf,
)


@dataclass(frozen=True, slots=True)
class DelayedRecipe:
    """Delayed scaling (TransformerEngine ``DelayedScaling``)."""

    amax_history_len: int
    amax_compute_algo: AmaxAlgorithm
    margin: int


class StoredFp8(StoredParams):
    """``delayed`` is None for current scaling. See [Note: quantized step]."""

    nan_code = NAN_CODE

    def __init__(
        self,
        layout: BufferLayout,
        params: Sequence[ParamSpec],
        *,
        device: torch.device,
        compiler: Compiler,
        delayed: DelayedRecipe | None = None,
    ) -> None:
        super().__init__(layout, params)
        self.param_data = torch.zeros(layout.numel, dtype=torch.uint8, device=device)
        self._rows = {index: row for row, index in enumerate(layout.params)}
        self._scale_storage, scale_inv = aligned_slots(dict.fromkeys(layout.params, ()), torch.float32, device)
        # All inverse scales as one vector; each has its 16 bytes.
        self._scale_inv = self._scale_storage.view(len(layout.params), -1)[:, 0]
        self._recipe = delayed
        self._state = new_delayed_scale(delayed.amax_history_len if delayed else 1, (len(layout.params),), device)
        self._amax = torch.zeros(len(layout.params), device=device)
        self._used_scale = torch.ones(len(layout.params), device=device)
        """With which the codes were made; a delayed ``scale`` is already that of the next step."""
        self._resumed: dict[int, Mapping[str, Tensor]] = {}
        self.stored = {index: Fp8Tensor(codes, scale_inv[index]) for index, codes in self.code_views().items()}
        self._encode = compiler(_encode_)

    def quantize(self, param: int, values: Tensor) -> None:
        row = self._rows[param]
        amax = tensor_amax(values)
        scale = self._state.scale[row]
        if self._recipe is None:
            scale.copy_(scale_from_amax(amax))
        else:
            # A history that knows nothing but these values.
            state = DelayedScale(self._state.amax_history[:, row].zero_(), scale.fill_(1))
            record_amax(state, amax)
            self._update(state)
        _encode_(values.reshape(-1), scale, self.stored[param].codes.view(-1), self.dtype)
        self._used_scale[row].copy_(scale)
        self._scale_inv[row].copy_(exact_quotient(1.0, scale))

    def write_shard(self, pieces: Sequence[ShardPiece], reduce_max: Callable[[Tensor], None]) -> None:
        amax, scale = self._amax.zero_(), self._state.scale
        for index, state in self._resumed.items():
            scale[self._rows[index]].copy_(state["used_scale"])
        for piece in pieces:
            amax[self._rows[piece.param]].copy_(_measure(piece.values, self.dtype))
        reduce_max(amax)
        # Nobody has a piece of what has amax 0, or it is zero and any scale is right.
        is_written = amax > 0
        if self._recipe is None:
            scale.copy_(torch.where(is_written, scale_from_amax(amax), scale))
        for piece in pieces:
            self._encode(piece.values, scale[self._rows[piece.param]], self.codes_of(piece), self.dtype)
        self._used_scale.copy_(torch.where(is_written, scale, self._used_scale))
        self._scale_inv.copy_(torch.where(is_written, exact_quotient(1.0, scale), self._scale_inv))
        if self._recipe is not None:
            record_amax(self._state, amax)
            self._update(self._state)
        for index, state in self._resumed.items():
            row = self._rows[index]
            self._state.scale[row].copy_(state["scale"])
            self._state.amax_history[:, row].copy_(state["amax_history"])
        self._resumed.clear()

    def tensors(self) -> dict[str, Tensor]:
        return {
            "scale_inv": self._scale_storage,
            "scale": self._state.scale,
            "amax_history": self._state.amax_history,
            "amax": self._amax,
            "used_scale": self._used_scale,
        }

    def scaling_state(self, param: int) -> dict[str, Tensor]:
        if self._recipe is None:
            return {}
        row = self._rows[param]
        return {
            "used_scale": self._used_scale[row],
            "scale": self._state.scale[row],
            "amax_history": self._state.amax_history[:, row].contiguous(),
        }

    def resume(self, param: int, state: Mapping[str, Tensor]) -> None:
        fits = self._recipe is not None and state.keys() == self.scaling_state(param).keys()
        if fits and len(state["amax_history"]) == len(self._state.amax_history):
            self._resumed[param] = state

    def _update(self, state: DelayedScale) -> None:
        assert self._recipe is not None
        update_delayed_scale(state, algorithm=self._recipe.amax_compute_algo, margin=self._recipe.margin, out=state)


def _measure(values: Tensor, dtype: torch.dtype) -> Tensor:
    # Rounding keeps the order, so the amax can be rounded instead. Not compiled: Inductor splits a reduction of dynamic
    # size over multiprocessors as it suits the first size it meets, and would leave a large matrix to one of them.
    amax: Tensor = torch.linalg.vector_norm(values, torch.inf)
    return finite_or_inf(as_stored(amax, dtype))


def _encode_(values: Tensor, scale: Tensor, out: Tensor, dtype: torch.dtype) -> None:
    out.copy_(encode_fp8(as_stored(values, dtype) * scale))
