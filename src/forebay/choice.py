"""Load or compute: how many leading blocks of a stored prefix to load, while the host computes the rest. Pure.

A consumer needs an unbroken prefix, so a request loads its first k blocks and computes what follows them:

    first token(k) = max(load(k), accelerator free) + prefill(tokens after k, context k)

Loading is linear in k and computing is concave (the later a token, the more context it attends to), so for one source
the best k is none or all. Between sources it may lie at a boundary, and behind a busy accelerator where the load ends
just when the accelerator is free. Only such k are weighed. What counts is the sum over all requests that are under
way: computing more here delays the tails that others have left to compute, loading more delays the loads behind.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from forebay.accelerator import Accelerator
from forebay.costs import PrefillCost
from forebay.errors import ConfigError
from forebay.events import Alternative, ChoiceReason
from forebay.flow import Flow
from forebay.types import HOST, Channel, Request

_PARTS = 8
"""Evenly spaced lengths of the prefix that are weighed too."""
_MOST_BOUNDARIES = 8
"""Boundaries between sources that are weighed: those of the longest runs."""
_TRIAL_BLOCKS = 8
"""Blocks that are read to learn anew what a source gives that has not been used for long."""
_UNHEARD_OF = 4
"""A prefill this many times as long as any that was seen is left to one request at a time, until it has been seen."""


class LoadOrCompute(Enum):
    ON = "on"
    """Decide, once the host has reported what prefills take, or a rate to begin with is given."""
    OFF = "off"
    """Load everything that is stored."""


class ChoiceOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    mode: LoadOrCompute = LoadOrCompute.ON
    margin: float = 0.02
    """All is loaded unless something else brings the first token sooner by more than this share of the time."""
    prefill_tokens_per_s: float | None = None
    """What the accelerator computes, until the host has reported a prefill."""
    read_bytes_per_s: dict[str, float] = {}
    """What a place of each tier gives, by the tier's name, until something was read there."""
    trial_s: float = 60.0
    """A source that is passed over and was not read from for so long is tried with a few blocks."""


def check_choice_options(options: ChoiceOptions) -> None:
    """Raises ConfigError for values that cannot work."""
    if not 0 <= options.margin < 1:
        raise ConfigError(f"load_or_compute: margin must be 0 or more and below 1, not {options.margin}")
    if not (math.isfinite(options.trial_s) and options.trial_s > 0):
        raise ConfigError(f"load_or_compute: trial_s must be a number of seconds above 0, not {options.trial_s}")
    rates = {"prefill_tokens_per_s": options.prefill_tokens_per_s} if options.prefill_tokens_per_s is not None else {}
    rates |= {f"read_bytes_per_s of {tier}": rate for tier, rate in options.read_bytes_per_s.items()}
    for name, rate in rates.items():
        if not (math.isfinite(rate) and rate > 0):
            raise ConfigError(f"load_or_compute: {name} must be above 0, not {rate}")


@dataclass(frozen=True, slots=True)
class Choice:
    """How many leading blocks are to be loaded, and why."""

    blocks: int
    reason: ChoiceReason
    alternatives: tuple[Alternative, ...]
    """Those that were weighed, by blocks; empty where costs are unknown."""
    queue_ns: int
    """Until the sources are through with what goes before all of the prefix."""
    accelerator_ns: int
    """Until the accelerator is through with what it was left before."""


class Prefix:
    """The stored prefix of a request: for each block, the channel it is read from; None for the host pool."""

    def __init__(self, channels: Sequence[Channel | None]) -> None:
        self.blocks = len(channels)
        self.channels = tuple(dict.fromkeys(channel for channel in channels if channel is not None))
        self._positions = {
            channel: [at for at, each in enumerate(channels) if each == channel] for channel in self.channels
        }
        tiers = [HOST if channel is None else channel.tier for channel in channels]
        changes = [at for at in range(1, len(tiers)) if tiers[at] != tiers[at - 1]]
        runs = sorted(zip([0, *changes], changes, strict=False), key=lambda run: run[0] - run[1])
        self.boundaries = [end for _, end in runs[:_MOST_BOUNDARIES]]
        """Lengths at which one tier's blocks end and another's begin, those after the longest runs."""

    def first(self, channel: Channel) -> int:
        """Position of a channel's first block."""
        return self._positions[channel][0]

    def moved_blocks(self, blocks: int) -> dict[Channel, int]:
        """How many of the first `blocks` come from each channel; only those that have to move."""
        moved = {channel: bisect.bisect_left(at, blocks) for channel, at in self._positions.items()}
        return {channel: count for channel, count in moved.items() if count}


@dataclass(frozen=True, slots=True)
class _Work:
    """What a request needs, however much of it is loaded."""

    tokens: int
    context_tokens: int
    """Tokens before the first key, which the host has."""


