"""``runtime/stored_*.py``: what ranks write in pieces is what one rank would make of the whole matrix, bit for bit.

Ranks are simulated: each has an object of its own, the maximum over them is taken between two passes, and a gather is a
copy. The maximum drops NaN, as that of a backend may.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_runs import HISTORY, MARGIN, VARIANTS, DelayedReference, equal, quantized
from torch import Tensor, nn

import megabuf_fx as mb
from megabuf_fx.quantization import store_maker
from megabuf_fx.runtime.buffers import ParamGradBuffer
from megabuf_fx.runtime.layout import ParamSpec
from megabuf_fx.runtime.plan import BucketPlan, plan_buckets
from megabuf_fx.runtime.quantize_fp8 import AmaxAlgorithm, quantize_fp8
from megabuf_fx.runtime.quantized_formats import FORMATS
from megabuf_fx.runtime.shards import ShardRange, compute_shard_ranges
from megabuf_fx.runtime.stored_fp8 import DelayedRecipe, StoredFp8
from megabuf_fx.runtime.stored_params import SLOT_ALIGNMENT, ShardPiece, StoredParams

KINDS = tuple(VARIANTS)
BF16, FP32 = torch.bfloat16, torch.float32


def format_of(kind: str) -> Any:
    return {"delayed": "fp8", "shared": "mxfp8"}.get(kind, kind)


def plan_of(
    kind: str,
    shapes: Sequence[tuple[int, int]],
    *,
    dp: int,
    bucket_size: int | None,
    dtype: torch.dtype = BF16,
    fp32_grads: bool = True,
    busbw: bool = False,
) -> BucketPlan:
    specs = [ParamSpec(f"w{i}", shape, dtype, quantized=format_of(kind)) for i, shape in enumerate(shapes)]
    return plan_buckets(
        specs,
        dp_size=dp,
        sharded=True,
        bucket_size=bucket_size,
        grad_reduce_in_fp32=fp32_grads,
        pad_for_high_busbw=busbw,
    )


def options(kind: str) -> mb.MegabufConfig:
    return mb.MegabufConfig(inner_compiler="aot_eager", **VARIANTS[kind])


class Ranks:
    """``dp`` ranks that share one buffer."""

    def __init__(self, kind: str, plan: BucketPlan) -> None:
        self.kind = kind
        self.plan = plan
        (self.layout,) = plan.layouts
        self.dp = plan.dp_size
        self.without: set[int] = set()
        """Parameters of which nobody has a piece."""
        make = store_maker(options(kind), plan)
        grads = [torch.zeros(self.layout.numel, dtype=self.layout.key.grad_dtype) for _ in range(self.dp)]
        self.stored: list[StoredParams] = [make(self.layout, grad).stored for grad in grads]

    def quantize(self, values: Sequence[Tensor]) -> None:
        for stored in self.stored:
            for index, value in enumerate(values):
                stored.quantize(index, value.to(self.plan.params[index].dtype))

    def pieces(self, rank: int, masters: Sequence[Tensor]) -> list[ShardPiece]:
        return [
            ShardPiece(
                owned.param, owned.param_start, masters[owned.param].view(-1)[owned.param_start :][: owned.numel]
            )
            for owned in compute_shard_ranges(self.layout, dp_size=self.dp, dp_rank=rank)
            if owned.param not in self.without
        ]

    @staticmethod
    def _part(masters: Sequence[Tensor], owned: ShardRange) -> Tensor:
        return masters[owned.param].view(-1)[owned.param_start : owned.param_start + owned.numel]

    def step(self, masters: Sequence[Tensor]) -> None:
        """Every rank writes its shard, then all gather."""
        maximum: list[Tensor] = []

        def collect(amax: Tensor) -> None:
            maximum[:] = [amax.clone() if not maximum else torch.fmax(maximum[0], amax)]
            raise _Interrupted

        pieces = [self.pieces(rank, masters) for rank in range(self.dp)]
        for stored, mine in zip(self.stored, pieces):
            with contextlib.suppress(_Interrupted):
                stored.write_shard(mine, collect)

        def answer(amax: Tensor) -> None:
            amax.copy_(maximum[0])

        for stored, mine in zip(self.stored, pieces):
            stored.write_shard(mine, answer)
        self.gather()

    def gather(self) -> None:
        each = FORMATS[format_of(self.kind)].elements_per_byte
        for bucket, (start, end) in enumerate(self.layout.buckets):
            sent = []
            for rank, stored in enumerate(self.stored):
                size = (end - start) // each // self.dp
                sent.append(stored.param_data[start // each + rank * size :][:size].clone())
            for stored in self.stored:
                stored.param_data[start // each : end // each].copy_(torch.cat(sent))
                stored.copy_out(bucket)

    def check(self, expected: Sequence[Any]) -> None:
        for rank, stored in enumerate(self.stored):
            for index, want in enumerate(expected):
                assert equal(tuple(stored.stored[index]), tuple(want)), f"rank {rank}, parameter {index}"
                value = stored.values(index)
                spec = self.plan.params[index]
                assert (value.shape, value.dtype) == (torch.Size(spec.shape), spec.dtype)
                assert equal([value], [stored.format.dequantize(want, spec.dtype)])


class _Interrupted(Exception):  # noqa: N818
    pass


def matrices(
    shapes: Sequence[tuple[int, int]], seed: int, *, spread: float = 4.0, dtype: torch.dtype = FP32
) -> list[Tensor]:
    """fp32 masters over many magnitudes, with zeros of both signs and subnormals."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape in shapes:
        x = torch.randn(shape, generator=generator) * torch.exp(spread * torch.randn(shape, generator=generator))
        which = torch.rand(shape, generator=generator)
        x[which < 0.02] = -0.0
        x[(which > 0.02) & (which < 0.03)] = 1e-40
        found.append(x.to(dtype))
    return found


