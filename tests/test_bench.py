"""The benchmarks run; their figures are for a quiet machine and a person to judge."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parent / "bench"
sys.path.insert(0, str(BENCH))
from contestants import OURS, PEERS  # noqa: E402
from traffic_bench import count_traffic  # noqa: E402


def test_plan_bench(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "plan_bench.py"), "--rounds", "1", "--case", "plan gpt2 --dp 8"]
    result = subprocess.run(
        [*command, "--json", str(tmp_path / "found.json")], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    (samples,) = json.loads((tmp_path / "found.json").read_text()).values()
    assert len(samples) == 1
    assert "megabuf plan gpt2 --dp 8" in result.stdout


@pytest.mark.dist
def test_checkpoint_bench(tmp_path: Path) -> None:
    options = ["--rounds", "1", "--layers", "1", "--n-embd", "32", "--heads", "2", "--context", "16"]
    command = [sys.executable, str(BENCH / "checkpoint_bench.py"), *options, "--folder", str(tmp_path)]
    result = subprocess.run(
        [*command, "--json", str(tmp_path / "found.json")], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "found.json").read_text())["summary"]
    assert len(summary) == 3
    for name, entry in summary.items():
        assert name in result.stdout
        # Weights and two moments, in fp32; of a small model the headers count, too.
        assert 12 <= entry["bytes_per_parameter"] < 30
        assert all(entry[key][0] > 0 for key in ("save", "load", "async"))
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def run_bench(tmp_path: Path, name: str, *options: str) -> tuple[dict[str, Any], str]:
    """What it measured, and what it printed."""
    command = [sys.executable, str(BENCH / name), *options, "--json", str(tmp_path / "found.json")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads((tmp_path / "found.json").read_text()), result.stdout


@pytest.mark.dist
def test_step_bench(tmp_path: Path) -> None:
    sizes = ["--layers", "1", "--n-embd", "32", "--heads", "2", "--context", "16", "--batch-size", "2"]
    chosen = ["--link", "loopback", "--precision", "fp32", "--micro-batches", "2", "--rounds", "1", "--steps", "1"]
    found, text = run_bench(tmp_path, "step_bench.py", *chosen, *sizes, "--inner", "aot_eager")
    (cell,) = found.values()
    assert list(cell["seconds"]) == [*OURS, *PEERS, "no collectives"]
    expected = pytest.approx(cell["losses"]["DDP"], rel=1e-5)
    assert all(losses == expected for name, losses in cell["losses"].items() if name != "no collectives")
    assert cell["summary"]["limit"]["total"] > cell["summary"]["limit"]["compute"]
    assert "megabuf, not sharded" in text


@pytest.mark.dist
def test_memory_bench(tmp_path: Path) -> None:
    """A model so small that padding and other small things count; large ones are as the ledger says."""
    size = ("--layers", "1", "--n-embd", "64", "--heads", "2", "--context", "16", "--buckets", "3")
    options = ("--mode", "fp32", "--only", "megabuf, sharded, overlap", "--inner", "aot_eager", *size)
    found, text = run_bench(tmp_path, "memory_bench.py", *options)
    summary = found["fp32"]["summary"]
    assert set(summary) == {"compute alone", "megabuf, sharded, overlap_param_gather"}
    ours = summary["megabuf, sharded, overlap_param_gather"]
    # 4 bytes of gradients and 4 of parameters, and what is small beside a larger model; a copy that attach left behind
    # would make 12 of it.
    assert ours["wrapped"] == pytest.approx(8.0, rel=0.2)
    assert ours["rest"] == pytest.approx(ours["ledger"], rel=0.03)
    assert summary["compute alone"]["rest"] == pytest.approx(4.0, rel=0.01)
    assert f"{ours['ledger']:.2f}" in text


def test_traffic_bench(tmp_path: Path) -> None:
    """Matrices are overwritten or added to in place: 4 bytes per element, then 8, nothing zeroed, no temporary."""
    found, text = run_bench(tmp_path, "traffic_bench.py", "--mode", "fp32", "--layers", "1", "--n-embd", "32")
    entry = found["found"]["fp32"]
    matrices, vectors = entry["kinds"]["matrices"], entry["kinds"]["norms and biases"]
    assert (matrices["first"], matrices["later"], matrices["temporary"]) == (4, 8, 0)
    (embedding,) = (counts for kind, counts in entry["kinds"].items() if kind.startswith("token"))
    assert (embedding["first"], embedding["later"], embedding["temporary"]) == (4, 8, 0)
    # Inductor stores a sum of rows and loads it again in the same loop.
    assert (vectors["first"], vectors["later"]) == (4, 8)
    assert vectors["temporary"] <= 8
    assert (entry["zeroed"], entry["inside_ops"]) == (0, 0)
    assert "norms and biases" in text


KERNEL = """
cpp_fused_0 = async_compile.cpp_pybinding(['float*', 'const float*', 'float*', 'float*'], r'''
extern "C"  void  kernel(float* in_out_ptr0,
                       const float* in_ptr0,
                       float* out_ptr0,
                       float* out_ptr1)
{
    auto out_ptr2 = in_out_ptr0;
    tmp0.store(out_ptr2 + static_cast<int64_t>(x0));
    auto tmp1 = at::vec::Vectorized<float>::loadu(BODY + static_cast<int64_t>(x0), static_cast<int64_t>(16));
    auto tmp2 = in_ptr0[static_cast<int64_t>(x0)];
    tmp1.store(out_ptr1 + static_cast<int64_t>(x0));
}
''')

    def call(self, args):
        main_grad_0, main_grad_1, main_grad_2 = args
        buf0 = empty_strided_cpu((8, 4), (4, 1), torch.float32)
        buf1 = buf0; del buf0  # reuse
        buf2 = empty_strided_cpu((7, ), (1, ), torch.float32)
        cpp_fused_0(buf1, buf2, buf3, main_grad_0)
        torch.ops.megabuf.accumulate_wgrad_.default(main_grad_1, reinterpret_tensor(buf2, (7, 1)), buf4, True)
        torch.ops.megabuf.accumulate_embedding_.default(main_grad_2, buf2, buf4, False)
        return (None, )
