"""The few exceptions. Whatever can happen to a block while running is an `Outcome`, not an exception."""

from __future__ import annotations


class ForebayError(Exception):
    """Base of all exceptions raised by Forebay."""


class ConfigError(ForebayError):
    """A bad option, path or file. The message is one line that says what is wrong and how to mend it."""


class TierUnavailable(ForebayError):
    """The whole tier is gone. Raised by tiers, turned into `Outcome.FAILED` by the engine."""


class InvariantBroken(ForebayError):
    """A bug in Forebay: an internal promise does not hold. Raised only by `check` methods."""