SIZES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from([kind for kind in KINDS if kind != "delayed"]),
    sizes=SIZES,
    dp=st.integers(1, 9),
    bucket_size=st.sampled_from([None, 1, 1000, 3000]),
    dtype=st.sampled_from([BF16, FP32]),
    seed=st.integers(0, 1000),
)
def test_shards_of_any_ranks_give_the_codes_of_the_whole(
    kind: str, sizes: list[tuple[int, int]], dp: int, bucket_size: int | None, dtype: torch.dtype, seed: int
) -> None:
    rows, columns = FORMATS[format_of(kind)].divisors
    # Odd sizes where the format allows them.
    shapes = [(r * rows, c * columns) if kind != "fp8" else (7 * r, 13 * c) for r, c in sizes]
    ranks = Ranks(kind, plan_of(kind, shapes, dp=dp, bucket_size=bucket_size, dtype=dtype))
    ranks.quantize(matrices(shapes, seed + 1))
    for step in range(2):
        masters = matrices(shapes, seed + step, spread=1.0 + 3 * step)
        ranks.step(masters)
        ranks.check([quantized(kind, master.to(dtype)) for master in masters])


@pytest.mark.parametrize("kind", KINDS)
def test_quantize_is_the_whole_matrix_at_once(kind: str) -> None:
    """And needs nobody else."""
    shapes = [(32, 64), (16, 32), (48, 96)]
    ranks = Ranks(kind, plan_of(kind, shapes, dp=3, bucket_size=1000))
    values = matrices(shapes, 5, dtype=BF16)
    ranks.quantize(values)
    if kind == "delayed":
        expected = [quantize_fp8(value, DelayedReference(value.float()).scale) for value in values]
    else:
        expected = [quantized(kind, value) for value in values]
    ranks.check(expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3.4e38])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "delayed"])
def test_values_that_are_not_finite_in_one_piece(kind: str, bad: float) -> None:
    """3.4e38 is finite in fp32 and infinite in bf16."""
    shapes = [(32, 64), (64, 64)]
    for position in (0, 33 * 64 + 5, -1):
        ranks = Ranks(kind, plan_of(kind, shapes, dp=4, bucket_size=None))
        masters = matrices(shapes, 1, spread=1.0)
        ranks.quantize(masters)
        masters[1].view(-1)[position] = bad
        ranks.step(masters)
        ranks.check([quantized(kind, master.bfloat16()) for master in masters])
        is_bad = ranks.stored[0].values(1).isfinite().logical_not()
        if kind != "fp8" or torch.tensor(bad).isnan():
            assert is_bad.view(-1)[position]
        assert not ranks.stored[0].values(0).isfinite().logical_not().any()
        # What is finite afterwards is found again.
        masters = matrices(shapes, 2)
        ranks.step(masters)
        ranks.check([quantized(kind, master.bfloat16()) for master in masters])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if format_of(kind) != "mxfp8"])
