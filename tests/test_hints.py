"""Hints over HTTP: good ones prefetch, and hostile ones harm nothing."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from engine_world import PROMPT, SECOND_NS, World, make_world
from forebay.errors import ConfigError
from forebay.events import Totals
from forebay.hints import MOST_BODY_BYTES, HintOptions, Hints
from forebay.keys import block_keys
from forebay.sim.executor import SimExecutor
from forebay.testing.schedule import NAMESPACE
from forebay.types import HOST, BlockKey, JobKind

TOKENS = list(range(40 * NAMESPACE.block_tokens))


@contextlib.contextmanager
def listening(executor: SimExecutor, **options: int) -> Iterator[Hints]:
    hints = Hints(HintOptions(port=0, **options), NAMESPACE, executor.now_ns)
    try:
        yield hints
    finally:
        hints.close()


@pytest.fixture
def world() -> World:
    """A prompt of 40 blocks in its tier and nowhere else."""
    world = make_world(slots=128)
    world.store(PROMPT)
    assert world.engine.drop_host_copies() == 40
    return world


def send(
    hints: Hints, body: bytes, *, path: str = "/prefetch", method: str = "POST", kind: str = "application/json"
) -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection("127.0.0.1", hints.port, timeout=20)
    try:
        connection.request(method, path, body, {"Content-Type": kind})
        answer = connection.getresponse()
        content = answer.read()
        return answer.status, json.loads(content) if content else {}
    finally:
        connection.close()


def raw(hints: Hints, sent: bytes) -> bytes:
    """The first line that comes back for bytes that no client library would send."""
    with socket.create_connection(("127.0.0.1", hints.port), timeout=20) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        return connection.makefile("rb").readline()


def test_a_hint_with_tokens_brings_the_prompt_to_memory_before_its_request_comes(world: World) -> None:
    totals = Totals()
    with listening(world.executor) as hints:
        body = json.dumps({"request_id": "soon", "tokens": TOKENS, "in_s": 0.5}).encode()
        assert send(hints, body) == (202, {"blocks": 40})
        assert hints.drain(world.engine) == 1
        assert hints.drain(world.engine) == 0
    world.settle()
    assert world.count(JobKind.READ, "disk") == 40
    plan = world.plan("soon", PROMPT)
    assert {read.source for read in plan.reads} == {HOST}
    world.engine.cancel_load("soon")
    for event in world.events:
        totals.add(event)
    assert sum(totals.prefetches.values()) == 1
    world.engine.check_idle()


def test_a_hint_with_keys_does_the_same(world: World) -> None:
    with listening(world.executor) as hints:
        body = json.dumps({"request_id": "soon", "keys": [key.hex() for key in PROMPT[:7]], "in_s": 0}).encode()
        assert send(hints, body) == (202, {"blocks": 7})
        world.engine.poll()
        assert hints.drain(world.engine) == 1
    assert hints.counts == {"accepted": 1, "known": 1}


def test_what_nobody_holds_is_counted_and_does_nothing(world: World) -> None:
    with listening(world.executor) as hints:
        for number, wanted in enumerate(([BlockKey(bytes(32)).hex()], [])):
            body = json.dumps({"request_id": str(number), "keys": wanted, "in_s": 1}).encode()
            assert send(hints, body)[0] == 202
        assert hints.drain(world.engine) == 0
        assert hints.counts == {"accepted": 2, "unknown": 2}
    world.engine.check_idle()


HOSTILE = {
    "nothing": b"",
    "no JSON": b"\xff\xfe{",
    "no object": b"[1, 2]",
    "nested": b"[" * 100_000 + b"]" * 100_000,
    "nested in a field": b'{"request_id": "a", "in_s": 1, "tokens": ' + b"[" * 100_000,
    "nothing named": b'{"in_s": 1, "tokens": [1]}',
    "empty name": b'{"request_id": "", "in_s": 1, "tokens": [1]}',
    "long name": b'{"request_id": "' + b"a" * 257 + b'", "in_s": 1, "tokens": [1]}',
    "no time": b'{"request_id": "a", "tokens": [1]}',
    "negative time": b'{"request_id": "a", "in_s": -1, "tokens": [1]}',
    "endless time": b'{"request_id": "a", "in_s": 1e300, "tokens": [1]}',
    "no number": b'{"request_id": "a", "in_s": NaN, "tokens": [1]}',
    "time as text": b'{"request_id": "a", "in_s": "1", "tokens": [1]}',
    "neither": b'{"request_id": "a", "in_s": 1}',
    "both": b'{"request_id": "a", "in_s": 1, "tokens": [], "keys": []}',
    "negative token": b'{"request_id": "a", "in_s": 1, "tokens": [-1]}',
    "huge token": b'{"request_id": "a", "in_s": 1, "tokens": [4294967296]}',
    "token as text": b'{"request_id": "a", "in_s": 1, "tokens": ["1"]}',
    "short key": b'{"request_id": "a", "in_s": 1, "keys": ["00"]}',
    "path as key": b'{"request_id": "a", "in_s": 1, "keys": ["' + b"../" * 21 + b'."]}',
    "key with a newline": b'{"request_id": "a", "in_s": 1, "keys": ["' + b"0" * 64 + b'\\n"]}',
    "a key twice": b'{"request_id": "a", "in_s": 1, "keys": ["' + b"0" * 64 + b'", "' + b"0" * 64 + b'"]}',
    "unknown field": b'{"request_id": "a", "in_s": 1, "tokens": [1], "root": "/"}',
}


def test_what_is_no_hint_is_400_and_reaches_no_engine(world: World) -> None:
    with listening(world.executor) as hints:
        for name, body in HOSTILE.items():
            status, said = send(hints, body)
            assert status == 400, name
            assert str(said["error"]).count("\n") == 0, name
        assert hints.drain(world.engine) == 0
        assert hints.counts == {"400": len(HOSTILE)}
        assert send(hints, b'{"request_id": "a", "in_s": 1, "tokens": [1]}')[0] == 202  # still there
    world.engine.check_idle()


def test_other_paths_methods_and_types_are_refused(world: World) -> None:
    with listening(world.executor) as hints:
        good = b'{"request_id": "a", "in_s": 1, "tokens": [1]}'
        assert send(hints, good, path="/")[0] == 404
        assert send(hints, good, path="/../prefetch")[0] == 404
        assert send(hints, good, kind="text/plain")[0] == 415
        for method in ("GET", "PUT", "DELETE", "HEAD", "OPTIONS"):
            assert send(hints, b"", method=method)[0] == 405
        assert b"501" in raw(hints, b"BREW /prefetch HTTP/1.1\r\n\r\n")
        assert hints.drain(world.engine) == 0


def test_a_body_is_read_only_if_its_length_is_said_and_small(world: World) -> None:
    head = b"POST /prefetch HTTP/1.1\r\nContent-Type: application/json\r\n"
    with listening(world.executor) as hints:
        assert b"411" in raw(hints, head + b"\r\n")
        assert b"411" in raw(hints, head + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}")
        for length in (b"-1", b"1e3", b"9" * 4000, "٣".encode()):
            assert b"411" in raw(hints, head + b"Content-Length: " + length + b"\r\n\r\n")
        assert b"413" in raw(hints, head + b"Content-Length: %d\r\n\r\n" % (MOST_BODY_BYTES + 1))
        assert b"400" in raw(hints, head + b"Content-Length: 100\r\n\r\n{}")
        assert b"400" in raw(hints, b"\x16\x03\x01\x02\x00\x01\n")  # TLS
        assert hints.drain(world.engine) == 0


def test_a_flood_is_429_and_what_was_taken_is_bounded(world: World) -> None:
    with listening(world.executor, queue_hints=4, open_hints=2) as hints:
        keys = [[key.hex() for key in PROMPT[: 1 + number]] for number in range(12)]
        answers = [
            send(hints, json.dumps({"request_id": str(number), "keys": wanted, "in_s": 1}).encode())[0]
            for number, wanted in enumerate(keys)
        ]
        assert answers == [202] * 4 + [429] * 8
        assert hints.drain(world.engine) == 2
        assert hints.counts == {"accepted": 4, "429": 8, "known": 2, "crowded": 2}
        world.settle()
        world.executor.wait(2 * SECOND_NS)
        assert send(hints, json.dumps({"request_id": "later", "keys": keys[0], "in_s": 1}).encode())[0] == 202
        assert hints.drain(world.engine) == 1  # the first ones are over


def test_many_clients_at_once_and_silent_ones_leave_it_answering(world: World) -> None:
    with listening(world.executor) as hints, contextlib.ExitStack() as stack:
        for _ in range(4):  # they say nothing, and hold half of the places
            stack.enter_context(socket.create_connection(("127.0.0.1", hints.port), timeout=20))
        statuses: list[int] = []

        def client(number: int) -> None:
            body = json.dumps({"request_id": str(number), "tokens": TOKENS[:8], "in_s": 1}).encode()
            with contextlib.suppress(OSError, http.client.HTTPException):  # one turned away at the door
                statuses.append(send(hints, body)[0])

        clients = [threading.Thread(target=client, args=(number,)) for number in range(16)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        turned_away = hints.counts.get("503", 0)
        assert statuses
        assert set(statuses) == {202}
        assert len(statuses) + turned_away == 16
        assert hints.drain(world.engine) == len(statuses)


def test_a_port_that_is_taken_or_none_is_a_config_error(world: World) -> None:
    with listening(world.executor) as hints:
        with pytest.raises(ConfigError, match="name another port"):
            Hints(HintOptions(port=hints.port), NAMESPACE)
        with pytest.raises(ConfigError, match="port must be"):
            Hints(HintOptions(port=70_000), NAMESPACE)
        assert block_keys(NAMESPACE, TOKENS) == PROMPT
