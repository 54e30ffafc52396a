"""The memory of one rank, written once: with symbols it is a formula, with numbers it is bytes.

[Note: what the ledger counts]
Everything that attached buffers and ``DistributedOptimizer`` with AdamW hold for as long as training lasts, and the
largest temporaries of a step, in bytes. Not in it are activations, weights while they are dequantized for a product or
shown to eager code, what kernels that quantize need meanwhile, NCCL's own memory and a few hundred bytes of flags.
Symbols, for each buffer (with the buffer's name as suffix where there are several):

    P  parameter elements on this rank           N  elements of the buffer: P and its padding
    d  data-parallel ranks                       i  optimizer instances: complete sets of shards, d / i ranks each
    B  elements of its largest bucket            K  bucket threshold (``bucket_size``)
    u  divisor of bucket ends
    M  elements summed in fp32 tensors of their own (``param_name_patterns_for_fp32_local_accumulation``)
    S  elements of the largest quantized parameter                    n  number of quantized parameters
    C  bytes of block scales, each parameter's rounded up to 16       H  steps of fp8's amax history
    A  fp32 block amaxes (NVFP4), each parameter's rounded up to 16 bytes

A rank owns ``P * i / d`` parameter elements on average. Which it owns exactly depends on where padding lies, so numbers
taken from a plan say exactly what the rank asked for holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import sympy

from megabuf_fx.runtime.quantized_formats import FormatName, gathered_bits
from megabuf_fx.runtime.stored_params import SLOT_ALIGNMENT

Amount = Any
"""A sympy expression, or a number (``int``, ``Fraction``): the same arithmetic serves both, and sympy has no types."""

FP32 = 4
MOMENTS = 2
"""Of AdamW, fp32 each."""
FP8_SCALARS = 3 * FP32
"""Bytes of a parameter's scale, of that with which its codes were made, and of the running amax (``StoredFp8``)."""
SYMBOLS = ("P", "N", "B", "M", "S", "n", "C", "A", "H", "u")
"""Fields of ``Terms`` that have a symbol of their own."""

Kind = Literal["resident", "detail", "temporary", "traffic", "bucket", "count"]


@dataclass(frozen=True, slots=True)
class BufferKind:
    """What decides the bytes per element of one buffer."""

    name: str
    """Suffix of its symbols: ``bf16``, ``fp8``, ``bf16_experts``."""
    weight_bytes: int
    """Of the logical dtype, which a quantized parameter also has."""
    grad_bytes: int
    quantized: FormatName | None = None
    is_expert: bool = False


@dataclass(frozen=True, slots=True)
class Setup:
    """What decides the formulas."""

    buffers: tuple[BufferKind, ...]
    sharded: bool
    is_cut: bool = True
    """There is a bucket threshold."""
    has_instances: bool = False
    reuses_grad_buffer: bool = False
    """MXFP8 parameters are gathered inside ``grad_data``."""
    sums_in_fp32: bool = False
    """Some 16-bit gradients are summed in fp32 tensors of their own."""
    reduces_by_all_to_all: bool = False
    """``reduce_scatter_with_fp32_accumulation``."""


class Terms(NamedTuple):
    """Amounts of one buffer; elements unless said otherwise."""

    P: Amount
    N: Amount
    owned: Amount
    """Parameter elements in this rank's shards; all without sharding."""
    shards: Amount
    """Ranks that share a bucket, of one optimizer instance; 1 divided by it is what a rank owns."""
    instances: Amount
    B: Amount
    M: Amount
    S: Amount
    n: Amount
    C: Amount
    A: Amount
    H: Amount
    buckets: Amount
    u: Amount


class Row(NamedTuple):
    """One line of the ledger."""

    name: str
    kind: Kind
    """``resident`` rows add up; a ``detail`` is part of them. ``traffic`` is sent by this rank in one step, ``bucket``
    is about one bucket."""
    amount: Amount
    """Bytes, but of a ``count``."""
    remark: str = ""


