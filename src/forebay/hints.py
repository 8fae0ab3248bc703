"""Hints over HTTP: a router or scheduler says which request will come, and when; its blocks are prefetched.

    POST /prefetch   {"request_id": "...", "tokens": [...] or "keys": ["hex", ...], "in_s": seconds}

```
HTTP threads: validate, hash tokens -> bounded queue -> `drain` on the engine's thread -> Engine.prefetch
```
What comes in is trusted with nothing: bodies are bounded and typed, a full queue answers 429, and the worst that a hint
can do is to have known blocks read into memory, behind all demand. A Python host calls `Engine.prefetch` itself.
"""

from __future__ import annotations

import contextlib
import heapq
import http.server
import logging
import queue
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated

import msgspec

from forebay.engine import Engine
from forebay.errors import ConfigError
from forebay.keys import KEY_BYTES, block_keys
from forebay.types import BlockKey, Namespace, Request

log = logging.getLogger("forebay.hints")

MOST_BODY_BYTES = 2 * 2**20
"""Enough for 131,072 tokens with their commas."""
_MOST_KEYS = 65_536
_MOST_THREADS = 8
"""Connections served at a time; more are turned away."""
_CONNECTION_S = 5.0
"""After this time a connection is cut, however it drips."""

Token = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
HexKey = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]*$", min_length=2 * KEY_BYTES, max_length=2 * KEY_BYTES)]


class HintOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    port: int
    """0: any free one; `Hints.port` says which."""
    host: str = "127.0.0.1"
    """There is no authentication: leave it on loopback unless the network is trusted."""
    queue_hints: int = 256
    """Hints that may wait for the engine. More are answered with 429."""
    open_hints: int = 1024
    """Prefetches that hints may have open at a time. More are dropped and counted."""


class Hint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A body as it comes in."""

    request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    in_s: Annotated[float, msgspec.Meta(ge=0, le=3600)]
    """From now until the request is expected."""
    tokens: Annotated[list[Token], msgspec.Meta(max_length=2**20)] | None = None
    keys: Annotated[list[HexKey], msgspec.Meta(max_length=_MOST_KEYS)] | None = None


@dataclass(frozen=True, slots=True)
class _Expected:
    request: Request
    deadline_ns: int


class _Refused(Exception):
    """An answer of 4xx."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


