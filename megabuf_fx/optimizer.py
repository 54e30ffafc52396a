"""``DistributedOptimizer``: any elementwise ``torch.optim`` optimizer on this rank's shards (ZeRO-1).

See [Note: runs] in ``runs.py`` for what the inner optimizer updates.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import megabuf_fx._compat as _compat
from megabuf_fx.compiled_update import CompiledUpdate, writes_params
from megabuf_fx.flat_shard import FlatShard
from megabuf_fx.grad_norm import found_inf, not_finite, scale_grads, total_norm, total_over_axes
from megabuf_fx.handle import MegabufHandle, find_handles
from megabuf_fx.mixed_optimizer import MixedOptimizer
from megabuf_fx.model_parallel import ModelParallelGroups
from megabuf_fx.optimizer_state import (
    MASTER,
    State,
    StateMap,
    first_other_group,
    is_elementwise,
    label_of,
    like,
    named_groups,
    plain_name,
    state_of_run,
)
from megabuf_fx.runs import Run, check_params, make_runs, read_params, split_runs, stage_params, write_params
from megabuf_fx.runtime.flags import axis_flags
from megabuf_fx.scaler_probe import ScalerProbe

log = logging.getLogger("megabuf_fx.optimizer")

_WHOLE_PARAMETERS = ("Muon", "Adafactor")
"""These need parameters that no shard cuts."""
_NEVER = ("LBFGS", "SparseAdam")
"""One looks at all parameters together, the other at sparse gradients."""


class DistributedOptimizer(torch.optim.Optimizer):
    """Sharded optimizer over the parameters of one attached model.

    A ``torch.optim.Optimizer``: ``param_groups`` hold the model's parameters, schedulers work on them, and every
    hyper-parameter is passed on to the inner optimizer at each step. ``torch.amp.GradScaler`` works and skips a step on
    all ranks together; for it the last entry of ``param_groups[0]["params"]`` is a ``ScalerProbe``.

    A model attached with ``use_distributed_optimizer=False`` is updated whole, on every rank. That gives 16-bit
    parameters fp32 masters, and works where gradients have another dtype than their parameters.

    Args:
        params: parameters or param groups of an attached model. A group may name its ``optimizer_class``, then its
            other entries are that class's hyper-parameters.
        optimizer_class: of all other groups: an elementwise ``torch.optim`` class (AdamW, Adam, SGD, ...). One that
            looks at whole matrices (Muon) takes ``buf.layer_wise_params()`` of a model attached with
            ``layer_wise_optimizer=True``.
        max_skipped_steps: skip steps whose gradients hold NaN or Inf on any rank, on all ranks together; so many in a
            row are an error. None does not look; looking costs a pass over the gradients and waits for the device.
        groups: of a model that is split over ranks: norms and skipped steps then are those of ``tp`` and ``pp``, too.
        compile_step: update by one compiled pass over memory that also converts 16-bit gradients and writes 16-bit
            parameters; for groups of ``torch.optim``'s SGD, Adam and AdamW, without ``fused=True``. It pays for 16-bit
            parameters of shards, which otherwise take a second pass, and a third for 16-bit gradients; in fp32
            ``fused=True`` is one pass already. The first step compiles nothing: torch's optimizer makes its state.
            Learning rates that are tensors are read on the host. Cannot be captured (``capture_step``).
        defaults: keyword arguments of ``optimizer_class``.

    Raises:
        ValueError: parameters that are not attached, or of several models; an optimizer that is not elementwise, for
            parameters that shards cut; ``compile_step`` with an optimizer that it is not for.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        max_skipped_steps: int | None = None,
        groups: ModelParallelGroups | None = None,
        compile_step: bool = False,
        **defaults: Any,
    ) -> None:
        self.groups = groups
        outer = _as_groups(params)
        self.handle = _find_handle(outer)
        classes = [group.pop("optimizer_class", optimizer_class) for group in outer]
        for kind, group in zip(classes, outer):
            _refuse_cut(self.handle, kind, group["params"])
        self.handle.buffers.sync_params()
        self._runs = [make_runs(self.handle.buffers, group["params"]) for group in outer]
        inner_groups = [{**group, "params": [run.master for run in runs]} for group, runs in zip(outer, self._runs)]
        self.inner: torch.optim.Optimizer | MixedOptimizer
        if all(kind is optimizer_class for kind in classes):
            self.inner = optimizer_class(inner_groups, **defaults)
        else:
            self.inner = MixedOptimizer(inner_groups, classes, optimizer_class, defaults)
            outer = [{**made, "params": group["params"]} for made, group in zip(self.inner.param_groups, outer)]
        self._compiled: CompiledUpdate | None = None
        if compile_step:
            compiler = self.handle.config.inner_compiler
            self._compiled = CompiledUpdate(classes, self.inner.param_groups, self.runs, compiler=compiler)
        super().__init__(outer, self.inner.defaults)
        buffers = self.handle.buffers
        # Which ones have masters stays as it is, however runs are cut.
        self._mastered = [buffers.params[p] for run in self.runs if not run.is_aliased for p, _ in run.pieces]
        self._unattached = [p for group in outer for p in group["params"] if buffers.index_of(p) is None]
        self._clipping: tuple[int, Tensor] | None = None
        """Coefficient of the last clipping and the step it belongs to (``ModelBuffers.resets``)."""
        self._probe = ScalerProbe.of(self._found_inf, lambda: self.handle.buffers.resets)
        self.param_groups[0]["params"].append(self._probe)
        self.note_written_weights()
        self.max_skipped_steps = max_skipped_steps
        self._skipped_in_a_row = 0
        self._skipped = 0
        if buffers.weights is not None:
            # Masters have them now.
            buffers.weights.given.clear()

    @property
    def runs(self) -> list[Run]:
        """What the inner optimizer updates on this rank, in the order of the param groups."""
        return [run for runs in self._runs for run in runs]

    @property
    def skipped_steps(self) -> int:
        """Steps that were not taken because of NaN or Inf (``max_skipped_steps``). After captured steps this waits for
        the device."""
        return self._skipped + int(self.handle.buffers.capture.flags.skipped)

    @property
    def is_fused(self) -> bool:
        """Whether the inner optimizer updates in one kernel that can leave the update out by itself."""
        return all(bool(group.get("fused")) for group in self.inner.param_groups)

    @property
    def is_compiled(self) -> bool:
        """Whether it was built with ``compile_step``."""
        return self._compiled is not None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """For ``torch.amp.GradScaler``: with a fused optimizer nobody needs to read ``found_inf`` on the host."""
        return self.is_fused

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only during construction: shards are cut by param group.

        Raises:
            NotImplementedError: called later.
        """
        if len(self.param_groups) >= len(self._runs):
            raise NotImplementedError("add_param_group after construction: build a new DistributedOptimizer instead")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a new step. Nothing is zeroed: the next gradients overwrite, whatever ``set_to_none`` says."""
        self.handle.zero_grad()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale this rank's gradient shards so that the norm over all ranks is at most ``max_norm``.

        Padding is excluded; one reduction, and with ``groups`` one over each further axis. The coefficient is
        ``max_norm / (norm + 1e-6)``, applied when below one (Megatron ``clip_grad_by_total_norm_fp32``). fp32 gradients
        are scaled here; 16-bit ones stay in ``main_grad`` as they are and are scaled by ``step``, after it has
        converted them to fp32, as in Megatron.

        Returns:
            The norm before clipping, 0-dim fp32, equal on all ranks.
        """
        return clip_grad_norm_([self], max_norm, norm_type)

    def local_norm(self, norm_type: float, counted: Sequence[bool] | None = None) -> Tensor:
        """The norm over data-parallel ranks of the parameters that count; gradients are complete afterwards."""
        self._synchronize()
        self._unscale()
        earlier = self._coefficient()
        if earlier is not None:
            # Clipped once before: what that left to step is now part of the norm.
            scale_grads([run.grad for run in self.runs if not run.is_fp32], earlier)
        return total_norm(self.handle.buffers, self.runs, norm_type, counted)

    def scale_by(self, coefficient: Tensor) -> None:
        """Clip: scale fp32 gradients, and leave 16-bit ones to ``step``."""
        self._clipping = (self.handle.buffers.resets, coefficient)
        scale_grads([run.grad for run in self.runs if run.is_fp32], coefficient)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Finish reductions, update this rank's shards and gather parameters (or leave that to the next forward).

        Raises:
            RuntimeError: the last backward ran under ``no_sync``, so its gradients are not reduced; ``param.data`` was
                replaced; NaN or Inf was found (``check_for_nan_in_grad``).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        buffers = self.handle.buffers
        buffers.access.require_params("the optimizer updates parameters")
        self._synchronize()
        buffers.sync_params()
        buffers.check_addresses()
        check_params(buffers, self.runs)
        self._refuse_unattached()
        is_captured = buffers.capture.is_active
        if not is_captured:
            self.warn_of_written_weights()
        self._unscale()
        if not is_captured and self.max_skipped_steps is not None and self._is_skipped():
            return loss
        self._skip_on_device(is_captured=is_captured)
        used = buffers.used_params()
        for index, (outer, inner) in enumerate(zip(self.param_groups, self.inner.param_groups)):
            inner.update({key: value for key, value in outer.items() if key != "params"})
            if is_captured:
                inner["lr"] = buffers.capture.flags.lr[index]
                if "capturable" in inner and buffers.token.is_cuda and torch.cuda.is_current_stream_capturing():
                    # Torch insists, also where a fused update reads everything from the device.
                    inner["capturable"] = True
            self._runs[index] = split_runs(self._runs[index], used, self.inner.state)
            inner["params"] = [run.master for run in self._runs[index]]
        updated = self._update_compiled(used, is_captured=is_captured)
        for run in self.runs:
            # A parameter without gradient is left alone, as in torch.optim. fp32 gradients are aliased, not copied.
            run.master.grad = self._fp32_grad(run) if run.is_used(used) and run not in updated else None
        self.inner.step()
        for run in self.runs:
            run.master.grad = None
        write_params(buffers, [run for run in self.runs if run not in updated or not writes_params(run)])
        # Without sharding masters are written into the parameters themselves, and that counts too.
        self.note_written_weights()
        self._clipping = None
        buffers.after_step()
        return loss

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """State by parameter name, as far as this rank holds it; every rank must call it.

        ``{"state": {name: {key: FlatShard or scalar}}, "param_groups": [{..., "params": [names]}]}``. A ``FlatShard``
        says which elements of the whole it has; ``save_checkpoint`` makes one state of those of all ranks. Alone the
        result is rank-local: it loads where the rank owns the same elements. Values alias the optimizer's own.
        """
        return {
            "state": StateMap(self.handle.buffers).collect(self.runs, self.inner.state),
            "param_groups": named_groups(self.handle.model, self),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load what ``state_dict`` returned, or the ``state_dict()`` of an optimizer of torch over the same parameters.

        Raises:
            ValueError: other parameters, or elements that this rank owns are missing; nothing is changed then.
        """
        state, groups = self._as_named(state_dict)
        self.set_state(state, groups)

    def wanted_state(self, dtypes: Mapping[str, Mapping[str, torch.dtype]]) -> State:
        """Empty shards for what this rank needs of a saved state; see ``StateMap.wanted``."""
        return StateMap(self.handle.buffers).wanted(self.runs, dtypes)

    @torch.no_grad()
    def set_state(self, state: State, groups: Sequence[Mapping[str, Any]], *, is_gathered: bool = False) -> None:
        """Replace state and hyper-parameters, both by name, and let the parameters follow the masters.

        ``is_gathered``: every rank has all of the loaded weights already; what is rounded from masters is gathered all
        the same, as saved masters and saved weights can differ.

        Raises:
            ValueError: as ``load_state_dict``.
        """
        own_groups = named_groups(self.handle.model, self)
        if [group["params"] for group in groups] != [group["params"] for group in own_groups]:
            raise ValueError(f"saved param groups do not fit: {first_other_group(groups, own_groups)}")
        buffers = self.handle.buffers
        state_map = StateMap(buffers)
        names = [plain_name(spec.name) for spec in self.handle.plan.params]
        labels = [label_of(state.get(name, {})) for name in names]
        for spec, name in zip(self.handle.plan.params, names):
            for key, value in state.get(name, {}).items():
                if isinstance(value, FlatShard) and value.numel != spec.numel:
                    raise ValueError(f"saved '{key}' of '{name}' has {value.numel} elements, here {spec.numel}")
        # Gathers go on from the old weights otherwise, over the new ones.
        buffers.sync_params()
        all_runs, new_state = [], {}
        for group in self.param_groups:
            runs = split_runs(make_runs(buffers, group["params"]), labels, {})
            all_runs.append(runs)
            for run in runs:
                try:
                    new_state[run] = state_of_run(run, state_map, state, names[run.pieces[0][0]])
                except KeyError as error:
                    raise ValueError(f"{error.args[0]}; a rank-local state loads on the rank it came from") from None
        self._runs = all_runs
        self.inner.state.clear()
        loaded = []
        for outer, inner, runs, saved in zip(self.param_groups, self.inner.param_groups, all_runs, groups):
            outer.update({key: like(outer.get(key), value) for key, value in saved.items() if key != "params"})
            inner["params"] = [run.master for run in runs]
            for run in runs:
                entries = new_state[run]
                master = entries.pop(MASTER, None)
                if master is not None:
                    run.master.copy_(master)
                    loaded.append(run)
                if entries:
                    self.inner.state[run.master] = entries
        write_params(buffers, loaded)
        gatherer = buffers.gatherer
        # By the plan, which is the same on every rank; a rank can own nothing.
        has_masters = any(layout.key.param_dtype != torch.float32 for layout in self.handle.plan.layouts)
        if gatherer is not None and (has_masters or not is_gathered):
            gatherer.mark_stale()
            gatherer.wait_all()
        self.note_written_weights()
        buffers.capture.invalidate("optimizer state was loaded, into other memory")

    def _as_named(self, state_dict: Mapping[str, Any]) -> tuple[State, list[dict[str, Any]]]:
        """State and groups by name; torch numbers parameters in the order of its groups."""
        groups = [dict(group) for group in state_dict["param_groups"]]
        params = {plain_name(name): param for name, param in self.handle.model.named_parameters()}
        names: dict[Any, str] = {name: name for name in params}
        own = named_groups(self.handle.model, self)
        if any(isinstance(param, int) for group in groups for param in group["params"]):
            if [len(group["params"]) for group in groups] != [len(group["params"]) for group in own]:
                raise ValueError("saved param groups do not fit: they have other numbers of parameters")
            for saved, mine in zip(groups, own):
                names.update(zip(saved["params"], mine["params"]))
                saved["params"] = mine["params"]
        state: State = {}
        for key, entries in state_dict["state"].items():
            name = names.get(key)
            if name is None:
                raise ValueError(f"saved state is of a parameter '{key}' that the model does not have")
            state[name] = {}
            for entry, value in entries.items():
                if is_elementwise(entry, value, params[name]):
                    value = FlatShard.whole(value)
                elif isinstance(value, Tensor) and value.numel() != 1:
                    raise ValueError(
                        f"saved '{entry}' of '{name}' has shape {tuple(value.shape)}, the parameter "
                        f"{tuple(params[name].shape)}"
                    )
                if value is not None:
                    state[name][entry] = value
        return state, groups

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Set the fp32 masters to the model's parameters, after values were loaded or written into a live model.

        fp32 parameters are their own masters. Without this call the next ``step`` would write the old masters back.
        """
        read_params(self.handle.buffers, self.runs)
        self.note_written_weights()

    @torch.no_grad()
    def stage_params(self) -> None:
        """Let the next forward gather parameters once more, as it would have if nobody had since the last step."""
        gatherer = self.handle.buffers.gatherer
        if gatherer is not None:
            stage_params(self.handle.buffers, self.runs)
            gatherer.mark_stale()

    def _is_skipped(self) -> bool:
        """Whether this step is not to be taken, the same on all ranks."""
        if not bool(self._found_inf()):
            self._skipped_in_a_row = 0
            return False
        self._skipped += 1
        self._skipped_in_a_row += 1
        log.warning("skipped a step with NaN or Inf in the gradients, %d in this run", self.skipped_steps)
        if self._skipped_in_a_row == self.max_skipped_steps:
            self._refuse_to_skip(self._skipped_in_a_row)
        return True

    def check_skipped(self) -> None:
        """After captured steps: raise when the last ``max_skipped_steps`` or more of them were skipped. Waits for the
        device; every rank must call it."""
        in_a_row = int(self.handle.buffers.capture.flags.skipped_in_a_row)
        if self.max_skipped_steps is not None and in_a_row >= self.max_skipped_steps:
            self._refuse_to_skip(in_a_row)

    def _refuse_to_skip(self, in_a_row: int) -> None:
        names = ", ".join(not_finite(self.handle.buffers, self.runs))
        raise RuntimeError(
            f"{in_a_row} steps in a row had NaN or Inf in the gradients, the last in {names}; lower the learning rate "
            "or go back to a checkpoint"
        )

    def _skip_on_device(self, *, is_captured: bool) -> None:
        """Have the inner optimizer leave the update out where ``found_inf`` says so, without a read by the host."""
        found = getattr(self, "found_inf", None)  # set by GradScaler
        buffers = self.handle.buffers
        if is_captured:
            checks = [] if found is None else [found > 0]
            if self.max_skipped_steps is not None:
                checks.append(found_inf(buffers, self.runs, self.groups))
            if buffers.checks is not None:
                checks.append(buffers.checks.found())
            is_skipped = torch.stack([check.reshape(()) for check in checks]).any() if checks else None
            if is_skipped is None:
                buffers.capture.flags.step.add_(1)
            else:
                buffers.capture.flags.count(is_skipped)
                found = buffers.capture.flags.found_inf
        self.inner.found_inf = found  # type: ignore[union-attr]

    def _update_compiled(self, used: Sequence[bool], *, is_captured: bool) -> set[Run]:
        """Update what ``compile_step`` is for; the other runs are left to the inner optimizer."""
        # Both need an update that leaves itself out by a number on the device.
        if self._compiled is None or is_captured or self.inner.found_inf is not None:  # type: ignore[union-attr]
            return set()
        groups = self.inner.param_groups
        return self._compiled.step(groups, self._runs, self.inner.state, used, self._coefficient())

    def _versions(self) -> list[int]:
        """How often each parameter that has a master of its own was written."""
        return [_compat.version_of(param) for param in self._mastered]

    def note_written_weights(self) -> None:
        """Masters and parameters agree now."""
        self._written = self._versions()

    def warn_of_written_weights(self) -> None:
        """Warn when parameters were written since they last agreed with their masters."""
        if self._versions() != self._written:
            warnings.warn(
                "weights were written since the last step (load_state_dict, copy_, an initialization), but their "
                "fp32 masters were not, and this step undoes the change; call "
                "opt.reload_model_params() after writing weights",
                stacklevel=3,
            )
            self.note_written_weights()

    def _refuse_unattached(self) -> None:
        for param in self._unattached:
            if param.grad is not None:
                raise RuntimeError(
                    f"a parameter of shape {tuple(param.shape)} got a gradient but was frozen when the model was "
                    "attached, so it is in no buffer; detach and attach again after unfreezing"
                )

    def _synchronize(self) -> None:
        self.handle.check_synchronized()
        self.handle.finish_grad_sync()
        self.handle.buffers.access.require_gradients("the optimizer uses gradients")

    def _fp32_grad(self, run: Run) -> Tensor:
        if run.is_fp32:
            return run.grad
        grad = run.grad.float()
        coefficient = self._coefficient()
        return grad if coefficient is None else grad.mul_(coefficient)

    def _coefficient(self) -> Tensor | None:
        """What clipping left to ``step``: the factor for 16-bit gradients, applied to their fp32 copies."""
        if self._clipping is None or self._clipping[0] != self.handle.buffers.resets:
            return None
        return self._clipping[1]

    def _found_inf(self) -> Tensor:
        self._synchronize()
        return found_inf(self.handle.buffers, self.runs, self.groups)

    def _unscale(self) -> None:
        """Multiply gradients by what ``GradScaler`` multiplied the probe's by, once; or divide by what it scaled the
        loss with, where it leaves that to the optimizer."""
        factor = self._probe.take_factor()
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            factor = scale.reciprocal() if factor is None else factor / scale
        if factor is not None:
            scale_grads([run.grad for run in self.runs], factor)


@torch.no_grad()
def clip_grad_norm_(optimizers: Sequence[DistributedOptimizer], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip the gradients of several models together: the chunks of an interleaved pipeline schedule.

    The norm is that of all of them, with ``groups`` over all ranks of the model. Copies of a parameter count once:
    of those without ``tensor_model_parallel`` only the first tensor-parallel rank's, of ``shared`` ones (tied
    embeddings on the last stage) none, of ``pipeline_parallel`` ones the first stage's (semantics §14).

    Returns:
        The norm before clipping, 0-dim fp32, equal on all ranks.

    Raises:
        ValueError: optimizers with other groups.
    """
    groups = optimizers[0].groups
    if any(each.groups != groups for each in optimizers):
        raise ValueError("optimizers that are clipped together need equal groups")
    norms, seen = [], set[str]()
    for each in optimizers:
        counted: list[bool] | None = None if groups is None else []
        for spec, param in zip(each.handle.plan.params, each.handle.buffers.params):
            if groups is not None and counted is not None:
                flags = axis_flags(param)
                counted.append(groups.counts_in_norm(flags) and not (flags.is_pipeline_copy and spec.name in seen))
                seen.update([spec.name] if flags.is_pipeline_copy else [])
        norms.append(each.local_norm(norm_type, counted))
    total = total_over_axes(norms, norm_type, groups)
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for each in optimizers:
        each.scale_by(coefficient)
    return total


