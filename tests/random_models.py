"""Small random models and training loops, compared with eager training, and shrunk to a script when they differ."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from helpers import batch, fresh_compiler, max_difference, params_of, twin
from torch import Tensor, nn

import megabuf_fx as mb

WIDTH = 6
BOUND = 2e-5

MODES: dict[str, dict[str, Any]] = {
    "sharded": {},
    "sharded_overlap": {"overlap_param_gather": True},
    "plain": {"use_distributed_optimizer": False},
    "plain_dense": {"use_distributed_optimizer": False, "dense_layout": True},
}


@dataclass(frozen=True)
class Spec:
    """One model and one loop, of plain values: it prints, pickles and shrinks."""

    seed: int
    layers: tuple[str, ...]
    """``linear``, ``thin`` (no bias), ``norm``, ``frozen``, ``unused``; ``again`` repeats the layer before the last;
    ``break`` breaks the graph; ``skip`` adds the input of the model."""
    mode: str = "sharded"
    bucket_size: int = 50
    micro_batches: int = 1
    forwards_first: bool = False
    losses: int = 1
    """Backward passes per micro-batch; all but the last keep the graph."""
    penalty: bool = False
    """Whether the loss has an eager penalty on the first weight."""
    late_freeze: bool = False
    """Whether the first trainable layer is frozen after the first step."""
    checkpointed: bool = False
    optimizer: str = "AdamW"


def random_spec(seed: int) -> Spec:
    rng = random.Random(seed)
    kinds = ("linear", "linear", "thin", "norm", "frozen", "unused", "again", "break", "skip")
    layers = ("linear", *rng.choices(kinds, k=rng.randint(1, 6)), "linear")
    return Spec(
        seed=seed,
        layers=layers,
        mode=rng.choice(list(MODES)),
        bucket_size=rng.choice((1, 40, 90, 10_000)),
        micro_batches=rng.randint(1, 3),
        forwards_first=rng.random() < 0.3,
        losses=rng.choice((1, 1, 2)),
        penalty=rng.random() < 0.25,
        late_freeze=rng.random() < 0.2,
        checkpointed=rng.random() < 0.2,
        optimizer=rng.choice(("AdamW", "SGD", "RMSprop")),
    )


class RandomModel(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.order: list[tuple[str, int]] = []
        self.parts = nn.ModuleList()
        for kind in spec.layers:
            if kind in ("linear", "thin", "frozen", "unused"):
                self.parts.append(nn.Linear(WIDTH, WIDTH, bias=kind != "thin"))
                if kind == "frozen":
                    self.parts[-1].requires_grad_(False)
            elif kind == "norm":
                self.parts.append(nn.LayerNorm(WIDTH))
            if kind != "unused":
                self.order.append((kind, max(len(self.parts) - (2 if kind == "again" else 1), 0)))

    def forward(self, x: Tensor) -> Tensor:
        start = x
        for kind, part in self.order:
            if kind == "break":
                torch._dynamo.graph_break()
            elif kind == "skip":
                x = x + start
            else:
                x = torch.tanh(self.parts[part](x))
        return x


def losses_of(output: Tensor, count: int) -> list[Tensor]:
    return [output.square().mean(), output.abs().mean()][:count]


def run_step(spec: Spec, call: Any, model: nn.Module, step: int, rank: int, no_sync: Any) -> None:
    """All micro-batches of one step."""

    def forward(micro: int) -> list[Tensor]:
        x = batch(step, micro, rank, 4, WIDTH)
        if spec.checkpointed:
            x.requires_grad_()
            output = torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False)
        else:
            output = call(x)
        losses = losses_of(output, spec.losses)
        if spec.penalty:
            weight = next(param for param in model.parameters() if param.dim() == 2)
            losses[-1] = losses[-1] + 0.1 * weight.square().sum()
        return losses

    def backward(losses: list[Tensor], is_last: bool) -> None:
        for number, loss in enumerate(losses):
            is_final = is_last and number + 1 == len(losses)
            with contextlib.nullcontext() if is_final else no_sync():
                loss.backward(retain_graph=number + 1 < len(losses))

    count = spec.micro_batches
    if spec.forwards_first:
        waiting = [forward(micro) for micro in range(count)]
        for micro, losses in enumerate(waiting):
            backward(losses, micro + 1 == count)
    else:
        for micro in range(count):
            backward(forward(micro), micro + 1 == count)


def find_problem(spec: Spec, rank: int) -> str | None:
    """What differs from eager training, or None."""
    world = dist.get_world_size()
    torch.manual_seed(spec.seed)
    plain = RandomModel(spec)
    model = twin(plain)
    optimizer_class = getattr(torch.optim, spec.optimizer)
    trainable = [param for param in plain.parameters() if param.requires_grad]
    reference = optimizer_class(trainable, lr=1e-3, weight_decay=0.1)
    config = mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=spec.bucket_size, **MODES[spec.mode])
    buf = mb.attach(model, config)
    call = torch.compile(model, backend="megabuf")
    ours = [param for param in model.parameters() if param.requires_grad]
    optimizer: Any = (
        mb.DistributedOptimizer(ours, optimizer_class, lr=1e-3, weight_decay=0.1)
        if buf.plan.sharded
        else optimizer_class(ours, lr=1e-3, weight_decay=0.1)
    )
    problem = None
    for step in range(3):
        if step == 1 and spec.late_freeze:
            plain.parts[0].requires_grad_(False)
            model.parts[0].requires_grad_(False)  # type: ignore[index, union-attr]
        for r in range(world):
            run_step(spec, plain, plain, step, r, contextlib.nullcontext)
        for param in trainable:
            if param.grad is not None:
                param.grad.div_(world)
        reference.step()
        reference.zero_grad()
        run_step(spec, call, model, step, rank, buf.no_sync)
        optimizer.step()
        optimizer.zero_grad()
        buf.sync_params()
        difference = max_difference(params_of(model), params_of(plain))
        if not difference <= BOUND:
            problem = f"step {step}: parameters differ by {difference}"
            break
    buf.detach()
    return problem


def check_specs(rank: int, specs: list[Spec]) -> list[str | None]:
    """The problem of each spec; an exception counts as one."""
    problems: list[str | None] = []
    for spec in specs:
        try:
            problems.append(find_problem(spec, rank))
        except Exception as error:
            # Recomputation may find another compiled graph than forward did; torch says so and cites its own issue.
            is_known = type(error).__name__ == "CheckpointError" and "issues/166926" in str(error)
            problems.append(None if is_known else f"{type(error).__name__}: {error}")
        fresh_compiler()
    return problems


def simpler(spec: Spec) -> list[Spec]:
    """Specs that are smaller by one thing."""
    fewer = [
        dataclasses.replace(spec, layers=spec.layers[:i] + spec.layers[i + 1 :])
        for i in range(len(spec.layers))
        if len(spec.layers) > 1
    ]
    plain = Spec(spec.seed, spec.layers)
    fields = [f.name for f in dataclasses.fields(Spec) if f.name not in ("seed", "layers")]
    reset = [
        dataclasses.replace(spec, **{name: getattr(plain, name)})
        for name in fields
        if getattr(spec, name) != getattr(plain, name)
    ]
    return reset + fewer


def as_script(spec: Spec, world: int) -> str:
    """A program that shows the problem."""
    return (
        "# run in tests/\n"
        "from helpers import RankGroup\n"
        "from random_models import Spec, check_specs\n"
        'if __name__ == "__main__":\n'
        f"    print(RankGroup({world}).run(check_specs, [{spec!r}]))\n"
    )
