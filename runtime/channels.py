"""How the gradients of each buffer travel: communicator, transport and scaling."""

from __future__ import annotations

from megabuf_fx.runtime.bucket_groups import GradChannel
from megabuf_fx.runtime.layout import BufferKey
from megabuf_fx.runtime.options import RuntimeOptions
from megabuf_fx.runtime.scaling import grad_scaling
from megabuf_fx.runtime.transports import Communicators, choose_reduce_scatter


def make_channel(key: BufferKey, comms: Communicators, options: RuntimeOptions) -> GradChannel:
    """The channel of the buffer with this key."""
    comm = comms.pair(is_expert=key.is_expert_parallel).grads
    return GradChannel(
        comm,
        choose_reduce_scatter(
            comm, key.grad_dtype, with_fp32_accumulation=options.reduce_scatter_with_fp32_accumulation
        ),
        grad_scaling(
            dp_size=comms.full_size(is_expert=False),
            expert_dp_size=comms.full_size(is_expert=True) if key.is_expert_parallel else 1,
            is_expert=key.is_expert_parallel,
            average_in_collective=options.average_in_collective,
            calculate_per_token_loss=options.calculate_per_token_loss,
        ),
    )
