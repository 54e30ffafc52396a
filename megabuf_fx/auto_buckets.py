"""``bucket_size="auto"``: the bucket boundaries with which a step is predicted to wait least.

[Note: what is predicted]
A bucket group is sent when its last gradient is there and its predecessors have been sent; the link carries one
reduction after the other, in launch order. Counted is how long the last of them outlasts the backward. Gathers that
overlap a forward follow each other from its start, the last group's first, and a forward stands still while it reads
what has not come; other gathers count with their latency, as their bytes are the same however they are cut. Left out,
as they hardly depend on the boundaries: scaling gradients and summing what was received, kernels and collectives that
slow each other down, a bounded prefetch. When a parameter is read and a gradient complete is where the traced graphs do
it (``traced_step.py``); rates are those of ``cost_model.py``.

[Note: candidates]
Each buffer is cut by ``bucket_cuts.choose_cuts`` as though it had the link to itself, which is the best there is for a
model with one buffer whose gathers do not overlap. Where they do, a large bucket that is reduced last is also waited
for first: then cuts with buckets of at most so many elements compete, for each of the fixed sizes. All those, and fixed
sizes, are judged by one function on whole plans, where buffers share the link: the choice is never predicted worse than
any of the fixed sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from megabuf_fx.bucket_cuts import CutCosts, choose_cuts
from megabuf_fx.config import MegabufConfig
from megabuf_fx.cost_model import Device, Link, Route
from megabuf_fx.runtime.layout import BucketEnds, BufferLayout, ParamSpec
from megabuf_fx.runtime.plan import BucketGroup, BucketPlan, layout_policy
from megabuf_fx.runtime.quantized_formats import gathered_bits
from megabuf_fx.traced_step import StepTimes, TracedStep

HALVINGS = 8
"""Fixed sizes that compete: all elements, half of them, and so on so many times, and the default size."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to cut, by its name: ``auto``, that and the most elements of a bucket, ``default``, or ``size`` and a
    number of elements."""

    name: str
    buckets: int
    waiting_us: float
    """Predicted time that a step stands still; see [Note: what is predicted]."""


@dataclass(frozen=True, slots=True)
class BucketChoice:
    """What was chosen for one model, and from what."""

    ends: BucketEnds
    device: Device
    link: Link
    backward_us: float
    """Predicted time that the backward computes."""
    candidates: tuple[Candidate, ...]
    """The chosen one first."""

    def __str__(self) -> str:
        best = self.candidates[0]
        others = ", ".join(
            f"{other.name} {other.buckets} buckets {other.waiting_us / 1e3:.3g} ms" for other in self.candidates[1:]
        )
        return (
            f"{best.buckets} buckets ({best.name}), predicted to wait {best.waiting_us / 1e3:.3g} ms, with a backward "
            f"of {self.backward_us / 1e3:.3g} ms; others: {others}"
        )


def choose_buckets(
    traced: TracedStep,
    device: Device,
    link: Link,
    *,
    config: MegabufConfig,
    default_size: int,
    plan_of: Callable[[int | BucketEnds], BucketPlan],
) -> BucketChoice:
    """Choose boundaries; the same arguments give the same choice.

    ``plan_of`` lays the model out for a bucket size, a number of elements or boundaries.
    """
    times = traced.times(device)
    default = plan_of(default_size)
    routes = {index: route_of(default, layout, config) for index, layout in enumerate(default.layouts)}
    sizes = _fixed_sizes(default)

    def judged(name: str, plan: BucketPlan) -> tuple[Candidate, BucketEnds]:
        waiting = predict_waiting(plan, times, routes=routes, link=link, overlaps_gather=config.overlap_param_gather)
        return Candidate(name, sum(len(group.buckets) for group in plan.groups), waiting), plan.bucket_ends

    def cut(largest: int | None) -> BucketPlan:
        cuts = (
            _cut(default, layout, times, config=config, route=routes[index], link=link, largest=largest)
            for index, layout in enumerate(default.layouts)
        )
        return plan_of(BucketEnds(frozenset(itertools.chain.from_iterable(cuts))))

    found = [judged("auto", cut(None)), judged("default", default)]
    if config.overlap_param_gather:
        found += [judged(f"auto, at most {size}", cut(size)) for size in sizes[1:]]
    found += [judged(f"size {size}", plan_of(size)) for size in sizes]
    least = min(candidate.waiting_us for candidate, _ in found)
    # Sums of floats in another order differ in their last digits.
    equal = [entry for entry in found if entry[0].waiting_us <= least * (1 + 1e-9)]
    best, ends = min(equal, key=lambda entry: entry[0].buckets)
    others = [candidate for candidate, _ in found if candidate is not best]
    return BucketChoice(ends, device, link, times.backward, (best, *others))


def predict_waiting(
    plan: BucketPlan, times: StepTimes, *, routes: Mapping[int, Route], link: Link, overlaps_gather: bool
) -> float:
    """Microseconds that a step with this plan stands still; see [Note: what is predicted].

    ``routes`` are by buffer; ``overlaps_gather`` is ``overlap_param_gather``.
    """
    free = asked = 0.0
    for group in plan.groups:
        asked = max(asked, *(times.ready[param] for param in group.params))
        free = max(free, asked) + _reduce_time(plan, group, routes, link)
    reducing = max(0.0, free - times.backward)
    if not overlaps_gather:
        buckets = (bucket for group in plan.groups for bucket in group.buckets)
        return reducing + sum(routes[bucket.buffer].gather_latency(link) for bucket in buckets)
    gathered = gathering = 0.0
    for group in reversed(plan.groups):
        gathered += _gather_time(plan, group, routes, link)
        gathering = max(gathering, gathered - min(times.needed[param] for param in group.params))
    return reducing + gathering


def route_of(plan: BucketPlan, layout: BufferLayout, config: MegabufConfig) -> Route:
    """What carries the buckets of one buffer."""
    return Route(
        ranks=plan.dp_size_of(layout.key),
        instances=config.num_distributed_optimizer_instances,
        sharded=plan.sharded,
        gathered=plan.is_gathered,
    )


def _reduce_time(plan: BucketPlan, group: BucketGroup, routes: Mapping[int, Route], link: Link) -> float:
    return sum(
        routes[bucket.buffer].reduce_time(link, bucket.numel * plan.layouts[bucket.buffer].key.grad_dtype.itemsize)
        for bucket in group.buckets
    )


def _gather_time(plan: BucketPlan, group: BucketGroup, routes: Mapping[int, Route], link: Link) -> float:
    return sum(
        routes[bucket.buffer].gather_time(link, sum(_gathered_bytes(plan.params[param]) for param in bucket.params))
        for bucket in group.buckets
    )


def _gathered_bytes(spec: ParamSpec) -> float:
    return spec.numel * gathered_bits(spec.quantized, spec.dtype.itemsize) / 8


def _cut(
    plan: BucketPlan,
    layout: BufferLayout,
    times: StepTimes,
    *,
    config: MegabufConfig,
    route: Route,
    link: Link,
    largest: int | None,
) -> Iterator[int]:
    """The parameters after which buckets of one buffer end."""
    order = list(reversed(layout.params))
    # A layer-wise layout is not cut by this policy; its padding is seen where whole plans are judged.
    policy = layout_policy(
        [plan.params[param] for param in order],
        dp_size=route.ranks,
        sharded=plan.sharded,
        dense=config.dense_layout,
        pad_for_high_busbw=config.pad_buckets_for_high_nccl_busbw,
    )
    costs = CutCosts(
        alignment=policy.param_alignment,
        divisor=policy.bucket_divisor,
        fixed_us=route.reduce_time(link, 0),
        element_us=link.time_of_bytes(route.reduce_share * layout.key.grad_dtype.itemsize),
        bucket_us=route.gather_latency(link),
    )
    isolated = [
        place
        for place, param in enumerate(order)
        if policy.isolate_shared_embedding and plan.params[param].shared_embedding
    ]
    sizes = [plan.params[param].numel for param in order]
    ready = [times.ready[param] for param in order]
    for cut in choose_cuts(sizes, ready, costs, end_us=times.backward, apart=isolated, largest=largest):
        yield order[cut - 1]


def _fixed_sizes(plan: BucketPlan) -> list[int]:
    numel = sum(spec.numel for spec in plan.params)
    return sorted({max(1, numel >> halvings) for halvings in range(HALVINGS + 1)}, reverse=True)
