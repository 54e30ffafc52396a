"""``megabuf ledger``."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Annotated

import typer

from megabuf_fx.cli.comparison import compare, comparison_table
from megabuf_fx.cli.errors import CliError
from megabuf_fx.cli.estimate import estimated_terms, estimated_threshold, setup_of_options
from megabuf_fx.cli.job import describe, load_source, make_job
from megabuf_fx.cli.ledger import make_rows, symbolic_terms
from megabuf_fx.cli.ledger_view import Ledger, ledger_as_json, ledger_of, ledger_table, symbol_values
from megabuf_fx.cli.models import DumpedModel, MetaModel
from megabuf_fx.cli.options import MODEL_HELP, LayoutOptions
from megabuf_fx.cli.units import format_count


@dataclass(frozen=True, kw_only=True)
class LedgerOptions(LayoutOptions):
    """Options of ``megabuf ledger``."""

    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = None
    params: Annotated[
        float | None,
        typer.Option(help="Parameters of the whole model, as 7.5e9: estimates from formulas, beside those of MODEL."),
    ] = None
    compare: Annotated[bool, typer.Option("--compare", help="One line for each kind of buffers instead.")] = False


def show_ledger(options: LedgerOptions) -> None:
    """Memory of one rank: formulas and bytes of buffers, optimizer state, temporaries and traffic.

    Numbers are counted from the plan of MODEL, exactly, padding included; or estimated from --params alone, with even
    shards, no padding, and nothing for the number and largest of the quantized weights, which it does not know; or
    both, side by side. 1 GB is 1e9 bytes.

    \b
    Examples:
      megabuf ledger --params 7.5e9 --tp 2 --pp 2 --dp 64 --grad-reduce-in-fp32
      megabuf ledger llama-7b --params 7.5e9 --tp 2 --pp 2 --dp 64 --grad-reduce-in-fp32
      megabuf ledger llama-70b --dp 1024 --num-distributed-optimizer-instances 8
      megabuf ledger mypackage.models:build --dp 8 --fp8-param-gather --fp8-recipe mxfp8
      megabuf ledger llama-7b --dp 64 --grad-reduce-in-fp32 --compare
    """
    if options.model is None and options.params is None:
        raise CliError("give a MODEL, or the number of parameters with --params")
    if options.compare and options.model is not None and options.params is not None:
        raise CliError("--compare is for a MODEL or for --params; drop one")
    source = load_source(options.model, options) if options.model is not None else None
    if options.compare:
        comparison = compare(source, options.params, options)
        typer.echo(json.dumps(comparison, indent=1) if options.json else comparison_table(comparison))
        return
    ledger, title = make_ledger(source, options)
    if options.json:
        typer.echo(json.dumps({"title": title, **ledger_as_json(ledger)}, indent=1))
        return
    typer.echo(f"{title}\n\n{ledger_table(ledger)}")


def make_ledger(source: MetaModel | DumpedModel | None, options: LedgerOptions) -> tuple[Ledger, str]:
    """The ledger that ``options`` ask for, and a line that says of what."""
    job = make_job(source, options) if source is not None else None
    if options.params is None:
        assert job is not None
        return ledger_of(job), describe(job)
    setup, terms = setup_of_options(options), estimated_terms(options, options.params)
    estimated = make_rows(setup, [terms])
    threshold = estimated_threshold(options, terms.P)
    title = (
        f"estimate: {options.params:,.0f} parameters / (tp {options.tp} * pp {options.pp}) = {format_count(terms.P)} "
        f"on each rank, dp {format_count(terms.shards * terms.instances)}"
    )
    if job is None:
        formulas = make_rows(setup, symbolic_terms(setup))
        return Ledger(formulas, estimated, None, symbol_values(setup, [terms], threshold)), title
    # An estimate has one buffer; rows that a model of several buffers has besides stay empty.
    return dataclasses.replace(ledger_of(job), estimated=estimated), f"{title}\ncounted:  {describe(job)}"
