"""``megabuf ledger``: its numbers are those of the write-up it replaces, of the plan, and of real buffers."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from cli_attached import QUANTIZED, Attached
from cli_models import check_golden, error_of, ledger, run, tiny, worked_example
from helpers import seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import megabuf_fx as mb
import megabuf_fx._compat as _compat
from megabuf_fx.cli.counting import setup_of, terms_of
from megabuf_fx.cli.ledger import SYMBOLS, BufferKind, Setup, Terms, evaluate, make_rows, symbolic_terms
from megabuf_fx.cli.units import format_bytes
from megabuf_fx.planning import plan_model
from megabuf_fx.runtime.layout import ParamSpec
from megabuf_fx.runtime.plan import BucketPlan
from megabuf_fx.runtime.shards import compute_shard_ranges

BF16, FP32 = torch.bfloat16, torch.float32
GB, MB = 10**9, 10**6

WRITE_UP = "--params 7.5e9 --tp 2 --pp 2 --dp 64 --grad-reduce-in-fp32"
"""Its configuration: P = 7.5e9, bf16 parameters, fp32 gradients, distributed optimizer."""


# The 7B example of the write-up: what it says, digit for digit, then what is so.


def test_write_up() -> None:
    rows = ledger(WRITE_UP, "estimate")
    assert rows["grad_data"] == 7.5 * GB
    assert rows["param_data"] == 3.75 * GB
    optimizer = rows["fp32 masters"] + rows["Adam moments"]
    assert format_bytes(optimizer) == "352 MB"  # "about 0.35 GB": 12 * 1.875e9 / 64
    assert rows["buckets"] == 29  # "29 full buckets and one for the rest"
    assert rows["largest bucket"] == 256 * MB
    assert rows["its shard"] == 4 * MB
    assert rows["sent for it"] == 252 * MB
    assert round(rows["gradient reduce-scatter"] / GB, 1) == 7.4
    assert round(rows["parameter all-gather"] / GB, 1) == 3.7


@pytest.mark.parametrize(
    ("variant", "grad_data", "param_data", "optimizer"),
    [
        ("fp32 gradients", 7.5 * GB, 3.75 * GB, 22.5 * GB / 64),
        ("gradients in parameter dtype", 3.75 * GB, 3.75 * GB, 22.5 * GB / 64),
        ("no distributed optimizer", 7.5 * GB, 0, 22.5 * GB),
        ("fp8 parameters", 7.5 * GB, 1.875 * GB, 22.5 * GB / 64),
        ("MXFP8 gathered in grad_data", 7.5 * GB, 0, 22.5 * GB / 64),
        ("FSDP (ZeRO-3), not offered here", 7.5 * GB / 64, 3.75 * GB / 64, 22.5 * GB / 64),
    ],
)
def test_perturbation_table(variant: str, grad_data: float, param_data: float, optimizer: float) -> None:
    entries = {entry["variant"]: entry for entry in json.loads(run("ledger", *WRITE_UP.split(), "--compare", "--json"))}
    found = entries[variant]
    assert (found["grad_data"], found["param_data"]) == (round(grad_data), round(param_data))
    assert found["optimizer"] == round(optimizer)
    if variant == "no distributed optimizer":
        assert found["outside"] == 3.75 * GB  # parameters stay where modules have them
    if variant == "fp32 gradients":
        assert found["resident"] == round(11.25 * GB + 22.5 * GB / 64)


def test_padding_row_of_the_perturbation_table() -> None:
    """At most 29 * (2**16 - 1) elements, 1.9M or 7.6 MB."""
    rows = ledger(f"{WRITE_UP} --pad-buckets-for-high-nccl-busbw", "estimate")
    assert rows["bucket-end padding"] == 29 * (2**16 - 1) * 4
    assert round(rows["bucket-end padding"] / MB, 1) == 7.6


def test_corrections_of_the_write_up() -> None:
    """A real stage has fewer and larger buckets, as they hold whole parameters, and the second stage has one."""
    options = "--tp 2 --pp 2 --dp 64 --grad-reduce-in-fp32"
    # Megatron stores query, key and value in one weight, gate and up in another.
    megatron = ledger(f"megatron-llama-7b {options}", "counted")
    assert megatron["buckets"] == 17
    assert megatron["largest bucket"] == 101_195_776 * 4
    assert megatron["grad_data"] == 1_684_668_416 * 4
    assert ledger(f"llama-7b {options}", "counted")["buckets"] == 22
    assert ledger(f"megatron-llama-7b {options} --stage 1", "counted")["buckets"] == 1


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ledger_write_up", WRITE_UP),
        ("ledger_write_up_corrected", f"megatron-llama-7b {WRITE_UP}"),
        ("ledger_compared", f"{WRITE_UP} --compare"),
        ("ledger_compared_llama_7b", "llama-7b --tp 2 --pp 2 --dp 64 --grad-reduce-in-fp32 --compare"),
        ("ledger_instances", "llama-7b --dp 64 --num-distributed-optimizer-instances 4"),
        ("ledger_nvfp4", "llama-7b --dp 64 --fp4-param-gather"),
        ("ledger_ddp", "--params 124e6 --dp 8 --no-use-distributed-optimizer --dtype fp32"),
    ],
)
def test_output(name: str, arguments: str, write_results: bool) -> None:
    check_golden(name, run("ledger", *arguments.split()), write=write_results)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "give a MODEL, or the number of parameters with --params"),
        ("gpt2 --params 1e9 --compare", "--compare is for a MODEL or for --params; drop one"),
        ("--params -1", "--params must be a positive number, got -1.0"),
        ("--params inf", "--params must be a positive number, got inf"),
        ("--params 1e9 --dp 4 --num-distributed-optimizer-instances 3", "does not divide 4 ranks"),
        ("no/such.json", "no file or directory 'no/such.json'"),
    ],
)
def test_errors_are_one_line(arguments: str, message: str) -> None:
    assert message in error_of("ledger", *arguments.split())


def test_comparison_says_why_a_line_is_missing() -> None:
    text = run("ledger", "gpt2", "--dp", "3", "--compare")
    assert "\nNVFP4 parameters: nvfp4: no weight can be quantized; it needs nn.Linear weights" in text
    assert "\n2 optimizer instances: num_distributed_optimizer_instances=2 does not divide the 3 ranks" in text


# Quantized.


def test_one_shadow_serves_all_buffers() -> None:
    kinds = (BufferKind("fp8", 2, 2, "fp8"), BufferKind("fp8_experts", 2, 2, "fp8", is_expert=True))
    setup = Setup(kinds, sharded=True)
    formulas = {row.name: str(row.amount) for row in make_rows(setup, symbolic_terms(setup))}
    assert formulas["shadow"] == "2*Max(S_fp8, S_fp8_experts)"


def test_unquantized_parameters_have_a_buffer_of_their_own() -> None:
    arguments = "llama-7b --dp 64 --fp8-param-gather --quantized-param-name-patterns *.mlp.*"
    rows = ledger(arguments, "counted")
    mlp = 32 * 3 * 4096 * 11008
    rest = 6_738_415_616 - mlp
    assert rows["param_data"] == mlp + 2 * rest
    assert rows["grad_data"] == 2 * 6_738_415_616
    assert rows["fp32 masters"] == 4 * 6_738_415_616 // 64
    assert rows["codes and scales"] == (16 + 12 + 4) * 32 * 3


# Against the plan: the same bytes by another way, for random parameters and configs.

SPECS = st.lists(
    st.builds(
        lambda numel, dtype, is_expert: ParamSpec(f"w{numel}", (numel,), dtype, allreduce=not is_expert),
        st.integers(1, 400),
        st.sampled_from([FP32, BF16, BF16]),
        st.booleans(),
    ),
    min_size=1,
    max_size=10,
)

CONFIGS = st.sampled_from(
    [
        {},
        {"grad_reduce_in_fp32": True},
        {"use_distributed_optimizer": False},
        {"use_distributed_optimizer": False, "dense_layout": True, "grad_reduce_in_fp32": True},
        {"num_distributed_optimizer_instances": 2},
        {"reduce_scatter_with_fp32_accumulation": True},
        {"param_name_patterns_for_fp32_local_accumulation": ("w1*",)},
        {"pad_buckets_for_high_nccl_busbw": True},
    ]
)


def values_of(symbols: Sequence[Terms], numbers: Sequence[Terms], *, threshold: int) -> dict[str, int]:
    """Numbers by the name of their symbol."""
    values = {"K": threshold}
    for names, amounts in zip(symbols, numbers):
        for field in SYMBOLS:
            values[str(getattr(names, field))] = getattr(amounts, field)
        for symbol in names.shards.free_symbols:
            values[str(symbol)] = amounts.instances if str(symbol) == "i" else amounts.shards * amounts.instances
    return values


def bytes_by_hand(plan: BucketPlan, config: mb.MegabufConfig, dp_rank: int) -> dict[str, Fraction]:
    """The rows from the plan alone, layout by layout and bucket by bucket."""
    names = (
        "grad_data",
        *("param_data" if plan.sharded else "parameters", "fp32 masters", "Adam moments", "padding"),
        *("fp32 gradient sums", "all-to-all", "fp32 gradients", "gradient reduce-scatter", "gradient all-reduce"),
        *("all-reduce across instances", "parameter all-gather"),
    )
    rows = dict.fromkeys(names, Fraction())
    instances = config.num_distributed_optimizer_instances
    for layout in plan.layouts:
        ranks = plan.dp_size_of(layout.key)
        weight, grad = layout.key.param_dtype.itemsize, layout.key.grad_dtype.itemsize
        is_expert = layout.key.is_expert_parallel
        own = dp_rank // (plan.dp_size // ranks) % ranks if is_expert else dp_rank % ranks
        numels = {param: math.prod(plan.params[param].shape) for param in layout.params}
        elements = owned = sum(numels.values())
        if plan.sharded:
            pieces = compute_shard_ranges(layout, dp_size=ranks, dp_rank=own)
            owned = sum(piece.end - piece.start for piece in pieces)
        sizes = [end - start for start, end in layout.buckets]
        rows["grad_data"] += grad * sum(sizes)
        rows["param_data" if plan.sharded else "parameters"] += weight * (sum(sizes) if plan.sharded else elements)
        rows["fp32 masters"] += 4 * owned if weight == 2 or not plan.sharded else 0
        rows["Adam moments"] += 8 * owned
        rows["padding"] += (grad + (weight if plan.sharded else 0)) * (sum(sizes) - elements)
        if grad == 2:
            rows["fp32 gradients"] += 4 * owned
            for param, numel in numels.items():
                if plan.params[param].name.startswith("w1") and config.param_name_patterns_for_fp32_local_accumulation:
                    rows["fp32 gradient sums"] += 4 * numel
            if config.reduce_scatter_with_fp32_accumulation and plan.dp_size > 1:
                rows["all-to-all"] += 2 * max(sizes) + 4 * max(sizes) // ranks
        for size in sizes:
            shard = Fraction(size, ranks)
            if plan.sharded:
                rows["gradient reduce-scatter"] += grad * (size - shard)
                rows["parameter all-gather"] += weight * (size - shard)
                rows["all-reduce across instances"] += 2 * grad * (shard - shard / instances)
            else:
                rows["gradient all-reduce"] += 2 * grad * (size - shard)
    return rows


@settings(deadline=None, max_examples=100)  # the machines that run this are shared
@given(
    specs=SPECS,
    config=CONFIGS,
    expert_dp_size=st.sampled_from([2, 4, 6]),
    expert_parallel=st.integers(1, 3),
    bucket_size=st.integers(1, 600),
    data=st.data(),
)
def test_numbers_are_those_of_the_plan(
    specs: list[ParamSpec],
    config: dict[str, Any],
    expert_dp_size: int,
    expert_parallel: int,
    bucket_size: int,
    data: st.DataObject,
) -> None:
    dp_size = expert_dp_size * expert_parallel
    dp_rank = data.draw(st.integers(0, dp_size - 1))
    full = mb.MegabufConfig(bucket_size=bucket_size, **config)
    plan = plan_model(full, specs, dp_size=dp_size, expert_dp_size=expert_dp_size)
    setup, terms = setup_of(plan, full), terms_of(plan, full, dp_rank=dp_rank)
    counted = make_rows(setup, terms)
    expected = bytes_by_hand(plan, full, dp_rank)
    compared = {row.name for row in counted} & expected.keys()
    assert {row.name: row.amount for row in counted if row.name in compared} == {n: expected[n] for n in compared}
    assert not any(expected[name] for name in expected.keys() - compared)
    # Formulas have even shares, and of buckets they know the threshold.
    even = [
        t._replace(owned=Fraction(t.P, t.shards) if plan.sharded else t.P, buckets=t.P // bucket_size) for t in terms
    ]
    symbols = symbolic_terms(setup)
    values = values_of(symbols, terms, threshold=bucket_size)
    formulas = make_rows(setup, symbols)
    assert [(row.name, evaluate(row.amount, values)) for row in formulas] == [
        (row.name, row.amount) for row in make_rows(setup, even)
    ]


# Against the truth: buffers and optimizers of attached models.

ATTACHED: list[dict[str, Any]] = [
    {},
    {"grad_reduce_in_fp32": True},
    {"bucket_size": 100},
    {"pad_buckets_for_high_nccl_busbw": True},
    {"use_distributed_optimizer": False},
    {"use_distributed_optimizer": False, "dense_layout": True, "grad_reduce_in_fp32": True},
    {"num_distributed_optimizer_instances": 2},
    {"param_name_patterns_for_fp32_local_accumulation": ("0.*",)},
]


def check_attached(build: Callable[[], nn.Module], config: mb.MegabufConfig) -> None:
    attached = Attached(seeded(build), config)
    sizes, ledger = attached.sizes, attached.ledger()
    attached.handle.detach()
    assert sizes == ledger


def bf16() -> nn.Module:
    return tiny().bfloat16()


def mixed() -> nn.Module:
    """bf16 with a norm in fp32: two buffers, three with quantized weights."""
    model = tiny().bfloat16()
    model[1].float()  # type: ignore[index]
    return model


@pytest.mark.parametrize("config", ATTACHED, ids=str)
@pytest.mark.parametrize("build", [tiny, mixed])
def test_numbers_are_those_of_attached_buffers(config: dict[str, Any], build: Callable[[], nn.Module]) -> None:
    full = mb.MegabufConfig(**config)
    check_attached(build, dataclasses.replace(full, num_distributed_optimizer_instances=1))
    for rank in (0, 5, 7):
        with _compat.fake_process_group(world_size=8, rank=rank):
            check_attached(build, full)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("fp32", [True, False])
@pytest.mark.parametrize("build", [tiny, bf16, mixed])
@pytest.mark.parametrize(
    "config",
    [{}, {"bucket_size": 100}, {"pad_buckets_for_high_nccl_busbw": True}, {"num_distributed_optimizer_instances": 2}],
    ids=str,
)
def test_numbers_are_those_of_quantized_buffers(
    name: str, fp32: bool, build: Callable[[], nn.Module], config: dict[str, Any]
) -> None:
    """Slots of scales, padded codes, histories and the shadow; ``tiny`` needs padding in each of them."""
    full = mb.MegabufConfig(inner_compiler="aot_eager", grad_reduce_in_fp32=fp32, **QUANTIZED[name], **config)
    check_attached(build, dataclasses.replace(full, num_distributed_optimizer_instances=1))
    for rank in (0, 7):
        with _compat.fake_process_group(world_size=8, rank=rank):
            check_attached(build, full)


def live_bytes() -> int:
    """Of all tensors of this process; those that compilers only think about have other types or devices."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, nn.Parameter) and found.is_cpu]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("name", ["plain", *QUANTIZED])
