"""``megabuf plan``: the plan that ``attach`` would make, of any model and world, and errors that say what to do."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import cli_models
import pytest
import torch
import torch.distributed as dist
from cli_models import check_golden, error_of, experts, options_of, run, tiny
from helpers import Mlp, batch, fresh_compiler, seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import megabuf_fx as mb
import megabuf_fx._compat as _compat
from megabuf_fx.cli.counting import owned_by_rank, owner_ranks
from megabuf_fx.cli.errors import CliError
from megabuf_fx.cli.stages import params_of_rank
from megabuf_fx.runtime.layout import ParamSpec
from megabuf_fx.runtime.plan import plan_buckets
from megabuf_fx.runtime.shards import compute_shard_ranges

SMALL_LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def plan_json(*arguments: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(run("plan", *arguments, "--json"))
    return result


@pytest.fixture
def small_llama(tmp_path: Path) -> str:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL_LLAMA))
    return str(path)


# What is printed.


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("plan_tiny", "cli_models:tiny --dp 4 --rank 3"),
        ("plan_tiny_ddp", "cli_models:tiny --dp 4 --no-use-distributed-optimizer --dense-layout"),
        ("plan_experts", "cli_models:experts --dp 8 --expert-dp 2 --rank 5 --dtype bf16 --bucket-size 1000"),
        ("plan_gpt2", "gpt2 --dp 8"),
        ("plan_llama_7b", "llama-7b --tp 2 --pp 2 --dp 64 --grad-reduce-in-fp32"),
        (
            "plan_llama_70b_mxfp8",
            "llama-70b --world 16384 --tp 8 --pp 4 --fp8-param-gather --fp8-recipe mxfp8 --rank 511",
        ),
    ],
)
def test_output(name: str, arguments: str, write_results: bool) -> None:
    check_golden(name, run("plan", *arguments.split()), write=write_results)


def test_examples_in_the_help_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_llama: str) -> None:
    """Also what ``--help`` promises to read is what it reads."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(Path(small_llama).read_text())
    Path("mypackage").mkdir()
    Path("mypackage/models.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Linear(64, 64).bfloat16()\n"
    )
    dump_mlp(tmp_path / "dumps")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for command in ("plan", "ledger"):
        examples = re.findall(rf"^ *megabuf ({command} .*)$", run(command, "--help"), flags=re.MULTILINE)
        assert len(examples) >= 4
        for example in examples:
            assert "grad_data" in run(*shlex.split(example))


def test_help_names_the_commands() -> None:
    text = run("--help")
    assert "plan" in text
    assert "ledger" in text
    assert "--install-completion" in text


# The plan is that of attach.


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, ""),
        ({"bucket_size": 100, "grad_reduce_in_fp32": True}, "--bucket-size 100 --grad-reduce-in-fp32"),
        (
            {"num_buckets": 3, "pad_buckets_for_high_nccl_busbw": True},
            "--num-buckets 3 --pad-buckets-for-high-nccl-busbw",
        ),
        ({"num_distributed_optimizer_instances": 2}, "--num-distributed-optimizer-instances 2"),
        ({"use_distributed_optimizer": False, "dense_layout": True}, "--no-use-distributed-optimizer --dense-layout"),
        ({"overlap_grad_reduce": False}, "--no-overlap-grad-reduce"),
        ({"disable_bucketing": True}, "--disable-bucketing"),
    ],
)
def test_plan_is_that_of_attach(config: dict[str, Any], options: str) -> None:
    with _compat.fake_process_group(world_size=8, rank=5):
        handle = mb.attach(tiny().bfloat16(), mb.MegabufConfig(**config))
        digest = handle.plan.digest
        handle.detach()
    found = plan_json("cli_models:tiny", "--dp", "8", "--dtype", "bf16", *options.split())
    assert found["plan"]["digest"] == digest


def test_plan_of_experts_is_that_of_attach() -> None:
    with _compat.fake_process_group(world_size=8, rank=5):
        handle = mb.attach(experts(), expert_process_group=dist.new_group([1, 5]))
        digest = handle.plan.digest
        handle.detach()
    assert plan_json("cli_models:experts", "--dp", "8", "--expert-dp", "2")["plan"]["digest"] == digest


