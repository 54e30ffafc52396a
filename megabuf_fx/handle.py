"""The handle of an attached model: what the training loop uses, and the hooks.

[Note: hooks]
Hooks are plain functions on modules and on AccumulateGrad nodes. They are the eager path, Megatron's own mechanism, and
they catch every gradient that a graph break leaves outside a graph; nodes of parameters that graphs cover have none
(``leaf_hooks.py``). Module hooks return at once while Dynamo traces them. They hold the handle, so buffers live as long
as the model; a deep copy of the model copies the functions but not the handle, and a hook called for a module that is
not its own does nothing.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import megabuf_fx._compat as _compat
from megabuf_fx.auto_buckets import BucketChoice
from megabuf_fx.config import MegabufConfig
from megabuf_fx.report import bucket_table
from megabuf_fx.runtime.flags import StepFlags, is_expert
from megabuf_fx.runtime.model_buffers import ModelBuffers
from megabuf_fx.runtime.offload import Kind
from megabuf_fx.runtime.ops import live_targets
from megabuf_fx.runtime.plan import BucketPlan
from megabuf_fx.watched_hooks import WatchedHooks

log = logging.getLogger("megabuf_fx.handle")


class MegabufHandle:
    """Contiguous buffers of one model. Made by ``attach``.

    ``model`` is the attached module, ``process_group`` the group it is trained over (None for a single process),
    ``config`` the effective configuration, ``plan`` the layout and bucket groups.
    """

    def __init__(
        self,
        model: nn.Module,
        config: MegabufConfig,
        plan: BucketPlan,
        buffers: ModelBuffers,
        process_group: dist.ProcessGroup | None,
        expert_rank: int | None = None,
        bucket_choice: BucketChoice | None = None,
    ) -> None:
        self.model = model
        self.process_group = process_group
        self.expert_rank = expert_rank
        """Which of the sets of experts this rank has; None without expert groups."""
        self.bucket_choice = bucket_choice
        """What ``bucket_size="auto"`` has chosen, with what is predicted of it and of fixed sizes; None without it."""
        self.config = config
        self.plan = plan
        self.buffers = buffers
        self._frozen = [param for param in model.parameters() if buffers.index_of(param) is None]
        self.agreed: set[str] = set()
        """Digests of what ranks of other axes have agreed on (``finalize_model_grads``)."""
        self._ended_backward = -1
        self.watched_hooks = WatchedHooks()
        self._hooks: list[Any] = []
        self._add_hooks()

    @property
    def dp_size(self) -> int:
        """Ranks over which gradients are averaged, all optimizer instances together."""
        return self.buffers.comms.full_size(is_expert=False)

    @property
    def flags(self) -> StepFlags:
        """The numbers that captured steps read and write on the device."""
        return self.buffers.capture.flags

    @property
    def force_all_reduce(self) -> bool:
        """Give every rank complete gradients instead of its shard, from the next backward on (Megatron
        ``force_all_reduce``); for looking at gradients. Settable; every rank must set it alike."""
        return self.buffers.reducer.force_all_reduce

    @force_all_reduce.setter
    def force_all_reduce(self, value: bool) -> None:
        self.buffers.reducer.force_all_reduce = value

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without reducing: for all micro-batches of a step but the last. Read when backward runs."""
        self.buffers.state.no_sync_depth += 1
        try:
            yield
        finally:
            self.buffers.state.no_sync_depth -= 1

    def finish_grad_sync(self, *, force_all_reduce: bool = False) -> None:
        """Reduce whatever is not reduced yet and wait. Called by ``DistributedOptimizer``; harmless to repeat, in every
        mode (Megatron without overlap reduces again).

        ``force_all_reduce`` gives complete gradients where the backward has not reduced yet; otherwise set the property
        of that name before it.

        Raises:
            RuntimeError: the handle was detached or the process group destroyed; hooks of a compiled module changed;
            NaN
                or Inf was found (``check_for_nan_in_grad``); gradients were reduce-scattered with ``force_all_reduce``.
        """
        self._check_usable()
        self.check_module_hooks()
        self.buffers.finish_grad_sync(force_all_reduce=force_all_reduce)
        if self.buffers.publishes_grad:
            self._publish_grads()

    def start_grad_sync(self) -> None:
        """Start the reductions that have not started: for pipeline schedules that decide when (Megatron
        ``grad_sync_func``); backwards then run under ``no_sync``. Where ``.grad`` is published this also waits, as it
        must be complete for whatever optimizer comes next."""
        self._check_usable()
        if self.buffers.publishes_grad:
            self.finish_grad_sync()
            return
        self.buffers.state.is_unsynced = False
        self.buffers.start_grad_syncs()

    def start_param_sync(self, *, force_sync: bool = False) -> None:
        """Start the gathers of updated parameters, without waiting unless ``force_sync`` (Megatron
        ``param_sync_func``). The next forward would start them too; a schedule calls this earlier, and with
        ``align_param_gather`` always."""
        self._check_usable()
        if force_sync:
            self.sync_params()
        elif self.buffers.gatherer is not None:
            self.buffers.gatherer.start_all()

    def offload_grad_buffers(self, *, synchronize: bool = True, empty_cache: bool = True) -> int:
        """Give back the memory of all gradients, and drop them; bytes given back, 0 if that was done before.

        Every view and compiled graph is valid again after ``restore_grad_buffers``; forwards without backward may run
        meanwhile. Captured steps must be captured again. ``synchronize`` waits for the device first, ``empty_cache``
        gives torch's cache back to the driver, both on a GPU only. Every rank must call it.
        """
        self._check_usable()
        self.buffers.drop_gradients()
        return self._offload("gradients", "gradient buffers were offloaded", synchronize, empty_cache)

    def restore_grad_buffers(self) -> None:
        """Rebuild what ``offload_grad_buffers`` gave back; gradients are zero. Harmless where nothing is away."""
        self._check_usable()
        self.buffers.access.offload.restore("gradients")

    def offload_param_buffers(self, *, synchronize: bool = True, empty_cache: bool = True) -> int:
        """Move the parameters that lie in buffers to host memory (pinned, with a GPU); bytes given back.

        Masters of 16-bit parameters and optimizer state stay. Every rank must call it.

        Raises:
            ValueError: without the distributed optimizer parameters are in no buffer.
        """
        self._check_usable()
        if not self.plan.sharded:
            raise ValueError("parameters are in no buffer (use_distributed_optimizer=False), so none can be offloaded")
        self.buffers.sync_params()
        self.buffers.access.hide_params()
        return self._offload("parameters", "parameter buffers were offloaded", synchronize, empty_cache)

    def restore_param_buffers(self) -> None:
        """Move parameters back. Harmless where nothing is away."""
        self._check_usable()
        self.buffers.access.offload.restore("parameters")

    def _offload(self, kind: Kind, reason: str, synchronize: bool, empty_cache: bool) -> int:
        device = self.buffers.token.device
        if synchronize and device.type == "cuda":
            torch.cuda.synchronize(device)
        if not self.buffers.access.offload.offload(kind):
            return 0
        self.buffers.capture.invalidate(reason)
        if empty_cache and device.type == "cuda":
            torch.cuda.empty_cache()
        return self.buffers.access.offload.nbytes(kind)

    def broadcast_params(self) -> None:
        """Overwrite all parameters, frozen ones too, with those of the group's first rank; experts within their group
        (Megatron ``broadcast_params``). fp32 masters of 16-bit parameters do not follow: call
        ``opt.reload_model_params()``. Every rank must call it."""
        self._check_usable()
        self.buffers.access.require_params("parameters are broadcast")
        self.buffers.sync_params()
        self.buffers.access.hide_params()
        for param in self.model.parameters():
            index = self.buffers.index_of(param)
            comm = self.buffers.comms.pair(is_expert=self.buffers.comms.expert is not None and is_expert(param)).grads
            for tensor in self.buffers.access.values_of(index) if index is not None else (param,):
                comm.broadcast(tensor.detach())

    def zero_grad_buffer(self) -> None:
        """``zero_grad``, and zero all of ``grad_data``, padding included (Megatron). Only for code of yours that reads
        ``main_grad`` of parameters without gradient: nothing here needs zeros."""
        self.buffers.access.require_gradients("gradient buffers are zeroed")
        self.zero_grad()
        for buffer in self.buffers.buffers:
            buffer.grad_data.zero_()
            for index in buffer.promoted:
                buffer.main_grads[index].zero_()

    def zero_grad(self) -> None:
        """Begin a new step: the next gradients overwrite. Nothing is zeroed."""
        self.buffers.reset()
        self.buffers.writes.clear_grads()

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply all gradients, for example by one over the number of tokens: ``grad_data`` and the fp32 sums."""
        self.buffers.access.require_gradients("gradients are scaled")
        self.buffers.writes.take_left_grads()
        for buffer in self.buffers.buffers:
            buffer.grad_data.mul_(factor)
            for index in buffer.promoted:
                buffer.main_grads[index].mul_(factor)

    def sync_params(self) -> None:
        """Make every parameter current; needed before raw reads between ``step`` and the next forward with
        ``overlap_param_gather``, and before any raw read of quantized parameters, which then hold their dequantized
        values until the next ``step``. Every rank must call it."""
        self.buffers.access.show_params()

    def layer_wise_params(self) -> list[nn.Parameter]:
        """The parameters that are whole on one rank, for optimizers that need that (``layer_wise_optimizer=True``)."""
        pairs = zip(self.plan.params, self.buffers.params)
        return [param for spec, param in pairs if spec.is_managed_by_layer_wise_optimizer]

    def bucket_table(self) -> str:
        """A table of buckets; trigger nodes are known once a synchronizing backward was compiled."""
        return bucket_table(self.plan, self.buffers.boundaries)

    def detach(self) -> None:
        """Undo ``attach``: parameters get storage of their own, hooks and communicators go. Every rank must call it."""
        self._check_usable()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.buffers.writes.leaf_hooks.remove()
        self.buffers.close()

    def check_synchronized(self) -> None:
        """Raise when the last backward ran under ``no_sync``: its gradients were not reduced."""
        self._check_usable()
        self.buffers.writes.take_left_grads()
        if self.buffers.state.is_unsynced:
            raise RuntimeError(
                "step with gradients that were not reduced: the last backward ran under no_sync(). Run the last "
                "micro-batch outside of it, or call buf.finish_grad_sync() first"
            )

    def _check_foreign_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Before an optimizer that is not ours steps: it may have nothing to do with this model."""
        is_safe = self.buffers.publishes_grad and not self.buffers.state.is_unsynced
        has_unfrozen = self.dp_size > 1 and any(param.grad is not None for param in self._frozen)
        if is_safe and not has_unfrozen:
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if has_unfrozen:
            self._refuse_unfrozen(params)
        own = [param for param in params if self.buffers.index_of(param) is not None]
        if not own:
            return
        self.buffers.writes.take_left_grads()
        if self.buffers.publishes_grad:
            self.check_synchronized()
        elif all(param.grad is None for param in own):
            reason = "its shards live in the buffer" if self.plan.sharded else "gradients have another dtype"
            raise RuntimeError(
                f"{type(optimizer).__name__} steps parameters of an attached model whose .grad is None ({reason}), so "
                "it would do nothing; use megabuf_fx.DistributedOptimizer(model.parameters(), "
                f"{type(optimizer).__name__}, ...), or attach with use_distributed_optimizer=False and gradients of "
                "the parameters' dtype"
            )

    def _refuse_unfrozen(self, params: Sequence[Tensor]) -> None:
        """Raise when one of ``params`` was frozen in ``attach`` and has a gradient now, which nobody reduces."""
        stepped = set(map(id, params))
        for name, param in self.model.named_parameters():
            # It may have been attached since then, as part of another model.
            if id(param) in stepped and param.grad is not None and not find_handles([param]):
                raise RuntimeError(
                    f"parameter '{name}' got a gradient but was frozen when the model was attached, so it is in no "
                    "buffer and its gradient is that of this rank alone; detach and attach again after unfreezing"
                )

    # [Note: hooks]

    def renew_hooks(self) -> None:
        """Move gradient accumulation to the current CUDA stream."""
        self.buffers.writes.leaf_hooks.renew()

    def _add_hooks(self) -> None:
        self.buffers.owner = weakref.ref(self)
        # Weak, because an autograd node is invisible to the garbage collector and would keep the buffers for ever.
        self.buffers.writes.leaf_hooks.install(_accumulate_hook(weakref.ref(self)))
        for module in self.model.modules():
            indices = [self.buffers.index_of(p) for p in module.parameters(recurse=False)]
            groups = sorted({self.buffers.group_of[i] for i in indices if i is not None}, reverse=True)
            quantized = [i for i in indices if i is not None and self.plan.params[i].quantized]
            # The root's hook is always there: it is what keeps the handle alive as long as the model.
            if module is self.model or quantized or (groups and self.config.overlap_param_gather):
                self._hooks.append(module.register_forward_pre_hook(_forward_hook(self, module, groups, quantized)))
            if quantized:
                self._hooks.extend(_load_hooks(self, module, quantized))
        # Any optimizer could be stepped, so every optimizer is asked; ours checks by itself.
        self._hooks.append(register_optimizer_step_pre_hook(_step_hook(weakref.ref(self))))
        self._hooks.append(self.model.register_state_dict_pre_hook(_state_dict_hook(self, self.model)))
        needs_care = self.config.overlap_param_gather or self.config.quantization is not None
        if needs_care and not hasattr(self.model, "__deepcopy__"):
            self._hooks.append(_DeepCopyHook(self))

    def _after_accumulate(self, index: int) -> None:
        backward_id = _compat.current_backward_id()
        self.buffers.writes.enter_backward(backward_id)
        self.buffers.writes.after_accumulate(index)
        if self.buffers.publishes_grad and self._ended_backward != backward_id:
            # As DDP: gradients are reduced when backward returns, so any optimizer finds them in .grad.
            self._ended_backward = backward_id
            _compat.queue_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        if self.buffers.state.no_sync_depth:
            return
        self.check_module_hooks()
        self.buffers.finish_grad_sync()
        self._publish_grads()

    def check_module_hooks(self) -> None:
        """Raise when hooks of a compiled module have changed."""
        changed = self.watched_hooks.find_changed()
        if changed is not None:
            name = next((n for n, m in self.model.named_modules() if m is changed), type(changed).__name__)
            raise RuntimeError(
                f"hooks of module '{name}' changed after it was compiled, and compiled code does not see that; "
                "call torch.compiler.reset() after changing hooks, or keep the module out of the graph with "
                "torch.compiler.disable"
            )

    def _publish_grads(self) -> None:
        for param, main_grad, is_used in zip(self.buffers.params, self.buffers.main_grads, self.buffers.used_params()):
            if is_used:
                param.grad = main_grad
        self.buffers.reopen()

    def _check_usable(self) -> None:
        if self.buffers.is_closed:
            raise RuntimeError("this handle was detached; attach the model again")
        self.buffers.comm.check_alive()