def _as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    items = list(params)
    if not items:
        raise ValueError("optimizer got an empty parameter list")
    if not isinstance(items[0], dict):
        return [{"params": items}]
    groups = []
    for item in items:
        members = item["params"]
        groups.append({**item, "params": [members] if isinstance(members, Tensor) else list(members)})
    return groups


def _refuse_cut(handle: MegabufHandle, kind: Callable[..., torch.optim.Optimizer], params: Sequence[Tensor]) -> None:
    """Raise when an optimizer that needs whole parameters is given some that shards cut."""
    name = getattr(kind, "__name__", str(kind))
    if name in _NEVER:
        raise ValueError(f"{name} does not update each parameter by itself; use another optimizer, such as AdamW")
    if name not in _WHOLE_PARAMETERS or not handle.plan.sharded:
        return
    for param in params:
        index = handle.buffers.index_of(param)
        if index is not None and not handle.plan.params[index].is_managed_by_layer_wise_optimizer:
            raise ValueError(
                f"{name} looks at whole parameters, but shards cut '{handle.plan.params[index].name}'; attach with "
                "layer_wise_optimizer=True and give it buf.layer_wise_params(), the others an elementwise optimizer "
                "such as AdamW"
            )


def _find_handle(groups: list[dict[str, Any]]) -> MegabufHandle:
    params = [param for group in groups for param in group["params"] if param.requires_grad]
    handles = find_handles(params)
    if not handles:
        raise ValueError(
            "these parameters are not attached; call megabuf_fx.attach(model) before the optimizer is built"
        )
    if len(handles) > 1:
        raise ValueError(f"these parameters belong to {len(handles)} attached models; build one optimizer for each")
    (handle,) = handles
    for param in params:
        if handle.buffers.index_of(param) is None:
            raise ValueError(f"a parameter of shape {tuple(param.shape)} belongs to no attached model")
    return handle
