"""A server that speaks OpenAI's API as vLLM does, and keeps "KV" in memory and in a directory of blocks.

Of use in a thread of a test, and as a program: `python fake_openai.py PORT POOL|-`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BLOCK_TOKENS, BLOCK_BYTES = 16, 16 * 1024
DISK, DEVICE = "disk", "device"


class Cache:
    """Blocks by the digest of all tokens up to their end."""

    def __init__(self, pool: Path | None) -> None:
        self.pool, self.held, self.lock = pool, set[str](), threading.Lock()
        self.cached = {DEVICE: 0, DISK: 0}
        if pool is not None:
            pool.mkdir(parents=True, exist_ok=True)

    def take(self, tokens: list[int]) -> int:
        """Count the tokens that are here, hold and store them all; returns how many were here."""
        whole = hashlib.sha256()
        found = 0
        with self.lock:
            is_unbroken = True
            for first in range(0, len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
                whole.update(json.dumps(tokens[first : first + BLOCK_TOKENS]).encode())
                key = whole.hexdigest()
                place = DEVICE if key in self.held else DISK if self._read(key) else ""
                is_unbroken = is_unbroken and bool(place)
                if is_unbroken:
                    found += BLOCK_TOKENS
                    self.cached[place] += BLOCK_TOKENS
                self.held.add(key)
        return found

    def _read(self, key: str) -> bool:
        if self.pool is None:
            return False
        path = self.pool / key
        try:
            return len(path.read_bytes()) == BLOCK_BYTES
        except FileNotFoundError:
            path.write_bytes(os.urandom(BLOCK_BYTES))
            return False


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        cached = self.server.cache.cached
        self._answer(
            {
                "/health": "",
                "/version": '{"version": "0.fake"}',
                "/v1/models": '{"object": "list", "data": [{"id": "fake-model", "object": "model"}]}',
                "/metrics": "# TYPE vllm:prompt_tokens_cached_by_source counter\n"
                + "".join(
                    f'vllm:prompt_tokens_cached_by_source_total{{engine="0",source="{place}"}} {count}.0\n'
                    for place, count in cached.items()
                ),
            }.get(self.path)
        )

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        if self.path == "/reset_prefix_cache":
            self.server.resets += 1
            self.server.cache.held.clear()
            self._answer(json.dumps({"success": self.server.resets > 1}))  # the first time it is busy
        elif self.path == "/v1/completions":
            self._complete(asked)
        else:
            self._answer(None)

    def _complete(self, asked: dict[str, Any]) -> None:
        self.server.asked.append(asked)
        prompt = asked["prompt"]
        tokens = [sum(map(ord, word)) for word in prompt.split()] if isinstance(prompt, str) else prompt
        cached = self.server.cache.take(tokens)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Connection", "close")
        self.end_headers()
        state = hashlib.sha256(json.dumps(tokens).encode())
        for at in range(asked["max_tokens"]):
            state.update(b"more")
            token = int.from_bytes(state.digest()[:2])
            choice: dict[str, Any] = {"index": 0, "text": f" {token}", "finish_reason": None}
            if asked.get("return_token_ids"):
                choice["token_ids"] = [token]
            if at == asked["max_tokens"] - 1:
                choice["finish_reason"] = "length"
            self._send({"id": "cmpl-1", "choices": [choice], "usage": None})
        usage = {"prompt_tokens": len(tokens), "completion_tokens": asked["max_tokens"]}
        if self.server.tells_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        self._send({"id": "cmpl-1", "choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, event: dict[str, Any]) -> None:
        self.wfile.write(b": a comment\ndata: " + json.dumps(event).encode() + b"\n\n")

    def _answer(self, body: str | None) -> None:
        self.send_response(200 if body is not None else 404)
        self.send_header("Content-Length", str(len(body or "")))
        self.end_headers()
        self.wfile.write((body or "").encode())


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int, pool: Path | None, *, tells_cached: bool = True) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.cache, self.tells_cached, self.resets = Cache(pool), tells_cached, 0
        self.asked: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


if __name__ == "__main__":
    Server(int(sys.argv[1]), None if sys.argv[2] == "-" else Path(sys.argv[2])).serve_forever()
