"""Commands that read a dump: ``explain``, ``timeline``, ``graph``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from megabuf_fx.cli.command import in_one_line
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
    Device,
    Link,
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

DumpPath = Annotated[Path, typer.Argument(metavar="DUMP", help="The directory that MEGABUF_DUMP named.")]
Rank = Annotated[int, typer.Option(help="Whose dump to read.", min=0)]
Gbps = Annotated[float, typer.Option(help="Bandwidth of the link, 10**9 bits per second and direction.", min=1e-6)]
Alpha = Annotated[float, typer.Option(help="Latency of one message, microseconds.", min=0)]
Tflops = Annotated[float, typer.Option(help="Arithmetic of one rank, 10**12 operations per second.", min=1e-6)]
Memory = Annotated[float, typer.Option(help="Memory bandwidth of one rank, 10**9 bytes per second.", min=1e-6)]
OpTime = Annotated[float, typer.Option(help="Least time of one operation, microseconds.", min=0)]
MicroBatches = Annotated[
    int | None,
    typer.Option(
        help="Micro-batches in a step; default: as recorded, otherwise 2 if some backward accumulates.", min=1
    ),
]
Calibrate = Annotated[
    Path | None,
    typer.Option(
        "--calibrate",
        metavar="DUMP",
        help="Take the rates from the times that this dump recorded (MEGABUF_PROFILE=1) instead of the options.",
    ),
]

_EXPLAIN_HELP = """\
Explain a dump: what each pass changed, what is in each bucket, when it travels, and what is exposed.

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

_TIMELINE_HELP = """\
Draw one training step: compute, communication, and every bucket, predicted and (MEGABUF_PROFILE=1) measured.

The page needs nothing but itself. Hover or press Tab and the arrow keys for details, + and - to zoom.

\b
Examples:
  megabuf timeline DIR -o step.html
  megabuf timeline DIR --gbps 25 -o slow-link.html --svg step.svg
  megabuf timeline DIR --trace step.json    for https://ui.perfetto.dev or chrome://tracing
"""

_GRAPH_HELP = """\
Draw the graphs around their bucket boundaries; what is computed in between is folded, one box per module.

\b
Examples:
  megabuf graph DIR --svg graph.svg
  megabuf graph DIR --variant backward_overwrite_sync --dot - | dot -Tpdf > graph.pdf
"""


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
    commands: list[tuple[Callable[..., None], str]]
    commands = [(explain, _EXPLAIN_HELP), (timeline, _TIMELINE_HELP), (graph, _GRAPH_HELP)]
    for function, text in commands:
        app.command(function.__name__, help=text)(in_one_line(function.__name__, function))


def explain(
    path: DumpPath,
    rank: Rank = 0,
    gbps: Gbps = 400,
    alpha_us: Alpha = 10,
    tflops: Tflops = 400,
    memory_gbs: Memory = 3000,
    op_us: OpTime = 2,
    micro_batches: MicroBatches = None,
    calibrate_from: Calibrate = None,
    passes: Annotated[bool, typer.Option("--passes", help="Show the diff of the graph after each pass.")] = False,
    diff: Annotated[
        Path | None, typer.Option(metavar="OTHER", help="Only compare with another dump; exit 1 if they differ.")
    ] = None,
) -> None:
    dump = read_dump(path, rank=rank)
    if diff is not None:
        found = differences(read_dump(diff, rank=rank), dump)
        typer.echo("\n".join(found) or "same layout, same schedule")
        raise typer.Exit(int(bool(found)))
    device, link = Device(tflops, memory_gbs, op_us), Link(gbps, alpha_us)
    step = _predict(dump, device, link, micro_batches, calibrate_from)
    sections = [explain_passes(variant, with_text=passes) for variant in dump.variants]
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


def timeline(
    path: DumpPath,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the page here.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the pictures here, one below the other.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto or Chrome here.")] = None,
    rank: Rank = 0,
    gbps: Gbps = 400,
    alpha_us: Alpha = 10,
    tflops: Tflops = 400,
    memory_gbs: Memory = 3000,
    op_us: OpTime = 2,
    micro_batches: MicroBatches = None,
    calibrate_from: Calibrate = None,
) -> None:
    if output is None and svg is None and trace is None:
        raise CliError("nothing to write; give -o page.html, --svg picture.svg or --trace trace.json")
    dump = read_dump(path, rank=rank)
    device, link = Device(tflops, memory_gbs, op_us), Link(gbps, alpha_us)
    step = _predict(dump, device, link, micro_batches, calibrate_from)
    schedules = [step.predicted, *([step.recorded] if step.recorded is not None else [])]
    if output is not None:
        page = page_of(
            schedules,
            dump.groups,
            title=f"megabuf: {_counted(len(dump.groups), 'bucket')}, rank {rank} of a step of "
            + _counted(step.micro_batches, "micro-batch", "es"),
            rates=f"Predicted for: {rates(step.device, step.link)}",
            comparison=comparison_rows(dump, step.predicted) if step.recorded is not None else "",
        )
        _write(output, page)
    if svg is not None:
        _write(svg, stacked([draw(schedule, dump.groups) for schedule in schedules]))
    if trace is not None:
        _write(trace, json.dumps(chrome_trace(schedules, dump.groups)))


def graph(
    path: DumpPath,
    dot: Annotated[Path | None, typer.Option(help="Write Graphviz text here; - for standard output.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture here; - for standard output.")] = None,
    variant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this one, as backward_overwrite_sync.")
    ] = None,
    rank: Rank = 0,
) -> None:
    if dot is None and svg is None:
        raise CliError("nothing to write; give --dot graph.dot or --svg graph.svg")
    dump = read_dump(path, rank=rank)
    chosen = [entry for entry in dump.variants if variant in (None, entry.name, f"graph{entry.graph}_{entry.name}")]
    if not chosen:
        raise CliError(f"no variant '{variant}'; the dump has {', '.join(entry.name for entry in dump.variants)}")
    if dot is not None:
        _write(dot, dot_of(chosen, dump.groups))
    if svg is not None:
        _write(svg, graph_svg(chosen, dump.groups))


def _predict(
    dump: Dump, device: Device, link: Link, micro_batches: int | None, calibrate_from: Path | None
) -> Prediction:
    recorded = typical_step(dump.steps) if dump.steps else None
    if calibrate_from is not None:
        source = read_dump(calibrate_from, rank=dump.rank)
        if not source.steps:
            raise CliError(f"{calibrate_from} has no recorded times; run the program with MEGABUF_PROFILE=1, too")
        fitted = calibrate(source.steps, source.variants, source.groups, device=device)
        device, link = fitted.device, fitted.link
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