@pytest.mark.parametrize(
    "config",
    [
        {"fp8_param_gather": True},
        {"fp8_param_gather": True, "fp8_recipe": "delayed", "fp8_amax_history_len": 4},
        {"fp8_param_gather": True, "fp8_recipe": "mxfp8", "reuse_grad_buf_for_mxfp8_param_ag": True},
        {"fp4_param_gather": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("build", ["linears", "experts"])
def test_quantized_plan_is_that_of_attach(config: dict[str, Any], build: str) -> None:
    """Which weights are quantized, too: of linear layers themselves, not tied to an embedding, of sizes that fit."""
    options: list[str] = ["--expert-dp", "2"] if build == "experts" else []
    with _compat.fake_process_group(world_size=8, rank=5):
        group = dist.new_group([1, 5]) if build == "experts" else None
        full = mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=1000, **config)
        handle = mb.attach(getattr(cli_models, build)().bfloat16(), full, expert_process_group=group)
        digest = handle.plan.digest
        stored = {spec.name for spec in handle.plan.params if spec.quantized}
        handle.detach()
    arguments = f"cli_models:{build} --dp 8 --dtype bf16 --bucket-size 1000 {options_of(config)}".split()
    found = plan_json(*arguments, *options)
    assert {param["name"] for param in found["plan"]["params"] if param["quantized"]} == stored
    assert found["plan"]["digest"] == digest
    if build == "linears":
        assert stored == {"first.weight", *([] if "fp4_param_gather" in config else ["odd.weight"])}


@pytest.mark.parametrize("pp", [1, 2])
def test_tensor_parallel_weights_are_quantized_by_their_part(tmp_path: Path, pp: int) -> None:
    """A rank's part decides whether blocks fit; a head tied to the embedding stays on every stage as it is."""
    path = tmp_path / "tied.json"
    path.write_text(json.dumps({**SMALL_LLAMA, "tie_word_embeddings": True}))
    options = f"--tp 2 --pp {pp} --stage {pp - 1} --fp8-param-gather --fp8-recipe mxfp8"
    params = plan_json(str(path), *options.split())["plan"]["params"]
    stored = {
        param["name"].removeprefix("model.layers.3.")
        for param in params
        if param["quantized"] and ".3." in param["name"]
    }
    # Input features by rank: 64, but 32 of the attention's output and 48 of the last product.
    attention = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    assert stored == attention | {"mlp.gate_proj.weight", "mlp.up_proj.weight"}
    assert not any(param["quantized"] for param in params if "layers" not in param["name"])


def test_world_stands_for_dp() -> None:
    by_world = plan_json("llama-7b", "--world", "16384", "--tp", "8", "--pp", "4", "--stage", "2")
    assert by_world == plan_json("llama-7b", "--dp", "512", "--tp", "8", "--pp", "4", "--stage", "2")
    # Megatron's order of ranks: tensor-parallel neighbours, then data-parallel, then stages.
    assert by_world["dp_group"] == {"first": 2 * 8 * 512, "last": 3 * 8 * 512 - 8, "step": 8}


# Dumps.


def dump_mlp(directory: Path, **options: Any) -> str:
    model = seeded(Mlp)
    config = mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=600, dump_dir=str(directory), **options)
    handle = mb.attach(model, config)
    torch.compile(model, backend="megabuf")(batch(0, 0, 0, 6, 13)).square().mean().backward()
    digest = handle.plan.digest
    handle.detach()
    fresh_compiler()
    return digest


def test_dump_gives_parameters(tmp_path: Path) -> None:
    digest = dump_mlp(tmp_path)
    same = run("plan", str(tmp_path / "rank0"), "--bucket-size", "600")
    assert "equal to the plan in the dump" in same
    assert plan_json(str(tmp_path), "--bucket-size", "600")["plan"]["digest"] == digest
    assert "another plan than that in the dump (dp 1 per instance, sharded)" in run("plan", str(tmp_path), "--dp", "4")
    assert "--tp and --pp are for whole models" in error_of("plan", str(tmp_path), "--tp", "2")
    assert "leave out --dtype" in error_of("plan", str(tmp_path), "--dtype", "bf16")


def test_dump_of_quantized_parameters(tmp_path: Path) -> None:
    """A dump has the format; options can repeat it and add what a dump has not."""
    fp8 = ["--fp8-param-gather"]
    digest = dump_mlp(tmp_path, fp8_param_gather=True)
    arguments = [str(tmp_path), "--bucket-size", "600"]
    plain, repeated = plan_json(*arguments), plan_json(*arguments, *fp8)
    assert plain == repeated
    assert plain["plan"]["digest"] == digest
    delayed = plan_json(*arguments, *fp8, "--fp8-recipe", "delayed", "--fp8-amax-history-len", "16")
    sizes = [
        {row["name"]: row["counted"] for row in found["ledger"]["rows"]}["codes and scales"]
        for found in (plain, delayed)
    ]
    assert sizes == [3 * (28 + 4), 3 * (28 + 4 * 16)]
    assert "the parameters of the dump are stored as fp8, not as nvfp4" in error_of(
        "plan", *arguments, "--fp4-param-gather"
    )
    patterns = [*fp8, "--quantized-param-name-patterns", "fc1*"]
    assert "leave out --quantized-param-name-patterns" in error_of("plan", *arguments, *patterns)
    assert "needs use_distributed_optimizer=True" in error_of("plan", *arguments, "--no-use-distributed-optimizer")


def test_dump_of_another_version(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"format_version": 1}')
    line = error_of("plan", str(tmp_path))
    assert "has format version 1, this is version 3; compile again with MEGABUF_DUMP" in line


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"format_version": 3}', '{"format_version": 3, "models": {"0": 1}}']
)
def test_no_dump(tmp_path: Path, text: str) -> None:
    assert "no plan.json in or below" in error_of("plan", str(tmp_path))
    (tmp_path / "plan.json").write_text(text)
    assert "is no dump of megabuf_fx" in error_of("plan", str(tmp_path))


