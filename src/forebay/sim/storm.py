"""Waves of sessions through the real engine, flow and policies under virtual time.

Nothing of the engine is imitated: devices, the accelerator and the clock are modelled, and all that decides is the code
that decides in production. Blocks are coarse (256 tokens over all ranks), and 64 bytes stand for each.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import msgspec

from forebay.choice import ChoiceOptions, LoadOrCompute
from forebay.engine import Engine, EngineOptions
from forebay.errors import ConfigError
from forebay.events import Event, JobEnded
from forebay.fairness import Order
from forebay.flow import FlowOptions
from forebay.hostpool import HostPool
from forebay.policies.lru import LRU
from forebay.sim.executor import SimExecutor
from forebay.sim.ghosts import BLOCK_BYTES, AdmitNothing, GhostMemory, GhostTier
from forebay.sim.host import FAR_NS, Hosting, Session, SimHost
from forebay.sim.media import Medium
from forebay.sim.profiles import EngineProfile
from forebay.sim.shared import SharedClock
from forebay.stage import Policies
from forebay.types import HOST, BlockKey, JobKind

_PATIENT_S = 1e6
_BATCH_BLOCKS = 4
"""Blocks here are coarse: a job of many would end late."""
_SAMPLE_S = 1.0


class Placement(Enum):
    """Which instance a session comes back to."""

    OWN = "own"
    """To the one that had it in the wave before."""
    CROSS = "cross"
    """To the next one."""


class StormSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    profile: EngineProfile
    media: tuple[Medium, ...]
    """Blocks lie on all of them, in proportion to what they give. None: nothing is stored, and all is computed."""
    waves: tuple[int, ...]
    """Sessions of each wave, over all instances. A wave begins when the one before has ended, and each has the first
    sessions of one list: what a wave leaves in DRAM, the next one finds."""
    instances: int = 1
    stored_tokens: int
    """Of each session, whole blocks of it."""
    new_tokens: int
    """Of each prompt, after what is stored."""
    output_tokens: int
    block_tokens: int = 256
    host_bytes: int
    """DRAM pool of each instance: what is in flight, and what stays for later."""
    reads_in_flight: int = 32
    """Blocks of an instance, at most."""
    order: Order = Order.FAIR_SOJOURN
    hosting: Hosting = Hosting.OVERLAPPED
    placement: Placement = Placement.OWN
    loads_at_once: int | None = None
    """Prefixes that one step of an instance admits; None: all that wait."""
    setup_s: float = 0.0
    """From a wave's requests to their lookup."""
    arrivals_s: tuple[float, ...] = ()
    """When each session of a wave comes, in order, from the wave's beginning. Empty: all at once."""
    copy_bytes_per_s: float | None = None
    """From DRAM to the accelerator's memory, beside the reads. None: in no time."""
    far_speed: float = 1.0
    """Prefill, and reads in flight, of every instance but the first, to those of the first."""
    load_or_compute: LoadOrCompute = LoadOrCompute.OFF


