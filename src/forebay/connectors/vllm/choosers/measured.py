"""Loads what comes sooner from the pool than from the accelerator, by how long loads have taken.

A request waits for the loads ahead of it and for its own: (ahead + own tokens) / the rate at which tokens come in,
which is learned. Computing takes own tokens / `prefill_tokens_per_s`; vLLM tells nobody, so an operator measures it.
In a storm the first requests are loaded, and those behind a long queue are computed meanwhile on the otherwise idle
accelerator.
"""

from __future__ import annotations

import msgspec

from forebay.connectors.vllm.choosers import Choice, Chooser, Loaded
from forebay.errors import ConfigError

_NEWEST_SHARE = 0.25
"""Of the newest load in the learned rate."""
_LOADS_BEFORE = 3
"""Until as many have ended everything is loaded."""
_LOOK_AGAIN = 32
"""After as many choices to compute, one is loaded, or a rate that was bad once would stay so."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    prefill_tokens_per_s: float
    """At which vLLM computes prompts, with all of its ranks."""


def build(options: Options) -> Chooser:
    if not 0 < options.prefill_tokens_per_s < float("inf"):
        raise ConfigError("load_or_compute: 'prefill_tokens_per_s' must be a positive, finite number")
    return Measured(options.prefill_tokens_per_s)


class Measured:
    def __init__(self, prefill_tokens_per_s: float) -> None:
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._tokens_per_s = 0.0
        self._loads = self._computed = 0

    def choose(self, choice: Choice) -> int:
        if self._loads < _LOADS_BEFORE:
            return choice.stored_tokens
        load_s = (choice.loading_tokens + choice.stored_tokens) / self._tokens_per_s
        if load_s <= choice.stored_tokens / self._prefill_tokens_per_s or self._computed >= _LOOK_AGAIN:
            self._computed = 0
            return choice.stored_tokens
        self._computed += 1
        return 0

    def loaded(self, load: Loaded) -> None:
        rate = (load.ahead_tokens + load.tokens) / max(load.took_s, 1e-6)
        self._tokens_per_s += (rate - self._tokens_per_s) * (_NEWEST_SHARE if self._loads else 1.0)
        self._loads += 1