def _accumulate_hook(owner: weakref.ref[MegabufHandle]) -> Callable[[int], None]:
    def hook(index: int) -> None:
        handle = owner()
        if handle is not None:
            handle._after_accumulate(index)

    return hook


def _forward_hook(
    handle: MegabufHandle, own: nn.Module, groups: Sequence[int], quantized: Sequence[int]
) -> Callable[..., None]:
    def hook(module: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling():
            return
        if module is own and not handle.buffers.is_closed:
            handle.buffers.before_forward(in_backward=_compat.current_backward_id() != -1)
            if groups and torch.is_grad_enabled():
                # This call is outside graphs, and its backward will be.
                handle.buffers.writes.wake(groups)
            for group in groups:
                handle.buffers.wait_param_sync(group)
            if quantized and handle.buffers.weights is not None:
                handle.buffers.weights.show(quantized)

    return hook


def _load_hooks(handle: MegabufHandle, own: nn.Module, quantized: Sequence[int]) -> list[Any]:
    """Make ``load_state_dict`` of a module with quantized parameters find tensors to copy into, and store the result;
    make its ``state_dict`` hold values."""

    def before_load(module: nn.Module, *unused: object) -> None:
        weights = handle.buffers.weights
        if module is own and weights is not None and not handle.buffers.is_closed:
            handle.buffers.sync_params()
            weights.show(quantized)

    def after_load(module: nn.Module, keys: object) -> None:
        weights = handle.buffers.weights
        if module is own and weights is not None and not handle.buffers.is_closed:
            weights.absorb(quantized, always=True)

    def after_save(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object) -> None:
        weights = handle.buffers.weights
        if module is own and weights is not None and not handle.buffers.is_closed:
            indices = {id(handle.buffers.params[index]): index for index in quantized}
            for name, param in module.named_parameters(recurse=False):
                value = state_dict.get(prefix + name)
                # With keep_vars the caller gets the parameter itself.
                if id(param) in indices and value is not None and value is not param:
                    state_dict[prefix + name] = weights.stored_values(indices[id(param)])

    return [
        own.register_load_state_dict_pre_hook(before_load),
        own.register_load_state_dict_post_hook(after_load),
        own.register_state_dict_post_hook(after_save),
    ]


def _step_hook(owner: weakref.ref[MegabufHandle]) -> Callable[..., None]:
    def hook(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        handle = owner()
        if handle is not None and getattr(optimizer, "handle", None) is not handle:
            handle._check_foreign_step(optimizer)

    return hook


def _state_dict_hook(handle: MegabufHandle, own: nn.Module) -> Callable[..., None]:
    def hook(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if module is own and not handle.buffers.is_closed:
            handle.buffers.access.require_params("state_dict reads parameters")
            handle.buffers.sync_params()

    return hook


class _DeepCopyHook:
    """Makes ``copy.deepcopy`` of the model gather first; a copy is a plain model. Every rank must copy.

    Modules have no hook for this; ``copy`` asks the object for ``__deepcopy__`` before it does anything else.
    """

    def __init__(self, handle: MegabufHandle) -> None:
        self._model = handle.model

        def deep_copy(memo: dict[int, Any]) -> nn.Module:
            if not handle.buffers.is_closed:
                handle.buffers.access.show_params()
            own = handle.model.__dict__.pop("__deepcopy__")
            try:
                return copy.deepcopy(handle.model, memo)
            finally:
                handle.model.__dict__["__deepcopy__"] = own

        self._model.__dict__["__deepcopy__"] = deep_copy

    def remove(self) -> None:
        self._model.__dict__.pop("__deepcopy__", None)


def live_handles() -> list[MegabufHandle]:
    """Handles of all attached models, oldest first."""
    owners = [target.owner() for _, target in live_targets() if isinstance(target, ModelBuffers)]
    return [owner for owner in owners if isinstance(owner, MegabufHandle)]


def find_handles(params: Sequence[nn.Parameter]) -> list[MegabufHandle]:
    """Handles to which at least one of ``params`` belongs."""
    return [h for h in live_handles() if any(h.buffers.index_of(param) is not None for param in params)]


def handle(model: nn.Module) -> MegabufHandle:
    """The handle of an attached model, also of one that the backend attached by itself.

    Raises:
        ValueError: the model is not attached (without ``attach``, it is once its first compiled forward has run).
    """
    model = _compat.unwrap_compiled(model)
    candidates = live_handles()
    for candidate in candidates:
        if candidate.model is model:
            return candidate
    for candidate in candidates:
        # The backend attaches the outermost module that is called, which may hold this one.
        if any(module is model for module in candidate.model.modules()):
            return candidate
    raise ValueError(
        f"{type(model).__name__} is not attached; call attach(model), or run one forward of "
        'torch.compile(model, backend="megabuf") first'
    )