# Errors.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("no/such.json", "no file or directory 'no/such.json'"),
        ("/no/such", "no file or directory '/no/such'"),
        ("no_module:x", "cannot build 'no_module:x': ModuleNotFoundError"),
        ("cli_models:nothing", "cannot build 'cli_models:nothing': AttributeError"),
        ("cli_models:broken", "RuntimeError: first line second line"),
        ("cli_models:number", "returned int, not a torch.nn.Module"),
        ("cli_models:frozen", "stage 0 of 1 has no trainable parameters"),
        ("gpt2 --stage 1", "--stage 1 is not one of 1 stages"),
        ("gpt2 --rank 4 --dp 4", "--rank 4 is not one of 4 data-parallel ranks"),
        ("gpt2 --pp 5", "--pp 5 does not divide the 12 layers of 'transformer.h'"),
        ("gpt2 --tp 5", "--tp 5 does not divide dim"),
        ("cli_models:tiny --tp 2", "cannot tell from its name whether '0.weight' [64, 32] is column- or row-parallel"),
        ("gpt2 --world 12 --tp 8", "--world 12 is no multiple of tp * pp = 8"),
        ("gpt2 --world 16 --tp 8 --dp 3", "means dp 2, not --dp 3"),
        ("gpt2 --bucket-size 5 --num-buckets 2", "drop one"),
        ("gpt2 --bucket-size 0", "bucket_size must be a positive number of elements"),
        ("gpt2 --dense-layout", "dense_layout=True needs use_distributed_optimizer=False"),
        ("gpt2 --dp 4 --num-distributed-optimizer-instances 3", "does not divide the 4 ranks of process_group"),
        ("gpt2 --expert-dp 2", "this one has none"),
        ("cli_models:experts --dp 4 --expert-dp 3", "--expert-dp 3 does not divide the 4 data-parallel ranks"),
        (
            "gpt2 --fp8-param-gather",
            "fp8: no weight can be quantized; it needs nn.Linear weights (not tied to",
        ),
        ("llama-7b --fp8-param-gather --fp4-param-gather", "a weight has one format"),
        ("llama-7b --reuse-grad-buf-for-mxfp8-param-ag", "needs fp8_param_gather=True with fp8_recipe='mxfp8'"),
        ("llama-7b --fp4-param-gather --no-use-distributed-optimizer", "fp4_param_gather=True needs use_distributed"),
        ("llama-7b --quantized-param-name-patterns x", "needs fp8_param_gather=True or fp4_param"),
        (
            "llama-7b --fp8-param-gather --fp8-amax-history-len 4",
            "fp8_amax_history_len=4 needs fp8_param_gather=True with",
        ),
        ("llama-7b --fp8-param-gather --dtype fp16", "must be all bf16 or all fp32, found torch.float16"),
    ],
)
def test_errors_are_one_line(arguments: str, message: str) -> None:
    line = error_of("plan", *arguments.split())
    assert line.startswith("megabuf plan: ")
    assert message in line
    assert not dist.is_initialized()


def test_unknown_model() -> None:
    # A process of its own: that nothing may be downloaded is read when the library is imported.
    command = [sys.executable, "-c", "from megabuf_fx.cli.app import main; main()", "plan", "lama-7b"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("megabuf plan: unknown model 'lama-7b'; did you mean 'llama-7b'? It is neither ")


def test_transformers_is_needed_for_configs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "'gpt2' needs the package transformers" in error_of("plan", "gpt2")
    assert "2,565 parameters" in run("plan", "cli_models:tiny")


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "none"}', "{}"])
def test_bad_config_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert "nor a Hugging Face config that could be loaded" in error_of("plan", str(path))


# What a rank holds.


