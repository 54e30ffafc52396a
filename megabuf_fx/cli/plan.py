"""``megabuf plan``: layout, buckets, shard owners and memory of one rank, without running anything."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from tabulate import tabulate

from megabuf_fx.cli.counting import owned_by_rank, owner_ranks, shard_ranges
from megabuf_fx.cli.job import Job, describe, load_source, make_job
from megabuf_fx.cli.ledger_view import ledger_as_json, ledger_of, ledger_table
from megabuf_fx.cli.options import MODEL_HELP, LayoutOptions
from megabuf_fx.report import plan_as_json, planned_bucket_table
from megabuf_fx.runtime.plan import BucketPlan
from megabuf_fx.runtime.shards import ShardRange


@dataclass(frozen=True, kw_only=True)
class PlanOptions(LayoutOptions):
    """Options of ``megabuf plan``."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]


def show_plan(options: PlanOptions) -> None:
    """Buffers, buckets, shards and memory of one rank, as attach would make them.

    The model is built without memory and the ranks exist in name only, so any size works on any machine. Positions and
    sizes count elements unless a unit is given; 1 GB is 1e9 bytes.

    \b
    Examples:
      megabuf plan gpt2 --dp 8
      megabuf plan llama-70b --world 16384 --tp 8 --pp 4 --stage 3 --grad-reduce-in-fp32
      megabuf plan config.json --dp 64 --bucket-size 20000000 --json
      megabuf plan mypackage.models:build --dp 8 --rank 5
      megabuf plan dumps/rank0 --dp 16
    """
    job = make_job(load_source(options.model, options), options)
    typer.echo(json.dumps(job_as_json(job), indent=1) if options.json else job_as_text(job))


def job_as_text(job: Job) -> str:
    """Everything about one rank, in sections."""
    sections = [
        "\n".join([describe(job), _layout_line(job), *_dump_line(job)]),
        f"buffers\n{_buffer_table(job.plan)}",
        f"buckets, in the order of their reduction\n{planned_bucket_table(job.plan)}",
    ]
    if job.plan.sharded:
        sections.append(f"shards\n{_owner_table(job)}")
        sections.append(f"shards of dp rank {job.parallel.dp_rank}\n{_shard_table(job)}")
    sections.append(f"memory of this rank\n{ledger_table(ledger_of(job))}")
    return "\n\n".join(sections)


def _layout_line(job: Job) -> str:
    plan, config = job.plan, job.config
    cut = f"bucket size {job.threshold:,} elements" if job.threshold is not None else "one bucket per buffer"
    if job.config.chooses_buckets:
        cut = "bucket size auto, with the boundaries of the dump"
    if not plan.sharded:
        return f"not sharded, {cut}"
    instances = config.num_distributed_optimizer_instances
    copies = f" in each of {instances} instances" if instances > 1 else ""
    experts = f", experts over {plan.expert_dp_size:,}" if plan.expert_dp_size != plan.dp_size else ""
    return f"sharded over {plan.dp_size:,} ranks{copies}{experts}; {cut}"


def _dump_line(job: Job) -> list[str]:
    if job.dumped is None:
        return []
    if job.dumped.digest == job.plan.digest:
        return ["equal to the plan in the dump"]
    return [
        f"another plan than that in the dump (dp {job.dumped.dp_size} per instance, "
        f"{'sharded' if job.dumped.sharded else 'not sharded'}), which was made with other options"
    ]


def _buffer_table(plan: BucketPlan) -> str:
    rows = []
    for number, layout in enumerate(plan.layouts):
        elements = sum(plan.params[param].numel for param in layout.params)
        kinds = {plan.params[param].quantized for param in layout.params} - {None}
        key = layout.key
        names = [str(dtype).removeprefix("torch.") for dtype in (key.param_dtype, key.grad_dtype)]
        stored = f"{names[0]} ({kinds.pop()})" if kinds else names[0]
        padding = layout.numel - elements
        rows.append(
            (
                number,
                stored,
                names[1],
                "experts" if key.is_expert_parallel else "dense",
                len(layout.params),
                elements,
                padding,
                f"{padding / layout.numel:.4%}" if layout.numel else "",
                layout.numel,
                len(layout.buckets),
            )
        )
    headers = ("buffer", "param", "grad", "group", "parameters", "elements", "padding", "share", "numel", "buckets")
    return str(tabulate(rows, headers=headers, tablefmt="simple", intfmt=","))


