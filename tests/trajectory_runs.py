"""One run of ``oracle/trajectory.json.gz`` through the public API, and all that is observed of it."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from helpers import params_of
from oracle_data import load
from torch import Tensor, nn
from trajectory_models import MicroBatch, count_tokens, make_model, mean_loss, micro_batch, summed_loss

import megabuf_fx as mb
from megabuf_fx.runtime.collectives import LocalComm, ProcessGroupComm
from megabuf_fx.runtime.transports import ExchangeReduceScatter

LR = 0.01
EPS = 1e-8
GPTS = ("gpt", "gpt_untied")
"""Models with embeddings."""

Run = dict[str, Any]


def covered_runs(*, layer_wise: bool = True) -> list[Run]:
    """Every run; without ``layer_wise`` those of Megatron's layer-wise optimizer are left out."""
    return [run for run in load("trajectory")["runs"] if layer_wise or "layerwise" not in run["config"]]


def is_sharded(config: dict[str, Any]) -> bool:
    """Whether a rank has reduced gradients of its shards only."""
    return bool(config["dist_opt"]) or config.get("layerwise") == "layout"


def dtype_of(config: dict[str, Any]) -> torch.dtype:
    return torch.bfloat16 if config["param_dtype"] == "bf16" else torch.float32


def is_changed_by_fusion(config: dict[str, Any]) -> bool:
    """Whether fused accumulation rounds otherwise: 16-bit gradients, and tables whose bf16 rows are added in fp32."""
    return has_16_bit_gradients(config) or (config["param_dtype"] == "bf16" and config["model"] in GPTS)


def has_16_bit_gradients(config: dict[str, Any]) -> bool:
    """Whether some gradients are summed over micro-batches in bf16."""
    return config["param_dtype"] == "bf16" and not config["g32"] and not config.get("patterns")


def megabuf_config(config: dict[str, Any], inner_compiler: str, *, fused: bool) -> mb.MegabufConfig:
    """The config of a run, in our names. ``fused`` adds to gradients before anything is rounded."""
    options: dict[str, Any] = {
        "use_distributed_optimizer": is_sharded(config),
        "dense_layout": not is_sharded(config),
        "layer_wise_optimizer": "layerwise" in config,
        "bucket_size": config["bucket_size"],
        "grad_reduce_in_fp32": config["g32"],
        "overlap_grad_reduce": config["overlap"],
        "overlap_param_gather": config["overlap"] and (is_sharded(config) or "layerwise" in config),
        "average_in_collective": config.get("avg", False),
        "calculate_per_token_loss": config.get("per_token", False),
        "pad_buckets_for_high_nccl_busbw": config.get("busbw", False),
        "reduce_scatter_with_fp32_accumulation": config.get("fp32acc", False),
        "param_name_patterns_for_fp32_local_accumulation": tuple(config.get("patterns") or ()),
        "num_distributed_optimizer_instances": config.get("instances", 1),
        # Into fp32 a product is rounded to bf16 first, as everywhere on the CPU, so it makes no difference there.
        "gradient_accumulation_fusion": fused or not is_changed_by_fusion(config),
        # As Megatron, and without a collective of flags.
        "find_unused_parameters": False,
        "inner_compiler": inner_compiler,
    }
    return mb.MegabufConfig(**options)


class Sent(NamedTuple):
    """A collective, in the oracle's words where it has one."""

    phase: str
    """``fwd 0``, ``bwd 1``, ``finalize``, ``optstep``."""
    op: str
    numel: int
    """Elements of the whole tensor, not of a shard."""
    dtype: str
    average: bool


_COLLECTIVES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_reduce_max",
    "all_gather_object",
    "reduce_scalar",
    "broadcast",
)


