"""The quantized parameters of one model, and their values in the parameter's own dtype where somebody needs those.

[Note: hidden parameters]
The model keeps plain ``nn.Parameter``s, so that Dynamo, autograd and optimizers see what they know. Compiled graphs
read codes and scales (pass ``dequantize_params``) and never the parameter's own memory, so that is a view of one
*shadow* for all of them, as large as the largest and full of NaN: the parameter is *hidden*. Eager code needs real
values: the hook of a module that owns quantized parameters *shows* them before its forward, and so do ``state_dict``,
``deepcopy`` and ``buf.sync_params()``. What is shown stays until the next step, because autograd may hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megabuf_fx.runtime.buffers import ParamGradBuffer
from megabuf_fx.runtime.plan import BucketPlan
from megabuf_fx.runtime.stored_params import ShardPiece, StoredParams


class QuantizedWeights:
    """``params`` and ``buffers`` are those of the model; every buffer with ``stored`` is taken over.

    ``reduce_max(amax, is_expert=...)`` takes the maximum over the ranks that share dense or expert buckets, in place;
    ``version_of`` a tensor changes when it is written in place.
    """

    def __init__(
        self,
        plan: BucketPlan,
        params: Sequence[nn.Parameter],
        buffers: Sequence[ParamGradBuffer],
        reduce_max: Callable[..., None],
        version_of: Callable[[Tensor], int],
    ) -> None:
        self._plan = plan
        self._params = params
        self._buffers = buffers
        self._reduce_max = reduce_max
        self._version_of = version_of
        self._store_of: dict[int, StoredParams] = {
            index: buffer.stored for buffer in buffers if buffer.stored is not None for index in buffer.layout.params
        }
        largest = max((plan.params[index].numel for index in self._store_of), default=0)
        dtype = plan.params[next(iter(self._store_of))].dtype if self._store_of else torch.bfloat16
        self._shadow = torch.full((largest,), torch.nan, dtype=dtype, device=params[0].device)
        self._shown: dict[int, int] = {}
        """Parameters that hold their values, and the address of what ``show`` gave them."""
        self._written: dict[int, int] = {}
        self.given: dict[int, Tensor] = {}
        """Values from outside that are finer than what is stored: those at ``attach``, or loaded ones. Masters are made
        of them; dropped once they are."""
        for index in self._store_of:
            self._take(index, params[index].detach())
            self._hide(index)

    @property
    def indices(self) -> Iterable[int]:
        """Parameters that are quantized."""
        return self._store_of.keys()

    def __contains__(self, index: int) -> bool:
        return index in self._store_of

    def stored(self, index: int) -> Any:
        """The tensors that graphs read: a ``NamedTuple`` of the parameter's format."""
        return self._store_of[index].stored[index]

    def values(self, index: int) -> Tensor:
        """What masters are made of: values given from outside, or else those that are stored. Parameters must be
        current."""
        given = self.given.get(index)
        return given if given is not None else self._store_of[index].values(index)

    def stored_values(self, index: int) -> Tensor:
        """The values that are stored, in a tensor of their own. Parameters must be current."""
        return self._store_of[index].values(index)

    def show(self, indices: Iterable[int]) -> None:
        """Let these parameters hold their values, for eager code. They must be current."""
        for index in indices:
            if index in self._store_of and index not in self._shown:
                self._params[index].data = self._store_of[index].values(index)
                self._shown[index] = self._params[index].data_ptr()
                self._note(index)

    def hide(self) -> None:
        """Values are about to change: nobody holds old ones.

        Raises:
            RuntimeError: a parameter was written meanwhile, and nobody has taken that over.
        """
        self.refuse_written()
        for index in sorted(self._shown):
            self._hide(index)

    def absorb(self, indices: Iterable[int], *, always: bool = False) -> None:
        """Store what was written into these parameters while they were shown, and keep it for masters; ``always`` also
        where it is what was shown."""
        for index in indices:
            if index not in self._shown:
                continue
            if always or not torch.equal(self._params[index], self._store_of[index].values(index)):
                self._take(index, self._params[index].detach().clone())
                # Eager code goes on reading it, and must see what graphs see.
                self._params[index].data.copy_(self._store_of[index].values(index))
            self._shown[index] = self._params[index].data_ptr()
            self._note(index)

    def load(self, index: int, values: Tensor) -> None:
        """Store new values, in any floating dtype."""
        spec = self._plan.params[index]
        self._take(index, values.to(self._shadow.device, spec.dtype).view(spec.shape))
        if index in self._shown:
            self._params[index].data.copy_(self._store_of[index].values(index))

    def scaling_state(self, index: int) -> dict[str, Tensor]:
        """See ``StoredParams.scaling_state``."""
        return self._store_of[index].scaling_state(index)

    def resume(self, index: int, state: Mapping[str, Tensor]) -> None:
        """See ``StoredParams.resume``."""
        self._store_of[index].resume(index, state)

    def refuse_written(self) -> None:
        """Raise when a parameter was written in place and nobody has taken that over (``.data`` is not seen)."""
        for index in self._store_of:
            if self._version_of(self._params[index]) != self._written[index]:
                raise RuntimeError(
                    f"quantized parameter '{self._plan.params[index].name}' was written in place, which its codes do "
                    "not see. Call buf.sync_params() first, then write, then opt.reload_model_params(); or use "
                    "load_state_dict"
                )

    def refuse_replaced(self) -> None:
        """Raise when somebody replaced ``param.data``."""
        for index in self._store_of:
            if self._params[index].data_ptr() != self._shown.get(index, self._shadow.data_ptr()):
                raise RuntimeError(
                    f"the data of quantized parameter '{self._plan.params[index].name}' was replaced after attach, "
                    "which its codes do not see; use load_state_dict, or detach, change the model and attach again"
                )

    def write(self, pieces: Mapping[int, Sequence[ShardPiece]], *, only_staged: bool = False) -> None:
        """This rank's masters have changed; ``pieces`` by buffer. Collective. See [Note: quantized step].

        ``only_staged`` writes again what a gather has used up, where masters are those of the last time.
        """
        self.hide()
        self.given.clear()
        for number, buffer in enumerate(self._buffers):
            if buffer.stored is not None and (buffer.stored.is_staged or not only_staged):
                reduce_max = partial(self._reduce_max, is_expert=buffer.layout.key.is_expert_parallel)
                buffer.stage()
                buffer.stored.write_shard(pieces.get(number, ()), reduce_max)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that lives from step to step, the buffers' ``param_data`` apart, by name."""
        return {
            f"{name}[{number}]": tensor
            for number, buffer in enumerate(self._buffers)
            if buffer.stored is not None
            for name, tensor in buffer.stored.tensors().items()
        }

    def release(self) -> None:
        """Give every parameter its values for good."""
        self.show(self._store_of)

    def _take(self, index: int, values: Tensor) -> None:
        self.given[index] = values
        self._store_of[index].quantize(index, values)

    def _hide(self, index: int) -> None:
        self._params[index].data = self._shadow[: self._params[index].numel()].view(self._plan.params[index].shape)
        self._shown.pop(index, None)
        self._note(index)

    def _note(self, index: int) -> None:
        self._written[index] = self._version_of(self._params[index])
