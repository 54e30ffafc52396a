"""A schedule as a picture (SVG): compute, link, and a lane for every bucket.

    forward ------------------|  backward ---------------------------------|
    compute  [block 0][block 1] [head][block 1][block 0]   ////exposed////
    link     [g1][g0]                       [r0  ][r1  ][r2            ]
    bucket 0        [g0]>|                  ^[r0  ]                    |
    bucket 1    [g1]>|                            ^..[r1  ]            |

In a lane: a triangle where the bucket is launched, dots while the link is busy with others, the bar while it travels, a
line where it is needed, and hatching from there on if it has not arrived. Every mark can take the focus and carries
what ``timeline.html`` shows of it; by itself the picture shows the same as tooltips.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from megabuf_fx.cli import text
from megabuf_fx.cli.dump_files import BucketGroup, Key
from megabuf_fx.cli.explain import collective_name, summary
from megabuf_fx.cli.schedule import Schedule, Transfer, Work

WIDTH = 1360
_LEFT = 350
_RIGHT = 20
_TOP = 96
_COMPUTE, _LINK, _LANE = 34, 24, 26
_GAP = 12
_CHARACTER = 6.4
"""Width of a character of the small font, in pixels."""

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1c2430; }
.small { font-size: 11px; fill: #5b6675; } .title { font-size: 16px; font-weight: 600; }
.inside { font-size: 11px; fill: #fff; pointer-events: none; }
.grid { stroke: #e3e7ed; } .row { fill: #f6f8fa; } .bracket { stroke: #8a94a3; fill: none; }
.forward rect { fill: #3b78c3; } .backward rect { fill: #d9822b; } .run rect { fill: #7a8594; }
.work rect { stroke: #fff; stroke-width: .6; }
.gather .bar { fill: #2a9d6f; } .reduce .bar { fill: #7d55c7; }
.queued { stroke: #8a94a3; stroke-width: 2; stroke-dasharray: 1.5 3; } .launch { fill: #1c2430; }
.need { stroke: #1c2430; stroke-width: 1.5; } .gap { fill: url(#hatch); stroke: #d1242f; }
[tabindex]:focus { outline: none; } [tabindex]:focus .bar, [tabindex]:focus rect { stroke: #000; stroke-width: 2; }
"""
_HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#ffd7d9"/><rect width="2.5" height="6" fill="#d1242f"/></pattern></defs>'
)


def draw(schedule: Schedule, groups: Mapping[Key, BucketGroup]) -> str:
    """The picture of ``schedule`` as the text of one ``<svg>`` element."""
    return _Picture(schedule, groups).render()


def stacked(pictures: Sequence[str]) -> str:
    """Several pictures as one, one below the other."""
    heights = [int(float(re.search(r'height="([\d.]+)"', picture)[1])) for picture in pictures]  # type: ignore[index]
    content, y = "", 0
    for picture, height in zip(pictures, heights):
        content += picture.replace("<svg ", f'<svg y="{y}" ', 1)
        y += height
    return element(
        "svg", content, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {y}", width=WIDTH, height=y
    )


def details_of(transfer: Transfer, group: BucketGroup) -> str:
    """What there is to say of one collective, line by line."""
    name = collective_name(group, transfer.direction)
    nbytes = group.grad_nbytes if transfer.direction == "reduce" else group.param_nbytes
    dtype = group.grad_dtype if transfer.direction == "reduce" else group.param_dtype
    lines = [
        f"bucket {group.number}: {name} of {text.nbytes(nbytes)} {dtype} over {group.ranks} ranks",
        f"launched at {text.microseconds(transfer.launch)}" + (f" by {transfer.trigger}" if transfer.trigger else ""),
        f"on the link {text.microseconds(transfer.begin)} to {text.microseconds(transfer.end)}, "
        f"{text.microseconds(transfer.end - transfer.begin)}",
    ]
    if transfer.need is not None:
        lines.append(
            f"needed at {text.microseconds(transfer.need)}" + (f" by {transfer.waiter}" if transfer.waiter else "")
        )
    if transfer.hidden_ops:
        lines.append(f"compute in between: {transfer.hidden_ops} operations, {text.flops(transfer.hidden_flops)}")
    lines.append(f"exposed {text.microseconds(transfer.exposed)}" + (f": {transfer.why}" if transfer.why else ""))
    return "\n".join(lines)