def _owner_table(job: Job) -> str:
    """For each buffer, how evenly parameters are spread: padding gathers at the end of buckets."""
    rows = []
    for number, layout in enumerate(job.plan.layouts):
        size = job.plan.dp_size_of(layout.key)
        owned = owned_by_rank(layout, dp_size=size)
        most, least = max(owned), min(owned)
        rows.append(
            (
                number,
                layout.numel // size,
                f"{most:,} (rank {owned.index(most)})",
                f"{least:,} (rank {owned.index(least)})",
                owned.count(0),
            )
        )
    headers = ("buffer", "numel per rank", "most parameter elements", "least", "ranks with padding only")
    return str(tabulate(rows, headers=headers, tablefmt="simple", intfmt=","))


def _shard_table(job: Job) -> str:
    """One row per bucket: a shard is a run of parameters, of which the first and the last can be cut."""
    rows: list[tuple[Any, ...]] = []
    for number in range(len(job.plan.layouts)):
        for bucket, run in itertools.groupby(_pieces(job, number), key=lambda piece: piece.bucket):
            pieces = list(run)
            elements = sum(piece.numel for piece in pieces)
            last = _piece_text(job, pieces[-1]) if len(pieces) > 1 else ""
            rows.append((number, bucket, pieces[0].start, elements, len(pieces), _piece_text(job, pieces[0]), last))
    if not rows:
        return "padding only"
    headers = ("buffer", "bucket", "start in buffer", "elements", "parameters", "first", "last")
    return str(tabulate(rows, headers=headers, tablefmt="simple", intfmt=","))


def _piece_text(job: Job, piece: ShardRange) -> str:
    spec = job.plan.params[piece.param]
    if piece.numel == spec.numel:
        return spec.name
    return f"{spec.name}[{piece.param_start:,}:{piece.param_start + piece.numel:,}]"


def _pieces(job: Job, buffer: int) -> tuple[ShardRange, ...]:
    return shard_ranges(
        job.plan,
        job.plan.layouts[buffer],
        dp_rank=job.parallel.dp_rank,
        instances=job.config.num_distributed_optimizer_instances,
    )


def job_as_json(job: Job) -> dict[str, Any]:
    """The plan as dumps have it, who owns what, and the ledger.

    Owners are counted among the ranks that share a bucket, from 0 in each instance; ``dp_group`` has global ranks.
    """
    plan, parallel = job.plan, job.parallel
    owners: list[dict[str, Any]] = []
    shards: list[dict[str, Any]] = []
    if plan.sharded:
        for number, layout in enumerate(plan.layouts):
            owners += [
                {"param": plan.params[param].name, "first_rank": first, "last_rank": last}
                for param, (first, last) in owner_ranks(layout, dp_size=plan.dp_size_of(layout.key)).items()
            ]
            shards += [
                {
                    "param": plan.params[piece.param].name,
                    "buffer": number,
                    "bucket": piece.bucket,
                    "start": piece.start,
                    "end": piece.end,
                    "param_start": piece.param_start,
                }
                for piece in _pieces(job, number)
            ]
    return {
        "model": job.model,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "dp": parallel.dp,
        "stage": parallel.stage,
        "dp_rank": parallel.dp_rank,
        "dp_group": {"first": parallel.dp_ranks[0], "last": parallel.dp_ranks[-1], "step": parallel.tp},
        "bucket_size": "auto" if job.config.chooses_buckets else job.threshold,
        "plan": plan_as_json(plan),
        "owners": owners,
        "shards": shards,
        "ledger": ledger_as_json(ledger_of(job)),
    }
