"""Bucket groups, gradient scaling, bucket size and refused configs against ``oracle/grouping.json.gz``. All exact.

``group_params_for_buffers`` and ``resolve_bucket_size`` by itself are in test_layout.py; here the size is the one that
``attach`` plans with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from oracle_data import DTYPES, load
from torch import nn

import megabuf_fx as mb
from megabuf_fx.runtime.layout import ParamSpec
from megabuf_fx.runtime.partition import partition_buckets
from megabuf_fx.runtime.plan import plan_buckets
from megabuf_fx.runtime.scaling import GradScaling, grad_scaling

ORACLE = load("grouping")


# Bucket groups


def test_bucket_groups_equal_megatron() -> None:
    cases = [case for case in ORACLE["partition_buckets"] if not case["different_dp_groups"]]
    assert len(cases) == 52
    for case in cases:
        buffers = [(DTYPES[dtype], count) for dtype, count in case["buffers"]]
        flags = {name: case[name] for name in ("force_single_bucket_group", "reduce_scatter_with_fp32_accumulation")}
        if "error" in case:
            with pytest.raises(ValueError, match=r"buffers \[0, 1\] are all quantized \(uint8\)"):
                partition_buckets(buffers, **flags)
            continue
        expected = tuple(tuple((buffer, bucket) for buffer, bucket in group) for group in case["groups"])
        assert partition_buckets(buffers, **flags) == expected, case


def test_buffers_of_different_process_groups_never_share_a_group() -> None:
    """Megatron asserts it for a forced single group; our plan groups dense and expert buffers apart to begin with."""
    cases = [case for case in ORACLE["partition_buckets"] if case["different_dp_groups"]]
    assert [case.get("error") for case in cases] == ["AssertionError: ", None]
    params = [
        ParamSpec(f"p{i}", (200,), dtype, allreduce=is_dense)
        for i, (dtype, is_dense) in enumerate([(torch.bfloat16, True), (torch.float32, False)] * 3)
    ]
    for force in (True, False):
        plan = plan_buckets(
            params,
            dp_size=4,
            expert_dp_size=2,
            sharded=True,
            bucket_size=None if force else 1,
            grad_reduce_in_fp32=False,
            force_single_bucket_group=force,
        )
        kinds = [{plan.params[param].allreduce for param in group.params} for group in plan.groups]
        assert all(len(kind) == 1 for kind in kinds)
        assert len(plan.groups) == (2 if force else 6)


# Scaling


def test_scaling_equals_megatron() -> None:
    assert len(ORACLE["scaling"]) == 56
    for case in ORACLE["scaling"]:
        modes = {name: case[name] for name in ("average_in_collective", "calculate_per_token_loss")}

        def scaling(*, is_expert: bool, case: Any = case, modes: Any = modes) -> GradScaling:
            return grad_scaling(dp_size=case["dp_cp"], expert_dp_size=case["edp"], is_expert=is_expert, **modes)

        if "error" in case:
            assert case["error"] == "AssertionError: Cannot average in collective when calculating per-token loss!"
            with pytest.raises(ValueError, match="cannot average in the collective"):
                scaling(is_expert=False)
            with pytest.raises(ValueError, match="cannot average in the collective"):
                mb.MegabufConfig(**modes)
            continue
        dense, expert = scaling(is_expert=False), scaling(is_expert=True)
        assert (float(dense.factor), float(expert.factor)) == (case["dense_scaling"], case["expert_scaling"]), case
        assert {"AVG" if dense.average else "SUM", "AVG" if expert.average else "SUM"} == {case["reduce_op"]}
        # One instance divides by its own part of what the factor counts on: shards are reduced again across instances.
        instances = case["num_distributed_optimizer_instances"]
        assert case["dense_collective_size"] * instances == case["dp_cp"]
        assert case["expert_collective_size"] * instances == case["edp"]


def test_every_size_averages_exactly() -> None:
    """Megatron asserts ``scaling / size == 1 / dp`` in floats, which fails for these legal sizes."""
    failures = {tuple(pair) for pair in ORACLE["average_in_collective_float_assert_failures"]["pairs"]}
    assert len(failures) == 6
    for dp in range(1, 65):
        for edp in (edp for edp in range(1, dp + 1) if dp % edp == 0):
            found = grad_scaling(
                dp_size=dp,
                expert_dp_size=edp,
                is_expert=True,
                average_in_collective=True,
                calculate_per_token_loss=False,
            )
            assert found == GradScaling(Fraction(edp, dp), average=True)
            assert found.factor / edp == Fraction(1, dp)
            assert ((edp / dp) / edp != 1 / dp) == ((dp, edp) in failures)


# The size that attach plans with


class DenseAndExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)
        self.expert = nn.Linear(4, 4)
        for param in self.expert.parameters():
            param.allreduce = False  # type: ignore[attr-defined]


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Planned(NamedTuple):
    """What ``attach`` did with a config in a world of fake ranks."""

    bucket_size: int | None
    dense_groups: int
    expert_groups: int


def attach(model: nn.Module, config: mb.MegabufConfig) -> Planned:
    has_experts = any(not getattr(param, "allreduce", True) for param in model.parameters())
    with mock.patch("megabuf_fx.planning.plan_buckets", wraps=plan_buckets) as spy:
        buf = mb.attach(model, config, expert_process_group=dist.group.WORLD if has_experts else None)
    is_dense = [buf.plan.params[group.params[0]].allreduce for group in buf.plan.groups]
    buf.detach()
    return Planned(spy.call_args.kwargs["bucket_size"], is_dense.count(True), is_dense.count(False))


@pytest.mark.parametrize("dp", sorted({row["dp"] for row in ORACLE["bucket_size_resolution"]}))
def test_bucket_size_equals_megatron(dp: int) -> None:
    """``process_group`` is the dp of the default: Megatron's DDP takes it without context parallelism, its training
    script with, and here it is whatever ranks are averaged over. Unlike Megatron's, the config stays as it was."""
    rows = [row for row in ORACLE["bucket_size_resolution"] if row["dp"] == dp and "num_buckets" not in row]
    with fake_world(dp):
        for row in rows:
            config = mb.MegabufConfig(
                bucket_size=row["bucket_size_in"],
                overlap_grad_reduce=row["overlap_grad_reduce"],
                pipeline_parallel_rank=row["pp_rank"],
                disable_bucketing=row["disable_bucketing"],
            )
            before = repr(config)
            found = attach(DenseAndExpert(), config)
            assert found == (row["ddp_bucket_size"], row["num_dense_groups"], row["num_expert_groups"]), row
            assert repr(config) == before


