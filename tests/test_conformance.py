"""Megatron-LM's own unit tests (commit e03878b5f, ``tests/unit_tests``) and ours for the same.

``ROWS`` has one row per behaviour that they check of buffers, DDP and the optimizers: which test of ours covers it, or
one line saying why none does. ``pytest -s`` prints it.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from named_tests import find_test
from tabulate import tabulate


class Row(NamedTuple):
    file: str
    """Megatron's."""
    behaviour: str
    tests: tuple[str, ...] = ()
    """Ours."""
    why: str = ""
    """Why there is none, or what is different."""


NOT_OURS = "outside of buffers"

BUFFERS = "distributed/test_param_and_grad_buffer.py"
LAYOUT = "distributed/test_param_layout.py"
LAYER_WISE_LAYOUT = "distributed/test_layer_wise_param_layout.py"
DDP = "distributed/test_distributed_data_parallel.py"
EXPERTS = "distributed/test_grad_sync_with_expert_parallel.py"
FP32_SUM = "distributed/test_reduce_scatter_with_fp32_accumulation.py"
FINALIZE_FILE = "distributed/test_finalize_model_grads.py"
OPTIMIZER = "test_optimizer.py"
LAYER_WISE_FILE = "test_layer_wise_optimizer.py"
CHECKPOINT_FILE = "dist_checkpointing/test_optimizer.py"

