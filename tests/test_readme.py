"""What the README shows, runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.dist
@pytest.mark.timeout(200)
def test_ten_lines_run_on_two_processes(tmp_path: Path) -> None:
    """And all that it shows after them."""
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    script = tmp_path / "script.py"
    script.write_text("".join(blocks))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr


def test_files_and_options_that_it_names_exist() -> None:
    import dataclasses

    import megabuf_fx as mb

    for name in re.findall(r"`((?:megabuf_fx|runtime|tests|examples)/[\w/]+\.(?:py|sh))`", README):
        assert (ROOT / name).is_file(), name
    for name in re.findall(r"tests/run\.sh((?: tests/\w+\.py)+)", README):
        for path in name.split():
            assert (ROOT / path).is_file(), path
    table = README[README.index("## Options") : README.index("## Numbers")]
    for field in dataclasses.fields(mb.MegabufConfig):
        assert f"`{field.name}`" in table, field.name


def test_the_example_compares_itself_with_ddp(tmp_path: Path) -> None:
    """The main job in small: one process, op by op, two steps, compared with plain training."""
    command = [sys.executable, str(ROOT / "examples/train_gpt.py"), "--steps", "2", "--layers", "1", "--n-embd", "48"]
    command += ["--heads", "2", "--batch-size", "2", "--inner", "aot_eager", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert "trigger node" in done.stdout
    assert "largest difference from plain DDP in 2 steps" in done.stdout
    assert (tmp_path / "loss.png").is_file()
