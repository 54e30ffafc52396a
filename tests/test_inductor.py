"""What Inductor makes of the rewritten graphs: order in the generated code, kernels, options, numbers.

One model, the GPT of the example in small, is compiled once and its generated code read by several tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import RankGroup
from test_numerics import compare
from torch._inductor import config as inductor_config
from torch._inductor.utils import get_donated_idxs, run_and_get_code
from train_gpt import GPT, GPTConfig

import megabuf_fx as mb
from megabuf_fx.runtime.plan import BucketPlan

N_EMBD = 32


@dataclass
class Compiled:
    plan: BucketPlan
    code: str
    """Generated code of the first step's backward."""
    launched_in_backward: list[int]


def build(layers: int, bucket_size: int, **options: Any) -> tuple[GPT, mb.MegabufHandle]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=16, layers=layers, n_embd=N_EMBD, heads=2))
    return model, mb.attach(model, mb.MegabufConfig(bucket_size=bucket_size, **options))


def window() -> torch.Tensor:
    return torch.randint(0, 256, (4, 17), generator=torch.Generator().manual_seed(0))


def compile_backward(layers: int, bucket_size: int) -> Compiled:
    model, buf = build(layers, bucket_size)
    launched: list[int] = []
    original = buf.buffers.start_grad_sync

    def recorded(group: int, *, scaled: bool = False) -> None:
        launched.append(group)
        original(group, scaled=scaled)

    buf.buffers.start_grad_sync = recorded  # type: ignore[method-assign]
    call = torch.compile(model, backend="megabuf")
    # The cache would hand out the code without generating it.
    with inductor_config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(lambda: call(window()).backward())
    return Compiled(buf.plan, codes[-1], launched)


@pytest.fixture(scope="module")
def gpt() -> Compiled:
    return compile_backward(layers=2, bucket_size=9_000)


def calls(code: str) -> list[str]:
    """Lines of the generated ``call`` that run a kernel or an op."""
    body = code[code.index("def call(") :]
    wanted = re.compile(r"^\s+(\w+ = )?(cpp_fused\w*\(|extern_kernels\.|torch\.ops\.)")
    return [line.strip() for line in body.splitlines() if wanted.match(line)]


def param_index(name: str) -> int:
    return int(name.removeprefix("main_grad_"))


def test_launches_stand_directly_after_the_last_write(gpt: Compiled) -> None:
    lines = calls(gpt.code)
    launches = [i for i, line in enumerate(lines) if "megabuf.start_grad_sync" in line]
    assert len(launches) == len(gpt.plan.groups) > 3
    for group, position in enumerate(launches):
        assert re.search(rf"megabuf_token, \d+, {group}\)", lines[position])
        sent = set(re.findall(r"main_grad_\d+", lines[position]))
        assert {param_index(name) for name in sent} == set(gpt.plan.groups[group].params)
        writes = [i for i, line in enumerate(lines) if i != position and sent & set(re.findall(r"main_grad_\d+", line))]
        between = lines[max(writes) + 1 : position]
        # Another launch may stand there: a group never starts before its predecessor.
        assert all("megabuf.start_grad_sync" in line for line in between), between


def test_first_step_already_overlaps(gpt: Compiled) -> None:
    assert gpt.launched_in_backward == list(range(len(gpt.plan.groups)))


def test_matrix_gradients_go_through_the_fused_op(gpt: Compiled) -> None:
    fused = {param_index(m) for m in re.findall(r"megabuf\.accumulate_wgrad_\.default\(main_grad_(\d+)", gpt.code)}
    matrices = {
        index
        for index, spec in enumerate(gpt.plan.params)
        if len(spec.shape) == 2 and spec.name not in ("token.weight", "position.weight")
    }
    assert fused == matrices
    assert len(fused) == 2 * 6 + 1


def test_gradients_of_embeddings_are_added_in_place(gpt: Compiled) -> None:
    """Tokens by their rows; positions, a slice, by one kernel. Neither through memory of the table's size."""
    (line,) = [line for line in calls(gpt.code) if "megabuf.accumulate_embedding_" in line]
    names = {spec.name: f"main_grad_{index}" for index, spec in enumerate(gpt.plan.params)}
    assert f"({names['token.weight']}," in line
    writes = [line for line in calls(gpt.code) if re.search(rf"{names['position.weight']}\b", line)]
    assert [line.partition("(")[0].startswith("cpp_fused") for line in writes] == [True, False], "a kernel and a launch"
    allocated = re.findall(r"empty_strided_cpu\(\((\d+), (\d+)\)", gpt.code)
    tables = {
        tuple(map(str, spec.shape)) for spec in gpt.plan.params if spec.name in ("token.weight", "position.weight")
    }
    assert len(tables) == 2
    assert not tables.intersection(allocated)


def test_no_gradient_of_a_matrix_is_allocated(gpt: Compiled) -> None:
    products = [line for line in calls(gpt.code) if "extern_kernels" in line]
    assert products
    assert not any("main_grad" in line for line in products)


def test_kernels_do_not_grow_with_identical_layers() -> None:
    # One bucket per layer, so that all layers but the first and last meet their boundary at the same place.
    layer = 12 * N_EMBD * N_EMBD + 10 * N_EMBD
    kernels = {}
    for layers in (3, 5):
        code = compile_backward(layers, bucket_size=layer).code
        kernels[layers] = len(set(re.findall(r"^cpp_fused\w+ = ", code, flags=re.MULTILINE)))
    assert kernels[3] == kernels[5] > 0


def test_a_late_role_keeps_inductor_options_and_donated_buffers() -> None:
    seen: list[tuple[bool, int, int | None]] = []

    def look(graph: torch.fx.Graph) -> None:
        is_backward = any("main_grad" in node.name for node in graph.nodes)
        seen.append((is_backward, len(get_donated_idxs() or ()), inductor_config.max_fusion_size))

    model, buf = build(1, 9_000)
    options: dict[str, Any] = {"post_grad_custom_post_pass": look, "max_fusion_size": 7}
    call = torch.compile(model, backend="megabuf", options=options)
    call(window()).backward()
    buf.zero_grad()
    with buf.no_sync():
        call(window()).backward()
    call(window()).backward()
    backwards = [entry[1:] for entry in seen if entry[0]]
    # overwrite_sync, then overwrite_local and accumulate_sync, which were compiled late.
    assert len(backwards) == 3
    assert backwards[0][0] > 0
    assert backwards == [backwards[0]] * 3
    assert backwards[0][1] == 7


@pytest.mark.dist
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", ["sharded", "plain", "dense"])
def test_numbers_equal_ddp(ranks: Callable[[int], RankGroup], mode: str) -> None:
    """Inductor fuses and reorders sums, so within 1e-5."""
    options: dict[str, Any] = {
        "sharded": {"overlap_param_gather": True},
        "plain": {"use_distributed_optimizer": False},
        "dense": {"use_distributed_optimizer": False, "dense_layout": True},
    }[mode]
    for micro_batches in (1, 3):
        differences = ranks(2).run(compare, micro_batches, {"bucket_size": 600, **options}, True, timeout=180)
        assert max(differences) <= 1e-5, differences
