"""Blocks of ``check.py``: kernels on views into buffers, against plain ones, and their times."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import torch
from gpu_context import Context, compare, no_host_reads, time_ms
from torch import Tensor, nn

import megabuf_fx as mb
from megabuf_fx.runtime.ops import accumulate_embedding_, accumulate_wgrad_


class Odd(nn.Module):
    """Sizes that leave no view in a dense buffer aligned."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.matrix = nn.Parameter(torch.randn(5, 7))
        self.shift = nn.Parameter(torch.randn(1))
        self.inner = nn.Linear(7, 13)
        self.outer = nn.Linear(13, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.outer(torch.tanh(self.inner(x @ self.matrix))) * self.scale + self.shift
        return result


def odd_sizes(context: Context) -> str:
    """Gradients of two micro-batches equal eager ones, whatever the alignment of their views."""
    worst = {torch.float32: 0.0, torch.bfloat16: 0.0}
    kind = context.compilers[0]
    cases = [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)]
    for dense, dtype in cases:
        torch.manual_seed(context.seed)
        model = Odd().to(context.device, dtype)
        plain = copy.deepcopy(model)
        mb.attach(model, mb.MegabufConfig(use_distributed_optimizer=False, dense_layout=dense, inner_compiler=kind))
        compiled = torch.compile(model, backend="megabuf")
        for seed in range(2):
            x = context.randn(11, 5, seed=seed).to(dtype)
            for module in (compiled, plain):
                module(x).float().square().sum().backward()
        grads, expected = ([p.grad for p in module.parameters() if p.grad is not None] for module in (model, plain))
        # Eager rounds every op's result to bf16, Inductor only what it stores.
        bound = 1e-5 if dtype == torch.float32 else 3e-2
        what = f"{'dense' if dense else 'padded'} {dtype} gradients"
        worst[dtype] = max(worst[dtype], compare(grads, expected, what, bound=bound))
    low, high = worst.values()
    return f"{kind}, padded and dense: within {low:.0e} (fp32) and {high:.0e} (bf16) of eager"


def accumulate_gemm(context: Context) -> str:
    """bf16 x bf16 -> fp32, written or added inside the product; against fp64, and against what it replaces."""
    m, n, k = (4096, 4096, 8192) if context.is_cuda else (48, 40, 96)
    # As in a backward: the output's gradient is transposed, a view.
    lhs = context.randn(k, m, seed=1).bfloat16().t()
    rhs = context.randn(k, n, seed=2).bfloat16()
    product = lhs.double() @ rhs.double()
    base = context.randn(m, n, seed=3)
    # On a GPU the sum stays in fp32 throughout; a CPU has no such kernel and rounds the product to bf16 first.
    bound = 1e-4 if context.is_cuda else 2.0**-8
    main = torch.full((m, n), float("nan"), device=context.device)
    accumulate_wgrad_(main, lhs, rhs, False)
    worst = compare([main.double()], [product], "overwriting", bound=bound)
    main.copy_(base)
    accumulate_wgrad_(main, lhs, rhs, True)
    worst = max(worst, compare([main.double()], [product + base.double()], "accumulating", bound=bound))
    # The factors of a mean over ranks: 1/8 on what is added, and on what other micro-batches left.
    for accumulate in (False, True):
        main.copy_(base)
        accumulate_wgrad_(main, lhs, rhs, accumulate, beta=0.25, alpha=0.125)
        expected = product / 8 + (base.double() / 4 if accumulate else 0)
        worst = max(worst, compare([main.double()], [expected], f"scaled, accumulate={accumulate}", bound=bound))
    if not context.is_cuda:
        return f"[{m}, {k}] x [{k}, {n}]: within {worst:.0e} of fp64"
    del product
    addmm = torch.ops.aten.addmm.dtype
    rivals: list[Callable[[], object]] = [
        lambda: accumulate_wgrad_(main, lhs, rhs, True),
        lambda: main.copy_(addmm(main, lhs, rhs, torch.float32)),
        lambda: main.add_(torch.mm(lhs, rhs)),
    ]
    fused, copied, rounded = time_ms(rivals, calls=10)
    return (
        f"[{m}, {k}] x [{k}, {n}]: within {worst:.0e} of fp64; {fused:.2f} ms; addmm + copy {copied / fused:.2f}x, "
        f"bf16 mm + add {rounded / fused:.2f}x"
    )