class Hints:
    """Owns the server. `drain` and `close` belong to the engine's thread; everything else runs on the server's."""

    def __init__(
        self, options: HintOptions, namespace: Namespace, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """`clock` must be the engine's. Raises ConfigError for a port that cannot be had."""
        if not 0 <= options.port < 2**16 or options.queue_hints < 1 or options.open_hints < 1:
            raise ConfigError("hints: port must be 0 to 65535, queue_hints and open_hints 1 or more")
        self._options, self._namespace, self._clock = options, namespace, clock
        self._waiting: queue.Queue[_Expected] = queue.Queue(options.queue_hints)
        self._open_until_ns: list[int] = []
        """Heap of the deadlines of prefetches that hints have begun."""
        self._counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()
        try:
            self._server = _Server((options.host, options.port), self)
        except OSError as error:
            raise ConfigError(
                f"hints: cannot listen on {options.host}:{options.port} ({error.strerror or error}): name another port"
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="forebay-hints", daemon=True)
        self._thread.start()
        log.info("hints: listening on %s:%d", options.host, self.port)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def counts(self) -> Mapping[str, int]:
        """What became of hints so far: `accepted`, `known`, `unknown`, `crowded`, or the number of an HTTP refusal."""
        with self._counts_lock:
            return dict(self._counts)

    def drain(self, engine: Engine) -> int:
        """Begin the prefetches that were asked for since the last call; returns how many. Never blocks."""
        begun = 0
        now_ns = engine.now_ns()
        while self._open_until_ns and self._open_until_ns[0] <= now_ns:
            heapq.heappop(self._open_until_ns)
        for _ in range(self._options.queue_hints):
            try:
                expected = self._waiting.get_nowait()
            except queue.Empty:
                break
            if len(self._open_until_ns) >= self._options.open_hints:
                self.count("crowded")
            elif engine.prefetch(expected.request, expected.deadline_ns):
                heapq.heappush(self._open_until_ns, expected.deadline_ns)
                self.count("known")
                begun += 1
            else:
                self.count("unknown")
        return begun

    def close(self) -> None:
        """Stop listening. Hints that wait are dropped."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # --- on the server's threads

    def accept(self, body: bytes) -> int:
        """Queue a hint; returns its blocks. Raises `_Refused`."""
        now_ns = self._clock()
        try:
            hint = msgspec.json.decode(body, type=Hint)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:  # ValidationError is one
            raise _Refused(HTTPStatus.BAD_REQUEST, f"not a hint: {error}") from None
        request = Request(hint.request_id, self._keys_of(hint))
        try:
            self._waiting.put_nowait(_Expected(request, now_ns + int(hint.in_s * 1e9)))
        except queue.Full:
            raise _Refused(HTTPStatus.TOO_MANY_REQUESTS, "too many hints wait: send less, or later") from None
        self.count("accepted")
        return len(request.keys)

    def _keys_of(self, hint: Hint) -> tuple[BlockKey, ...]:
        if (hint.tokens is None) == (hint.keys is None):
            raise _Refused(HTTPStatus.BAD_REQUEST, "give either tokens or keys")
        if hint.keys is not None:
            keys = tuple(BlockKey(bytes.fromhex(key)) for key in hint.keys)
            if len(set(keys)) < len(keys):
                raise _Refused(HTTPStatus.BAD_REQUEST, "a key comes twice: a prefix has each block once")
            return keys
        assert hint.tokens is not None
        return block_keys(self._namespace, hint.tokens)

    def count(self, what: str) -> None:
        with self._counts_lock:
            self._counts[what] += 1


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], hints: Hints) -> None:
        self.hints = hints
        self._places = threading.BoundedSemaphore(_MOST_THREADS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # the HTTP server's own asks the name service who we are
        self.server_name, self.server_port = "forebay", int(self.server_address[1])

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        if not self._places.acquire(blocking=False):
            self.hints.count("503")
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError as error:  # the system has no thread to give
            log.error("a hint is turned away: %s", error)
            self.hints.count("503")
            self._places.release()
            self.shutdown_request(request)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        assert isinstance(request, socket.socket)
        cut = threading.Timer(_CONNECTION_S, _cut, (request,))
        cut.daemon = True
        cut.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            cut.cancel()
            self._places.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that left, or was cut. Nothing of what it sent goes to the log."""
        log.debug("a connection for hints broke off", exc_info=True)


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "forebay", ""
    timeout = _CONNECTION_S
    default_request_version = "HTTP/1.0"  # so that what is no HTTP gets a status too

    def do_POST(self) -> None:
        try:
            blocks = self.server.hints.accept(self._body())
        except _Refused as refused:
            self._answer(refused.status, {"error": refused.why})
        else:
            self._answer(HTTPStatus.ACCEPTED, {"blocks": blocks})

    def do_GET(self) -> None:
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, {"error": "POST /prefetch is all there is"})

    do_PUT = do_DELETE = do_HEAD = do_PATCH = do_OPTIONS = do_GET  # noqa: N815

    def _body(self) -> bytes:
        if self.path != "/prefetch":
            raise _Refused(HTTPStatus.NOT_FOUND, "POST /prefetch is all there is")
        if self.headers.get_content_type() != "application/json":  # no page in a browser may send that unasked
            raise _Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send application/json")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()) or len(length) > 18 or "Transfer-Encoding" in self.headers:
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "send a Content-Length")
        if int(length) > MOST_BODY_BYTES:
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a hint has {MOST_BODY_BYTES} bytes at most")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise _Refused(HTTPStatus.BAD_REQUEST, "the body is cut short")
        return body

    def _answer(self, status: HTTPStatus, said: dict[str, object]) -> None:
        if status is not HTTPStatus.ACCEPTED:
            self.server.hints.count(str(status.value))
        content = msgspec.json.encode(said)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """What clients send is not for the log."""
