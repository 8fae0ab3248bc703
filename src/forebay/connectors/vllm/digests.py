"""Digests of whole weight files, at the speed of the device, remembered by inode, size and times.

A file's digest is SHA-256 over its size and the SHA-256 of each of its parts, so that several threads can work on one
file. The cache is a JSON file under a lock: of the ranks of one machine the first reads the weights, the others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from forebay.errors import ConfigError

log = logging.getLogger("forebay.connectors.vllm")

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_PART_BYTES = 64 * 2**20
_READ_BYTES = 2**20
_THREADS = 8
_PROGRESS_S = 10.0


@dataclass(frozen=True, slots=True)
class _File:
    """A file as it was when it was looked at. ctime is in it because mtime can be set back."""

    path: Path
    inode: int
    length_bytes: int
    mtime_ns: int
    ctime_ns: int

    @property
    def memo(self) -> str:
        return f"{self.path}|{self.inode}|{self.length_bytes}|{self.mtime_ns}|{self.ctime_ns}"


def weight_files(model: Path) -> list[Path]:
    """The weight files of a model that is one file, or a directory of them."""
    if model.is_file():
        return [model]
    return sorted(path for path in model.iterdir() if path.suffix in WEIGHT_SUFFIXES and path.is_file())


def digest_files(paths: Sequence[Path], cache: Path | None, clock: Callable[[], float] = time.monotonic) -> str:
    """Hex digest over the names and contents of these files, in their order. `clock` (seconds) paces the log.

    Raises ConfigError when a file cannot be read, or changes meanwhile.
    """
    try:
        with _locked(cache):
            known = _read_cache(cache)
            files = [_look(path) for path in paths]
            fresh = [file for file in files if file.memo not in known]
            if fresh:
                known.update(_digest_all(fresh, clock))
                if [_look(path) for path in paths] != files:
                    raise ConfigError(f"weight files in {paths[0].parent} changed while they were read: start again")
                _write_cache(cache, known)
    except OSError as error:
        raise ConfigError(
            f"cannot read the weights to identify them ({error}): mend that, or name them with 'identity'"
        ) from None
    named = [[path.name, known[file.memo]] for path, file in zip(paths, files, strict=True)]
    return hashlib.sha256(msgspec.json.encode(named)).hexdigest()


def _look(path: Path) -> _File:
    real = path.resolve()
    found = real.stat()
    return _File(real, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _digest_all(files: Sequence[_File], clock: Callable[[], float]) -> dict[str, str]:
    all_bytes = sum(file.length_bytes for file in files)
    log.info("reading %.2f GB of weights once, to know whose KV is whose", all_bytes / 1e9)
    progress = _Progress(all_bytes, clock)
    parts = [(file, at) for file in files for at in range(0, file.length_bytes, _PART_BYTES)]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="forebay-digest") as threads:
        digests = list(threads.map(lambda part: _digest_part(part[0], part[1], progress), parts))
    whole = {file.memo: hashlib.sha256(file.length_bytes.to_bytes(8, "little")) for file in files}
    for (file, _), digest in zip(parts, digests, strict=True):
        whole[file.memo].update(digest)
    log.info("read %.2f GB of weights in %.1f s", all_bytes / 1e9, progress.elapsed_s)
    return {memo: digest.hexdigest() for memo, digest in whole.items()}


def _digest_part(file: _File, start: int, progress: _Progress) -> bytes:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
    end = min(start + _PART_BYTES, file.length_bytes)
    descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        at = start
        while at < end:
            read_bytes = os.preadv(descriptor, [buffer[: min(_READ_BYTES, end - at)]], at)
            if read_bytes == 0:
                raise ConfigError(f"{file.path} became shorter while it was read: start again")
            digest.update(buffer[:read_bytes])
            at += read_bytes
    finally:
        os.close(descriptor)
    progress.add(end - start)
    return digest.digest()


class _Progress:
    """A log line every few seconds."""

    def __init__(self, all_bytes: int, clock: Callable[[], float]) -> None:
        self._all_bytes, self._done_bytes, self._clock = all_bytes, 0, clock
        self._started = self._said = clock()
        self._lock = threading.Lock()

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started

    def add(self, done_bytes: int) -> None:
        with self._lock:
            self._done_bytes += done_bytes
            now_s, total_bytes = self._clock(), self._done_bytes
            if now_s - self._said < _PROGRESS_S:
                return
            self._said = now_s
        log.info("weights: %.1f of %.1f GB read", total_bytes / 1e9, self._all_bytes / 1e9)


# --- the cache


@contextlib.contextmanager
def _locked(cache: Path | None) -> Iterator[None]:
    if cache is None:
        yield
        return
    try:
        descriptor = os.open(f"{cache}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        log.warning("digests of weight files are not remembered: %s", error)
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read_cache(cache: Path | None) -> dict[str, str]:
    try:
        return msgspec.json.decode(cache.read_bytes(), type=dict[str, str]) if cache else {}
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s is of no use (%s): reading the weights again", cache, error)
        return {}


def _write_cache(cache: Path | None, known: dict[str, str]) -> None:
    if cache is None:
        return
    temp = Path(f"{cache}.{os.getpid()}.tmp")
    try:
        temp.write_bytes(msgspec.json.format(msgspec.json.encode(known), indent=2))
        temp.replace(cache)
    except OSError as error:
        log.warning("digests of weight files are not remembered: %s", error)