def test_nothing_else_is_kept(name: str) -> None:
    """What there is more of than before is in the ledger, up to flags and the optimizer's step counts."""
    before = live_bytes()
    attached = Attached(seeded(mixed), mb.MegabufConfig(inner_compiler="aot_eager", **QUANTIZED.get(name, {})))
    more = live_bytes() - before
    assert 0 <= more - attached.ledger()["resident"] < 256
    attached.handle.detach()


@pytest.mark.parametrize("dp", [2, 128])
def test_divisor_of_packed_buckets(dp: int) -> None:
    """Half a bucket divides by the ranks, too; the others are cut as ever."""
    config = mb.MegabufConfig(fp4_param_gather=True)
    specs = [ParamSpec("w", (48, 16), BF16, quantized="nvfp4"), ParamSpec("norm", (48,), BF16)]
    terms = terms_of(plan_model(config, specs, dp_size=dp), config, dp_rank=0)
    assert [(t.u, t.N) for t in terms] == {2: [(128, 768), (128, 128)], 128: [(256, 768), (128, 128)]}[dp]
    formulas = {row.name: str(row.amount) for row in make_rows(*_with_symbols(plan_model(config, specs, dp_size=dp)))}
    assert "(u_nvfp4 - 1)" in formulas["bucket-end padding (nvfp4)"]
    assert "(u - 1)" in formulas["bucket-end padding (bf16)"]