def test_bucket_size_rows_are_complete() -> None:
    rows = ORACLE["bucket_size_resolution"]
    assert len(rows) == 129
    assert sum("num_buckets" not in row for row in rows) == 128


def test_num_buckets_is_honoured() -> None:
    """By Megatron's training script as here; its DDP alone takes the default size instead."""
    (row,) = [row for row in ORACLE["bucket_size_resolution"] if "num_buckets" in row]
    assert row["ddp_bucket_size"] == 40_000_000
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6)))
    with fake_world(row["dp"]):
        assert attach(model, mb.MegabufConfig(num_buckets=row["num_buckets"])) == (6 * 256 // 3, 3, 0)


# Refused configs


class Refusal(NamedTuple):
    """What we do with a case of ``config_errors``."""

    options: dict[str, Any]
    error: str | None
    """Pattern of our error; None: accepted."""
    why: str = ""
    """Where Megatron does otherwise."""


REFUSALS: dict[str, Refusal] = {
    "num_buckets=2,bucket_size=10": Refusal({"num_buckets": 2, "bucket_size": 10}, "cannot specify both num_buckets=2"),
    "num_buckets=0": Refusal({"num_buckets": 0}, "num_buckets must be a positive number"),
    "num_buckets=-1": Refusal({"num_buckets": -1}, "num_buckets must be a positive number"),
    "grad_reduce_in_fp32=True,param_name_patterns_for_fp32_local_accumulation=('all',)": Refusal(
        {"grad_reduce_in_fp32": True, "param_name_patterns_for_fp32_local_accumulation": ("all",)},
        "every gradient is accumulated in fp32 already",
    ),
    "reuse_grad_buf_for_mxfp8_param_ag=True": Refusal(
        {"reuse_grad_buf_for_mxfp8_param_ag": True}, "needs fp8_param_gather=True with fp8_recipe='mxfp8'"
    ),
    "overlap_param_gather=True without use_distributed_optimizer (config only)": Refusal(
        {"overlap_param_gather": True, "use_distributed_optimizer": False},
        "overlap_param_gather=True needs use_distributed_optimizer=True",
        "Megatron's config accepts it and only its command line refuses it",
    ),
    "DDP: calculate_per_token_loss + average_in_collective": Refusal(
        {"calculate_per_token_loss": True, "average_in_collective": True}, "cannot average in the collective"
    ),
    "DDP: num_distributed_optimizer_instances=2 without distributed optimizer": Refusal(
        {"num_distributed_optimizer_instances": 2, "use_distributed_optimizer": False},
        "num_distributed_optimizer_instances=2 needs use_distributed_optimizer=True",
    ),
    "DDP: num_distributed_optimizer_instances=2 + reduce_scatter_with_fp32_accumulation": Refusal(
        {"num_distributed_optimizer_instances": 2, "reduce_scatter_with_fp32_accumulation": True},
        "reduce_scatter_with_fp32_accumulation=True with num_distributed_optimizer_instances=2",
    ),
    "DDP: average_in_collective num_distributed_optimizer_instances=2": Refusal(
        {"average_in_collective": True, "num_distributed_optimizer_instances": 2}, None
    ),
}
EXPERT_SIZES = re.compile(r"DDP: average_in_collective with an expert buffer, dp_cp=(\d+), edp=(\d+)")


def test_config_errors_equal_megatron() -> None:
    cases = {case["case"]: case["error"] for case in ORACLE["config_errors"]}
    assert len(cases) == 18
    assert REFUSALS.keys() == {case for case in cases if not EXPERT_SIZES.match(case)}
    for case, refusal in REFUSALS.items():
        # Refused by both or by neither, except where we say why.
        assert ((cases[case] is None) == (refusal.error is None)) != bool(refusal.why), case
        if refusal.error is None:
            mb.MegabufConfig(**refusal.options)
        else:
            with pytest.raises(ValueError, match=re.escape(refusal.error)):
                mb.MegabufConfig(**refusal.options)


@pytest.mark.parametrize("case", [case["case"] for case in ORACLE["config_errors"] if EXPERT_SIZES.match(case["case"])])
def test_average_with_experts_is_accepted_for_every_size(case: str) -> None:
    """Six of these eight sizes fail in Megatron, by an assert without message."""
    found = EXPERT_SIZES.match(case)
    assert found is not None
    dp, edp = map(int, found.groups())
    model = DenseAndExpert()
    with fake_world(dp):
        group = dist.new_group(list(range(edp)))
        buf = mb.attach(model, mb.MegabufConfig(average_in_collective=True), expert_process_group=group)
        scalings = {
            layout.key.is_expert_parallel: channel.scaling
            for layout, channel in zip(buf.plan.layouts, buf.buffers.reducer.channels)
        }
        assert scalings == {
            False: GradScaling(Fraction(1), average=True),
            True: GradScaling(Fraction(edp, dp), average=True),
        }
        buf.detach()
