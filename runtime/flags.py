"""The attributes that Megatron-LM and TransformerEngine share with us on a parameter, used here and nowhere else.

* ``main_grad``: the parameter's view of ``grad_data``, in its shape.
* ``grad_added_to_main_grad``: a fused kernel outside our graphs has added the gradient already.
* ``shared_embedding``, ``allreduce``: what the planner reads (Megatron's names).
"""

from __future__ import annotations

from torch import Tensor, nn

from megabuf_fx.runtime.layout import ParamSpec


def bind_main_grad(param: nn.Parameter, main_grad: Tensor) -> None:
    """Publish the buffer view of a parameter's gradient."""
    param.main_grad = main_grad  # type: ignore[attr-defined]
    param.grad_added_to_main_grad = False  # type: ignore[attr-defined]


def unbind_main_grad(param: nn.Parameter) -> None:
    for name in ("main_grad", "grad_added_to_main_grad"):
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
        allreduce=bool(getattr(param, "allreduce", True)),
    )