ROWS = [
    # Buffers
    Row(
        BUFFERS,
        "bucket sizes of 10 layers, with and without padding, bias and shared embedding",
        ("test_layout.py::test_layouts_equal_megatron", "test_layout.py::test_layouts_oracle_is_complete"),
    ),
    Row(
        BUFFERS,
        "positions in a bucket: multiples of 64, relative to the bucket's start; that slice is the parameter",
        ("test_buffers.py::test_parameters_lie_where_the_layout_says",),
    ),
    Row(
        BUFFERS,
        "gradients after the reduction: optimizer x overlap x average x instances",
        ("test_grad_sync_matrix.py::test_every_combination", "test_grad_sync_matrix.py::test_instances_need_shards"),
    ),
    Row(
        BUFFERS,
        "registering without overlap raises; finishing before all are ready raises",
        ("test_state_machine.py::test_scenario",),
        "there is nothing to register, and missing gradients are zeros",
    ),
    Row(
        BUFFERS,
        "force_all_reduce uses all-reduce and no reduce-scatter, and vice versa",
        ("test_grad_sync_matrix.py::test_every_combination", "test_state_machine.py::test_scenario"),
    ),
    Row(
        BUFFERS,
        "start_param_sync on one rank, legacy layer-wise path",
        ("test_layer_wise.py::test_muon_is_that_of_one_process",),
        "one rank gathers like many; its collective is the identity",
    ),
    Row(
        BUFFERS,
        "free_overlap_buffers before a checkpoint",
        ("test_param_sync.py::test_copies_are_never_stale",),
        "nothing is kept to be freed; a checkpoint gathers what is stale",
    ),
    Row(
        BUFFERS,
        "fp32 local accumulation: config conflict",
        ("test_config.py::test_options_that_exclude_each_other", "test_grouping.py::test_config_errors_equal_megatron"),
    ),
    Row(
        BUFFERS,
        "fp32 local accumulation: patterns, dtypes, the copy in the buffer, lists",
        ("test_buffers.py::test_patterns_choose_parameters",),
    ),
    Row(
        BUFFERS,
        "fp32 local accumulation: reset zeroes the sums",
        (
            "test_megatron_traps.py::test_first_gradient_overwrites_whatever_was_there",
            "test_buffers.py::test_an_unused_parameters_sum_is_zero",
        ),
        "nothing is zeroed: the next gradient overwrites",
    ),
    Row(
        BUFFERS,
        "fp32 local accumulation: scale_gradients scales the sums",
        ("test_buffers.py::test_scale_gradients_reaches_the_sums",),
    ),
    Row(
        BUFFERS,
        "fp32 local accumulation: main_grad equals the buffer after the reduction",
        (
            "test_buffers.py::test_micro_batches_are_summed_in_fp32_and_rounded_once",
            "test_state_machine.py::test_scenario",
        ),
    ),
    Row(
        BUFFERS,
        "NVFP4: packed and unpacked positions",
        (
            "test_packed_layout.py::test_megatron_rule_equals_megatron",
            "test_packed_layout.py::test_ours_never_loses_an_update",
        ),
        "our packed bucket is exactly half of the full one; Megatron's rule can assign a shard to the wrong rank",
    ),
    Row(
        BUFFERS,
        "expert parameters have buffers and index spaces of their own, divisible by their ranks",
        ("test_grad_sync_matrix.py::test_experts", "test_properties.py::test_plans"),
    ),
    # Layout
    Row(
        LAYOUT,
        "padding helpers",
        ("test_layout.py::test_pad_to_divisor", "test_layout.py::test_bucket_end_divisor"),
    ),
    Row(
        LAYOUT,
        "grouping by dtype, gradient dtype and experts; param_indices",
        (
            "test_layout.py::test_grouping_equals_megatron",
            "test_layout.py::test_quantized_parameters_share_the_counter_of_their_logical_dtype",
            "test_plan.py::test_grad_dtype_decides_the_buffers",
        ),
    ),
    Row(
        LAYOUT,
        "layout without shards: buckets, no padding",
        ("test_layout.py::test_layouts_equal_megatron", "test_plan.py::test_dense_layout"),
        "dense_layout=True; the default aligns, so that views may enter graphs",
    ),
    Row(
        LAYOUT,
        "layout with shards: starts, ends, busbw, shared embeddings, sizes",
        (
            "test_layout.py::test_layouts_equal_megatron",
            "test_layout.py::test_bucket_ends_divide",
            "test_layout.py::test_shared_embedding_is_alone",
            "test_plan.py::test_padding_for_bus_bandwidth",
        ),
    ),
    Row(
        LAYOUT,
        "all buffers: dense and expert separate, experts divided by their ranks, param_indices",
        ("test_layout.py::test_layouts_equal_megatron", "test_properties.py::test_plans"),
    ),
    Row(
        LAYER_WISE_LAYOUT,
        "shard divisor: a multiple of 64, of which dp_size fill a bucket",
        (
            "test_layerwise_layout.py::test_shard_divisor_divides_buckets",
            "test_layerwise_layout.py::test_shard_divisor",
        ),
    ),
    Row(
        LAYER_WISE_LAYOUT,
        "equal parameters: spread evenly, the remainder from the first shard on, in one bucket, in order in a shard",
        (
            "test_layerwise_layout.py::test_equal_parameters_are_spread_evenly",
            "test_layerwise_layout.py::test_the_first_shard_takes_the_fifth_of_four_ranks",
            "test_layerwise_layout.py::test_equal_sizes_share_a_bucket",
            "test_layerwise_layout.py::test_equal_sizes_of_a_shard_are_in_reverse_definition_order",
        ),
    ),
    Row(
        LAYER_WISE_LAYOUT,
        "no parameter is cut, none is missing; one rank, one parameter",
        (
            "test_layerwise_layout.py::test_layouts_equal_megatron",
            "test_layerwise_layout.py::test_no_parameter_is_cut",
            "test_layerwise_layout.py::test_every_parameter_is_inside_one_shard",
            "test_layerwise_layout.py::test_all_parameters_are_there",
            "test_layerwise_layout.py::test_one_rank_has_everything",
            "test_layerwise_layout.py::test_one_parameter_leaves_shards_empty",
        ),
    ),
    Row(
        LAYER_WISE_LAYOUT,
        "small parameters fill the shards beside a big one",
        ("test_layerwise_layout.py::test_small_parameters_fill_the_shards_beside_a_big_one",),
    ),
    Row(
        LAYER_WISE_LAYOUT,
        "shared embedding alone in shard 0 of its bucket",
        (
            "test_layerwise_layout.py::test_shared_embedding_is_alone_in_the_first_shard",
            "test_layerwise_layout.py::test_shared_embedding_fits_into_one_shard_of_many_ranks",
        ),
    ),
    Row(
        LAYER_WISE_LAYOUT,
        "buckets: threshold, divisible by the ranks, aligned ends",
        (
            "test_layerwise_layout.py::test_bucket_size_cuts_buckets",
            "test_layerwise_layout.py::test_buckets_divide_by_the_ranks",
            "test_layerwise_layout.py::test_bucket_ends_are_aligned",
        ),
    ),
    Row(
        LAYER_WISE_LAYOUT,
        "all buffers: keys, experts separate, others as the distributed optimizer's",
        (
            "test_layerwise_layout.py::test_plans_have_the_layouts_of_megatron",
            "test_layerwise_layout.py::test_buffers_of_experts_are_apart",
        ),
    ),
    # DDP
    Row(
        DDP,
        "process groups passed by the user",
        ("test_attach.py::test_device_mesh_axis", "test_instances.py::test_expert_groups_are_checked"),
    ),
    Row(
        EXPERTS,
        "gradients after the reduction: the same matrix with expert parallelism",
        ("test_grad_sync_matrix.py::test_experts", "test_instances.py::test_experts_equal_eager"),
        "expert tensor parallelism is the model's own affair: a factor in its gradients",
    ),
    Row(
        EXPERTS,
        "nothing is sent before all gradients are there",
        ("test_grad_sync_matrix.py::test_every_combination", "test_state_machine.py::test_scenario"),
    ),
    Row(
        FP32_SUM,
        "all-to-all equals fp32 reduce-scatter rounded to bf16, and not the bf16 one; the output is part of the input",
        (
            "test_transports.py::test_all_to_all_is_fp32_reduce_scatter_rounded_once",
            "test_transports.py::test_fp32_accumulation_equals_fp32_gradients_rounded",
        ),
    ),
    Row(
        FINALIZE_FILE,
        "router expert bias with a group of one's own; counts are reset; finish_grad_sync is called once",
        ("test_finalize.py::test_expert_bias",),
        "the rule is a function that the caller passes; bias_by_sign is Megatron's",
    ),
    Row(
        FINALIZE_FILE,
        "a missing tp_dp_cp raises before any gradient is reduced",
        (
            "test_finalize.py::test_expert_bias",
            "test_finalize_refusals.py::test_missing_groups_are_named_before_anything_is_reduced",
            "test_pipeline_parallel.py::test_a_stage_between",
        ),
        "so does every other group that is needed",
    ),
    Row(
        FINALIZE_FILE,
        "layer norm gradients over tensor-parallel ranks, frozen or not",
        ("test_finalize.py::test_each_sum_by_itself", "test_finalize.py::test_frozen_copies"),
    ),
    Row(
        FINALIZE_FILE,
        "embedding gradients over stages, shared or not, frozen or not",
        (
            "test_finalize.py::test_each_sum_by_itself",
            "test_finalize.py::test_frozen_copies",
            "test_finalize_refusals.py::test_ranks_that_disagree",
        ),
        "frozen on one stage only is refused",
    ),
    Row(
        "distributed/test_grad_reduce_for_replicated_embedder.py",
        "conditional embedder over stages and virtual stages: flagged parameters only",
        (
            "test_finalize.py::test_copies_of_virtual_stages",
            "test_finalize_refusals.py::test_copies_that_shards_cut_differently",
        ),
        "with shards a copy needs a bucket of its own, or what stages own of it differs",
    ),
    Row("distributed/test_torch_fully_sharded_parallel.py", "FSDP2 wrapper", why=NOT_OURS),
    Row("distributed/megatron_fsdp/*", "another implementation", why=NOT_OURS),
    # Optimizers
    Row(
        OPTIMIZER,
        "param groups and their overrides",
        ("test_trajectory.py::test_equals_megatron",),
        "the caller makes groups as for any torch optimizer; there are no overrides by name",
    ),
    Row(
        OPTIMIZER,
        "chained optimizers",
        ("test_instances.py::test_experts_equal_eager",),
        "one optimizer has dense and expert parameters; nothing to chain",
    ),
    Row(
        OPTIMIZER,
        "a step is skipped when the norm is over a threshold",
        ("test_grad_scaler.py::test_grad_scaler",),
        "the caller has the norm from clip_grad_norm_ and decides; GradScaler skips on all ranks together",
    ),
    Row(
        OPTIMIZER,
        "precision-aware Adam: moments and masters of other dtypes",
        why="masters are fp32, moments are the torch class's own",
    ),
    Row(
        OPTIMIZER,
        "save and load with state that is no tensor; sharded_state_dict keys",
        ("test_checkpoint.py::test_state_dict_behaves_as_in_torch",),
    ),
    Row(
        OPTIMIZER,
        "reload_model_params: masters become the parameters, exactly",
        ("test_backend.py::test_masters_follow_loaded_weights_when_told",),
    ),
    Row(
        OPTIMIZER,
        "custom process groups; missing groups are refused",
        ("test_attach.py::test_device_mesh_axis", "test_instances.py::test_expert_groups_are_checked"),
    ),
    Row("test_optimizer_param_scheduler.py", "schedules of lr and weight decay", why="torch schedulers, unchanged"),
    Row("test_optimizer_cpu_offloading.py", "optimizer on the CPU", why="not there"),
    Row(
        LAYER_WISE_FILE,
        "steps, norms, several optimizers, bf16 masters; sync and overlap, with a layout and without, over steps",
        (
            "test_layer_wise.py::test_muon_is_that_of_one_process",
            "test_trajectory.py::test_equals_megatron",
            "test_layer_wise.py::test_clipping",
            "test_layer_wise.py::test_groups_keep_their_hyper_parameters",
        ),
    ),
    Row(
        LAYER_WISE_FILE,
        "each parameter has one owner; fewer parameters than ranks",
        (
            "test_layer_wise.py::test_every_parameter_is_updated_once",
            "test_trajectory.py::test_equals_megatron",
        ),
    ),
    Row(
        LAYER_WISE_FILE,
        "TypeError for optimizers that are wrapped already; switching hooks on and off",
        why="the class is passed, not an optimizer, and there are no hooks to switch",
    ),
    Row(
        CHECKPOINT_FILE,
        "buffer-space state across sizes and divisors; fully reshardable state",
        ("test_checkpoint_worlds.py::test_loading_elsewhere_changes_no_bit",),
        "one form only: by parameter, in logical order",
    ),
    Row(
        "dist_checkpointing/test_layer_wise_optimizer.py",
        "state saved and loaded, with a layout and without, across the two",
        ("test_layer_wise.py::test_checkpoints",),
    ),
    Row(
        "rl/test_rl_utils.py",
        "gradient buffers offloaded and restored",
        ("test_offload.py::test_numbers_are_those_without", "test_state_machine.py::test_scenario"),
    ),
    Row(
        "test_utils.py",
        "norms over shards, dense and expert",
        ("test_trajectory.py::test_equals_megatron", "test_instances.py::test_experts_equal_eager"),
        "the gradient norm; a norm of parameters is one call of torch on the model",
    ),
    Row(
        "test_fp8_param.py, test_fp4_param.py",
        "quantized parameters train as the reference",
        ("test_quantized_runs.py::test_the_example_judges_itself", "test_quantized_runs.py::test_two_hundred_steps"),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.file}: {row.behaviour}")
def test_covered_or_explained(row: Row) -> None:
    assert row.tests or row.why
    for name in row.tests:
        find_test(name)


def test_every_file_of_the_list_has_rows() -> None:
    assert len({row.file for row in ROWS}) == 19
    assert len({(row.file, row.behaviour) for row in ROWS}) == len(ROWS)


def test_print_the_table() -> None:
    lines = [[row.file, row.behaviour, "\n".join(row.tests), row.why] for row in ROWS]
    print("\n" + tabulate(lines, headers=["Megatron", "behaviour", "ours", "why"], maxcolwidths=[25, 35, None, 30]))
