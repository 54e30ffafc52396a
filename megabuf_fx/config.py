"""``MegabufConfig``: what a user may choose, checked when it is made."""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass
from typing import Any, Literal

INNER_COMPILERS = ("inductor", "aot_eager")


@dataclass(frozen=True, kw_only=True, slots=True)
class MegabufConfig:
    """Options of ``attach``; names and meanings are Megatron's ``DistributedDataParallelConfig`` where it has them.

    Raises:
        TypeError: a field of the wrong type (a bool is not a size).
        ValueError: an unknown name (the message suggests a near one), a value out of range, or two fields that exclude
            each other.
    """

    use_distributed_optimizer: bool = True
    """Shard optimizer state and updates over the data-parallel ranks (ZeRO-1); needs ``DistributedOptimizer``."""
    bucket_size: int | None = None
    """Elements after which a bucket closes; None takes max(40_000_000, 1_000_000 * data-parallel size)."""
    num_buckets: int | None = None
    """About how many buckets to make; excludes ``bucket_size``."""
    grad_reduce_in_fp32: bool = False
    """Accumulate and reduce gradients in fp32, whatever the parameters' dtype."""
    overlap_grad_reduce: bool = True
    """Start a bucket's reduction inside the backward as soon as it is complete. Off: one bucket, reduced at the end."""
    overlap_param_gather: bool = False
    """Gather updated parameters during the next forward instead of inside ``step``. Raw reads of parameters between
    ``step`` and the next forward then need ``buf.sync_params()``."""
    find_unused_parameters: bool = True
    """Tell the ranks, once per step and in one small collective, which parameters got a gradient on any of them; the
    others are left alone by the optimizer. Off: a parameter without gradient counts as having zeros (as in Megatron),
    so weight decay and momentum still move it."""
    average_in_collective: bool = False
    """Let the collective average instead of scaling gradients before it."""
    calculate_per_token_loss: bool = False
    """Sum gradients over ranks; the caller divides by the number of tokens with ``buf.scale_gradients``."""
    pad_buckets_for_high_nccl_busbw: bool = False
    """Pad sharded bucket ends to multiples of 65536 elements."""
    init_sync: bool = True
    """Broadcast parameters and module buffers from the group's first rank in ``attach``, as DDP does."""
    gradient_accumulation_fusion: bool = True
    """Let weight-gradient matrix products accumulate straight into ``main_grad``. A sum of micro-batches is then
    rounded once less."""
    dense_layout: bool = False
    """Megatron's layout without any padding; only without the distributed optimizer. Graphs then take whole buffers,
    because views in it can be misaligned, and identical layers no longer share kernels."""
    inner_compiler: Literal["inductor", "aot_eager"] = "inductor"
    """What compiles the rewritten graphs; ``aot_eager`` runs them op by op, bitwise comparable with eager."""
    dump_dir: str | None = None
    """Write every compiled graph before and after each pass, and the plans, into this directory; also set by the
    environment variable MEGABUF_DUMP."""

    def __new__(cls, **options: Any) -> MegabufConfig:
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise ValueError(f"unknown option '{name}'{suggest(name, known)}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field.name, str(field.type), getattr(self, field.name))
        for name in ("bucket_size", "num_buckets"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be a positive number of {_unit(name)}, got {value}")
        if self.bucket_size is not None and self.num_buckets is not None:
            raise ValueError(
                f"cannot specify both num_buckets={self.num_buckets} and bucket_size={self.bucket_size}; drop one"
            )
        if self.inner_compiler not in INNER_COMPILERS:
            raise ValueError(f"inner_compiler must be one of {INNER_COMPILERS}, got {self.inner_compiler!r}")
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            raise ValueError("overlap_param_gather=True needs use_distributed_optimizer=True: only shards are gathered")
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ValueError("overlap_param_gather=True needs overlap_grad_reduce=True (one bucket cannot overlap)")
        if self.dense_layout and self.use_distributed_optimizer:
            raise ValueError("dense_layout=True needs use_distributed_optimizer=False: shards need padding")
        if self.average_in_collective and self.calculate_per_token_loss:
            raise ValueError("cannot average in the collective (average_in_collective) with calculate_per_token_loss")

    def with_environment(self) -> MegabufConfig:
        """This config with what the environment adds: MEGABUF_DUMP sets ``dump_dir`` where the config does not."""
        dump_dir = self.dump_dir or os.environ.get("MEGABUF_DUMP") or None
        return dataclasses.replace(self, dump_dir=dump_dir)


def suggest(name: str, known: list[str], further: list[str] | None = None) -> str:
    """``; did you mean 'x'?`` when a known or else a further name is near, otherwise the list of known names."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    near = near or difflib.get_close_matches(name, further or [], n=1, cutoff=0.8)
    return f"; did you mean '{near[0]}'?" if near else f"; known names: {', '.join(sorted(known))}"


def _check_type(name: str, annotation: str, value: object) -> None:
    if annotation == "bool":
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {value!r} of type {type(value).__name__}")
    elif annotation.startswith("int"):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    elif value is not None and not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {value!r} of type {type(value).__name__}")


def _unit(name: str) -> str:
    return "elements" if name == "bucket_size" else "buckets"
