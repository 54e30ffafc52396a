"""The formats in which parameters may be stored, as compiled graphs see them: which tensors, and their values.

    fp8      codes [rows, cols]       scale_inv []
    mxfp8    codes [rows, cols]       scales [rows, cols // 32]
    nvfp4    codes [rows, cols // 2]  block_scales [rows // 16, cols // 16]   tensor_scale []

A stored parameter is a matrix ``[rows, cols]``. Matrix units for these formats exist on newer chips only, so forward
and backward dequantize to the parameter's own dtype, just before each product: what is saved is memory and traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from megabuf_fx.runtime.quantize_fp8 import Fp8Tensor, dequantize_fp8
from megabuf_fx.runtime.quantize_mx import BLOCK_SIZE as MX_BLOCK
from megabuf_fx.runtime.quantize_mx import MxTensor, dequantize_mxfp8
from megabuf_fx.runtime.quantize_nvfp4 import BLOCK_SIZE as NVFP4_BLOCK
from megabuf_fx.runtime.quantize_nvfp4 import BlockShape, Nvfp4Tensor, dequantize_nvfp4


def gathered_bits(quantized: str | None, itemsize: int) -> int:
    """Bits per element that a gather of parameters moves; ``itemsize`` is that of their own dtype, in bytes. MXFP8 is
    gathered before it is quantized."""
    return {"fp8": 8, "nvfp4": 4}.get(str(quantized), 8 * itemsize)


FormatName = Literal["fp8", "mxfp8", "nvfp4"]


@dataclass(frozen=True, slots=True)
class StorageFormat:
    """What a graph needs to know of a format."""

    stored: type[Any]
    """The ``NamedTuple`` of a parameter's tensors; graphs take its fields as inputs, in order."""
    divisors: tuple[int, int]
    """Of rows and columns: matrices of other sizes cannot be stored."""
    elements_per_byte: int
    dequantize: Callable[[Any, torch.dtype], Tensor]

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a parameter of this shape can be stored."""
        return len(shape) == 2 and all(size and size % d == 0 for size, d in zip(shape, self.divisors))


def _dequantize_fp8(stored: Fp8Tensor, dtype: torch.dtype) -> Tensor:
    return dequantize_fp8(stored, dtype=dtype)


def _dequantize_mxfp8(stored: MxTensor, dtype: torch.dtype) -> Tensor:
    return dequantize_mxfp8(stored, dtype=dtype)


def _dequantize_nvfp4(stored: Nvfp4Tensor, dtype: torch.dtype) -> Tensor:
    return dequantize_nvfp4(stored, BlockShape.TILE, dtype=dtype)


FORMATS: Mapping[str, StorageFormat] = MappingProxyType(
    {
        "fp8": StorageFormat(Fp8Tensor, (1, 1), 1, _dequantize_fp8),
        "mxfp8": StorageFormat(MxTensor, (1, MX_BLOCK), 1, _dequantize_mxfp8),
        "nvfp4": StorageFormat(Nvfp4Tensor, (NVFP4_BLOCK, NVFP4_BLOCK), 2, _dequantize_nvfp4),
    }
)
