"""``config.py`` and the splitting of options in ``backend.py``: what is wrong is said at once, with what is right."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest

from megabuf_fx.backend import split_options
from megabuf_fx.config import MegabufConfig, suggest

FIELDS = {field.name: field for field in dataclasses.fields(MegabufConfig)}


def test_defaults() -> None:
    config = MegabufConfig()
    assert dataclasses.asdict(config) == {
        "use_distributed_optimizer": True,
        "bucket_size": None,
        "link_gbps": None,
        "link_alpha_us": None,
        "device_tflops": None,
        "device_memory_gbs": None,
        "device_op_us": None,
        "num_buckets": None,
        "disable_bucketing": False,
        "pipeline_parallel_rank": 0,
        "grad_reduce_in_fp32": False,
        "overlap_grad_reduce": True,
        "overlap_param_gather": False,
        "align_param_gather": False,
        "overlap_param_gather_with_optimizer_step": False,
        "param_gather_prefetch": None,
        "debug_nan_stale_params": False,
        "find_unused_parameters": True,
        "average_in_collective": False,
        "calculate_per_token_loss": False,
        "reduce_scatter_with_fp32_accumulation": False,
        "param_name_patterns_for_fp32_local_accumulation": (),
        "num_distributed_optimizer_instances": 1,
        "check_for_nan_in_grad": False,
        "check_for_large_grads": False,
        "check_for_drift_every": None,
        "pad_buckets_for_high_nccl_busbw": False,
        "nccl_ub": False,
        "init_sync": True,
        "gradient_accumulation_fusion": True,
        "dense_layout": False,
        "inner_compiler": "inductor",
        "layer_wise_optimizer": False,
        "fp8_param_gather": False,
        "fp8_recipe": "tensorwise",
        "fp8_amax_history_len": 1,
        "fp8_amax_compute_algo": "most_recent",
        "fp8_margin": 0,
        "mxfp8_scale_rule": "rceil",
        "reuse_grad_buf_for_mxfp8_param_ag": False,
        "fp4_param_gather": False,
        "quantized_param_name_patterns": ("all",),
        "dump_dir": None,
        "profile": False,
    }


@pytest.mark.parametrize("value", [0, 1, None, "true", 1.0])
def test_flags_are_bools(value: Any) -> None:
    names = [name for name, field in FIELDS.items() if field.type == "bool"]
    assert len(names) == 24
    for name in names:
        with pytest.raises(TypeError, match=rf"^{name} must be a bool, got {value!r} of type {type(value).__name__}$"):
            MegabufConfig(**{name: value})


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if str(field.type).startswith("int")])
def test_sizes_are_ints_and_no_bools(name: str) -> None:
    values: list[Any] = [True, False, 1.0, 4e7, (1,)]
    for value in values if name == "bucket_size" else [*values, "40_000_000"]:
        with pytest.raises(TypeError, match=rf"^{name} must be an int, got .* of type {type(value).__name__}$"):
            MegabufConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "unit"),
    [
        ("bucket_size", 0, "elements"),
        ("bucket_size", -1, "elements"),
        ("num_buckets", 0, "buckets"),
        ("num_buckets", -4, "buckets"),
        ("num_distributed_optimizer_instances", 0, "instances"),
        ("fp8_amax_history_len", 0, "steps"),
    ],
)
def test_sizes_are_positive(name: str, value: Any, unit: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be a positive number of {unit}, got {value}$"):
        MegabufConfig(**{name: value})


def test_bucket_size_is_a_number_or_auto() -> None:
    with pytest.raises(ValueError, match=r'^bucket_size must be a number or "auto", got \'40_000_000\'$'):
        MegabufConfig(bucket_size="40_000_000")  # type: ignore[arg-type]
    assert MegabufConfig(bucket_size="auto").chooses_buckets
    assert not MegabufConfig(bucket_size=5).chooses_buckets
    assert not MegabufConfig(bucket_size="auto", pipeline_parallel_rank=2).chooses_buckets
    assert not MegabufConfig(bucket_size="auto", overlap_grad_reduce=False).chooses_buckets


RATES = ["link_gbps", "link_alpha_us", "device_tflops", "device_memory_gbs", "device_op_us"]


@pytest.mark.parametrize("name", RATES)
def test_rates_are_numbers_for_auto(name: str) -> None:
    others: list[Any] = [True, "400", (1.0,)]
    for value in others:
        with pytest.raises(TypeError, match=rf"^{name} must be a number, got .* of type {type(value).__name__}$"):
            MegabufConfig(**dict[str, Any]({"bucket_size": "auto", name: value}))
    for number in (-1, float("nan")):
        with pytest.raises(ValueError, match=rf"^{name} must "):
            MegabufConfig(**dict[str, Any]({"bucket_size": "auto", name: number}))
    for number in (1, 2.5):
        assert getattr(MegabufConfig(**dict[str, Any]({"bucket_size": "auto", name: number})), name) == number
        with pytest.raises(ValueError, match=rf"^{name}={number} needs bucket_size='auto'$"):
            MegabufConfig(**dict[str, Any]({name: number}))


@pytest.mark.parametrize("name", ["pipeline_parallel_rank", "param_gather_prefetch", "fp8_margin"])
def test_counts_are_not_negative(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must not be negative, got -1$"):
        MegabufConfig(**dict[str, Any]({name: -1}))


def test_patterns_are_a_tuple_of_strings() -> None:
    values: list[Any] = ["*.weight", ["*.weight"], (1,), None]
    for value in values:
        with pytest.raises(TypeError, match="must be a tuple of str"):
            MegabufConfig(param_name_patterns_for_fp32_local_accumulation=value)
        with pytest.raises(TypeError, match="must be a tuple of str"):
            MegabufConfig(quantized_param_name_patterns=value)


@pytest.mark.parametrize(
    "name", ["inner_compiler", "dump_dir", "fp8_recipe", "fp8_amax_compute_algo", "mxfp8_scale_rule"]
)
def test_names_are_strings(name: str) -> None:
    values: list[Any] = [1, True, Path("dump"), ["aot_eager"]]
    for value in values:
        with pytest.raises(TypeError, match=rf"^{name} must be a str, got .* of type {type(value).__name__}$"):
            MegabufConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp8_recipe", "blockwise"),
        ("fp8_amax_compute_algo", "mean"),
        ("mxfp8_scale_rule", "RCEIL"),
        ("fp8_recipe", None),
    ],
)
def test_choices(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be one of \(.*\), got {value!r}$"):
        MegabufConfig(**{name: value})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"fp8_param_gather": True}, "fp8"),
        ({"fp8_param_gather": True, "fp8_recipe": "delayed"}, "fp8"),
        ({"fp8_param_gather": True, "fp8_recipe": "mxfp8"}, "mxfp8"),
        ({"fp4_param_gather": True}, "nvfp4"),
    ],
)
def test_format_of_quantized_weights(options: dict[str, Any], expected: str | None) -> None:
    assert MegabufConfig(**options).quantization == expected


@pytest.mark.parametrize("value", ["eager", "Inductor", "", None])
def test_inner_compiler_is_one_of_two(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"inner_compiler must be one of \('inductor', 'aot_eager'\), got {value!r}"):
        MegabufConfig(inner_compiler=value)


NEEDS: dict[str, dict[str, Any]] = {
    **{name: {"bucket_size": "auto"} for name in RATES},
    "dense_layout": {"use_distributed_optimizer": False},
    "align_param_gather": {"overlap_param_gather": True},
    "overlap_param_gather_with_optimizer_step": {"overlap_param_gather": True},
    "param_gather_prefetch": {"overlap_param_gather": True},
    "debug_nan_stale_params": {"overlap_param_gather": True},
    "fp8_recipe": {"fp8_param_gather": True},
    "fp8_amax_history_len": {"fp8_param_gather": True, "fp8_recipe": "delayed"},
    "fp8_amax_compute_algo": {"fp8_param_gather": True, "fp8_recipe": "delayed"},
    "fp8_margin": {"fp8_param_gather": True, "fp8_recipe": "delayed"},
    "mxfp8_scale_rule": {"fp8_param_gather": True, "fp8_recipe": "mxfp8"},
    "reuse_grad_buf_for_mxfp8_param_ag": {"fp8_param_gather": True, "fp8_recipe": "mxfp8"},
    "quantized_param_name_patterns": {"fp4_param_gather": True},
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_size": 5, "num_buckets": 2}, r"cannot specify both num_buckets=2 and bucket_size=5"),
        ({"bucket_size": "auto", "num_buckets": 2}, r"cannot specify both num_buckets=2 and bucket_size=auto"),
        ({"bucket_size": "auto", "disable_bucketing": True}, r"bucket_size='auto' chooses buckets, disable_bucketing"),
        (
            {"overlap_param_gather": True, "use_distributed_optimizer": False},
            r"overlap_param_gather=True needs use_distributed_optimizer=True",
        ),
        (
            {"overlap_param_gather": True, "overlap_grad_reduce": False},
            r"overlap_param_gather=True needs overlap_grad_reduce=True",
        ),
        ({"dense_layout": True}, r"dense_layout=True needs use_distributed_optimizer=False"),
        (
            {"average_in_collective": True, "calculate_per_token_loss": True},
            r"average_in_collective.* with calculate_per_token_loss",
        ),
        (
            {"num_distributed_optimizer_instances": 2, "use_distributed_optimizer": False},
            r"num_distributed_optimizer_instances=2 needs use_distributed_optimizer=True",
        ),
        (
            {"num_distributed_optimizer_instances": 2, "reduce_scatter_with_fp32_accumulation": True},
            r"reduce_scatter_with_fp32_accumulation=True with num_distributed_optimizer_instances=2",
        ),
        (
            {"reduce_scatter_with_fp32_accumulation": True, "use_distributed_optimizer": False},
            r"reduce_scatter_with_fp32_accumulation=True needs use_distributed_optimizer=True",
        ),
        (
            {"param_name_patterns_for_fp32_local_accumulation": ("all",), "grad_reduce_in_fp32": True},
            r"param_name_patterns_for_fp32_local_accumulation with grad_reduce_in_fp32=True",
        ),
        (
            {
                "align_param_gather": True,
                "overlap_param_gather_with_optimizer_step": True,
                "overlap_param_gather": True,
            },
            r"align_param_gather .* overlap_param_gather_with_optimizer_step",
        ),
        ({"fp8_param_gather": True, "fp4_param_gather": True}, r"drop fp8_param_gather or fp4_param_gather"),
        (
            {"fp8_param_gather": True, "use_distributed_optimizer": False},
            r"fp8_param_gather=True needs use_distributed_optimizer=True",
        ),
        (
            {"fp4_param_gather": True, "use_distributed_optimizer": False},
            r"fp4_param_gather=True needs use_distributed_optimizer=True",
        ),
        ({"fp8_recipe": "mxfp8"}, r"fp8_recipe='mxfp8' needs fp8_param_gather=True"),
        (
            {"quantized_param_name_patterns": ("fc*",)},
            r"quantized_param_name_patterns=.* needs fp8_param_gather=True or",
        ),
        ({"fp8_amax_history_len": 16}, r"fp8_amax_history_len=16 needs .*fp8_recipe='delayed'"),
        ({"fp8_amax_compute_algo": "max"}, r"fp8_amax_compute_algo='max' needs .*fp8_recipe='delayed'"),
        ({"fp8_margin": 1}, r"fp8_margin=1 needs .*fp8_recipe='delayed'"),
        ({"mxfp8_scale_rule": "floor"}, r"mxfp8_scale_rule='floor' needs .*fp8_recipe='mxfp8'"),
        (
            {"reuse_grad_buf_for_mxfp8_param_ag": True},
            r"reuse_grad_buf_for_mxfp8_param_ag=True needs .*fp8_recipe='mxfp8'",
        ),
        ({"align_param_gather": True}, r"align_param_gather=True needs overlap_param_gather=True"),
        ({"param_gather_prefetch": 1}, r"param_gather_prefetch=1 needs overlap_param_gather=True"),
        ({"debug_nan_stale_params": True}, r"debug_nan_stale_params=True needs overlap_param_gather=True"),
    ],
)
def test_options_that_exclude_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MegabufConfig(**options)
    # Each alone is fine, with what it needs.
    for name, value in options.items():
        needs = NEEDS.get(name, {})
        assert getattr(MegabufConfig(**{name: value, **needs}), name) == value


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("bucketsize", "bucket_size"),
        ("bucket_sizes", "bucket_size"),
        ("use_distributed_optimiser", "use_distributed_optimizer"),
        ("overlap_grad_reduction", "overlap_grad_reduce"),
        ("dump-dir", "dump_dir"),
    ],
)
def test_unknown_name_suggests_a_near_one(name: str, near: str) -> None:
    options: dict[str, Any] = {name: 1}
    with pytest.raises(ValueError, match=rf"^unknown option '{name}'; did you mean '{near}'\?$"):
        MegabufConfig(**options)


def test_unknown_name_without_a_near_one_lists_all() -> None:
    with pytest.raises(
        ValueError, match=r"^unknown option 'xyzzy'; known names: align_param_gather, average_in_collective, "
    ) as caught:
        MegabufConfig(xyzzy=1)  # type: ignore[call-arg]
    assert all(name in str(caught.value) for name in FIELDS)
    assert suggest("q", ["b", "a"]) == "; known names: a, b"
    assert suggest("abcd", ["abce"]) == "; did you mean 'abce'?"


def test_fields_are_keywords() -> None:
    with pytest.raises(TypeError, match="positional"):
        MegabufConfig(True)  # type: ignore[misc]


def test_config_is_a_frozen_value() -> None:
    config = MegabufConfig(bucket_size=5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.bucket_size = 6  # type: ignore[misc]
    # With slots there is no room for a misspelt attribute either.
    with pytest.raises((AttributeError, TypeError)):
        config.bucketsize = 6  # type: ignore[attr-defined]
    assert config == MegabufConfig(bucket_size=5) != MegabufConfig()
    assert len({config, MegabufConfig(bucket_size=5)}) == 1
    assert dataclasses.replace(config, bucket_size=7) == MegabufConfig(bucket_size=7)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert "bucket_size=5" in repr(config)


def test_replace_checks_again() -> None:
    with pytest.raises(ValueError, match="cannot specify both"):
        dataclasses.replace(MegabufConfig(bucket_size=5), num_buckets=2)


# MEGABUF_DUMP


@pytest.mark.parametrize(
    ("variable", "field", "expected"),
    [
        (None, None, None),
        ("/e", None, "/e"),
        (None, "/f", "/f"),
        ("/e", "/f", "/f"),
        ("", None, None),
        ("", "/f", "/f"),
    ],
)
def test_environment_sets_the_dump_directory(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, field: str | None, expected: str | None
) -> None:
    """The config goes first; an empty variable counts as none."""
    monkeypatch.delenv("MEGABUF_DUMP", raising=False)
    if variable is not None:
        monkeypatch.setenv("MEGABUF_DUMP", variable)
    config = MegabufConfig(dump_dir=field, bucket_size=5)
    assert config.dump_dir == field, "the environment is read in one place only"
    assert config.with_environment() == MegabufConfig(dump_dir=expected, bucket_size=5)


# Options of the backend.


@pytest.mark.parametrize("options", [None, {}])
@pytest.mark.parametrize("mode", [None, "", "default"])
def test_no_options(mode: str | None, options: dict[str, Any] | None) -> None:
    assert split_options(mode, options) == ({}, {})


def test_options_are_split() -> None:
    options = {
        "bucket_size": 5,
        "max_autotune": True,
        "inner_compiler": "aot_eager",
        "triton.unique_kernel_names": True,
    }
    ours, inductor = split_options(None, options)
    assert ours == {"bucket_size": 5, "inner_compiler": "aot_eager"}
    assert inductor == {"max_autotune": True, "triton.unique_kernel_names": True}


def test_inductor_options_may_have_dashes() -> None:
    """As ``torch.compile`` allows for its own backend."""
    assert split_options(None, {"max-autotune": True, "epilogue-fusion": False}) == (
        {},
        {"max_autotune": True, "epilogue_fusion": False},
    )


@pytest.mark.parametrize("name", ["bucketsize", "bucket-size", "buket_size"])
def test_unknown_option_suggests_a_near_one(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^unknown option '{name}' of backend 'megabuf'; did you mean 'bucket_size'\?$"
    ):
        split_options(None, {name: 5})


def test_unknown_option_without_a_near_one_lists_ours() -> None:
    with pytest.raises(
        ValueError, match="unknown option 'xyzzy' of backend 'megabuf'; known names: align_param_gather"
    ):
        split_options(None, {"bucket_size": 5, "xyzzy": 1})


def test_misspelt_inductor_option_suggests_the_right_one() -> None:
    with pytest.raises(
        ValueError, match=r"unknown option 'max_autotun' of backend 'megabuf'; did you mean 'max_autotune'\?"
    ):
        split_options(None, {"max_autotun": True})


def test_mode_without_cudagraphs() -> None:
    ours, inductor = split_options("max-autotune-no-cudagraphs", {"bucket_size": 5})
    assert ours == {"bucket_size": 5}
    assert inductor["max_autotune"] is True
    assert not inductor.get("triton.cudagraphs")


def test_options_win_over_the_mode() -> None:
    _, inductor = split_options("max-autotune-no-cudagraphs", {"max_autotune": False})
    assert inductor["max_autotune"] is False
    # So a mode with CUDA graphs can be used without them.
    _, inductor = split_options("max-autotune", {"triton.cudagraphs": False})
    assert inductor["triton.cudagraphs"] is False


def test_unknown_mode() -> None:
    with pytest.raises(RuntimeError, match="Unrecognized mode=fastest"):
        split_options("fastest", None)


def test_arguments_are_left_alone() -> None:
    options = {"bucket_size": 5, "max-autotune": True}
    split_options("max-autotune-no-cudagraphs", options)
    assert options == {"bucket_size": 5, "max-autotune": True}