def accumulate_rows(context: Context) -> str:
    """Rows of an embedding's gradient added into the buffer, against fp64; without a host read, and in a CUDA graph."""
    count, width, tokens = (50_304, 2048, 8192) if context.is_cuda else (60, 8, 200)
    # Some tokens are common, one is padding, and the last row belongs to nobody.
    indices = (context.randn(tokens, seed=1).abs() * count / 8).long().clamp(max=count - 2)
    padding = int(indices[0])
    rows = context.randn(tokens, width, seed=2)
    kept = indices != padding
    worst = 0.0
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2.0**-8)):
        base = context.randn(count, width, seed=3).to(dtype)
        for accumulate in (False, True):
            main = base.clone()
            with no_host_reads(context):
                accumulate_embedding_(main, rows.to(dtype), indices, padding, accumulate, beta=0.25, alpha=0.125)
            expected = base.double() / 4 if accumulate else torch.zeros_like(base, dtype=torch.float64)
            expected.index_add_(0, indices[kept], rows.to(dtype).double()[kept] / 8)
            what = f"{dtype}, accumulate={accumulate}"
            worst = max(worst, compare([main.double()], [expected], what, bound=bound))
    shape = f"{tokens} rows of {width} into {count}"
    if not context.is_cuda:
        return f"{shape}: within {worst:.0e} of fp64"
    main = torch.zeros(count, width, device=context.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        accumulate_embedding_(main, rows, indices, padding, True)
    for _ in range(2):
        graph.replay()
    twice = torch.zeros_like(main)
    for _ in range(2):
        accumulate_embedding_(twice, rows, indices, padding, True)
    compare([main], [twice], "two replays")
    dense = torch.ops.aten.embedding_dense_backward
    rivals: list[Callable[[], object]] = [
        lambda: accumulate_embedding_(main, rows, indices, padding, True),
        lambda: main.add_(dense(rows, indices, count, padding, False)),
    ]
    by_rows, by_table = time_ms(rivals, calls=10)
    return f"{shape}: within {worst:.0e} of fp64; {by_rows:.2f} ms; dense gradient + add {by_table / by_rows:.2f}x"


def optimizer_step(context: Context) -> str:
    """Fused AdamW on flat shards: the same numbers as on plain parameters, and its time next to copying as much."""
    rows, columns = (2**14, 2**13) if context.is_cuda else (64, 48)
    notes = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(context.seed)
        model = nn.Linear(columns, rows, bias=False, device=context.device, dtype=dtype)
        plain = nn.Linear(columns, rows, bias=False, device=context.device)
        plain.weight.data.copy_(model.weight.data)
        options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "fused": True}
        mb.attach(model, mb.MegabufConfig(grad_reduce_in_fp32=True))
        optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, **options)
        reference = torch.optim.AdamW(plain.parameters(), **options)
        grad = torch.randn(rows, columns, device=context.device)
        for _ in range(2):
            model.weight.backward(grad.to(dtype))
            plain.weight.grad = grad.to(dtype).float()
            optimizer.step()
            reference.step()
            optimizer.zero_grad()
        (run,) = optimizer.runs
        compare([run.master.view(rows, columns)], [plain.weight.data], f"{dtype} masters")
        compare([model.weight.data], [plain.weight.data.to(dtype)], f"{dtype} parameters")
        del reference, plain
        if context.is_cuda:
            notes.append(time_step(model, optimizer, grad))
        del model, optimizer, grad, run
        gc.collect()
    return f"{rows * columns:,} elements, bitwise equal to plain AdamW" + "".join(f"; {note}" for note in notes)


def time_step(model: nn.Linear, optimizer: mb.DistributedOptimizer, grad: Tensor) -> str:
    dtype = model.weight.dtype
    model.weight.backward(grad.to(dtype))
    # fp32: read gradient, master and two moments, write the last three. bf16: write the parameters, too.
    nbytes = model.weight.numel() * (28 if dtype == torch.float32 else 30)
    source = torch.zeros(nbytes // 2, dtype=torch.uint8, device=grad.device)
    target = torch.empty_like(source)
    step, copying = time_ms([optimizer.step, lambda: target.copy_(source)], calls=10)
    name = str(dtype).removeprefix("torch.")
    return f"{name} {step:.2f} ms = {step / copying:.2f}x a copy of its bytes ({nbytes / step / 1e6:.0f} GB/s)"
