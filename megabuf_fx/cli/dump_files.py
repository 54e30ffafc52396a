"""Reading what ``MEGABUF_DUMP`` wrote, into frozen values.

Dump -> Variant (one per compiled graph and role) -> Node, Pass, Boundary
     -> Model -> Bucket group
     -> RecordedStep, if the run had MEGABUF_PROFILE=1
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabuf_fx.cli.errors import CliError
from megabuf_fx.cli.text import shortened
from megabuf_fx.dump import FORMAT_VERSION
from megabuf_fx.runtime.quantized_formats import gathered_bits

Key = tuple[int, int]
"""Bucket group, as ``(model, group)``."""
Models = Mapping[int, int]
"""Of each model, by registry id (``handle``): its place among those of the dump. Ids depend on what else a process has
attached, and two dumps of one program must be comparable."""

_ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a final graph; fields as in ``graph_nodes.py``."""

    name: str
    op: str
    inputs: tuple[str, ...]
    kind: str
    flops: int
    nbytes: int
    module: str
    source: str
    params: tuple[str, ...]
    group: Key | None
    first_use: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Pass:
    """The graph after one pass."""

    name: str
    nodes: int
    ops: Mapping[str, int]
    text: str
    """The readable graph."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """Where a graph starts the reduction of a bucket group."""

    key: Key
    trigger: str
    trigger_op: str
    source: str
    scaled: bool
    """Gradients were multiplied by their factor where they were written."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled variant of one graph, as ``graph0_backward_overwrite_sync``."""

    graph: int
    name: str
    kind: str
    inner_compiler: str
    nodes: tuple[Node, ...]
    passes: tuple[Pass, ...]
    boundaries: tuple[Boundary, ...]

    @property
    def title(self) -> str:
        return f"graph {self.graph} {self.name}"


@dataclass(frozen=True, slots=True)
class BucketGroup:
    """What travels together: parameters in buffer order, sizes with padding."""

    key: Key
    params: tuple[str, ...]
    sizes: tuple[int, ...]
    """Elements of each parameter."""
    numel: int
    """Elements of all its buckets, padding included."""
    grad_nbytes: int
    param_nbytes: int
    grad_dtype: str
    param_dtype: str
    ranks: int
    """Ranks that share it."""
    sharded: bool
    has_early_gather: bool
    """Its parameters are gathered during the next forward, not inside ``step``."""
    prefetch: int | None
    """Gathers in flight beyond the one that is waited for; None for all."""
    is_scaled: bool
    """Gradients are multiplied in a pass of its own before they are sent."""
    is_summed_here: bool
    """Each rank sums what it has received itself, when the result is needed."""

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.numel - sum(self.sizes)

    @property
    def label(self) -> str:
        return self.label_within(1000)

    def label_within(self, width: int) -> str:
        """First and last parameter and their number, in about ``width`` characters."""
        if len(self.params) == 1:
            return shortened(self.params[0], width)
        count = f" ({len(self.params)})"
        each = (width - len(count) - 5) // 2
        return f"{shortened(self.params[0], each)} ... {shortened(self.params[-1], each)}{count}"

    @property
    def number(self) -> str:
        """As it is called in tables: the group's index, with the model where that is not the first."""
        model, group = self.key
        return str(group) if model == 0 else f"{model}.{group}"


@dataclass(frozen=True, slots=True)
class Span:
    """A recorded stretch of time, in microseconds since the step began."""

    kind: str
    """run, launch or wait."""
    name: str
    key: Key | None
    begin: float
    end: float
    done: float | None
    """Of a launch: when its collectives had finished."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    number: int
    end: float
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Dump:
    """One rank's dump. Steps that compiled something are left out of ``steps``."""

    path: Path
    rank: int
    variants: tuple[Variant, ...]
    groups: Mapping[Key, BucketGroup]
    """In the order of the plan, which is that of reductions."""
    digests: Mapping[int, str]
    """Of each model's layout, by model."""
    steps: tuple[RecordedStep, ...]


def read_dump(path: Path, *, rank: int = 0) -> Dump:
    """Read the directory that MEGABUF_DUMP named.

    Raises:
        CliError: no such directory, no dump in it, a file that is no JSON, or one of another format version.
    """
    if not path.is_dir():
        raise CliError(f"{path} is not a directory; give the one that MEGABUF_DUMP named")
    directory = path / f"rank{rank}"
    folders = sorted(directory.glob("graph*_*/"), key=lambda folder: _place(folder.name))
    if not folders:
        others = sorted(other.name for other in path.glob("rank*/"))
        hint = f"it has {', '.join(others)}" if others else "run the program with MEGABUF_DUMP set to it"
        raise CliError(f"{path} has no dump of rank {rank} (no rank{rank}/graph*_*); {hint}")
    try:
        return _read_folders(path, rank, folders)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CliError(f"a file in {directory} lacks what it should have ({error!r}); write the dump again") from None


def _read_folders(path: Path, rank: int, folders: Sequence[Path]) -> Dump:
    plans = [_read_json(folder / "plan.json") for folder in folders]
    handles = sorted({int(handle) for plan in plans for handle in plan["models"]})
    models = {handle: place for place, handle in enumerate(handles)}
    groups: dict[Key, BucketGroup] = {}
    digests: dict[int, str] = {}
    for plan in plans:
        for handle, model in plan["models"].items():
            place = models[int(handle)]
            if place not in digests:
                digests[place] = model["digest"]
                groups.update(_groups(place, model, plan["transport"][handle]))
    variants = tuple(_variant(folder, plan, models) for folder, plan in zip(folders, plans))
    for boundary in (boundary for variant in variants for boundary in variant.boundaries if boundary.scaled):
        groups[boundary.key] = dataclasses.replace(groups[boundary.key], is_scaled=False)
    return Dump(
        path=path,
        rank=rank,
        variants=variants,
        groups=groups,
        digests=digests,
        steps=_steps(path / f"rank{rank}", models),
    )


