"""What a demo can be asked for, and everything that can be wrong with it before a model is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from forebay.bench.environment import available_memory_bytes
from forebay.bench.units import bytes_text
from forebay.errors import ConfigError
from forebay.tiers.file import layout

_MOST_THREADS = 4096
JSON_NAME, PAGE_NAME = "demo.json", "demo.html"
_MAY_BE_IN_A_NEW_POOL = {"tmp", "quarantine", "lost+found"}


class DemoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: Path | None = None
    """A directory made by `save_pretrained`, or a GGUF file. None: the packaged model."""
    random_weights: bool = False
    """A seeded model that says nothing, in place of a real one."""
    sessions: int = 4
    tokens: int = 4096
    """Of each document."""
    answer_tokens: int = 32
    """At most; an answer may end sooner."""
    block_tokens: int = 64
    pool: Path | None = None
    """None: a temporary one in the current directory."""
    host_memory_bytes: int | None = None
    """DRAM tier. None: what one session needs."""
    threads: int | None = None
    """Of the model. None: what torch takes."""
    seed: int = 0
    """Of random weights, and which text comes first."""
    out: Path = Path()
    """Directory for demo.json and demo.html."""


def check_options(options: DemoOptions) -> None:
    """Raises ConfigError for the first thing that cannot work, and changes nothing."""
    for name in ("sessions", "tokens", "answer_tokens", "block_tokens"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be 1 or more, not {getattr(options, name)}")
    if options.threads is not None and not 1 <= options.threads <= _MOST_THREADS:
        raise ConfigError(f"--threads must be from 1 to {_MOST_THREADS}, not {options.threads}")
    if not 0 <= options.seed < 2**63:
        raise ConfigError(f"--seed must be 0 or more and below 2**63, not {options.seed}")
    if options.tokens < options.block_tokens:
        raise ConfigError(
            f"--tokens {options.tokens} is less than one block of {options.block_tokens} tokens, "
            "so nothing could be restored: ask for longer documents or smaller blocks"
        )
    if options.model is not None and options.random_weights:
        raise ConfigError("--model and --random-weights exclude each other: give one")
    if options.model is not None and not options.model.exists():
        raise ConfigError(f"no model at {options.model}: give a directory made by save_pretrained, or a GGUF file")
    available_bytes = available_memory_bytes()
    if options.host_memory_bytes and available_bytes is not None and options.host_memory_bytes > available_bytes:
        raise ConfigError(
            f"--host-memory asks for {bytes_text(options.host_memory_bytes)} "
            f"where {bytes_text(available_bytes)} are free: ask for less"
        )
    for name in ("model", "pool", "out"):
        _check_text(getattr(options, name), f"--{name}")
    _check_directory(options.out, "--out")
    for path in (options.out / JSON_NAME, options.out / PAGE_NAME):
        if path.is_dir() and not path.is_symlink():
            raise ConfigError(f"--out: {path} is a directory where a report has to go; name another --out")
    if options.pool is None:
        _check_directory(Path(), "the temporary pool (or give another place with --pool)")
    else:
        _check_pool(options.pool)


def _check_text(path: Path | None, what: str) -> None:
    """The record names every path, and it is JSON."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what}: {str(path)!a} is not UTF-8; rename it, or name another one") from None


def _check_directory(path: Path, what: str) -> None:
    """A directory that can be written, or that can be made in one that exists."""
    place = path if path.exists() else path.absolute().parent
    if not place.is_dir():
        raise ConfigError(f"{what}: {place} is not a directory; make it first, or name another one")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{what}: {place} cannot be written; name another directory")


def _check_pool(path: Path) -> None:
    """A pool, or a place where one can be made. The file tier refuses the rest too, but only once a model is there."""
    _check_directory(path, "--pool")
    if path.is_dir():
        foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in _MAY_BE_IN_A_NEW_POOL)
        if foreign and layout.read_marker(path) is None:
            raise ConfigError(
                f"--pool: {path} is not a pool but holds {foreign[0]!r}; name an empty or a new directory"
            )