def test_tensor_parallel_shapes(small_llama: str) -> None:
    shapes = {param["name"]: param["shape"] for param in plan_json(small_llama, "--tp", "2")["plan"]["params"]}
    layer = {name.removeprefix("model.layers.3."): shape for name, shape in shapes.items() if ".3." in name}
    # [out, in]; 4 heads of 16, of which keys and values have 2. 1000 words are rounded up to 1024.
    assert layer == {
        "self_attn.q_proj.weight": [32, 64],
        "self_attn.k_proj.weight": [16, 64],
        "self_attn.v_proj.weight": [16, 64],
        "self_attn.o_proj.weight": [64, 32],
        "mlp.gate_proj.weight": [48, 64],
        "mlp.up_proj.weight": [48, 64],
        "mlp.down_proj.weight": [64, 48],
        "input_layernorm.weight": [64],
        "post_attention_layernorm.weight": [64],
    }
    rest = {name: shape for name, shape in shapes.items() if "layers" not in name}
    assert rest == {"model.embed_tokens.weight": [512, 64], "model.norm.weight": [64], "lm_head.weight": [512, 64]}


def test_gpt2_has_transposed_weights_and_biases() -> None:
    shapes = {param["name"]: param["shape"] for param in plan_json("gpt2", "--tp", "2")["plan"]["params"]}
    names = ("attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias", "ln_1.bias")
    found = [shapes[f"transformer.h.0.{name}"] for name in names]
    assert found == [[768, 1152], [1152], [384, 768], [768], [768]]
    assert shapes["transformer.wte.weight"] == [25216, 768]  # 50257 rounded up to a multiple of 256, halved
    assert shapes["transformer.wpe.weight"] == [1024, 768]


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_stages_divide_the_model(small_llama: str, pp: int) -> None:
    stages = [plan_json(small_llama, "--pp", str(pp), "--stage", str(stage))["plan"]["params"] for stage in range(pp)]
    whole = plan_json(small_llama)["plan"]["params"]
    assert [param for stage in stages for param in stage] == whole
    assert all(f"layers.{4 // pp * stage}." in str(params) for stage, params in enumerate(stages))


def test_tied_head_is_on_both_ends() -> None:
    found = [plan_json("gpt2", "--pp", "3", "--stage", str(stage))["plan"]["params"] for stage in range(3)]
    shared = [[param["name"] for param in params if param["shared_embedding"]] for params in found]
    assert shared == [["transformer.wte.weight"], [], ["lm_head.weight"]]
    # On one stage it is an embedding like any other.
    assert not any(param["shared_embedding"] for param in plan_json("gpt2")["plan"]["params"])


def test_fused_experts_are_divided_inside() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.empty(4, 96, 64, device="meta"))
            self.down_proj = nn.Parameter(torch.empty(4, 64, 48, device="meta"))
            self.gate = nn.Linear(64, 4, device="meta")

    specs = params_of_rank(Experts(), tp=2, pp=1, stage=0).specs
    assert [spec.shape for spec in specs] == [(4, 48, 64), (4, 64, 24), (4, 64), (4,)]
    with pytest.raises(CliError, match="needs a model with a list of layers"):
        params_of_rank(Experts(), tp=1, pp=2, stage=0)


# Owners.


@settings(deadline=None, max_examples=100)  # the machines that run this are shared
@given(
    numels=st.lists(st.integers(0, 400), min_size=1, max_size=8),
    dp_size=st.integers(1, 12),
    bucket_size=st.one_of(st.none(), st.integers(1, 500)),
)
def test_owners_are_those_of_the_shard_ranges(numels: list[int], dp_size: int, bucket_size: int | None) -> None:
    specs = [ParamSpec(str(index), (numel,), torch.float32) for index, numel in enumerate(numels)]
    (layout,) = plan_buckets(
        specs, dp_size=dp_size, sharded=True, bucket_size=bucket_size, grad_reduce_in_fp32=False
    ).layouts
    if not layout.numel:
        return
    ranges = [compute_shard_ranges(layout, dp_size=dp_size, dp_rank=rank) for rank in range(dp_size)]
    assert owned_by_rank(layout, dp_size=dp_size) == [sum(piece.numel for piece in pieces) for pieces in ranges]
    owners: dict[int, list[int]] = {}
    for rank, pieces in enumerate(ranges):
        for piece in pieces:
            owners.setdefault(piece.param, []).append(rank)
    found = {
        param: list(range(first, last + 1)) for param, (first, last) in owner_ranks(layout, dp_size=dp_size).items()
    }
    assert found == owners


# Size.


def test_70b_needs_little_memory() -> None:
    """The bound of 1 GiB for planning Llama-70B at 1,024 ranks, in a process of its own. Its other half, 20 s, is a
    figure for a quiet machine: bench/plan_bench.py."""
    command = [sys.executable, "-c", "from megabuf_fx.cli.app import main; main()", "plan", "llama-70b", "--dp", "1024"]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=120)
    # Of all children so far, in KiB; so it is a bound even where others came before.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2**20
