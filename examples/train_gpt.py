"""Train a small GPT on the sources of Python's standard library, byte by byte, with megabuf_fx.

    torchrun --nproc-per-node 2 examples/train_gpt.py                  # gloo on CPUs; NCCL where every rank has a GPU
    python examples/train_gpt.py                                       # one process, the same buffers
    torchrun --nproc-per-node 2 examples/train_gpt.py --backend ddp    # the same work without megabuf_fx

What you will see, in two to three minutes on two CPU cores: a progress bar, which stands still while the first step
compiles, for a minute or so; after that step the table of buckets, with the node of the backward graph that
triggers each bucket's collective; then the loss falling from 5.8 nats per byte. At the end come the loss on text held
out from training, next to what guessing from byte frequencies alone would score; a picture of the losses
(runs/train_gpt/loss.png) and the numbers behind it (log.json); and the check: plain DistributedDataParallel and AdamW
train the first steps again, and the example fails if the losses of the two differ.

The lines to copy into a program of your own are in `use_megabuf` and `train`.
"""

import argparse
import contextlib
import gc
import json
import math
import os
import sysconfig
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

import megabuf_fx as mb

VOCAB = 256  # bytes
PACKAGES = ("asyncio", "concurrent", "email", "http", "importlib", "json", "logging", "urllib", "xml")
HELD_OUT = 0.05  # the fraction of the text, at its end, that is never trained on
VALIDATION_WINDOWS = 512
TOLERANCE = 1e-4  # nats per byte; with the default options 9e-6 was measured
QUANTIZED: dict[str, dict[str, Any]] = {  # how --precision keeps the weights of linear layers
    "fp8": {"fp8_param_gather": True},
    "mxfp8": {"fp8_param_gather": True, "fp8_recipe": "mxfp8", "reuse_grad_buf_for_mxfp8_param_ag": True},
    "nvfp4": {"fp4_param_gather": True},
}
QUANTIZED_TOLERANCE = 0.05  # of plain DDP's loss in bf16


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    context: int
    layers: int
    n_embd: int
    heads: int


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        n = config.n_embd
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(n)
        # No bias: a key's bias shifts all scores of a query alike, so softmax drops it, and AdamW would turn the
        # rounding noise left as its gradient into steps of full size, different in every program.
        self.query = nn.Linear(n, n, bias=False)
        self.key = nn.Linear(n, n, bias=False)
        self.value = nn.Linear(n, n, bias=False)
        self.attention_out = nn.Linear(n, n)
        self.norm2 = nn.LayerNorm(n)
        self.mlp_in = nn.Linear(n, 4 * n)
        self.mlp_out = nn.Linear(4 * n, n)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.attention_out(h)
        out: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.norm2(x))))
        return out


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, config.n_embd)
        self.position = nn.Embedding(config.context, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, VOCAB, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:  # GPT-2's initialization
                is_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.layers) if is_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, window: Tensor) -> Tensor:
        """Mean cross entropy, in nats, of each next byte; window: `[batch, context + 1]`, int64."""
        inputs, targets = window[:, :-1], window[:, 1:]
        x = self.token(inputs) + self.position.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device

    def mean(self, x: Tensor) -> Tensor:
        """The mean of x over all ranks."""
        if self.size > 1:
            dist.all_reduce(x)
        return x / self.size


