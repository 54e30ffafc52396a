"""One storage for gradients and gathered parameters, as a state machine that refuses every illegal order.

MXFP8 parameters live as codes and scales outside of any buffer; 16-bit values exist only from the optimizer's step
until each rank has quantized what it gathered. Megatron (``reuse_grad_buf_for_mxfp8_param_ag``) lets them use the
gradients' storage, which is free just then:

    bucket     GRADIENTS --stage--> STAGED --gather--> GATHERED --copy out--> COPIED --clear--> GRADIENTS
               (step wrote own      (all-gather in     (codes and scales     (zero again)
                shard)               flight or done)    are new)

Element ``e`` as a gradient has bytes ``[4e, 4e + 4)`` with fp32 gradients, as a gathered bf16 value ``[2e, 2e + 2)``.
So a bucket's parameters lie on the gradients of *other* buckets, and one bucket that is not cleared forbids writing
any.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from megabuf_fx.runtime.layout import BufferLayout, ParamSpec


def bucket_names(layout: BufferLayout, params: Sequence[ParamSpec]) -> list[str]:
    """What messages call the buckets of a buffer: ``0 (head.weight ... fc.bias)``."""
    members: list[list[str]] = [[] for _ in layout.buckets]
    for index, slot in reversed(list(zip(layout.params, layout.slots))):
        members[slot.bucket].append(params[index].name)
    return [f"{bucket} ({' ... '.join(dict.fromkeys((m[0], m[-1])))})" for bucket, m in enumerate(members)]


class SharedStorageError(RuntimeError):
    """An operation that would destroy gradients or parameters in the shared storage."""


class SharedPhase(enum.Enum):
    """What one bucket's slice of the shared storage holds."""

    GRADIENTS = "gradients"
    STAGED = "staged parameters of this rank's shard"
    GATHERED = "gathered parameters that are not copied out"
    COPIED = "parameters that are copied out and not cleared"


class SharedStorage:
    """Phases of all buckets of one buffer; ``buckets`` describe them in messages, such as ``3 (h.1.fc ... h.0.fc)``.

    Every method raises ``SharedStorageError``, naming bucket and state, when it comes at the wrong time. Its numbers
    are those of the invariants that Megatron's implementation relies on.
    """

    def __init__(self, buckets: Sequence[str]) -> None:
        self._names = list(buckets)
        self.phases = [SharedPhase.GRADIENTS] * len(buckets)
        self.are_gradients_needed = False
        """Gradients were written and no step has used them."""
        self.is_used_up = False
        """Parameters were staged since gradients were written, so there are none, also where it was cleared since."""

    def write_gradients(self) -> None:
        """The first gradient of a step is about to be written: no bucket may hold parameters (I1, I4)."""
        for bucket, phase in enumerate(self.phases):
            if phase is SharedPhase.COPIED:
                raise SharedStorageError(
                    f"gradients are written, but bucket {self._names[bucket]} still holds {phase.value} (I1); "
                    "clear it first, or they are added to weights"
                )
            if phase is not SharedPhase.GRADIENTS:
                raise SharedStorageError(
                    f"gradients are written, but bucket {self._names[bucket]} still holds {phase.value} (I4); every "
                    "gather must be waited for before the first backward, or weights are lost"
                )
        self.are_gradients_needed = True
        self.is_used_up = False

    def read_gradients(self, what: str) -> None:
        """Somebody (``what``) uses reduced gradients: no parameters may have been staged over them (I2)."""
        held = [(bucket, phase.value) for bucket, phase in enumerate(self.phases) if phase is not SharedPhase.GRADIENTS]
        if self.is_used_up:
            held.append((0, "zeros, after parameters"))
        for bucket, found in held:
            raise SharedStorageError(
                f"{what}, but bucket {self._names[bucket]} already holds {found} (I2): with a shared buffer "
                "gradients end with step; do this before it"
            )

    def release_gradients(self) -> None:
        """The optimizer has used the gradients; norm, clipping and logging are over."""
        self.are_gradients_needed = False

    def stage(self, bucket: int) -> None:
        """This rank's shard of new parameters is written (I2)."""
        if self.are_gradients_needed:
            raise SharedStorageError(
                f"parameters of bucket {self._names[bucket]} are staged while it holds {self.phases[bucket].value} "
                "that are still needed (I2); staging comes after the gradient norm and the update"
            )
        if self.phases[bucket] is not SharedPhase.STAGED:
            self._move(bucket, SharedPhase.GRADIENTS, SharedPhase.STAGED, "staged")
        self.is_used_up = True

    def gather(self, bucket: int) -> None:
        """The all-gather starts."""
        self._move(bucket, SharedPhase.STAGED, SharedPhase.GATHERED, "gathered")

    def copy_out(self, bucket: int) -> None:
        """Codes and scales are made of the gathered values."""
        self._move(bucket, SharedPhase.GATHERED, SharedPhase.COPIED, "copied out")

    def clear(self, bucket: int) -> None:
        """The bucket's slice is zeroed (I3): its own only, and only after it was copied out."""
        self._move(bucket, SharedPhase.COPIED, SharedPhase.GRADIENTS, "cleared")

    def _move(self, bucket: int, before: SharedPhase, after: SharedPhase, what: str) -> None:
        found = self.phases[bucket]
        if found is not before:
            raise SharedStorageError(
                f"bucket {self._names[bucket]} is {what} while it holds {found.value}, expected {before.value}"
                + (" (I3)" if what == "cleared" else "")
            )
        self.phases[bucket] = after
