"""``dump.py`` and ``report.py``: what is written of a compiled model, and the table of its buckets."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_builders import copy_graph, traced_mlp
from helpers import Mlp, batch, seeded
from torch import Tensor

import megabuf_fx as mb
from megabuf_fx.dump import FORMAT_VERSION, DirectoryDump, GraphDump, make_dump
from megabuf_fx.report import bucket_table, plan_as_json

FORWARD = ["traced", "locate_params"]
WAITING = [*FORWARD, "add_buffer_inputs", "insert_param_sync", "verify_forward"]
BACKWARD = [
    "traced",
    "add_buffer_inputs",
    "fuse_embedding_grad",
    "fuse_wgrad",
    "write_main_grads",
    "insert_grad_sync",
    "verify_backward",
]


def attach(**options: Any) -> tuple[mb.MegabufHandle, Any]:
    """``Mlp`` in two buckets (0: fc3, ln, fc2; 1: fc1), compiled op by op, and its handle."""
    model = seeded(Mlp)
    handle = mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager", bucket_size=600, **options))
    return handle, torch.compile(model, backend="megabuf")


def loss(run: Any, micro: int = 0) -> Tensor:
    result: Tensor = run(batch(0, micro, 0, 6, 13)).square().mean()
    return result


def variants(directory: Path) -> dict[str, Path]:
    """Directories by the name of their variant. Graph numbers count all compilations of the process."""
    found = {}
    for path in directory.glob("rank0/*"):
        number, _, variant = path.name.partition("_")
        assert number.removeprefix("graph").isdigit()
        found[variant] = path
    return found


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def numbered(names: list[str]) -> list[str]:
    return [*(f"{place:02d}_{name}.py" for place, name in enumerate(names)), "graph.json", "plan.json"]


def read_plan(directory: Path) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads((directory / "plan.json").read_text())
    return plan


def test_every_variant_has_its_graphs_and_its_plan(tmp_path: Path) -> None:
    handle, run = attach(dump_dir=str(tmp_path))
    with handle.no_sync():
        loss(run).backward()
    loss(run, 1).backward()
    handle.zero_grad()
    loss(run).backward()
    torch.autograd.grad(loss(run), list(handle.model.parameters()))
    with torch.no_grad():
        loss(run)
    found = variants(tmp_path)
    assert {name: files(path) for name, path in found.items()} == {
        "forward": numbered(FORWARD),
        "backward_overwrite_local": numbered(BACKWARD),
        "backward_accumulate_sync": numbered(BACKWARD),
        "backward_overwrite_sync": numbered(BACKWARD),
        "backward_untouched": numbered(["traced"]),
        "inference": numbered(FORWARD),
    }
    for name, path in found.items():
        assert read_plan(path)["kind"] == name
        for graph in path.glob("*.py"):
            ast.parse(graph.read_text())


def test_graphs_are_readable(tmp_path: Path) -> None:
    """Shapes, strides and devices, the user's source lines, and each pass's work."""
    _, run = attach(dump_dir=str(tmp_path))
    loss(run).backward()
    folder = variants(tmp_path)["backward_overwrite_sync"]
    texts = [(folder / name).read_text() for name in numbered(BACKWARD)[:-2]]
    assert "self.fc3(self.ln(hidden))" in texts[0]
    assert '"f32[37, 13][13, 1]cpu"' in texts[0]
    counts = [
        [text.count(word) for text in texts]
        for word in ("main_grad_0:", "megabuf.accumulate_wgrad_.", "aten.copy_.", "megabuf.start_grad_sync.")
    ]
    assert counts == [[0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 3, 3, 3, 3], [0, 0, 0, 0, 4, 4, 4], [0, 0, 0, 0, 0, 2, 2]]
    assert "return (None, None, None, None, None, None, None, None)" in texts[-1]


def test_plan_names_boundaries_with_their_triggers(tmp_path: Path) -> None:
    handle, run = attach(dump_dir=str(tmp_path))
    loss(run).backward()
    folder = variants(tmp_path)["backward_overwrite_sync"]
    plan = read_plan(folder)
    assert plan["format_version"] == FORMAT_VERSION == 3
    number = handle.buffers.handle
    assert plan["launches"] == [[number, 0], [number, 1]]
    names = [name for name, _ in handle.model.named_parameters()]
    assert sorted(name for name in plan["inputs"] if name) == sorted(names)
    assert len(plan["inputs"]) == 8
    final = (folder / "06_verify_backward.py").read_text()
    lines = final.splitlines()
    assert [(b["handle"], b["group"]) for b in plan["boundaries"]] == [(number, 0), (number, 1)]
    for boundary, view in zip(plan["boundaries"], ("main_grad_2", "main_grad_")):
        starts = (f"{boundary['trigger']} ", f"{boundary['trigger']}:")
        (place,) = [i for i, line in enumerate(lines) if line.strip().startswith(starts)]
        assert f"torch.ops.{boundary['trigger_op']}({view}" in lines[place]
        # What the trigger completes leaves in the next line.
        following = next(line for line in lines[place + 1 :] if line.strip())
        assert "megabuf.start_grad_sync.default([" in following
        assert f"megabuf_token, {number}, {boundary['group']})" in following
    assert plan["boundaries"][0]["trigger_op"] == "megabuf.accumulate_wgrad_.default"
    assert plan["models"] == {str(number): plan_as_json(handle.plan)}


def test_boundaries_name_the_users_line(tmp_path: Path) -> None:
    _, run = attach(dump_dir=str(tmp_path))
    loss(run).backward()
    plan = read_plan(variants(tmp_path)["backward_overwrite_sync"])
    sources = [boundary["source"] for boundary in plan["boundaries"]]
    assert sources == ["hidden = torch.tanh(self.fc2(torch.tanh(self.fc1(x))))"] * 2


def test_plan_has_the_layout(tmp_path: Path) -> None:
    """Positions in elements, buckets and groups, as the plan has them."""
    handle, run = attach(dump_dir=str(tmp_path))
    loss(run).backward()
    for folder in variants(tmp_path).values():
        (model,) = read_plan(folder)["models"].values()
        assert (model["digest"], model["dp_size"], model["sharded"]) == (handle.plan.digest, 1, True)
        (buffer,) = model["buffers"]
        (layout,) = handle.plan.layouts
        assert (buffer["param_dtype"], buffer["grad_dtype"]) == ("float32", "float32")
        assert (buffer["numel"], buffer["numel_unpadded"]) == (layout.numel, layout.numel_unpadded)
        assert [entry["name"] for entry in buffer["params"]] == [name for name, _ in handle.model.named_parameters()]
        for entry, slot in zip(buffer["params"], layout.slots):
            assert (entry["start"], entry["end"], entry["bucket"]) == (slot.start, slot.end, slot.bucket)
        assert buffer["buckets"] == [list(bucket) for bucket in layout.buckets]
        assert model["groups"] == [
            [{"buffer": 0, "bucket": index, "start": start, "end": end}]
            for index, (start, end) in enumerate(layout.buckets)
        ]


def test_waiting_forward(tmp_path: Path) -> None:
    _, run = attach(dump_dir=str(tmp_path), overlap_param_gather=True)
    loss(run).backward()
    folder = variants(tmp_path)["forward"]
    assert files(folder) == numbered(WAITING)
    assert (folder / "04_verify_forward.py").read_text().count("megabuf.wait_param_sync.") == 2
    plan = read_plan(folder)
    assert (plan["launches"], plan["boundaries"]) == ([], [])


def test_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGABUF_DUMP", str(tmp_path / "made" / "for" / "it"))
    handle, run = attach()
    assert handle.config.dump_dir == str(tmp_path / "made" / "for" / "it")
    loss(run).backward()
    assert set(variants(tmp_path / "made" / "for" / "it")) == {"forward", "backward_overwrite_sync"}


def test_bare_form(tmp_path: Path) -> None:
    """``dump_dir`` as an option of ``torch.compile``; not sharded, so gradients are reduced over all ranks."""
    model = seeded(Mlp)
    options: dict[str, Any] = {"inner_compiler": "aot_eager", "bucket_size": 600, "dump_dir": str(tmp_path)}
    loss(torch.compile(model, backend="megabuf", options=options)).backward()
    plan = read_plan(variants(tmp_path)["backward_overwrite_sync"])
    assert [entry["sharded"] for entry in plan["models"].values()] == [False]
    assert mb.handle(model).bucket_table().count("all_reduce float32") == 2


def test_variants_that_launch_different_buckets_are_kept_apart(tmp_path: Path) -> None:
    """A weight with a penalty in the loss: from the second step on its bucket is left to the host."""
    handle, run = attach(dump_dir=str(tmp_path))
    model = handle.model
    assert isinstance(model, Mlp)
    for _ in range(2):
        (loss(run) + model.fc1.weight.square().sum()).backward()
        handle.finish_grad_sync()
        handle.zero_grad()
    number = handle.buffers.handle
    plans = [read_plan(path) for path in tmp_path.glob("rank0/*backward*")]
    assert sorted(plan["launches"] for plan in plans) == [[[number, 0]], [[number, 0], [number, 1]]]


def test_nothing_is_written_without_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGABUF_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    _, run = attach()
    loss(run).backward()
    assert list(tmp_path.iterdir()) == []


def test_make_dump(tmp_path: Path) -> None:
    silent = make_dump(None, rank=0, graph=0, variant="forward")
    assert type(silent) is GraphDump
    gm = copy_graph(traced_mlp("none").forward)
    silent.write_graph(gm, "traced")
    silent.write_plan({})
    silent.write_nodes(gm)
    dump = make_dump(str(tmp_path / "a"), rank=3, graph=7, variant="backward_untouched")
    assert isinstance(dump, DirectoryDump)
    assert dump.directory == tmp_path / "a" / "rank3" / "graph7_backward_untouched"
    dump.write_graph(gm, "first")
    dump.write_graph(gm, "second")
    dump.write_plan({"kind": "x"})
    dump.write_nodes(gm)
    assert files(dump.directory) == ["00_first.py", "01_second.py", "graph.json", "plan.json"]
    plan = read_plan(dump.directory)
    assert [entry["name"] for entry in plan.pop("passes")] == ["first", "second"]
    assert plan == {"format_version": 3, "kind": "x"}


# graph.json.


def nodes(directory: Path) -> list[dict[str, Any]]:
    content = json.loads((directory / "graph.json").read_text())
    assert content["format_version"] == FORMAT_VERSION
    found: list[dict[str, Any]] = content["nodes"]
    return found


def test_nodes_of_a_backward(tmp_path: Path) -> None:
    """Every parameter is written once, each launch follows its last write, and products count their flops."""
    handle, run = attach(dump_dir=str(tmp_path))
    loss(run).backward()
    records = nodes(variants(tmp_path)["backward_overwrite_sync"])
    names = [name for name, _ in handle.model.named_parameters()]
    writes = [record for record in records if record["kind"] == "write"]
    assert sorted(record["params"][0] for record in writes) == sorted(names)
    groups = [(record["kind"], record["group"][1]) for record in records if record["group"]]
    assert [group for kind, group in groups if kind == "launch"] == [0, 1]
    assert groups.index(("launch", 0)) > max(i for i, entry in enumerate(groups) if entry == ("write", 0))
    (fc2,) = [record for record in writes if record["params"] == ["fc2.weight"]]
    assert fc2["op"] == "megabuf.accumulate_wgrad_.default"
    # [29, 37] from six rows; read: both factors; written: the gradient. All fp32.
    assert fc2["flops"] == 2 * 6 * 29 * 37
    assert fc2["nbytes"] == 4 * (29 * 37 + 6 * 29 + 6 * 37)
    assert (fc2["module"], fc2["source"]) == ("fc2", "hidden = torch.tanh(self.fc2(torch.tanh(self.fc1(x))))")


def test_nodes_of_a_waiting_forward(tmp_path: Path) -> None:
    """Directly behind the wait of a group stands its first use."""
    _, run = attach(dump_dir=str(tmp_path), overlap_param_gather=True)
    loss(run).backward()
    records = nodes(variants(tmp_path)["forward"])
    waits = [place for place, record in enumerate(records) if record["kind"] == "wait"]
    assert [records[place]["group"][1] for place in waits] == [1, 0]
    for place in waits:
        assert records[place + 1]["first_use"] == [records[place]["group"]]
    assert [record["module"] for record in records if record["op"] == "aten.addmm.default"] == ["fc1", "fc3"]
    assert {record["kind"] for record in records} == {"input", "view", "wait", "compute", "output"}


def test_inserted_nodes_keep_their_provenance(tmp_path: Path) -> None:
    """Every node of ours leads to a line and a module of the user, if what it replaces did."""
    _, run = attach(dump_dir=str(tmp_path), overlap_param_gather=True)
    loss(run).backward()
    for variant in ("forward", "backward_overwrite_sync"):
        ours = [
            record for record in nodes(variants(tmp_path)[variant]) if record["kind"] in ("wait", "launch", "write")
        ]
        assert len(ours) >= 2
        for record in ours:
            assert record["source"], record
            assert record["module"] in ("fc1", "fc2", "ln", "fc3"), record


def test_passes_are_counted(tmp_path: Path) -> None:
    _, run = attach(dump_dir=str(tmp_path))
    loss(run).backward()
    passes = read_plan(variants(tmp_path)["backward_overwrite_sync"])["passes"]
    assert [entry["name"] for entry in passes] == BACKWARD
    launches = [entry["ops"].get("megabuf.start_grad_sync.default", 0) for entry in passes]
    assert launches == [0, 0, 0, 0, 0, 2, 2]
    assert passes[5]["nodes"] == passes[4]["nodes"] + 2


def test_symbolic_shapes_count_as_traced(tmp_path: Path) -> None:
    model = seeded(Mlp)
    mb.attach(model, mb.MegabufConfig(inner_compiler="aot_eager", dump_dir=str(tmp_path)))
    run = torch.compile(model, backend="megabuf", dynamic=True)
    loss(run).backward()
    records = nodes(variants(tmp_path)["forward"])
    assert [record["flops"] for record in records if record["op"] == "aten.mm.default"] == [2 * 6 * 37 * 29]


# The table of buckets.


def rows(table: str) -> list[list[str]]:
    """Cells, which two or more spaces divide; the line under the head is left out."""
    head, _, *body = table.splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in (head, *body)]


def test_bucket_table() -> None:
    """Known after the first synchronizing backward; until then the host would start every bucket."""
    handle, run = attach()
    head = ["bucket", "parameters", "elements", "padding", "trigger node", "collective"]
    sizes = [
        ["0", "fc3.bias ... fc2.weight (5)", "1,281", "255"],
        ["1", "fc1.bias ... fc1.weight (2)", "518", "122"],
    ]
    host = ["host, after backward", "reduce_scatter float32"]
    assert rows(handle.bucket_table()) == [
        head,
        *([*size, *host] for size in sizes),
    ]
    with handle.no_sync():
        loss(run).backward()
    assert "host, after backward" in handle.bucket_table(), "nothing was launched under no_sync"
    loss(run).backward()
    table = rows(handle.bucket_table())
    assert [row[:4] for row in table] == [head[:4], *sizes]
    assert "[megabuf.accumulate_wgrad_.default]" in table[1][4]
    assert table[2][4].endswith(("[aten.copy_.default]", "[megabuf.accumulate_wgrad_.default]"))
    assert [row[5] for row in table[1:]] == ["reduce_scatter float32"] * 2


def test_bucket_table_sizes_add_up() -> None:
    handle, _ = attach()
    total = sum(bucket.numel for group in handle.plan.groups for bucket in group.buckets)
    body = rows(handle.bucket_table())[1:]
    assert sum(int(row[2].replace(",", "")) + int(row[3].replace(",", "")) for row in body) == total
    assert sum(int(row[2].replace(",", "")) for row in body) == sum(p.numel() for p in handle.model.parameters())


def test_bucket_table_of_one_parameter_and_another_dtype() -> None:
    model = torch.nn.Linear(3, 3, bias=False, dtype=torch.bfloat16)
    handle = mb.attach(model, mb.MegabufConfig(grad_reduce_in_fp32=True))
    (_, row) = rows(bucket_table(handle.plan, {}))
    assert row == ["0", "weight", "9", "119", "host, after backward", "reduce_scatter float32"]
