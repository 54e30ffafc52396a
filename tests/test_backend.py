"""``torch.compile(model, backend="megabuf")``: its forms, how often it compiles, and what it refuses."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Mlp, batch, max_difference, params_of, seeded, twin
from torch import Tensor, nn
from torch._dynamo.utils import counters

import megabuf_fx as mb
from megabuf_fx import traced_graph
from megabuf_fx.variants import GraphSource

AOT: dict[str, Any] = {"inner_compiler": "aot_eager"}
LR = 1e-3


def train(call: Any, optimizer: Any, steps: range, micro_batches: int = 1, size: int = 8) -> None:
    for step in steps:
        for micro in range(micro_batches):
            (call(batch(step, micro, 0, size, 13)).square().mean() / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()


def reference(model: nn.Module, steps: int = 4) -> dict[str, Tensor]:
    train(model, torch.optim.AdamW(model.parameters(), lr=LR), range(steps))
    return params_of(model)


def test_bare_form_attaches_and_works_with_an_optimizer_built_before() -> None:
    model = seeded(Mlp)
    expected = reference(twin(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    call: Any = torch.compile(model, backend="megabuf", options={**AOT, "bucket_size": 600})
    with pytest.raises(ValueError, match="not attached"):
        mb.handle(call)
    train(call, optimizer, range(4))
    buf = mb.handle(call)
    assert buf.config.bucket_size == 600
    assert not buf.config.use_distributed_optimizer
    for param, main_grad in zip(model.parameters(), buf.buffers.main_grads):
        assert param.main_grad is main_grad  # type: ignore[attr-defined]
    assert max_difference(params_of(model), expected) == 0.0


def test_evaluation_attaches_nothing() -> None:
    model = seeded(Mlp)
    expected = reference(twin(model))
    call: Any = torch.compile(model, backend="megabuf", options=AOT)
    with torch.no_grad():
        call(batch(0, 0, 0, 8, 13))
    with pytest.raises(ValueError, match="not attached"):
        mb.handle(call)
    train(call, torch.optim.AdamW(model.parameters(), lr=LR), range(4))
    with torch.no_grad():
        call(batch(0, 0, 0, 8, 13))
    assert mb.handle(call).model is model
    assert max_difference(params_of(model), expected) == 0.0


def test_masters_follow_loaded_weights_when_told() -> None:
    model = seeded(lambda: Mlp().to(torch.bfloat16))
    mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager", grad_reduce_in_fp32=True))
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.SGD, lr=0.0)
    loaded = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
    model.load_state_dict(loaded)
    optimizer.reload_model_params()
    model(batch(0, 0, 0, 8, 13).to(torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    assert max_difference(params_of(model), loaded) == 0.0


def test_grad_is_the_buffer_view_and_clip_grad_norm_works_without_sharding() -> None:
    model = seeded(Mlp)
    plain = twin(model)
    call = torch.compile(model, backend="megabuf", options=AOT)
    call(batch(0, 0, 0, 8, 13)).square().mean().backward()
    plain(batch(0, 0, 0, 8, 13)).square().mean().backward()
    buf = mb.handle(model)
    for param, main_grad, other in zip(model.parameters(), buf.buffers.main_grads, plain.parameters()):
        assert param.grad is not None
        assert param.grad.data_ptr() == main_grad.data_ptr()
        assert torch.equal(param.grad, other.grad)  # type: ignore[arg-type]
    ours = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    theirs = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    assert torch.equal(ours, theirs)


def test_three_forms_give_the_same_numbers() -> None:
    results = []
    for form in ("bare", "attach", "eager"):
        model = seeded(Mlp)
        if form == "bare":
            train(
                torch.compile(model, backend="megabuf", options=AOT),
                torch.optim.AdamW(model.parameters(), lr=LR),
                range(4),
            )
        else:
            mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager"))
            call = torch.compile(model, backend="megabuf") if form == "attach" else model
            train(call, mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=LR), range(4))
        results.append(params_of(model))
        torch.compiler.reset()
    assert max_difference(results[0], results[1]) == 0.0
    assert max_difference(results[0], results[2]) == 0.0


def test_entry_point_is_found_without_importing_the_package() -> None:
    code = (
        "import sys, torch; assert 'megabuf_fx' not in sys.modules; "
        "m = torch.nn.Linear(3, 2); "
        "f = torch.compile(m, backend='megabuf', options={'inner_compiler': 'aot_eager'}); "
        "f(torch.ones(1, 3)).sum().backward(); print(m.weight.grad.sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "6.0", done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        {"fullgraph": True},
        {"dynamic": True},
        {"dynamic": False},
        {"mode": "max-autotune-no-cudagraphs"},
        {"options": {"max_fusion_size": 8}},
    ],
    ids=["fullgraph", "dynamic", "static", "mode", "inductor_option"],
)
def test_arguments_of_torch_compile_pass_through(arguments: dict[str, Any]) -> None:
    model = seeded(Mlp)
    expected = reference(twin(model))
    mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=600))
    call = torch.compile(model, backend="megabuf", **arguments)
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=LR)
    train(call, optimizer, range(4))
    assert max_difference(params_of(model), expected) == 0.0


def test_dynamic_shapes_compile_a_bounded_number_of_graphs() -> None:
    model = seeded(Mlp)
    plain = twin(model)
    mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=600))
    call = torch.compile(model, backend="megabuf", dynamic=True)
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=LR)
    other = torch.optim.AdamW(plain.parameters(), lr=LR)
    counters.clear()
    for size in range(3, 12):
        train(call, optimizer, range(size, size + 1), size=size)
        train(plain, other, range(size, size + 1), size=size)
    assert counters["stats"]["unique_graphs"] <= 2
    assert max_difference(params_of(model), params_of(plain)) < 1e-6


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts every compilation of every variant."""
    made: list[int] = []
    original = GraphSource.compile

    def counted(self: GraphSource, *args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(GraphSource, "compile", counted)
    return made


def test_nothing_is_compiled_after_each_role_has_occurred(compiles: list[int]) -> None:
    model = seeded(Mlp)
    buf = mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=600, overlap_param_gather=True))
    call = torch.compile(model, backend="megabuf")
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=LR)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    counters.clear()
    seen = []
    for step in range(20):
        micro_batches = (1, 3, 2)[step % 3]
        for micro in range(micro_batches):
            if micro + 1 < micro_batches:
                with buf.no_sync():
                    call(batch(step, micro, 0, 8, 13)).square().mean().backward()
            else:
                call(batch(step, micro, 0, 8, 13)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        model.eval()
        call(batch(step, 9, 0, 8, 13))
        with torch.no_grad():
            call(batch(step, 9, 0, 8, 13))
        model.train()
        seen.append((counters["stats"]["unique_graphs"], len(compiles)))
    # Graphs with gradient (eval differs in nothing here) and without; of the first, a forward and four roles of the
    # backward: {overwrite, accumulate} x {sync, local}.
    assert seen[2] == seen[-1]
    assert seen[-1][0] == 2
    assert len(compiles) == 2 + 4


def test_first_step_launches_every_bucket_inside_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(Mlp)
    buf = mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=600))
    started: list[tuple[int, bool]] = []
    original = buf.buffers.start_grad_sync
    is_in_graph = True

    def recorded(group: int, *, scaled: bool = False) -> None:
        started.append((group, is_in_graph))
        original(group, scaled=scaled)

    monkeypatch.setattr(buf.buffers, "start_grad_sync", recorded)
    torch.compile(model, backend="megabuf")(batch(0, 0, 0, 8, 13)).square().mean().backward()
    is_in_graph = False
    buf.finish_grad_sync()
    assert started == [(group, True) for group in range(len(buf.plan.groups))]
    assert len(started) > 1
    assert sorted(buf.buffers.boundaries) == list(range(len(buf.plan.groups)))