def element(name: str, content: str = "", **attributes: object) -> str:
    """One SVG element; underscores at the end and inside of attribute names become nothing and hyphens."""
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_shown(value))}"' for key, value in attributes.items()
    )
    return f"<{name}{pairs}>{content}</{name}>" if content else f"<{name}{pairs}/>"


def _shown(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def label(x: float, y: float, content: str, class_: str = "", anchor: str = "start") -> str:
    return element("text", escape(content), x=x, y=y, class_=class_, text_anchor=anchor)


class _Picture:
    def __init__(self, schedule: Schedule, groups: Mapping[Key, BucketGroup]) -> None:
        self._schedule = schedule
        self._groups = groups
        last = max([schedule.end, *(transfer.end for transfer in schedule.transfers)])
        self._scale = (WIDTH - _LEFT - _RIGHT) / max(last, 1e-9)
        self._last = last
        self._lanes = {key: self._lane_y(place) for place, key in enumerate(groups)}
        self._height: float = self._lane_y(len(groups)) + 10

    def render(self) -> str:
        shown = [transfer for transfer in self._schedule.transfers if transfer.end > transfer.begin]
        parts = [
            _HATCH,
            *self._head(),
            *self._rows(),
            *self._brackets(),
            *(self._work(work) for work in self._schedule.work),
            *(self._gap(transfer) for transfer in shown if transfer.exposed > 0 and transfer.need is not None),
            *(self._on_link(transfer) for transfer in shown),
            *(self._in_lane(transfer) for transfer in self._schedule.transfers),
        ]
        return element(
            "svg",
            element("style", STYLE) + "\n".join(parts),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {WIDTH} {self._height}",
            width=WIDTH,
            height=self._height,
            class_="schedule",
            data_schedule=self._schedule.title,
        )

    def _lane_y(self, place: int) -> float:
        return _TOP + _COMPUTE + _GAP + _LINK + 2 * _GAP + place * _LANE

    def _x(self, time: float) -> float:
        return _LEFT + time * self._scale

    def _head(self) -> Iterator[str]:
        yield element("rect", x=0, y=0, width=WIDTH, height=self._height, fill="#fff")
        yield label(14, 24, f"One training step, {summary(self._schedule)}", "title")
        if self._schedule.note:
            yield label(14, 42, self._schedule.note, "small")
        x: float = 14
        for class_, name in (
            ("work forward", "forward"),
            ("work backward", "backward"),
            ("gather", "all-gather of parameters"),
            ("reduce", "reduction of gradients"),
            ("gap", "compute stands still (exposed)"),
        ):
            box = element("rect", x=x, y=52, width=14, height=11, class_="gap" if class_ == "gap" else "bar")
            yield element("g", box, class_=class_) + label(x + 19, 62, name, "small")
            x += 42 + _CHARACTER * len(name)
        yield label(x, 62, "▲ launched   ┈ queued behind another bucket   | needed", "small")

    def _rows(self) -> Iterator[str]:
        bottom = self._height - 10
        step = _nice_step(self._last / 9)
        for count in range(int(self._last / step) + 1):
            x = self._x(count * step)
            yield element("line", x1=x, x2=x, y1=_TOP - 4, y2=bottom, class_="grid")
            yield label(x, _TOP - 16, _tick(count * step), "small", "middle")
        width = WIDTH - _LEFT - _RIGHT
        link_y = _TOP + _COMPUTE + _GAP
        yield label(14, _TOP + 21, "compute")
        yield label(14, link_y + 16, "link")
        for top, height in ((_TOP, _COMPUTE), (link_y, _LINK)):
            yield element("rect", x=_LEFT, y=top, width=width, height=height, class_="row")
        for key, y in self._lanes.items():
            group = self._groups[key]
            yield element("rect", x=_LEFT, y=y + 2, width=width, height=_LANE - 4, class_="row")
            shown = group.label_within(50)
            yield element("g", label(14, y + 17, group.number) + label(40, y + 17, shown, "small"), class_="lane-label")

    def _brackets(self) -> Iterator[str]:
        """Over the compute row, where forward and backward are."""
        runs: list[tuple[str, float, float]] = []
        for work in self._schedule.work:
            if runs and runs[-1][0] == work.phase:
                runs[-1] = (work.phase, runs[-1][1], work.end)
            else:
                runs.append((work.phase, work.begin, work.end))
        for phase, begin, end in runs:
            left, right = self._x(begin) + 1, self._x(end) - 1
            y = _TOP - 3
            yield element("path", d=f"M{left:.1f} {y}v-6H{right:.1f}v6", class_="bracket")
            if right - left > 60:
                name = element("rect", x=(left + right) / 2 - 32, y=y - 12, width=64, height=12, fill="#fff")
                yield name + label((left + right) / 2, y - 2, phase, "small", "middle")

    def _work(self, work: Work) -> str:
        left, width = self._x(work.begin), (work.end - work.begin) * self._scale
        lines = [
            f"{work.phase}: {work.title or 'outside of modules'}",
            f"{text.microseconds(work.begin)} to {text.microseconds(work.end)}, "
            f"{text.microseconds(work.end - work.begin)}",
        ]
        if work.ops:
            lines.append(f"{work.ops} operations, {text.flops(work.flops)}")
        content = element("rect", x=left, y=_TOP, width=max(width, 0.3), height=_COMPUTE)
        content += self._inside(left, width, _TOP + 21, work.title)
        return self._mark(content, f"work {work.phase}", "\n".join(lines), kind="work")

    def _gap(self, transfer: Transfer) -> str:
        assert transfer.need is not None
        begin, width = self._x(transfer.need), transfer.exposed * self._scale
        content = element("rect", x=begin, y=_TOP, width=max(width, 1.0), height=_COMPUTE, class_="gap")
        return self._mark(content, "exposed", self._details(transfer), kind="exposed", transfer=transfer)

    def _on_link(self, transfer: Transfer) -> str:
        y = _TOP + _COMPUTE + _GAP
        return self._bar(transfer, y, _LINK, "link")

    def _in_lane(self, transfer: Transfer) -> str:
        y = self._lanes[transfer.key]
        launch, begin = self._x(transfer.launch), self._x(transfer.begin)
        extra = ""
        if begin - launch > 1:
            extra += element("line", x1=launch, x2=begin, y1=y + _LANE / 2, y2=y + _LANE / 2, class_="queued")
        if transfer.need is not None and transfer.exposed > 0:
            need = self._x(transfer.need)
            width = max(self._x(transfer.need + transfer.exposed) - need, 1.0)
            extra += element("rect", x=need, y=y + _LANE - 8, width=width, height=5, class_="gap")
        base = y + _LANE - 3
        extra += element("path", d=f"M{launch - 5:.1f} {base}h10l-5 -9z", class_="launch")
        if transfer.need is not None:
            need = self._x(transfer.need)
            extra += element("line", x1=need, x2=need, y1=y, y2=y + _LANE, class_="need")
        return self._bar(transfer, y + 4, _LANE - 8, "lane", extra)

    def _bar(self, transfer: Transfer, y: float, height: float, kind: str, extra: str = "") -> str:
        left, width = self._x(transfer.begin), (transfer.end - transfer.begin) * self._scale
        content = element("rect", x=left, y=y, width=max(width, 1.0), height=height, class_="bar")
        content += self._inside(left, width, y + height / 2 + 4, self._groups[transfer.key].number)
        return self._mark(content + extra, transfer.direction, self._details(transfer), kind=kind, transfer=transfer)

    def _inside(self, left: float, width: float, y: float, content: str) -> str:
        if not content or width < _CHARACTER * len(content) + 6:
            return ""
        return label(left + width / 2, y, content, "inside", "middle")

    def _details(self, transfer: Transfer) -> str:
        return details_of(transfer, self._groups[transfer.key])

    def _mark(self, content: str, class_: str, details: str, *, kind: str, transfer: Transfer | None = None) -> str:
        bucket = "" if transfer is None else ".".join(map(str, transfer.key))
        direction = "" if transfer is None else transfer.direction
        return element(
            "g",
            element("title", escape(details)) + content,
            class_=class_,
            tabindex=0,
            role="img",
            aria_label=details.replace("\n", "; "),
            data_kind=kind,
            data_bucket=bucket,
            data_direction=direction,
        )


def _tick(value: float) -> str:
    """A round number of microseconds, without zeros behind the point."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g} us" if value else "0"


def _nice_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, at least ``least``."""
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
