"""A headless Chromium that answers questions about a page, over its own pipe (the DevTools protocol): no other package.

Messages are JSON, each ended by a zero byte; Chromium reads them from descriptor 3 and writes to 4.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_LONGEST_S = 60.0
_LAUNCHER = """
import fcntl, os, sys
theirs = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3]]  # 3 and 4 may be among them
for ours, found in zip((3, 4), theirs):
    os.dup2(found, ours)
os.execv(sys.argv[3], sys.argv[3:])
"""


def chromium() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page at a time. Events are kept as they come."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._rest, self._sent, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []

    def open_page(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def show(self, page: Path, width: int) -> None:
        """Load it in a window of that width, and wait until it has loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )  # fmt: skip
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not any(each["method"] == "Page.loadEventFired" for each in self.events):
            self._message()

    def evaluate(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._sent:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def _message(self) -> dict[str, Any]:
        ends = time.monotonic() + _LONGEST_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reads], [], [], max(0.0, ends - time.monotonic()))
            assert ready, f"Chromium did not answer within {_LONGEST_S:.0f} s"
            piece = os.read(self._reads, 2**20)
            assert piece, "Chromium ended"
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message


@contextmanager
def browser(program: str, profile: Path) -> Iterator[Browser]:
    to_it, ours_out = os.pipe()
    ours_in, from_it = os.pipe()
    options = (
        "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--disable-background-networking", "--no-first-run", f"--user-data-dir={profile}",
    )  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, str(to_it), str(from_it), program, *options],
        pass_fds=(to_it, from_it),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_it)
    os.close(from_it)
    try:
        found = Browser(ours_in, ours_out)
        found.open_page()
        yield found
    finally:
        os.close(ours_out)
        os.close(ours_in)
        process.kill()
        process.wait()
