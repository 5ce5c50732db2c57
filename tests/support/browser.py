"""Headless Chromium, driven over a pipe by its own protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")
_MOVED = """import fcntl, os, sys
pipes = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
for fd, own in zip(pipes, (3, 4)): os.dup2(fd, own)
os.execv(sys.argv[3], sys.argv[3:])"""  # Chromium reads from 3 and writes to 4
_COMPLAINTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


class Browser:
    """A page in a browser of its own; a context manager.

    Attributes:
        complaints: Messages of the console and exceptions so far.
    """

    def __init__(self, folder: Path, width: int = 1200, dark: bool = False):
        read, self._to = os.pipe()
        self._from, write = os.pipe()
        moved = [sys.executable, "-c", _MOVED, str(read), str(write)]
        command = [*moved, CHROMIUM, *_OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        log = open(folder.parent / f"{folder.name}.log", "wb")  # noqa: SIM115
        self._process = subprocess.Popen(command, pass_fds=(read, write), stdout=log, stderr=log)
        os.close(read), os.close(write), log.close()
        self._held, self._number, self._session, self.complaints = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for name in ("Page", "Runtime", "Log"):
            self.call(f"{name}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._to)  # which ends it
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return what a method of the protocol answers."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self._number:
            if answer.get("method") in _COMPLAINTS:
                self.complaints.append(json.dumps(answer["params"])[:500])
        assert "error" not in answer, answer
        return answer["result"]

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def go(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def until(self, expression: str, seconds: float = 20.0) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(expression):
            assert time.monotonic() < end, (expression, self.run("document.body.innerText"), self.complaints)
            time.sleep(0.02)

    def text(self, name: str) -> str:
        """Return the text of an element by its id."""
        return self.run(f"document.getElementById({name!r}).textContent")

    def picture(self, path: Path) -> None:
        """Write a picture of the page."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            data = os.read(self._from, 1 << 16)
            assert data, "Chromium has ended"
            self._held += data
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)
