"""``megabuf_fx/finalize.py``: each step by itself, in exact numbers: gradients are small integers, so that sums and
averages round nothing. What is refused is in ``test_finalize_refusals.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import RankGroup, error_text
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_models import MODES, Flagged, attach_in, place, reduced
from torch import Tensor, nn

import megabuf_fx as mb
from megabuf_fx.runtime.flags import axis_flags
from megabuf_fx.runtime.layout import LayoutPolicy, ParamSpec, compute_buffer_layout, group_params_for_buffers
from megabuf_fx.runtime.shards import compute_shard_ranges

Groups = mb.ModelParallelGroups


# Two axis ranks, two data-parallel ranks


AVERAGED = "average_gradients_across_tp_domain"
CASES = [
    # Flags, axis, and whether gradients are averaged over it. Shards need a copy alone in its bucket between stages.
    (("pipeline_parallel", "shared_embedding"), "pp", False),
    (("flextron_router_pp_sync", "shared_embedding"), "pp", False),
    (("sequence_parallel",), "tp", False),
    ((AVERAGED,), "tp", True),
    ((AVERAGED, "sequence_parallel"), "tp", True),
    (("shared_embedding",), "pp", False),
    (("shared_position_embedding", "shared_embedding"), "pp", False),
    ((), "tp", False),
]


def each_step(rank: int) -> list[str]:
    """Gradients are ``rank + 1`` on every rank of two axis ranks x two data-parallel ranks."""
    problems = []
    places = {axis: place(rank, axis) for axis in ("tp", "pp")}
    for mode in MODES:
        for flags, axis, is_average in CASES:
            at = places[axis]
            model = Flagged(*flags, dtype=torch.bfloat16 if mode == "promoted" else torch.float32)
            handle = attach_in(model, at, mode)
            model.backward(rank + 1)
            mb.finalize_model_grads(handle, groups=at.groups, sum_over_tp=() if flags else ("flag*",))
            own = rank + 1.0 if mode == "not attached" else float(rank % 2 + 2)
            total = (2 * (rank // 2) * 2 + 3.0) if mode == "not attached" else 5.0
            expected = [own], [total / 2 if is_average else total]
            found = reduced(model.ordinary, handle), reduced(model.flagged, handle)
            if found != expected:
                problems.append(f"{mode} {flags}: {found}, expected {expected}")
            if mode != "not attached":
                handle.detach()
    return problems


@pytest.mark.dist
def test_each_sum_by_itself(ranks: Callable[[int], RankGroup]) -> None:
    problems = [problem for each in ranks(4).run(each_step, timeout=120) for problem in each]
    assert not problems, "\n".join(problems)


def tokens(rank: int, is_attached: bool) -> list[Any]:
    """Two stages of two data-parallel ranks; only what the last stages say counts. Then no tokens at all."""
    at = place(rank, "pp")
    found: list[Any] = []
    for count in (torch.tensor(float(rank)), torch.tensor([rank]), torch.tensor(0)):
        model = Flagged()
        options = {"calculate_per_token_loss": True} if is_attached else {}
        handle = attach_in(model, at, "sharded" if is_attached else "not attached", **options)
        model.backward(rank + 1)
        mb.finalize_model_grads(handle, count, groups=at.groups)
        found += [count.item(), reduced(model.ordinary, handle)]
        if is_attached:
            handle.detach()
    return found


@pytest.mark.dist
def test_tokens(ranks: Callable[[int], RankGroup]) -> None:
    """Ranks 1 and 3 are last stages, so there are 4 tokens."""
    for rank, found in enumerate(ranks(4).run(tokens, True)):
        total = 4.0 + 2 * (rank % 2)
        assert found == [4, [total / 4], 4, [total / 4], 0, [total]]
    for rank, found in enumerate(ranks(4).run(tokens, False)):
        assert found == [4, [(rank + 1) / 4], 4, [(rank + 1) / 4], 0, [rank + 1]]


def unused_here(rank: int, mode: str) -> list[list[float]]:
    """The copy gets a gradient on stage 0 only, in the second step on none. Weights are updated with decay."""
    at = place(rank, "pp")
    model = Flagged("shared_embedding", "pipeline_parallel")
    with torch.no_grad():
        model.flagged.fill_(1.0)
    handle = attach_in(model, at, mode)
    make: Any = mb.DistributedOptimizer if mode == "sharded" else lambda p, kind, **rest: kind(p, **rest)
    optimizer = make(model.parameters(), torch.optim.SGD, lr=0.125, weight_decay=1.0)
    found = []
    for step in range(2):
        uses = rank % 2 == 0 and step == 0
        (model.ordinary.sum() + (model.flagged.sum() if uses else 0)).backward()
        mb.finalize_model_grads(handle, groups=at.groups)
        optimizer.step()
        optimizer.zero_grad()
        found.append(sorted(set(model.flagged.tolist())))
    handle.detach()
    return found


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["sharded", "plain"])
def test_a_copy_that_only_some_stages_use(ranks: Callable[[int], RankGroup], mode: str) -> None:
    """It moves alike everywhere, 1 - 0.125 * (1 + 1), and not at all when nobody uses it."""
    assert ranks(4).run(unused_here, mode) == [[[0.75], [0.75]]] * 4


# Two ranks


def virtual_copies(rank: int) -> list[list[float]]:
    """Two chunks on each of two stages have a copy, with gradients ``rank + 1`` and ``10 * (rank + 1)``."""
    at = place(rank, "pp")
    found = []
    for mode in ("sharded", "plain"):
        chunks = [Flagged("pipeline_parallel", "shared_embedding") for _ in range(2)]
        handles = [attach_in(chunk, at, mode) for chunk in chunks]
        for chunk, factor in zip(chunks, (1, 10)):
            chunk.backward((rank + 1) * factor)
        mb.finalize_model_grads(chunks, groups=at.groups)
        for chunk, handle in zip(chunks, handles):
            found += [reduced(chunk.ordinary, handle), reduced(chunk.flagged, handle)]
            handle.detach()
    return found


@pytest.mark.dist
def test_copies_of_virtual_stages(ranks: Callable[[int], RankGroup]) -> None:
    for rank, found in enumerate(ranks(2).run(virtual_copies)):
        assert found == [[rank + 1], [33], [10 * (rank + 1)], [33]] * 2


class Router(nn.Module):
    """Counts tokens, as Megatron's ``TopKRouter``."""

    expert_bias: Tensor
    local_tokens_per_expert: Tensor

    def __init__(self, counts: Sequence[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("expert_bias", torch.zeros(len(counts)))
        self.register_buffer("local_tokens_per_expert", torch.tensor(counts, dtype=torch.float32))
        self.resets = 0

    def reset_global_aux_loss_tracker(self) -> None:
        self.resets += 1


def biases(rank: int, is_frozen: bool) -> list[Any]:
    """Three routers, one of which is not trained now."""
    routers = [Router([rank, 5, 1]), Router([4, 2]), Router([7, 1])]
    model = nn.Sequential(*routers, nn.Linear(2, 2))
    for param in routers[0].parameters():
        param.requires_grad_(not is_frozen)
    routers[2].eval()
    handle = mb.attach(model)
    finished = []
    original = handle.finish_grad_sync

    def finish_grad_sync(*, force_all_reduce: bool = False) -> None:
        finished.append(1)
        original(force_all_reduce=force_all_reduce)

    handle.finish_grad_sync = finish_grad_sync  # type: ignore[method-assign]
    missing = error_text(
        lambda: mb.finalize_model_grads(
            handle, groups=Groups(dp_cp=dist.group.WORLD), update_expert_bias=mb.bias_by_sign(0.5)
        )
    )
    finished_before = len(finished)
    every = dist.new_group([0, 1])
    sum(param.sum() for param in model.parameters()).backward()  # type: ignore[union-attr]
    mb.finalize_model_grads(handle, groups=Groups(tp_dp_cp=every), update_expert_bias=mb.bias_by_sign(0.5))
    handle.detach()
    return [
        missing,
        finished_before,
        len(finished),
        [router.expert_bias.tolist() for router in routers],
        [router.local_tokens_per_expert.sum().item() for router in routers],
        [router.resets for router in routers],
    ]


@pytest.mark.dist
@pytest.mark.parametrize("is_frozen", [False, True])
def test_expert_bias(ranks: Callable[[int], RankGroup], is_frozen: bool) -> None:
    for missing, before, after, bias, counts, resets in ranks(2).run(biases, is_frozen):
        assert missing == (
            "ValueError: finalize_model_grads needs ModelParallelGroups(tp_dp_cp=...) for update_expert_bias"
        )
        assert (before, after) == (0, 1)
        # On all ranks 1, 10, 2 and 8, 4 tokens.
        assert bias == [[0.5, -0.5, 0.5], [-0.5, 0.5], [0, 0]]
        assert counts == [0, 0, 0]
        assert resets == [1, 1, 1]


def frozen(rank: int) -> list[Any]:
    """Layer norms and embeddings that are frozen on all ranks, before or after ``attach``."""
    found: list[Any] = []
    for flag, axis in (("sequence_parallel", "tp"), ("shared_embedding", "pp")):
        for is_late in (False, True):
            at = place(rank, axis)
            model = Flagged(flag)
            if not is_late:
                model.flagged.requires_grad_(False)
            handle = attach_in(model, at)
            if is_late:
                model.flagged.requires_grad_(False)
            (model.ordinary.sum() * (rank + 1)).backward()
            mb.finalize_model_grads(handle, groups=at.groups)
            found.append((reduced(model.ordinary, handle), model.flagged.grad))
            handle.detach()
    return found


@pytest.mark.dist
def test_frozen_copies(ranks: Callable[[int], RankGroup]) -> None:
    for rank, found in enumerate(ranks(2).run(frozen)):
        assert found == [([rank + 1], None)] * 4


def test_attributes() -> None:
    param = nn.Parameter(torch.zeros(1))
    assert not any(axis_flags(param))
    for name in axis_flags(param)._fields:
        setattr(param, name, 1)
    assert all(axis_flags(param))


@settings(max_examples=60, deadline=None)
@given(
    numel=st.integers(1, 3000),
    before=st.lists(st.integers(1, 500), max_size=5),
    after=st.lists(st.integers(1, 500), max_size=5),
    dp_size=st.sampled_from([1, 2, 3, 4, 7, 8]),
    bucket_size=st.sampled_from([None, 1, 700]),
)
def test_a_shared_embedding_is_cut_alike_everywhere(
    numel: int, before: list[int], after: list[int], dp_size: int, bucket_size: int | None
) -> None:
    """What summing over stages relies on: neighbours do not matter."""

    def parts(first: list[int], last: list[int]) -> list[tuple[int, int]]:
        sizes = [*first, numel, *last]
        specs = tuple(
            ParamSpec(f"p{i}", (n,), torch.float32, shared_embedding=i == len(first)) for i, n in enumerate(sizes)
        )
        (group,) = group_params_for_buffers(specs, grad_reduce_in_fp32=True)
        policy = LayoutPolicy.sharded(dp_size, pad_for_high_busbw=False, packed=False)
        layout = compute_buffer_layout(group, specs, policy=policy, bucket_size=bucket_size)
        return [
            (piece.param_start, piece.numel)
            for rank in range(dp_size)
            for piece in compute_shard_ranges(layout, dp_size=dp_size, dp_rank=rank)
            if piece.param == len(first)
        ]

    assert parts(before, after) == parts([], []) == parts(after, before)
