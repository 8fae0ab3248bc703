"""Where a measurement was made: enough to judge it by, and to try it again."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import msgspec

import forebay
from forebay.bench.hardware import accelerators, network_ports

_PACKAGES = (
    "torch", "transformers", "vllm", "sglang", "lmcache", "numpy", "xxhash", "msgspec", "pyarrow", "cryptography",
)  # fmt: skip


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    cpu_model: str
    cpus: int
    """Logical processors of the machine."""
    usable_cpus: int
    """Those that this process may run on."""
    virtual_machine: bool
    """The CPU says that a hypervisor is beneath: caches that nobody here can see may be, too."""
    memory_bytes: int
    kernel: str
    python: str
    packages: dict[str, str]
    """Versions of what the measurement stands on; `-` for what is not installed."""
    transparent_huge_pages: str
    """The kernel's setting: `always`, `madvise`, `never`, or `unknown`."""
    accelerators: tuple[str, ...] = ()
    """Each in one line, with its link to the host."""
    network: tuple[str, ...] = ()
    """Ports that are devices, each in one line, with speed and MTU."""


def describe_environment(proc: Path = Path("/proc"), sys_root: Path = Path("/sys")) -> Environment:
    cpuinfo = _fields(proc / "cpuinfo")
    return Environment(
        cpu_model=cpuinfo.get("model name") or platform.processor() or platform.machine(),
        cpus=os.cpu_count() or 1,
        usable_cpus=len(os.sched_getaffinity(0)),
        virtual_machine="hypervisor" in cpuinfo.get("flags", "").split(),
        memory_bytes=_kilobytes(_fields(proc / "meminfo").get("MemTotal", "")),
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=f"{platform.python_implementation()} {sys.version.split()[0]}",
        packages={"forebay": forebay.__version__, **{name: _version(name) for name in _PACKAGES}},
        transparent_huge_pages=_chosen(sys_root / "kernel/mm/transparent_hugepage/enabled"),
        accelerators=accelerators(sys_root, proc),
        network=network_ports(sys_root),
    )


def available_memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What can be had without swapping: the machine's free memory, or less where a control group allows less.

    None where the kernel does not say.
    """
    free_bytes = _kilobytes(_fields(proc / "meminfo").get("MemAvailable", ""))
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is not None and used is not None:
        free_bytes = min(free_bytes or limit, max(0, limit - used))
    return free_bytes or None


def huge_page_bytes(proc: Path = Path("/proc")) -> int:
    """Anonymous memory of this process that the kernel backs with huge pages; 0 where it does not say."""
    return _kilobytes(_fields(proc / "self/smaps_rollup").get("AnonHugePages", ""))


def _fields(path: Path) -> dict[str, str]:
    """`name: value` lines; of a name that repeats, the first."""
    found: dict[str, str] = {}
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return found
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found


def _kilobytes(text: str) -> int:
    """The kernel writes `kB` and means 1024 bytes."""
    number = text.removesuffix("kB").strip()
    return int(number) * 1024 if number.isdigit() else 0


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _chosen(path: Path) -> str:
    """The word in brackets of `always [madvise] never`."""
    try:
        return path.read_text().split("[", 1)[1].split("]", 1)[0]
    except (OSError, IndexError):
        return "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"
