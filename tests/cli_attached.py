"""Models with buffers and an optimizer, measured: what the ledger's numbers are compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import nn

import megabuf_fx as mb
from megabuf_fx.cli.counting import setup_of, terms_of
from megabuf_fx.cli.ledger import make_rows
from megabuf_fx.runtime.buffers import ParamGradBuffer
from megabuf_fx.runtime.stored_params import StoredParams

MXFP8 = {"fp8_param_gather": True, "fp8_recipe": "mxfp8"}
QUANTIZED: dict[str, dict[str, Any]] = {
    "fp8": {"fp8_param_gather": True},
    "fp8 delayed": {"fp8_param_gather": True, "fp8_recipe": "delayed", "fp8_amax_history_len": 16},
    "mxfp8": MXFP8,
    "mxfp8 shared": {**MXFP8, "reuse_grad_buf_for_mxfp8_param_ag": True},
    "nvfp4": {"fp4_param_gather": True},
}


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Those in attributes, dicts and sequences."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, StoredParams):
        yield from tensors_in(vars(value))


class Attached:
    """A model with buffers and an optimizer that has made its moments; ``sizes`` are the ledger's rows as measured."""

    def __init__(self, model: nn.Module, config: mb.MegabufConfig) -> None:
        self.handle = mb.attach(model, config)
        self.config = config
        self.optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        buffers = self.handle.buffers.buffers
        for run_ in self.optimizer.runs:
            run_.master.grad = torch.zeros_like(run_.master)
        self.optimizer.inner.step()
        for run_ in self.optimizer.runs:
            run_.master.grad = None
        self._seen: set[int] = set()
        moments = [v for s in self.optimizer.inner.state.values() for k, v in s.items() if k.startswith("exp_avg")]
        # In this order: views of what stands further up are nothing new.
        self.sizes = {
            "grad_data": self._new(buffer.grad_data for buffer in buffers),
            "param_data": self._new(buffer.param_data for buffer in buffers if buffer.param_data is not None),
            "codes and scales": self._new(t for buffer in buffers for t in tensors_in(buffer.stored)),
            "shadow" if self.handle.plan.sharded else "parameters": self._new(p.detach() for p in model.parameters()),
            "fp32 gradient sums": self._new(t for buffer in buffers for t in buffer.main_grads.values()),
            "fp32 masters": self._new(run.master.detach() for run in self.optimizer.runs),
            "Adam moments": self._new(moments),
        }
        self.sizes["resident"] = sum(self.sizes.values())
        self.sizes["padding"] = sum(self._padding(buffer) for buffer in buffers)
        self.sizes["amax all-reduce"] = self._amax_traffic()

    def _new(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of storages that were not counted yet."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        total = sum(nbytes for pointer, nbytes in storages.items() if pointer not in self._seen)
        self._seen |= storages.keys()
        return total

    def _padding(self, buffer: ParamGradBuffer) -> int:
        """Bytes of no parameter, in what has the positions of the buffer; shared storage counts as gradients."""
        flat = [buffer.grad_data]
        if buffer.param_data is not None and buffer.shared is None:
            flat.append(buffer.param_data)
        if buffer.stored is not None and "codes" in buffer.stored.tensors():
            flat.append(buffer.stored.tensors()["codes"])
        elements = sum(view.numel() for view in buffer.grad_views.values())
        return int(sum(data.nbytes - Fraction(data.nbytes, buffer.layout.numel) * elements for data in flat))

    def _amax_traffic(self) -> int:
        plan, instances = self.handle.plan, self.config.num_distributed_optimizer_instances
        total = Fraction()
        for buffer in self.handle.buffers.buffers:
            reduced: list[torch.Tensor] = []
            if buffer.stored is not None:
                buffer.stored.write_shard((), reduced.append)
            ranks = plan.dp_size_of(buffer.layout.key)
            for amax in reduced:
                total += 2 * amax.nbytes * (Fraction(ranks - 1, ranks) + Fraction(instances - 1, instances))
        return int(total)

    def ledger(self) -> dict[str, int]:
        """The rows of ``sizes``, as the ledger of the plan has them."""
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        terms = terms_of(self.handle.plan, self.config, dp_rank=rank)
        rows = {row.name: row.amount for row in make_rows(setup_of(self.handle.plan, self.config), terms)}
        return {name: int(rows.get(name, 0)) for name in self.sizes}
