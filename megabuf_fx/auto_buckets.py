"""``bucket_size="auto"``: the bucket boundaries with which a step is predicted to wait least.

[Note: what is predicted]
A bucket group is sent when its last gradient is there and its predecessors have been sent; the link carries one
reduction after the other, in launch order. Counted is how long the last of them outlasts the backward, and the latency
of every gather (its bytes are the same however they are cut). Left out, as they hardly depend on the boundaries:
scaling gradients and summing what was received, kernels and collectives that slow each other down, forward compute that
hides gathers. A gradient is complete where the traced backward computes it (``traced_backward.py``); rates are those
of ``cost_model.py``.

[Note: candidates]
Each buffer is cut by ``bucket_cuts.choose_cuts`` as though it had the link to itself, which is the best there is for a
model with one buffer. Those cuts, and fixed sizes, are then judged by one function on whole plans, where buffers share
the link: the choice is never predicted worse than any of the fixed sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megabuf_fx.bucket_cuts import CutCosts, choose_cuts
from megabuf_fx.config import MegabufConfig
from megabuf_fx.cost_model import Device, Link, Route
from megabuf_fx.runtime.layout import BucketEnds, BufferLayout
from megabuf_fx.runtime.plan import BucketGroup, BucketPlan, layout_policy
from megabuf_fx.traced_backward import TracedBackward

HALVINGS = 8
"""Fixed sizes that compete: all elements, half of them, and so on so many times, and the default size."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to cut, by its name: ``auto``, ``default``, or ``size`` and a number of elements."""

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
            f"{best.buckets} buckets ({best.name}), predicted to wait {best.waiting_us / 1e3:.3g} ms after a backward "
            f"of {self.backward_us / 1e3:.3g} ms; others: {others}"
        )


def choose_buckets(
    traced: TracedBackward,
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
    ready, end = traced.times(device)
    default = plan_of(default_size)
    routes = {index: route_of(default, layout, config) for index, layout in enumerate(default.layouts)}

    def judged(name: str, plan: BucketPlan) -> tuple[Candidate, BucketEnds]:
        waiting = predict_waiting(plan, ready, end, routes=routes, link=link)
        return Candidate(name, sum(len(group.buckets) for group in plan.groups), waiting), plan.bucket_ends

    cuts = frozenset(
        param
        for index, layout in enumerate(default.layouts)
        for param in _cut(default, layout, ready, end, config=config, route=routes[index], link=link)
    )
    found = [judged("auto", plan_of(BucketEnds(cuts))), judged("default", default)]
    found += [judged(f"size {size}", plan_of(size)) for size in _fixed_sizes(default)]
    least = min(candidate.waiting_us for candidate, _ in found)
    # Sums of floats in another order differ in their last digits.
    equal = [entry for entry in found if entry[0].waiting_us <= least * (1 + 1e-9)]
    best, ends = min(equal, key=lambda entry: entry[0].buckets)
    others = [candidate for candidate, _ in found if candidate is not best]
    return BucketChoice(ends, device, link, end, (best, *others))


def predict_waiting(
    plan: BucketPlan,
    ready: Sequence[float],
    end: float,
    *,
    routes: dict[int, Route],
    link: Link,
) -> float:
    """Microseconds that a step with this plan stands still; see [Note: what is predicted].

    ``ready`` is when the gradient of each parameter is complete, ``end`` when the backward is; ``routes`` are by
    buffer.
    """
    free = asked = gathers = 0.0
    for group in plan.groups:
        asked = max(asked, *(ready[param] for param in group.params))
        free = max(free, asked) + _reduce_time(plan, group, routes, link)
        gathers += sum(routes[bucket.buffer].gather_latency(link) for bucket in group.buckets)
    return max(0.0, free - end) + gathers


def route_of(plan: BucketPlan, layout: BufferLayout, config: MegabufConfig) -> Route:
    """What carries the buckets of one buffer."""
    return Route(
        ranks=plan.dp_size_of(layout.key),
        instances=config.num_distributed_optimizer_instances,
        sharded=plan.sharded,
        gathered=plan.is_gathered,
    )


def _reduce_time(plan: BucketPlan, group: BucketGroup, routes: dict[int, Route], link: Link) -> float:
    return sum(
        routes[bucket.buffer].reduce_time(link, bucket.numel * plan.layouts[bucket.buffer].key.grad_dtype.itemsize)
        for bucket in group.buckets
    )


def _cut(
    plan: BucketPlan,
    layout: BufferLayout,
    ready: Sequence[float],
    end: float,
    *,
    config: MegabufConfig,
    route: Route,
    link: Link,
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
    for cut in choose_cuts(sizes, [ready[param] for param in order], costs, end_us=end, apart=isolated):
        yield order[cut - 1]


def _fixed_sizes(plan: BucketPlan) -> list[int]:
    numel = sum(spec.numel for spec in plan.params)
    return sorted({max(1, numel >> halvings) for halvings in range(HALVINGS + 1)}, reverse=True)
