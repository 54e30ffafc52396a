"""``DistributedOptimizer``: any elementwise ``torch.optim`` optimizer on this rank's shards (ZeRO-1).

See [Note: runs] in ``runs.py`` for what the inner optimizer updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megabuf_fx.handle import MegabufHandle, find_handles
from megabuf_fx.runs import Run, check_params, make_runs, make_runs_of, split_runs
from megabuf_fx.scaler_probe import ScalerProbe

NORM_CHUNK = 2**16
"""Elements summed at once for the gradient norm."""

_NOT_ELEMENTWISE = ("LBFGS", "Muon", "Adafactor", "SparseAdam")


class DistributedOptimizer(torch.optim.Optimizer):
    """Sharded optimizer over the parameters of one attached model.

    A ``torch.optim.Optimizer``: ``param_groups`` hold the model's parameters, schedulers work on them, and every
    hyper-parameter is passed on to the inner optimizer at each step. ``torch.amp.GradScaler`` works and skips a step on
    all ranks together; for it the last entry of ``param_groups[0]["params"]`` is a ``ScalerProbe``.

    A model attached with ``use_distributed_optimizer=False`` is updated whole, on every rank. That gives 16-bit
    parameters fp32 masters, and works where gradients have another dtype than their parameters.

    Args:
        params: parameters or param groups of an attached model.
        optimizer_class: an elementwise ``torch.optim`` class (AdamW, Adam, SGD, ...).
        defaults: keyword arguments of ``optimizer_class``.

    Raises:
        ValueError: parameters that are not attached, or of several models; an optimizer that is not elementwise.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        **defaults: Any,
    ) -> None:
        name = getattr(optimizer_class, "__name__", str(optimizer_class))
        if name in _NOT_ELEMENTWISE:
            raise ValueError(
                f"{name} looks at whole parameters, but shards cut them; use an elementwise optimizer such as AdamW"
            )
        groups = _as_groups(params)
        self.handle = _find_handle(groups)
        self._runs = [make_runs(self.handle.buffers, group["params"]) for group in groups]
        inner_groups = [{**group, "params": [run.master for run in runs]} for group, runs in zip(groups, self._runs)]
        self.inner = optimizer_class(inner_groups, **defaults)
        super().__init__(groups, self.inner.defaults)
        buffers = self.handle.buffers
        self._unattached = [p for group in groups for p in group["params"] if buffers.index_of(p) is None]
        self._clipping: tuple[int, Tensor] | None = None
        """Coefficient of the last clipping and the step it belongs to (``ModelBuffers.resets``)."""
        self._probe = ScalerProbe.of(self._found_inf, lambda: self.handle.buffers.resets)
        self.param_groups[0]["params"].append(self._probe)
        buffers.sync_params()

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

        Padding is excluded; one reduction. The coefficient is ``max_norm / (norm + 1e-6)``, applied when below one
        (Megatron ``clip_grad_by_total_norm_fp32``). fp32 gradients are scaled here; 16-bit ones stay in ``main_grad``
        as they are and are scaled by ``step``, after it has converted them to fp32, as in Megatron.

        Returns:
            The norm before clipping, 0-dim fp32, equal on all ranks.
        """
        self._synchronize()
        self._unscale()
        earlier = self._coefficient()
        if earlier is not None:
            # Clipped once before: what that left to step is now part of the norm.
            _scale([run.grad for run in self._all_runs() if not run.is_fp32], earlier)
        total = self._total_norm(norm_type)
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        self._clipping = (self.handle.buffers.resets, coefficient)
        _scale([run.grad for run in self._all_runs() if run.is_fp32], coefficient)
        return total

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
        self._synchronize()
        buffers = self.handle.buffers
        buffers.sync_params()
        buffers.check_addresses()
        check_params(buffers, self._all_runs())
        self._refuse_unattached()
        self._unscale()
        used = buffers.used_params()
        for index, (outer, inner) in enumerate(zip(self.param_groups, self.inner.param_groups)):
            inner.update({key: value for key, value in outer.items() if key != "params"})
            self._runs[index] = split_runs(self._runs[index], used, self.inner.state)
            inner["params"] = [run.master for run in self._runs[index]]
            for run in self._runs[index]:
                # A parameter without gradient is left alone, as in torch.optim. fp32 gradients are aliased, not copied.
                run.master.grad = self._fp32_grad(run) if run.is_used(used) else None
        self.inner.step()
        for runs in self._runs:
            for run in runs:
                run.master.grad = None
                run.write_params()
        self._clipping = None
        buffers.after_step()
        return loss

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Rank-local state: that of this rank's runs, with their masters. Loads under the same plan and rank only."""
        return {
            "plan_digest": self.handle.plan.digest,
            "dp_rank": self.handle.buffers.comm.rank,
            "inner": self.inner.state_dict(),
            "spans": [[(run.buffer, run.start, run.end) for run in runs] for runs in self._runs],
            "masters": [run.master.detach() for runs in self._runs for run in runs],
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"} for group in self.param_groups
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Load what ``state_dict`` of the same rank under the same plan returned.

        Raises:
            ValueError: another plan (model, bucket size, world size) or another rank.
        """
        expected = (self.handle.plan.digest, self.handle.buffers.comm.rank)
        found = (state_dict["plan_digest"], state_dict["dp_rank"])
        if expected != found:
            raise ValueError(
                f"optimizer state of plan {found[0][:12]} rank {found[1]} does not fit plan {expected[0][:12]} rank "
                f"{expected[1]}; rank-local state needs the same model, bucket size and world size"
            )
        self._runs = [make_runs_of(self.handle.buffers, spans) for spans in state_dict["spans"]]
        self.inner.state.clear()
        for inner, runs in zip(self.inner.param_groups, self._runs):
            inner["params"] = [run.master for run in runs]
        self.inner.load_state_dict(state_dict["inner"])
        for group, saved in zip(self.param_groups, state_dict["param_groups"]):
            group.update(saved)
        masters = iter(state_dict["masters"])
        with torch.no_grad():
            for run in self._all_runs():
                run.master.copy_(next(masters))
                run.write_params()
        gatherer = self.handle.buffers.gatherer
        if gatherer is not None:
            gatherer.wait_all()
            gatherer.mark_stale()
            gatherer.wait_all()

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Set the fp32 masters to the model's parameters, after values were loaded or written into a live model.

        fp32 parameters are their own masters. Without this call the next ``step`` would write the old masters back.
        """
        for run in self._all_runs():
            run.read_params()

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

    def _all_runs(self) -> list[Run]:
        return [run for runs in self._runs for run in runs]

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

    def _unscale(self) -> None:
        """Multiply gradients by what ``GradScaler`` multiplied the probe's by, once."""
        factor = self._probe.take_factor()
        if factor is not None:
            _scale([run.grad for run in self._all_runs()], factor)

    def _found_inf(self) -> Tensor:
        """Whether a reduced gradient is not finite on any rank: 0-dim bool."""
        self._synchronize()
        finite = [run.grad.isfinite().all() for run in self._all_runs()]
        device = self.handle.buffers.token.device
        local = torch.stack(finite).logical_not().any() if finite else torch.zeros((), dtype=torch.bool, device=device)
        flags = local.to(torch.uint8).reshape(1)
        self.handle.buffers.comm.all_reduce_max(flags).wait()
        return flags[0].bool()

    def _total_norm(self, norm_type: float) -> Tensor:
        """Over all ranks and parameters. Expert gradients count once for each set of experts."""
        buffers, comm = self.handle.buffers, self.handle.buffers.comm
        is_expert = [layout.key.is_expert_parallel for layout in self.handle.plan.layouts]
        dense = self._local_norm([run.grad for run in self._all_runs() if not is_expert[run.buffer]], norm_type)
        expert = self._local_norm([run.grad for run in self._all_runs() if is_expert[run.buffer]], norm_type)
        if norm_type == float("inf"):
            return comm.reduce_scalar(torch.maximum(dense, expert), maximum=True)
        dense, expert = dense.pow(norm_type), expert.pow(norm_type)
        if self.handle.plan.sharded:
            return comm.reduce_scalar(dense + expert, maximum=False).pow(1.0 / norm_type)
        if any(is_expert):
            # Every rank has all of its gradients; the same experts are on as many ranks as share them.
            expert = comm.reduce_scalar(expert / buffers.comms.full_size(is_expert=True), maximum=False)
        return (dense + expert).pow(1.0 / norm_type)

    def _local_norm(self, grads: list[Tensor], norm_type: float) -> Tensor:
        # In chunks: the fp32 norm of one long run loses digits on the CPU (1e-4 relative at 5M elements).
        chunks = [chunk for grad in grads for chunk in grad.split(NORM_CHUNK)]
        if not chunks:
            return torch.zeros((), device=self.handle.buffers.token.device)
        norms = torch.stack(torch._foreach_norm(chunks, norm_type, dtype=torch.float32))
        norm: Tensor = torch.linalg.vector_norm(norms, norm_type)
        return norm


def _scale(grads: list[Tensor], factor: Tensor) -> None:
    if grads:
        torch._foreach_mul_(grads, factor)


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
