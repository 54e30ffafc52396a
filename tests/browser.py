"""A page in headless Chromium, driven over its debugging pipe: no further package, no port.

Messages of the DevTools protocol are JSON ended by a zero byte; Chromium reads them from descriptor 3 and writes to 4.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell")
_TIMEOUT = 30.0


def find_chromium() -> str | None:
    """Path of a Chromium on PATH, None without one."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class Page:
    """One page of ``size`` pixels. ``problems`` collects errors of the console and uncaught exceptions."""

    def __init__(self, chromium: str, url: str, *, size: tuple[int, int] = (1420, 1000)) -> None:
        self.problems: list[str] = []
        self._ids = itertools.count(1)
        self._buffer = b""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        their_input, self._to = os.pipe()
        self._from, their_output = os.pipe()
        width, height = size
        # The shell puts the pipes on the descriptors that Chromium expects. The sandbox needs rights that a container
        # does not give; the page is our own.
        command = 'input=$1 output=$2; shift 2; exec "$@" 3<&"$input" 4>&"$output"'
        self._process = subprocess.Popen(
            [
                *("bash", "-c", command, "bash", str(their_input), str(their_output), chromium),
                *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
                *(f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}"),
                *("--no-first-run", "--remote-debugging-pipe", "about:blank"),
            ],
            pass_fds=(their_input, their_output),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_input)
        os.close(their_output)
        self._session: str | None = None
        try:
            target = self._call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self._call(f"{domain}.enable")
            self._call(
                "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
            )
            self._call("Page.navigate", url=url)
            deadline = time.monotonic() + _TIMEOUT
            while self.evaluate("document.readyState") != "complete" or self.evaluate("location.href") == "about:blank":
                assert time.monotonic() < deadline, "the page did not load"
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def move_mouse(self, x: float, y: float) -> None:
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """``key`` as in ``KeyboardEvent.key``."""
        codes = {"Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        code = codes.get(key, ord(key[0]))
        text = {"text": key} if len(key) == 1 else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path) -> None:
        """The visible part as PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            self._note(answer)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], _TIMEOUT)
            part = os.read(self._from, 1 << 16) if ready else b""
            assert part, "Chromium does not answer"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"].get("exception", params)))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(str(params["args"]))
