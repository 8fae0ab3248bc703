"""A server as a process of its own: started, waited for, and ended with all that it started."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from forebay.bench.restore.serving import keeper
from forebay.bench.restore.serving.endpoint import Endpoint, Unanswered
from forebay.errors import ConfigError

LOOPBACK = "127.0.0.1"
_POLL_S = 0.1
_LAST_BYTES, _LAST_LINES = 16 * 2**10, 20
_GRACE_S = 10.0
"""Beyond what the command may take to end: killing what it left behind."""


def free_ports(count: int) -> tuple[int, ...]:
    """Different ones on loopback that nobody listens on now: all are held until the last is drawn."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((LOOPBACK, 0))
        return tuple(int(probe.getsockname()[1]) for probe in probes)


class Process:
    """One running command. Whatever becomes of this process, the command ends with it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, stop_limit_s: float) -> None:
        """Appends what it says to `log`. `environment`: in addition to this process's own. Raises ConfigError."""
        self._command, self._log, self._stop_limit_s = command, log, stop_limit_s
        settings = [f"{name}={value}" for name, value in environment.items()]
        whole = [sys.executable, "-I", keeper.__file__, str(stop_limit_s), "env", "--", *settings, *command]
        try:
            with log.open("ab") as out:
                self._keeper = subprocess.Popen(
                    whole, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                )
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot start {command[0]}: {error}") from None

    @property
    def has_ended(self) -> bool:
        return self._keeper.poll() is not None

    def await_ready(self, endpoint: Endpoint, path: str, limit_s: float) -> None:
        """Until it answers GET `path` with 200. Raises ConfigError with the end of its log when it does not."""
        due_s = time.monotonic() + limit_s
        while not _answers(endpoint, path):
            if self.has_ended:
                raise ConfigError(f"{self._command[0]} ended with {self._keeper.returncode}: {self.last_lines()}")
            if time.monotonic() > due_s:
                raise ConfigError(f"{self._command[0]} did not answer {path} within {limit_s:g} s: {self.last_lines()}")
            time.sleep(_POLL_S)

    def ask_to_end(self) -> None:
        """Without waiting, so that several end at once."""
        if self._keeper.stdin is not None:
            with contextlib.suppress(OSError):
                self._keeper.stdin.close()

    def end(self) -> None:
        """Returns once nothing of it is left. Safe to call twice."""
        self.ask_to_end()
        try:
            self._keeper.wait(self._stop_limit_s + _GRACE_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()  # the command dies with it
            self._keeper.wait()

    def last_lines(self) -> str:
        """Of its log, on one line."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - _LAST_BYTES))
                lines = file.read(_LAST_BYTES).decode(errors="replace").splitlines()
        except OSError as error:
            return f"its log {self._log} cannot be read ({error.strerror})"
        shown = [line.strip() for line in lines if line.strip()][-_LAST_LINES:]
        return " | ".join(shown) or "it said nothing"


def _answers(endpoint: Endpoint, path: str) -> bool:
    try:
        endpoint.ask("GET", path, limit_s=5.0)
    except Unanswered:
        return False
    return True
