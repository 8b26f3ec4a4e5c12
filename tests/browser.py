"""A real browser without a window, for tests of pages: Chromium, driven over a pipe by the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE_S = 120
PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe",
]  # fmt: skip


class Browser:
    """One tab. What the page asks for, and what it complains about, is noted since the last `open`."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.to_browser, self.from_browser, self.buffer = to_browser, from_browser, b""
        self.count, self.session = 0, ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self.count:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self.buffer:
            assert select.select([self.from_browser], [], [], deadline - time.monotonic())[0], "the browser is silent"
            part = os.read(self.from_browser, 1 << 20)
            assert part, "the browser has ended"
            self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        method, values = event.get("method", ""), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(values["exceptionDetails"]))
        if method in ("Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(json.dumps(values))

    def open(
        self, page: Path, width: int = 1100, height: int = 900, media: str = "screen", scheme: str = "light"
    ) -> None:
        self.complaints.clear()
        self.requests.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.show(media, scheme)
        self.call("Page.navigate", url=page.as_uri())
        for _ in range(PATIENCE_S * 10):
            if self.value("document.readyState === 'complete' && location.href !== 'about:blank'"):
                break
            time.sleep(0.1)
        self.value("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")

    def show(self, media: str, scheme: str) -> None:
        self.call(
            "Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    def value(self, script: str) -> Any:
        """What an expression of JavaScript is, in the page; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path, height: int = 0) -> None:
        """Writes a PNG of the window, or of the first `height` pixels of the page."""
        width = self.value("innerWidth")
        clip = {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}} if height else {}
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=bool(height), **clip)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextmanager
def start_browser(profile: Path) -> Iterator[Browser]:
    assert PROGRAM is not None
    (theirs, to_browser), (from_browser, ours) = os.pipe(), os.pipe()
    script = f'exec "$@" 3<&{theirs} 4>&{ours}'
    command = ["bash", "-c", script, "browser", PROGRAM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        command, pass_fds=(theirs, ours), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    os.close(theirs)
    os.close(ours)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_S)
        os.close(to_browser)
        os.close(from_browser)