def test_what_nobody_has_a_piece_of_stays(kind: str) -> None:
    """MXFP8 gathers values; there whoever writes sends those of all parameters (``test_quantized_training.py``)."""
    shapes = [(32, 64), (32, 32), (16, 64)]
    ranks = Ranks(kind, plan_of(kind, shapes, dp=3, bucket_size=2000))
    first = matrices(shapes, 1, dtype=BF16)
    ranks.quantize(first)
    # A delayed scale has moved on after this, but not for what is stored.
    ranks.step([4 * master for master in matrices(shapes, 11)])
    ranks.without.add(1)
    before = [tensor.clone() for tensor in ranks.stored[0].stored[1]]
    state = {name: value.clone() for name, value in ranks.stored[0].scaling_state(1).items()}
    for step in range(3):
        masters = matrices(shapes, 2 + step)
        ranks.step(masters)
    for stored in ranks.stored:
        assert equal(tuple(stored.stored[1]), before)
        assert not equal(tuple(stored.stored[0]), tuple(quantized(kind, first[0])))
        for name, value in state.items():
            assert torch.equal(stored.scaling_state(1)[name], value), name
    ranks.without.clear()
    masters = matrices(shapes, 9)
    ranks.step(masters)
    if kind != "delayed":
        ranks.check([quantized(kind, master.bfloat16()) for master in masters])


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_with_empty_shards(kind: str) -> None:
    """One small parameter: its bucket is padded, and only the first of many ranks own anything."""
    shapes = [(16, 32)]
    ranks = Ranks(kind, plan_of(kind, shapes, dp=8, bucket_size=None, busbw=True))
    masters = matrices(shapes, 3)
    assert [len(ranks.pieces(rank, masters)) for rank in range(8)] == [1] + [0] * 7
    ranks.quantize(masters)
    reference = DelayedReference(masters[0].bfloat16().float())
    for step in range(2):
        masters = matrices(shapes, 4 + step)
        ranks.step(masters)
        values = masters[0].bfloat16()
        ranks.check([reference.step(values) if kind == "delayed" else quantized(kind, values)])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "delayed"])
def test_parameters_that_are_all_zero(kind: str) -> None:
    """Any scale does; the values are zeros, and what follows is exact again."""
    shapes = [(32, 64), (32, 32)]
    ranks = Ranks(kind, plan_of(kind, shapes, dp=2, bucket_size=None))
    first = matrices(shapes, 1)
    ranks.quantize(first)
    ranks.step([torch.zeros(shapes[0]), first[1]])
    for stored in ranks.stored:
        assert stored.values(0).count_nonzero() == 0
        assert equal(tuple(stored.stored[1]), tuple(quantized(kind, first[1].bfloat16())))
    ranks.step(first)
    ranks.check([quantized(kind, master.bfloat16()) for master in first])


# Delayed scaling


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    window=st.integers(1, 4),
    margin=st.integers(0, 2),
    algorithm=st.sampled_from(AmaxAlgorithm),
    dp=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_delayed_scales(window: int, margin: int, algorithm: AmaxAlgorithm, dp: int, seed: int) -> None:
    """Each step uses the amax of earlier ones, over all ranks; a value above them saturates."""
    shapes = [(13, 21), (32, 64)]
    plan = plan_of("delayed", shapes, dp=dp, bucket_size=500)
    ranks = Ranks("delayed", plan)
    recipe = DelayedRecipe(window, algorithm, margin)
    ranks.stored = [
        StoredFp8(ranks.layout, plan.params, device=torch.device("cpu"), compiler=lambda f: f, delayed=recipe)
        for _ in range(dp)
    ]
    first = matrices(shapes, seed, dtype=BF16)
    ranks.quantize(first)
    amaxes = [[float(value.float().abs().max())] for value in first]
    for step in range(6):
        masters = [m * 2.0**shift for m, shift in zip(matrices(shapes, seed + step + 1, spread=1.0), (step, -step))]
        ranks.step(masters)
        expected = []
        for history, master in zip(amaxes, masters):
            amax = max(history[-window:]) if algorithm is AmaxAlgorithm.MAX else history[-1]
            scale = torch.tensor(448.0 / 2**margin / amax, dtype=torch.float64).float()
            expected.append(quantize_fp8(master.bfloat16(), scale))
            history.append(float(master.bfloat16().float().abs().max()))
        ranks.check(expected)


def test_the_recipe_of_the_config_is_used() -> None:
    stored = Ranks("delayed", plan_of("delayed", [(16, 16)], dp=1, bucket_size=None)).stored[0]
    stored.quantize(0, torch.full((16, 16), 7.0, dtype=BF16))
    state = stored.scaling_state(0)
    assert state["amax_history"].shape == (HISTORY,)
    assert state["scale"] == state["used_scale"] == 448 / 2**MARGIN / 7
    assert stored.stored[0].scale_inv == torch.tensor(7 / (448 / 2**MARGIN))


# Storage