def _with_symbols(plan: BucketPlan) -> tuple[Setup, tuple[Terms, ...]]:
    setup = setup_of(plan, mb.MegabufConfig())
    return setup, symbolic_terms(setup)


@pytest.mark.parametrize("name", QUANTIZED)
def test_formulas_of_the_worked_example(name: str) -> None:
    """They have even shares, and there each rank owns half."""
    config = mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=4000, **QUANTIZED[name])
    with _compat.fake_process_group(world_size=2, rank=0):
        attached = Attached(seeded(worked_example).bfloat16(), config)
        attached.handle.detach()
    setup = setup_of(attached.handle.plan, attached.config)
    terms = terms_of(attached.handle.plan, attached.config, dp_rank=0)
    symbols = symbolic_terms(setup)
    values = values_of(symbols, terms, threshold=4000)
    assert [evaluate(row.amount, values) for row in make_rows(setup, symbols)] == [
        row.amount for row in make_rows(setup, terms)
    ]


def test_estimate_of_quantized_parameters() -> None:
    rows = ledger("--params 1024e6 --dp 128 --fp4-param-gather --bucket-size 128000000", "estimate")
    assert rows["param_data"] == 512 * MB
    assert rows["codes and scales"] == 4 * MB
    assert rows["bucket-end padding"] == 8 * (2 * 128 - 1) * 2
    rows = ledger("--params 1024e6 --dp 4 --fp8-param-gather --fp8-recipe mxfp8 --dtype fp32", "estimate")
    assert rows["param_data"] == 4096 * MB
    assert rows["codes and scales"] == (1024 + 32) * MB
    assert rows["fp32 masters"] == 1024 * MB


def test_comparison_of_chosen_weights() -> None:
    """Formats are compared for the weights that are asked for; the options of one format stay with it."""
    arguments = "cli_models:linears --dtype bf16 --compare --json --quantized-param-name-patterns first*"
    delayed = "--fp8-param-gather --fp8-recipe delayed --fp8-amax-history-len 4"
    entries = {entry["variant"]: entry for entry in json.loads(run("ledger", *f"{arguments} {delayed}".split()))}
    first, shadow, scale = 96 * 64, 96 * 64 * 2, 16 + 12 + 4
    plain = entries["gradients in parameter dtype"]
    assert entries["fp8 parameters"]["param_data"] == plain["param_data"] - first
    assert entries["fp8 parameters"]["outside"] == shadow + scale
    assert entries["NVFP4 parameters"]["param_data"] == plain["param_data"] - first * 3 // 2
    assert not any("reason" in entry for name, entry in entries.items() if "instances" not in name)


# Units.


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (10_000, "10.0 kB"), (999_499, "999 kB")),
        *((999_500, "1.00 MB"), (256 * MB, "256 MB"), (75 * GB // 10, "7.50 GB"), (5000 * 1000 * GB, "5000 TB")),
    ],
)
def test_units(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text
