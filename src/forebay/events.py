"""What happened, as values. Metrics, traces and logs are folds over these; the engine knows none of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from forebay.types import Channel, Job, JobKind, Outcome, Traffic


class Reason(Enum):
    """Why a copy was dropped, or a block was not taken."""

    EVICTED = "evicted"
    ASKED = "asked"
    """The host engine or an operator asked for it."""
    REMOVED = "removed by another process"
    MISSING = "missing"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"
    """Two reads in a row failed."""
    NO_SLOT = "no free host slot"
    NOT_ADMITTED = "not admitted"
    OVER_BUDGET = "write budget spent"
    NO_ROOM = "tier full, nothing evictable"
    PINS_FULL = "no more room to pin"
    QUEUE_FULL = "too many writes wait"
    HUNG = "writes hang"


@dataclass(frozen=True, slots=True)
class Planned:
    """A request was looked up: `hits` counts its leading blocks by the place they will come from."""

    at_ns: int
    request_id: str
    wanted_blocks: int
    hits: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class JobEnded:
    at_ns: int
    job: Job
    started_ns: int
    outcomes: tuple[tuple[Outcome, int], ...]
    """How many of `job.keys` ended in which way."""


@dataclass(frozen=True, slots=True)
class LoadEnded:
    at_ns: int
    request_id: str
    planned_blocks: int
    loaded_blocks: int


@dataclass(frozen=True, slots=True)
class Dropped:
    at_ns: int
    place: str
    blocks: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Refused:
    """Blocks that a place did not take. The host engine loses nothing but a later hit."""

    at_ns: int
    place: str
    blocks: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Overdue:
    """A job took too long, and nobody waits for it any more.

    The blocks of a read come from elsewhere or are recomputed, and what it brings is thrown away. A write or a copy out
    of the device costs later hits.
    """

    at_ns: int
    job: Job


class PrefetchFate(Enum):
    USED = "used"
    """The request came."""
    UNUSED = "unused"
    """The request did not come."""
    LATE = "late"
    """Nothing had arrived when the request was expected."""
    YIELDED = "yielded"
    """Demand needed its host slots."""


@dataclass(frozen=True, slots=True)
class PrefetchEnded:
    at_ns: int
    request_id: str
    planned_blocks: int
    arrived_blocks: int
    fate: PrefetchFate


class ChoiceReason(Enum):
    FASTEST = "fastest"
    """The chosen one has the least expected time, over this request and those it delays."""
    WITHIN_MARGIN = "within margin"
    """Something else looks sooner, but not by enough to trust: all is loaded."""
    UNKNOWN_PREFILL = "prefill unknown"
    """No prefill was reported yet: all is loaded."""
    UNKNOWN_SOURCE = "source unknown"
    """Nothing was read yet from a source of the prefix: all is loaded."""
    TRIAL = "trial"
    """A few blocks of a source that was passed over for long are read, to see what it gives now."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """What loading so many blocks and computing the rest is expected to take, from now. An estimate."""

    blocks: int
    load_ns: int
    """Until the last of them is here, queue included."""
    prefill_ns: int
    """Computing the rest, without waiting for the accelerator."""
    first_token_ns: int
    delay_ns: int
    """By how much all other requests together would be later than if this one did not exist."""

    @property
    def cost_ns(self) -> int:
        """What counts: over all requests."""
        return self.first_token_ns + self.delay_ns


@dataclass(frozen=True, slots=True)
class Chosen:
    """How much of a stored prefix is loaded, and what was expected of the alternatives. See `choice`."""

    at_ns: int
    request_id: str
    stored_blocks: int
    chosen_blocks: int
    wanted_blocks: int
    """Full blocks of the request."""
    reason: ChoiceReason
    alternatives: tuple[Alternative, ...]
    """Those that were weighed, by blocks; empty where costs are unknown."""
    queue_ns: int
    """Until the sources are through with what goes before all of the prefix."""
    accelerator_ns: int
    """Until the accelerator is through with what it was left before."""


class ChannelState(Enum):
    """OPEN --a job is late--> CLOSED --retry_s--> TRYING --a read ends in time--> OPEN, or else CLOSED for longer."""

    OPEN = "open"
    CLOSED = "closed"
    TRYING = "trying"


@dataclass(frozen=True, slots=True)
class ChannelView:
    """What an operator sees of a channel, one place of one tier that reads go to."""

    channel: Channel
    state: ChannelState
    depth_blocks: int
    in_flight_blocks: int
    waiting_blocks: int
    bytes_per_s: float | None
    """As measured while it was busy; None before the first job."""


@dataclass(frozen=True, slots=True)
class TrafficView:
    """How one kind of traffic of a tier stands."""

    tier: str
    traffic: Traffic
    waiting_blocks: int
    in_flight_blocks: int
    moved_bytes: int
    """Since the event before."""
    limit_bytes_per_s: float | None
    """As set by an operator; None: none."""
    share_bytes_per_s: float | None
    """What it gets at most: prefetches always, writes while demand waits. None: all, or nothing is known yet."""


@dataclass(frozen=True, slots=True)
class FlowState:
    """The shares and the queue, every `state_every_s` while anything moves."""

    at_ns: int
    waiting_loads: int
    """Loads and prefetches that have blocks to be granted."""
    channels: tuple[ChannelView, ...]
    traffic: tuple[TrafficView, ...]


Event = Chosen | Planned | JobEnded | LoadEnded | Dropped | Refused | Overdue | PrefetchEnded | FlowState
EventSink = Callable[[Event], None]


def both(one: EventSink, other: EventSink) -> EventSink:
    """A sink that hands each event to two."""

    def emit(event: Event) -> None:
        one(event)
        other(event)

    return emit


@dataclass(slots=True)
class Totals:
    """Running sums over all events: what an operator asks first. Pass `add` to the engine as its event sink."""

    requests: int = 0
    wanted_blocks: int = 0
    hit_blocks: Counter[str] = field(default_factory=Counter)
    """By place."""
    loaded_blocks: int = 0
    moved_blocks: Counter[tuple[str, JobKind]] = field(default_factory=Counter)
    moved_bytes: Counter[tuple[str, JobKind]] = field(default_factory=Counter)
    busy_ns: Counter[tuple[str, JobKind]] = field(default_factory=Counter)
    failures: Counter[tuple[str, JobKind, Outcome]] = field(default_factory=Counter)
    dropped: Counter[tuple[str, Reason]] = field(default_factory=Counter)
    refused: Counter[tuple[str, Reason]] = field(default_factory=Counter)
    overdue: Counter[str] = field(default_factory=Counter)
    """Blocks whose read, write or copy was given up as late, by place."""
    prefetches: Counter[PrefetchFate] = field(default_factory=Counter)
    choices: Counter[ChoiceReason] = field(default_factory=Counter)
    declined_blocks: int = 0
    """Stored blocks that were left to the host to compute, since that looked faster."""

    def add(self, event: Event) -> None:
        match event:
            case Planned():
                self.requests += 1
                self.wanted_blocks += event.wanted_blocks
                for place, blocks in event.hits:
                    self.hit_blocks[place] += blocks
            case JobEnded(job=job):
                lane = (job.tier, job.kind)
                self.busy_ns[lane] += event.at_ns - event.started_ns
                for outcome, blocks in event.outcomes:
                    if outcome is Outcome.OK:
                        self.moved_blocks[lane] += blocks
                        self.moved_bytes[lane] += job.moved_bytes // len(job.keys) * blocks
                    else:
                        self.failures[job.tier, job.kind, outcome] += blocks
            case LoadEnded():
                self.loaded_blocks += event.loaded_blocks
            case Dropped():
                self.dropped[event.place, event.reason] += event.blocks
            case Refused():
                self.refused[event.place, event.reason] += event.blocks
            case Overdue():
                self.overdue[event.job.tier] += len(event.job.keys)
            case PrefetchEnded():
                self.prefetches[event.fate] += 1
            case Chosen():
                self.choices[event.reason] += 1
                self.declined_blocks += event.stored_blocks - event.chosen_blocks
