"""Rules that say how much of what the pool holds of a request is loaded; the rest is computed. A rule is one file.

Its module has `Options` and `build(options) -> Chooser`. `kv_connector_extra_config` names it, one from elsewhere by
its dotted path: `"load_or_compute": {"kind": "measured", "options": {"prefill_tokens_per_s": 5000}}`. Without one,
everything is loaded that is not shorter than `min_load_tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Choice:
    """What is known when vLLM asks how much of a request can be loaded."""

    request_id: str
    prompt_tokens: int
    computed_tokens: int
    """At the beginning of the request: their KV is on the device."""
    stored_tokens: int
    """That follow those; the pool holds them. A whole number of blocks, at least one."""
    loading_tokens: int
    """Of other requests, whose loads have not ended."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load has ended, and nothing of it failed."""

    tokens: int
    ahead_tokens: int
    """`Choice.loading_tokens` when it began."""
    took_s: float


class Chooser(Protocol):
    """Called on vLLM's scheduler thread: it must not wait. If it raises, everything is loaded, and the log says so."""

    def choose(self, choice: Choice) -> int:
        """How many of the stored tokens to load, from the first on; what is left of a block over is not loaded.

        A request that waits is asked about at each step, until vLLM has room for it.
        """
        ...

    def loaded(self, load: Loaded) -> None: ...
