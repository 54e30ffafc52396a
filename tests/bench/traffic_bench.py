"""Bytes of gradient memory that a micro-batch reads and writes per element, counted from what really runs.

    python tests/bench/traffic_bench.py                    # one process, a small GPT, two minutes

One model is compiled for each mode and its generated code is read: which kernel or op gets a ``main_grad``, whether it
loads, stores or both, and which temporaries of the parameter's size it goes through. What ops allocate inside, and what
the host zeroes, comes from torch's profiler.
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch.profiler import ProfilerActivity, profile

import megabuf_fx as mb

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from train_gpt import GPT, VOCAB, GPTConfig

MODES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""dtype of the parameters; gradients are fp32."""

# [Note: how traffic is counted]
# A kernel or op that loads a tensor reads each of its elements once, one that stores it writes each once: what a kernel
# goes over twice stays in a cache. ``megabuf::accumulate_*`` writes its ``main_grad``, and reads it, too, when it adds.
# A temporary is a tensor of the parameter's size that the compiled backward or an op allocates on the way; activations
# and their gradients are none, which sizes tell apart: the script takes numbers of tokens that no parameter has. Rows
# that a scatter adds one by one (``atomic_add``) depend on the batch and are not counted.


@dataclass
class Traffic:
    """Bytes per element of one parameter's gradient, in one micro-batch."""

    read: float = 0
    written: float = 0
    temporary: float = 0
    """Read and written, of temporaries."""


@dataclass(frozen=True)
class Kernel:
    """What a generated C++ kernel does with each of its arguments."""

    loads: tuple[bool, ...]
    stores: tuple[bool, ...]


_KERNEL = re.compile(r"^(\w+) = async_compile\.cpp_pybinding\(\[.*?\], r?'''(.*?)^'''\)", re.MULTILINE | re.DOTALL)
_EMPTY = re.compile(r"^(\w+) = empty_strided_cpu\((\(.*?\)), (\(.*?\)), torch\.(\w+)\)")
_REUSE = re.compile(r"^(\w+) = (\w+)(?:;|$)")
_VIEW = re.compile(r"^(\w+) = reinterpret_tensor\((\w+),")
_ACCUMULATE = re.compile(r"torch\.ops\.megabuf\.accumulate_\w+\.default\((\w+),.*?(True|False)\)")


def read_kernels(code: str) -> dict[str, Kernel]:
    """The kernels of a generated module, by name."""
    kernels = {}
    for name, source in _KERNEL.findall(code):
        head, body = source.split("{", 1)
        pointers = re.findall(r"\*\s*(\w+)", head[head.index("kernel(") :])
        # Inductor gives an argument that it updates a second name.
        aliases: dict[str, list[str]] = {pointer: [pointer] for pointer in pointers}
        for second, first in re.findall(r"auto (\w+) = (\w+);", body):
            if first in aliases:
                aliases[first].append(second)
        kernels[name] = Kernel(
            tuple(any(_is_loaded(body, each) for each in aliases[pointer]) for pointer in pointers),
            tuple(any(_is_stored(body, each) for each in aliases[pointer]) for pointer in pointers),
        )
    return kernels


def _is_loaded(body: str, pointer: str) -> bool:
    # An element (`= p[...]`), or a vector (`loadu(p + ...)`); an address that is stored to is neither.
    return (
        re.search(rf"(?<!&)\b{pointer}\[[^;]*\](?!\s*=[^=])|loadu\({pointer} \+|load\({pointer} \+", body) is not None
    )


def _is_stored(body: str, pointer: str) -> bool:
    pattern = rf"\b{pointer}\[[^;=]*\] = |store\({pointer} \+|atomic_add\(&{pointer}\[|atomic_add_vec.*\({pointer},"
    return re.search(pattern, body) is not None


