"""Dumps for the tests of the command line, and the command itself.

Every dump is one step of one rank among eight (the fake process group: no data moves), so that nothing in it depends on
timing, and the texts made of it can be compared with ``tests/results/cli``.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import train_gpt
from helpers import fresh_compiler
from real_models import MODELS
from torch.testing._internal.distributed.fake_pg import FakeStore

import megabuf_fx as mb
from megabuf_fx.cli import app

RESULTS = Path(__file__).parent / "results" / "cli"
WORLD = 8
TRAIN_GPT = "--inner aot_eager --layers 2 --n-embd 64 --heads 4 --context 16 --batch-size 4"


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def megabuf(*arguments: object) -> Outcome:
    """Run the command line ``megabuf <arguments>``."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        mock.patch.object(sys, "argv", ["megabuf", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            app.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Outcome(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def fake_world(size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def step_of_train_gpt(dump_dir: Path) -> None:
    """Two micro-batches of the main example."""
    with mock.patch.object(sys, "argv", ["train_gpt.py", *TRAIN_GPT.split()]):
        args = train_gpt.parse_args()
    model = train_gpt.make_model(args, train_gpt.World(0, WORLD, torch.device("cpu")))
    with mock.patch.dict("os.environ", MEGABUF_DUMP=str(dump_dir)):
        variant = train_gpt.use_megabuf(model, args)
    windows = torch.arange(4 * 17).view(4, 17) % 256
    with variant.no_sync():
        variant.forward(windows).backward()
    variant.forward(windows).backward()
    variant.finish()


def step_of_hub_model(name: str, dump_dir: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[name].build()
    config = mb.MegabufConfig(
        inner_compiler="aot_eager", num_buckets=4, overlap_param_gather=True, dump_dir=str(dump_dir)
    )
    handle = mb.attach(model, config)
    run = torch.compile(model, backend="megabuf")
    run(**MODELS[name].batch(torch.Generator().manual_seed(0)))["loss"].backward()
    handle.detach()


STEPS: dict[str, Callable[[Path], None]] = {
    "train_gpt": step_of_train_gpt,
    "gpt2": lambda path: step_of_hub_model("GPT-2", path),
    "llama": lambda path: step_of_hub_model("Llama", path),
}


def write_dump(name: str, path: Path) -> Path:
    """Train one step of ``name`` and leave its dump in ``path``."""
    fresh_compiler()
    with fake_world(WORLD):
        STEPS[name](path)
    fresh_compiler()
    renumber(path)
    return path


def renumber(path: Path) -> None:
    """Number graphs from 0: in a process of many tests the numbers go on."""
    folders = sorted(path.glob("rank*/graph*_*/"), key=lambda folder: int(folder.name.split("_")[0][5:]))
    numbers = list(dict.fromkeys(folder.name.split("_")[0] for folder in folders))
    for folder in folders:
        number, _, variant = folder.name.partition("_")
        folder.rename(folder.with_name(f"graph{numbers.index(number)}_{variant}"))


def check_golden(name: str, text: str, *, write: bool) -> None:
    """Compare with ``tests/results/cli/<name>``, or write it (``--write-results``)."""
    path = RESULTS / name
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text, f"{path} differs; look at the change and run with --write-results"
