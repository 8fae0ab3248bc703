"""What all tests share."""

from __future__ import annotations

import contextlib
import signal

import pytest
from hypothesis import settings

from forebay.tiers.file.native.compile import HERE, LIBRARY, CannotCompile, compile_kernel, is_current

pytest.register_assert_rewrite("forebay.testing.tier_contract")  # here, before any test imports it

settings.register_profile("forebay", deadline=None)  # a busy machine is no failure
settings.load_profile("forebay")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's job in the background; children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """A checkout's kernel is compiled anew when its source has changed; without a compiler, its tests are skipped."""
    if not hasattr(config, "workerinput") and not is_current(HERE / LIBRARY):
        with contextlib.suppress(CannotCompile, OSError):
            compile_kernel(HERE)
