"""Where a server listens, and short questions to it. Everything that comes back is bounded in time and length."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from forebay.errors import ConfigError

CONNECT_LIMIT_S = 10.0
_MOST_BYTES = 8 * 2**20
_SHOWN_CHARACTERS = 200


class Unanswered(Exception):
    """There was no good answer; the message says why."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    host: str
    port: int
    prefix: str = ""
    """In front of every path."""
    is_secure: bool = False
    key: str = field(default="", repr=False)
    """Sent as a bearer token."""

    @classmethod
    def of(cls, url: str, key: str = "") -> Endpoint:
        """Of `http://HOST[:PORT][/PREFIX]`, or https. A trailing `/v1` may be given or not. Raises ConfigError."""
        try:
            parts = urlsplit(url)
            port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        except (ValueError, KeyError):
            raise ConfigError(f"{url[:200]!a} is no address of a server: give http://HOST:PORT") from None
        if not parts.hostname or parts.query or parts.fragment or parts.username or not url.isascii():
            raise ConfigError(
                f"{url[:200]!a} is no address of a server: give http://HOST:PORT, without a user or query"
            )
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port, prefix, parts.scheme == "https", key)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_secure else 'http'}://{host}:{self.port}{self.prefix}"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def connect(self) -> http.client.HTTPConnection:
        """Raises OSError."""
        if self.is_secure:
            secure = http.client.HTTPSConnection(
                self.host, self.port, timeout=CONNECT_LIMIT_S, context=ssl.create_default_context()
            )
            secure.connect()
            return secure
        connection = http.client.HTTPConnection(self.host, self.port, timeout=CONNECT_LIMIT_S)
        connection.connect()
        return connection

    def ask(self, method: str, path: str, *, limit_s: float) -> bytes:
        """The body of a 200. Raises Unanswered for everything else."""
        try:
            with contextlib.closing(self.connect()) as connection, cut_after(connection, limit_s):
                connection.request(method, self.prefix + path, headers=self.headers)
                response = connection.getresponse()
                body = response.read(_MOST_BYTES)
                if response.status != http.HTTPStatus.OK:
                    raise Unanswered(f"{method} {path}: HTTP {response.status}{said(body)}")
                return body
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unanswered(f"{method} {self.url}{path}: {said_by(error)}") from None


@contextmanager
def cut_after(connection: http.client.HTTPConnection, limit_s: float) -> Iterator[None]:
    """Past so many seconds whoever reads from the connection gets its end, however slowly a server dribbles, and this
    raises TimeoutError: half an answer may look like a whole one."""
    sock, is_late = connection.sock, threading.Event()

    def stop() -> None:
        is_late.set()
        cut(sock)

    timer = threading.Timer(limit_s, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if is_late.is_set():
            raise TimeoutError(f"no answer within {limit_s:g} s")


def cut(sock: socket.socket) -> None:
    """End both directions, from any thread. The socket's own thread closes it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not that of a TLS socket, which the reader may be using


def said(body: bytes) -> str:
    """What a server said, as it can be shown: printable, short, on one line."""
    text = " ".join(body[: 4 * _SHOWN_CHARACTERS].decode(errors="replace").split())
    shown = "".join(c if c.isprintable() else "?" for c in text)[:_SHOWN_CHARACTERS]
    return f": {shown}" if shown else ""


def said_by(error: Exception) -> str:
    return f"{type(error).__name__}{said(str(error).encode(errors='replace'))}"
