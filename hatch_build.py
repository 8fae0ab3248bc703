"""Compiles the file tier's kernel into the wheel where there is a C compiler. Without one the wheel is pure Python."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_NATIVE = Path("src/forebay/tiers/file/native")


class KernelHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Also for editable installs, which use the library in the checkout."""
        native = Path(self.root) / _NATIVE
        spec = importlib.util.spec_from_file_location("forebay_compile", native / "compile.py")
        assert spec is not None
        assert spec.loader is not None
        compiling = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(compiling)
        try:
            library = compiling.compile_kernel(native, shlex.split(os.environ.get("CC", "cc")))
        except (compiling.CannotCompile, OSError) as error:
            self.app.display_warning(f"no compiled kernel ({error}): reads will go through Python")
            return
        build_data["pure_python"] = False
        # through ctypes, so for any Python 3; but for this platform only
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"].append(str(library.relative_to(self.root)))
