"""``mode="reduce-overhead"``: Inductor's own CUDA graphs leave collectives out, and are never skipped silently.

There is no GPU here. Inductor is made to cut graphs as it would for one (every node counts as on a GPU, and a wrapper
stands in for the recording of each part); what it then generates runs on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import Mlp, batch, fresh_compiler, max_difference, params_of, seeded
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor import cudagraph_utils
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.utils import _unstable_customized_partition_wrapper
from torch._subclasses import FakeTensorMode

import megabuf_fx as mb
from megabuf_fx import backend
from megabuf_fx.backend import settle_cudagraphs

OPTIONS = {"triton.cudagraphs": True}


def cuda_input() -> Any:
    with FakeTensorMode():
        return torch.empty(2, device="cuda")


def test_wanted_on_a_gpu() -> None:
    assert settle_cudagraphs(OPTIONS, [cuda_input()], inner_compiler="inductor")
    assert not settle_cudagraphs({}, [cuda_input()], inner_compiler="inductor")


def test_without_a_gpu_there_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="CUDA graphs are wanted, but this graph is not on a GPU"):
        assert not settle_cudagraphs(OPTIONS, [torch.ones(2), 3], inner_compiler="inductor")


@pytest.mark.parametrize("name", ["graph_partition", "triton.cudagraph_trees"])
def test_options_that_recording_needs(name: str) -> None:
    with pytest.raises(ValueError, match=f"need Inductor's option {name}=True"):
        settle_cudagraphs({**OPTIONS, name: False}, [cuda_input()], inner_compiler="inductor")


def test_the_inner_compiler_must_be_inductor() -> None:
    with pytest.raises(ValueError, match="need inner_compiler='inductor', not 'aot_eager'"):
        settle_cudagraphs(OPTIONS, [cuda_input()], inner_compiler="aot_eager")


@pytest.mark.filterwarnings("ignore:CUDA graphs are wanted")
def test_the_mode_trains_without_a_gpu() -> None:
    fresh_compiler()
    results: list[dict[str, torch.Tensor]] = []
    for mode in ("default", "reduce-overhead"):
        model = seeded(Mlp)
        mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=300))
        call = torch.compile(model, backend="megabuf", mode=mode)
        results.append(train(call, model, steps=2))
    assert max_difference(results[0], results[1]) == 0.0


def test_a_graph_that_is_not_recorded_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_compiler()
    monkeypatch.setattr(backend, "settle_cudagraphs", lambda *args, **kwargs: True)
    model = nn.Linear(3, 3)
    mb.attach(model)
    with pytest.raises(
        Exception, match=r"CUDA graphs were asked for, but Inductor does not record this graph: skipping"
    ):
        torch.compile(model, backend="megabuf")(torch.ones(1, 3))


def test_a_recorded_model_cannot_be_captured_again() -> None:
    model = seeded(Mlp)
    buf = mb.attach(model)
    buf.buffers.has_inductor_graphs = True
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, fused=True)
    with pytest.raises(ValueError, match="reduce-overhead"):
        mb.capture_step(lambda x: None, torch.ones(1), optimizer=optimizer)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_capturing_by_other_means_is_refused(monkeypatch: pytest.MonkeyPatch, is_compiled: bool) -> None:
    """Such as ``torch.cuda.graph`` around a step, or ``make_graphed_callables`` of a compiled model."""
    model = seeded(Mlp)
    buf = mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager"))
    call = torch.compile(model, backend="megabuf") if is_compiled else model
    x = batch(0, 0, 0, 8, 13)
    call(x).sum().backward()
    buf.zero_grad()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(buf.buffers, "token", SimpleNamespace(is_cuda=True))
    with pytest.raises(RuntimeError, match=r"captured by other means; use megabuf_fx\.capture_step"):
        call(x)


def test_nodes_that_somebody_holds_cannot_be_made_anew() -> None:
    """On a GPU a capture would then end in an error of CUDA's that names nothing."""
    model = seeded(Mlp)
    buf = mb.attach(model)
    loss = model(batch(0, 0, 0, 8, 13)).sum()
    with pytest.raises(RuntimeError, match="a loss or an output of an earlier step is still held"):
        buf.renew_hooks()
    del loss
    buf.renew_hooks()
    model(batch(0, 0, 0, 8, 13)).sum().backward()
    buf.finish_grad_sync()
    assert all(main_grad.any() for main_grad in buf.buffers.main_grads)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Calls of parts of graphs, each as its number and how many its graph has."""
    calls: list[tuple[int, int]] = []

    def record(function: Callable[..., Any], metadata: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls.append((metadata.partition_index, metadata.num_partitions))
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(backend, "settle_cudagraphs", lambda *args, **kwargs: True)
    monkeypatch.setattr(cudagraph_utils, "check_multiple_devices_or_any_cpu_nodes", lambda mapping: None)
    monkeypatch.setattr(BaseSchedulerNode, "is_gpu", lambda node: True)
    monkeypatch.setattr(_unstable_customized_partition_wrapper, "wrapper", record)
    with inductor_config.patch(force_disable_caches=True):
        yield calls


def train(call: Any, model: nn.Module, *, steps: int) -> dict[str, torch.Tensor]:
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    for step in range(steps):
        call(batch(step, 0, 0, 8, 13)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    mb.handle(model).sync_params()
    return params_of(model)


@pytest.mark.filterwarnings("ignore:dynamo_pgo")
def test_graphs_are_cut_at_collectives_and_nowhere_else(
    parts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_compiler()
    model = seeded(Mlp)
    buf = mb.attach(model, mb.MegabufConfig(bucket_size=300, overlap_param_gather=True))
    groups = len(buf.plan.groups)
    assert groups >= 2
    cut = train(torch.compile(model, backend="megabuf"), model, steps=3)
    # The first wait stands before any kernel, the last launch after all of them: as many parts as groups each time.
    assert parts == [(part, groups) for _ in range(3) for _ in ("forward", "backward") for part in range(groups)]
    fresh_compiler()
    monkeypatch.undo()
    whole = seeded(Mlp)
    mb.attach(whole, mb.MegabufConfig(bucket_size=300, overlap_param_gather=True))
    assert max_difference(train(torch.compile(whole, backend="megabuf"), whole, steps=3), cut) == 0.0
