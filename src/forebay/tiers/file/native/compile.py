"""Compiles the kernel beside its source. Standard library only: the build hook runs it before Forebay is installed.

python src/forebay/tiers/file/native/compile.py        in a checkout, after changing the C source
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = "kernel.so"
_SOURCES = ("kernel.c", "checksum.c", "xxhash.h")
_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread")
_LONGEST_S = 120


class CannotCompile(Exception):
    """There is no compiler, or it refuses; the first line of why."""


def source_digest(directory: Path = HERE) -> str:
    """Compiled into a library, so that one that another version left behind is not used."""
    content = hashlib.sha256()
    for name in _SOURCES:
        content.update((directory / name).read_bytes())
    return content.hexdigest()[:32]


def is_current(library: Path) -> bool:
    """Whether this file is there and was compiled from the sources that are here now. It is not loaded for that."""
    try:
        return source_digest().encode() in library.read_bytes()
    except OSError:
        return False


def compile_kernel(into: Path, compiler: Sequence[str] = ("cc",)) -> Path:
    """Make `into/kernel.so`, whole or not at all, replacing one that is there. Raises CannotCompile."""
    if shutil.which(compiler[0]) is None:
        raise CannotCompile(f"there is no C compiler ({compiler[0]})")
    with tempfile.TemporaryDirectory(dir=into, prefix=".kernel-") as work:
        checksums: dict[str, tuple[str, ...]] = {"checksum_any": ()}
        if platform.machine().lower() in ("x86_64", "amd64"):
            checksums["checksum_avx2"] = ("-mavx2",)
        objects = [f"{work}/{name}.o" for name in checksums]
        for (name, flags), made in zip(checksums.items(), objects, strict=True):
            _run([*compiler, *_FLAGS, *flags, f"-DCHECKSUM={name}", "-c", str(HERE / "checksum.c"), "-o", made])
        defines = [f'-DSOURCE_DIGEST="{source_digest()}"', *(["-DWITH_AVX2"] if len(objects) > 1 else [])]
        library = f"{work}/{LIBRARY}"
        _run([*compiler, *_FLAGS, *defines, "-shared", str(HERE / "kernel.c"), *objects, "-o", library])
        Path(library).replace(into / LIBRARY)
    return into / LIBRARY


def _run(command: Sequence[str]) -> None:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_LONGEST_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"{command[0]}: {error}") from None
    if ran.returncode != 0:
        reason = next((line for line in ran.stderr.splitlines() if "error" in line), f"exit code {ran.returncode}")
        raise CannotCompile(f"{command[0]}: {reason.strip()}")


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{compile_kernel(HERE, shlex.split(os.environ.get('CC', 'cc')))}\n")
    except CannotCompile as error:
        sys.exit(str(error))
