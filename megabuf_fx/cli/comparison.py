"""One line for each kind of buffers: what a choice costs and saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from tabulate import tabulate

from megabuf_fx.cli.counting import setup_of, terms_of
from megabuf_fx.cli.errors import CliError
from megabuf_fx.cli.estimate import estimated_terms, setup_of_options
from megabuf_fx.cli.job import make_job
from megabuf_fx.cli.ledger import Row, Setup, Terms, fully_sharded_rows, make_rows
from megabuf_fx.cli.models import DumpedModel, MetaModel
from megabuf_fx.cli.options import LayoutOptions
from megabuf_fx.cli.units import format_bytes

_QUIET: dict[str, Any] = {
    "fp8_param_gather": False,
    "fp8_recipe": "tensorwise",
    "fp8_amax_history_len": 1,
    "fp4_param_gather": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
    "quantized_param_name_patterns": None,
    "use_distributed_optimizer": True,
}


def _variants(options: LayoutOptions) -> list[tuple[str, dict[str, Any]]]:
    which: dict[str, Any] = {"quantized_param_name_patterns": options.quantized_param_name_patterns}
    fp8: dict[str, Any] = {"fp8_param_gather": True, **which}
    mxfp8: dict[str, Any] = {**fp8, "fp8_recipe": "mxfp8"}
    plain: dict[str, Any] = {"num_distributed_optimizer_instances": 1, "reduce_scatter_with_fp32_accumulation": False}
    return [
        ("fp32 gradients", {"grad_reduce_in_fp32": True, "param_name_patterns_for_fp32_local_accumulation": None}),
        ("gradients in parameter dtype", {"grad_reduce_in_fp32": False}),
        ("no distributed optimizer", {"use_distributed_optimizer": False, **plain}),
        ("fp8 parameters", fp8),
        ("MXFP8 gathered in grad_data", {**mxfp8, "reuse_grad_buf_for_mxfp8_param_ag": True}),
        ("MXFP8 gathered on its own", mxfp8),
        ("NVFP4 parameters", {"fp4_param_gather": True, **which}),
        ("2 optimizer instances", {**plain, "num_distributed_optimizer_instances": 2}),
    ]


def compare(
    source: MetaModel | DumpedModel | None, params: float | None, options: LayoutOptions
) -> list[dict[str, Any]]:
    """One entry per kind of buffers, in bytes, or with the reason why it is none; FSDP last, for comparison."""
    entries: list[dict[str, Any]] = []
    for label, changes in _variants(options):
        variant = dataclasses.replace(options, **{**_QUIET, **changes})
        try:
            setup, terms = _numbers(source, params, variant)
        except CliError as error:
            entries.append({"variant": label, "reason": str(error)})
            continue
        entries.append({"variant": label, **_summary(make_rows(setup, terms))})
    setup, terms = _numbers(source, params, dataclasses.replace(options, **_QUIET))
    entries.append({"variant": "FSDP (ZeRO-3), not offered here", **_summary(fully_sharded_rows(setup, terms))})
    return entries


def _numbers(
    source: MetaModel | DumpedModel | None, params: float | None, options: LayoutOptions
) -> tuple[Setup, Sequence[Terms]]:
    if source is None:
        assert params is not None
        return setup_of_options(options), [estimated_terms(options, params)]
    job = make_job(source, options)
    return setup_of(job.plan, job.config), terms_of(job.plan, job.config, dp_rank=job.parallel.dp_rank)


def _summary(rows: Sequence[Row]) -> dict[str, int]:
    def total(*names: str) -> int:
        return round(sum((Fraction(row.amount) for row in rows if row.name in names), Fraction()))

    return {
        "grad_data": total("grad_data"),
        "param_data": total("param_data"),
        "outside": total("parameters", "codes and scales", "shadow", "fp32 gradient sums"),
        "optimizer": total("fp32 masters", "Adam moments"),
        "resident": round(sum((Fraction(row.amount) for row in rows if row.kind == "resident"), Fraction())),
        "reduced": total("gradient reduce-scatter", "gradient all-reduce", "all-reduce across instances"),
        "gathered": total("parameter all-gather", "amax all-reduce"),
    }


def comparison_table(entries: Sequence[dict[str, Any]]) -> str:
    """One line per kind of buffers. *outside* is what parameters and gradients hold outside of buffers."""
    keys = ["grad_data", "param_data", "outside", "optimizer", "resident", "reduced", "gathered"]
    lines = []
    for entry in entries:
        if "reason" in entry:
            lines.append([entry["variant"], *["-"] * len(keys)])
            continue
        lines.append([entry["variant"], *(format_bytes(entry[key]) if entry[key] else "-" for key in keys)])
    headers = ["", "grad_data", "param_data", "outside", "optimizer", "resident", "sent: gradients", "sent: parameters"]
    align = ["left", *["right"] * len(keys)]
    table = tabulate(lines, headers=headers, tablefmt="simple", disable_numparse=True, colalign=align)
    reasons = [f"{entry['variant']}: {entry['reason']}" for entry in entries if "reason" in entry]
    return "\n".join([table, *([""] if reasons else []), *reasons])
