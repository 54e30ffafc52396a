"""``megabuf graph``: a compiled graph around its bucket boundaries, what is computed in between folded per module.

    [head 12 ops]  [blocks.5 40 ops] --writes--> (launch bucket 0)  [blocks.4 61 ops] ...

A box is a run of nodes of one module between two boundaries. Grey lines are data; coloured ones lead from the boxes
that write a bucket to its launch, and from a wait to the first box that reads the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from megabuf_fx.cli import text
from megabuf_fx.cli.dump_files import BucketGroup, Key, Variant
from megabuf_fx.cli.schedule import fold_module
from megabuf_fx.cli.svg import element, label


@dataclass(frozen=True, slots=True)
class Piece:
    """One box."""

    kind: str
    """compute, launch or wait."""
    title: str
    ops: int
    flops: int
    group: Key | None
    """Of a launch or a wait."""
    writes: tuple[str, ...]
    """Parameters whose ``main_grad`` it writes."""
    sources: tuple[int, ...]
    """Earlier pieces whose results it reads."""
    bucket_edges: tuple[int, ...]
    """Launch: the pieces that write the bucket. Compute: the waits for what it reads."""


def pieces_of(variant: Variant, groups: Mapping[Key, BucketGroup]) -> tuple[Piece, ...]:
    """Fold the nodes of ``variant``, in execution order."""
    pieces: list[_Open] = []
    home: dict[str, int] = {}
    waits: dict[Key, int] = {}
    uses: dict[str, list[int]] = {}
    title = "outside of modules"
    for node in variant.nodes:
        if node.kind in ("input", "output"):
            continue
        if node.kind in ("launch", "wait") and node.group is not None:
            pieces.append(_Open(node.kind, f"{node.kind} bucket {groups[node.group].number}", node.group))
            if node.kind == "wait":
                waits[node.group] = len(pieces) - 1
            else:
                writers = [place for place, piece in enumerate(pieces) if node.group in piece.written]
                pieces[-1].bucket_edges.update(dict.fromkeys(writers))
            continue
        if node.kind == "view":
            # No box of its own: it passes on what it reads.
            if node.inputs and node.inputs[0] in home:
                home[node.name] = home[node.inputs[0]]
            uses[node.name] = [waits[key] for key in node.first_use if key in waits]
            for source in node.inputs:
                uses[node.name] += uses.get(source, [])
            continue
        # What belongs to no module (residual sums, gradients that add up) counts to its surroundings.
        title = fold_module(node.module) or title
        if not pieces or (pieces[-1].kind, pieces[-1].title) != ("compute", title):
            pieces.append(_Open("compute", title, None))
        place = len(pieces) - 1
        home[node.name] = place
        pieces[place].sources.update({home[s]: None for s in node.inputs if s in home and home[s] != place})
        pieces[place].bucket_edges.update({waits[key]: None for key in node.first_use if key in waits})
        pieces[place].bucket_edges.update({wait: None for source in node.inputs for wait in uses.get(source, [])})
        if node.kind == "write" and node.group is not None:
            pieces[place].writes += node.params
            pieces[place].written.add(node.group)
        pieces[place].ops += 1
        pieces[place].flops += node.flops
    return tuple(piece.closed() for piece in pieces)


class _Open:
    """A piece that still grows."""

    def __init__(self, kind: str, title: str, group: Key | None) -> None:
        self.kind, self.title, self.group = kind, title, group
        self.ops = self.flops = 0
        self.writes: tuple[str, ...] = ()
        self.written: set[Key] = set()
        self.sources: dict[int, None] = {}
        self.bucket_edges: dict[int, None] = {}

    def closed(self) -> Piece:
        sources, edges = tuple(sorted(self.sources)), tuple(self.bucket_edges)
        return Piece(self.kind, self.title, self.ops, self.flops, self.group, self.writes, sources, edges)


def _subtitle(piece: Piece) -> str:
    if piece.kind != "compute":
        return ""
    written = f", writes {len(piece.writes)} grads" if piece.writes else ""
    return f"{piece.ops} ops, {text.flops(piece.flops)}{written}"


def _tooltip(piece: Piece, groups: Mapping[Key, BucketGroup]) -> str:
    if piece.group is not None:
        group = groups[piece.group]
        return f"{piece.title}: {group.label}, {text.nbytes(group.grad_nbytes)} {group.grad_dtype}"
    return "\n".join([f"{piece.title}: {_subtitle(piece)}", *(f"  {name}" for name in piece.writes)])


def dot_of(variants: Sequence[Variant], groups: Mapping[Key, BucketGroup]) -> str:
    """Graphviz text, one cluster per variant."""
    lines = ["digraph megabuf {", '  node [shape=box, style=filled, fillcolor="#dce9f9", fontname="sans-serif"];']
    for number, variant in enumerate(variants):
        lines += [f"  subgraph cluster_{number} {{", f'    label="{variant.title}";']
        pieces = pieces_of(variant, groups)
        for place, piece in enumerate(pieces):
            shown = "\\n".join(filter(None, (piece.title, _subtitle(piece))))
            style = {
                "launch": ', shape=cds, fillcolor="#e4d9f7"',
                "wait": ', shape=cds, fillcolor="#d3efe3"',
            }.get(piece.kind, "")
            lines.append(f'    v{number}_{place} [label="{shown}"{style}];')
        for place, piece in enumerate(pieces):
            lines += [f"    v{number}_{source} -> v{number}_{place};" for source in piece.sources]
            color = "#7d55c7" if piece.kind == "launch" else "#2a9d6f"
            lines += [f'    v{number}_{s} -> v{number}_{place} [color="{color}"];' for s in piece.bucket_edges]
            if piece.kind != "compute" and place > 0:
                # What it stands behind: without it the layout would not show when it happens.
                lines.append(f'    v{number}_{place - 1} -> v{number}_{place} [style=dotted, color="#8a94a3"];')
        lines.append("  }")
    return "\n".join([*lines, "}"]) + "\n"


_PANEL, _BOX, _BUCKET, _SLOT, _HEIGHT = 640, 270, 170, 42, 32
_BOX_X, _BUCKET_X, _TOP = 130, 450, 70
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1c2430; } .small { font-size: 11px; fill: #5b6675; }
.title { font-size: 15px; font-weight: 600; }
.compute rect { fill: #dce9f9; stroke: #3b78c3; } .launch rect { fill: #e4d9f7; stroke: #7d55c7; }
.wait rect { fill: #d3efe3; stroke: #2a9d6f; } .data { fill: none; stroke: #b3bcc8; }
.writes { fill: none; stroke: #7d55c7; stroke-width: 1.4; } .reads { fill: none; stroke: #2a9d6f; stroke-width: 1.4; }
"""