class Recorder:
    """Collectives by step, as they are asked for; on a single rank they are asked for, too, and do nothing.

    What a communicator of several optimizer instances does is recorded where it passes it on, and messages with their
    local sum as the reduce-scatter that both are together.
    """

    def __init__(self) -> None:
        self.phase = ""
        self.steps: list[list[Sent]] = []

    def note(self, op: str, tensor: Tensor, *, average: bool = False) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.steps[-1].append(Sent(self.phase, op, tensor.numel(), dtype, average))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind in (LocalComm, ProcessGroupComm):
                for name in filter(vars(kind).__contains__, _COLLECTIVES):
                    stack.enter_context(mock.patch.object(kind, name, self._noting(name, getattr(kind, name))))
            call = self._summing(ExchangeReduceScatter.__call__)
            stack.enter_context(mock.patch.object(ExchangeReduceScatter, "__call__", call))
            yield

    def _noting(self, op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(comm: Any, *tensors: Any, **options: Any) -> Any:
            whole = max((t for t in tensors if isinstance(t, Tensor)), key=Tensor.numel, default=torch.empty(0))
            self.note(op, whole, average=options.get("average", False))
            return function(comm, *tensors, **options)

        return call

    def _summing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(own: Any, shard: Tensor, full: Tensor, average: bool) -> Any:
            self.note("reduce_scatter", full, average=average)
            return function(own, shard, full, average)

        return call


class Observed(NamedTuple):
    """What one rank saw of one run, in the terms of the oracle."""

    losses: list[float]
    """By step, summed over micro-batches."""
    grad_norms: list[float]
    main_grads: dict[str, Tensor]
    """After the first step's reduction, before its clipping."""
    final: dict[str, Tensor]
    layout: dict[str, list[dict[str, Any]]]
    main_grad_starts: dict[str, int]
    """First element of ``main_grad``, or of its copy in the buffer, in the buffer."""
    param_starts: dict[str, int]
    """The same of the parameter itself, when it lies in a buffer (sharded)."""
    launched: set[int]
    """Bucket groups whose reduction a compiled graph starts."""
    sent: list[list[Sent]]
    """By step."""


def uses_torch_optimizer(config: dict[str, Any]) -> bool:
    """Whether torch's own optimizer does: gradients in ``.grad``, no fp32 masters, equal parameters on all ranks."""
    return not is_sharded(config) and config["param_dtype"] == "fp32" and "ep" not in config


def adamw_groups(params: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """The oracle's weight decay: one-dimensional parameters have none."""
    every = list(params)
    return [
        {"params": [param for param in every if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in every if param.dim() == 1], "weight_decay": 0.0},
    ]


def make_optimizer(model: nn.Module, config: dict[str, Any]) -> Any:
    """AdamW with the oracle's hyper-parameters."""
    groups = adamw_groups(model.parameters())
    if uses_torch_optimizer(config):
        return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
    return mb.DistributedOptimizer(groups, torch.optim.AdamW, lr=LR, betas=(0.9, 0.95), eps=EPS)


def clip(model: nn.Module, optimizer: Any, max_norm: float) -> float:
    """Clip and return the norm before; 0 means no clipping, but Megatron's ``ChainedOptimizer`` returns the norm."""
    max_norm = max_norm or math.inf
    if isinstance(optimizer, mb.DistributedOptimizer):
        return optimizer.clip_grad_norm_(max_norm).item()
    # torch's coefficient is Megatron's: max_norm / (norm + 1e-6), at most 1.
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()


def layout_of(buf: mb.MegabufHandle) -> dict[str, list[dict[str, Any]]]:
    """The buffers as the oracle writes them."""
    found: dict[str, list[dict[str, Any]]] = {"dense": [], "expert": []}
    for layout, channel in zip(buf.plan.layouts, buf.buffers.reducer.channels):
        found["expert" if layout.key.is_expert_parallel else "dense"].append(
            {
                "param_dtype": str(layout.key.param_dtype).removeprefix("torch."),
                "grad_dtype": str(layout.key.grad_dtype).removeprefix("torch."),
                "numel": layout.numel,
                "numel_unpadded": layout.numel_unpadded,
                "buckets": [list(bucket) for bucket in layout.buckets],
                "map": {
                    buf.plan.params[index].name: [slot.start, slot.end, slot.bucket]
                    for index, slot in zip(layout.params, layout.slots)
                },
                "scaling": float(channel.scaling.factor),
            }
        )
    return found


def data_of(config: dict[str, Any], step: int, micro: int, rank: int) -> MicroBatch:
    """Inputs in the dtype of the model, and targets."""
    inputs, targets = micro_batch(config["model"], step, micro, rank)
    return MicroBatch(inputs.to(dtype_of(config)) if inputs.is_floating_point() else inputs, targets)


def backward_step(
    run: Callable[..., Tensor],
    buf: mb.MegabufHandle,
    config: dict[str, Any],
    step: int,
    rank: int,
    recorder: Recorder,
) -> Iterator[float]:
    """All micro-batches of one step; yields their losses."""
    for micro in range(config["nmb"]):
        is_last = micro + 1 == config["nmb"]
        inputs, targets = data_of(config, step, micro, rank)
        with contextlib.nullcontext() if is_last else buf.no_sync():
            recorder.phase = f"fwd {micro}"
            outputs = run(inputs)
            if config.get("per_token"):
                loss = summed_loss(outputs, targets, count_tokens(micro, rank))
            else:
                loss = mean_loss(outputs, targets) / config["nmb"]
            recorder.phase = f"bwd {micro}"
            loss.backward()  # type: ignore[no-untyped-call]
        yield loss.item()


def main_grad_of(param: nn.Parameter) -> Tensor:
    """Megatron's attribute: what collects the gradient."""
    main_grad: Tensor = param.main_grad  # type: ignore[attr-defined]
    return main_grad


def start_of_grad(param: nn.Parameter) -> int:
    view: Tensor = getattr(param, "main_grad_copy_in_grad_buffer", main_grad_of(param))
    return int(view.storage_offset())


@functools.cache
def expert_group(world: int, ep: int) -> dist.ProcessGroup:
    """The ranks with this rank's experts: every ``ep``-th. Created once in each process."""
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration([list(range(first, world, ep)) for first in range(ep)])
    return group


def train(
    rank: int, oracle: Run, compiled: bool, *, inner_compiler: str = "aot_eager", fused: bool = False
) -> Observed:
    """One run of the oracle on this rank."""
    config, world = oracle["config"], oracle["world_size"]
    ep = config.get("ep", 1)
    model = make_model(config["model"], dtype_of(config), ep_rank=rank % ep)
    named = list(model.named_parameters())
    for _, param in named if "layerwise" in config else ():
        # All of them, as in the oracle's runs, vectors and embeddings too.
        param.is_managed_by_layer_wise_optimizer = True  # type: ignore[attr-defined]
    experts = expert_group(world, ep) if ep > 1 else None
    buf = mb.attach(model, megabuf_config(config, inner_compiler, fused=fused), expert_process_group=experts)
    # fullgraph: a graph break must not turn the compiled path silently into the eager one.
    run = torch.compile(model, backend="megabuf", fullgraph=True) if compiled else model
    optimizer = make_optimizer(model, config)
    recorder = Recorder()
    losses: list[float] = []
    norms: list[float] = []
    main_grads: dict[str, Tensor] = {}
    with recorder.recording():
        for step in range(config["steps"]):
            recorder.steps.append([])
            losses.append(sum(backward_step(run, buf, config, step, rank, recorder)))
            recorder.phase = "finalize"
            buf.finish_grad_sync()
            if config.get("per_token"):
                tokens = sum(count_tokens(micro, r) for micro in range(config["nmb"]) for r in range(world))
                assert tokens == oracle["global_num_tokens"][step]
                buf.scale_gradients(1.0 / tokens)
            if step == 0:
                main_grads = {name: main_grad_of(param).clone() for name, param in named}
            recorder.phase = "optstep"
            norms.append(clip(model, optimizer, config["clip"]))
            optimizer.step()
            optimizer.zero_grad()
    buf.sync_params()
    observed = Observed(
        losses=losses,
        grad_norms=norms,
        main_grads=main_grads,
        final=params_of(model),
        layout=layout_of(buf),
        main_grad_starts={name: start_of_grad(param) for name, param in named},
        param_starts={name: int(param.storage_offset()) for name, param in named if is_sharded(config)},
        launched=set(buf.buffers.boundaries),
        sent=recorder.steps,
    )
    buf.detach()
    return observed