def buffer_of(kind: str, plan: BucketPlan) -> ParamGradBuffer:
    params = [nn.Parameter(torch.zeros(spec.shape, dtype=spec.dtype)) for spec in plan.params]
    (layout,) = plan.layouts
    return ParamGradBuffer(
        layout, params, device=torch.device("cpu"), sharded=True, make_store=store_maker(options(kind), plan)
    )


WORKED = ((64, 64), (96, 32), (32, 32))
"""W0, W1 and W2 of the worked example in reference/quantized_buffers_and_capture.md, section 3.4."""


def bytes_of(view: Tensor, base: Tensor) -> tuple[int, int]:
    start = view.data_ptr() - base.data_ptr()
    return start, start + view.nbytes


def both(function: Callable[[int, int], Tensor], base: Tensor) -> list[tuple[int, int]]:
    """Bucket 0 on rank 0 and rank 1, then bucket 1."""
    return [bytes_of(function(bucket, rank), base) for bucket in (0, 1) for rank in (0, 1)]


@pytest.mark.parametrize("fp32_grads", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_the_worked_example(kind: str, fp32_grads: bool) -> None:
    """dp=2, bucket_size=4000: W2, W1 | W0."""
    plan = plan_of(kind, WORKED, dp=2, bucket_size=4000, fp32_grads=fp32_grads)
    (layout,) = plan.layouts
    assert layout.buckets == ((0, 4096), (4096, 8192))
    assert [(slot.start, slot.end, slot.bucket) for slot in layout.slots] == [
        (4096, 8192, 1),
        (1024, 4096, 0),
        (0, 1024, 0),
    ]
    buffer = buffer_of(kind, plan)
    size = 4 if fp32_grads else 2
    grad = buffer.grad_data
    assert (grad.numel(), grad.nbytes) == (8192, 8192 * size)
    grads = both(lambda bucket, rank: buffer.grad_shard(bucket, dp_size=2, dp_rank=rank), grad)
    assert grads == [(size * a, size * (a + 2048)) for a in (0, 2048, 4096, 6144)]
    assert [bytes_of(buffer.main_grads[index], grad) for index in (2, 1, 0)] == [
        (0, 1024 * size),
        (1024 * size, 4096 * size),
        (4096 * size, 8192 * size),
    ]
    data = buffer.param_data
    assert data is not None
    gathered = both(lambda bucket, rank: buffer.param_shard(bucket, dp_size=2, dp_rank=rank), data)
    cleared = [bytes_of(buffer.param_bucket(bucket), data) for bucket in (0, 1)]
    if format_of(kind) == "mxfp8":
        # Whatever the gradients' dtype: two bytes per element.
        assert gathered == [(0, 4096), (4096, 8192), (8192, 12288), (12288, 16384)]
        assert cleared == [(0, 8192), (8192, 16384)]
        assert data.dtype == BF16
        assert (data.data_ptr() == grad.data_ptr()) == (kind == "shared")
        if kind == "shared":
            data[4096:8192] = 1
            touched = [index for index in range(3) if buffer.main_grads[index].count_nonzero()]
            # With fp32 gradients the parameters of bucket 1 lie on elements [2048, 4096), which are W1's of bucket 0.
            assert touched == ([1] if fp32_grads else [0])
            assert grad.count_nonzero() == (2048 if fp32_grads else 4096)
    elif kind == "nvfp4":
        assert gathered == [(0, 1024), (1024, 2048), (2048, 3072), (3072, 4096)]
        assert cleared == [(0, 2048), (2048, 4096)]
        codes = [bytes_of(buffer.stored.stored[i].codes, data) for i in (2, 1, 0)] if buffer.stored else []
        assert codes == [(0, 512), (512, 2048), (2048, 4096)]
    else:
        assert gathered == [(0, 2048), (2048, 4096), (4096, 6144), (6144, 8192)]
        assert cleared == [(0, 4096), (4096, 8192)]
        codes = [bytes_of(buffer.stored.stored[i].codes, data) for i in (2, 1, 0)] if buffer.stored else []
        assert codes == [(0, 1024), (1024, 4096), (4096, 8192)]


ELSEWHERE = {
    "fp8": {"scale_inv": 3 * 16, "scale": 3 * 4, "amax_history": 3 * 4, "amax": 3 * 4, "used_scale": 3 * 4},
    "delayed": {
        "scale_inv": 3 * 16,
        "scale": 3 * 4,
        "amax_history": HISTORY * 3 * 4,
        "amax": 3 * 4,
        "used_scale": 3 * 4,
    },
    "mxfp8": {"codes": 8192, "scales": 8192 // 32},
    "shared": {"codes": 8192, "scales": 8192 // 32},
    "nvfp4": {"block_scales": 16 + 16 + 16, "tensor_scales": 3 * 16},
}
"""Bytes besides ``grad_data`` and ``param_data`` of the worked example. NVFP4 has 16, 12 and 4 tiles."""

GATHERED = {"fp8": 8192, "delayed": 8192, "mxfp8": 16384, "shared": 0, "nvfp4": 4096}
"""Bytes of ``param_data`` where it is no part of ``grad_data``."""


@pytest.mark.parametrize("fp32_grads", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_storage(kind: str, fp32_grads: bool) -> None:
    """What is allocated, storage by storage, is the table of the reference and nothing else."""
    buffer = buffer_of(kind, plan_of(kind, WORKED, dp=2, bucket_size=4000, fp32_grads=fp32_grads))
    assert buffer.stored is not None
    assert buffer.param_data is not None
    others = {name: tensor.untyped_storage().nbytes() for name, tensor in buffer.stored.tensors().items()}
    assert others == ELSEWHERE[kind]
    named = [buffer.grad_data, buffer.param_data, *buffer.stored.tensors().values()]
    named += [tensor for stored in buffer.stored.stored.values() for tensor in stored]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in named}
    grads = 8192 * (4 if fp32_grads else 2)
    assert sum(storages.values()) == grads + GATHERED[kind] + sum(ELSEWHERE[kind].values())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(KINDS),
    sizes=SIZES,
    dp=st.integers(1, 9),
    bucket_size=st.sampled_from([None, 1, 1000]),
    fp32_grads=st.booleans(),
)
def test_what_enters_a_graph_is_aligned(
    kind: str, sizes: list[tuple[int, int]], dp: int, bucket_size: int | None, fp32_grads: bool
) -> None:
    """To 16 bytes, of any shapes; tensors of different parameters share no byte."""
    rows, columns = FORMATS[format_of(kind)].divisors
    shapes = [(r * rows, c * columns) for r, c in sizes]
    buffer = buffer_of(kind, plan_of(kind, shapes, dp=dp, bucket_size=bucket_size, fp32_grads=fp32_grads))
    assert buffer.stored is not None
    spans: list[tuple[int, int]] = []
    for index, stored in buffer.stored.stored.items():
        for tensor in (*stored, buffer.main_grads[index]):
            assert tensor.data_ptr() % SLOT_ALIGNMENT == 0
            assert tensor.is_contiguous()
            spans.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_one_buffer_has_one_format_and_dtype() -> None:
    plan = plan_of("fp8", [(16, 16), (16, 16)], dp=1, bucket_size=None)
    mixed = [plan.params[0], ParamSpec("other", (16, 16), FP32, quantized="fp8")]
    with pytest.raises(ValueError, match="one buffer stores parameters of one format and dtype"):
        StoredFp8(plan.layouts[0], mixed, device=torch.device("cpu"), compiler=lambda function: function)


# Poison


@pytest.mark.parametrize("kind", KINDS)
def test_poison_shows_until_the_gather(kind: str) -> None:
    shapes = [(32, 64), (32, 32), (16, 64)]
    plan = plan_of(kind, shapes, dp=2, bucket_size=2000)
    buffer = buffer_of(kind, plan)
    stored = buffer.stored
    assert stored is not None
    values = matrices(shapes, 1, dtype=BF16)
    for index, value in enumerate(values):
        stored.quantize(index, value)
        if format_of(kind) == "mxfp8" and buffer.param_data is not None:
            slot = stored.slots[index]
            buffer.param_data[slot.start : slot.end].copy_(value.view(-1))
    before = {index: [tensor.clone() for tensor in tensors] for index, tensors in stored.stored.items()}
    assert buffer.param_data is not None
    gathered = buffer.param_data.clone()
    for bucket in range(len(plan.layouts[0].buckets)):
        buffer.poison(bucket, dp_size=2, dp_rank=0)
    is_nan = [stored.values(index).isnan().float().mean().item() for index in range(3)]
    # fp8 codes have a NaN, and this rank's own stay: half of the first and all of the last.
    assert is_nan == ([0.5, 1.0, 0.0] if format_of(kind) == "fp8" else [1.0] * 3)
    for bucket in range(len(plan.layouts[0].buckets)):
        own = buffer.param_shard(bucket, dp_size=2, dp_rank=0)
        start, end = bytes_of(own, buffer.param_data)
        # This rank's part is what it will send.
        assert equal([own], [gathered.view(torch.uint8)[start:end].view(own.dtype)])
    buffer.param_data.copy_(gathered)
    for bucket in range(len(plan.layouts[0].buckets)):
        stored.copy_out(bucket)
    for index, tensors in before.items():
        assert equal(tuple(stored.stored[index]), tensors)