"""


def test_traffic_is_counted_from_generated_code() -> None:
    """A temporary of the parameter's size counts for what is done with it; one of another size does not."""
    sizes = {0: 32, 1: 7, 2: 9}
    stored_only, through_it = (
        count_traffic(KERNEL.replace("BODY", source), sizes) for source in ("in_ptr0", "out_ptr2")
    )
    assert [(each.read, each.written, each.temporary) for each in stored_only.values()] == [
        (0, 4, 4),
        (4, 4, 0),
        (0, 4, 0),
    ]
    assert through_it[0].temporary == 8
    accumulating = count_traffic(KERNEL.replace("BODY", "out_ptr1"), sizes)[0]
    assert (accumulating.read, accumulating.written) == (4, 4)


def test_traffic_that_cannot_be_told_is_an_error() -> None:
    lost = KERNEL.replace(
        "        return (None", "        aten.index_put_(main_grad_0, [buf3], buf4, True)\n        return (None"
    )
    with pytest.raises(ValueError, match=r"cannot tell what this does .* aten.index_put_\(main_grad_0"):
        count_traffic(lost, {0: 32, 1: 7, 2: 9})


@pytest.mark.dist
def test_buckets_bench(tmp_path: Path) -> None:
    sizes = ["--layers", "1", "--n-embd", "32", "--heads", "2", "--context", "16", "--batch-size", "2"]
    options = ["--rate", "loopback", "--rounds", "1", "--steps", "1", *sizes]
    found, text = run_bench(tmp_path, "buckets_bench.py", *options)
    assert len(found["samples_s"]) == 6
    predicted = found["predicted_ms"]
    assert predicted["auto"] == min(predicted.values())
    assert all(name in text for name in found["samples_s"])


def test_optimizer_bench(tmp_path: Path) -> None:
    options = ["--rounds", "1", "--numel", "20000", "--optimizer", "SGD", "--precision", "bf16, bf16 gradients"]
    command = [sys.executable, str(BENCH / "optimizer_bench.py"), *options]
    result = subprocess.run(
        [*command, "--json", str(tmp_path / "found.json")], capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode == 0, result.stderr
    (case,) = json.loads((tmp_path / "found.json").read_text())["cases"]
    # Gradient, master and momentum are read; master, momentum and parameter are written.
    assert case["bytes_per_element"] == (2 + 4 + 4) + (4 + 4 + 2)
    for name, entry in case["summary"].items():
        assert name in result.stdout
        assert entry["ratio"] > 0


def test_compile_bench(tmp_path: Path) -> None:
    contestants = ("Inductor", "megabuf, 2 micro-batches")
    options = ["--inner", "aot_eager", "--layers", "1", "--n-embd", "16", "--context", "8", "--caches", "cold"]
    options += ["--contestants", *contestants]
    found, printed = run_bench(tmp_path, "compile_bench.py", "--rounds", "1", *options)
    ((one_round,),) = found["rounds"].values()
    assert tuple(one_round) == contestants
    for name, caches in one_round.items():
        assert name in printed
        assert 0 < caches["cold"]["cpu"] < caches["cold"]["process"]


def test_passes_bench(tmp_path: Path) -> None:
    options = ["--rounds", "1", "--nodes", "100", "400", "--table", "none"]
    found, printed = run_bench(tmp_path, "passes_bench.py", *options)
    del found["torch"]
    assert len(found) == 4
    for kind, sizes in found.items():
        assert kind in printed
        small, large = map(int, sizes)
        assert 2 * small < large, "the longer graph has more blocks"
        parts = next(iter(sizes.values()))[0]
        assert {"copies", "add_buffer_inputs", "runner", "boundaries"} < parts.keys()
        assert ("verify_forward" if kind == "forward" else "verify_backward") in parts


def test_overhead_bench(tmp_path: Path) -> None:
    options = ["--rounds", "1", "--params", "20", "--buckets", "1", "5"]
    found, _ = run_bench(tmp_path, "overhead_bench.py", *options)
    del found["torch"]
    one, several = map(int, found)
    assert one == 1 < several, "a bucket is at least as large as asked for"
    for samples in found.values():
        assert all(sample[column] > 0 for sample in samples for column in ("forward", "backward", "launches", "finish"))
        assert all(sample["hooks"] == 0 for sample in samples), "one graph covers everything"
