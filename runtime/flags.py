"""The attributes that Megatron-LM and TransformerEngine share with us on a parameter, used here and nowhere else.

* ``main_grad``: the parameter's view of ``grad_data``, in its shape, or its own fp32 sum.
* ``main_grad_copy_in_grad_buffer``: the view, where ``main_grad`` is not it.
* ``grad_added_to_main_grad``: a fused kernel outside our graphs has added the gradient already.
* ``shared_embedding``, ``allreduce``: what the planner reads (Megatron's names).
"""

from __future__ import annotations

from torch import Tensor, nn

from megabuf_fx.runtime.layout import ParamSpec


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


def spec_of(name: str, param: nn.Parameter) -> ParamSpec:
    """What the planner needs to know of a parameter."""
    return ParamSpec(
        name=name,
        shape=tuple(param.shape),
        dtype=param.dtype,
        shared_embedding=bool(getattr(param, "shared_embedding", False)),
        allreduce=not is_expert(param),
    )


def is_expert(tensor: Tensor) -> bool:
    """Whether other ranks have other experts under this tensor's name (Megatron ``allreduce = False``)."""
    return not getattr(tensor, "allreduce", True)
