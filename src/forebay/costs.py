"""What things take, learned while running: reading from a channel, and computing a prefill. Pure.

Both are least-squares fits over what was seen, in which older observations count less. A fit is a handful of sums, so
it costs nothing to keep and is the same in every run with the same observations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class Fit:
    """elapsed = sum of coefficient * feature, with coefficients that are never negative."""

    def __init__(self, reluctance: Sequence[float], memory: float) -> None:
        """`reluctance`: one small number a feature. Where observations do not tell features apart, the elapsed time is
        laid at the door of the least reluctant one. `memory`: after this many more observations, one counts 1/e."""
        features = len(reluctance)
        self._ridge = np.diag(reluctance)
        self._moments = np.zeros((features, features))
        self._targets = np.zeros(features)
        self._decay = float(np.exp(-1.0 / memory))
        self._known: npt.NDArray[np.float64] | None = None
        self.observations = 0

    def see(self, features: Sequence[float], elapsed: float) -> None:
        """Each observation counts by its relative error, so that short ones matter as much as long ones."""
        if elapsed <= 0:
            return
        self._doubt(features, elapsed)
        row = np.asarray(features) / elapsed
        self._moments = self._moments * self._decay + np.outer(row, row)
        self._targets = self._targets * self._decay + row
        self.observations += 1
        self._known = None

    def _doubt(self, features: Sequence[float], elapsed: float) -> None:
        """What is twice as slow or fast as expected puts the past in doubt: it counts half.

        Besides, it would outweigh anything slower by the square of the ratio, since each counts by relative error.
        """
        expected = self.expect(features) if self.observations else 0.0
        if expected <= 0 or 0.5 <= elapsed / expected <= 2.0:
            return
        weight = 0.5 / max(1.0, elapsed / expected) ** 2
        self._moments *= weight
        self._targets *= weight

    def expect(self, features: Sequence[float]) -> float:
        return float(np.dot(self.coefficients(), features))

    def coefficients(self) -> npt.NDArray[np.float64]:
        if self._known is None:
            self._known = self._solve()
        return self._known

    def _solve(self) -> npt.NDArray[np.float64]:
        """Least squares without the features whose coefficient would be negative."""
        active = [i for i in range(len(self._targets)) if self._moments[i, i] > 0]
        found = np.zeros(len(self._targets))
        while active:
            moments = self._moments[np.ix_(active, active)]
            scale = np.sqrt(np.diag(moments))
            scaled = moments / np.outer(scale, scale) + self._ridge[np.ix_(active, active)]
            solved = np.linalg.solve(scaled, self._targets[active] / scale) / scale
            if solved.min() >= 0:
                found[active] = solved
                return found
            active.pop(int(solved.argmin()))
        return found


class ChannelCost:
    """Reading from one channel: a latency each time it starts from idle, and a time for every byte."""

    _CHUNK_JOBS = 8
    """A busy period is observed in pieces of so many jobs, so that one that never ends is learned from too."""

    def __init__(self) -> None:
        self._fit = Fit((1e-6, 1e-9), memory=64.0)
        self._since_ns: int | None = None
        """When the piece of a busy period under observation began; None while idle."""
        self._from_idle = False
        self._piece_bytes = self._piece_jobs = 0

    def began(self, now_ns: int) -> None:
        if self._since_ns is None:
            self._since_ns, self._from_idle = now_ns, True
            self._piece_bytes = self._piece_jobs = 0

    def ended(self, moved_bytes: int, now_ns: int, *, is_idle: bool) -> None:
        if self._since_ns is None:
            return
        self._piece_bytes += moved_bytes
        self._piece_jobs += 1
        if is_idle or self._piece_jobs == self._CHUNK_JOBS:
            self._fit.see((float(self._from_idle), float(self._piece_bytes)), float(now_ns - self._since_ns))
            self._since_ns, self._from_idle = (None if is_idle else now_ns), False
            self._piece_bytes = self._piece_jobs = 0

    def stalled(self, *, is_idle: bool) -> None:
        """A job was given up as late: this piece says nothing about what reading takes."""
        self._piece_bytes = self._piece_jobs = 0
        if is_idle:
            self._since_ns = None

    @property
    def bytes_per_s(self) -> float | None:
        """None before the first observation."""
        if not self._fit.observations:
            return None
        a_byte_ns = self._fit.coefficients()[1]
        return float(1e9 / a_byte_ns) if a_byte_ns > 0 else None

    def read_ns(self, moved_bytes: int) -> int | None:
        """From idle; None before the first observation."""
        if not self._fit.observations:
            return None
        return round(self._fit.expect((1.0, float(moved_bytes))))


class PrefillCost:
    """Computing the KV of new tokens after a context: an overhead, a time for each token, and one for each pair of a
    new token and one before it (attention)."""

    def __init__(self) -> None:
        self._fit = Fit((1e-6, 1e-9, 1e-8), memory=256.0)

    def computed(self, tokens: int, context_tokens: int, elapsed_ns: int) -> None:
        self._fit.see(_prefill_features(tokens, context_tokens), float(elapsed_ns))

    def prefill_ns(self, tokens: int, context_tokens: int) -> int | None:
        """None before the first observation."""
        if not self._fit.observations:
            return None
        return round(self._fit.expect(_prefill_features(tokens, context_tokens)))


def _prefill_features(tokens: int, context_tokens: int) -> tuple[float, float, float]:
    return (1.0 if tokens else 0.0, float(tokens), tokens * (context_tokens + tokens / 2.0))
