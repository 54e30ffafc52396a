"""``megabuf timeline``: one page that draws a step, with all that it needs inside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from megabuf_fx.cli import text
from megabuf_fx.cli.dump_files import BucketGroup, Key
from megabuf_fx.cli.schedule import Schedule
from megabuf_fx.cli.svg import draw

_TEMPLATE = "timeline.html"


def page_of(
    schedules: Sequence[Schedule], groups: Mapping[Key, BucketGroup], *, title: str, rates: str, comparison: str
) -> str:
    """The page: ``schedules`` one below the other; ``comparison`` is a table in text, empty for none."""
    template = Template(resources.files("megabuf_fx.cli").joinpath(_TEMPLATE).read_text(encoding="utf-8"))
    pictures = "\n".join(f'<div class="picture">{draw(schedule, groups)}</div>' for schedule in schedules)
    # "</" would end the script element early.
    data = json.dumps({".".join(map(str, key)): _bucket(group) for key, group in groups.items()}).replace("</", "<\\/")
    below = f"<h2>Predicted and measured</h2><pre>{escape(comparison)}</pre>" if comparison else ""
    return template.substitute(title=escape(title), rates=escape(rates), pictures=pictures, data=data, comparison=below)


def _bucket(group: BucketGroup) -> dict[str, Any]:
    return {
        "label": group.label,
        "padding": group.padding,
        "size": text.nbytes(group.grad_nbytes),
        "dtype": group.grad_dtype,
        "params": [[name, size] for name, size in zip(group.params, group.sizes)],
    }
