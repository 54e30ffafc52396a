"""The page of ``megabuf timeline`` in headless Chromium: what is drawn, the mouse, the keyboard, the console.

Among the slow tests, because Chromium cannot be had from pip: ``apt install chromium``, then
``tests/run.sh --slow tests/test_cli_browser.py``. What the page contains is tested without a browser in
``test_cli_timeline.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Page, find_chromium
from cli_dumps import megabuf
from PIL import Image

pytestmark = pytest.mark.slow

COLORS = {"gather": (0x2A, 0x9D, 0x6F), "reduce": (0x7D, 0x55, 0xC7)}


@pytest.fixture
def page(cli_dump: Callable[[str], Path], tmp_path: Path) -> Iterator[Page]:
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("needs chromium or google-chrome on PATH")
    path = tmp_path / "step.html"
    assert megabuf("timeline", cli_dump("train_gpt"), "-o", path).code == 0
    with Page(chromium, path.as_uri()) as opened:
        yield opened
        assert opened.problems == []


def boxes(page: Page) -> dict[tuple[str, str, str], list[float]]:
    """Left, top, width and height of every bar, by kind, bucket and direction."""
    found: list[Any] = page.evaluate(
        """[...document.querySelectorAll("[data-kind] .bar")].map((bar) => {
            const data = bar.closest("[data-kind]").dataset, box = bar.getBoundingClientRect();
            return [data.kind, data.bucket, data.direction, [box.x, box.y, box.width, box.height]];
        })"""
    )
    return {(kind, bucket, direction): box for kind, bucket, direction, box in found}


def shown(page: Page) -> str:
    text: str = page.evaluate("document.getElementById('mark').textContent")
    return text


def test_every_bar_has_its_color(page: Page, tmp_path: Path) -> None:
    page.screenshot(tmp_path / "step.png")
    pixels = np.asarray(Image.open(tmp_path / "step.png").convert("RGB")).astype(int)
    found = boxes(page)
    assert len(found) == 2 * 2 * 5, "two rows, two directions, five buckets"
    for (kind, bucket, direction), (x, y, width, height) in found.items():
        inside = pixels[int(y) + 1 : int(y + height), int(x) + 1 : int(x + width)].reshape(-1, 3)
        share = (np.abs(inside - COLORS[direction]).max(axis=1) < 12).mean()
        # The rest is its number, the line where it is needed, and the hatching where it comes too late.
        assert share > 0.5, (kind, bucket, direction)


def test_hover_shows_the_bucket(page: Page) -> None:
    x, y, width, height = boxes(page)["lane", "0.3", "reduce"]
    page.move_mouse(x + width / 2, y + height / 2)
    lines = shown(page).splitlines()
    assert lines[0] == "bucket 3: reduce_scatter of 82.0 KiB float32 over 8 ranks"
    assert any(line.startswith("exposed ") for line in lines)
    params = page.evaluate("document.getElementById('params').textContent")
    assert "blocks.0.attention_out.weight  4,096" in params
    same = page.evaluate("[...document.querySelectorAll('.same')].map((mark) => mark.dataset.bucket)")
    assert set(same) == {"0.3"}
    page.move_mouse(2, 2)
    assert shown(page) == "Nothing chosen."


def test_keyboard(page: Page) -> None:
    page.press("Tab")
    assert shown(page).startswith("forward: ")
    found = []
    for key in ("ArrowLeft", "ArrowDown", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowRight", "ArrowUp"):
        page.press(key)
        found.append(shown(page).split(" of ")[0])
    assert found == [
        "bucket 4: all_gather",  # standing still, on the compute row
        "bucket 4: all_gather",  # on the link
        "bucket 3: all_gather",
        "bucket 0: all_gather",  # in its lane
        "bucket 1: all_gather",
        "bucket 1: reduce_scatter",
        "bucket 0: reduce_scatter",
    ]
    page.press("Escape")
    assert shown(page) == "Nothing chosen."


def test_zoom(page: Page) -> None:
    def width() -> float:
        return float(page.evaluate("document.querySelector('svg').getBoundingClientRect().width"))

    before = width()
    page.press("+")
    assert width() == pytest.approx(1.5 * before)
    page.press("0")
    assert width() == before
