"""Collectives and compiled graphs on the tape: functional ones and our own are replayed, raw ones are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from helpers import Mlp, RankGroup, batch, fresh_compiler, params_of, seeded
from torch import Tensor

import megabuf_fx as mb
from megabuf_fx.runtime.model_buffers import ModelBuffers
from megabuf_fx.tape import Tape, diff

NUMEL = 64


class Shards:
    """A flat parameter, reduce-scattered gradients, and an update of this rank's half."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.param, self.grad, self.x = torch.randn(NUMEL), torch.zeros(NUMEL), torch.zeros(NUMEL)
        self.rank = rank

    def statics(self) -> Mapping[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def shard(self, whole: Tensor) -> Tensor:
        return whole.chunk(2)[self.rank]


Step = Callable[[Shards], None]


def everyone() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def functional(state: Shards) -> None:
    state.grad.copy_(state.x * state.param)
    reduced = funcol.reduce_scatter_tensor(state.grad, "sum", 0, everyone())
    state.shard(state.param).sub_(0.1 * funcol.wait_tensor(reduced))
    state.param.copy_(funcol.wait_tensor(funcol.all_gather_tensor(state.shard(state.param), 0, everyone())))


def functional_waits_by_itself(state: Shards) -> None:
    """Its result is waited for where it is used."""
    total = funcol.all_reduce(state.x * state.param, "sum", everyone())
    state.param.sub_(0.1 * total)


def functional_coalesced(state: Shards) -> None:
    parts = [state.x * 2, state.x[:5] + state.param[:5]]
    first, second = funcol.all_reduce_coalesced(parts, "sum", everyone())
    state.param.sub_(0.01 * first)[:5].add_(second)


def read_before_wait(state: Shards) -> None:
    name = everyone().group_name
    reduced = torch.ops._c10d_functional.all_reduce(state.x, "sum", name)
    state.param.sub_(reduced)
    torch.ops._c10d_functional.wait_tensor(reduced)


def raw(state: Shards) -> None:
    state.grad.copy_(state.x)
    dist.all_reduce(state.grad)
    state.param.sub_(state.grad)


def raw_scatter(state: Shards) -> None:
    state.grad.copy_(state.x)
    dist.reduce_scatter_tensor(state.shard(state.param), state.grad)


def examine(rank: int, step: Step) -> tuple[list[str], str | None, list[bool]]:
    """Violations, the difference of two recordings, and whether each of three replays equals the eager step."""
    recorded, eager = Shards(rank), Shards(rank)
    tapes = []
    for iteration in range(2):
        for state in (eager, recorded):
            state.x.copy_(batch(iteration, 0, rank, NUMEL))
        step(eager)
        tapes.append(Tape(recorded.statics))
        with tapes[-1]:
            step(recorded)
    equal = []
    for iteration in range(2, 5):
        for state in (eager, recorded):
            state.x.copy_(batch(iteration, 0, rank, NUMEL))
        step(eager)
        if not tapes[-1].violations:
            tapes[-1].replay()
        equal.append(all(torch.equal(a, b) for a, b in zip(recorded.statics().values(), eager.statics().values())))
    return [str(violation) for violation in tapes[-1].violations], diff(*tapes), equal


@pytest.mark.dist
@pytest.mark.parametrize("step", [functional, functional_waits_by_itself, functional_coalesced])
def test_functional_collectives_replay_bitwise(ranks: Callable[[int], RankGroup], step: Step) -> None:
    assert ranks(2).run(examine, step) == [([], None, [True] * 3)] * 2


@pytest.mark.dist
@pytest.mark.parametrize(
    ("step", "text"),
    [
        (read_before_wait, "collective: aten::sub_.Tensor reads the result of a collective before its wait"),
        (raw, "collective: c10d::allreduce_ is started by the step itself; call collectives of your own between"),
        (raw_scatter, "collective: c10d::_reduce_scatter_base_ is started by the step itself"),
    ],
)
def test_other_collectives_are_violations(ranks: Callable[[int], RankGroup], step: Step, text: str) -> None:
    for violations, _, _ in ranks(2).run(examine, step):
        assert violations[0].startswith(text), violations


# Our own collectives and compiled graphs; one process, in which they are the same ops.


def attached(
    inner: Any = "aot_eager", *, compiled: bool = True, **options: Any
) -> tuple[Any, mb.MegabufHandle, Any, Any]:
    fresh_compiler()
    model = seeded(Mlp)
    buf = mb.attach(
        model, mb.MegabufConfig(inner_compiler=inner, bucket_size=600, find_unused_parameters=False, **options)
    )
    call = torch.compile(model, backend="megabuf") if compiled else model
    optimizer: Any = (
        mb.DistributedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        if buf.plan.sharded
        else torch.optim.SGD(model.parameters(), lr=0.1)
    )
    return model, buf, call, optimizer


def take_two_steps(call: Any, optimizer: Any, x: Tensor) -> None:
    """After them nothing is compiled or made any more."""
    for _ in range(2):
        call(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def statics_of(model: Any, buf: mb.MegabufHandle, x: Tensor) -> Mapping[str, Tensor]:
    return {"x": x, **dict(model.named_parameters()), **buf.buffers.tensors()}


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager_path"])
@pytest.mark.parametrize("options", [{}, {"overlap_grad_reduce": False}], ids=["overlap", "no_overlap"])
def test_reductions_that_nobody_waits_for(compiled: bool, options: dict[str, Any]) -> None:
    model, buf, call, optimizer = attached(compiled=compiled, **options)
    x = batch(0, 0, 0, 8, 13)
    take_two_steps(call, optimizer, x)
    tape = Tape(lambda: statics_of(model, buf, x))
    with tape:
        call(x).square().mean().backward()
        buf.start_grad_sync()
    groups = range(len(buf.plan.groups))
    remedy = "is not waited for in the step; call buf.finish_grad_sync() at its end"
    assert sorted(violation.message for violation in tape.violations) == [
        f"the gradient reduction of bucket group {group} {remedy}" for group in groups
    ]
    buf.finish_grad_sync()


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager_path"])
def test_uses_of_a_bucket_in_flight(compiled: bool) -> None:
    model, buf, call, optimizer = attached(compiled=compiled)
    x = batch(0, 0, 0, 8, 13)
    take_two_steps(call, optimizer, x)
    last = max(buf.plan.groups[0].params)
    tape = Tape(lambda: statics_of(model, buf, x))
    with tape:
        call(x).square().mean().backward()
        buf.buffers.main_grads[last].mul_(0.5)
        buf.finish_grad_sync()
        buf.buffers.main_grads[last].mul_(0.5)
    (violation,) = tape.violations
    assert violation.message == "aten::mul_.Tensor uses gradients of bucket group 0 in flight"
    assert violation.where.startswith(f"{__file__}:")


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager_path"])
def test_uses_of_parameters_in_flight(compiled: bool) -> None:
    model, buf, call, optimizer = attached(compiled=compiled, overlap_param_gather=True)
    x = batch(0, 0, 0, 8, 13)
    take_two_steps(call, optimizer, x)
    tape = Tape(lambda: statics_of(model, buf, x))
    with tape:
        buf.start_param_sync()
        model.fc1.weight.sum()
        buf.sync_params()
        model.fc1.weight.sum()
        call(x)
    assert [violation.message for violation in tape.violations] == [
        f"aten::sum uses parameters of bucket group {len(buf.plan.groups) - 1} in flight"
    ]
    tape = Tape(lambda: statics_of(model, buf, x))
    optimizer.step()
    with tape:
        buf.start_param_sync()
    assert {violation.message for violation in tape.violations} == {
        f"the parameter gather of bucket group {group} is not waited for in the step; call buf.sync_params() at its end"
        for group in range(len(buf.plan.groups))
    }
    buf.sync_params()


REPLAYED = [
    ("aot_eager", True, {}),
    ("aot_eager", True, {"overlap_param_gather": True}),
    ("aot_eager", True, {"use_distributed_optimizer": False}),
    ("aot_eager", False, {}),
    ("inductor", True, {"overlap_param_gather": True}),
]


@pytest.mark.parametrize(("inner", "compiled", "options"), REPLAYED)
def test_steps_of_compiled_graphs_replay_bitwise(
    inner: str, compiled: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host ops run in the recording and in no replay."""
    calls = {"start_grad_sync": 0, "wait_param_sync": 0}

    def count(name: str, run: Callable[..., None]) -> None:
        def counted(self: ModelBuffers, group: int, **options: bool) -> None:
            calls[name] += 1
            run(self, group, **options)

        monkeypatch.setattr(ModelBuffers, name, counted)

    count("start_grad_sync", ModelBuffers.start_grad_sync)
    count("wait_param_sync", ModelBuffers.wait_param_sync)

    def make() -> tuple[Any, mb.MegabufHandle, Tensor, Callable[[], None]]:
        model, buf, call, optimizer = attached(inner, compiled=compiled, **options)
        x = torch.zeros(8, 13)

        def step() -> None:
            for micro in range(2):
                with buf.no_sync():
                    call(x[4 * micro : 4 * micro + 4]).square().mean().backward()
            call(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, buf, x, step

    results = []
    recorded_calls: dict[str, int] = {}
    for is_replayed in (False, True):
        model, buf, x, step = make()
        tape: Tape | None = None
        for iteration in range(7):
            x.copy_(batch(iteration, 0, 0, 8, 13))
            calls.update(dict.fromkeys(calls, 0))
            if tape is not None:
                tape.replay()
                assert calls == {"start_grad_sync": 0, "wait_param_sync": 0}
            elif is_replayed and iteration == 3:
                tape = Tape(lambda: statics_of(model, buf, x))  # noqa: B023
                with tape:
                    step()
                recorded_calls = dict(calls)
                assert [entry.is_graph for entry in tape.entries].count(True) == (6 if inner == "inductor" else 0)
                assert tape.violations == []
            else:
                step()
        buf.sync_params()
        results.append(params_of(model))
    assert recorded_calls["start_grad_sync"] == len(buf.plan.groups)
    assert recorded_calls["wait_param_sync"] > 0 or not buf.config.overlap_param_gather
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
