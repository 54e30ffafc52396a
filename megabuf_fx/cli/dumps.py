"""Commands that read a dump: ``explain``, ``timeline``, ``graph``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from megabuf_fx.cli.command import add_command
from megabuf_fx.cli.dump_files import Dump, read_dump
from megabuf_fx.cli.errors import CliError
from megabuf_fx.cli.explain import (
    bucket_rows,
    comparison_rows,
    differences,
    explain_passes,
    rates,
    schedule_rows,
    summary,
)
from megabuf_fx.cli.graph import dot_of, graph_svg
from megabuf_fx.cli.schedule import (
    Schedule,
    calibrate,
    measured,
    micro_batches_of,
    phases_of,
    predict,
    typical_step,
)
from megabuf_fx.cli.svg import draw, stacked
from megabuf_fx.cli.timeline import page_of
from megabuf_fx.cli.trace import chrome_trace
from megabuf_fx.cost_model import Device, Link


@dataclass(frozen=True, kw_only=True)
class DumpOptions:
    """Options of every command that reads a dump."""

    path: Annotated[Path, typer.Argument(metavar="DUMP", help="The directory that MEGABUF_DUMP named.")]
    rank: Annotated[int, typer.Option(help="Whose dump to read.", min=0)] = 0


@dataclass(frozen=True, kw_only=True)
class StepOptions(DumpOptions):
    """Options of commands that predict a step."""

    gbps: Annotated[
        float, typer.Option(help="Bandwidth of the link, 10**9 bits per second and direction.", min=1e-6)
    ] = 400
    alpha_us: Annotated[float, typer.Option(help="Latency of one message, microseconds.", min=0)] = 10
    tflops: Annotated[float, typer.Option(help="Arithmetic of one rank, 10**12 operations per second.", min=1e-6)] = 400
    memory_gbs: Annotated[
        float, typer.Option(help="Memory bandwidth of one rank, 10**9 bytes per second.", min=1e-6)
    ] = 3000
    op_us: Annotated[float, typer.Option(help="Least time of one operation, microseconds.", min=0)] = 2
    micro_batches: Annotated[
        int | None,
        typer.Option(
            help="Micro-batches in a step; default: as recorded, otherwise 2 if some backward accumulates.", min=1
        ),
    ] = None
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="DUMP",
            help="Take the rates from the times that this dump recorded (MEGABUF_PROFILE=1) instead of the options.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(StepOptions):
    """Options of ``megabuf explain``."""

    passes: Annotated[bool, typer.Option("--passes", help="Show the diff of the graph after each pass.")] = False
    diff: Annotated[
        Path | None, typer.Option(metavar="OTHER", help="Only compare with another dump; exit 1 if they differ.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class TimelineOptions(StepOptions):
    """Options of ``megabuf timeline``."""

    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the page here.")] = None
    svg: Annotated[Path | None, typer.Option(help="Write the pictures here, one below the other.")] = None
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto or Chrome here.")] = None


@dataclass(frozen=True, kw_only=True)
class GraphOptions(DumpOptions):
    """Options of ``megabuf graph``."""

    dot: Annotated[Path | None, typer.Option(help="Write Graphviz text here; - for standard output.")] = None
    svg: Annotated[Path | None, typer.Option(help="Write a picture here; - for standard output.")] = None
    variant: Annotated[str | None, typer.Option(metavar="NAME", help="Only this one, as backward_overwrite_sync.")] = (
        None
    )


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is expected of a dump, and what its run recorded."""

    device: Device
    link: Link
    micro_batches: int
    predicted: Schedule
    recorded: Schedule | None


def add_dump_commands(app: typer.Typer) -> None:
    """Add the commands of this file to ``app``."""
    add_command(app, "explain", ExplainOptions, explain)
    add_command(app, "timeline", TimelineOptions, timeline)
    add_command(app, "graph", GraphOptions, graph)


def explain(options: ExplainOptions) -> None:
    """Explain a dump: what each pass changed, what is in each bucket, when it travels, and what is exposed.

    Write a dump by running the program with MEGABUF_DUMP=DIR; with MEGABUF_PROFILE=1 it also records times, and
    predicted and measured times are shown side by side. Exposed is how long computing stands still for a bucket.

    \b
    Examples:
      megabuf explain DIR
      megabuf explain DIR --gbps 100 --alpha-us 20 --tflops 300
      megabuf explain DIR --calibrate DIR       rates from the times recorded in DIR
      megabuf explain DIR --passes              with the diff of the graph after each pass
      megabuf explain NEW --diff OLD            exits with 1 if layout or schedule changed, for CI
    """
    dump = read_dump(options.path, rank=options.rank)
    if options.diff is not None:
        found = differences(read_dump(options.diff, rank=options.rank), dump)
        typer.echo("\n".join(found) or "same layout, same schedule")
        raise typer.Exit(int(bool(found)))
    step = _predict(dump, options)
    sections = [explain_passes(variant, with_text=options.passes) for variant in dump.variants]
    sections.append("BUCKETS, in the order of their reductions\n" + bucket_rows(dump))
    sections.append(
        f"ONE STEP of {_counted(step.micro_batches, 'micro-batch', 'es')}, times in us\n"
        + f"{rates(step.device, step.link)}\n"
        + schedule_rows(step.predicted, dump.groups)
        + f"\n{summary(step.predicted)}"
    )
    if step.recorded is not None:
        sections.append(
            f"EXPOSED, predicted and measured\n{comparison_rows(dump, step.predicted)}\n{summary(step.recorded)}"
        )
    typer.echo("\n\n".join(sections))


