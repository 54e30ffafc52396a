"""From options to a plan: which rank of which job is looked at."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

import megabuf_fx._compat as _compat
from megabuf_fx.checks import check_groups
from megabuf_fx.cli.errors import CliError
from megabuf_fx.cli.models import DTYPES, DumpedModel, MetaModel, load_model
from megabuf_fx.cli.options import LayoutOptions
from megabuf_fx.cli.stages import params_of_rank
from megabuf_fx.config import MegabufConfig
from megabuf_fx.planning import bucket_threshold, plan_model
from megabuf_fx.quantization import choose_quantized
from megabuf_fx.runtime.layout import ParamSpec
from megabuf_fx.runtime.plan import BucketPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """Sizes of the job and the place of the rank that is looked at."""

    tp: int
    pp: int
    dp: int
    stage: int
    dp_rank: int

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def dp_ranks(self) -> list[int]:
        """Global ranks of the data-parallel group with tensor-parallel rank 0, in Megatron's order ``tp-dp-pp``."""
        first = self.tp * self.dp * self.stage
        return list(range(first, first + self.tp * self.dp, self.tp))


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A planned rank."""

    model: str
    parallel: Parallel
    config: MegabufConfig
    plan: BucketPlan
    threshold: int | None
    """Elements after which a bucket closes; None where that is not what decides."""
    dumped: DumpedModel | None
    """Where the parameters are from, if from a dump."""

    @property
    def elements(self) -> int:
        """Parameter elements of this rank."""
        return sum(spec.numel for spec in self.plan.params)


def parallel_of(options: LayoutOptions, *, default_dp: int = 1) -> Parallel:
    """The sizes that ``options`` mean.

    Raises:
        CliError: sizes that do not divide, a stage or rank that is not there.
    """
    tp, pp = options.tp, options.pp
    if options.world is None:
        dp = options.dp or default_dp
    else:
        dp, rest = divmod(options.world, tp * pp)
        if rest or not dp:
            raise CliError(f"--world {options.world} is no multiple of tp * pp = {tp * pp}")
        if options.dp not in (None, dp):
            raise CliError(f"--world {options.world} with tp {tp} and pp {pp} means dp {dp}, not --dp {options.dp}")
    if options.stage >= pp:
        raise CliError(f"--stage {options.stage} is not one of {pp} stages, counted from 0")
    if options.rank >= dp:
        raise CliError(f"--rank {options.rank} is not one of {dp} data-parallel ranks, counted from 0")
    return Parallel(tp=tp, pp=pp, dp=dp, stage=options.stage, dp_rank=options.rank)


def load_source(model: str, options: LayoutOptions) -> MetaModel | DumpedModel:
    """The model that is named, in the dtype that is asked for."""
    return load_model(model, dtype=DTYPES[options.dtype] if options.dtype else None)


def make_job(source: MetaModel | DumpedModel, options: LayoutOptions) -> Job:
    """Plan one rank.

    Raises:
        CliError: anything that ``attach`` would refuse, or an option that does not fit the model.
    """
    dumped = source if isinstance(source, DumpedModel) else None
    parallel = parallel_of(options, default_dp=dumped.dp_size if dumped is not None else 1)
    config, specs = _quantized_specs(source, parallel, options.make_config())
    ends = None
    if config.chooses_buckets:
        if dumped is None:
            raise CliError(
                "--bucket-size auto is decided when a model is attached to its ranks; give a number of elements, or "
                "the dump of such a run (MEGABUF_DUMP) as MODEL"
            )
        ends = dumped.bucket_ends
    with _groups(parallel, options.expert_dp, specs) as (group, expert_group):
        try:
            check_groups(specs, config, group, expert_group)
            plan = plan_model(
                config,
                specs,
                dp_size=group.size(),
                expert_dp_size=expert_group.size() if expert_group is not None else None,
                bucket_size=ends,
            )
        except ValueError as error:
            raise CliError(str(error)) from error
    return Job(
        model=source.name,
        parallel=parallel,
        config=config,
        plan=plan,
        threshold=bucket_threshold(config, specs, dp_size=parallel.dp) if ends is None else None,
        dumped=dumped,
    )


def _quantized_specs(
    source: MetaModel | DumpedModel, parallel: Parallel, config: MegabufConfig
) -> tuple[MegabufConfig, tuple[ParamSpec, ...]]:
    """The rank's parameters as they are stored, and the config with their format where a dump says which."""
    if isinstance(source, DumpedModel):
        if parallel.tp * parallel.pp > 1:
            raise CliError("a dump holds what one rank has; --tp and --pp are for whole models")
        return _config_of_dump(source, config), source.specs
    params = params_of_rank(source.module, tp=parallel.tp, pp=parallel.pp, stage=parallel.stage)
    try:
        return config, tuple(choose_quantized(params.specs, params.linear_weights, config))
    except ValueError as error:
        raise CliError(str(error)) from error


def _config_of_dump(dumped: DumpedModel, config: MegabufConfig) -> MegabufConfig:
    """``config`` with the format in which the dump's parameters are stored. Options may repeat it, which is how to say
    what a dump does not (a history, shared storage)."""
    stored = next((spec.quantized for spec in dumped.specs if spec.quantized), None)
    if config.quantized_param_name_patterns != MegabufConfig().quantized_param_name_patterns:
        raise CliError("a dump says which parameters are quantized; leave out --quantized-param-name-patterns")
    if config.quantization is not None and config.quantization != stored:
        raise CliError(f"the parameters of the dump are stored as {stored or 'they are'}, not as {config.quantization}")
    if stored is None or config.quantization is not None:
        return config
    try:
        if stored == "nvfp4":
            return dataclasses.replace(config, fp4_param_gather=True)
        recipe: Literal["tensorwise", "mxfp8"] = "mxfp8" if stored == "mxfp8" else "tensorwise"
        return dataclasses.replace(config, fp8_param_gather=True, fp8_recipe=recipe)
    except ValueError as error:
        raise CliError(str(error)) from error


@contextlib.contextmanager
def _groups(
    parallel: Parallel, expert_dp: int | None, specs: tuple[ParamSpec, ...]
) -> Iterator[tuple[dist.ProcessGroup, dist.ProcessGroup | None]]:
    """The process groups that ``attach`` would be given on this rank, in a world that exists in name only."""
    has_experts = any(not spec.allreduce for spec in specs)
    if expert_dp is not None and not has_experts:
        raise CliError("--expert-dp is for models with expert parameters (allreduce = False); this one has none")
    ranks = parallel.dp_ranks
    with _compat.fake_process_group(world_size=parallel.world, rank=ranks[parallel.dp_rank]):
        group = dist.new_group(ranks)
        expert_group = None
        if has_experts:
            size = expert_dp or parallel.dp
            if parallel.dp % size:
                raise CliError(f"--expert-dp {size} does not divide the {parallel.dp} data-parallel ranks")
            every = parallel.dp // size
            expert_group = dist.new_group(ranks[parallel.dp_rank % every :: every])
        yield group, expert_group


def describe(job: Job) -> str:
    """One line: which rank of which job."""
    p = job.parallel
    where = f"tp {p.tp} * pp {p.pp} * dp {p.dp} = {p.world:,} ranks" if p.tp * p.pp > 1 else f"dp {p.dp:,}"
    stage = f", stage {p.stage} of {p.pp}" if p.pp > 1 else ""
    return f"{job.model}: {job.elements:,} parameters on this rank ({where}{stage}, dp rank {p.dp_rank})"