def test_deep_copied_teacher_is_left_alone() -> None:
    model = seeded(Mlp)
    buf = mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=600))
    call = torch.compile(model, backend="megabuf")
    call(batch(0, 0, 0, 8, 13)).square().mean().backward()
    before = [main_grad.clone() for main_grad in buf.buffers.main_grads]
    teacher = copy.deepcopy(model)
    teacher_call = torch.compile(teacher, backend="megabuf", options=AOT)
    assert not hasattr(next(teacher.parameters()), "main_grad")
    with torch.no_grad():
        teacher_call(batch(1, 0, 0, 8, 13))
    assert all(torch.equal(a, b) for a, b in zip(before, buf.buffers.main_grads))
    storages = {param.untyped_storage().data_ptr() for param in model.parameters()}
    assert not any(param.untyped_storage().data_ptr() in storages for param in teacher.parameters())


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(13, 13), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("overlap", [True, False])
def test_one_compiled_block_serves_all_blocks(overlap: bool) -> None:
    """Dynamo compiles one code object; each block's call binds its own parameters."""
    model = seeded(Blocks)
    plain = twin(model)
    mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=100, overlap_param_gather=overlap))
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="megabuf")
    train(model, mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=LR), range(4))
    train(plain, torch.optim.AdamW(plain.parameters(), lr=LR), range(4))
    mb.handle(model).sync_params()
    assert max_difference(params_of(model), params_of(plain)) == 0.0


def test_plain_function_over_unattached_parameters_is_refused() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)

    def loss(x: Tensor) -> Tensor:
        result: Tensor = second(first(x)).sum()
        return result

    with pytest.raises(Exception, match=r"parameters of 2 modules .*call megabuf_fx.attach"):
        torch.compile(loss, backend="megabuf", options=AOT)(torch.ones(1, 3))


def test_function_without_parameters_compiles() -> None:
    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda v: (v * v).sum(), backend="megabuf", options=AOT)(x).backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"bucket_sise": 3}, "did you mean 'bucket_size'"),
        ({"bucket_size": True}, "bucket_size must be an int"),
        ({"bucket_size": -1}, "bucket_size must be a positive"),
    ],
)
def test_bad_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(Exception, match=match):
        torch.compile(nn.Linear(3, 3), backend="megabuf", options=options)(torch.ones(1, 3))