def timeline(options: TimelineOptions) -> None:
    """Draw one training step: compute, communication, and every bucket, predicted and (MEGABUF_PROFILE=1) measured.

    The page needs nothing but itself. Hover or press Tab and the arrow keys for details, + and - to zoom.

    \b
    Examples:
      megabuf timeline DIR -o step.html
      megabuf timeline DIR --gbps 25 -o slow-link.html --svg step.svg
      megabuf timeline DIR --trace step.json    for https://ui.perfetto.dev or chrome://tracing
    """
    if options.output is None and options.svg is None and options.trace is None:
        raise CliError("nothing to write; give -o page.html, --svg picture.svg or --trace trace.json")
    dump = read_dump(options.path, rank=options.rank)
    step = _predict(dump, options)
    schedules = [step.predicted, *([step.recorded] if step.recorded is not None else [])]
    if options.output is not None:
        page = page_of(
            schedules,
            dump.groups,
            title=f"megabuf: {_counted(len(dump.groups), 'bucket')}, rank {options.rank} of a step of "
            + _counted(step.micro_batches, "micro-batch", "es"),
            rates=f"Predicted for: {rates(step.device, step.link)}",
            comparison=comparison_rows(dump, step.predicted) if step.recorded is not None else "",
        )
        _write(options.output, page)
    if options.svg is not None:
        _write(options.svg, stacked([draw(schedule, dump.groups) for schedule in schedules]))
    if options.trace is not None:
        _write(options.trace, json.dumps(chrome_trace(schedules, dump.groups)))


def graph(options: GraphOptions) -> None:
    """Draw the graphs around their bucket boundaries; what is computed in between is folded, one box per module.

    \b
    Examples:
      megabuf graph DIR --svg graph.svg
      megabuf graph DIR --variant backward_overwrite_sync --dot - | dot -Tpdf > graph.pdf
    """
    if options.dot is None and options.svg is None:
        raise CliError("nothing to write; give --dot graph.dot or --svg graph.svg")
    dump = read_dump(options.path, rank=options.rank)
    chosen = [
        entry for entry in dump.variants if options.variant in (None, entry.name, f"graph{entry.graph}_{entry.name}")
    ]
    if not chosen:
        raise CliError(
            f"no variant '{options.variant}'; the dump has {', '.join(entry.name for entry in dump.variants)}"
        )
    if options.dot is not None:
        _write(options.dot, dot_of(chosen, dump.groups))
    if options.svg is not None:
        _write(options.svg, graph_svg(chosen, dump.groups))


def _predict(dump: Dump, options: StepOptions) -> Prediction:
    device = Device(options.tflops, options.memory_gbs, options.op_us)
    link = Link(options.gbps, options.alpha_us)
    recorded = typical_step(dump.steps) if dump.steps else None
    if options.calibrate is not None:
        source = read_dump(options.calibrate, rank=dump.rank)
        if not source.steps:
            raise CliError(f"{options.calibrate} has no recorded times; run the program with MEGABUF_PROFILE=1, too")
        fitted = calibrate(source.steps, source.variants, source.groups, device=device)
        device, link = fitted.device, fitted.link
    micro_batches = options.micro_batches
    if micro_batches is None:
        is_accumulating = any(variant.kind.startswith("backward_accumulate") for variant in dump.variants)
        micro_batches = micro_batches_of(recorded) if recorded is not None else 1 + is_accumulating
    phases = phases_of(dump.variants, micro_batches=micro_batches)
    if not any(phase.name == "backward" for phase in phases):
        raise CliError(f"{dump.path} has no backward graph, so there is no training step to show")
    schedule = predict(phases, dump.groups, device=device, link=link)
    kinds = {f"graph{v.graph}_{v.name}": v.kind.partition("_")[0] for v in dump.variants}
    shown = measured(recorded, kinds) if recorded is not None else None
    return Prediction(device, link, micro_batches, schedule, shown)


def _counted(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{plural if count != 1 else ''}"


def _write(path: Path, content: str) -> None:
    if str(path) == "-":
        typer.echo(content)
        return
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from None
