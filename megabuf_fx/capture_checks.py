"""What must hold so that a step can be captured: the state of the host, and the memory that a step may use.

[Note: periodic steps]
A replay runs no Python, so what the host decided while the step was captured is decided for every replay. That is right
when the step ends in the state in which it began: the next replay then meets what the captured step met. ``host_state``
is that state, by name, and ``changes`` says where two of them differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import megabuf_fx._compat as _compat
from megabuf_fx.handle import MegabufHandle
from megabuf_fx.mixed_optimizer import MixedOptimizer
from megabuf_fx.optimizer import DistributedOptimizer

_REMEDIES = {
    "gradients in": "end the step with zero_grad()",
    "reduction of": "end the step with zero_grad()",
    "gather of": "wait for gathers that the step starts (buf.sync_params())",
    "forwards without backward": "run every backward inside the step, or the forward under torch.no_grad()",
    "param_groups": "change hyper-parameters between replays (lr), or capture again (all others)",
    "no_sync": "leave `with buf.no_sync()` inside the step",
    "optimizer state of": "it must keep its tensors",
}


class Identity(NamedTuple):
    """Which tensor it is, not what it holds."""

    number: int

    def __str__(self) -> str:
        return "a tensor"


HostState = dict[tuple[str, str, str], object]
"""Values by what they are, whose, and of which model or optimizer; the three make up a name."""


def host_state(optimizers: Sequence[torch.optim.Optimizer], handles: Sequence[MegabufHandle]) -> HostState:
    """All that the host remembers between steps and that decides what a step does. Learning rates are in the table.

    Taken before every replay, so names are put together only where something has changed.
    """
    state: HostState = {}
    for number, handle in enumerate(handles):
        mark = f" (model {number})" if len(handles) > 1 else ""
        buffers = handle.buffers
        for group, (reduction, gather) in enumerate(zip(buffers.reducer.phases, buffers.gather_phases)):
            state["reduction of bucket group ", str(group), mark] = reduction.value
            state["gather of bucket group ", str(group), mark] = gather.value
        for index, (spec, param) in enumerate(zip(buffers.plan.params, buffers.params)):
            state["gradients in ", spec.name, mark] = (index in buffers.state.written, param.grad is not None)
        state["forwards without backward", "", mark] = buffers.state.outstanding
        state["no_sync", "", mark] = (buffers.state.no_sync_depth, buffers.state.is_unsynced)
        modules = handle.model.named_modules()
        state["modules in eval mode", "", mark] = [name or "the model" for name, m in modules if not m.training]
        names = [spec.name for spec, param in zip(buffers.plan.params, buffers.params) if not param.requires_grad]
        state["frozen parameters", "", mark] = names
        state["force_all_reduce", "", mark] = handle.force_all_reduce
    for number, optimizer in enumerate(optimizers):
        mark = f" (optimizer {number})" if len(optimizers) > 1 else ""
        is_ours = isinstance(optimizer, DistributedOptimizer)
        # Not what others keep in the groups, as schedulers do.
        defaults = (optimizer.inner if isinstance(optimizer, DistributedOptimizer) else optimizer).defaults
        for index, options in enumerate(optimizer.param_groups):
            for key in defaults:
                if key == "lr" and is_ours:
                    continue
                value = options[key]
                label = f"[{index}]['{key}']"
                state["param_groups", label, mark] = Identity(id(value)) if isinstance(value, Tensor) else repr(value)
        for name, entries in optimizer_state(optimizer):
            # By identity: who loads a state makes new tensors.
            state["optimizer state of ", name, mark] = {key: Identity(id(value)) for key, value in entries.items()}
    return state


def changes(before: HostState, after: HostState) -> list[str]:
    """One line for each entry that differs, with what to do about it."""
    if before == after:
        return []
    lines = []
    for label in [*before, *(label for label in after if label not in before)]:
        if before.get(label) != after.get(label):
            line = "".join(label)
            values = [state.get(label, "not there") for state in (before, after)]
            if label[0] == "optimizer state of ":
                line += " was made, loaded or replaced"
            elif all(isinstance(value, Identity) for value in values):
                line += " is another tensor"
            else:
                line += f" was {values[0]} and is {values[1]}"
            remedy = next((text for start, text in _REMEDIES.items() if label[0].startswith(start)), "")
            lines.append(f"{line}: {remedy}" if remedy else line)
    return lines


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[tuple[str, dict[str, Any]]]:
    """State by a name of what it belongs to, in the order of the groups."""
    if isinstance(optimizer, DistributedOptimizer):
        params = optimizer.handle.plan.params
        return [
            (f"'{params[run.pieces[0][0]].name}'[{run.buffer}:{run.start}]", dict(optimizer.inner.state[run.master]))
            for run in optimizer.runs
            if run.master in optimizer.inner.state
        ]
    params_in_order = [param for group in optimizer.param_groups for param in group["params"]]
    return [
        (f"parameter {index}", dict(optimizer.state[param]))
        for index, param in enumerate(params_in_order)
        if param in optimizer.state
    ]


def held_gradients(handles: Sequence[MegabufHandle]) -> list[str]:
    """Names of parameters that have a gradient which the next backward would add to."""
    return [
        spec.name
        for handle in handles
        for index, (spec, param) in enumerate(zip(handle.buffers.plan.params, handle.buffers.params))
        # Where .grad is published, resetting it is all that an optimizer of torch does.
        if param.grad is not None or (index in handle.buffers.state.written and not handle.buffers.publishes_grad)
    ]


def find_statics(
    optimizers: Sequence[torch.optim.Optimizer],
    handles: Sequence[MegabufHandle],
    external: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
) -> dict[str, Tensor]:
    """Every tensor that outlives a step and that the step may use, by name."""
    statics: dict[str, Tensor] = {}
    for number, handle in enumerate(handles):
        mark = f" (model {number})" if len(handles) > 1 else ""
        for name, param in handle.model.named_parameters():
            # The memory of a quantized parameter never changes; its codes and scales are among the buffers' tensors.
            kind = "hidden parameter" if handle.buffers.is_quantized(param) else "parameter"
            statics[f"{kind} {name}{mark}"] = param
        statics.update({f"buffer {name}{mark}": buffer for name, buffer in handle.model.named_buffers()})
        statics.update({f"{name}{mark}": tensor for name, tensor in handle.buffers.tensors().items()})
    for number, optimizer in enumerate(optimizers):
        mark = f" (optimizer {number})" if len(optimizers) > 1 else ""
        if isinstance(optimizer, DistributedOptimizer):
            statics.update({f"master {run.buffer}:{run.start}{mark}": run.master for run in optimizer.runs})
        for name, entries in optimizer_state(optimizer):
            statics.update({f"{key} of {name}{mark}": v for key, v in entries.items() if isinstance(v, Tensor)})
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                # Not what others keep in the groups: a scheduler may come after the capture.
                if key in optimizer.defaults and isinstance(value, Tensor):
                    statics[f"param_groups[{index}]['{key}']{mark}"] = value
    statics.update({f"input {index}": tensor for index, tensor in enumerate(inputs)})
    statics.update(external)
    return statics


def refuse_unfit(optimizers: Sequence[torch.optim.Optimizer], handles: Sequence[MegabufHandle]) -> None:
    """Raise for optimizers whose updates cannot be captured.

    Raises:
        ValueError: the message says which option is missing.
    """
    for optimizer in optimizers:
        inner: Any = optimizer.inner if isinstance(optimizer, DistributedOptimizer) else optimizer
        name = inner.name if isinstance(inner, MixedOptimizer) else type(inner).__name__
        is_fused = all(bool(group.get("fused")) for group in inner.param_groups)
        if not is_fused and not all(bool(group.get("capturable")) for group in inner.param_groups):
            if isinstance(optimizer, DistributedOptimizer) and optimizer.is_compiled:
                raise ValueError(
                    "compile_step=True keeps numbers of the update on the host, where a replay does not see them "
                    "change; build the optimizer with fused=True instead"
                )
            raise ValueError(
                f"{name} keeps numbers of its update on the host, where a replay does not see them change; build it "
                "with fused=True (Adam, AdamW, SGD, on every device) or, on a GPU, capturable=True"
            )
        if not isinstance(optimizer, DistributedOptimizer):
            on_gpu = any(param.is_cuda for group in inner.param_groups for param in group["params"])
            if on_gpu and any(not group.get("capturable", True) for group in inner.param_groups):
                raise ValueError(f"torch captures {name} only with capturable=True, also when it is fused")
            if any(not isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
                raise ValueError(f"the lr of {name} must be a tensor (lr=torch.tensor(...)), or replays keep its value")
        elif not is_fused and (optimizer.max_skipped_steps is not None or optimizer.handle.buffers.checks is not None):
            raise ValueError(f"leaving out steps with NaN or Inf inside a captured step needs {name}(..., fused=True)")
        for group in inner.param_groups:
            has_no_state = any(param not in inner.state for param in group["params"])
            if has_no_state and (name not in ("Adam", "AdamW", "SGD") or group.get("dampening")):
                raise ValueError(f"take one ordinary step before capture_step, so that {name} has made its state")
    for handle in handles:
        if handle.buffers.has_inductor_graphs:
            raise ValueError(
                "the model is compiled with mode='reduce-overhead', whose CUDA graphs cannot be captured again"
            )
        has_optimizer = any(getattr(optimizer, "handle", None) is handle for optimizer in optimizers)
        if handle.buffers.checks is not None and not has_optimizer:
            raise ValueError("gradient checks inside a captured step need megabuf_fx.DistributedOptimizer")


class Snapshot:
    """Values of tensors, on the host, and of the random number generators; to undo what warming up did."""

    def __init__(self, statics: Mapping[str, Tensor], device: torch.device) -> None:
        self._kept = {name: tensor.detach().to("cpu", copy=True) for name, tensor in statics.items()}
        self._device = device
        self._cpu_rng = torch.get_rng_state()
        self._rng = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @torch.no_grad()
    def restore(self, statics: Mapping[str, Tensor]) -> None:
        """Put everything back. What did not exist is the state of an optimizer, which begins as zeros."""
        for name, tensor in statics.items():
            if name in self._kept:
                tensor.copy_(self._kept[name])
            else:
                tensor.zero_()
        torch.set_rng_state(self._cpu_rng)
        if self._rng is not None:
            torch.cuda.set_rng_state(self._rng, self._device)


def compiles_of(handles: Sequence[MegabufHandle]) -> int:
    """Grows whenever something is compiled that one of the models takes part in."""
    return _compat.compiled_graphs() + sum(handle.buffers.compiles for handle in handles)