class StormWave(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one wave. Lists are by session."""

    sessions: int
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    whole_s: float
    """From the first request to the last token."""
    output_tokens: int
    """Over all sessions."""
    read_bytes: int
    """From the media, at full size."""
    read_span_s: float
    """From the first read's start to the last one's end."""
    dram_blocks: int
    loaded_blocks: int
    read_samples_bytes_per_s: tuple[float, ...]
    """Of each second, from the wave's first request."""

    def ttft_at_s(self, share: float) -> float:
        """The session at this share of the sorted list, as the storage reports count: p50 of 16 is the 9th."""
        return quantile(self.ttft_s, share)

    @property
    def ttft_mean_s(self) -> float:
        return sum(self.ttft_s) / len(self.ttft_s)

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.whole_s

    @property
    def read_peak_bytes_per_s(self) -> float:
        return max(self.read_samples_bytes_per_s, default=0.0)

    @property
    def read_busy_bytes_per_s(self) -> float:
        """Mean over the seconds in which anything was read."""
        busy = [each for each in self.read_samples_bytes_per_s if each > 0]
        return sum(busy) / len(busy) if busy else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


class StormResult(msgspec.Struct, frozen=True, kw_only=True):
    waves: tuple[StormWave, ...]

    @property
    def last(self) -> StormWave:
        return self.waves[-1]


def run_storm(spec: StormSpec) -> StormResult:
    """Deterministic. Raises ConfigError for a storm that cannot be."""
    _check(spec)
    storm = _Storm(spec)
    return StormResult(waves=tuple(storm.run(number, sessions) for number, sessions in enumerate(spec.waves)))


def _check(spec: StormSpec) -> None:
    if not spec.waves or min(spec.waves) < 1:
        raise ConfigError(f"waves must be one or more, of 1 session or more each, not {spec.waves}")
    for name in ("instances", "new_tokens", "output_tokens", "block_tokens", "reads_in_flight", "loads_at_once"):
        given = getattr(spec, name)
        if given is not None and given < 1:
            raise ConfigError(f"{name} must be 1 or more, not {given}")
    if spec.stored_tokens < 0:
        raise ConfigError(f"stored_tokens must be 0 or more, not {spec.stored_tokens}")
    if not (math.isfinite(spec.setup_s) and spec.setup_s >= 0):
        raise ConfigError(f"setup_s must be a number of seconds, 0 or more, not {spec.setup_s}")
    arrivals_s = spec.arrivals_s
    if arrivals_s and (
        len(arrivals_s) < max(spec.waves) or list(arrivals_s) != sorted(arrivals_s) or arrivals_s[0] < 0
    ):
        raise ConfigError("arrivals_s must name a time for each session of a wave, 0 or more, in order")
    if spec.copy_bytes_per_s is not None and not spec.copy_bytes_per_s > 0:
        raise ConfigError(f"copy_bytes_per_s must be above 0, not {spec.copy_bytes_per_s}")
    if not 0 < spec.far_speed <= 1:
        raise ConfigError(f"far_speed must be above 0 and at most 1, not {spec.far_speed}")
    least_bytes = 16 * spec.block_tokens * spec.profile.kv_bytes_per_token
    if spec.host_bytes < least_bytes:
        raise ConfigError(f"host_bytes holds less than 16 blocks of an instance: give {least_bytes} or more")


class _Read(NamedTuple):
    started_ns: int
    ended_ns: int
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class _Seen:
    moved_bytes: int
    span_s: float
    samples_bytes_per_s: tuple[float, ...]


class _Reads:
    """Bytes that the media gave, over time: an event sink."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._reads: list[_Read] = []

    def add(self, event: Event) -> None:
        if isinstance(event, JobEnded) and event.job.kind is JobKind.READ:
            self._reads.append(_Read(event.started_ns, event.at_ns, len(event.job.keys) * self._block_bytes))

    def take(self, began_ns: int) -> _Seen:
        """What was read since the last call, and bytes a second by the second, as iostat shows them."""
        reads, self._reads = sorted(self._reads, key=lambda read: read.ended_ns), []
        samples: list[float] = []
        last_ns = began_ns
        for read in reads:  # served one after the other: each has the time since the last for its own
            from_s = (max(read.started_ns, last_ns) - began_ns) / 1e9
            to_s = max((read.ended_ns - began_ns) / 1e9, from_s + 1e-9)
            last_ns = max(last_ns, read.ended_ns)
            samples += [0.0] * (int(to_s / _SAMPLE_S) + 1 - len(samples))
            for at in range(int(from_s / _SAMPLE_S), int(to_s / _SAMPLE_S) + 1):
                overlap_s = min(to_s, (at + 1) * _SAMPLE_S) - max(from_s, at * _SAMPLE_S)
                samples[at] += read.moved_bytes * max(0.0, overlap_s) / (to_s - from_s) / _SAMPLE_S
        first_ns = min((read.started_ns for read in reads), default=last_ns)
        return _Seen(sum(read.moved_bytes for read in reads), (last_ns - first_ns) / 1e9, tuple(samples))


@dataclass(frozen=True, slots=True)
class _Coming:
    """A session on its way to an instance."""

    session: Session
    at_ns: int
    """When the instance looks it up."""
    instance: int


class _Storm:
    def __init__(self, spec: StormSpec) -> None:
        self._spec = spec
        self._block_bytes = spec.block_tokens * spec.profile.kv_bytes_per_token
        self._blocks = spec.stored_tokens // spec.block_tokens
        self._keys = [_session_keys(number, self._blocks) for number in range(max(spec.waves))]
        self._names = [f"medium {number}" for number in range(len(spec.media))]
        devices = {
            name: medium.model(self._block_bytes, BLOCK_BYTES)
            for name, medium in zip(self._names, spec.media, strict=True)
        }
        self._clock = SharedClock(SimExecutor(lambda job: 0, devices))
        self._reads = _Reads(self._block_bytes)
        self._engines = [self._engine(1.0 if number == 0 else spec.far_speed) for number in range(spec.instances)]
        self._hosts = [
            SimHost(
                engine, spec.profile, spec.block_tokens, spec.hosting, spec.loads_at_once,
                1.0 if number == 0 else spec.far_speed,
            )
            for number, engine in enumerate(self._engines)
        ]  # fmt: skip

    def _engine(self, share: float) -> Engine:
        spec, seat = self._spec, self._clock.seat()
        depth = max(1, round(spec.reads_in_flight * share))
        options = EngineOptions(
            batch_blocks=_BATCH_BLOCKS,
            read_deadline_s=_PATIENT_S,
            load_deadline_s=_PATIENT_S,
            flow=FlowOptions(order=spec.order, first_depth_blocks=depth, most_depth_blocks=depth),
            load_or_compute=ChoiceOptions(
                mode=spec.load_or_compute, read_bytes_per_s={n: m.read_bytes_per_s / self._block_bytes * BLOCK_BYTES
                                                             for n, m in zip(self._names, spec.media, strict=True)},
            ),
        )  # fmt: skip
        return Engine(
            HostPool(spec.host_bytes // self._block_bytes, BLOCK_BYTES),
            self._tiers(),
            Policies({place: LRU() for place in (HOST, *self._names)}, AdmitNothing()),
            GhostMemory(seat.now_ns, self._copy_ns()),
            seat,
            self._reads.add,
            options,
            block_tokens=spec.block_tokens,
        )

    def _copy_ns(self) -> int:
        """Of a block, from DRAM to the accelerator."""
        rate = self._spec.copy_bytes_per_s
        return round(self._block_bytes / rate * 1e9) if rate is not None else 0

    def _tiers(self) -> dict[str, GhostTier]:
        """Each block lies on one medium, chosen so that all prefixes are spread by bandwidth."""
        rates = [medium.read_bytes_per_s for medium in self._spec.media]
        held: list[list[BlockKey]] = [[] for _ in rates]
        for keys in self._keys if rates else ():
            given = [0.0] * len(rates)
            for key in keys:
                chosen = min(range(len(rates)), key=lambda at: (given[at] + 1) / rates[at])
                given[chosen] += 1
                held[chosen].append(key)
        return {
            name: GhostTier(name, 2 * len(keys) + 64, medium.latency_ns, keys)
            for name, medium, keys in zip(self._names, self._spec.media, held, strict=True)
        }

    def run(self, number: int, sessions: int) -> StormWave:
        spec, began_ns = self._spec, self._clock.now_ns()
        self._reads.take(began_ns)
        shift = number if spec.placement is Placement.CROSS else 0
        setup_ns = round(spec.setup_s * 1e9)
        coming: deque[_Coming] = deque()
        for each in range(sessions):
            arrived_ns = began_ns + (round(spec.arrivals_s[each] * 1e9) if spec.arrivals_s else 0)
            session = self._session(number, each, arrived_ns)
            coming.append(_Coming(session, arrived_ns + setup_ns, (each + shift) % spec.instances))
        ended = sorted(self._until_done(coming), key=lambda session: session.name)
        for engine in self._engines:
            engine.check_idle()
        seen = self._reads.take(began_ns)
        loaded = sum(session.loaded_blocks for session in ended)
        return StormWave(
            sessions=sessions,
            ttft_s=tuple((session.first_token_ns - session.arrived_ns) / 1e9 for session in ended),
            tpot_s=tuple(session.tpot_s for session in ended if session.tpot_s is not None),
            whole_s=max(session.ended_ns - began_ns for session in ended) / 1e9,
            output_tokens=sum(session.output_tokens for session in ended),
            read_bytes=seen.moved_bytes,
            read_span_s=seen.span_s,
            dram_blocks=loaded - seen.moved_bytes // self._block_bytes,
            loaded_blocks=loaded,
            read_samples_bytes_per_s=seen.samples_bytes_per_s,
        )

    def _session(self, wave: int, number: int, arrived_ns: int) -> Session:
        spec = self._spec
        return Session(
            f"{wave}/{number:06}", self._keys[number], self._blocks * spec.block_tokens + spec.new_tokens,
            spec.output_tokens, arrived_ns,
        )  # fmt: skip

    def _until_done(self, coming: deque[_Coming]) -> Iterator[Session]:
        """Bring each session to its instance when it is time, until all have ended."""
        while True:
            now_ns = self._clock.now_ns()
            due: defaultdict[int, list[Session]] = defaultdict(list)
            while coming and coming[0].at_ns <= now_ns:
                due[coming[0].instance].append(coming.popleft().session)
            for at, host in enumerate(self._hosts):
                host.arrive(due[at])
                host.advance(now_ns)
                yield from host.ended
                host.ended.clear()
            if not coming and all(host.idle for host in self._hosts) and all(each.idle for each in self._engines):
                return
            for engine in self._engines:
                engine.wait(FAR_NS)
            next_ns = coming[0].at_ns if coming else FAR_NS
            self._clock.advance(min([next_ns, *(host.wakes_ns for host in self._hosts)]))


def _session_keys(number: int, blocks: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(position.to_bytes(8) + number.to_bytes(24)) for position in range(blocks))
