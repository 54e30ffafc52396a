"""``megabuf explain``: what the passes did, what is in each bucket, and when it travels. Text."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence

from tabulate import tabulate

from megabuf_fx.cli import text
from megabuf_fx.cli.dump_files import BucketGroup, Dump, Key, Node, Pass, Variant
from megabuf_fx.cli.schedule import Direction, Schedule, median_exposed
from megabuf_fx.cost_model import Device, Link

_PARAMS_WIDTH = 60
_SOURCE_WIDTH = 60


def explain_passes(variant: Variant, *, with_text: bool) -> str:
    """Node counts after each pass and the ops that it added and removed; ``with_text`` adds the diff of the graphs."""
    rows = []
    for before, after in zip((None, *variant.passes), variant.passes):
        rows.append((after.name, after.nodes, _change(before, after) if before is not None else ""))
    parts = [
        f"{variant.title} ({variant.inner_compiler})",
        tabulate(rows, headers=("pass", "nodes", "change"), tablefmt="simple"),
    ]
    if with_text:
        for before, after in zip(variant.passes, variant.passes[1:]):
            lines = list(
                difflib.unified_diff(
                    before.text.splitlines(), after.text.splitlines(), before.name, after.name, lineterm="", n=1
                )
            )
            if lines:
                parts.append("\n".join(lines))
    return "\n".join(parts)


def _change(before: Pass, after: Pass) -> str:
    counts = {op: after.ops.get(op, 0) - before.ops.get(op, 0) for op in sorted({*before.ops, *after.ops})}
    # What is not a call is an input: outputs stay one, and constants are never added.
    inputs = after.nodes - before.nodes - sum(counts.values())
    changes = [f"{count:+d} {op}" for op, count in counts.items() if count]
    if inputs:
        changes.insert(0, f"{inputs:+d} inputs")
    return ", ".join(changes) or "-"


def bucket_rows(dump: Dump) -> str:
    """One row per bucket group: what is in it, and which node of which line launches its reduction."""
    launched: dict[Key, tuple[str, str]] = {}
    for variant in dump.variants:
        for boundary in variant.boundaries:
            launched[boundary.key] = (
                f"{boundary.trigger} [{boundary.trigger_op}]",
                boundary.source[:_SOURCE_WIDTH],
            )
    rows = []
    for key, group in dump.groups.items():
        trigger, source = launched.get(key, ("host, after backward", ""))
        rows.append(
            (
                group.number,
                group.label_within(_PARAMS_WIDTH),
                sum(group.sizes),
                group.padding,
                f"{text.nbytes(group.grad_nbytes)} {group.grad_dtype}",
                trigger,
                source,
            )
        )
    headers = ("bucket", "parameters", "elements", "padding", "gradients", "launched after", "source")
    return str(tabulate(rows, headers=headers, tablefmt="simple", intfmt=",", disable_numparse=[0]))


def collective_name(group: BucketGroup, direction: Direction) -> str:
    if direction == "gather":
        return "all_gather"
    return "reduce_scatter" if group.sharded else "all_reduce"


def schedule_rows(schedule: Schedule, groups: Mapping[Key, BucketGroup]) -> str:
    """One row per collective, in launch order."""
    rows = [
        (
            groups[transfer.key].number,
            collective_name(groups[transfer.key], transfer.direction),
            f"{transfer.launch:.1f}",
            f"{transfer.begin:.1f} - {transfer.end:.1f}",
            f"{transfer.need:.1f}" if transfer.need is not None else "-",
            f"{transfer.hidden_ops} ops, {text.flops(transfer.hidden_flops)}",
            f"{transfer.exposed:.1f}",
            transfer.why,
            transfer.waiter,
        )
        for transfer in schedule.transfers
    ]
    headers = ("bucket", "collective", "launch", "on the link", "needed", "compute between", "exposed", "why", "for")
    return str(tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True))


def summary(schedule: Schedule) -> str:
    share = 100 * schedule.exposed / schedule.end if schedule.end else 0.0
    return (
        f"{schedule.title}: step {text.microseconds(schedule.end)}, computing {text.microseconds(schedule.busy)}, "
        f"standing still for communication {text.microseconds(schedule.exposed)} ({share:.0f}%)"
    )


def rates(device: Device, link: Link) -> str:
    launch = f", {link.launch_us:.4g} us per launch" if link.launch_us else ""
    return (
        f"link {link.gbps:.4g} Gbit/s + {link.alpha_us:.4g} us per message{launch}; "
        f"device {device.tflops:.4g} Tflop/s, "
        f"{device.memory_gbs:.4g} GB/s, {device.op_us:.4g} us per operation at least"
    )


def comparison_rows(dump: Dump, predicted: Schedule) -> str:
    """Exposed time per bucket, predicted beside the median of what was recorded."""
    recorded = median_exposed(dump.steps)
    rows, absolute = [], 0.0
    expected = {(t.key, t.direction): t.exposed for t in predicted.transfers}
    for (key, direction), exposed in expected.items():
        group = dump.groups[key]
        if (key, direction) in recorded:
            difference = exposed - recorded[key, direction]
            absolute += abs(difference)
            cells = (f"{exposed:.1f}", f"{recorded[key, direction]:.1f}", f"{difference:+.1f}")
        else:
            cells = (f"{exposed:.1f}", "-", "-")
        rows.append((group.number, collective_name(group, direction), *cells))
    total = sum(recorded.values())
    rows.append(("all", "", f"{predicted.exposed:.1f}", f"{total:.1f}", f"{predicted.exposed - total:+.1f}"))
    headers = ("bucket", "collective", "predicted us", "measured us", "difference us")
    table = tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True, colalign=("left", "left"))
    share = f", {100 * absolute / total:.0f}% of what was measured" if total else ""
    return f"{table}\nsum of absolute differences {absolute:.1f} us{share}; {len(dump.steps)} steps"


def differences(old: Dump, new: Dump) -> list[str]:
    """What changed between two dumps: layout of buckets, and where graphs launch and wait. Empty: nothing.

    Graphs are matched by their order and role. Names of nodes and source lines may differ.
    """
    found = [*_layout_differences(old, new)]
    left, right = _by_place(old.variants), _by_place(new.variants)
    for place in left.keys() - right.keys():
        found.append(f"- {place}: no longer there")
    for place in right.keys() - left.keys():
        found.append(f"+ {place}: new")
    for place in left:
        if place in right:
            found += _schedule_differences(place, left[place].nodes, right[place].nodes)
    return found


def _layout_differences(old: Dump, new: Dump) -> Iterator[str]:
    for key in dict.fromkeys([*old.groups, *new.groups]):
        before, after = old.groups.get(key), new.groups.get(key)
        if before is None or after is None:
            sign, group = ("+", after) if before is None else ("-", before)
            assert group is not None
            yield f"{sign} bucket {group.number}: {_described(group)}"
        elif before != after:
            yield f"! bucket {after.number}: {_described(before)} -> {_described(after)}"
            moved = sorted({*before.params} ^ {*after.params})
            if moved:
                yield f"    in one of them only: {', '.join(moved)}"
    for model in old.digests.keys() & new.digests.keys():
        if old.digests[model] != new.digests[model] and old.groups == new.groups:
            yield f"! model {model}: the layout inside its buckets"


def _described(group: BucketGroup) -> str:
    mode = "sharded" if group.sharded else "not sharded"
    early = ", gathered in the forward" if group.sharded and group.has_early_gather else ""
    return (
        f"{group.label}, {group.numel:,} elements, gradients {group.grad_dtype}, {mode} over {group.ranks} ranks{early}"
    )


def _by_place(variants: Sequence[Variant]) -> dict[str, Variant]:
    order = {graph: place for place, graph in enumerate(sorted({variant.graph for variant in variants}))}
    return {f"graph {order[variant.graph]} {variant.name}": variant for variant in variants}


def _events(nodes: Sequence[Node]) -> list[tuple[str, str]]:
    """Launches and waits in order, and what stands before each; then what stands behind the last."""
    found, ops, flops = [], 0, 0
    for node in nodes:
        if node.kind in ("launch", "wait") and node.group is not None:
            model, group = node.group
            found.append((f"{node.kind} of bucket {model}.{group}", f"after {ops} operations, {flops} flops"))
            ops = flops = 0
        elif node.kind in ("compute", "write"):
            ops, flops = ops + 1, flops + node.flops
    return [*found, ("end", f"after {ops} operations, {flops} flops")]


def _schedule_differences(place: str, old: Sequence[Node], new: Sequence[Node]) -> Iterator[str]:
    before, after = _events(old), _events(new)
    if [name for name, _ in before] != [name for name, _ in after]:
        yield f"! {place}: {', '.join(name for name, _ in before)} -> {', '.join(name for name, _ in after)}"
        return
    for (name, was), (_, now) in zip(before, after):
        if was != now:
            yield f"! {place}: {name} {was} -> {now}"
