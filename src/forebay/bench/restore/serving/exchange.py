"""One streamed completion: sent, timed to its first token, read to its end or cut off. It never raises."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from forebay.bench.restore.serving.endpoint import Endpoint, cut, said, said_by

_LINE_BYTES = 64 * 2**10
_PROMPT_TOKEN_BYTES = 16
"""Some servers send the prompt's ids back, in one line."""
_EVENT_BYTES = 4 * 2**10
"""An event a token, of so many bytes at most on average."""
_STUCK_S = 15.0
"""How long a request may take to notice that it was cut off: it may be connecting."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class _Details(msgspec.Struct):
    cached_tokens: Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Count = 0
    completion_tokens: Count | None = 0
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[Count] | None = None
    finish_reason: str | None = None


class _Extension(msgspec.Struct):
    """SGLang's, where `return_cached_tokens_details` is asked for."""

    cached_tokens_details: dict[str, Any] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    sglext: _Extension | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What came of one request. Times are of `time.monotonic_ns`."""

    sent_ns: int
    first_token_ns: int | None
    ended_ns: int
    prompt_tokens: int | None
    """As the server counts them; None where it does not say."""
    output_tokens: int
    cached_tokens: int | None
    """Of the prompt; None where the server does not say, which may mean none."""
    cached_from: Mapping[str, int]
    """Tokens by the server's names for where they were, where it tells that of a request."""
    output_digest: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    first_token_s: float
    answer_s: float
    """From sending to the last token."""


@dataclass(slots=True)
class _Heard:
    """So far. Written by the request's thread."""

    first_token_ns: int | None = None
    usage: _Usage | None = None
    cached_from: dict[str, int] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    has_finished: bool = False


