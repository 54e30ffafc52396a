"""Who may touch gradients and parameters now: shared storage, memory that is away, parameters that are hidden."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from megabuf_fx.runtime.buffers import ParamGradBuffer
from megabuf_fx.runtime.memory import BufferMemory
from megabuf_fx.runtime.offload import Offload
from megabuf_fx.runtime.quantized_weights import QuantizedWeights


class BufferAccess:
    """Of one model. ``sync_params`` makes parameters current, on every rank."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        buffers: Sequence[ParamGradBuffer],
        weights: QuantizedWeights | None,
        memory: BufferMemory,
        sync_params: Callable[[], None],
    ) -> None:
        self._params = params
        self._weights = weights
        self._sync_params = sync_params
        self._shared = [buffer.shared for buffer in buffers if buffer.shared is not None]
        sums = [buffer.main_grads[param] for buffer in buffers for param in buffer.promoted]
        # Where storage is shared, what gathers use up lies with the gradients.
        data = [b.param_data for b in buffers if b.param_data is not None and b.shared is None]
        stored = weights.tensors().values() if weights is not None else ()
        self.offload = Offload([*(buffer.grad_data for buffer in buffers), *sums], [*data, *stored], memory)
        """What of the memory is away."""

    @property
    def is_shared(self) -> bool:
        """Whether gathers go through the gradients' storage."""
        return bool(self._shared)

    def claim_gradients(self, what: str) -> None:
        """``what`` is about to write gradients: nothing else may be in their storage, on any rank."""
        self.offload.require("gradients", what)
        if self._shared:
            self._sync_params()
        for shared in self._shared:
            shared.write_gradients()

    def require_gradients(self, what: str) -> None:
        """Raise when the gradients that ``what`` is about to use are away, or parameters lie where they were."""
        self.offload.require("gradients", what)
        for shared in self._shared:
            shared.read_gradients(what)

    def release_gradients(self) -> None:
        """Nobody needs the gradients of this step any more."""
        for shared in self._shared:
            shared.release_gradients()

    def require_params(self, what: str) -> None:
        """Raise when the parameters that ``what`` is about to use are away."""
        self.offload.require("parameters", what)

    def show_params(self) -> None:
        """Make every parameter current and readable by eager code, quantized ones too, until the next step."""
        self.require_params("parameters are read")
        self._sync_params()
        if self._weights is not None:
            self._weights.show(self._weights.indices)

    def hide_params(self) -> None:
        """Let go of what ``show_params`` made, where nobody holds it."""
        if self._weights is not None:
            self._weights.hide()

    def values_of(self, index: int) -> Sequence[Tensor]:
        """The tensors that hold a parameter's value, all the same on all ranks once it is current."""
        if self._weights is not None and index in self._weights:
            return tuple(self._weights.stored(index))
        return (self._params[index],)
