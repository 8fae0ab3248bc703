"""One request against servers that behave, and against those that do not: bounded, reported, never lost."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from forebay.bench.restore.serving.endpoint import Endpoint, Unanswered
from forebay.bench.restore.serving.exchange import Completion, Exchange, Limits, run_all
from forebay.errors import ConfigError

LIMITS = Limits(first_token_s=0.4, answer_s=0.8)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
TOKEN = b'data: {"choices": [{"text": " a", "token_ids": [7], "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"text": " b", "token_ids": [8], "finish_reason": "length"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"
Says = Callable[[socket.socket, threading.Event], None]


class Listener:
    """Answers each connection with whatever it is told to, once the request has come."""

    def __init__(self, says: Says) -> None:
        self._says, self._over = says, threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.endpoint = Endpoint("127.0.0.1", self._socket.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with peer:
            try:
                peer.recv(65536)
                self._says(peer, self._over)
                peer.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # who asked has gone

    def close(self) -> None:
        self._over.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def listen() -> Iterator[Callable[[Says | bytes], Endpoint]]:
    made: list[Listener] = []

    def start(says: Says | bytes) -> Endpoint:
        def answer(peer: socket.socket, over: threading.Event) -> None:
            peer.sendall(says) if isinstance(says, bytes) else says(peer, over)

        made.append(Listener(answer))
        return made[-1].endpoint

    yield start
    for listener in made:
        listener.close()


def ask(endpoint: Endpoint, tokens: int = 2, limits: Limits = LIMITS) -> Completion:
    [completion] = run_all([Exchange(endpoint, {"prompt": [1] * 9, "max_tokens": tokens}, 9, limits)])
    assert completion.sent_ns <= (completion.first_token_ns or completion.ended_ns) <= completion.ended_ns
    return completion


Listen = Callable[[Says | bytes], Endpoint]


def test_a_sound_answer_is_timed_and_counted(listen: Listen) -> None:
    heard = ask(listen(HEAD + TOKEN + LAST + USAGE + DONE))
    assert (heard.error, heard.output_tokens, heard.prompt_tokens, heard.cached_tokens) == ("", 2, 9, None)
    again = ask(listen(HEAD + b": hello\r\n" + TOKEN + LAST))  # without usage and the word that it is done
    assert (again.error, again.output_tokens, again.prompt_tokens) == ("", 2, None)
    assert heard.output_digest == again.output_digest != ""
    other = ask(listen(HEAD + LAST + LAST + USAGE + DONE))
    assert other.output_digest != heard.output_digest


def test_cached_tokens_come_from_usage_or_from_what_sglang_adds(listen: Listen) -> None:
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}}\n\n'  # noqa: E501
    assert ask(listen(HEAD + TOKEN + LAST + usage + DONE)).cached_tokens == 8
    details = {"device": 0, "host": 3, "storage": 5, "storage_backend": "Forebay"}
    more = b"data: " + json.dumps({"choices": [], "sglext": {"cached_tokens_details": details}}).encode() + b"\n\n"
    heard = ask(listen(HEAD + TOKEN + LAST + USAGE + more + DONE))
    assert (heard.cached_tokens, dict(heard.cached_from)) == (8, {"host": 3, "storage": 5})


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", "RemoteDisconnected"),
        (b"\x00\xff nonsense\r\n\r\n", "BadStatusLine"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 9\r\n\r\nnot \x1b[2Jnow", "HTTP 503: not ?[2J"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n", "HTTP 302"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{}", "no stream of events but 'application/json'"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + TOKEN + LAST + DONE, "no stream of events but ''"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n", "got more than 100 headers"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", "LineTooLong"),
        (HEAD[:-2] + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", "the stream ended before the answer did"),
        (HEAD, "the stream ended before the answer did"),
        (HEAD + TOKEN, "the stream ended before the answer did"),
        (HEAD + DONE, "the answer has no token"),
        (HEAD + b'data: {"choices": [{"text": ""}]}\n\n' + DONE, "the answer has no token"),
        (HEAD + b"data: {broken\n\n", "an event is not what it should be"),
        (HEAD + b'data: {"choices": "many"}\n\n', "an event is not what it should be"),
        (HEAD + b'data: {"usage": {"prompt_tokens": -1}}\n\n', "an event is not what it should be"),
        (HEAD + b'data: {"choices": [{"token_ids": [99999999999999999999]}]}\n\n', "an event is not what it should be"),
        (HEAD + b'data: {"a": ' + b"[" * 60_000 + b"\n\n", "an event is not what it should be"),
        (HEAD + b'data: "\xff\xfe"\n\n', "an event is not what it should be"),
        (HEAD + TOKEN + b'data: {"error": {"message": "out of memory"}}\n\n', "the server ended the stream"),
        (HEAD + TOKEN + TOKEN + LAST + DONE, "the answer has 3 tokens, and 2 were asked for"),
        (
            HEAD + TOKEN + LAST
            + b'data: {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 10}}}\n\n' + DONE,
            "10 of 9 prompt tokens were cached",
        ),
        (HEAD + b"data: " + b"x" * 70_000 + b"\n\n", "a line has more than"),
    ],
)  # fmt: skip
def test_a_bad_answer_is_an_error(listen: Listen, answer: bytes, error: str) -> None:
    heard = ask(listen(answer))
    assert error in heard.error
    assert len(heard.error) < 400
    assert heard.error.isprintable()
    assert heard.output_digest == ""


def dribble(peer: socket.socket, over: threading.Event) -> None:
    for byte in itertools.chain(HEAD, itertools.cycle(b": still here\n")):
        peer.sendall(bytes([byte]))
        if over.wait(0.02):
            return


def dribble_headers(peer: socket.socket, over: threading.Event) -> None:
    while not over.wait(0.02):
        peer.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")


def silence(peer: socket.socket, over: threading.Event) -> None:
    over.wait(30)


def stall_after_a_token(peer: socket.socket, over: threading.Event) -> None:
    peer.sendall(HEAD + TOKEN)
    over.wait(30)


def flood(what: bytes) -> Says:
    def say(peer: socket.socket, over: threading.Event) -> None:
        peer.sendall(HEAD)
        while not over.is_set():
            peer.sendall(what)

    return say


@pytest.mark.parametrize("says", [dribble, dribble_headers, silence])
def test_a_server_that_never_comes_to_the_point_is_cut_off(listen: Listen, says: Says) -> None:
    began_s = time.monotonic()
    heard = ask(listen(says))
    assert heard.error == "the first token did not come within 0.4 s"
    assert heard.first_token_ns is None
    assert time.monotonic() - began_s < 10


def test_an_answer_that_stalls_is_cut_off(listen: Listen) -> None:
    heard = ask(listen(stall_after_a_token))
    assert heard.error == "the end of the answer did not come within 0.8 s"
    assert heard.first_token_ns is not None


@pytest.mark.parametrize("what", [TOKEN * 50, b": nothing\n" * 500, b"x" * 4096])
def test_an_endless_stream_is_bounded(listen: Listen, what: bytes) -> None:
    heard = ask(listen(flood(what)), limits=Limits(first_token_s=60, answer_s=60))
    assert "more than" in heard.error


def test_of_many_at_once_each_gets_its_own_end(listen: Listen) -> None:
    sound, mute = listen(HEAD + TOKEN + LAST + USAGE + DONE), listen(silence)
    closed = Endpoint("127.0.0.1", 1)
    body = {"prompt": [1], "max_tokens": 2}
    done = run_all([Exchange(each, body, 1, LIMITS) for each in (sound, mute, closed) * 8])
    assert [each.error[:11] for each in done] == ["", "the first t", "ConnectionR"] * 8


def test_short_questions_are_bounded_too(listen: Listen) -> None:
    with pytest.raises(Unanswered, match="HTTP 404"):
        listen(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n").ask("GET", "/x", limit_s=5)
    began_s = time.monotonic()
    with pytest.raises(Unanswered):
        listen(dribble).ask("GET", "/x", limit_s=0.3)
    assert time.monotonic() - began_s < 10


def test_addresses() -> None:
    assert Endpoint.of("http://localhost:8000/v1/").url == "http://localhost:8000"
    assert Endpoint.of("https://[::1]/gateway").url == "https://[::1]:443/gateway"
    for bad in (
        "",
        "localhost:8000",
        "ftp://host",
        "http://",
        "http://host:70000",
        "http://user@host",
        "http://h/?a=b",
    ):
        with pytest.raises(ConfigError):
            Endpoint.of(bad)
    assert "secret" not in repr(Endpoint.of("http://host", "secret"))
