"""Block of ``check.py``: one captured micro-batch serves all of a step; captured by hand, it cannot."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from gpu_context import CheckError, Context, compare, require
from gpu_training import Kind, Training, make_net
from torch import Tensor

import megabuf_fx as mb
from megabuf_fx.tape import Tape

INDUCTOR_BOUND = 1e-6
"""Relative. Variants of one graph may contract a product and a sum differently (FMA)."""


def micro_batch(context: Context) -> str:
    """One captured micro-batch adds or overwrites as a number on the device says; with a Python flag it cannot."""
    worst = 0.0
    kinds: list[Kind] = ["eager", *context.compilers]
    for kind in kinds:
        config = {"bucket_size": 1000, "gradient_accumulation_fusion": False}
        training = Training(context, kind, make_net(context), config)
        batches = [[context.randn(32, 64, seed=10 * step + micro) for micro in range(4)] for step in range(3)]
        expected = accumulate(training, training.backward, batches)
        before = [grad.data_ptr() for grad in main_grads(training)]
        captured = mb.capture_micro_batch(training.backward, batches[0][0], model=training.model)
        found = accumulate(training, captured, batches)
        bound = INDUCTOR_BOUND if kind == "inductor" else 0.0
        worst = max(worst, compare(found, expected, f"{kind}: losses and main_grads", bound=bound))
        require(captured.replays == 12, f"{kind}: {captured.replays} replays, expected 12")
        require([grad.data_ptr() for grad in main_grads(training)] == before, f"{kind}: main_grad has moved")
        if kind == "eager":
            refuse_other_captures(training, batches[0][0])
            freeze_flag(training, batches[0], expected)
    exact = f"within {worst:.0e}" if "inductor" in kinds else "bitwise"
    return f"{', '.join(kinds)}: 3 steps of 4, {exact}; a Python flag gives wrong numbers"


def main_grads(training: Training) -> list[Tensor]:
    return list(training.buf.buffers.main_grads)


def accumulate(
    training: Training, backward: Callable[[Tensor], Tensor], batches: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Losses and gradients of each step, in buffers that held NaN before."""
    results = []
    for micros in batches:
        for grad in main_grads(training):
            grad.fill_(float("nan"))
        for x in micros:
            with training.buf.no_sync():
                results.append(backward(x))
        results += [grad.clone() for grad in main_grads(training)]
        training.buf.zero_grad()
    return results


def refuse_other_captures(training: Training, x: Tensor) -> None:
    """The library refuses to be captured by other means than its own."""
    if not training.context.is_cuda:
        return
    try:
        with warnings.catch_warnings(), torch.cuda.graph(torch.cuda.CUDAGraph()):
            warnings.simplefilter("ignore")
            training.backward(x)
    except RuntimeError as error:
        require("captured by other means" in f"{error} {error.__context__}", f"another error: {error}")
    else:
        raise CheckError("the model was captured without a check")
    training.buf.zero_grad()


def freeze_flag(training: Training, micros: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Captured by hand at the first micro-batch, the host's decision to overwrite is frozen: only the last one counts.

    ``expected`` begins with the losses of the micro-batches and what their gradients really add up to.
    """
    static = micros[0].clone()

    def backward() -> None:
        with training.buf.no_sync():
            training.backward(static)

    replay = record_by_hand(training, backward, {"x": static})
    for x in micros:
        static.copy_(x)
        replay()
    found = [grad.clone() for grad in main_grads(training)]
    training.buf.zero_grad()
    with training.buf.no_sync():
        training.backward(micros[-1])
    compare(found, main_grads(training), "a frozen overwrite leaves the gradients of the last micro-batch")
    training.buf.zero_grad()
    wanted = expected[len(micros) : len(micros) + len(found)]
    require(
        not any(torch.equal(mine, other) for mine, other in zip(found, wanted)),
        "a capture with a Python flag gave right sums, so this block proves nothing",
    )


def record_by_hand(
    training: Training, function: Callable[[], None], inputs: Mapping[str, Tensor]
) -> Callable[[], None]:
    """What somebody would do without the library's help: warm up, record, replay."""
    context, buf = training.context, training.buf

    def statics() -> dict[str, Tensor]:
        return {**dict(training.model.named_parameters()), **buf.buffers.tensors(), **inputs}

    with buf.buffers.capture.active():
        if not context.is_cuda:
            tape = Tape(statics)
            with tape:
                function()
            return tape.replay
        stream = torch.cuda.Stream(context.device)
        stream.wait_stream(torch.cuda.current_stream(context.device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            buf.renew_hooks()
            for _ in range(2):
                function()
                buf.zero_grad()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                function()
        torch.cuda.current_stream(context.device).wait_stream(stream)
        return graph.replay
