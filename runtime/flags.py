"""Flags: attributes on parameters, and the numbers that a captured step reads on the device.

Attributes that Megatron-LM and TransformerEngine share with us on a parameter, used here and nowhere else:

* ``main_grad``: the parameter's view of ``grad_data``, in its shape, or its own fp32 sum.
* ``main_grad_copy_in_grad_buffer``: the view, where ``main_grad`` is not it.
* ``grad_added_to_main_grad``: a fused kernel outside our graphs has added the gradient already.
* ``shared_embedding``, ``allreduce``, ``is_embedding_or_output_parameter``, ``is_managed_by_layer_wise_optimizer``:
  what the planner reads (Megatron's names).
* Those of ``AxisFlags``: what ranks of other axes have of the parameter.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megabuf_fx.runtime.layout import ParamSpec


class StepFlags:
    """The table of numbers that a captured step reads on the device; no other number may change between its replays.

    All are 0-dim tensors that live as long as the buffers do. The host writes ``lr`` and ``accumulate`` before a
    replay; the step itself writes the others, or the caller's code in it.
    """

    def __init__(self, device: torch.device) -> None:
        def number(dtype: torch.dtype) -> Tensor:
            return torch.zeros((), dtype=dtype, device=device)

        self._device = device
        self.lr: list[Tensor] = []
        """One for each param group. fp32 on a device; fp64 on the CPU, which is what a Python float is."""
        self.accumulate = number(torch.int32)
        """0: a captured micro-batch overwrites gradients, 1: it adds."""
        self.found_inf = number(torch.float32)
        """1: some gradient of the last step was not finite, so nothing was updated. Equal on all ranks."""
        self.step = number(torch.int64)
        """Updates that captured steps have made."""
        self.skipped = number(torch.int64)
        """Updates that captured steps have left out because of ``found_inf``."""
        self.skipped_in_a_row = number(torch.int64)
        self.num_tokens = number(torch.float32)
        """For code that divides gradients by a number of tokens (``calculate_per_token_loss``); nothing here reads
        it."""
        self.loss_scale: Tensor | None = None
        """That of the ``GradScaler`` given to ``capture_step``."""

    def make_lr(self, groups: int) -> None:
        """Have a learning rate for each of so many param groups; those that exist stay where they are."""
        dtype = torch.float64 if self._device.type == "cpu" else torch.float32
        self.lr.extend(torch.zeros((), dtype=dtype, device=self._device) for _ in range(groups - len(self.lr)))

    def count(self, is_skipped: Tensor) -> None:
        """Count the step that is being taken, on the device; ``is_skipped`` is a 0-dim bool."""
        self.found_inf.copy_(is_skipped)
        skipped = is_skipped.long()
        self.step.add_(1 - skipped)
        self.skipped.add_(skipped)
        self.skipped_in_a_row.add_(1).mul_(skipped)

    def named(self) -> dict[str, Tensor]:
        """Every number in the table."""
        numbers = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return {**numbers, **{f"lr[{index}]": value for index, value in enumerate(self.lr)}}


def bind_main_grad(param: nn.Parameter, main_grad: Tensor, grad_view: Tensor) -> None:
    """Publish where a parameter's gradient accumulates, and its view of the buffer if that is another tensor."""
    param.main_grad = main_grad  # type: ignore[attr-defined]
    param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    if grad_view is not main_grad:
        param.main_grad_copy_in_grad_buffer = grad_view  # type: ignore[attr-defined]


def unbind_main_grad(param: nn.Parameter) -> None:
    for name in ("main_grad", "grad_added_to_main_grad", "main_grad_copy_in_grad_buffer"):
        if name in vars(param):
            delattr(param, name)


def was_added_outside(param: nn.Parameter) -> bool:
    """Whether a kernel outside our graphs wrote ``main_grad`` in this backward.

    Such kernels rely on Megatron's zeroing of the whole buffer, which this project does not do.
    """
    return bool(getattr(param, "grad_added_to_main_grad", False))


def was_any_added_outside(params: Iterable[nn.Parameter]) -> bool:
    """The same of any of these attached parameters. Asked in every step, so without a Python call for each."""
    return any(map(_ADDED_OUTSIDE, params))


_ADDED_OUTSIDE = operator.attrgetter("grad_added_to_main_grad")


def spec_of(name: str, param: nn.Parameter) -> ParamSpec:
    """What the planner needs to know of a parameter."""
    return ParamSpec(
        name=name,
        shape=tuple(param.shape),
        dtype=param.dtype,
        shared_embedding=bool(getattr(param, "shared_embedding", False)),
        allreduce=not is_expert(param),
    )


def is_embedding_or_output(param: nn.Parameter) -> bool:
    """Whether somebody has marked a parameter as embedding or output layer (Megatron's attributes)."""
    return any(bool(getattr(param, name, False)) for name in ("is_embedding_or_output_parameter", "shared_embedding"))


def is_expert(tensor: Tensor) -> bool:
    """Whether other ranks have other experts under this tensor's name (Megatron ``allreduce = False``)."""
    return not getattr(tensor, "allreduce", True)


class AxisFlags(NamedTuple):
    """What a parameter's attributes say of tensor-parallel ranks and pipeline stages; the names are Megatron's, but
    that of ``shared_position_embedding``, for which Megatron goes by the module's name."""

    pipeline_parallel: bool
    """Every stage has a copy (conditional embedders)."""
    flextron_router_pp_sync: bool
    """The same, of routers."""
    sequence_parallel: bool
    """Tensor-parallel ranks have copies and saw other parts of the sequence: gradients add up."""
    average_gradients_across_tp_domain: bool
    """Tensor-parallel ranks have copies and saw the same: gradients are averaged."""
    shared_embedding: bool
    """First and last stage have a copy; alone in its bucket."""
    shared_position_embedding: bool
    """Some stages have a copy."""
    tensor_model_parallel: bool
    """Tensor-parallel ranks have parts of it, not copies."""
    shared: bool
    """A copy of a parameter that is counted elsewhere, as the last stage's word embedding."""

    @property
    def is_copy(self) -> bool:
        """Whether other axes have something to do with the gradient."""
        return any(self[:6])

    @property
    def is_pipeline_copy(self) -> bool:
        return self.pipeline_parallel or self.flextron_router_pp_sync


def axis_flags(param: Tensor) -> AxisFlags:
    """The attributes that ``param`` has; those it has not are False."""
    return AxisFlags(*(bool(getattr(param, name, False)) for name in AxisFlags._fields))
