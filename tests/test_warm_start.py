"""Compiling again what an earlier process has compiled: what is taken from torch's caches, and that it is right."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_start_runs
from helpers import RankGroup, batch, fresh_compiler, params_of, seeded, twin
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor.utils import get_donated_idxs
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from warm_start_runs import Products, Run, cache_counts, run, train

import megabuf_fx as mb
import megabuf_fx._compat as _compat
from megabuf_fx import saved_graph
from megabuf_fx.passes import fuse_wgrad
from megabuf_fx.variants import GraphSource

HIT = {"hit": 1}
KEPT = {"miss": 1, "saved": 1}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory of torch's."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    fresh_compiler()
    return tmp_path


def again(options: dict[str, Any] | None = None) -> Run:
    """A run in which nothing is left in memory of the one before."""
    fresh_compiler()
    return run(options or {})


def uncached(options: dict[str, Any] | None = None) -> Run:
    with inductor_config.patch(force_disable_caches=True):
        return again(options)


def in_new_process(options: dict[str, Any]) -> Run:
    program = Path(warm_start_runs.__file__)
    path = os.pathsep.join([*sys.path, str(program.parent)])
    done = subprocess.run(
        [sys.executable, str(program), json.dumps(options)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Run(**json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.timeout(300)
def test_a_second_process_traces_and_compiles_nothing() -> None:
    first, second = (in_new_process({"overlap_param_gather": True}) for _ in range(2))
    assert first.aot == KEPT
    assert second.aot == HIT
    # The forward; overwriting without and accumulating with launches, as in a step; overwriting with launches.
    assert first.inductor == {"miss": 4}
    assert second.inductor == {"hit": 4}
    assert second.params == first.params
    assert second.launches == first.launches
    assert second.compiles == first.compiles == 4


def test_numbers_are_those_of_a_run_without_caches() -> None:
    plain = uncached()
    assert plain.aot == plain.inductor == {}
    assert again().aot == KEPT
    warm = again()
    assert (warm.aot, warm.inductor) == (HIT, {"hit": 4})
    assert warm.params == plain.params
    assert warm.launches == plain.launches
    assert [] in warm.launches
    assert [0, 1] in warm.launches


@pytest.mark.parametrize(
    ("options", "rewritten"),
    [
        ({"bucket_size": None}, 2),
        ({"grad_reduce_in_fp32": True, "dense_layout": True, "use_distributed_optimizer": False}, 3),
        ({"gradient_accumulation_fusion": False}, 3),
    ],
)
def test_an_entry_serves_every_layout_and_config(options: dict[str, Any], rewritten: int) -> None:
    """``rewritten`` graphs differ from those of the run that has filled the cache, and are compiled.

    With ``overlap_param_gather`` modules have hooks, so that Dynamo's graph and the entry are others.
    """
    plain = uncached(options)
    again()
    warm = again(options)
    assert warm.aot == HIT
    assert warm.inductor.get("miss", 0) == rewritten
    assert warm.params == plain.params
    assert warm.launches == plain.launches


def test_another_version_of_a_pass_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    again()
    seen = []

    def changed(gm: Any, **kwargs: Any) -> Any:
        seen.append(gm)
        return gm

    monkeypatch.setattr(fuse_wgrad, "fuse_wgrad", changed)
    warm = again()
    assert len(seen) == 3
    assert (warm.aot, warm.inductor) == (HIT, {"hit": 1, "miss": 3})


def test_another_version_of_what_is_kept_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    again()
    changed = tmp_path / "changed.py"
    changed.write_text(Path(saved_graph.__file__).read_text() + "\n")
    monkeypatch.setattr(saved_graph, "__file__", str(changed))
    assert again().aot == KEPT


def test_graphs_name_the_model_of_now() -> None:
    again()
    fresh_compiler()
    other = mb.attach(Products(), mb.MegabufConfig())
    warm = run({})
    assert warm.aot == HIT
    # The id of the model is an argument of the launches.
    assert warm.inductor == {"hit": 2, "miss": 2}
    assert warm.launches == uncached().launches
    assert other.buffers.compiles == 0


def test_plain_inductor_and_this_backend_do_not_share_entries() -> None:
    def plain() -> tuple[dict[str, int], dict[str, Tensor]]:
        fresh_compiler()
        counters.clear()
        model = seeded(Products)
        train(torch.compile(model), torch.optim.SGD(model.parameters(), lr=1e-2), None)
        return cache_counts("aot_autograd", "autograd_cache_"), params_of(model)

    first, expected = plain()
    assert first == KEPT
    assert again().aot == KEPT
    second, values = plain()
    assert second == HIT
    assert all(torch.equal(values[name], expected[name]) for name in expected)
    assert again().aot == HIT


def test_aot_eager_keeps_nothing(cache: Path) -> None:
    first = again({"inner_compiler": "aot_eager"})
    second = again({"inner_compiler": "aot_eager"})
    assert first.aot == second.aot == first.inductor == {}
    assert first.params == second.params
    assert not (cache / "aotautograd").exists()


def test_other_strides_of_saved_tensors_trace_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = again()
    original = _compat.noting_output_strides

    class Other:
        def __enter__(self) -> Any:
            self.context = original()
            noted = self.context.__enter__()
            return lambda: (*noted()[:-1], (1, 8))

        def __exit__(self, *error: Any) -> None:
            self.context.__exit__(*error)

    monkeypatch.setattr(_compat, "noting_output_strides", Other)
    warm = again()
    assert warm.aot == {"bypass": 1}
    assert warm.params == plain.params
    assert warm.launches == plain.launches


def test_the_backward_may_still_reuse_what_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    donated: list[list[int]] = []
    original = GraphSource.compile

    def noted(self: GraphSource, *args: Any, inspect: Callable[[GraphModule], None], **kwargs: Any) -> Any:
        def look(gm: GraphModule) -> None:
            donated.append(list(get_donated_idxs() or ()))
            inspect(gm)

        return original(self, *args, inspect=look, **kwargs)

    monkeypatch.setattr(GraphSource, "compile", noted)
    again()
    traced, donated[:] = list(donated), []
    assert again().aot == HIT
    assert donated == traced
    assert any(traced)


class WithConstant(Products):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ torch.tensor([[1.0, 2.0, 3.0, 4.0]]).T


class WithCheckpoint(Products):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)
        return result


@pytest.mark.parametrize(
    ("build", "is_kept"),
    # Inductor has a kernel to compile for the constant.
    [pytest.param(WithConstant, False, marks=pytest.mark.slow), (WithCheckpoint, True)],
)
def test_graphs_with_constants_are_not_kept(build: type[nn.Module], is_kept: bool) -> None:
    results = []
    for _ in range(2):
        fresh_compiler()
        counters.clear()
        model = seeded(build)
        mb.attach(model, mb.MegabufConfig())
        call = torch.compile(model, backend="megabuf")
        out = call(batch(0, 0, 0, 8, 16))
        out.backward(torch.ones_like(out))
        results.append([param.main_grad.clone() for param in model.parameters()])  # type: ignore[attr-defined]
        counts = cache_counts("aot_autograd", "autograd_cache_")
    assert (counts == HIT) == is_kept, counts
    assert all(map(torch.equal, *results))


def test_symbolic_sizes_are_not_kept() -> None:
    for _ in range(2):
        fresh_compiler()
        counters.clear()
        model = seeded(Products)
        plain = twin(model)
        mb.attach(model, mb.MegabufConfig())
        call = torch.compile(model, backend="megabuf", dynamic=True)
        for size in (8, 5, 3):
            x = batch(0, 0, 0, size, 16)
            assert torch.allclose(call(x), plain(x), atol=1e-6)
        call(x).backward(torch.ones(3, 4))
        assert cache_counts("aot_autograd", "autograd_cache_") == {}
        # And they stay symbolic.
        assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("setting", ["enable_autograd_cache", "bundled_autograd_cache"])
def test_settings_of_the_user_stand(setting: str) -> None:
    """Without AOTAutograd's cache, and where torch stores whole models: nothing of ours is kept, everything runs."""
    with functorch_config.patch({setting: setting == "bundled_autograd_cache"}):
        first = again()
        second = again()
    assert first.aot == second.aot == {}
    assert first.params == second.params


