"""A `vllm serve` of its own, bound to loopback, as tests and benchmarks need one: started, asked, measured, stopped."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
_HOST = "127.0.0.1"
_READY = "Application startup complete"
_READY_TRIES, _READY_TRY_S = 600, 0.05
_LAST_LINES, _SHOWN_LINES = 400, 40
_STOP_S = 120
_ANSWER_S = 300
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of `/metrics`."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Metrics:
    names: frozenset[str]
    """All that are declared: counters without the `_total` of their samples, and without when they were created."""
    samples: tuple[Sample, ...]

    def total(self, name: str, **labels: str) -> float:
        """Sum over all samples of this name (a counter's with or without `_total`) that have these labels."""
        return sum(
            each.value
            for each in self.samples
            if each.name in (name, f"{name}_total") and labels.items() <= each.labels.items()
        )


class ServerFailed(Exception):
    """`vllm serve` did not come up, or did not end. The message has the last lines of its log."""


class VllmServer:
    """A running server. Requests may be sent from several threads."""

    def __init__(self, process: subprocess.Popen[str], port: int, model: str, log: deque[str]) -> None:
        self._process, self.port, self.model, self._log = process, port, model, log

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    @property
    def log(self) -> str:
        """Its last lines."""
        return "\n".join(self._log)

    def stream(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Greedy tokens of a streamed completion, as they came. Raises OSError or ValueError for a failed one."""
        asked = {
            "model": self.model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        tokens: list[int] = []
        with self._response("POST", "/v1/completions", json.dumps(asked)) as response:
            for line in response:
                text = line.decode().strip()
                if text.startswith("data: ") and text != "data: [DONE]":
                    event = json.loads(text.removeprefix("data: "))
                    if "error" in event:
                        raise ValueError(f"the server ended the stream: {event['error']}")
                    tokens += event["choices"][0].get("token_ids") or ()
        return tokens

    def metrics(self) -> Metrics:
        with self._response("GET", "/metrics") as response:
            return parse_metrics(response.read().decode())

    @contextmanager
    def _response(self, method: str, path: str, body: str | None = None) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(_HOST, self.port, timeout=_ANSWER_S)
        with contextlib.closing(connection):
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise OSError(f"{method} {path}: {response.status} {response.read(2000).decode(errors='replace')}")
            yield response


def parse_metrics(text: str) -> Metrics:
    """The text form of Prometheus. Lines that are none of it are passed over."""
    names: set[str] = set()
    samples: list[Sample] = []
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name = line.split()[2]
            if not name.endswith("_created"):
                names.add(name.removesuffix("_total"))
        elif (match := _SAMPLE.match(line)) is not None:
            labels = dict(_LABEL.findall(match["labels"] or ""))
            samples.append(Sample(match["name"], labels, float(match["value"])))
    return Metrics(frozenset(names), tuple(samples))


@contextmanager
def serving(model: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[VllmServer]:
    """`vllm serve MODEL ARGUMENTS` by this interpreter's vLLM, in this environment, until the block ends.

    Raises ServerFailed.
    """
    port = _free_port()
    command = [*_VLLM, "serve", str(model), "--host", _HOST, "--port", str(port), *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=dict(environment),
        start_new_session=True,
    )
    log: deque[str] = deque(maxlen=_LAST_LINES)
    try:
        _await_ready(process, log)
        _await_listening(process, port, log)
        reader = threading.Thread(target=_drain, args=(process, log), name="forebay-server-log", daemon=True)
        reader.start()
        yield VllmServer(process, port, str(model), log)
        _stop(process, log)
        reader.join(_STOP_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # an engine that outlives its server
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def bench_serve(
    server: VllmServer, arguments: Sequence[str], out: Path, environment: Mapping[str, str]
) -> dict[str, Any]:
    """What `vllm bench serve ARGUMENTS` against this server reports: `completed`, `failed`, `mean_ttft_ms` ...

    It writes its report to `out`. Raises ServerFailed with the end of its output when there is none.
    """
    command = [
        *_VLLM, "bench", "serve", "--base-url", server.url, "--model", server.model, "--ignore-eos",
        "--disable-tqdm", "--save-result", "--result-dir", str(out.parent), "--result-filename", out.name, *arguments,
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", env=dict(environment))
    if ended.returncode or not out.exists():
        raise ServerFailed(f"vllm bench serve ended with {ended.returncode}: {(ended.stdout + ended.stderr)[-3000:]}")
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _await_ready(process: subprocess.Popen[str], log: deque[str]) -> None:
    """Its own word for it; no polling."""
    assert process.stdout is not None
    for line in process.stdout:
        log.append(line.rstrip())
        if _READY in line:
            return
    raise ServerFailed("vllm serve did not come up:\n" + _end_of(log))


def _await_listening(process: subprocess.Popen[str], port: int, log: deque[str]) -> None:
    """A moment after it says that it is ready, and without a word."""
    for _ in range(_READY_TRIES):
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection((_HOST, port)):
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_READY_TRY_S)
            break
    raise ServerFailed("vllm serve does not listen:\n" + _end_of(log))


def _end_of(log: deque[str]) -> str:
    return "\n".join(list(log)[-_SHOWN_LINES:])


def _drain(process: subprocess.Popen[str], log: deque[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        log.append(line.rstrip())


def _stop(process: subprocess.Popen[str], log: deque[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        raise ServerFailed("vllm serve did not end:\n" + _end_of(log)) from None