def _place(name: str) -> tuple[int, bool, str]:
    """Forwards ahead of backwards."""
    graph, variant = _numbered(name)
    return graph, "backward" in variant, variant


def _numbered(name: str) -> tuple[int, str]:
    match = re.fullmatch(r"graph(\d+)_(.*)", name)
    return (int(match[1]), match[2]) if match else (-1, name)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}; write the dump again with this megabuf_fx") from None
    except ValueError as error:
        raise CliError(f"{path} is not JSON ({error}); write the dump again") from None
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise CliError(
            f"{path} has format version {version}, this megabuf reads {FORMAT_VERSION}; write the dump again"
        )
    return dict(content)


def _variant(folder: Path, plan: Mapping[str, Any], models: Models) -> Variant:
    graph, name = _numbered(folder.name)
    nodes = _read_json(folder / "graph.json")["nodes"]
    return Variant(
        graph=graph,
        name=name,
        kind=plan["kind"],
        inner_compiler=plan["inner_compiler"],
        nodes=tuple(_node(record, models) for record in nodes),
        passes=tuple(
            Pass(entry["name"], entry["nodes"], entry["ops"], _text(folder / f"{place:02d}_{entry['name']}.py"))
            for place, entry in enumerate(plan["passes"])
        ),
        boundaries=tuple(
            Boundary(_key((b["handle"], b["group"]), models), b["trigger"], b["trigger_op"], b["source"], b["scaled"])
            for b in plan["boundaries"]
        ),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}; write the dump again") from None


def _node(record: Mapping[str, Any], models: Models) -> Node:
    return Node(
        name=record["name"],
        op=record["op"],
        inputs=tuple(record["inputs"]),
        kind=record["kind"],
        flops=record["flops"],
        nbytes=record["nbytes"],
        module=record["module"],
        source=record["source"],
        params=tuple(record["params"]),
        group=None if record["group"] is None else _key(record["group"], models),
        first_use=tuple(_key(pair, models) for pair in record["first_use"]),
    )


def _key(pair: Sequence[Any], models: Models) -> Key:
    """From ``(handle, group)``."""
    return models[int(pair[0])], int(pair[1])


def _groups(place: int, model: Mapping[str, Any], transport: Mapping[str, Any]) -> dict[Key, BucketGroup]:
    found = {}
    specs = {spec["name"]: spec for spec in model["params"]}
    for index, buckets in enumerate(model["groups"]):
        members: list[dict[str, Any]] = []
        numel = grad_nbytes = param_bits = 0
        for bucket in buckets:
            buffer = model["buffers"][bucket["buffer"]]
            inside = [param for param in buffer["params"] if param["bucket"] == bucket["bucket"]]
            members += sorted(inside, key=lambda param: int(param["start"]))
            count = bucket["end"] - bucket["start"]
            numel += count
            grad_nbytes += count * _ITEMSIZE.get(buffer["grad_dtype"], 4)
            # All parameters of a buffer have one format.
            spec = specs[buffer["params"][0]["name"]]
            param_bits += count * gathered_bits(spec["quantized"], _ITEMSIZE.get(spec["dtype"], 4))
        first = model["buffers"][buckets[0]["buffer"]]
        found[place, index] = BucketGroup(
            key=(place, index),
            params=tuple(param["name"] for param in members),
            sizes=tuple(param["end"] - param["start"] for param in members),
            numel=numel,
            grad_nbytes=grad_nbytes,
            param_nbytes=param_bits // 8,
            grad_dtype=first["grad_dtype"],
            param_dtype=first["param_dtype"],
            ranks=model["expert_dp_size"] if first["is_expert_parallel"] else model["dp_size"],
            sharded=model["sharded"],
            has_early_gather=transport["overlap_param_gather"],
            prefetch=transport["param_gather_prefetch"],
            is_scaled=transport["scales"][buckets[0]["buffer"]],
            is_summed_here=model["sharded"] and transport["sums"][buckets[0]["buffer"]],
        )
    return found


def _steps(directory: Path, models: Models) -> tuple[RecordedStep, ...]:
    """Steps of all models; those of several models are matched by their number."""
    found: dict[int, list[Span]] = {}
    ends: dict[int, float] = {}
    origins: dict[int, float] = {}
    skipped: set[int] = set()
    contents = [_read_json(path) for path in sorted(directory.glob("profile_model*.json"))]
    # A model without compiled graphs has no bucket here.
    contents = [content for content in contents if int(content["handle"]) in models]
    for content in contents:
        for step in content["steps"]:
            number = int(step["step"])
            if step["has_compile"]:
                skipped.add(number)
            shift = step["origin_us"] - origins.setdefault(number, step["origin_us"])
            ends[number] = max(ends.get(number, 0.0), step["end_us"] + shift)
            for span in step["spans"]:
                # A graph that spans several models is in the file of each.
                if span["kind"] == "run" and content is not contents[0]:
                    continue
                key = None if span["group"] is None else _key((content["handle"], span["group"]), models)
                done = None if span["done_us"] is None else span["done_us"] + shift
                times = (span["begin_us"] + shift, span["end_us"] + shift, done)
                found.setdefault(number, []).append(Span(span["kind"], span["name"], key, *times))
    return tuple(
        RecordedStep(number, ends[number], tuple(sorted(spans, key=lambda span: span.begin)))
        for number, spans in sorted(found.items())
        if number not in skipped
    )
