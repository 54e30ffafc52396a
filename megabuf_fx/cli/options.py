"""The options that ``plan`` and ``ledger`` share, and what they mean together."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from megabuf_fx.cli.errors import CliError
from megabuf_fx.config import MegabufConfig

MODEL_HELP = (
    "module:function that returns a model (called on the meta device), a Hugging Face config name or JSON file, "
    "llama-7b, llama-70b, megatron-llama-7b (fused weights), gpt2 (built in), or a directory of MEGABUF_DUMP."
)


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """Everything that decides what one rank holds."""

    dp: Annotated[
        int | None, typer.Option(min=1, help="Data-parallel ranks, all optimizer instances together. [1]")
    ] = None
    world: Annotated[
        int | None, typer.Option(min=1, help="Ranks of the whole job; then dp = world / (tp * pp).", metavar="RANKS")
    ] = None
    tp: Annotated[
        int,
        typer.Option(
            min=1,
            help="Tensor-parallel ranks. Query, key, value, gate, up, head and embedding weights are divided by rows, "
            "attention output and down by columns, as in Megatron and by their names; the vocabulary is rounded up to "
            "a multiple of 128 * tp; the rest is replicated.",
        ),
    ] = 1
    pp: Annotated[
        int,
        typer.Option(
            min=1,
            help="Pipeline stages: equal runs of the model's layers. The first also has what is defined before "
            "the layers, the last what is defined after them.",
        ),
    ] = 1
    stage: Annotated[
        int, typer.Option(min=0, help="Pipeline stage to look at. Stages after the first have one bucket.")
    ] = 0
    rank: Annotated[int, typer.Option(min=0, help="Data-parallel rank whose shards are shown.")] = 0
    expert_dp: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks that hold the same experts (parameters with allreduce = False). [dp]"),
    ] = None
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        typer.Option(help="Of the parameters. [bf16 for configs; a function's model stays as it is]"),
    ] = None
    use_distributed_optimizer: Annotated[bool, typer.Option(help="Shard optimizer state (ZeRO-1).")] = True
    grad_reduce_in_fp32: Annotated[bool, typer.Option(help="fp32 gradients, whatever the parameters' dtype.")] = False
    bucket_size: Annotated[
        str | None,
        typer.Option(
            metavar="INTEGER|auto",
            help="Elements after which a bucket closes; auto: where they end in the dump. [max(40M, 1M * dp)]",
        ),
    ] = None
    num_buckets: Annotated[int | None, typer.Option(help="About how many buckets to make.")] = None
    disable_bucketing: Annotated[bool, typer.Option("--disable-bucketing", help="One bucket per buffer.")] = False
    overlap_grad_reduce: Annotated[bool, typer.Option(help="Off: one bucket, reduced after backward.")] = True
    pad_buckets_for_high_nccl_busbw: Annotated[
        bool, typer.Option("--pad-buckets-for-high-nccl-busbw", help="Pad bucket ends to multiples of 65536 elements.")
    ] = False
    dense_layout: Annotated[
        bool, typer.Option("--dense-layout", help="No padding; needs --no-use-distributed-optimizer.")
    ] = False
    num_distributed_optimizer_instances: Annotated[
        int, typer.Option(help="Complete sets of shards among the dp ranks (HSDP).")
    ] = 1
    reduce_scatter_with_fp32_accumulation: Annotated[
        bool,
        typer.Option("--reduce-scatter-with-fp32-accumulation", help="Reduce 16-bit gradients by all-to-all."),
    ] = False
    param_name_patterns_for_fp32_local_accumulation: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Names whose 16-bit gradients are summed in fp32; repeatable."),
    ] = None
    fp8_param_gather: Annotated[
        bool,
        typer.Option("--fp8-param-gather", help="Linear weights in fp8, gathered as bytes; MXFP8 unquantized."),
    ] = False
    fp8_recipe: Annotated[
        Literal["tensorwise", "delayed", "mxfp8"], typer.Option(help="Recipe of --fp8-param-gather.")
    ] = "tensorwise"
    fp8_amax_history_len: Annotated[int, typer.Option(help="Steps that --fp8-recipe delayed remembers.")] = 1
    reuse_grad_buf_for_mxfp8_param_ag: Annotated[
        bool,
        typer.Option("--reuse-grad-buf-for-mxfp8-param-ag", help="Gather MXFP8 weights in the gradients' storage."),
    ] = False
    fp4_param_gather: Annotated[bool, typer.Option("--fp4-param-gather", help="Linear weights in NVFP4.")] = False
    quantized_param_name_patterns: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Names of the linear weights that are quantized; repeatable. [all]"),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Print JSON; sizes in elements or bytes, as the keys say.")] = (
        False
    )

    def make_config(self) -> MegabufConfig:
        """The options that are fields of ``MegabufConfig``; what changes neither layout nor memory stays default.

        Raises:
            CliError: what ``MegabufConfig`` refuses.
        """
        known = {field.name for field in dataclasses.fields(MegabufConfig)}
        values = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(LayoutOptions) if field.name in known
        }
        values["bucket_size"] = self._parsed_bucket_size()
        # Typer has lists for options that repeat; without any, the default of the config stands.
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        values = {name: value for name, value in values.items() if value not in (None, ())}
        try:
            return MegabufConfig(**values, pipeline_parallel_rank=self.stage)
        except (TypeError, ValueError) as error:
            raise CliError(str(error)) from error

    def _parsed_bucket_size(self) -> int | str | None:
        if self.bucket_size in (None, "auto"):
            return self.bucket_size
        try:
            return int(str(self.bucket_size))
        except ValueError:
            raise CliError(f"--bucket-size must be a number of elements or auto, got '{self.bucket_size}'") from None