def make_rows(setup: Setup, terms: Sequence[Terms]) -> tuple[Row, ...]:
    """The ledger; ``terms`` has one entry per buffer of ``setup``, of symbols or of numbers."""
    pairs = list(zip(setup.buffers, terms))
    quantized = [(kind, t) for kind, t in pairs if kind.quantized]
    rows = [Row("grad_data", "resident", sum(kind.grad_bytes * t.N for kind, t in pairs))]
    if setup.sharded:
        is_shared = setup.reuses_grad_buffer and bool(quantized)
        remark = "MXFP8 weights are gathered in grad_data" if is_shared else ""
        rows.append(Row("param_data", "resident", sum(_param_bytes(setup, kind) * t.N for kind, t in pairs), remark))
    else:
        remark = "in the modules' own storage"
        rows.append(Row("parameters", "resident", sum(kind.weight_bytes * t.P for kind, t in pairs), remark))
    if quantized:
        rows.append(
            Row("codes and scales", "resident", sum(_quantized_bytes(k, t) for k, t in quantized), "outside the buffer")
        )
        rows.append(
            # One for all, as all quantized parameters of a model have one dtype.
            Row(
                "shadow",
                "resident",
                quantized[0][0].weight_bytes * _largest([t.S for _, t in quantized]),
                "memory of hidden parameters: that of the largest",
            )
        )
    if setup.sums_in_fp32:
        rows.append(
            Row("fp32 gradient sums", "resident", sum(FP32 * t.M for kind, t in pairs if kind.grad_bytes < FP32))
        )
    rows += [
        _masters(setup, pairs),
        Row("Adam moments", "resident", sum(MOMENTS * FP32 * t.owned for _, t in pairs)),
    ]
    rows.append(Row("resident", "detail", sum(row.amount for row in rows), "the rows above"))
    rows.append(
        Row("padding", "detail", sum(_padding_bytes(setup, kind, t) for kind, t in pairs), "part of the buffers")
    )
    return (*rows, *_temporaries(setup, pairs), *_traffic(setup, pairs), *_bucket_rows(setup, pairs))


def _masters(setup: Setup, pairs: Sequence[tuple[BufferKind, Terms]]) -> Row:
    if setup.sharded:
        # Those of plain fp32 parameters are views of param_data (``Run.is_aliased``).
        amount = sum(FP32 * t.owned for kind, t in pairs if kind.weight_bytes < FP32 or kind.quantized)
        return Row("fp32 masters", "resident", amount)
    # The optimizer's runs go over parameters with storage of their own, so they are copies of any dtype.
    return Row("fp32 masters", "resident", sum(FP32 * t.owned for _, t in pairs), "a torch.optim optimizer has none")


def _param_bytes(setup: Setup, kind: BufferKind) -> int | Fraction:
    """Bytes of ``param_data`` per element."""
    return 0 if kind.quantized == "mxfp8" and setup.reuses_grad_buffer else _gathered_bytes(kind)


def _gathered_bytes(kind: BufferKind) -> int | Fraction:
    """Bytes per element that a parameter gather moves."""
    nbytes = Fraction(gathered_bits(kind.quantized, kind.weight_bytes), 8)
    return int(nbytes) if nbytes.denominator == 1 else nbytes


def _quantized_bytes(kind: BufferKind, t: Terms) -> Amount:
    """What quantized parameters hold outside of the buffer (``StoredParams.tensors``)."""
    if kind.quantized == "mxfp8":
        # Codes have the positions of the buffer, padding included.
        return t.N + t.C
    if kind.quantized == "nvfp4":
        return t.C + SLOT_ALIGNMENT * t.n
    return (SLOT_ALIGNMENT + FP8_SCALARS) * t.n + FP32 * t.H * t.n


def _padding_bytes(setup: Setup, kind: BufferKind, t: Terms) -> Amount:
    per_element = kind.grad_bytes + (_param_bytes(setup, kind) if setup.sharded else 0)
    if kind.quantized == "mxfp8":
        per_element += 1  # codes
    if isinstance(t.N, sympy.Expr):
        # Left as a product: how many elements is what one wants to see.
        return sympy.Mul(per_element, t.N - t.P, evaluate=False)
    return per_element * (t.N - t.P)


def _temporaries(setup: Setup, pairs: Sequence[tuple[BufferKind, Terms]]) -> list[Row]:
    small = [(kind, t) for kind, t in pairs if kind.grad_bytes < FP32]
    rows = []
    if setup.reduces_by_all_to_all and small:
        # What arrives, and its fp32 sum; one bucket of each buffer at a time (``AllToAllReduceScatter``).
        amount = sum(kind.grad_bytes * t.B + FP32 * _part(t.B, t.shards) for kind, t in small)
        rows.append(Row("all-to-all", "temporary", amount, "of one reduction"))
    if small:
        rows.append(Row("fp32 gradients", "temporary", sum(FP32 * t.owned for _, t in small), "of the optimizer step"))
    return rows


def _traffic(setup: Setup, pairs: Sequence[tuple[BufferKind, Terms]]) -> list[Row]:
    """Bytes that this rank sends, by the ring algorithm: all but its own part, and twice that for an all-reduce."""
    if not setup.sharded:
        amount = sum(2 * kind.grad_bytes * _others(t.N, t.shards) for kind, t in pairs)
        return [Row("gradient all-reduce", "traffic", amount)]
    rows = [
        Row(
            "gradient reduce-scatter",
            "traffic",
            sum(kind.grad_bytes * _others(t.N, t.shards) for kind, t in pairs),
        )
    ]
    if setup.has_instances:
        amount = sum(2 * kind.grad_bytes * _others(_part(t.N, t.shards), t.instances) for kind, t in pairs)
        rows.append(Row("all-reduce across instances", "traffic", amount))
    amount = sum(_gathered_bytes(kind) * _others(t.N, t.shards) for kind, t in pairs)
    rows.append(Row("parameter all-gather", "traffic", amount))
    if any(kind.quantized in ("fp8", "nvfp4") for kind, _ in pairs):
        # All ranks must find the same scales; across instances, too.
        numbers = [(t, t.A if kind.quantized == "nvfp4" else t.n if kind.quantized else 0) for kind, t in pairs]
        amount = sum(2 * FP32 * (_others(a, t.shards) + _others(a, t.instances)) for t, a in numbers)
        rows.append(Row("amax all-reduce", "traffic", amount, "for scales"))
    return rows


