"""What a LoRA adapter does to the names of blocks.

vLLM's block hash holds the adapter's name and path. An adapter that was trained further and saved to the same path
would find the KV of its former self, so its content is mixed in here.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from forebay.connectors.vllm.digests import digest_files, weight_files
from forebay.errors import ConfigError

log = logging.getLogger("forebay.connectors.vllm")

_CONFIG = "adapter_config.json"
"""Holds rank and scale, which decide as much as the weights."""
_CLOSE_WITHIN_S = 5.0


class Adapters:
    """Called on the scheduler's thread; files are read on one of its own."""

    def __init__(self) -> None:
        self._digests: dict[tuple[int, str], Future[bytes | None]] = {}
        self._asked: SimpleQueue[tuple[Future[bytes | None], str, Path] | None] = SimpleQueue()
        # a daemon: a file system that hangs must not keep the host from ending
        self._thread = threading.Thread(target=self._serve, name="forebay-adapter", daemon=True)
        self._thread.start()

    def digest(self, lora: Any) -> Future[bytes | None]:
        """Of the adapter of a vLLM LoRARequest; None, said in the log, for one that has no local files.

        An adapter is read when it is first used, as vLLM does, and again when the request has vLLM read it again.
        """
        key = (lora.lora_int_id, lora.lora_path)
        if key not in self._digests or getattr(lora, "load_inplace", False):
            self._digests[key] = Future()
            self._asked.put((self._digests[key], lora.lora_name, Path(lora.lora_path)))
        return self._digests[key]

    def close(self) -> None:
        """What has not been read by now is not needed any more."""
        self._asked.put(None)
        self._thread.join(_CLOSE_WITHIN_S)
        if self._thread.is_alive():
            log.error("an adapter is still being read: it is left behind")

    def _serve(self) -> None:
        while (asked := self._asked.get()) is not None:
            future, name, directory = asked
            try:
                future.set_result(_digest(name, directory))
            except Exception:  # a bug costs this adapter its cache, and no other
                log.exception("KV under adapter %s is neither loaded nor stored", name)
                future.set_result(None)


def _digest(name: str, directory: Path) -> bytes | None:
    try:
        files = [*weight_files(directory), directory / _CONFIG]
        return bytes.fromhex(digest_files(files, None))
    except (ConfigError, OSError) as error:
        log.warning("KV under adapter %s is neither loaded nor stored, since its files cannot be read: %s", name, error)
        return None
