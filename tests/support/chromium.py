"""Chromium without a window, spoken to through a pipe: JSON messages that end in a null byte (DevTools' protocol)."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = (os.environ.get("CHROMIUM", "chromium"), "chromium", "chromium-browser", "google-chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
"""The path in the environment variable CHROMIUM, or what is installed; None if there is none."""
PATIENCE = 60.0
"""Seconds to wait for an answer."""


class Chromium:
    """A browser with one page. Its network is off but for files."""

    def __init__(self, profile: Path, width: int = 1000, height: int = 1200) -> None:
        assert PROGRAM is not None
        to_browser, self._write = _pipe()
        self._read, from_browser = _pipe()
        switches = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        switches += ["--remote-debugging-pipe", f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        # the browser reads its messages from file descriptor 3 and answers on 4
        wired = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", wired, "bash", str(to_browser), str(from_browser), PROGRAM, *switches, "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number = 0
        self._buffer = b""
        self.events: list[dict[str, Any]] = []
        """What the page has reported on its own: errors, messages on its console, requests."""
        self._session: str | None = None
        targets = self._send("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self._send("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._send(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE)
        os.close(self._write)
        os.close(self._read)

    def open(self, page: Path | str) -> None:
        """Load a file or an address, and wait until it has been drawn."""
        loads = self._loads()
        self._send("Page.navigate", url=page if isinstance(page, str) else page.absolute().as_uri())
        while self._loads() == loads:
            self.events.append(self._receive(time.monotonic() + PATIENCE))
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; an assertion fails if it raises."""
        done = self._send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, script: str, seconds: float = PATIENCE) -> Any:
        """Wait until a JavaScript expression is true; returns its value. One that raises is not true yet."""
        end = time.monotonic() + seconds
        attempt = f"(() => {{ try {{ return {script} }} catch (error) {{ return null }} }})()"
        while not (value := self.run(f"new Promise((done) => setTimeout(() => done({attempt}), 20))")):
            assert time.monotonic() < end, f"still false: {script}"
        return value

    def press(self, key: str, code: int = 0) -> None:
        """Press and release a key. ``code``: Windows's number of it, which those without a character need."""
        text = {"text": "\r"} if key == "Enter" else {}
        self._send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self._send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """``kind``: ``mouseMoved``, ``mousePressed``, ``mouseReleased``; in pixels of the page."""
        self._send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def look(self, width: int, height: int, *, phone: bool = False, dark: bool = False, printed: bool = False) -> None:
        """Be a screen of this size, or a sheet of paper."""
        scale = 2 if phone else 1
        screen = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        self._send("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", media="print" if printed else "", features=[scheme])
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def picture(self, *, whole: bool = True) -> bytes:
        """The page as a PNG."""
        return base64.b64decode(self._send("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def paper(self) -> bytes:
        """The page as a PDF, as it would be printed."""
        return base64.b64decode(self._send("Page.printToPDF", printBackground=False)["data"])

    def requests(self) -> list[str]:
        """The addresses that were asked, of files and of a network."""
        sent = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in sent]

    def complaints(self, *servers: str) -> list[str]:
        """Errors of scripts, and whatever was refused or asked of a network other than these servers."""
        errors = ("Runtime.exceptionThrown", "Log.entryAdded")
        found = [json.dumps(event["params"]) for event in self.events if event["method"] in errors]
        inside = ("file:", "data:", "about:", *servers)
        return found + [f"asked for {url}" for url in self.requests() if not url.startswith(inside)]

    def _loads(self) -> int:
        return sum(event["method"] == "Page.loadEventFired" for event in self.events)

    def _send(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while True:
            answer = self._receive(until)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            piece = os.read(self._read, 1 << 20) if ready else b""
            assert piece, "the browser does not answer"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


def _pipe() -> tuple[int, int]:
    """One whose ends do not lie where the browser's shall be."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
