"""A model trained through buffers next to its plain twin, for tests that follow recipes from public reports.

The twin is plain eager training by one process on the whole batch: every rank runs all ranks' parts and averages.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from helpers import RankGroup, batch, fresh_compiler, params_of, seeded, twin
from torch import Tensor, nn

import megabuf_fx as mb
from megabuf_fx.runtime import collectives
from megabuf_fx.runtime.shards import shard_bounds
from megabuf_fx.runtime.transports import ExchangeReduceScatter

MODES: dict[str, dict[str, Any]] = {
    "sharded": {},
    "overlap": {"overlap_param_gather": True},
    "plain": {"use_distributed_optimizer": False},
}
INNER: dict[str, Any] = {"inner_compiler": "aot_eager"}
"""What compiles a ``Pair``'s graphs."""

BOUND = 2e-5
"""Largest difference of any parameter after any step."""

Loss = Callable[[Any, int, int, int], Tensor]
"""``loss(model, step, micro, rank)``: the mean loss of one rank's part of one micro-batch."""


class Pair:
    """``model`` with buffers, compiled as ``call``, and ``plain``, each with its optimizer.

    What is wrong is collected in ``problems`` and returned by ``finish``, so that one run tells all of it.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        mode: str,
        *,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        groups: Callable[[Any], Any] = nn.Module.parameters,
        attach: Mapping[str, Any] | None = None,
        compile: Mapping[str, Any] | None = None,
        in_place: bool = False,
        before_attach: Callable[[Any], object] | None = None,
        bound: float = BOUND,
        **defaults: Any,
    ) -> None:
        self.bound = bound
        self.difference = 0.0
        """The largest so far."""
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.plain: Any = seeded(build)
        self.model: Any = twin(self.plain)
        if before_attach is not None:
            before_attach(self.plain)
            before_attach(self.model)
        config = {**INNER, **MODES[mode], **(attach or {})}
        self.buf = mb.attach(self.model, mb.MegabufConfig(**config))
        if in_place:
            self.model.compile(backend="megabuf", **(compile or {}))
        self.call: Any = self.model if in_place else torch.compile(self.model, backend="megabuf", **(compile or {}))
        self.reference = optimizer(groups(self.plain), **defaults)
        self.is_sharded = self.buf.config.use_distributed_optimizer
        self.optimizer: Any = (
            mb.DistributedOptimizer(groups(self.model), optimizer, **defaults)
            if self.is_sharded
            else optimizer(groups(self.model), **defaults)
        )
        self.problems: list[str] = []
        self._unchecked: tuple[int, dict[str, Tensor]] | None = None

    def expect(self, is_right: bool, problem: str) -> None:
        if not is_right:
            self.problems.append(problem)

    def step(self, loss: Loss, step: int, micros: int = 1) -> None:
        """One step of both."""
        self.reference_backward(loss, step, micros)
        self.backward(loss, step, micros)
        self.update(step)

    def reference_backward(self, loss: Loss, step: int, micros: int = 1) -> None:
        for rank in range(self.world):
            for micro in range(micros):
                (loss(self.plain, step, micro, rank) / (micros * self.world)).backward()

    def backward(self, loss: Loss, step: int, micros: int = 1) -> None:
        self.poison()
        for micro in range(micros):
            value = loss(self.call, step, micro, self.rank) / micros
            self.check()
            with self.accumulating(micro + 1 < micros):
                value.backward()

    def accumulating(self, is_on: bool = True) -> contextlib.AbstractContextManager[None]:
        return self.buf.no_sync() if is_on else contextlib.nullcontext()

    def update(self, step: int) -> None:
        """Both optimizers. With the gather overlap parameters are compared only after the next forward, because
        reading them by hand would gather them before the compiled forward has to."""
        for optimizer in (self.reference, self.optimizer):
            optimizer.step()
            optimizer.zero_grad()
        self._unchecked = (step, params_of(self.plain))
        if not self.buf.config.overlap_param_gather:
            self.check()

    def check(self) -> None:
        """Compare what the last ``update`` left unchecked."""
        if self._unchecked is None:
            return
        step, expected = self._unchecked
        self._unchecked = None
        self.buf.sync_params()
        self.compare(params_of(self.model), expected, f"step {step}")

    def forget(self) -> None:
        """Leave the last update unchecked."""
        self._unchecked = None

    def compare(self, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
        self.expect(found.keys() == expected.keys(), f"{what}: names {sorted(found)} are not {sorted(expected)}")
        for name in found.keys() & expected.keys():
            self.expect(found[name].shape == expected[name].shape, f"{what}: shape of {name}")
            if found[name].numel():
                difference = (found[name] - expected[name]).abs().max().item()
                # The first comparison must not swallow a NaN.
                self.difference = self.difference if difference <= self.difference else difference
                self.expect(difference <= self.bound, f"{what}: {name} differs by {difference:.2g}")

    def poison(self) -> None:
        """Nothing may depend on what a slot held before, where ``.grad`` does not say that it holds a gradient."""
        for param in self.model.parameters():
            if hasattr(param, "main_grad") and param.grad is None:
                param.main_grad.fill_(float("nan"))

    def main_grads(self) -> dict[str, Tensor]:
        """The live ``main_grad`` of every parameter that has one."""
        return {name: p.main_grad for name, p in self.model.named_parameters() if hasattr(p, "main_grad")}

    def padding_is_zero(self) -> bool:
        for layout, buffer in zip(self.buf.plan.layouts, self.buf.buffers.buffers):
            is_padding = torch.ones(layout.numel, dtype=torch.bool)
            for slot in layout.slots:
                is_padding[slot.start : slot.end] = False
            for data in (buffer.grad_data, buffer.param_data):
                if data is not None and data[is_padding].count_nonzero():
                    return False
        return True

    def state_elements(self) -> int:
        """Elements for which any rank holds an AdamW moment; without sharding, those of this rank."""
        state = self.optimizer.inner.state if self.is_sharded else self.optimizer.state
        own = torch.tensor(sum(entry["exp_avg"].numel() for entry in state.values() if "exp_avg" in entry))
        if self.is_sharded and self.world > 1:
            dist.all_reduce(own)
        return int(own)

    def finish(self) -> list[str]:
        self.check()
        self.buf.detach()
        return self.problems


def run_cases(cases: Mapping[str, Callable[[], Iterable[str]]]) -> list[str]:
    """What every case finds wrong, each line with the name of its case; an exception is a problem too."""
    problems = []
    for name, case in cases.items():
        try:
            problems += [f"{name}: {problem}" for problem in case()]
        except Exception:
            problems.append(f"{name}: {traceback.format_exc()}")
        fresh_compiler()
    return problems


def under_inductor(rank: int, cases: Callable[[int], list[str]]) -> list[str]:
    """``cases`` with Inductor as the inner compiler."""
    with mock.patch.dict(INNER, inner_compiler="inductor"):
        return cases(rank)


def check_on(world: int, ranks: Callable[[int], RankGroup], cases: Callable[[int], list[str]]) -> None:
    """Run ``cases(rank)`` on ``world`` ranks, in this process when that is one, and fail with what they found."""
    answers = [cases(0)] if world == 1 else ranks(world).run(cases, timeout=120)
    lines = [f"rank {rank}: {problem}" for rank, problems in enumerate(answers) for problem in problems]
    assert not lines, "\n".join(lines)


class Collective(NamedTuple):
    """A call into ``torch.distributed``."""

    name: str
    numel: int
    """Elements of its largest tensor."""


_COLLECTIVE_NAMES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier")


@contextlib.contextmanager
def recorded_collectives() -> Iterator[list[Collective]]:
    """Every collective that is called from Python meanwhile, in order, and every reduce-scatter made of messages.

    Torch's profiler would see them without a patch, but with gloo's threads at work it crashed now and then.
    """
    found: list[Collective] = []

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            sizes = [value.numel() for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            found.append(Collective(function.__name__, max(sizes, default=0)))
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        replaced = {
            function: recording(function) for name, function in vars(dist).items() if name.startswith(_COLLECTIVE_NAMES)
        }
        for module in (dist, collectives):
            for name, value in list(vars(module).items()):
                if callable(value) and value in replaced:
                    stack.enter_context(mock.patch.object(module, name, replaced[value]))
        by_messages = ExchangeReduceScatter.__call__

        def reduce_scatter(own: Any, shard: Tensor, full: Tensor, average: bool) -> Any:
            found.append(Collective("reduce_scatter", full.numel()))
            return by_messages(own, shard, full, average)

        stack.enter_context(mock.patch.object(ExchangeReduceScatter, "__call__", reduce_scatter))
        yield found


def count_reductions(pair: Pair, recorded: Iterable[Collective], steps: int) -> str | None:
    """What is wrong if not every bucket was reduced exactly once in each of the recorded steps."""
    expected = sorted(bucket.numel for group in pair.buf.plan.groups for bucket in group.buckets for _ in range(steps))
    kind = "reduce_scatter" if pair.is_sharded else "all_reduce"
    # Fewer than 64 elements are the flags of used parameters.
    found = sorted(numel for name, numel in recorded if name.startswith(kind) and numel >= 64)
    return None if found == expected else f"reduced buckets of {found} elements, expected {expected}"


def tokens(step: int, micro: int, rank: int, *shape: int, high: int) -> Tensor:
    """Integers in ``[0, high)`` that depend on their place in the run alone."""
    generator = torch.Generator().manual_seed(step * 10007 + micro * 101 + rank + 1)
    return torch.randint(high, shape, generator=generator)


def owned(pair: Pair) -> Iterator[tuple[str, Tensor, slice]]:
    """What this rank owns of each parameter: its name, that part of ``main_grad``, and where in the parameter it is."""
    for index, (number, slot) in enumerate(pair.buf.plan.locations):
        bounds = pair.buf.plan.layouts[number].buckets[slot.bucket]
        start, end = shard_bounds(bounds, pair.world, pair.rank)
        name = pair.buf.plan.params[index].name
        part = slice(max(start, slot.start) - slot.start, max(min(end, slot.end), slot.start) - slot.start)
        yield name, pair.main_grads()[name].flatten()[part], part


class SmallMlp(nn.Module):
    """Two layers, small enough for buckets of a few elements."""

    def __init__(self, width: int = 6, hidden: int = 7, out: int = 3) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc2(torch.tanh(self.fc1(x)))
        return result


def square_loss(model: Any, step: int, micro: int, rank: int) -> Tensor:
    """A loss for ``SmallMlp``."""
    result: Tensor = model(batch(step, micro, rank, 4, 6)).square().mean()
    return result