def test_evaluation_is_kept_too() -> None:
    for expected in (KEPT, HIT):
        fresh_compiler()
        counters.clear()
        model = seeded(Products)
        x = batch(0, 0, 0, 8, 16)
        with torch.no_grad():
            out = torch.compile(model, backend="megabuf")(x)
        assert cache_counts("aot_autograd", "autograd_cache_") == expected
        assert torch.allclose(out, model(x), atol=1e-6)


def kept_graphs() -> list[object]:
    return [x for x in gc.get_objects() if type(x) in (GraphSource, saved_graph.SavedGraph)]


def test_graphs_from_the_cache_die_with_their_model() -> None:
    # What failed earlier in this process may be kept for its report.
    fresh_compiler()
    earlier = kept_graphs()
    again()
    warm = again()
    assert warm.aot == HIT
    fresh_compiler()
    assert len(kept_graphs()) == len(earlier)


def on_rank(rank: int, directory: str, is_cached: bool) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", directory)
        return again() if is_cached else uncached()


@pytest.mark.dist
@pytest.mark.timeout(400)
def test_ranks_share_entries(ranks: Callable[[int], RankGroup], cache: Path) -> None:
    plain = ranks(2).run(on_rank, str(cache), False, timeout=180)
    ranks(2).run(on_rank, str(cache), True, timeout=180)
    warm = ranks(2).run(on_rank, str(cache), True, timeout=180)
    for expected, found in zip(plain, warm):
        assert (found.aot, found.inductor) == (HIT, {"hit": 4})
        assert found.params == expected.params == plain[0].params
        assert found.launches == expected.launches


def test_fake_tensors_are_stored_with_the_memory_they_share() -> None:
    with FakeTensorMode() as mode:
        base = torch.empty(7, dtype=torch.bfloat16)
        stored = {
            "base": base,
            "view": base[2:6],
            "transposed": torch.empty(2, 3).t(),
            "scalar": torch.empty((), dtype=torch.int64),
            "empty": torch.empty(0, 4),
            "leaf": torch.empty(3, requires_grad=True),
        }
    content = _compat.dump_graph(stored)
    fresh = FakeTensorMode()
    with tracing(TracingContext(fresh)):
        found = _compat.load_graph(content)
    for name, tensor in stored.items():
        other = found[name]
        assert isinstance(other, FakeTensor), name
        assert other.fake_mode is fresh is not mode, name
        for what in ("dtype", "shape", "device", "requires_grad", "layout"):
            assert getattr(other, what) == getattr(tensor, what), (name, what)
        assert other.stride() == tensor.stride(), name
        assert other.storage_offset() == tensor.storage_offset(), name
        assert other.untyped_storage().nbytes() == tensor.untyped_storage().nbytes(), name
    assert _compat.storage_key(found["base"]) == _compat.storage_key(found["view"])
    assert len({_compat.storage_key(tensor) for tensor in found.values()}) == len(found) - 1
