"""The tensors: one flat ``grad_data`` (and, sharded, one ``param_data``) per buffer key."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megabuf_fx.runtime.collectives import Comm, PendingWork
from megabuf_fx.runtime.flags import bind_main_grad, unbind_main_grad
from megabuf_fx.runtime.layout import BufferLayout
from megabuf_fx.runtime.plan import BucketPlan
from megabuf_fx.runtime.shards import shard_bounds
from megabuf_fx.runtime.shared_storage import SharedStorage
from megabuf_fx.runtime.stored_params import StoredParams
from megabuf_fx.runtime.whole_params import WholeParams


class Store(NamedTuple):
    """How one buffer keeps quantized parameters."""

    stored: StoredParams
    shared: SharedStorage | None
    """The state of ``grad_data`` where gathers go through it."""


MakeStore = Callable[[BufferLayout, Tensor], Store]
"""Of a layout with quantized parameters and its ``grad_data``."""


class ParamGradBuffer:
    """Storage of one ``BufferLayout``.

    ``grad_data``: ``[numel]`` of ``grad_dtype``, zero at first; its padding stays zero.
    ``param_data``: ``[numel]`` of ``param_dtype``, only when sharded; then every ``param.data`` is a view of it.
    ``promoted`` are the parameters that accumulate in an fp32 tensor of their own, see [Note: fp32 local accumulation].
    Quantized parameters (``make_store``) are no views: ``stored`` has them, and ``param_data`` is what a gather moves.
    """

    # [Note: fp32 local accumulation]
    # Gradients of chosen parameters are summed over micro-batches in fp32 although the buffer, and what is sent, has 16
    # bits (Megatron ``param_name_patterns_for_fp32_local_accumulation``, semantics §9). ``main_grad`` then is a tensor
    # of its own; it is rounded into the buffer when the bucket is sent and read back after. Nobody reads it before it
    # was written: the first gradient of a step overwrites it.

    def __init__(
        self,
        layout: BufferLayout,
        params: Sequence[nn.Parameter],
        *,
        device: torch.device,
        sharded: bool,
        promoted: Collection[int] = (),
        make_store: MakeStore | None = None,
    ) -> None:
        self.layout = layout
        self.params = {index: params[index] for index in layout.params}
        self.slots = dict(zip(layout.params, layout.slots))
        # A dense memory format (channels_last) is kept, so that parameter, gradient and optimizer state agree element
        # by element in memory; anything else (expanded, overlapping) becomes contiguous.
        self._strides = {i: torch.empty_like(param, device="meta").stride() for i, param in self.params.items()}
        self.grad_data = torch.zeros(layout.numel, dtype=layout.key.grad_dtype, device=device)
        self.stored: StoredParams | None = None
        self.shared: SharedStorage | None = None
        self.whole: WholeParams | None = None
        """How parameters that ranks own whole are gathered, without shards; see ``own_whole``."""
        self.param_data: Tensor | None = None
        if make_store is not None:
            self.stored, self.shared = make_store(layout, self.grad_data)
            self.param_data = self.stored.param_data
        elif sharded:
            self.param_data = torch.zeros(layout.numel, dtype=layout.key.param_dtype, device=device)
        self.grad_views = {index: self._view(self.grad_data, index) for index in layout.params}
        """View of ``grad_data`` of each parameter, in its shape and memory format."""
        self.promoted = tuple(index for index in layout.params if index in promoted)
        self.main_grads = {
            index: torch.zeros_like(view, dtype=torch.float32) if index in promoted else view
            for index, view in self.grad_views.items()
        }
        """Where gradients accumulate, ``param.main_grad`` itself: the view, or an fp32 tensor of its own."""
        for index, param in self.params.items():
            if self.holds_params:
                assert self.param_data is not None
                view = self._view(self.param_data, index)
                view.copy_(param.data)
                param.data = view
            bind_main_grad(param, self.main_grads[index], self.grad_views[index])

    def _view(self, data: Tensor, index: int) -> Tensor:
        slot, param = self.slots[index], self.params[index]
        return data[slot.start : slot.end].as_strided(param.shape, self._strides[index])

    def own_whole(self, owners: Mapping[int, int], names: Sequence[str], *, size: int, rank: int) -> None:
        """Gather whole parameters through ``grad_data``; ``names`` describe the buckets."""
        self.whole = WholeParams(self.layout, self.params, owners, self.grad_data, size=size, rank=rank)
        self.shared = SharedStorage(names)

    @property
    def holds_params(self) -> bool:
        """Whether parameters are views of ``param_data``."""
        return self.param_data is not None and self.stored is None

    def grad_shard(self, bucket: int, *, dp_size: int, dp_rank: int) -> Tensor:
        """The slice of ``grad_data`` that ``dp_rank`` owns of ``bucket``: ``[bucket numel // dp_size]``."""
        start, end = shard_bounds(self.layout.buckets[bucket], dp_size, dp_rank)
        return self.grad_data[start:end]

    def param_shard(self, bucket: int, *, dp_size: int, dp_rank: int) -> Tensor:
        """The slice of ``param_data`` that ``dp_rank`` owns of ``bucket``."""
        return self._param_slice(*shard_bounds(self.layout.buckets[bucket], dp_size, dp_rank))

    def param_bucket(self, bucket: int) -> Tensor:
        """What a gather fills: all of ``bucket`` in ``param_data``, or of its parameters in ``grad_data``."""
        if self.whole is not None:
            return self.whole.received[bucket]
        return self._param_slice(*self.layout.buckets[bucket])

    def _param_slice(self, start: int, end: int) -> Tensor:
        """``start`` and ``end`` count elements, of which a byte of ``param_data`` may hold two."""
        assert self.param_data is not None
        each = self.stored.format.elements_per_byte if self.stored is not None else 1
        return self.param_data[start // each : end // each]

    # What happens around a gather to parameters that do not lie in ``param_data``; for others nothing.

    def stage(self) -> None:
        """The shards of all buckets are about to be written into ``param_data``."""
        if self.shared is not None:
            for bucket in range(len(self.layout.buckets)):
                self.shared.stage(bucket)

    def before_gather(self, bucket: int) -> None:
        if self.whole is not None:
            assert self.shared is not None
            self.shared.stage(bucket)
            self.whole.stage(bucket)
        if self.shared is not None:
            self.shared.gather(bucket)

    def start_gather(self, bucket: int, comm: Comm) -> PendingWork:
        """The collective itself."""
        if self.whole is not None:
            return self.whole.all_gather(bucket, comm)
        shard = self.param_shard(bucket, dp_size=comm.size, dp_rank=comm.rank)
        return comm.all_gather(self.param_bucket(bucket), shard)

    def finish_gather(self, bucket: int) -> None:
        """What is gathered is complete."""
        if self.shared is not None:
            self.shared.copy_out(bucket)
        if self.stored is not None:
            self.stored.copy_out(bucket)
        if self.whole is not None:
            self.whole.copy_out(bucket)
        if self.shared is not None:
            self.shared.clear(bucket)
            self.param_bucket(bucket).zero_()

    def poison(self, bucket: int, *, dp_size: int, dp_rank: int) -> None:
        """Make NaN of what other ranks own, or of the whole bucket where codes have no NaN, until the gather."""
        if self.whole is not None:
            self.whole.poison(bucket)
            return
        nan: float | None = float("nan") if self.stored is None else self.stored.nan_code
        if nan is None:
            assert self.stored is not None
            self.stored.poison(bucket)
            return
        own = self.param_shard(bucket, dp_size=dp_size, dp_rank=dp_rank)
        kept = own.clone()
        self.param_bucket(bucket).fill_(nan)
        own.copy_(kept)

    def round_promoted(self, params: Collection[int]) -> None:
        """Put the fp32 sums of ``params`` into the buffer, as far as they have such."""
        for index in self.promoted:
            if index in params:
                self.grad_views[index].copy_(self.main_grads[index])

    def restore_promoted(self, params: Collection[int]) -> None:
        """Read the gradients of ``params`` back into their fp32 tensors."""
        for index in self.promoted:
            if index in params:
                self.main_grads[index].copy_(self.grad_views[index])

    def release(self) -> None:
        """Give every parameter storage of its own again and drop the gradient views."""
        for index, param in self.params.items():
            if self.holds_params:
                param.data = param.data.clone()
            if param.grad is not None and param.grad.data_ptr() == self.main_grads[index].data_ptr():
                param.grad = None
            unbind_main_grad(param)


def find_promoted(plan: BucketPlan, patterns: Sequence[str]) -> set[int]:
    """Parameters whose name matches a shell pattern (``all`` matches each) and whose buffer is not fp32 anyway."""
    return {
        index
        for layout in plan.layouts
        for index in layout.params
        if layout.key.grad_dtype != torch.float32
        and any(pattern == "all" or fnmatch.fnmatch(plan.params[index].name, pattern) for pattern in patterns)
    }
