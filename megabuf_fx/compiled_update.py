"""The update of a run in one pass over memory: ``DistributedOptimizer(..., compile_step=True)``.

[Note: one pass]
    read    gradient, master, state
    write   master, state, parameter (the master rounded to its dtype)

One function for each kind of optimizer, compiled once for runs of any length. All that changes from step to step
(learning rate, weight decay, bias corrections, the clipping coefficient) enters as a row of fp32 numbers, which the
host computes in double precision, as torch does for optimizers that are not capturable; so nothing compiles again.

Compiling ``torch.optim``'s own ``step`` does less: it breaks the graph at its beginning and end, so that casts stay
outside; it compiles again for other tensors and other hyper-parameters; and it has bias corrections computed inside the
loop, from fp32 powers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megabuf_fx.runs import Run, flat_view

_NUMBERS = 8
"""Length of a row. Torch takes equal lengths for one and the same and compiles others anew, and a length of one by
itself, so runs are longer."""


class _Rule(Protocol):
    """An optimizer of torch in the form that is compiled."""

    def state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the state that has one value per element."""
        ...

    def numbers(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> list[float]:
        """Count the step, and return what ``update`` reads from its row; at most ``_NUMBERS``."""
        ...

    def flags(self, group: Mapping[str, Any]) -> dict[str, bool]:
        """What is decided when ``update`` is compiled."""
        ...

    @staticmethod
    def update(
        master: Tensor,
        grad: Tensor,
        state: list[Tensor],
        numbers: Tensor,
        coefficient: Tensor,
        param: Tensor | None,
        **flags: bool,
    ) -> None: ...


class _Sgd:
    def state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def numbers(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> list[float]:
        return [float(group["weight_decay"]), float(group["momentum"]), 1 - group["dampening"], -float(group["lr"])]

    def flags(self, group: Mapping[str, Any]) -> dict[str, bool]:
        return {name: bool(group[name]) for name in ("nesterov", "maximize")}

    @staticmethod
    def update(
        master: Tensor,
        grad: Tensor,
        state: list[Tensor],
        numbers: Tensor,
        coefficient: Tensor,
        param: Tensor | None,
        **flags: bool,
    ) -> None:
        decay, momentum, weight, rate = numbers[0], numbers[1], numbers[2], numbers[3]
        direction = _scaled(grad, coefficient, flags) + decay * master
        if state:
            (buffer,) = state
            average = buffer * momentum + weight * direction
            buffer.copy_(average)
            direction = direction + momentum * average if flags["nesterov"] else average
        _store(master, master + rate * direction, param)


class _Adam:
    """Adam and AdamW."""

    def state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def numbers(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> list[float]:
        lr, decay, eps = float(group["lr"]), float(group["weight_decay"]), float(group["eps"])
        beta1, beta2 = (float(beta) for beta in group["betas"])
        step = float(state["step"].add_(1))
        root = math.sqrt(1 - beta2**step)
        decay = 1 - lr * decay if group["decoupled_weight_decay"] else decay
        return [decay, 1 - beta1, beta2, 1 - beta2, root, eps, -lr / (1 - beta1**step)]

    def flags(self, group: Mapping[str, Any]) -> dict[str, bool]:
        return {name: bool(group[name]) for name in ("decoupled_weight_decay", "maximize")}

    @staticmethod
    def update(
        master: Tensor,
        grad: Tensor,
        state: list[Tensor],
        numbers: Tensor,
        coefficient: Tensor,
        param: Tensor | None,
        **flags: bool,
    ) -> None:
        decay, weight1, beta2, weight2 = numbers[0], numbers[1], numbers[2], numbers[3]
        root, eps, rate = numbers[4], numbers[5], numbers[6]
        grad = _scaled(grad, coefficient, flags)
        value: Tensor = master
        if flags["decoupled_weight_decay"]:
            value = master * decay
        else:
            grad = grad + decay * master
        first = state[0] + weight1 * (grad - state[0])
        second = state[1] * beta2 + weight2 * grad * grad
        state[0].copy_(first)
        state[1].copy_(second)
        if len(state) == 3:
            second = torch.maximum(state[2], second)
            state[2].copy_(second)
        _store(master, value + rate * first / (second.sqrt() / root + eps), param)


def _scaled(grad: Tensor, coefficient: Tensor, flags: Mapping[str, bool]) -> Tensor:
    grad = grad.float() * coefficient
    return -grad if flags["maximize"] else grad


def _store(master: Tensor, value: Tensor, param: Tensor | None) -> None:
    master.copy_(value)
    if param is not None:
        param.copy_(value)


_RULES: dict[object, _Rule] = {torch.optim.SGD: _Sgd(), torch.optim.Adam: _Adam(), torch.optim.AdamW: _Adam()}


class CompiledUpdate:
    """Updates runs of the param groups whose optimizer is ``torch.optim.SGD``, ``Adam`` or ``AdamW`` itself.

    ``classes`` and ``groups`` are the inner optimizer's, one for each param group; ``runs`` are all it may meet, or
    what those are cut from. ``compiler`` is a backend of ``torch.compile``.

    Raises:
        ValueError: there is no such group, or one asks for another form of its update, as with ``fused=True``.
    """

    def __init__(
        self, classes: Sequence[object], groups: Sequence[Mapping[str, Any]], runs: Sequence[Run], *, compiler: str
    ) -> None:
        self._rules = [_RULES.get(kind) for kind in classes]
        if not any(self._rules):
            names = ", ".join(dict.fromkeys(getattr(kind, "__name__", str(kind)) for kind in classes))
            raise ValueError(f"compile_step=True is for SGD, Adam and AdamW of torch.optim, not {names}; drop it")
        for rule, group in zip(self._rules, groups):
            for option in ("fused", "capturable", "differentiable") if rule is not None else ():
                if group.get(option):
                    raise ValueError(f"compile_step=True and {option}=True are two forms of the update; drop one")
        self._updates: dict[_Rule, Callable[..., None]] = {
            # A dynamic length: one kernel serves all runs, and what splitting makes of them.
            rule: torch.compile(rule.update, backend=compiler, dynamic=True, options=_options(runs, compiler))
            for rule in self._rules
            if rule is not None
        }
        self._ones: dict[torch.device, Tensor] = {}

    def step(
        self,
        groups: Sequence[Mapping[str, Any]],
        runs: Sequence[Sequence[Run]],
        state: Mapping[Any, dict[str, Any]],
        used: Sequence[bool],
        coefficient: Tensor | None,
    ) -> set[Run]:
        """Update the used runs that have their state, and the parameters of those for which ``writes_params``.

        ``groups`` and ``runs`` have one entry for each param group. ``coefficient`` (0-dim) scales 16-bit gradients.

        Returns:
            The runs that were updated. Torch's optimizer makes the state of the others as it updates them.
        """
        updated: set[Run] = set()
        for rule, group, members in zip(self._rules, groups, runs):
            for run in members if rule is not None else ():
                assert rule is not None
                keys, entries = rule.state_keys(group), state.get(run.master, {})
                values = [entries[key] for key in keys if isinstance(entries.get(key), Tensor)]
                if run.is_used(used) and run.master.numel() > _NUMBERS and len(values) == len(keys):
                    self._update(rule, group, run, values, rule.numbers(group, entries), coefficient)
                    updated.add(run)
        return updated

    def _update(
        self,
        rule: _Rule,
        group: Mapping[str, Any],
        run: Run,
        values: Sequence[Tensor],
        numbers: list[float],
        coefficient: Tensor | None,
    ) -> None:
        device = run.master.device
        numbers = numbers + [0.0] * (_NUMBERS - len(numbers))
        if coefficient is None or run.is_fp32:
            coefficient = self._ones.setdefault(device, torch.ones((), device=device))
        param = run.params[0] if writes_params(run) and not run.is_aliased else None
        self._updates[rule](
            _alone(run.master),
            _alone(run.grad),
            [_alone(value) for value in values],
            torch.tensor(numbers).to(device, non_blocking=True),
            coefficient,
            None if param is None else _alone(param),
            **rule.flags(group),
        )
        if param is not None:
            torch.autograd.graph.increment_version(param)


def _options(runs: Sequence[Run], compiler: str) -> dict[str, Any] | None:
    """Inductor's, for these runs."""
    if compiler != "inductor" or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    has_16_bits = any(tensor.dtype != torch.float32 for run in runs for tensor in (run.grad, *run.params))
    # On the CPU, half a vector of 16-bit values is loaded and stored at a time; by 512 bits that takes a fifth longer.
    return {"cpp.simdlen": 256} if has_16_bits else None


def _alone(tensor: Tensor) -> Tensor:
    """The same memory, 1-D, as a view of nothing: what is compiled depends on what its inputs are views of."""
    return flat_view(tensor).data


def writes_params(run: Run) -> bool:
    """Whether one kernel can write the parameters, too: they lie one after the other, as shards do."""
    return len(run.params) == 1