def graph_svg(variants: Sequence[Variant], groups: Mapping[Key, BucketGroup]) -> str:
    """The same as a picture, one column per variant, time running down."""
    columns = [(variant, pieces_of(variant, groups)) for variant in variants]
    height = _TOP + _SLOT * max((len(pieces) for _, pieces in columns), default=0) + 10
    parts = [element("rect", width=_PANEL * len(columns), height=height, fill="#fff")]
    for number, (variant, pieces) in enumerate(columns):
        shift = number * _PANEL
        parts.append(label(shift + 20, 26, variant.title, "title"))
        parts.append(label(shift + 20, 46, "boxes: nodes of one module, in execution order; grey: data", "small"))
        parts += [_edges(piece, place, pieces, shift) for place, piece in enumerate(pieces)]
        parts += [_box(piece, place, groups, shift) for place, piece in enumerate(pieces)]
    return element(
        "svg",
        element("style", _STYLE) + "\n".join(parts),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_PANEL * len(columns)} {height}",
        width=_PANEL * len(columns),
        height=height,
        class_="graph",
    )


def _y(place: int) -> int:
    return _TOP + place * _SLOT


def _box(piece: Piece, place: int, groups: Mapping[Key, BucketGroup], shift: int) -> str:
    is_compute = piece.kind == "compute"
    x, width = shift + (_BOX_X if is_compute else _BUCKET_X), _BOX if is_compute else _BUCKET
    content = element("title", escape(_tooltip(piece, groups)))
    content += element("rect", x=x, y=_y(place), width=width, height=_HEIGHT, rx=4)
    content += label(x + 10, _y(place) + (14 if is_compute else 20), text.shortened(piece.title, 40))
    if is_compute:
        content += label(x + 10, _y(place) + 27, _subtitle(piece), "small")
    bucket = "" if piece.group is None else ".".join(map(str, piece.group))
    return element("g", content, class_=piece.kind, data_bucket=bucket)


def _edges(piece: Piece, place: int, pieces: Sequence[Piece], shift: int) -> str:
    paths = []
    middle = _y(place) + _HEIGHT / 2
    left = shift + _BOX_X
    previous = next((p for p in range(place - 1, -1, -1) if pieces[p].kind == "compute"), None)
    for source in piece.sources:
        if source == previous:
            x = left + 40
            d = f"M{x} {_y(source) + _HEIGHT}V{_y(place)}"
        else:
            # The further back, the wider the arc.
            reach = min(110, 22 + 7 * (place - source))
            begin = _y(source) + _HEIGHT / 2
            d = f"M{left} {begin}C{left - reach} {begin} {left - reach} {middle} {left} {middle}"
        paths.append(element("path", d=d, class_="data"))
    right, bucket_x = shift + _BOX_X + _BOX, shift + _BUCKET_X
    for source in piece.bucket_edges:
        begin = _y(source) + _HEIGHT / 2
        if piece.kind == "launch":
            d = f"M{right} {begin}C{right + 26} {begin} {bucket_x - 26} {middle} {bucket_x} {middle}"
            paths.append(element("path", d=d, class_="writes"))
        else:
            d = f"M{bucket_x} {begin}C{bucket_x - 26} {begin} {right + 26} {middle} {right} {middle}"
            paths.append(element("path", d=d, class_="reads"))
    return "".join(paths)
