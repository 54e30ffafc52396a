"""Which parameters are stored in few bits, and in how many bytes."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megabuf_fx.cli.errors import CliError
from megabuf_fx.runtime.layout import ParamSpec

QuantizedKind = Literal["fp8", "mxfp8", "nvfp4"]

BLOCKS: dict[QuantizedKind, tuple[int, int]] = {"fp8": (1, 1), "mxfp8": (1, 32), "nvfp4": (16, 16)}
"""Rows and columns that share a scale and must divide a weight; fp8 has one scale for the whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """What the linear weights are stored as."""

    kind: QuantizedKind
    reuses_grad_buffer: bool = False
    """MXFP8: parameters are gathered in the storage of ``grad_data`` instead of one of their own."""
    patterns: tuple[str, ...] = ()
    """Shell patterns of names; empty means every linear weight."""


def mark_quantized(
    specs: Sequence[ParamSpec], linear_weights: Collection[str], quantization: Quantization
) -> tuple[ParamSpec, ...]:
    """``specs`` with ``quantized`` set for 16-bit linear weights whose rows and columns divide into blocks.

    Raises:
        CliError: there is none.
    """
    block_rows, block_columns = BLOCKS[quantization.kind]

    def is_quantized(spec: ParamSpec) -> bool:
        return (
            spec.name in linear_weights
            and spec.dtype != torch.float32
            and (not quantization.patterns or any(fnmatch.fnmatch(spec.name, p) for p in quantization.patterns))
            and spec.shape[0] % block_rows == 0
            and spec.shape[1] % block_columns == 0
        )

    marked = tuple(
        dataclasses.replace(spec, quantized=quantization.kind if is_quantized(spec) else None) for spec in specs
    )
    if not any(spec.quantized for spec in marked):
        raise CliError(
            f"no parameter can be stored as {quantization.kind}: it takes 16-bit weights of nn.Linear whose rows "
            f"divide by {block_rows} and columns by {block_columns}, with a name that matches"
        )
    return marked