@dataclass(frozen=True)
class Text:
    train: Tensor  # [bytes], uint8
    held_out: Tensor  # [bytes], uint8

    def batch(self, args: argparse.Namespace, *where: int) -> Tensor:
        """Random windows `[batch_size, context + 1]`: a function of the seed and of (step, micro-batch, rank)."""
        generator = torch.Generator().manual_seed(zlib.crc32(repr((args.seed, *where)).encode()))
        starts = torch.randint(len(self.train) - args.context, (args.batch_size, 1), generator=generator)
        return self.train[starts + torch.arange(args.context + 1)].long()

    def validation_batches(self, args: argparse.Namespace, world: World) -> tuple[Tensor, ...]:
        """This rank's share of the windows that are spread evenly over the held-out text."""
        starts = torch.linspace(0, len(self.held_out) - args.context - 1, VALIDATION_WINDOWS).long()
        windows = self.held_out[starts[world.rank :: world.size, None] + torch.arange(args.context + 1)].long()
        return torch.split(windows, args.batch_size)

    def unigram_loss(self) -> float:
        """Nats per byte of the held-out text, guessed from the byte frequencies of the training text."""
        counts = torch.bincount(self.train.int(), minlength=VOCAB).double() + 1  # no byte is impossible
        return float(-(counts / counts.sum()).log()[self.held_out.long()].mean())


def read_text() -> Text:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.glob("*.py")) + [f for package in PACKAGES for f in sorted((root / package).rglob("*.py"))]
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    end = int(len(text) * (1 - HELD_OUT))
    return Text(text[:end], text[end:])


@dataclass(frozen=True, kw_only=True)
class Variant:
    """All that differs between megabuf_fx and DistributedDataParallel; `train` does not know which of them it runs."""

    forward: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    no_sync: Callable[[], AbstractContextManager[None]]
    clip_grad_norm: Callable[[float], Tensor]
    bucket_table: Callable[[], str]
    finish: Callable[[], None]
    can_capture: bool = False


def make_model(args: argparse.Namespace, world: World) -> GPT:
    torch.manual_seed(args.seed)  # the same weights on every rank
    model = GPT(GPTConfig(context=args.context, layers=args.layers, n_embd=args.n_embd, heads=args.heads))
    return model.to(world.device, torch.float32 if args.precision == "fp32" else torch.bfloat16)


def make_param_groups(model: GPT, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Weight decay for matrices and embeddings, none for biases and norms."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def use_megabuf(model: GPT, args: argparse.Namespace) -> Variant:
    config = mb.MegabufConfig(
        grad_reduce_in_fp32=True,
        overlap_param_gather=args.overlap_param_gather,
        bucket_size=args.bucket_size or sum(p.numel() for p in model.parameters()) // 7,
        inner_compiler=args.inner,
        **QUANTIZED.get(args.precision, {}),
    )
    buf = mb.attach(model, config)
    groups = make_param_groups(model, args)
    optimizer = mb.DistributedOptimizer(groups, torch.optim.AdamW, lr=args.lr, betas=(0.9, 0.95), fused=True)

    def finish() -> None:
        buf.sync_params()  # wait for the weights that other ranks updated in the last step
        buf.detach()

    return Variant(
        forward=torch.compile(model, backend="megabuf") if args.compile else model,
        optimizer=optimizer,
        no_sync=buf.no_sync,
        clip_grad_norm=optimizer.clip_grad_norm_,
        bucket_table=buf.bucket_table,
        finish=finish,
        can_capture=True,
    )


def use_ddp(model: GPT, args: argparse.Namespace, world: World) -> Variant:
    ddp = DistributedDataParallel(model) if world.size > 1 else None
    groups = make_param_groups(model, args)
    return Variant(
        forward=ddp or model,
        optimizer=torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True),
        no_sync=ddp.no_sync if ddp else contextlib.nullcontext,
        clip_grad_norm=lambda max_norm: nn.utils.clip_grad_norm_(model.parameters(), max_norm),
        bucket_table=lambda: "",
        finish=lambda: None,
    )