def test_one_graph_of_two_models() -> None:
    """A generator and a discriminator in one compiled loss, say."""
    models = [seeded(Mlp), seeded(Mlp, 1)]
    plain = [twin(model) for model in models]

    def loss(first: nn.Module, second: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = first(x).square().mean() + second(2 * x).square().mean()
        return result

    for model in models:
        mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=300))
    both = torch.compile(loss, backend="megabuf")
    optimizers = [mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=LR) for model in models]
    others = [torch.optim.AdamW(model.parameters(), lr=LR) for model in plain]
    for step in range(4):
        x = batch(step, 0, 0, 8, 13)
        both(models[0], models[1], x).backward()
        loss(plain[0], plain[1], x).backward()
        for optimizer in (*optimizers, *others):
            optimizer.step()
            optimizer.zero_grad()
    for model, other in zip(models, plain):
        assert max_difference(params_of(model), params_of(other)) == 0.0


def test_options_that_differ_from_the_attached_config_are_refused() -> None:
    model = nn.Linear(3, 3)
    mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager"))
    with pytest.raises(Exception, match="option bucket_size=7 differs from None"):
        torch.compile(model, backend="megabuf", options={"bucket_size": 7})(torch.ones(1, 3))


def test_compiled_autograd_is_refused() -> None:
    model = nn.Linear(3, 3)
    mb.attach(model)
    with torch._dynamo.config.patch(compiled_autograd=True), pytest.raises(Exception, match="compiled autograd"):
        torch.compile(model, backend="megabuf")(torch.ones(1, 3))


def test_backward_after_reduction_is_refused_when_sharded() -> None:
    for compiled in (True, False):
        model = seeded(Mlp)
        buf = mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=600))
        call: Callable[..., Tensor] = torch.compile(model, backend="megabuf") if compiled else model
        if not compiled:
            # Without graphs the first step learns how many passes there are and reduces nothing before its end.
            call(batch(0, 0, 0, 8, 13)).square().mean().backward()
            buf.finish_grad_sync()
            buf.zero_grad()
        call(batch(0, 0, 0, 8, 13)).square().mean().backward()
        with pytest.raises(RuntimeError, match=r"bucket \d .*already reduced.*no_sync.*zero_grad"):
            call(batch(0, 1, 0, 8, 13)).square().mean().backward()
        buf.zero_grad()
        call(batch(0, 0, 0, 8, 13)).square().mean().backward()
        torch.compiler.reset()


def test_step_with_unsynchronized_gradients_is_refused() -> None:
    model = seeded(Mlp)
    buf = mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager"))
    optimizer = mb.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=LR)
    with buf.no_sync():
        model(batch(0, 0, 0, 8, 13)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"last backward ran under no_sync.*finish_grad_sync"):
        optimizer.step()
    buf.finish_grad_sync()
    optimizer.step()


def test_detach_gives_the_model_back() -> None:
    model = seeded(Mlp)
    plain = twin(model)
    buf = mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager"))
    call = torch.compile(model, backend="megabuf")
    call(batch(0, 0, 0, 8, 13)).square().mean().backward()
    buf.detach()
    with pytest.raises(RuntimeError, match="detached"):
        call(batch(0, 0, 0, 8, 13))
    with pytest.raises(RuntimeError, match="detached"):
        buf.finish_grad_sync()
    torch.compiler.reset()
    assert max_difference(params_of(model), params_of(plain)) == 0.0
    assert not hasattr(model.fc1.weight, "main_grad")  # type: ignore[union-attr]
    train(model, torch.optim.AdamW(model.parameters(), lr=LR), range(2))
    train(plain, torch.optim.AdamW(plain.parameters(), lr=LR), range(2))
    assert max_difference(params_of(model), params_of(plain)) == 0.0
    mb.attach(model)


@pytest.mark.parametrize(
    "options",
    [{}, {"use_distributed_optimizer": False}, {"use_distributed_optimizer": False, "dense_layout": True}],
    ids=["sharded", "plain", "dense"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_misaligned_view_enters_a_graph(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """On CUDA, Inductor clones a misaligned mutated input and copies it back only after the graph."""
    model = seeded(lambda: Mlp(hidden=37).to(dtype))
    buf = mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=600, **options))
    entered: list[Tensor] = []
    original = traced_graph._find_tensor

    def recorded(*args: Any) -> Tensor:
        entered.append(original(*args))
        return entered[-1]

    monkeypatch.setattr(traced_graph, "_find_tensor", recorded)
    call = torch.compile(model, backend="megabuf")
    call(batch(0, 0, 0, 8, 13).to(dtype)).square().mean().backward()
    assert entered
    assert all(tensor.data_ptr() % 16 == 0 for tensor in [*entered, *model.parameters()])
    if options.get("dense_layout"):
        assert any(main_grad.data_ptr() % 16 for main_grad in buf.buffers.main_grads)
        assert {tensor.numel() for tensor in entered} == {1, buf.buffers.buffers[0].layout.numel}