class Exchange:
    """One request to `/v1/completions`, run by a thread of its own; `cut_if_due` by whoever watches over it."""

    def __init__(self, endpoint: Endpoint, body: Mapping[str, Any], prompt_tokens: int, limits: Limits) -> None:
        """`body` has `max_tokens`. `prompt_tokens` bounds what may come back."""
        self._endpoint, self._limits = endpoint, limits
        self._body = msgspec.json.encode({**body, "stream": True, "stream_options": {"include_usage": True}})
        self._most_tokens = int(body["max_tokens"])
        self._most_line_bytes = _LINE_BYTES + _PROMPT_TOKEN_BYTES * prompt_tokens
        self._most_bytes = self._most_line_bytes + _EVENT_BYTES * (self._most_tokens + 16)
        self._heard = _Heard()
        self._socket: socket.socket | None = None
        self._sent_ns = time.monotonic_ns()
        self._cut_for = ""
        self._completion: Completion | None = None

    @property
    def has_ended(self) -> bool:
        return self._completion is not None

    def run(self, ended: Callable[[], None]) -> None:
        """Until the answer has ended, in whatever way; then calls `ended`."""
        self._sent_ns = time.monotonic_ns()
        try:
            with contextlib.closing(self._endpoint.connect()) as connection:
                error = self._converse(connection)
        except Exception as raised:  # a hostile server makes the library raise anything
            error = said_by(raised)
        self._completion = self._complete(self._cut_for or error)
        ended()

    def due_ns(self) -> int:
        """When it is to be cut off, as far as is known now."""
        limit_s = self._limits.answer_s
        if self._heard.first_token_ns is None:
            limit_s = min(limit_s, self._limits.first_token_s)
        return self._sent_ns + int(limit_s * 1e9)

    def cut_if_due(self, now_ns: int) -> None:
        if self.has_ended or now_ns < self.due_ns():
            return
        if not self._cut_for:
            late = "the first token" if self._heard.first_token_ns is None else "the end of the answer"
            self._cut_for = f"{late} did not come within {(self.due_ns() - self._sent_ns) / 1e9:g} s"
        if self._socket is not None:
            cut(self._socket)

    def completion(self) -> Completion:
        """Also of a request whose thread hangs."""
        return self._completion or self._complete(self._cut_for or "the request hangs")

    # ---- of the request's thread

    def _converse(self, connection: http.client.HTTPConnection) -> str:
        """Returns what went wrong, or nothing."""
        self._socket = connection.sock  # the connection may let go of it while its answer is still read
        self._socket.settimeout(None)  # who watches cuts it off
        if self._cut_for:
            return self._cut_for
        self._sent_ns = time.monotonic_ns()
        headers = self._endpoint.headers | {"Content-Type": "application/json", "Accept": "text/event-stream"}
        connection.request("POST", f"{self._endpoint.prefix}/v1/completions", self._body, headers)
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            return f"HTTP {response.status}{said(response.read(4096))}"
        kind = response.getheader("Content-Type", "").partition(";")[0].strip().lower()
        if kind != "text/event-stream":
            return f"the answer is no stream of events but {kind[:80]!a}"
        return self._read(response)

    def _read(self, response: http.client.HTTPResponse) -> str:
        left_bytes = self._most_bytes
        while line := response.readline(self._most_line_bytes + 1):
            left_bytes -= len(line)
            if len(line) > self._most_line_bytes:
                return f"a line has more than {self._most_line_bytes:,} bytes"
            if left_bytes < 0:
                return f"the answer has more than {self._most_bytes:,} bytes, for {self._most_tokens:,} tokens"
            said_now = line.strip()
            if said_now == b"data: [DONE]":
                return self._objection()
            if said_now.startswith(b"data:") and (error := self._hear(said_now[5:])):
                return error
        return self._objection() if self._heard.has_finished else "the stream ended before the answer did"

    def _hear(self, text: bytes) -> str:
        heard_ns = time.monotonic_ns()
        try:
            event = _decoder.decode(text)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            return f"an event is not what it should be ({said_by(error)}){said(text)}"
        if event.error is not None:
            return f"the server ended the stream{said(msgspec.json.encode(event.error))}"
        heard = self._heard
        for choice in event.choices[:1]:
            if (choice.text or choice.token_ids) and heard.first_token_ns is None:
                heard.first_token_ns = heard_ns
            heard.texts.append(choice.text or "")
            heard.token_ids += choice.token_ids or ()
            heard.has_finished |= choice.finish_reason is not None
        heard.usage = event.usage or heard.usage
        if event.sglext is not None:
            named = (event.sglext.cached_tokens_details or {}).items()
            heard.cached_from = {name: n for name, n in named if type(n) is int and n > 0}
        return ""

    def _objection(self) -> str:
        """To an answer that came whole."""
        usage = self._heard.usage
        if self._heard.first_token_ns is None:
            return "the answer has no token"
        if self._output_tokens() > self._most_tokens:
            return f"the answer has {self._output_tokens():,} tokens, and {self._most_tokens:,} were asked for"
        if usage is not None and (self._cached_tokens() or 0) > usage.prompt_tokens:
            return (
                f"the server says that {self._cached_tokens():,} of {usage.prompt_tokens:,} prompt tokens were cached"
            )
        return ""

    # ---- what is known

    def _complete(self, error: str) -> Completion:
        heard = self._heard
        return Completion(
            sent_ns=self._sent_ns,
            first_token_ns=heard.first_token_ns,
            ended_ns=time.monotonic_ns(),
            prompt_tokens=heard.usage.prompt_tokens if heard.usage else None,
            output_tokens=self._output_tokens(),
            cached_tokens=self._cached_tokens(),
            cached_from=dict(heard.cached_from),
            output_digest="" if error else _digest(heard.token_ids, heard.texts),
            error=error,
        )

    def _output_tokens(self) -> int:
        """As the server counts them; else its token ids, or at least the pieces of text."""
        heard = self._heard
        if heard.usage is not None and heard.usage.completion_tokens is not None:
            return heard.usage.completion_tokens
        return len(heard.token_ids) or sum(bool(text) for text in heard.texts)

    def _cached_tokens(self) -> int | None:
        usage = self._heard.usage
        if usage is not None and usage.prompt_tokens_details is not None:
            return usage.prompt_tokens_details.cached_tokens
        return sum(self._heard.cached_from.values()) if self._heard.cached_from else None


def run_all(exchanges: Sequence[Exchange]) -> tuple[Completion, ...]:
    """All at once, each in a thread of its own; returns when the last has ended or was cut off. None is lost."""
    ended = threading.Semaphore(0)
    for number, exchange in enumerate(exchanges):
        threading.Thread(
            target=exchange.run, args=(ended.release,), name=f"forebay-request-{number}", daemon=True
        ).start()  # daemons: one that hangs in a name server's silence holds up nobody
    while waiting := [each for each in exchanges if not each.has_ended]:
        now_ns = time.monotonic_ns()
        for each in waiting:
            each.cut_if_due(now_ns)
        overdue = [each for each in waiting if now_ns > each.due_ns() + int(_STUCK_S * 1e9)]
        if len(overdue) == len(waiting):
            break
        next_due_ns = min((each.due_ns() for each in waiting if each.due_ns() > now_ns), default=now_ns + 10**9)
        ended.acquire(timeout=(next_due_ns - now_ns) / 1e9)
    return tuple(each.completion() for each in exchanges)


def _digest(token_ids: Sequence[int], texts: Sequence[str]) -> str:
    """Of the tokens where they are known, else of the text."""
    if token_ids:
        return hashlib.sha256(b"".join(token.to_bytes(8) for token in token_ids)).hexdigest()
    return hashlib.sha256("".join(texts).encode(errors="surrogatepass")).hexdigest()
