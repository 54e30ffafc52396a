"""The ledger of one rank as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from megabuf_fx.cli.counting import setup_of, terms_of
from megabuf_fx.cli.job import Job
from megabuf_fx.cli.ledger import SYMBOLS, Row, Setup, Terms, make_rows, symbolic_terms
from megabuf_fx.cli.units import format_bytes, format_count


@dataclass(frozen=True, slots=True)
class Ledger:
    """Formulas and, as far as there are such, what they give for a number of parameters and for a plan."""

    formulas: tuple[Row, ...]
    estimated: tuple[Row, ...] | None
    counted: tuple[Row, ...] | None
    symbols: dict[str, str]
    """What the formulas' symbols are here."""


def ledger_of(job: Job) -> Ledger:
    """The ledger of a planned rank."""
    setup = setup_of(job.plan, job.config, is_cut=job.threshold is not None or job.config.chooses_buckets)
    terms = terms_of(job.plan, job.config, dp_rank=job.parallel.dp_rank)
    formulas = make_rows(setup, symbolic_terms(setup))
    return Ledger(formulas, None, make_rows(setup, terms), symbol_values(setup, terms, job.threshold))


def symbol_values(setup: Setup, terms: Sequence[Terms], threshold: int | None = None) -> dict[str, str]:
    """What the symbols of the formulas are here, as text."""
    found: dict[str, str] = {}
    formulas = symbolic_terms(setup)
    used = {str(s) for row in make_rows(setup, formulas) for s in getattr(row.amount, "free_symbols", ())}
    for symbols, numbers in zip(formulas, terms):
        for field in SYMBOLS:
            found[str(getattr(symbols, field))] = format_count(getattr(numbers, field))
        shards = symbols.shards
        d = next(str(s) for s in shards.free_symbols if str(s) != "i")
        found[d] = format_count(numbers.shards * numbers.instances)
        if setup.has_instances:
            found["i"] = format_count(numbers.instances)
    if threshold is not None:
        found["K"] = format_count(threshold)
    return {name: value for name, value in found.items() if name in used}


_TITLES = {
    "resident": "as long as training lasts",
    "temporary": "during a step",
    "traffic": "sent in a step",
    "bucket": "buckets",
}
_SECTIONS = {"resident": "resident", "detail": "resident", "temporary": "temporary", "traffic": "traffic"}


def ledger_table(ledger: Ledger) -> str:
    """Sections of rows: name, formula, estimate, and counted bytes."""
    estimated = {row.name: row for row in ledger.estimated or ()}
    counted = {row.name: row for row in ledger.counted or ()}
    headers = ["", "formula"]
    headers += ["estimate"] if ledger.estimated is not None else []
    headers += ["counted", "bytes"] if ledger.counted is not None else []
    headers.append("")
    lines: list[list[str]] = []
    section = ""
    for row in ledger.formulas:
        now = _SECTIONS.get(row.kind, "bucket")
        if now != section:
            section = now
            lines += [[""] * len(headers)] if lines else []
            lines.append([f"{_TITLES[section]}:", *[""] * (len(headers) - 1)])
        cells = [row.name, str(row.amount)]
        if ledger.estimated is not None:
            cells.append(_shown(estimated.get(row.name)))
        if ledger.counted is not None:
            exact = counted[row.name]
            cells += [_shown(exact), format_count(exact.amount) if row.kind != "count" else ""]
        lines.append([*cells, row.remark])
    align = ["left", "left", *["right"] * (len(headers) - 3), "left"]
    table = tabulate(lines, headers=headers, tablefmt="simple", disable_numparse=True, colalign=align)
    legend = "   ".join(f"{name} = {value}" for name, value in ledger.symbols.items())
    # Columns that are empty to the right leave spaces behind.
    return "\n".join(line.rstrip() for line in f"{table}\n\n{legend}".splitlines())


def _shown(row: Row | None) -> str:
    if row is None:
        return "-"
    return format_count(row.amount) if row.kind == "count" else format_bytes(row.amount)


def ledger_as_json(ledger: Ledger) -> dict[str, Any]:
    """Rows with formula and bytes; numbers that are averages are rounded."""
    estimated = {row.name: row for row in ledger.estimated or ()}
    counted = {row.name: row for row in ledger.counted or ()}
    rows = []
    for row in ledger.formulas:
        entry: dict[str, Any] = {"name": row.name, "kind": row.kind, "formula": str(row.amount), "remark": row.remark}
        for key, numbers in (("estimate", estimated), ("counted", counted)):
            if row.name in numbers:
                entry[key] = round(numbers[row.name].amount)
        rows.append(entry)
    return {"rows": rows, "symbols": ledger.symbols}
