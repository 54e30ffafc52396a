"""``MegabufConfig``: what a user may choose, checked when it is made."""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass
from typing import Any, Literal

_CHOICES = {
    "inner_compiler": ("inductor", "aot_eager"),
    "fp8_recipe": ("tensorwise", "delayed", "mxfp8"),
    "fp8_amax_compute_algo": ("most_recent", "max"),
    "mxfp8_scale_rule": ("rceil", "floor"),
}

_NEED_DISTRIBUTED_OPTIMIZER = (
    "overlap_param_gather",
    "num_distributed_optimizer_instances",
    "reduce_scatter_with_fp32_accumulation",
    "fp8_param_gather",
    "fp4_param_gather",
)
_NEED_AUTO = ("link_gbps", "link_alpha_us", "device_tflops", "device_memory_gbs", "device_op_us")
_NEED_OVERLAP_PARAM_GATHER = (
    "align_param_gather",
    "overlap_param_gather_with_optimizer_step",
    "param_gather_prefetch",
    "debug_nan_stale_params",
)


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
    bucket_size: int | Literal["auto"] | None = None
    """Elements after which a bucket closes; None takes max(40_000_000, 1_000_000 * data-parallel size). "auto" traces a
    step (``attach(..., example_inputs=...)``) and closes buckets where it is predicted to wait least for reductions and
    gathers, with the rates below; each attach decides anew."""
    link_gbps: float | None = None
    """For "auto": bandwidth between ranks, 10**9 bits per second and direction. This rate and the next four are those
    of ``megabuf explain``; None is measured in attach, and the slowest rank's value counts."""
    link_alpha_us: float | None = None
    """For "auto": latency of one message, microseconds."""
    device_tflops: float | None = None
    """For "auto": arithmetic of one rank, 10**12 operations per second."""
    device_memory_gbs: float | None = None
    """For "auto": memory bandwidth of one rank, 10**9 bytes per second."""
    device_op_us: float | None = None
    """For "auto": least time of one operation, microseconds."""
    num_buckets: int | None = None
    """About how many buckets to make; excludes ``bucket_size``."""
    disable_bucketing: bool = False
    """One bucket per buffer and one bucket group for all, as Megatron trains every model chunk but the first."""
    pipeline_parallel_rank: int = 0
    """Pipeline stage of this model. Stages after the first have nothing left to overlap with and get one bucket per
    buffer, as in Megatron."""
    grad_reduce_in_fp32: bool = False
    """Accumulate and reduce gradients in fp32, whatever the parameters' dtype."""
    overlap_grad_reduce: bool = True
    """Start a bucket's reduction inside the backward as soon as it is complete. Off: one bucket, reduced at the end."""
    overlap_param_gather: bool = False
    """Gather updated parameters during the next forward instead of inside ``step``. Raw reads of parameters between
    ``step`` and the next forward then need ``buf.sync_params()``."""
    align_param_gather: bool = False
    """The caller starts gathers (``buf.start_param_sync``, Megatron ``param_sync_func``); a forward only waits, and
    starts what was not started when it needs it."""
    overlap_param_gather_with_optimizer_step: bool = False
    """Start this model's gathers at the end of its ``step``, under the steps of other models (pipeline chunks)."""
    param_gather_prefetch: int | None = None
    """Gathers in flight beyond the bucket group that a forward waits for. None starts all at once, 1 is Megatron's
    chain, 0 starts each when it is needed."""
    debug_nan_stale_params: bool = False
    """Debugging aid: fill what other ranks own with NaN between ``step`` and the gather, so that a read without
    ``sync_params`` shows."""
    find_unused_parameters: bool = True
    """Tell the ranks, once per step and in one small collective, which parameters got a gradient on any of them; the
    others are left alone by the optimizer. Off: a parameter without gradient counts as having zeros (as in Megatron),
    so weight decay and momentum still move it. An output of a compiled graph that the loss ignores gives its
    parameters zeros rather than no gradient (AOTAutograd), so they count as used."""
    average_in_collective: bool = False
    """Let the collective average instead of scaling gradients before it. Megatron refuses it for some group sizes of
    experts, by comparing floats; here every size works."""
    calculate_per_token_loss: bool = False
    """Sum gradients over ranks; the caller divides by the number of tokens with ``buf.scale_gradients``."""
    reduce_scatter_with_fp32_accumulation: bool = False
    """Reduce 16-bit gradients by all-to-all and a local sum in fp32: the traffic of 16 bits, one rounding. fp32 buffers
    reduce as always. Unlike Megatron's it averages, too, and concerns no other model of the process."""
    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()
    """Shell patterns of parameter names (``all`` matches each) whose 16-bit gradients are summed over micro-batches in
    fp32; what is sent stays 16 bits, and ``main_grad`` holds values of that precision after the reduction."""
    num_distributed_optimizer_instances: int = 1
    """Divide the data-parallel group into that many runs of neighbouring ranks, each with a complete set of shards
    (HSDP): gradients are reduce-scattered inside and all-reduced across, parameters gathered inside only."""
    check_for_nan_in_grad: bool = False
    """Look for NaN and Inf in every bucket before it is sent; the step then ends in an error on every rank, naming the
    parameter. Costs a pass over the gradients and one small collective per step."""
    check_for_large_grads: bool = False
    """Log a warning for bucket groups whose norm is over ten times the largest so far."""
    check_for_drift_every: int | None = None
    """Every that many steps, compare the parameters of all ranks bit by bit (digests, one small collective); ranks that
    differ are an error that names the first parameter and the ranks."""
    pad_buckets_for_high_nccl_busbw: bool = False
    """Pad sharded bucket ends to multiples of 65536 elements."""
    nccl_ub: bool = False
    """Allocate buffers from NCCL's own memory and register them with its communicators (user buffer registration). On
    GPUs with NCCL and several ranks only."""
    init_sync: bool = True
    """Broadcast parameters and module buffers from the group's first rank in ``attach``, as DDP does."""
    gradient_accumulation_fusion: bool = True
    """Let matrix products that are weight gradients accumulate straight into ``main_grad``, and the rows of embedding
    gradients, too, so that no temporary of a parameter's size is made. A sum of micro-batches is then rounded once less
    (products), or after each row (embeddings)."""
    dense_layout: bool = False
    """Megatron's layout without any padding; only without the distributed optimizer. Graphs then take whole buffers,
    because views in it can be misaligned, and identical layers no longer share kernels."""
    inner_compiler: Literal["inductor", "aot_eager"] = "inductor"
    """What compiles the rewritten graphs; ``aot_eager`` runs them op by op, bitwise comparable with eager."""
    layer_wise_optimizer: bool = False
    """Lay matrices out whole, each within the shard of one rank, for optimizers that need that (Muon); embeddings and
    output layers (``is_embedding_or_output_parameter`` on the parameter) and vectors are sharded as always. Without
    the distributed optimizer gradients are all-reduced, every parameter has an owner, and updated parameters are
    gathered through the gradients' storage."""
    fp8_param_gather: bool = False
    """Keep the weights of linear layers as fp8 codes and scales, made from fp32 masters in ``step``, and gather bytes.
    Forward and backward dequantize them to the parameter's dtype (Megatron ``fp8_param_gather``)."""
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8"] = "tensorwise"
    """Scales of fp8: one per weight from its own values, from those of earlier steps, or one per 32 elements (OCP MX).
    MXFP8 gathers 16-bit values, and every rank quantizes what it gathered."""
    fp8_amax_history_len: int = 1
    """Steps that delayed scaling remembers."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """Which amax of the history sets a delayed scale."""
    fp8_margin: int = 0
    """Delayed scales are divided by 2 to this power."""
    mxfp8_scale_rule: Literal["rceil", "floor"] = "rceil"
    """How a block's scale follows from its amax: no value saturates (TransformerEngine), or OCP MX v1.0's rule, with
    which the largest can."""
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    """Gather MXFP8 weights through the gradients' storage, which saves 2 bytes per element; gradients then end with
    ``step``."""
    fp4_param_gather: bool = False
    """The same with NVFP4: half a byte per element, a scale for every 16 x 16 elements and one per weight."""
    quantized_param_name_patterns: tuple[str, ...] = ("all",)
    """Which weights are quantized: shell patterns of names, among ``weight`` of ``nn.Linear`` (no subclass) whose shape
    divides into blocks. ``all`` matches each."""
    dump_dir: str | None = None
    """Write every compiled graph before and after each pass, and the plans, into this directory; also set by the
    environment variable MEGABUF_DUMP."""
    profile: bool = False
    """Record when each compiled graph runs and when each collective starts, finishes and is waited for, in the last 20
    steps, into files beside the graphs in ``dump_dir``; also set by the environment variable MEGABUF_PROFILE=1."""

    def __new__(cls, **options: Any) -> MegabufConfig:
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise ValueError(f"unknown option '{name}'{suggest(name, known)}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field.name, str(field.type), getattr(self, field.name))
        for name, unit in (
            ("bucket_size", "elements"),
            ("num_buckets", "buckets"),
            ("num_distributed_optimizer_instances", "instances"),
            ("check_for_drift_every", "steps"),
            ("fp8_amax_history_len", "steps"),
            ("link_gbps", "10**9 bits per second"),
            ("device_tflops", "10**12 operations per second"),
            ("device_memory_gbs", "10**9 bytes per second"),
        ):
            value = getattr(self, name)
            if value is not None and value != "auto" and not value > 0:
                raise ValueError(f"{name} must be a positive number of {unit}, got {value}")
        for name in ("pipeline_parallel_rank", "param_gather_prefetch", "fp8_margin", "link_alpha_us", "device_op_us"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if self.bucket_size is not None and self.num_buckets is not None:
            raise ValueError(
                f"cannot specify both num_buckets={self.num_buckets} and bucket_size={self.bucket_size}; drop one"
            )
        if self.bucket_size == "auto" and self.disable_bucketing:
            raise ValueError("bucket_size='auto' chooses buckets, disable_bucketing=True makes one of all; drop one")
        for name in _NEED_AUTO:
            if self._is_set(name) and self.bucket_size != "auto":
                raise ValueError(f"{name}={getattr(self, name)!r} needs bucket_size='auto'")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")
        for name in _NEED_DISTRIBUTED_OPTIMIZER:
            if name == "overlap_param_gather" and self.layer_wise_optimizer:
                continue
            if self._is_set(name) and not self.use_distributed_optimizer:
                raise ValueError(f"{name}={getattr(self, name)!r} needs use_distributed_optimizer=True (shards)")
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ValueError("overlap_param_gather=True needs overlap_grad_reduce=True (one bucket cannot overlap)")
        for name in _NEED_OVERLAP_PARAM_GATHER:
            if self._is_set(name) and not self.overlap_param_gather:
                raise ValueError(f"{name}={getattr(self, name)!r} needs overlap_param_gather=True")
        if self.align_param_gather and self.overlap_param_gather_with_optimizer_step:
            raise ValueError(
                "align_param_gather leaves starting gathers to the caller, overlap_param_gather_with_optimizer_step to "
                "the optimizer; drop one"
            )
        if self.dense_layout and self.use_distributed_optimizer:
            raise ValueError("dense_layout=True needs use_distributed_optimizer=False: shards need padding")
        if self.average_in_collective and self.calculate_per_token_loss:
            raise ValueError("cannot average in the collective (average_in_collective) with calculate_per_token_loss")
        if self.num_distributed_optimizer_instances > 1 and self.reduce_scatter_with_fp32_accumulation:
            raise ValueError(
                "reduce_scatter_with_fp32_accumulation=True with num_distributed_optimizer_instances="
                f"{self.num_distributed_optimizer_instances}: shards are summed in 16 bits across instances; drop one"
            )
        if self.param_name_patterns_for_fp32_local_accumulation and self.grad_reduce_in_fp32:
            raise ValueError(
                "param_name_patterns_for_fp32_local_accumulation with grad_reduce_in_fp32=True: every gradient is "
                "accumulated in fp32 already; drop one"
            )

        self._check_quantization()

    @property
    def chooses_buckets(self) -> bool:
        """Whether ``attach`` has to find out where buckets end; pipeline stages after the first, and backwards without
        overlap, have one bucket per buffer whatever ``bucket_size`` says."""
        return self.bucket_size == "auto" and self.overlap_grad_reduce and self.pipeline_parallel_rank == 0

    @property
    def quantization(self) -> Literal["fp8", "mxfp8", "nvfp4"] | None:
        """The format of quantized weights."""
        if self.fp4_param_gather:
            return "nvfp4"
        if self.fp8_param_gather:
            return "mxfp8" if self.fp8_recipe == "mxfp8" else "fp8"
        return None

    def _check_quantization(self) -> None:
        if self.fp8_param_gather and self.fp4_param_gather:
            raise ValueError("a weight has one format: drop fp8_param_gather or fp4_param_gather")
        is_mxfp8 = self.quantization == "mxfp8"
        is_delayed = self.fp8_param_gather and self.fp8_recipe == "delayed"
        for name, need, is_there in (
            ("fp8_recipe", "fp8_param_gather=True", self.fp8_param_gather),
            ("quantized_param_name_patterns", "fp8_param_gather=True or fp4_param_gather=True", self.quantization),
            ("fp8_amax_history_len", "fp8_param_gather=True with fp8_recipe='delayed'", is_delayed),
            ("fp8_amax_compute_algo", "fp8_param_gather=True with fp8_recipe='delayed'", is_delayed),
            ("fp8_margin", "fp8_param_gather=True with fp8_recipe='delayed'", is_delayed),
            ("mxfp8_scale_rule", "fp8_param_gather=True with fp8_recipe='mxfp8'", is_mxfp8),
            ("reuse_grad_buf_for_mxfp8_param_ag", "fp8_param_gather=True with fp8_recipe='mxfp8'", is_mxfp8),
        ):
            if self._is_set(name) and not is_there:
                raise ValueError(f"{name}={getattr(self, name)!r} needs {need}")

    def _is_set(self, name: str) -> bool:
        (default,) = (field.default for field in dataclasses.fields(self) if field.name == name)
        return bool(getattr(self, name) != default)

    def with_environment(self) -> MegabufConfig:
        """This config with what the environment adds: MEGABUF_DUMP sets ``dump_dir`` where the config does not,
        MEGABUF_PROFILE=1 sets ``profile``.

        Raises:
            ValueError: ``profile`` without a directory to write to.
        """
        dump_dir = self.dump_dir or os.environ.get("MEGABUF_DUMP") or None
        profile = self.profile or os.environ.get("MEGABUF_PROFILE", "0") not in ("", "0")
        if profile and dump_dir is None:
            raise ValueError(
                "profile=True (MEGABUF_PROFILE=1) needs dump_dir (MEGABUF_DUMP=dir), where times are written"
            )
        return dataclasses.replace(self, dump_dir=dump_dir, profile=profile)


def suggest(name: str, known: list[str], further: list[str] | None = None) -> str:
    """``; did you mean 'x'?`` when a known or else a further name is near, otherwise the list of known names."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    near = near or difflib.get_close_matches(name, further or [], n=1, cutoff=0.8)
    return f"; did you mean '{near[0]}'?" if near else f"; known names: {', '.join(sorted(known))}"


def _check_type(name: str, annotation: str, value: object) -> None:
    if annotation == "bool":
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {value!r} of type {type(value).__name__}")
    elif "'auto'" in annotation and isinstance(value, str):
        if value != "auto":
            raise ValueError(f'{name} must be a number or "auto", got {value!r}')
    elif annotation.startswith("float"):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    elif annotation.startswith("int"):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    elif annotation.startswith("tuple"):
        if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
            raise TypeError(f"{name} must be a tuple of str, got {value!r} of type {type(value).__name__}")
    elif value is not None and not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {value!r} of type {type(value).__name__}")
