"""The scenarios of ``oracle/state_machine.json.gz`` on our API, one function each; steps have the oracle's labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from oracle_data import load
from replay import Replay, Seen, Sent, Two, recorded
from torch import nn

import megabuf_fx as mb
from megabuf_fx.runtime import transports

New = Callable[..., Replay]
Scenario = Callable[[New], Replay]


def overlap_lifecycle(new: New) -> Replay:
    r = new()
    r.step("init")
    r.step("zero_grad_buffer before first batch", r.zero)
    r.step("first backward (no collectives expected)", r.backward)
    r.step("finish_grad_sync", r.finish)
    r.step("finish_grad_sync again (idempotent)", r.finish)
    r.step("zero_grad_buffer -> golden counts recorded", r.zero)
    r.step("second backward (collectives from hooks)", r.backward)
    r.step("finish_grad_sync", r.finish)
    return r


def no_sync_accumulation(new: New) -> Replay:
    r = new()
    for step in range(2):
        r.zero()
        with r.buf.no_sync():
            r.step(f"iter{step} inside no_sync", r.backward)
        r.step(f"iter{step} last microbatch", r.backward)
        r.step(f"iter{step} finish", r.finish)
    return r


def finish_before_ready(new: New) -> Replay:
    r = first_step(new())
    r.step("2 of 4 params registered, finish", r.backward_l1, r.finish)
    r.zero()
    r.step("all registered, finish", r.backward, r.finish)
    r.step("register same param again after dispatch", r.backward)
    return r


def first_step(r: Replay, backwards: int = 1) -> Replay:
    """The step that teaches the counts."""
    for _ in range(backwards):
        r.backward()
    r.finish()
    r.zero()
    return r


def non_overlap_not_idempotent(new: New) -> Replay:
    r = new()
    r.step("finish 1", r.fill, r.finish)
    r.step("finish 2 (re-reduces)", r.finish)
    r.absent("register_grad_ready", "register_grad_ready")
    return r


def force_all_reduce(new: New) -> Replay:
    r = new()
    r.step("finish(force_all_reduce=True)", r.fill, r.force)
    return r


def start_twice(new: New) -> Replay:
    r = new()
    r.fill_unsynced()
    r.step("start (first batch)", r.buf.start_grad_sync)
    r.step("start again (first batch: no-op)", r.buf.start_grad_sync)
    r.step("finish in first batch", r.finish)
    r.zero()
    r.fill_unsynced()
    r.step("start (not first batch)", r.buf.start_grad_sync)
    r.step("start again (not first batch)", r.buf.start_grad_sync)
    r.step("finish", r.finish)
    r.step("start after finish, same iteration", r.buf.start_grad_sync)
    r.step("finish after that (finished flag already set: handle left pending)", r.finish)
    r.step("zero_grad_buffer", r.zero)
    r.fill_unsynced()
    r.step("start in the next iteration", r.buf.start_grad_sync)
    r.finish()
    return r


def unused_single_bucket(new: New) -> Replay:
    r = new(Two(has_unused=True))
    r.step("finish_grad_sync first batch with an unused parameter", r.backward, r.finish)
    r.step("zero_grad_buffer", r.zero)
    return r


def unused_bucket_per_param(new: New) -> Replay:
    r = new(Two(has_unused=True))
    r.step("first finish", r.backward, r.finish)
    r.step("zero_grad_buffer (buckets of unused params never leave first batch)", r.zero)
    r.step("second finish", r.backward, r.finish)
    return r


def unused_non_overlap(new: New) -> Replay:
    r = new(Two(has_unused=True))
    r.step("finish_grad_sync non-overlap", r.backward, r.finish)
    r.step("zero_grad_buffer", r.zero)
    return r


def missing_grad(new: New) -> Replay:
    r = first_step(new())
    r.step("backward touching only l1 in 2nd iteration", r.backward_l1)
    r.step("finish", r.finish)
    return r


def golden_count_two(new: New) -> Replay:
    r = first_step(new(), backwards=2)
    r.step("golden")
    r.step("after first of two backwards", r.backward)
    r.step("after second", r.backward)
    r.step("finish", r.finish)
    return r


def one_pass_too_many(new: New) -> Replay:
    r = first_step(new())
    r.step("after first", r.backward)
    r.step("after an extra one", r.backward)
    r.zero()
    r.step("next step", r.backward, r.finish)
    return r


def force_after_scatter(new: New) -> Replay:
    r = first_step(new())
    r.step("finish(force_all_reduce=True) after the hooks", r.backward, r.force)
    r.zero()
    r.buf.force_all_reduce = True
    r.step("the property, before the backward", r.backward, r.finish)
    return r


def param_sync_non_overlap(new: New) -> Replay:
    r = new()
    r.absent("finish_param_sync without overlap_param_gather", "finish_param_sync")
    r.step("start_param_sync (sync)", r.buf.start_param_sync)
    r.absent("enable_forward_pre_hook without overlap", "enable_forward_pre_hook")
    r.absent("disable_forward_pre_hook without overlap", "disable_forward_pre_hook")
    return r


def param_sync_without_distopt(new: New) -> Replay:
    r = new()
    r.step("start_param_sync", r.buf.start_param_sync)
    return r


def param_sync_overlap(new: New) -> Replay:
    r = new()
    update = updates(r)

    def forward() -> None:
        r.model(torch.ones(1, 3))

    def wait() -> None:
        r.buf.start_param_sync(force_sync=True)

    r.step("init")
    update()
    r.step("start_param_sync all", r.buf.start_param_sync)
    r.step("start_param_sync again while pending", r.buf.start_param_sync)
    r.step("start_param_sync(force_sync=True) while pending: waits only", wait)
    r.step("start_param_sync(force_sync=True) idle: gathers synchronously", wait)
    r.step("finish_grad_sync resets param_gather_dispatched", r.finish)
    update()
    r.step("forward through hooks", forward)
    update()
    r.buf.start_param_sync()
    r.step("forward after explicit start_param_sync on all groups: one warning per chained group", forward)
    r.absent("enable hooks twice", "enable_forward_pre_hook")
    r.absent("disable hooks(param_sync=False)", "disable_forward_pre_hook")
    r.absent("disable hooks again", "disable_forward_pre_hook")
    r.absent("enable hooks", "enable_forward_pre_hook")
    update()
    r.step("disable hooks(param_sync=True)", r.buf.sync_params)
    other = new(overlap_param_gather_with_optimizer_step=True)
    update = updates(other)
    other.step("overlap_param_gather_with_optimizer_step: start_param_sync ignored", other.buf.start_param_sync)
    other.step("... force_dispatch", update)
    other.buf.sync_params()
    r.seen += other.seen
    return r


def updates(r: Replay) -> Callable[[], None]:
    """A function that leaves every parameter to be gathered. Only its gathers are recorded."""
    optimizer = mb.DistributedOptimizer(r.model.parameters(), torch.optim.SGD, lr=0.1)

    def update() -> None:
        r.zero()
        r.backward()
        optimizer.clip_grad_norm_(1.0)
        r._sent.clear()
        optimizer.step()

    return update


def check_for_nan(new: New) -> Replay:
    r = new()
    r.step("finite", r.fill, r.finish)
    r.zero()
    r.step("nan", lambda: r.fill(float("nan") if r.rank == 0 else 1.0), r.finish)
    r.zero()
    return r


def fp32_local_accumulation(new: New) -> Replay:
    r = new(Two(dtype=torch.bfloat16))

    def dtypes() -> list[Any]:
        return [{name: str(p.main_grad.dtype).removeprefix("torch.") for name, p in r.model.named_parameters()}]

    r.step("main_grad dtypes", rest=dtypes)
    r.step("before", r.fill_unsynced)
    r.step("after (main_grad read back from bf16 buffer)", r.finish, rest=r.main_grads)
    r.step("scale_gradients(0.5)", lambda: r.buf.scale_gradients(0.5), rest=r.main_grads)
    return r


def offload_restore(new: New) -> Replay:
    r = new()
    (buffer,) = r.buf.buffers.buffers

    def away() -> list[Any]:
        return [buffer.grad_data.untyped_storage().nbytes(), buffer.layout.numel]

    def back() -> list[Any]:
        begin = buffer.grad_data.data_ptr()
        inside = all(
            p.main_grad.data_ptr() == begin + 4 * buffer.slots[index].start  # type: ignore[attr-defined]
            for index, p in buffer.params.items()
        )
        is_shaped = all(p.main_grad.shape == p.shape for p in r.model.parameters())
        return [buffer.grad_data.untyped_storage().nbytes(), inside, is_shaped]

    r.step("offloaded storage elements", r.buf.offload_grad_buffers, rest=away)
    r.step("restored", r.buf.restore_grad_buffers, rest=back)
    return r


def views_distopt(new: New) -> Replay:
    r = new()
    (buffer,) = r.buf.buffers.buffers

    def look() -> list[Any]:
        assert buffer.param_data is not None
        inside = [p.untyped_storage().data_ptr() == buffer.param_data.data_ptr() for p in r.model.parameters()]
        grads = [p.main_grad.untyped_storage().data_ptr() == buffer.grad_data.data_ptr() for p in r.model.parameters()]
        return [
            inside,
            "main_grad view",
            grads,
            "requires_grad of data",
            [p.data.requires_grad for p in r.buf.buffers.params],
        ]

    r.step("param is view of param_data", rest=look)
    return r


def views_ddp(new: New) -> Replay:
    r = new()
    (buffer,) = r.buf.buffers.buffers
    sizes = ["numel", buffer.layout.numel, "numel_unpadded", buffer.layout.numel_unpadded]
    r.step("param_data", rest=lambda: [buffer.param_data is None, *sizes])
    return r


def already_a_view(new: New) -> Replay:
    model = Two()
    model.l1.weight.data = torch.zeros(40)[5:17].view(4, 3)
    r = new(model)
    r.step("construct", r.backward, r.finish)
    return r


def fp32_accumulation_leak(new: New) -> Replay:
    options = {"use_distributed_optimizer": True, "dense_layout": False}
    before = dict(vars(transports))
    new(Two(dtype=torch.bfloat16), reduce_scatter_with_fp32_accumulation=True, **options)
    after = dict(vars(transports))
    r = new(Two(dtype=torch.bfloat16), **options)
    r.step("module-level reduce-scatter replaced", rest=lambda: [after != before])
    r.step("a later DDP without the flag uses", r.fill, r.finish, rest=lambda: [[sent.op for sent in r._sent]])
    return r


def fp32_accumulation_average(new: New) -> Replay:
    r = new(Two(dtype=torch.bfloat16))
    r.step("finish_grad_sync", r.fill, r.finish)
    return r


def broadcast_params(new: New) -> Replay:
    model = Two()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(dist.get_rank() + 1)
    r = new(model)
    r.step("values", rest=lambda: [sorted({v for p in r.model.parameters() for v in p.flatten().tolist()})])
    return r


def zero_grad_flag(new: New) -> Replay:
    r = new()

    def flags() -> list[Any]:
        return [[param.grad_added_to_main_grad for param in r.model.parameters()]]

    for label in ("default impl", "cuda_graph_impl='transformer_engine'", "cuda_graph_impl='local'"):
        for param in r.model.parameters():
            param.grad_added_to_main_grad = True
        r.step(label, r.zero, rest=flags)
    return r


def fused_wgrad(new: New) -> Replay:
    r = new()
    for param in r.model.parameters():
        param.grad_added_to_main_grad = True
    r.step("grad_added_to_main_grad=True: add skipped, main_grad abs sum", r.backward)
    r.zero()
    for param in r.model.parameters():
        param.zero_out_wgrad = True
    r.step("plus zero_out_wgrad=True: add performed", r.backward)
    r.zero()
    for param in r.model.parameters():
        param.grad_added_to_main_grad = False
    r.step("param.grad after backward", r.backward, rest=lambda: [[p.grad is None for p in r.model.parameters()]])
    return r


SCENARIOS: dict[str, Scenario] = {
    "overlap_lifecycle_distopt": overlap_lifecycle,
    "no_sync_accumulation_allreduce": no_sync_accumulation,
    "finish_before_ready": finish_before_ready,
    "non_overlap_not_idempotent_distopt0": non_overlap_not_idempotent,
    "non_overlap_not_idempotent_distopt1": non_overlap_not_idempotent,
    "force_all_reduce_overlap0": force_all_reduce,
    "force_all_reduce_overlap1": force_all_reduce,
    "start_twice": start_twice,
    "unused_parameter_single_bucket": unused_single_bucket,
    "unused_parameter_bucket_per_param": unused_bucket_per_param,
    "unused_parameter_non_overlap": unused_non_overlap,
    "missing_grad_second_iteration": missing_grad,
    "golden_count_two": golden_count_two,
    "param_sync_non_overlap": param_sync_non_overlap,
    "param_sync_without_distopt": param_sync_without_distopt,
    "param_sync_overlap": param_sync_overlap,
    "check_for_nan": check_for_nan,
    "fp32_local_accumulation": fp32_local_accumulation,
    "offload_restore": offload_restore,
    "views_distopt": views_distopt,
    "views_ddp": views_ddp,
    "param_that_is_already_a_view": already_a_view,
    "fp32_accumulation_flag_leaks_process_wide": fp32_accumulation_leak,
    "fp32_accumulation_with_average_in_collective": fp32_accumulation_average,
    "broadcast_params": broadcast_params,
    "zero_grad_buffer_flag": zero_grad_flag,
    "fused_wgrad_flags": fused_wgrad,
}

SHARDED = "sharded: "
"""Prefix of a scenario replayed with shards, where ``.grad`` is not published and ``finish_grad_sync`` stays with the
caller, as in Megatron."""

SHARDED_SCENARIOS: dict[str, Scenario] = {
    "finish_before_ready": finish_before_ready,
    "start_twice": start_twice,
    "missing_grad_second_iteration": missing_grad,
    "golden_count_two": golden_count_two,
    "check_for_nan": check_for_nan,
}

OURS: dict[str, tuple[Scenario, dict[str, Any]]] = {
    "one pass more than the golden count": (one_pass_too_many, {}),
    "force_all_reduce after a reduce-scatter": (force_after_scatter, {}),
}
"""Situations that the oracle does not have, sharded with overlap."""


def oracle_scenarios() -> dict[str, dict[str, Any]]:
    return {scenario["name"]: scenario for scenario in load("state_machine")["scenarios"]}


def _options(config: dict[str, Any]) -> dict[str, Any]:
    names = {"g32": "grad_reduce_in_fp32"}
    return {names.get(k, k): tuple(v) if isinstance(v, list) else v for k, v in config.items()}


def replay_all(rank: int) -> dict[str, list[Seen]]:
    """Every scenario in turn; one that ends in an unexpected error has it as its last step."""
    configs = {name: _options(scenario["config"]) for name, scenario in oracle_scenarios().items()}
    sharded = {"use_distributed_optimizer": True}
    cases: list[tuple[str, Scenario, dict[str, Any]]] = [
        *((name, scenario, configs[name]) for name, scenario in SCENARIOS.items()),
        *((SHARDED + name, scenario, {**configs[name], **sharded}) for name, scenario in SHARDED_SCENARIOS.items()),
        *(
            (name, scenario, {"overlap_grad_reduce": True, **sharded, **options})
            for name, (scenario, options) in OURS.items()
        ),
    ]
    with recorded() as sent:
        return {name: _replay(rank, sent, scenario, options) for name, scenario, options in cases}


def _replay(rank: int, sent: list[Sent], scenario: Scenario, options: dict[str, Any]) -> list[Seen]:
    made: list[Replay] = []

    def new(model: nn.Module | None = None, **further: Any) -> Replay:
        made.append(Replay(rank, sent, model, **{**options, **further}))
        return made[-1]

    seen = scenario(new).seen
    for replay in made:
        replay.buf.detach()
    return seen