@dataclass(frozen=True, slots=True)
class _Open:
    """A request whose prefill has not been reported."""

    work: _Work
    is_unheard_of: bool
    """Its prefill is so much longer than any that was seen that its time is no more than a guess."""


class Chooser:
    """Decides for one engine. `flow` says what reading takes; what computing takes is learned here."""

    def __init__(self, options: ChoiceOptions, flow: Flow, block_tokens: int, block_bytes: int) -> None:
        check_choice_options(options)
        self._options, self._flow = options, flow
        self._block_tokens, self._block_bytes = block_tokens, block_bytes
        self._cost = PrefillCost()
        self._longest_tokens = 0
        """Of the prefills that were reported."""
        self._accelerator = Accelerator()
        self._open: dict[str, _Open] = {}
        self._tried_ns: dict[Channel, int] = {}
        """When a channel was last tried for the sake of knowing."""

    # --- what the host says

    def computed(self, request_id: str, tokens: int, context_tokens: int, elapsed_ns: int, now_ns: int) -> None:
        """A prefill has ended."""
        self._cost.computed(tokens, context_tokens, elapsed_ns)
        self._longest_tokens = max(self._longest_tokens, tokens)
        self._accelerator.done(request_id, now_ns)
        self._open.pop(request_id, None)

    def loaded(self, request_id: str, blocks: int, now_ns: int) -> None:
        """A load has ended with so many blocks. The rest is the accelerator's."""
        if request_id in self._open:
            self._accelerator.arrived(request_id, self._prefill_ns(self._open[request_id].work, blocks), now_ns)

    def forget(self, request_id: str) -> None:
        """The request has been given up."""
        self._accelerator.forget(request_id)
        self._open.pop(request_id, None)

    # --- the decision

    def choose(self, request: Request, prefix: Prefix, now_ns: int) -> Choice:
        """How much of a stored prefix to load. The rest of the request is from then on counted as the accelerator's."""
        if self._options.mode is LoadOrCompute.OFF or not self._knows_prefill:
            return Choice(prefix.blocks, ChoiceReason.UNKNOWN_PREFILL, (), 0, 0)
        self._open = {name: each for name, each in self._open.items() if name in self._accelerator}
        work = _Work(request.tokens or len(request.keys) * self._block_tokens, request.context_tokens)
        choice = self._decide(work, prefix, now_ns)
        self._commit(request.request_id, work, prefix, choice, now_ns)
        return choice

    def _decide(self, work: _Work, prefix: Prefix, now_ns: int) -> Choice:
        accelerator_ns = self._accelerator.free_ns(now_ns) - now_ns
        if any(self._flow.read_ns(channel, self._block_bytes) is None for channel in prefix.channels):
            return Choice(prefix.blocks, ChoiceReason.UNKNOWN_SOURCE, (), 0, accelerator_ns)
        lengths = self._lengths(work, prefix, accelerator_ns)
        weighed = [self._weigh(work, prefix, blocks, now_ns) for blocks in lengths]
        blocks, reason = self._best(weighed)
        if (tried_blocks := self._trial(prefix, blocks, now_ns)) is not None:
            blocks, reason = tried_blocks, ChoiceReason.TRIAL
            if blocks not in lengths:
                weighed.append(self._weigh(work, prefix, blocks, now_ns))
        queue_ns = max((self._flow.wait_ns(*part) for part in self._parts(prefix, prefix.blocks)), default=0)
        ranked = tuple(sorted(weighed, key=lambda alternative: alternative.blocks))
        return Choice(blocks, reason, ranked, queue_ns, accelerator_ns)

    def _best(self, weighed: Sequence[Alternative]) -> tuple[int, ChoiceReason]:
        """Of alternatives that run from few blocks to all of them."""
        everything = weighed[-1]
        best = min(weighed, key=lambda each: (each.cost_ns, -each.blocks))
        gain_ns = everything.cost_ns - best.cost_ns
        if best is not everything and gain_ns <= self._options.margin * everything.first_token_ns:
            return everything.blocks, ChoiceReason.WITHIN_MARGIN
        return best.blocks, ChoiceReason.FASTEST

    def _lengths(self, work: _Work, prefix: Prefix, accelerator_ns: int) -> list[int]:
        """The lengths of the prefix that are worth weighing, in order; the last is all of it.

        With those at the end of a source go the blocks of the next that are here as soon, having been read beside it.
        """
        lengths = {prefix.blocks * part // _PARTS for part in range(_PARTS + 1)}
        kinks = [accelerator_ns, *(self._load_ns(prefix, blocks) for blocks in prefix.boundaries)]
        for at_ns in kinks:
            here_by_then = bisect.bisect_right(
                range(1, prefix.blocks + 1), at_ns, key=lambda blocks: self._load_ns(prefix, blocks)
            )
            lengths.update((here_by_then, min(here_by_then + 1, prefix.blocks)))
        lengths.update(prefix.boundaries)
        if any(each.is_unheard_of for each in self._open.values()):
            lengths = {blocks for blocks in lengths if not self._is_unheard_of(self._rest(work, blocks).tokens)}
            lengths.add(prefix.blocks)
        return sorted(lengths)

    def _weigh(self, work: _Work, prefix: Prefix, blocks: int, now_ns: int) -> Alternative:
        load_ns, prefill_ns = self._load_ns(prefix, blocks), self._prefill_ns(work, blocks)
        outlook = self._accelerator.outlook(now_ns + load_ns, prefill_ns, now_ns)
        read_ns = self._read_ns(prefix, blocks)
        delay_ns = outlook.delay_ns + read_ns * self._flow.queue.passed(self._moved_bytes(prefix, blocks))
        delay_ns += self._burden_ns(work, prefix, read_ns, prefill_ns)
        return Alternative(blocks, load_ns, prefill_ns, outlook.first_token_ns - now_ns, delay_ns)

    def _burden_ns(self, work: _Work, prefix: Prefix, read_ns: int, prefill_ns: int) -> int:
        """How much later those to come will be, for what this takes beyond its share: as many as are under way now.

        One after the other loads everything or computes everything, whatever is free first, so that each takes `turn`.
        A request that is split takes a part of both, and more than 1 in all.
        """
        all_read_ns, all_prefill_ns = self._read_ns(prefix, prefix.blocks), self._prefill_ns(work, 0)
        if not all_read_ns or not all_prefill_ns:
            return 0
        turn_ns = 1.0 / (1.0 / all_read_ns + 1.0 / all_prefill_ns)
        taken = read_ns / all_read_ns + prefill_ns / all_prefill_ns
        return int(max(0.0, taken - 1.0) * turn_ns * len(self._open))

    def _read_ns(self, prefix: Prefix, blocks: int) -> int:
        """Of so many blocks, with nothing in the way."""
        return max((self._flow.read_ns(*part) or 0 for part in self._parts(prefix, blocks)), default=0)

    def _trial(self, prefix: Prefix, blocks: int, now_ns: int) -> int | None:
        """The length of the prefix that has a few blocks of a channel of which nothing was read for too long."""
        moved = prefix.moved_blocks(blocks)
        since_ns = now_ns - int(self._options.trial_s * 1e9)
        for channel in prefix.channels:
            known_ns = max(self._flow.read_at_ns(channel), self._tried_ns.get(channel, 0))
            if channel not in moved and known_ns <= since_ns:
                self._tried_ns[channel] = now_ns
                return min(prefix.first(channel) + _TRIAL_BLOCKS, prefix.blocks)
        return None

    def _commit(self, name: str, work: _Work, prefix: Prefix, choice: Choice, now_ns: int) -> None:
        load_ns = next((each.load_ns for each in choice.alternatives if each.blocks == choice.blocks), 1)
        self._accelerator.commit(name, now_ns + load_ns, self._prefill_ns(work, choice.blocks), now_ns)
        self._open[name] = _Open(work, self._is_unheard_of(self._rest(work, choice.blocks).tokens))

    # --- what things take

    @property
    def _knows_prefill(self) -> bool:
        return self._options.prefill_tokens_per_s is not None or self._longest_tokens > 0

    def _is_unheard_of(self, tokens: int) -> bool:
        return 0 < self._longest_tokens * _UNHEARD_OF < tokens

    def _rest(self, work: _Work, blocks: int) -> _Work:
        """What is left to compute after so many loaded blocks: one token at least, for what follows it."""
        loaded_tokens = min(blocks * self._block_tokens, work.tokens - 1)
        return _Work(work.tokens - loaded_tokens, work.context_tokens + loaded_tokens)

    def _prefill_ns(self, work: _Work, blocks: int) -> int:
        rest = self._rest(work, blocks)
        learned_ns = self._cost.prefill_ns(rest.tokens, rest.context_tokens)
        if learned_ns is not None:
            return learned_ns
        assert self._options.prefill_tokens_per_s is not None, "nobody asks before something is known"
        return round(rest.tokens / self._options.prefill_tokens_per_s * 1e9)

    def _load_ns(self, prefix: Prefix, blocks: int) -> int:
        """Until so many blocks are here; channels work side by side."""
        work_bytes = self._moved_bytes(prefix, blocks)
        return max(
            (
                self._flow.wait_ns(channel, work_bytes) + (self._flow.read_ns(channel, moved_bytes) or 0)
                for channel, moved_bytes in self._parts(prefix, blocks)
            ),
            default=0,
        )

    def _moved_bytes(self, prefix: Prefix, blocks: int) -> int:
        return sum(moved_bytes for _, moved_bytes in self._parts(prefix, blocks))

    def _parts(self, prefix: Prefix, blocks: int) -> list[tuple[Channel, int]]:
        """The channels that the first blocks come from, with the bytes from each."""
        moved = prefix.moved_blocks(blocks)
        return [(channel, count * self._block_bytes) for channel, count in moved.items()]