def _bucket_rows(setup: Setup, pairs: Sequence[tuple[BufferKind, Terms]]) -> list[Row]:
    rows = []
    for kind, t in pairs:
        of = f" ({kind.name})" if len(pairs) > 1 else ""
        nbytes = kind.grad_bytes * t.B
        remark = "about: a bucket closes after a whole parameter" if setup.is_cut else "one for the buffer"
        rows.append(Row(f"buckets{of}", "count", t.buckets, remark))
        rows.append(Row(f"largest bucket{of}", "bucket", nbytes, "gradients"))
        if setup.sharded:
            rows.append(Row(f"its shard{of}", "bucket", _part(nbytes, t.shards)))
            rows.append(Row(f"sent for it{of}", "bucket", _others(nbytes, t.shards)))
            amount = kind.grad_bytes * t.buckets * (t.u - 1)
            rows.append(
                Row(f"bucket-end padding{of}", "bucket", amount, "at most, besides 63 elements before a parameter")
            )
    return rows


def _part(amount: Amount, divisor: Amount) -> Amount:
    is_number = isinstance(amount, (int, Fraction)) and isinstance(divisor, (int, Fraction))
    return Fraction(amount, divisor) if is_number else amount / divisor


def _largest(amounts: Sequence[Amount]) -> Amount:
    return sympy.Max(*amounts) if isinstance(amounts[0], sympy.Expr) else max(amounts)


def _others(amount: Amount, ranks: Amount) -> Amount:
    """What does not stay on this rank."""
    return amount * (1 - _part(1, ranks))


def symbolic_terms(setup: Setup) -> tuple[Terms, ...]:
    """Symbols of each buffer; see [Note: what the ledger counts]."""
    is_single = len(setup.buffers) == 1

    def symbol(name: str, suffix: str) -> Amount:
        return sympy.Symbol(f"{name}_{suffix}" if suffix else name, positive=True)

    found = []
    for kind in setup.buffers:
        suffix = "" if is_single else kind.name
        # All dense buffers are reduced over one group, all expert buffers over another.
        d = symbol("d", "experts" if kind.is_expert else "")
        i = symbol("i", "") if setup.has_instances else 1
        shards = d / i
        p = symbol("P", suffix)
        # Ends of packed buckets can have a divisor of their own.
        u = kind.name if kind.quantized == "nvfp4" and not is_single else "experts" if kind.is_expert else ""
        found.append(
            Terms(
                P=p,
                N=symbol("N", suffix),
                owned=p / shards if setup.sharded else p,
                shards=shards,
                instances=i,
                B=symbol("B", suffix),
                M=symbol("M", suffix),
                S=symbol("S", suffix),
                n=symbol("n", suffix),
                C=symbol("C", suffix),
                A=symbol("A", suffix),
                H=symbol("H", ""),
                buckets=sympy.floor(p / symbol("K", "")) if setup.is_cut else sympy.Integer(1),
                u=symbol("u", u),
            )
        )
    return tuple(found)


def fully_sharded_rows(setup: Setup, terms: Sequence[Terms]) -> tuple[Row, ...]:
    """What FSDP (ZeRO-3) holds for as long as training lasts, for comparison: this library does not do that.

    Gradients and parameters are sharded, too; every step gathers parameters twice, for forward and backward.
    """
    pairs = list(zip(setup.buffers, terms))
    return (
        Row("grad_data", "resident", sum(kind.grad_bytes * _part(t.P, t.shards) for kind, t in pairs)),
        Row("param_data", "resident", sum(kind.weight_bytes * _part(t.P, t.shards) for kind, t in pairs)),
        Row("fp32 masters", "resident", sum(FP32 * t.owned for kind, t in pairs if kind.weight_bytes < FP32)),
        Row("Adam moments", "resident", sum(MOMENTS * FP32 * t.owned for _, t in pairs)),
        Row("gradient reduce-scatter", "traffic", sum(kind.grad_bytes * _others(t.P, t.shards) for kind, t in pairs)),
        Row(
            "parameter all-gather", "traffic", sum(2 * kind.weight_bytes * _others(t.P, t.shards) for kind, t in pairs)
        ),
    )


def evaluate(amount: Amount, values: dict[str, int]) -> Fraction:
    """A formula with numbers for its symbols, by name.

    Raises:
        KeyError: a symbol has no value.
    """
    expression = sympy.sympify(amount)
    number = sympy.Rational(expression.subs({symbol: values[symbol.name] for symbol in expression.free_symbols}))
    return Fraction(int(number.p), int(number.q))
