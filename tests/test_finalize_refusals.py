"""What ``finalize_model_grads`` refuses: by name, on every rank, before gradients are reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import RankGroup, error_text
from pair import recorded_collectives
from parallel_models import Flagged, Place, attach_in, place, reduced
from torch import nn

import megabuf_fx as mb

Groups = mb.ModelParallelGroups
AVERAGED = "average_gradients_across_tp_domain"


class Uneven(nn.Module):
    """A copy behind a layer of another size on every rank."""

    def __init__(self, before: int, flag: str) -> None:
        super().__init__()
        self.copied = nn.Parameter(torch.zeros(70))
        setattr(self.copied, flag, True)
        self.layer = nn.Parameter(torch.zeros(before))


def cut_differently(rank: int) -> list[Any]:
    """Bucketed together, 70 elements lie elsewhere on the two axis ranks; then with complete gradients."""
    found: list[Any] = []
    for axis, flag in (("tp", "sequence_parallel"), ("pp", "pipeline_parallel")):
        at = place(rank, axis)
        for is_forced in (False, True):
            model = Uneven(3 if rank % 2 else 100, flag)
            handle = mb.attach(model, mb.MegabufConfig(bucket_size=1000), process_group=at.dp)
            handle.force_all_reduce = is_forced
            (sum(param.sum() for param in model.parameters()) * (rank + 1)).backward()  # type: ignore[union-attr]

            def finalize(handle: Any = handle, at: Place = at) -> None:
                mb.finalize_model_grads(handle, groups=at.groups)

            if is_forced:
                finalize()
                found.append(reduced(model.copied, handle))
            else:
                found.append(error_text(finalize))
            handle.detach()
    return found


@pytest.mark.dist
def test_copies_that_shards_cut_differently(ranks: Callable[[int], RankGroup]) -> None:
    for found in ranks(4).run(cut_differently):
        for axis, text, values in (("tp", *found[:2]), ("pp", *found[2:])):
            assert text.startswith("ValueError: gradients of ")
            assert f"data-parallel ranks own other parts of 'copied' (70,) (1,) on rank 0 of {axis} (" in text
            assert "buf.force_all_reduce = True before the backward" in text
            assert values == [5.0]


def averages_and_tokens(rank: int) -> list[str]:
    at = place(rank, "tp")
    model = Flagged()
    handle = attach_in(model, at)
    alone = dist.new_group([rank], use_local_synchronization=True)
    one = torch.tensor(1.0)
    found = [
        error_text(lambda: mb.finalize_model_grads(handle, one, groups=at.groups)),
        error_text(lambda: mb.finalize_model_grads(handle, one, groups=Groups(dp_cp=alone))),
    ]
    handle.detach()
    model.flagged.allreduce = False  # type: ignore[attr-defined]
    handle = mb.attach(model, process_group=at.dp, expert_process_group=at.dp)
    found.append(error_text(lambda: mb.finalize_model_grads(handle, groups=Groups(expert=alone))))
    handle.detach()
    return found


@pytest.mark.dist
def test_groups_are_those_of_attach(ranks: Callable[[int], RankGroup]) -> None:
    for averaged, other_group, other_experts in ranks(4).run(averages_and_tokens):
        assert "attach with calculate_per_token_loss=True" in averaged
        assert "dp_cp has 1 ranks, but gradients are reduced over 2 (attach)" in other_group
        assert "expert has 1 ranks, but experts are reduced over 2 (attach)" in other_experts


def missing_groups(rank: int) -> list[tuple[str, list[Any]]]:
    """For each case the error, and collectives sent meanwhile."""
    at = place(rank, "pp")
    pp, tp = at.groups.pp, dist.group.WORLD
    not_in_it: Any = dist.GroupMember.NON_GROUP_MEMBER
    cases: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = [
        (Flagged("pipeline_parallel"), {}, {}),
        (Flagged("flextron_router_pp_sync"), {"tp": tp}, {}),
        (Flagged("sequence_parallel"), {}, {}),
        (Flagged(AVERAGED), {"pp": pp}, {}),
        (Flagged(), {}, {"sum_over_tp": ("flag*",)}),
        (Flagged("shared_embedding"), {"pp": pp}, {}),
        (Flagged("shared_position_embedding"), {"pp": pp}, {}),
        (Flagged(), {}, {"num_tokens": torch.tensor(1.0)}),
        (Flagged("shared_embedding"), {"pp": pp, "embd": not_in_it}, {}),
        (Flagged(), {}, {}),
    ]
    found = []
    for number, (model, groups, options) in enumerate(cases):
        handle = attach_in(model, at, pipeline_parallel_rank=int(number + 1 == len(cases)))

        def finalize(handle: Any = handle, groups: Any = groups, options: Any = options) -> None:
            mb.finalize_model_grads(handle, groups=Groups(**groups), **options)

        with handle.no_sync():
            model.backward(1.0)  # type: ignore[operator]
        with recorded_collectives() as sent:
            text = error_text(finalize)
        found.append((text, [call for call in sent if call.name != "all_gather_object"]))
        assert all(phase.value == "open" for phase in handle.buffers.reducer.phases)
        handle.detach()
    return found


@pytest.mark.dist
def test_missing_groups_are_named_before_anything_is_reduced(ranks: Callable[[int], RankGroup]) -> None:
    """On all ranks alike; what is sent is only that there is a problem, over the groups that are there."""
    needs = "finalize_model_grads needs ModelParallelGroups("
    expected = [
        "pp=...) for gradients of pipeline_parallel parameters ('flagged')",
        "pp=...) for gradients of flextron_router_pp_sync parameters ('flagged')",
        "tp=...) for gradients of sequence_parallel parameters ('flagged')",
        f"tp=...) for gradients of {AVERAGED} parameters ('flagged')",
        "tp=...) for gradients of sequence_parallel parameters ('flagged')",
        "embd=...) for word embedding gradients ('flagged')",
        "pos_embd=...) for position embedding gradients ('flagged')",
        "dp_cp=...) for num_tokens",
        "this rank is no member of the embd group, which is needed for word embedding gradients ('flagged')",
        "pp=...) for a model attached with pipeline_parallel_rank",
    ]
    for found in ranks(2).run(missing_groups):
        assert [sent for _, sent in found] == [[]] * len(expected)
        for (text, _), line in zip(found, expected):
            assert text == f"ValueError: {line if line.startswith('this') else needs + line}"


def disagreements(rank: int) -> list[str]:
    """Errors that every rank must see, although only one did wrong."""
    at = place(rank, "pp")
    found: list[str] = []

    def refused(model: nn.Module, *, expert: Any = None, **options: Any) -> None:
        handle = attach_in(model, at)
        text = error_text(lambda: mb.finalize_model_grads(handle, groups=at.groups, **options))
        found.append(text)
        handle.detach()

    one_frozen = Flagged("shared_embedding")
    one_frozen.flagged.requires_grad_(rank == 0)
    refused(one_frozen)
    refused(Flagged("pipeline_parallel", "shared_embedding", numel=70 + rank))
    renamed = Flagged()
    if rank == 1:
        renamed.other = renamed.flagged
        del renamed.flagged
    for name in ("flagged", "other"):
        if hasattr(renamed, name):
            getattr(renamed, name).pipeline_parallel = True
    refused(renamed)
    two = Flagged("shared_embedding")
    if rank == 0:
        two.ordinary.shared_embedding = True  # type: ignore[attr-defined]
    refused(two)
    return found


@pytest.mark.dist
def test_ranks_that_disagree(ranks: Callable[[int], RankGroup]) -> None:
    answers = ranks(2).run(disagreements)
    expected = [
        "word embedding gradients are summed over embd, but where rank 0 of it has (70,) (1,), rank 1 has nothing",
        "are summed over pp, but where rank 0 of it has 'flagged' (70,) (1,), rank 1 has 'flagged' (71,) (1,)",
        "but where rank 0 of it has 'flagged' (70,) (1,), rank 1 has 'other' (70,) (1,)",
        "word embedding gradients: one parameter is shared over embd, but found 'ordinary', 'flagged'",
    ]
    for found in answers:
        for text, line in zip(found, expected):
            assert text.startswith("ValueError: ")
            assert line in text, text


def dead_group(rank: int) -> str:
    at = place(rank, "tp")
    model = Flagged("sequence_parallel")
    handle = attach_in(model, at)
    members = dist.new_group([0, 1])
    groups = Groups(tp=members)
    for _ in range(2):
        model.backward(1.0)
        if handle.agreed:
            dist.destroy_process_group(members)
            return error_text(lambda: mb.finalize_model_grads(handle, groups=groups))
        mb.finalize_model_grads(handle, groups=groups)
        handle.zero_grad()
    raise AssertionError


@pytest.mark.dist
def test_a_failing_sum_is_named(ranks: Callable[[int], RankGroup]) -> None:
    for text in ranks(2).run(dead_group):
        assert text.startswith("CollectiveError: gradients of sequence_parallel parameters over tp (2 ranks) failed"), (
            text
        )
    ranks(2).close()


def test_twice_in_a_step_is_refused() -> None:
    model = Flagged()
    handle = mb.attach(model, mb.MegabufConfig())
    for _ in range(2):
        model.backward(1.0)
        mb.finalize_model_grads(handle, groups=Groups())
        text = error_text(lambda: mb.finalize_model_grads(handle, groups=Groups()))
        assert text.startswith("RuntimeError: finalize_model_grads was called twice in one step")
        handle.zero_grad()
    assert "the same model twice" in error_text(lambda: mb.finalize_model_grads([handle, model], groups=Groups()))


def test_published_gradients_are_not_added_to() -> None:
    """Without shards ``.grad`` may be added to, but not after other axes have summed it."""
    model = Flagged()
    handle = mb.attach(model, mb.MegabufConfig(use_distributed_optimizer=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        model.backward(1.0)
        mb.finalize_model_grads(model, groups=Groups())
        optimizer.step()
        assert model.ordinary[0].item() == -0.5 * (step + 1)
        if step == 0:
            # Nobody tells the handle.
            optimizer.zero_grad()
    text = error_text(lambda: model.backward(1.0))
    assert "which was already summed over ranks (finalize_model_grads)" in text
    handle.detach()


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="tp must be a ProcessGroup or a DeviceMesh, got 'tp'"):
        Groups(tp="tp")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="finalize_model_grads takes handles or models, got int"):
        mb.finalize_model_grads([1], groups=Groups())  # type: ignore[list-item]
    part = nn.Linear(2, 2)
    whole = nn.Sequential(part, nn.Linear(2, 2))
    handle = mb.attach(whole)
    with pytest.raises(ValueError, match="Linear shares parameters with an attached model; pass that one"):
        mb.finalize_model_grads(part, groups=Groups())
    with pytest.raises(ValueError, match=r"num_tokens must be one number, got shape \(2,\)"):
        mb.finalize_model_grads(handle, torch.ones(2), groups=Groups())
