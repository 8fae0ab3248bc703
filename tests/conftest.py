"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("forebay", deadline=None)  # a busy machine is no failure
settings.load_profile("forebay")