def lr_factor(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up to 1, then half a cosine down to min_lr / lr."""
    if step < args.warmup:
        return float((step + 1) / (args.warmup + 1))
    progress = min(1.0, (step - args.warmup) / max(1, args.steps - args.warmup))
    floor = args.min_lr / args.lr
    return float(floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


class Checkpoints:
    """Saves every `--save-every` steps and resumes where `--resume` says; data are a function of the step."""

    def __init__(self, model: GPT, optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> None:
        self.model, self.optimizer, self.every = model, optimizer, args.save_every
        self.root = args.out / "checkpoints"
        self.source = mb.latest_checkpoint(self.root) if args.resume == "auto" else args.resume and Path(args.resume)

    def resume(self) -> list[float]:
        """The losses of the steps that were taken before."""
        if not self.source:
            return []
        loaded = mb.load_checkpoint(self.source, self.model, self.optimizer)
        if "rng" in loaded.rank_state:
            torch.set_rng_state(loaded.rank_state["rng"])
        return [float(loss) for loss in loaded.extra["losses"]]

    def after_step(self, losses: Callable[[], list[float]], step: int) -> None:
        if self.every and (step + 1) % self.every == 0:
            rng = {"rng": torch.get_rng_state()}
            mb.save_checkpoint(
                self.root, step + 1, self.model, self.optimizer, extra={"losses": losses()}, rank_state=rng
            )


def train(
    variant: Variant,
    text: Text,
    args: argparse.Namespace,
    world: World,
    steps: int,
    screen: "Screen",
    checkpoints: Checkpoints | None = None,
) -> list[float]:
    """Train for the given steps; returns the loss of each, a mean over micro-batches and ranks."""
    earlier = checkpoints.resume() if checkpoints else []
    schedule = torch.optim.lr_scheduler.LambdaLR(
        variant.optimizer, lambda step: lr_factor(step, args), last_epoch=len(earlier) - 1
    )
    losses: list[Tensor] = []

    def all_losses() -> list[float]:
        return earlier + ([float(loss) for loss in world.mean(torch.stack(losses))] if losses else [])

    def windows_of(step: int) -> Tensor:
        micros = [text.batch(args, step, micro, world.rank) for micro in range(args.micro_batches)]
        return torch.stack(micros).to(world.device)

    def take_step(windows: Tensor) -> Tensor:
        loss = torch.zeros((), device=world.device)
        for micro, window in enumerate(windows):
            is_last = micro + 1 == args.micro_batches
            with contextlib.nullcontext() if is_last else variant.no_sync():
                micro_loss = variant.forward(window) / args.micro_batches
                micro_loss.backward()
            loss += micro_loss.detach()
        if args.clip > 0:
            variant.clip_grad_norm(args.clip)
        variant.optimizer.step()
        variant.optimizer.zero_grad()
        return loss

    step_fn: Callable[[Tensor], Tensor] = take_step
    if args.capture and variant.can_capture:
        step_fn = mb.capture_step(take_step, windows_of(0), optimizer=variant.optimizer)
    screen.skip(len(earlier))
    for step in range(len(earlier), steps):
        loss = step_fn(windows_of(step))
        schedule.step()
        losses.append(loss)
        screen.show_step(loss)
        if checkpoints:
            checkpoints.after_step(all_losses, step)
        if len(losses) == 1:
            screen.print(variant.bucket_table())
    return all_losses()


@torch.no_grad()
def validate(model: GPT, text: Text, args: argparse.Namespace, world: World) -> float:
    """The loss on the held-out text. Eager: compiling one more graph would take longer than these few batches."""
    model.eval()
    total = torch.zeros((), device=world.device)
    for windows in text.validation_batches(args, world):
        total += model(windows.to(world.device)) * len(windows)
    return float(world.mean(total)) * world.size / VALIDATION_WINDOWS


class Screen:
    """A progress bar and lines of text on rank 0, nothing on the others; without a terminal, a line every 20 steps."""

    def __init__(self, title: str, steps: int, args: argparse.Namespace, world: World) -> None:
        self.console = Console(quiet=world.rank != 0, highlight=False, markup=False)
        columns = BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), "{task.fields[status]}"
        is_hidden = world.rank != 0 or not self.console.is_terminal
        self.bar = Progress("{task.description}", *columns, console=self.console, disable=is_hidden)
        self.task = self.bar.add_task(title, total=steps, status="")
        self.title, self.steps = title, steps
        self.tokens = args.batch_size * args.context * args.micro_batches * world.size  # in a step
        self.step_times: list[float] = []
        self.skipped = 0
        self.last = time.perf_counter()

    def print(self, line: str) -> None:
        if line:
            self.console.print(line, soft_wrap=True)

    def skip(self, steps: int) -> None:
        """Steps that an earlier run has taken."""
        self.skipped = steps
        self.bar.update(self.task, advance=steps)
        if steps:
            self.print(f"resumed after step {steps}")

    def show_step(self, loss: Tensor) -> None:
        value, now = loss.item(), time.perf_counter()  # item() waits for the device, so it comes before the clock
        seconds, self.last = now - self.last, now
        self.step_times.append(seconds)
        done = self.skipped + len(self.step_times)
        status = f"loss {value:.3f}  {self.tokens / seconds:.0f} tokens/s  {1e3 * seconds:.0f} ms/step"
        self.bar.update(self.task, advance=1, status=status)
        if not self.console.is_terminal and (done % 20 == 0 or done in (1, self.steps)):
            self.print(f"{self.title} {done}/{self.steps}  {status}")


def save_picture(path: Path, losses: list[float], validation: float, unigram: float) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, label="training")
    axes.plot([len(losses)], [validation], "o", label=f"held-out text: {validation:.2f}")
    axes.axhline(unigram, color="gray", linestyle="--", label=f"byte frequencies alone: {unigram:.2f}")
    axes.set(xlabel="step", ylabel="nats per byte", title="A small GPT reads Python's standard library")
    axes.legend()
    figure.savefig(path, dpi=120)  # a Figure of its own, without pyplot, draws with Agg and needs no screen


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on Python's standard library with megabuf_fx.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, flag = parser.add_argument, argparse.BooleanOptionalAction
    add("--steps", type=int, default=80, help="optimizer steps")
    add("--batch-size", type=int, default=8, help="windows in a micro-batch, on each rank")
    add("--micro-batches", type=int, default=2, help="backward passes before each optimizer step")
    add("--context", type=int, default=64, help="bytes that the model sees")
    add("--layers", type=int, default=6, help="transformer blocks")
    add("--n-embd", type=int, default=384, help="width of the model")
    add("--heads", type=int, default=6, help="attention heads in a block")
    add("--lr", type=float, default=5e-4, help="peak learning rate")
    add("--min-lr", type=float, default=5e-5, help="learning rate at the end of the cosine")
    add("--warmup", type=int, default=10, help="steps over which the learning rate rises to its peak")
    add("--weight-decay", type=float, default=0.1, help="of matrices and embeddings; biases and norms have none")
    add("--clip", type=float, default=1.0, help="largest gradient norm; 0: no clipping")
    add(
        "--precision",
        choices=("fp32", "bf16", *QUANTIZED),
        default="fp32",
        help="bf16: with fp32 gradients and fp32 masters; the others: bf16 with weights of linear layers quantized",
    )
    add("--bucket-size", type=int, default=None, help="elements in a bucket, at least; None: a seventh of the model")
    add("--inner", choices=("inductor", "aot_eager"), default="inductor", help="what compiles the graphs")
    add("--backend", choices=("megabuf", "ddp"), default="megabuf", help="ddp: eager DistributedDataParallel instead")
    add("--overlap-param-gather", action=flag, default=True, help="gather updated weights during the next forward")
    add("--compile", action=flag, default=True, help="no: autograd hooks fill the buffers, without torch.compile")
    add(
        "--capture", action=flag, default=False, help="replay the step as a CUDA graph; on CPUs, from a tape of its ops"
    )
    add("--seed", type=int, default=0, help="of the weights and of the choice of data")
    add("--out", type=Path, default=Path("runs/train_gpt"), help="directory for loss.png, log.json and checkpoints")
    add("--save-every", type=int, default=0, help="steps between checkpoints, in the directory `checkpoints` of --out")
    add("--resume", default=None, help="a checkpoint, or `auto`: the newest one, if there is one")
    add("--check-steps", type=int, default=20, help="steps to repeat with plain DDP and AdamW; 0: no check")
    args = parser.parse_args()
    if args.steps < 1 or args.micro_batches < 1:
        parser.error("--steps and --micro-batches must be at least 1")
    return args


def start_world() -> World:
    """The process group that torchrun describes, or none for a single process."""
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "WORLD_SIZE" not in os.environ:
        return World(0, 1, device)
    store, rank, size = next(rendezvous("env://"))
    # torchrun can keep one store over restarts; without a prefix of its own a new attempt connects to the dead ranks.
    store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)  # type: ignore[attr-defined]
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    return World(dist.get_rank(), dist.get_world_size(), device)


def run(args: argparse.Namespace, world: World) -> str | None:
    """Train, check and write the results; what to complain of at the end."""
    text, model = read_text(), make_model(args, world)
    log: dict[str, Any] = {"args": vars(args) | {"out": str(args.out)}, "world_size": world.size}

    variant = use_megabuf(model, args) if args.backend == "megabuf" else use_ddp(model, args, world)
    screen = Screen("train", args.steps, args, world)
    numel = sum(p.numel() for p in model.parameters())
    screen.print(f"{numel:,} parameters, {len(text.train):,} bytes of text, {world.size} x {world.device.type}")
    with screen.bar:
        checkpoints = Checkpoints(model, variant.optimizer, args)
        losses = train(variant, text, args, world, args.steps, screen, checkpoints)
    variant.finish()
    validation, unigram = validate(model, text, args, world), text.unigram_loss()
    screen.print(f"held-out text: {validation:.3f} nats per byte; byte frequencies alone: {unigram:.3f} nats per byte")
    log |= {"losses": losses, "step_s": screen.step_times, "validation": validation, "unigram": unigram}

    difference = relative = 0.0
    check_steps = min(args.check_steps, args.steps)
    if check_steps > 0:
        reference_variant = use_ddp(make_model(args, world), args, world)
        screen = Screen("check", check_steps, args, world)
        with screen.bar:
            reference = train(reference_variant, text, args, world, check_steps, screen)
        difference = max(abs(a - b) for a, b in zip(losses, reference))
        # Of the mean: single steps of bf16 training differ by chance.
        relative = abs(sum(losses[:check_steps]) / sum(reference) - 1)
        screen.print(f"largest difference from plain DDP in {check_steps} steps: {difference:.1e} nats per byte")
        log |= {"reference_losses": reference, "largest_difference": difference}

    if world.rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        save_picture(args.out / "loss.png", losses, validation, unigram)
        (args.out / "log.json").write_text(json.dumps(log, indent=1) + "\n")
        screen.print(f"wrote {args.out / 'loss.png'} and {args.out / 'log.json'}")
    if args.precision == "bf16" and check_steps > 0:
        screen.print("not judged: plain DDP keeps bf16 gradients and no fp32 masters, so bf16 losses must differ")
    elif args.precision in QUANTIZED:
        screen.print(f"mean loss of these steps: {relative:.1%} from plain DDP's in bf16")
        if not relative <= QUANTIZED_TOLERANCE:
            return f"the losses differ from plain DDP's in bf16 by {relative:.1%}, more than {QUANTIZED_TOLERANCE:.0%}"
    elif not difference <= TOLERANCE:  # so that NaN fails, too
        return f"the losses differ from plain DDP's by {difference:.1e}, more than {TOLERANCE:.0e}"
    return None


def main() -> None:
    args, world = parse_args(), start_world()
    complaint = run(args, world)
    # DDP must be gone before its process group is: a reducer that is the last to hold it can block in its destructor
    # for ever, holding the interpreter's lock while it joins gloo's thread, which wants that lock (seen on torch 2.13).
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    if complaint:
        raise SystemExit(complaint)


if __name__ == "__main__":
    main()
