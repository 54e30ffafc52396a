"""Numbers of the ledger for a model of which only the number of parameters is known: even shards, no padding."""

from __future__ import annotations

from fractions import Fraction

from megabuf_fx.cli.counting import block_amax_slots, block_scale_slots
from megabuf_fx.cli.errors import CliError
from megabuf_fx.cli.job import parallel_of
from megabuf_fx.cli.ledger import BufferKind, Setup, Terms
from megabuf_fx.cli.models import DTYPES
from megabuf_fx.cli.options import LayoutOptions
from megabuf_fx.planning import bucket_threshold
from megabuf_fx.quantization import check_dtypes
from megabuf_fx.runtime.layout import ParamSpec, bucket_end_divisor


def setup_of_options(options: LayoutOptions) -> Setup:
    """What decides the formulas when all parameters share one buffer."""
    config = options.make_config()
    quantized = config.quantization
    name = options.dtype or "bf16"
    weight_bytes = DTYPES[name].itemsize
    if quantized is not None:
        try:
            check_dtypes({DTYPES[name]})
        except ValueError as error:
            raise CliError(str(error)) from error
    return Setup(
        buffers=(
            BufferKind(
                name=quantized or name,
                weight_bytes=weight_bytes,
                grad_bytes=4 if config.grad_reduce_in_fp32 else weight_bytes,
                quantized=quantized,
            ),
        ),
        sharded=config.use_distributed_optimizer,
        is_cut=estimated_threshold(options, 0) is not None,
        has_instances=config.num_distributed_optimizer_instances > 1,
        reuses_grad_buffer=config.reuse_grad_buf_for_mxfp8_param_ag,
        sums_in_fp32=bool(config.param_name_patterns_for_fp32_local_accumulation),
        # A group of one reduces nothing.
        reduces_by_all_to_all=config.reduce_scatter_with_fp32_accumulation and parallel_of(options).dp > 1,
    )


def estimated_terms(options: LayoutOptions, params: float) -> Terms:
    """The numbers for ``params`` parameters of the whole model, divided evenly over ``tp * pp`` ranks.

    Raises:
        CliError: no positive number of parameters, or optimizer instances that do not divide ``dp``.
    """
    if not 0 < params < float("inf"):
        raise CliError(f"--params must be a positive number, got {params}")
    parallel = parallel_of(options)
    config = options.make_config()
    instances = config.num_distributed_optimizer_instances
    if parallel.dp % instances:
        raise CliError(f"num_distributed_optimizer_instances={instances} does not divide {parallel.dp} ranks")
    elements = round(Fraction(params) / (parallel.tp * parallel.pp))
    shards = parallel.dp // instances
    threshold = estimated_threshold(options, elements)
    return Terms(
        P=elements,
        N=elements,
        owned=Fraction(elements, shards) if config.use_distributed_optimizer else elements,
        shards=shards,
        instances=instances,
        B=min(threshold or elements, elements),
        M=elements if config.param_name_patterns_for_fp32_local_accumulation else 0,
        S=0,  # unknown, as is n
        n=0,
        C=block_scale_slots(elements, config.quantization),
        A=block_amax_slots(elements, config.quantization),
        H=config.fp8_amax_history_len,
        buckets=max(1, elements // threshold) if threshold is not None else 1,
        u=bucket_end_divisor(
            shards,
            pad_for_high_busbw=config.pad_buckets_for_high_nccl_busbw,
            packed=config.quantization == "nvfp4",
        ),
    )


def estimated_threshold(options: LayoutOptions, elements: int) -> int | None:
    """The bucket threshold for a rank with so many parameter elements."""
    specs = [ParamSpec("all", (elements,), DTYPES["bf16"])]
    try:
        return bucket_threshold(options.make_config(), specs, dp_size=parallel_of(options).dp)
    except ValueError as error:
        raise CliError(str(error)) from error
