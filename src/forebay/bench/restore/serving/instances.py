"""The instances of one machine: addresses of servers that run, or servers started from a command for the occasion.

In a command, in values of its environment and in its files, these words are filled in:

    {port}               where the server is to listen, on loopback
    {instance}           its number, from 0
    {files}              directory with the files
    {pool}               a new directory in the first root, for what is stored; {pool1}, {pool2} ... in the others.
                         An instance's own; of a shared pool the same for all
    {line}               a file that names the throttled medium of all instances
    {limit_bytes_per_s}  of the group

Other braces stay as they are: JSON is full of them.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay.bench.restore.options import GroupOptions
from forebay.bench.restore.results import Role
from forebay.bench.restore.serving.endpoint import Endpoint
from forebay.bench.restore.serving.process import LOOPBACK, Process, free_ports
from forebay.errors import ConfigError

_WORD = re.compile(r"\{(port|instance|files|pool\d*|line|limit_bytes_per_s)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a server is started."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    files: Mapping[str, str]
    """Texts by file name."""
    health_path: str
    start_limit_s: float
    stop_limit_s: float

    def words(self) -> frozenset[str]:
        """That are to be filled in."""
        texts = (*self.command, *self.environment.values(), *self.files.values())
        return frozenset(word for text in texts for word in _WORD.findall(text))


class Running:
    """Servers that others started: only known by their addresses."""

    def __init__(self, endpoints: Sequence[Endpoint], roots: Sequence[Path]) -> None:
        self.endpoints, self.roots = tuple(endpoints), tuple(roots)
        self.pools = self.roots

    def start(self) -> bool:
        """Whether anything had to be started."""
        return False

    def stop(self) -> None:
        """They go on."""

    def close(self) -> None:
        """They go on."""


class Started:
    """Servers started from a recipe, all at once, and ended with this object."""

    def __init__(self, recipe: Recipe, group: GroupOptions, log_directory: str) -> None:
        """Makes directories for files and pools, which `close` removes. Raises ConfigError."""
        self._recipe, self._group = recipe, group
        self._processes: list[Process] = []
        self._made: list[Path] = []
        self.endpoints: tuple[Endpoint, ...] = ()
        """Of the running ones, or of those that ran last."""
        try:
            self._scratch = self._make(None)
            self._pools = [self._make(root) for root in group.roots] if self._keeps_pools else []
            self._logs = Path(log_directory) if log_directory else self._scratch
            self._logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.close()
            raise ConfigError(f"group {group.name}: {error.filename}: {error.strerror}: name another place") from None

    @property
    def roots(self) -> tuple[Path, ...]:
        return tuple(self._pools or self._group.roots)

    @property
    def pools(self) -> tuple[Path, ...]:
        """Of all instances, each once."""
        each = (pool for number in range(self._group.instances) for pool in self._pools_of(number))
        return tuple(dict.fromkeys(each)) or self.roots

    def start(self) -> bool:
        """Have all run and answer. Returns whether anything had to be started. Raises ConfigError."""
        if self._processes and not any(process.has_ended for process in self._processes):
            return False
        self.stop()
        ports = free_ports(self._group.instances)
        self.endpoints = tuple(Endpoint(LOOPBACK, port) for port in ports)
        try:
            for number, port in enumerate(ports):
                self._processes.append(self._launch(number, port))
            for process, endpoint in zip(self._processes, self.endpoints, strict=True):
                process.await_ready(endpoint, self._recipe.health_path, self._recipe.start_limit_s)
        except ConfigError as error:
            self.stop()
            raise ConfigError(f"group {self._group.name}: {error}") from None
        return True

    def stop(self) -> None:
        for process in self._processes:
            process.ask_to_end()
        for process in self._processes:
            process.end()
        self._processes.clear()

    def close(self) -> None:
        self.stop()
        for path in self._made:
            shutil.rmtree(path, ignore_errors=True)

    @property
    def _keeps_pools(self) -> bool:
        return any(word.startswith("pool") for word in self._recipe.words())

    def _make(self, parent: Path | None) -> Path:
        made = Path(tempfile.mkdtemp(prefix=".forebay-restore-", dir=parent))
        self._made.append(made)
        return made

    def _launch(self, number: int, port: int) -> Process:
        files = self._scratch / f"files-{number}"
        values = self._values(number) | {"port": str(port), "files": str(files)}
        with contextlib.suppress(FileExistsError):
            files.mkdir()
        for name, text in self._recipe.files.items():
            (files / name).write_text(_filled(text, values))
        return Process(
            [_filled(word, values) for word in self._recipe.command],
            {name: _filled(text, values) for name, text in self._recipe.environment.items()},
            self._logs / f"{_file_name(self._group.name)}-{number}.log",
            self._recipe.stop_limit_s,
        )

    def _pools_of(self, number: int) -> list[Path]:
        name = "pool" if self._group.role is Role.SHARED else f"pool-{number}"
        return [made / name for made in self._pools]

    def _values(self, number: int) -> dict[str, str]:
        values = {"instance": str(number)}
        pools = [str(pool) for pool in self._pools_of(number)]
        if pools:
            values |= {"pool": pools[0]} | {f"pool{at}": pool for at, pool in enumerate(pools)}
        if (limit := self._group.limit_bytes_per_s) is not None:
            values |= {"limit_bytes_per_s": f"{limit:.0f}", "line": str(self._scratch / "line")}
        return values


def check_recipe(recipe: Recipe, group: GroupOptions) -> None:
    """Raises ConfigError for what cannot be filled in, and for a limit that nothing keeps to."""
    words, name = recipe.words(), group.name
    known = {"pool"} | {f"pool{at}" for at in range(len(group.roots))} if group.roots else set()
    unknown = sorted(word for word in words if word.startswith("pool") and word not in known)
    if unknown:
        raise ConfigError(f"group {name}: {{{unknown[0]}}} is a directory in a root that is not given: add it to roots")
    if group.limit and "limit_bytes_per_s" not in words:
        raise ConfigError(
            f"group {name}: a server cannot be throttled from outside: hand {{limit_bytes_per_s}} to it, or leave out "
            "the limit"
        )
    if not group.limit and words & {"limit_bytes_per_s", "line"}:
        raise ConfigError(f"group {name}: {{limit_bytes_per_s}} and {{line}} need a limit: give one, such as '800MB/s'")
    for file in recipe.files:
        if file != _file_name(file) or file in ("", ".", ".."):
            raise ConfigError(f"group {name}: {file[:80]!a} is no name of a file: use letters, digits, dots and dashes")


def _filled(text: str, values: Mapping[str, str]) -> str:
    return _WORD.sub(lambda match: values.get(match[1], match[0]), text)


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]", "_", text, flags=re.ASCII)
