"""``bucket_size="auto"``: the choice on plans, and attached models with it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Mlp, RankGroup, batch, error_text, fresh_compiler, max_difference, seeded, twin
from hypothesis import given, settings
from hypothesis import strategies as st
from test_numerics import ddp_reference
from torch import Tensor, nn

import megabuf_fx as mb
from megabuf_fx._compat import fake_process_group
from megabuf_fx.auto_buckets import choose_buckets, predict_waiting, route_of
from megabuf_fx.cost_model import Device, Link
from megabuf_fx.planning import plan_model
from megabuf_fx.runtime.layout import BucketEnds, ParamSpec, default_bucket_size
from megabuf_fx.runtime.plan import BucketPlan
from megabuf_fx.traced_step import NodeCost, TracedStep

DEVICE = Device(tflops=1, memory_gbs=1, op_us=1)
"""An operation of ``n`` kB takes ``n`` microseconds."""
RATES: dict[str, Any] = {
    "link_gbps": 0.1,
    "link_alpha_us": 1,
    "device_tflops": 1e-4,
    "device_memory_gbs": 0.1,
    "device_op_us": 5,
}
"""With which ``Mlp`` is cut at several places."""
AUTO: dict[str, Any] = {"bucket_size": "auto", "inner_compiler": "aot_eager", **RATES}


def traced(times: Sequence[int]) -> TracedStep:
    """A gradient after each time, in microseconds, in reverse definition order; the forward reads the parameters in
    order and takes as long."""
    nodes = tuple(NodeCost("compute", 0, 1000 * time) for time in times)
    count = len(times)
    return TracedStep(nodes[::-1], tuple(range(count)), nodes, tuple(range(count, 0, -1)))


@st.composite
def models(draw: st.DrawFn, *, one_buffer: bool = False) -> tuple[list[ParamSpec], TracedStep]:
    count = draw(st.integers(1, 6 if one_buffer else 12))
    dtypes = [torch.float32] if one_buffer else [torch.float32, torch.bfloat16]
    specs = [
        ParamSpec(
            f"p{index}",
            (draw(st.integers(1, 3000)),),
            draw(st.sampled_from(dtypes)),
            shared_embedding=draw(st.integers(0, 9)) == 0,
            allreduce=one_buffer or draw(st.integers(0, 3)) > 0,
        )
        for index in range(count)
    ]
    return specs, traced(draw(st.lists(st.integers(1, 50), min_size=count, max_size=count)))


CONFIGS: list[dict[str, Any]] = [
    {},
    {"use_distributed_optimizer": False},
    {"use_distributed_optimizer": False, "dense_layout": True},
    {"num_distributed_optimizer_instances": 2},
    {"overlap_param_gather": True},
    {"grad_reduce_in_fp32": True, "pad_buckets_for_high_nccl_busbw": True},
    {"layer_wise_optimizer": True},
]


def make_planner(config: mb.MegabufConfig, specs: Sequence[ParamSpec]) -> Callable[[int | BucketEnds], BucketPlan]:
    if config.layer_wise_optimizer:
        specs = [dataclasses.replace(spec, is_managed_by_layer_wise_optimizer=True) for spec in specs]
    return lambda size: plan_model(config, specs, dp_size=4, expert_dp_size=2, bucket_size=size)


def waiting_of(plan: BucketPlan, backward: TracedStep, link: Link, config: mb.MegabufConfig) -> float:
    routes = {index: route_of(plan, layout, config) for index, layout in enumerate(plan.layouts)}
    overlaps_gather = config.overlap_param_gather
    return predict_waiting(plan, backward.times(DEVICE), routes=routes, link=link, overlaps_gather=overlaps_gather)


links = st.builds(Link, gbps=st.sampled_from([0.5, 5, 100]), alpha_us=st.sampled_from([0, 1, 10]))


@settings(max_examples=150, deadline=None)
@given(models(), st.sampled_from(CONFIGS), links)
def test_never_predicted_worse_than_a_fixed_size(
    model: tuple[list[ParamSpec], TracedStep], options: dict[str, Any], link: Link
) -> None:
    specs, backward = model
    config = mb.MegabufConfig(**options)
    planner = make_planner(config, specs)
    choose = functools.partial(choose_buckets, backward, DEVICE, link, config=config, plan_of=planner)
    choice = choose(default_size=1000)
    plan = planner(choice.ends)
    assert choice.candidates[0].waiting_us == pytest.approx(waiting_of(plan, backward, link, config))
    numel = sum(spec.numel for spec in specs)
    for size in (1000, numel, numel // 2, numel // 4, numel // 16):
        fixed = waiting_of(planner(max(1, size)), backward, link, config)
        assert waiting_of(plan, backward, link, config) <= fixed * (1 + 1e-9)
    assert choose(default_size=1000) == choice
    # What a dump says of the plan leads back to it.
    assert plan.bucket_ends == choice.ends
    assert planner(plan.bucket_ends).digest == plan.digest
    if plan.sharded:
        for group in plan.groups:
            for bucket in group.buckets:
                shared = [param for param in bucket.params if specs[param].shared_embedding]
                assert not shared or len(bucket.params) == 1


@settings(max_examples=80, deadline=None)
@given(models(one_buffer=True), st.sampled_from(CONFIGS[:4]), links)  # those whose gathers do not overlap
def test_best_of_all_boundaries(model: tuple[list[ParamSpec], TracedStep], options: dict[str, Any], link: Link) -> None:
    """With one buffer there are no better boundaries."""
    specs, backward = model
    config = mb.MegabufConfig(**options)
    planner = make_planner(config, specs)
    choice = choose_buckets(backward, DEVICE, link, config=config, plan_of=planner, default_size=1000)
    every = [
        waiting_of(planner(BucketEnds(frozenset(ends))), backward, link, config)
        for count in range(len(specs))
        for ends in itertools.combinations(range(1, len(specs)), count)
    ]
    assert choice.candidates[0].waiting_us == pytest.approx(min(every), rel=1e-9, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(models(), st.sampled_from(CONFIGS), st.integers(1, 9000))
def test_ends_describe_any_plan(model: tuple[list[ParamSpec], TracedStep], options: dict[str, Any], size: int) -> None:
    """The boundaries of a plan with a fixed size give the same places again."""
    planner = make_planner(mb.MegabufConfig(**options), model[0])
    plan = planner(size)
    again = planner(plan.bucket_ends)
    assert again.locations == plan.locations
    assert [layout.buckets for layout in again.layouts] == [layout.buckets for layout in plan.layouts]


def test_ranks_and_device_decide() -> None:
    """Nothing is cut where nothing is sent, or where latency is all there is."""
    specs = [ParamSpec(f"p{index}", (1000,), torch.float32) for index in range(8)]
    backward = traced([100] * 8)
    config = mb.MegabufConfig()
    planner = make_planner(config, specs)
    choose = functools.partial(choose_buckets, backward, DEVICE, config=config, default_size=10**6)
    assert choose(Link(1, 1e6), plan_of=planner).candidates[0].buckets == 1
    assert choose(Link(0.3, 0.1), plan_of=planner).candidates[0].buckets > 1
    alone = choose(Link(0.3, 0.1), plan_of=lambda size: plan_model(config, specs, dp_size=1, bucket_size=size))
    assert (alone.candidates[0].buckets, alone.candidates[0].waiting_us) == (1, 0.0)


@settings(max_examples=80, deadline=None)
@given(models(), st.integers(1, 9000), links)
def test_waiting_of_a_forward_is_what_it_would_stand_still(
    model: tuple[list[ParamSpec], TracedStep], size: int, link: Link
) -> None:
    """Played parameter by parameter: each is read when its gather is over, and all gathers started with the forward."""
    specs, step = model
    config = mb.MegabufConfig(overlap_param_gather=True)
    plan = make_planner(config, specs)(size)
    # No gradient is waited for, as the backward takes forever.
    step = dataclasses.replace(step, backward=(*step.backward, NodeCost("compute", 0, 10**12)))
    routes = {index: route_of(plan, layout, config) for index, layout in enumerate(plan.layouts)}
    link_free = 0.0
    arrival: dict[int, float] = {}
    for group in reversed(plan.groups):
        for bucket in group.buckets:
            nbytes = sum(specs[param].numel * specs[param].dtype.itemsize for param in bucket.params)
            link_free += routes[bucket.buffer].gather_time(link, nbytes)
        arrival |= dict.fromkeys(group.params, link_free)
    now = computed = 0.0
    for param, node in enumerate(step.forward):
        now = max(now, arrival[param]) + DEVICE.time_of(node)
        computed += DEVICE.time_of(node)
    assert waiting_of(plan, step, link, config) == pytest.approx(now - computed)


def test_gathers_that_overlap_want_small_buckets_in_the_end() -> None:
    """A backward of 160 us leaves the link busy for 480, however late gradients are cut. A forward of 640 could hide
    all of the 480 but the first gather."""
    specs = [ParamSpec(f"p{index}", (1000,), torch.float32) for index in range(16)]
    step = dataclasses.replace(traced([10] * 16), forward=(NodeCost("compute", 0, 40_000),) * 16)
    link = Link(gbps=0.8, alpha_us=0.1)
    found = {}
    for overlap in (False, True):
        config = mb.MegabufConfig(overlap_param_gather=overlap)
        planner = make_planner(config, specs)
        choice = choose_buckets(step, DEVICE, link, config=config, plan_of=planner, default_size=10**6)
        plan = planner(choice.ends)
        found[overlap] = plan, [len(group.params) for group in plan.groups], choice.candidates[0]
    overlapped = mb.MegabufConfig(overlap_param_gather=True)
    assert found[False][1][-1] > found[True][1][-1]
    assert found[True][2].name.startswith("auto, at most ")
    assert found[True][2].waiting_us < waiting_of(found[False][0], step, link, overlapped)


def test_default_size_is_megatrons() -> None:
    assert default_bucket_size(8) == 40_000_000
    assert default_bucket_size(64) == 64_000_000


# Attached models.


@pytest.fixture
def four_ranks() -> Any:
    """Four ranks of which three exist in name only."""
    with fake_process_group(world_size=4, rank=0):
        yield


@pytest.mark.usefixtures("four_ranks")
def test_attach_cuts_and_reports() -> None:
    model = seeded(Mlp)
    before = [param.detach().clone() for param in model.parameters()]
    state = torch.get_rng_state()
    handle = mb.attach(model, mb.MegabufConfig(**AUTO), example_inputs=(torch.zeros(6, 13),))
    choice = handle.bucket_choice
    assert choice is not None
    assert choice.candidates[0].buckets == len(handle.plan.groups) > 1
    assert choice.ends == handle.plan.bucket_ends
    assert choice.device == Device(tflops=1e-4, memory_gbs=0.1, op_us=5)
    assert choice.link == Link(gbps=0.1, alpha_us=1)
    assert str(choice).startswith(f"{len(handle.plan.groups)} buckets (auto), predicted to wait ")
    assert all(map(torch.equal, model.parameters(), before))
    assert torch.equal(torch.get_rng_state(), state)
    # Keyword arguments are the same, and the rates decide: on an endless link there is nothing to hide.
    handle.detach()
    again = mb.attach(model, mb.MegabufConfig(**AUTO), example_inputs={"x": torch.zeros(6, 13)})
    assert again.plan == handle.plan
    again.detach()
    fast = mb.MegabufConfig(**{**AUTO, "link_gbps": 1e9})
    assert len(mb.attach(model, fast, example_inputs=(torch.zeros(6, 13),)).plan.groups) == 1


@pytest.mark.usefixtures("four_ranks")
def test_rates_are_measured() -> None:
    config = mb.MegabufConfig(bucket_size="auto", inner_compiler="aot_eager", link_alpha_us=3)
    choice = mb.attach(seeded(Mlp), config, example_inputs=(torch.zeros(6, 13),)).bucket_choice
    assert choice is not None
    assert choice.link.alpha_us == 3
    assert choice.link.gbps > 0
    assert min(choice.device.tflops, choice.device.memory_gbs, choice.device.op_us) > 0


@pytest.mark.usefixtures("four_ranks")
def test_bare_form() -> None:
    """The first compile has the graph and its inputs, so that nothing else is needed."""
    model = seeded(Mlp)
    x = torch.zeros(6, 13)
    torch.compile(model, backend="megabuf", options=AUTO)(x).sum().backward()
    handle = mb.handle(model)
    attached = seeded(Mlp)
    config = mb.MegabufConfig(**AUTO, use_distributed_optimizer=False)
    assert mb.attach(attached, config, example_inputs=(x,)).plan == handle.plan
    assert len(handle.plan.groups) > 1


class Broken(nn.Module):
    """Half of it is behind a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(13, 8)
        self.fc2 = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        torch._dynamo.graph_break()
        result: Tensor = self.fc2(hidden)
        return result


