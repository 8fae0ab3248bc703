"""What a LoRA adapter does to the names of blocks.

vLLM's block hash holds the adapter's name and path. An adapter that was trained further and saved to the same path
would find the KV of its former self, so its content is mixed in here.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from forebay.connectors.vllm.digests import digest_files, weight_files
from forebay.errors import ConfigError

log = logging.getLogger("forebay.connectors.vllm")

_CONFIG = "adapter_config.json"
"""Holds rank and scale, which decide as much as the weights."""


class Adapters:
    """Called on the scheduler's thread; files are read on one of its own."""

    def __init__(self) -> None:
        self._digests: dict[tuple[int, str], Future[bytes | None]] = {}
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="forebay-adapter")

    def digest(self, lora: Any) -> Future[bytes | None]:
        """Of the adapter of a vLLM LoRARequest; None, said in the log, for one that has no local files.

        An adapter is read when it is first used, as vLLM does, and again when the request has vLLM read it again.
        """
        key = (lora.lora_int_id, lora.lora_path)
        if key not in self._digests or getattr(lora, "load_inplace", False):
            self._digests[key] = self._threads.submit(_digest, lora.lora_name, Path(lora.lora_path))
        return self._digests[key]

    def close(self) -> None:
        self._threads.shutdown(wait=True)


def _digest(name: str, directory: Path) -> bytes | None:
    try:
        files = [*weight_files(directory), directory / _CONFIG]
        return bytes.fromhex(digest_files(files, None))
    except (ConfigError, OSError) as error:
        log.warning("KV under adapter %s is neither loaded nor stored, since its files cannot be read: %s", name, error)
        return None