def split_arguments(text: str) -> list[str]:
    """Arguments of a call, at the outer commas."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "([") - (sign in ")]")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts if part.strip()]


def count_traffic(code: str, numels: Mapping[int, int]) -> dict[int, Traffic]:
    """Of each parameter's gradient, by index, from the code of one backward. See [Note: how traffic is counted].

    ``numels``: elements of each parameter.

    Raises:
        ValueError: a parameter's ``main_grad`` goes where this cannot follow.
    """
    kernels = read_kernels(code)
    sizes: dict[str, tuple[int, int]] = {}
    """Elements and bytes per element of what the backward allocates, by name."""
    found = {index: Traffic() for index in numels}
    for line in code[code.index("def call(") :].splitlines():
        line = line.strip()
        if line.startswith("return "):
            break
        if match := _EMPTY.match(line):
            sizes[match[1]] = math.prod(json.loads(_as_json(match[2]))), getattr(torch, match[4]).itemsize
        elif (match := _VIEW.match(line) or _REUSE.match(line)) and match[2] in sizes:
            sizes[match[1]] = sizes[match[2]]
        elif match := _ACCUMULATE.search(line):
            traffic = found[_param_of(match[1])]
            traffic.written += 4
            traffic.read += 4 if match[2] == "True" else 0
        elif (name := line.partition("(")[0]) in kernels:
            arguments = split_arguments(line.partition("(")[2].rpartition(")")[0])
            _count_kernel(kernels[name], arguments, numels, sizes, found)
        elif "main_grad_" in line and not _is_harmless(line):
            raise ValueError(f"cannot tell what this does to a gradient: {line}")
    return found


def _as_json(text: str) -> str:
    return text.replace("(", "[").replace(")", "]").replace(", ]", "]").replace(",]", "]")


def _is_harmless(line: str) -> bool:
    return (
        line.startswith(("del ", "assert_", "main_grad_", "primals", "#"))
        or "start_grad_sync" in line
        or (", main_grad_" in line and line.endswith("= args"))
    )


def _param_of(argument: str) -> int:
    return int(argument.removeprefix("main_grad_"))


def _count_kernel(
    kernel: Kernel,
    arguments: Sequence[str],
    numels: Mapping[int, int],
    sizes: Mapping[str, tuple[int, int]],
    found: dict[int, Traffic],
) -> None:
    written: dict[str, tuple[bool, bool]] = {}
    for argument, loads, stores in zip(arguments, kernel.loads, kernel.stores):
        before = written.get(argument, (False, False))
        written[argument] = before[0] or loads, before[1] or stores
    params = [_param_of(argument) for argument in written if argument.startswith("main_grad_")]
    for param in params:
        loads, stores = written[f"main_grad_{param}"]
        found[param].read += 4 * loads
        found[param].written += 4 * stores
        # Parameters of equal size share the kernel's temporaries of that size.
        alike = sum(numels[other] == numels[param] for other in params)
        for argument, (loads, stores) in written.items():
            numel, itemsize = sizes.get(argument, (0, 0))
            if numel == numels[param]:
                found[param].temporary += itemsize * (loads + stores) / alike


@dataclass(frozen=True)
class HostTraffic:
    """What the profiler saw of one step, in bytes."""

    zeroed: int
    """Of gradients, by the host."""
    inside_ops: int
    """Allocated by products while they run; what rows need depends on the batch."""


def watch(function: Callable[[], object], shapes: Sequence[tuple[int, ...]]) -> HostTraffic:
    """Run ``function`` under the profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as recorder:
        function()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recorder.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    ops = [event for event in events if event.get("cat") == "cpu_op"]
    # Rows are added onto zeros: that is how such an op overwrites, and counted as its write.
    overwritten = [(e["ts"], e["ts"] + e["dur"]) for e in ops if e["name"] == "megabuf::accumulate_embedding_"]
    zeroed = sum(
        4 * math.prod(event["args"]["Input Dims"][0])
        for event in ops
        if event["name"] == "aten::zero_"
        and tuple(event["args"]["Input Dims"][0]) in shapes
        and not any(begin <= event["ts"] <= end for begin, end in overwritten)
    )
    allocated = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    times = [time for time, _ in allocated]
    inside = 0
    for event in (event for event in ops if event["name"] == "megabuf::accumulate_wgrad_"):
        begin = bisect.bisect_left(times, event["ts"])
        end = bisect.bisect_right(times, event["ts"] + event["dur"])
        inside += sum(max(nbytes, 0) for _, nbytes in allocated[begin:end])
    return HostTraffic(zeroed, inside)


def kind_of(model: nn.Module, name: str) -> str:
    module = model.get_submodule(name.rpartition(".")[0])
    if isinstance(module, nn.Embedding):
        return f"{name}, embedding"
    return "matrices" if model.get_parameter(name).dim() == 2 else "norms and biases"


