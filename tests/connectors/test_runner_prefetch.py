"""Prompts that are known beforehand, by a call or by a hint over HTTP, come from DRAM."""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from connector_kit import BLOCK_TOKENS, file_runner, hits, make_cold, prompt, recomputed, settle  # noqa: E402

from forebay.connectors.transformers import Runner  # noqa: E402
from forebay.errors import ConfigError  # noqa: E402
from forebay.types import HOST  # noqa: E402

pytestmark = pytest.mark.model


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_prompt_that_was_announced_comes_from_memory(tmp_path: Path) -> None:
    port = free_port()
    with file_runner(tmp_path / "pool", hints_port=port) as runner:
        tokens = prompt(8 * BLOCK_TOKENS + 1)
        expected = recomputed(runner, tokens, 4)
        runner.generate(tokens, 4)
        make_cold(runner)
        assert runner.prefetch(tokens, 5.0, "called") == 8
        rest_until_loaded(runner)
        called = runner.generate(tokens, 4, "called")
        assert (called.tokens, hits(called)) == (expected, {HOST: 8 * BLOCK_TOKENS})
        make_cold(runner)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        body = json.dumps({"request_id": "hinted", "tokens": tokens, "in_s": 5})
        connection.request("POST", "/prefetch", body, {"Content-Type": "application/json"})
        assert connection.getresponse().status == 202
        connection.close()
        runner.rest(0.0)
        rest_until_loaded(runner)
        hinted = runner.generate(tokens, 4, "hinted")
        assert (hinted.tokens, hits(hinted)) == (expected, {HOST: 8 * BLOCK_TOKENS})
        settle(runner)  # nothing is kept for a request that has come


def rest_until_loaded(runner: Runner) -> None:
    for _ in range(1000):
        runner.rest(0.01)
        if runner.store.engine.idle:
            return
    raise AssertionError("the prefetch does not end")


def test_a_port_that_is_taken_is_one_line_and_leaves_nothing_open(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = int(other.getsockname()[1])
        for _ in range(2):
            with pytest.raises(ConfigError, match="name another port"):
                file_runner(tmp_path / "pool", hints_port=port)