class Peeking(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() > 0 else x


@pytest.mark.usefixtures("four_ranks")
def test_refused() -> None:
    config = mb.MegabufConfig(**AUTO)
    x = torch.zeros(6, 13)
    assert "attach(model, config, example_inputs=(tokens,))" in error_text(lambda: mb.attach(seeded(Mlp), config))
    assert error_text(lambda: mb.attach(seeded(Mlp), config, example_inputs=x)) == (  # type: ignore[arg-type]
        "TypeError: example_inputs must be a sequence of positional or a mapping of keyword arguments, got Tensor"
    )
    peeking = error_text(lambda: mb.attach(seeded(Peeking), config, example_inputs=(x,)))
    assert "could not trace the backward of Peeking without values of tensors (DataDependent" in peeking
    assert peeking.endswith("give bucket_size as a number of elements")
    wrong = error_text(lambda: mb.attach(seeded(Mlp), config, example_inputs=(torch.zeros(6, 7),)))
    assert "could not trace the backward of Mlp" in wrong
    bare = error_text(lambda: torch.compile(seeded(Broken), backend="megabuf", options=AUTO)(x))
    assert "the first compiled graph of Broken uses only 2 of 4 trainable parameters" in bare


def test_one_bucket_where_nothing_overlaps() -> None:
    """Neither example inputs nor a trace are needed."""
    for options in ({"overlap_grad_reduce": False}, {"pipeline_parallel_rank": 1}):
        handle = mb.attach(seeded(Mlp), mb.MegabufConfig(bucket_size="auto", **options))
        assert handle.bucket_choice is None
        assert len(handle.plan.groups) == 1


def test_plan_of_a_dump(tmp_path: Path) -> None:
    from cli_dumps import megabuf

    with fake_process_group(world_size=4, rank=0):
        model = seeded(Mlp)
        config = mb.MegabufConfig(**AUTO, dump_dir=str(tmp_path))
        handle = mb.attach(model, config, example_inputs=(torch.zeros(6, 13),))
        torch.compile(model, backend="megabuf")(torch.zeros(6, 13)).sum().backward()
        digest = handle.plan.digest
        handle.detach()
        fresh_compiler()
    planned = megabuf("plan", tmp_path, "--bucket-size", "auto")
    assert "equal to the plan in the dump" in planned.out
    assert "bucket size auto, with the boundaries of the dump" in planned.out
    found = json.loads(megabuf("plan", tmp_path, "--bucket-size", "auto", "--json").out)
    assert (found["plan"]["digest"], found["bucket_size"]) == (digest, "auto")
    # Other ranks keep the boundaries.
    wider = json.loads(megabuf("plan", tmp_path, "--bucket-size", "auto", "--dp", "8", "--json").out)
    assert len(wider["plan"]["groups"]) == len(found["plan"]["groups"])
    assert (
        "give a number of elements, or the dump of such a run"
        in megabuf("plan", "cli_models:experts", "--bucket-size", "auto").err
    )
    assert "give a number of elements" in megabuf("ledger", "--params", "1e9", "--bucket-size", "auto").err
    assert (
        "--bucket-size must be a number of elements or auto"
        in megabuf("plan", "cli_models:experts", "--bucket-size", "x").err
    )


# Two ranks.


def train_and_compare(rank: int, options: dict[str, Any], compiled: bool) -> tuple[float, int, str]:
    model = seeded(Mlp)
    reference = ddp_reference(twin(model), rank, 1)
    config = mb.MegabufConfig(**{**AUTO, **options})
    buf = mb.attach(model, config, example_inputs=(batch(0, 0, rank, 8, 13),))
    run = torch.compile(model, backend="megabuf") if compiled else model
    optimizer: Any = (
        mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        if config.use_distributed_optimizer
        else torch.optim.AdamW(model.parameters(), lr=1e-3)
    )
    for step in range(5):
        run(batch(step, 0, rank, 8, 13)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    buf.sync_params()
    difference = max_difference(dict(model.named_parameters()), reference)
    result = difference, len(buf.plan.groups), buf.plan.digest
    buf.detach()
    return result


MEASURED = dict.fromkeys(RATES)


@pytest.mark.dist
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager_path"])
@pytest.mark.parametrize(
    "options",
    [{}, {"overlap_param_gather": True}, {"use_distributed_optimizer": False}, MEASURED],
    ids=["sharded", "overlap", "plain", "measured"],
)
def test_trains_as_ddp(ranks: Callable[[int], RankGroup], options: dict[str, Any], compiled: bool) -> None:
    """Bitwise, with several buckets; whatever was measured, the ranks have one plan."""
    results = ranks(2).run(train_and_compare, options, compiled, timeout=120)
    assert [difference for difference, _, _ in results] == [0.0, 0.0]
    assert len({digest for _, _, digest in results}) == 1
    if options is not MEASURED:
        assert results[0][1] > 1


def attach_with_one_bad_rank(rank: int) -> str:
    inputs = (torch.zeros(6, 13),) if rank == 0 else None
    return error_text(lambda: mb.attach(seeded(Mlp), mb.MegabufConfig(**AUTO), example_inputs=inputs))


@pytest.mark.dist
def test_one_rank_without_inputs(ranks: Callable[[int], RankGroup]) -> None:
    first, second = ranks(2).run(attach_with_one_bad_rank)
    assert first.startswith("ValueError: rank 1 cannot attach its model: bucket_size='auto' traces a backward")
    assert second.startswith("ValueError: bucket_size='auto' traces a backward")