def measure(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    """Of one mode: by kind of parameter, bytes per element of the first and of a later micro-batch; and the host's."""
    torch.manual_seed(0)
    config = GPTConfig(context=args.tokens + 3, layers=args.layers, n_embd=args.n_embd, heads=args.heads)
    model = GPT(config).to(dtype)
    buf = mb.attach(model, mb.MegabufConfig(grad_reduce_in_fp32=True, bucket_size=args.n_embd**2 * 12))
    specs = buf.plan.params
    clashing = [spec.name for spec in specs if spec.numel % args.tokens == 0]
    if clashing:
        raise SystemExit(f"--tokens {args.tokens} divides the size of {clashing[0]}, so activations look like it")
    step = torch.compile(model, backend="megabuf")
    window = torch.randint(VOCAB, (args.batch_size, args.tokens + 1))

    def micro_batches() -> None:
        with buf.no_sync():
            step(window).backward()
        step(window).backward()

    # The cache would hand out the code without generating it.
    with inductor_config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(micro_batches)
    backwards = [code for code in codes if "main_grad_0" in code]
    first, later = (count_traffic(code, {i: spec.numel for i, spec in enumerate(specs)}) for code in backwards)

    def whole_step() -> None:
        buf.zero_grad()
        micro_batches()
        buf.finish_grad_sync()

    host = watch(whole_step, [spec.shape for spec in specs])
    kinds: dict[str, list[int]] = {}
    for index, spec in enumerate(specs):
        kinds.setdefault(kind_of(model, spec.name), []).append(index)
    buf.detach()
    fused = sum(specs[index].numel for index in kinds["matrices"])
    return {
        "kinds": {
            kind: {
                "parameters": len(members),
                "share": sum(specs[index].numel for index in members) / sum(spec.numel for spec in specs),
                # All of a kind go the same way; if one does not, the table shows it.
                "first": max(first[index].read + first[index].written for index in members),
                "later": max(later[index].read + later[index].written for index in members),
                "temporary": max(max(each[index].temporary for each in (first, later)) for index in members),
            }
            for kind, members in kinds.items()
        },
        # Over both micro-batches; an op writes and reads back what it allocates.
        "inside_ops": 2 * host.inside_ops / (2 * fused),
        "zeroed": host.zeroed / sum(spec.numel for spec in specs),
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    rows = []
    for mode, entry in found.items():
        for kind, counts in entry["kinds"].items():
            temporary = counts["temporary"] + (entry["inside_ops"] if kind == "matrices" else 0)
            numbers = (counts["first"], counts["later"], entry["zeroed"], temporary)
            rows.append([mode, kind, f"{counts['share']:.1%}", *(f"{number:.2f}" for number in numbers)])
    # By rule, for gradients of 4 bytes: Inductor returns a gradient in a tensor of its own, which becomes ``.grad``, or
    # is added to it; DDP copies it into its bucket, or adds it there.
    rows.append(["by rule", "plain Inductor, .grad", "", "4", "8", "0", "0, then 8"])
    rows.append(["by rule", "Inductor, DDP bucket views", "", "4", "8", "0", "8"])
    headers = ["mode", "parameters", "share", "first", "later", "zeroing", "temporaries"]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Count the bytes that gradients move.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--mode", choices=tuple(MODES), default=None, help="only this one; gradients are fp32")
    add("--batch-size", type=int, default=3, help="windows in a micro-batch")
    add("--tokens", type=int, default=11, help="in a window; must divide the size of no parameter")
    add("--layers", type=int, default=2, help="as in examples/train_gpt.py, and so the next two: transformer blocks")
    add("--n-embd", type=int, default=64, help="width of the model")
    add("--heads", type=int, default=2, help="attention heads in a block")
    add("--json", type=Path, default=None, help="file for everything that was counted")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    found = {mode: measure(args, MODES[mode]) for mode in ([args.mode] if args.mode else MODES)}
    print(f"bytes per element and micro-batch; torch {torch.__version__}, Inductor for CPUs")
    print(table(found))
    if args.json is not None:
        args.json.write_text(json.dumps({"torch": torch.__version__, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
