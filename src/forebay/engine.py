"""The one orchestrator: plans, lets loads and stores move, and applies what came of it.

Does no I/O and holds no lock. One thread calls it, and only `poll` applies results.

    load:   keys -> index -> planner -> loads -> tier reads into host slots -> device blocks -> Loaded
    store:  offer -> host slots -> stores -> admission -> tier writes -> published
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from forebay.choice import ChoiceOptions, Chooser, Prefix, check_choice_options
from forebay.errors import ConfigError, InvariantBroken
from forebay.events import ChannelView, ChoiceReason, Chosen, EventSink, FlowState, Planned, Reason
from forebay.flow import FlowOptions, check_flow_options
from forebay.hostpool import HostPool
from forebay.loads import LoadLimits, Loads
from forebay.planner import IsOpen, known_prefix, source_of
from forebay.ports import DevicePort, Executor, Tier
from forebay.stage import Policies, Stage
from forebay.stores import StoreLimits, Stores
from forebay.types import (
    HOST,
    BlockKey,
    Channel,
    CopyState,
    DeviceBlock,
    Extent,
    Happening,
    JobId,
    JobKind,
    JobResult,
    Loaded,
    LoadPlan,
    Outcome,
    Pinned,
    Read,
    Request,
    Traffic,
)

_MOST_OVERDUE_PROBES = 8


class EngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    batch_blocks: int = 32
    """Blocks a read or write job carries at most: large enough to keep a tier busy, small enough to copy in early."""
    reserve_share: float = 0.125
    """Share of the host slots that loads always leave to stores, and stores to loads; at least one slot each."""
    pin_share: float = 0.25
    """Share of each tier, and of the host slots that loads and stores share, that pinned blocks may take."""
    probe_deadline_s: float = 0.05
    """How long a lookup waits for a shared tier's answer before it takes the index's word."""
    full_backoff_s: float = 10.0
    """How long a tier whose medium had no room, below its own limit, is held to what it holds."""
    read_deadline_s: float = 5.0
    """A read that takes longer, and 8 times as long as such reads do, is given up: its blocks come from elsewhere or
    are recomputed, and its place is left alone for a while."""
    load_deadline_s: float = 60.0
    """A load that takes longer ends with the blocks that have arrived."""
    write_deadline_s: float = 60.0
    """A write to a tier that takes longer, and 8 times as long as such writes do, is given up, and its tier is not
    written to for a while. So is a copy out of the device; its blocks are not stored."""
    write_queue_share: float = 0.5
    """Share of the host slots that blocks on their way to the tiers may hold. What is offered past that is refused."""
    hedge_share: float = 0.05
    """Of the bytes read, how many may be read a second time, from another tier, where the first read is slow."""
    hedge_patience_s: float = 0.05
    """No read is asked for again sooner."""
    prefetch_pool_share: float = 0.5
    """Share of the host slots that prefetched blocks may hold."""
    prefetch_linger_s: float = 10.0
    """How long after its deadline a prefetch keeps its blocks for a request that has not come."""
    flow: FlowOptions = FlowOptions()
    load_or_compute: ChoiceOptions = ChoiceOptions()


def check_options(options: EngineOptions) -> None:
    """Raises ConfigError for values that cannot work."""
    if options.batch_blocks < 1:
        raise ConfigError(f"engine: batch_blocks must be 1 or more, not {options.batch_blocks}")
    if not 0 < options.reserve_share <= 0.5:
        raise ConfigError(f"engine: reserve_share must be above 0 and at most 0.5, not {options.reserve_share}")
    if not 0 <= options.pin_share <= 0.5:
        raise ConfigError(f"engine: pin_share must be 0 to 0.5, not {options.pin_share}")
    for name in ("write_queue_share", "prefetch_pool_share"):
        if not 0 < getattr(options, name) <= 1:
            raise ConfigError(f"engine: {name} must be above 0 and at most 1, not {getattr(options, name)}")
    if not 0 <= options.hedge_share <= 1:
        raise ConfigError(f"engine: hedge_share must be 0 to 1, not {options.hedge_share}")
    check_flow_options(options.flow)
    check_choice_options(options.load_or_compute)
    for name in (
        "probe_deadline_s",
        "full_backoff_s",
        "read_deadline_s",
        "load_deadline_s",
        "write_deadline_s",
        "hedge_patience_s",
        "prefetch_linger_s",
    ):
        seconds = getattr(options, name)
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ConfigError(f"engine: {name} must be a number of seconds, 0 or more, not {seconds}")


def _load_limits(options: EngineOptions, pool: HostPool) -> LoadLimits:
    return LoadLimits(
        batch_blocks=options.batch_blocks,
        read_deadline_ns=int(options.read_deadline_s * 1e9),
        prefetch_slots=max(1, int(pool.slots * options.prefetch_pool_share)),
        prefetch_linger_ns=int(options.prefetch_linger_s * 1e9),
        hedge_share=options.hedge_share,
        hedge_patience_ns=int(options.hedge_patience_s * 1e9),
    )


def _store_limits(options: EngineOptions) -> StoreLimits:
    return StoreLimits(
        batch_blocks=options.batch_blocks,
        pool_share=options.write_queue_share,
        full_backoff_ns=int(options.full_backoff_s * 1e9),
        deadline_ns=int(options.write_deadline_s * 1e9),
    )


def _prefetch_name(request_id: str) -> str:
    """Prefetches live among the loads, under names that no request has."""
    return f"prefetch\0{request_id}"


@dataclass(slots=True)
class _Probe:
    """A question to the shared tiers about the blocks of one request that the index does not know."""

    deadline_ns: int
    open_jobs: int


class Engine:
    def __init__(
        self,
        pool: HostPool,
        tiers: Mapping[str, Tier],
        policies: Policies,
        device: DevicePort,
        executor: Executor,
        emit: EventSink,
        options: EngineOptions | None = None,
        block_tokens: int | None = None,
        at_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes the tiers over, with all that they hold. Without `block_tokens`, all that is stored is loaded.

        `at_close` is called once all is closed.
        """
        options = options or EngineOptions()
        check_options(options)
        self._stage = Stage(
            pool, tiers, policies, device, executor, emit, options.reserve_share, options.flow, options.pin_share
        )
        self._index, self._flow = self._stage.index, self._stage.flow
        self._loads = Loads(self._stage, _load_limits(options, pool))
        self._stores = Stores(self._stage, _store_limits(options))
        self._at_close = at_close
        self._chooser: Chooser | None = None
        if block_tokens is not None:
            self._chooser = Chooser(options.load_or_compute, self._flow, block_tokens, pool.block_bytes)
        for tier, bytes_per_s in options.load_or_compute.read_bytes_per_s.items():
            if tier not in tiers:
                raise ConfigError(f"load_or_compute: no tier is named {tier!r}: there are {', '.join(tiers)}")
            self._flow.assume(tier, bytes_per_s, self._stage.specs[tier].read_latency_ns)
        self._state_every_ns, self._state_due_ns = int(options.flow.state_every_s * 1e9), 0
        self._load_deadline_ns = int(options.load_deadline_s * 1e9)
        self._shared = tuple(name for name in self._stage.order if self._stage.specs[name].shared)
        self._probe_deadline_ns = int(options.probe_deadline_s * 1e9)
        self._probes: dict[str, _Probe] = {}
        self._probe_jobs: dict[JobId, _Probe] = {}

    # --- load

    def plan_load(self, request: Request) -> LoadPlan | None:
        """What to load of a request: of its longest known prefix, pinned, as much as brings its first token soonest.

        None: a shared tier is being asked; poll, and ask again. Never blocks, and answers within `probe_deadline_s`. A
        plan with hits has to be started or cancelled, an unanswered request asked again or cancelled. The host computes
        what is not planned; once it says what that takes (`computed`), it may be left more than it needs to.
        """
        assert request.request_id not in self._loads, f"request {request.request_id} has a load already"
        reads = self._known(request)
        if reads is None:
            return None
        if not request.announced:
            self._stage.looked_up(request.keys, [read.key for read in reads])
        if request.extent is Extent.BEST:
            reads = reads[: self._choose(request, reads)]
        plan = LoadPlan(request.request_id, reads, len(request.keys))
        if reads:
            self._loads.add(plan)
        self._loads.end_prefetch(_prefetch_name(request.request_id))
        hits = Counter(read.source for read in reads)
        self._stage.emit(Planned(self.now_ns(), request.request_id, plan.wanted_blocks, tuple(sorted(hits.items()))))
        return plan

    def announce(self, prompt: Sequence[BlockKey]) -> None:
        """A prompt has come, all of its full blocks in token order: for those who plan it in parts.

        Else `plan_load` says so itself: policies should hear of each prompt once, and as a whole.
        """
        self._stage.looked_up(
            prompt, [read.key for read in known_prefix(prompt, self._index, self._stage.order, self._is_open())]
        )

    def choose(self, request: Request) -> int | None:
        """How many leading blocks `plan_load` would plan, for a host that loads them in several requests.

        Counts as the decision: those requests ask for `Extent.STORED`. None as for `plan_load`.
        """
        reads = self._known(request)
        return self._choose(request, reads) if reads is not None else None

    def computed(self, request_id: str, tokens: int, context_tokens: int, elapsed_ns: int) -> None:
        """The host has finished a prefill: so many tokens after so many, in this time. Unknown ids are fine.

        This is how the engine learns what computing takes, and that the accelerator has one thing less to do.
        """
        if self._chooser is not None:
            self._chooser.computed(request_id, tokens, context_tokens, elapsed_ns, self.now_ns())

    def start_load(self, plan: LoadPlan, device_blocks: Sequence[DeviceBlock]) -> None:
        """Bring the plan's blocks to the first `plan.hit_blocks` of these device blocks.

        They are the engine's until `poll` returns the one `Loaded` of this request.
        """
        assert len(device_blocks) >= plan.hit_blocks, "a device block for each block of the plan"
        if not plan.reads:
            self._loads.add(plan)  # nothing was pinned, so nothing was kept
        self._loads.start(plan, device_blocks, self.now_ns() + self._load_deadline_ns)
        self._loads.advance()

    def leading_blocks(self, request_id: str) -> int:
        """How many leading blocks of a started load are on the device by now: a consumer may begin with them."""
        return self._loads.leading_blocks(request_id)

    def cancel_load(self, request_id: str) -> None:
        """Give up a plan, or a started load, which still ends with its `Loaded`, of 0 blocks. Unknown ids are fine."""
        self._probes.pop(request_id, None)
        if self._chooser is not None:
            self._chooser.forget(request_id)
        self._loads.cancel(request_id)
        self._loads.advance()

    def _known(self, request: Request) -> tuple[Read, ...] | None:
        """The longest known prefix; None while a shared tier is being asked about the rest."""
        reads = known_prefix(request.keys, self._index, self._stage.order, self._is_open())
        if self._shared and len(reads) < len(request.keys) and not self._is_probed(request, len(reads)):
            return None
        self._probes.pop(request.request_id, None)
        return reads

    def _choose(self, request: Request, reads: Sequence[Read]) -> int:
        """How many of these blocks to load; the rest is the host's."""
        if self._chooser is None:
            return len(reads)
        channels = (
            None if read.source == HOST else Channel(read.source, self._stage.route(read.source, read.key))
            for read in reads
        )
        choice = self._chooser.choose(request, Prefix(tuple(channels)), self.now_ns())
        if reads and choice.reason is not ChoiceReason.UNKNOWN_PREFILL:
            self._stage.emit(
                Chosen(
                    self.now_ns(), request.request_id, len(reads), choice.blocks, len(request.keys), choice.reason,
                    choice.alternatives, choice.queue_ns, choice.accelerator_ns,
                )
            )  # fmt: skip
        return choice.blocks

    def _is_open(self) -> IsOpen:
        """Which tiers can be asked for which blocks now."""
        if self._flow.all_open:
            return lambda tier, key: True
        now_ns = self.now_ns()
        return lambda tier, key: self._flow.is_open(Channel(tier, self._stage.route(tier, key)), now_ns)

    def _is_probed(self, request: Request, known_blocks: int) -> bool:
        """Whether the shared tiers have said what they hold past the known blocks, or had their time to say it."""
        probe = self._probes.get(request.request_id)
        if probe is None and self._is_hung():
            return True
        if probe is None:
            probe = _Probe(self.now_ns() + self._probe_deadline_ns, len(self._shared))
            self._probes[request.request_id] = probe
            for tier in self._shared:
                job = self._stage.probe(tier, request.keys[known_blocks:])
                self._probe_jobs[job.job_id] = probe
        return not probe.open_jobs or self.now_ns() >= probe.deadline_ns

    def _is_hung(self) -> bool:
        """Whether the shared tiers owe so many answers that asking more would only pile up questions."""
        now_ns = self.now_ns()
        return sum(now_ns >= probe.deadline_ns for probe in self._probe_jobs.values()) >= _MOST_OVERDUE_PROBES

    def _on_probed(self, result: JobResult) -> None:
        tier = result.job.tier
        self._probe_jobs.pop(result.job.job_id).open_jobs -= 1
        for key in result.job.keys:
            if result.outcomes[key] is Outcome.OK and self._index.get(key, tier) is None:
                self._index.adopt(key, tier, self._stage.specs[tier].stored_bytes)
                self._stage.eviction[tier].inserted((key,))

    # --- prefetch

    def prefetch(self, request: Request, deadline_ns: int) -> int:
        """Bring the known prefix of a request that is expected at `deadline_ns` to the host pool by then.

        Behind all demand and within a share of the bandwidth, earliest deadline first. Returns how many blocks of it
        are known; 0 also when this request is being prefetched already. The blocks stay in the pool until the request
        is planned, demand needs their slots, or it has not come for a while.
        """
        name = _prefetch_name(request.request_id)
        reads = known_prefix(request.keys, self._index, self._stage.order, self._is_open())
        if name in self._loads or not reads:
            return 0
        self._loads.prefetch(LoadPlan(name, reads, len(request.keys)), deadline_ns)
        self._loads.advance()
        return len(reads)

    def end_prefetch(self, request_id: str) -> None:
        """The request is here, under other names: its prefetch was of use. Unknown ids are fine."""
        self._loads.end_prefetch(_prefetch_name(request_id))

    def cancel_prefetch(self, request_id: str) -> None:
        """The request will not come after all. Unknown ids are fine."""
        self._loads.cancel_prefetch(_prefetch_name(request_id))

    def limit_rate(self, tier: str, traffic: Traffic, bytes_per_s: float | None) -> None:
        """Set or lift (None) a limit on one kind of traffic of a tier, at any time. Raises ConfigError.

        A scrub has one always: None stands for that of the tier's options.
        """
        if tier not in self._stage.tiers:
            raise ConfigError(f"no tier is named {tier!r}: there are {', '.join(self._stage.order)}")
        if traffic is Traffic.SCRUB:
            self._stage.limit_scrub(tier, bytes_per_s)
        else:
            self._flow.limit(tier, traffic, bytes_per_s, self.now_ns())

    def channels(self) -> tuple[ChannelView, ...]:
        """Depth, queue and measured bandwidth of every place that has been read from."""
        return tuple(self._flow.channels())

    @property
    def stranded_slots(self) -> int:
        """Host slots that nobody can use, since a read that is not waited for any more may still write to them."""
        return self._stage.stranded_slots

    def happened(self) -> Mapping[Happening, int]:
        """What has happened to the places of the tiers since they were opened, how often: failures, hangs, damage."""
        return self._stage.happened()

    # --- store

    def offer(self, keys: Sequence[BlockKey], device_blocks: Sequence[DeviceBlock], *, again: bool = False) -> int:
        """Store finished blocks; returns how many leading ones were taken. Offer the rest again after a poll.

        A taken block must stay as it is on the device until its COPY_OUT job, if there is one, has ended there.
        `again`: the caller will do so, or else say what it gives up by `give_up`; until then nothing counts as refused.
        """
        taken = self._stores.offer(keys, device_blocks, again)
        self._stores.advance()
        return taken

    def give_up(self, blocks: int) -> None:
        """So many blocks that were to be offered again will not be: they count as refused for want of a slot."""
        self._stores.give_up(blocks)

    def holds(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which blocks are in the host pool or a tier, or on their way into the pool."""
        return [source_of(key, self._index, self._stage.order) is not None for key in keys]

    def distrust(self, keys: Sequence[BlockKey]) -> None:
        """Somebody looked for these blocks in the shared tiers and did not find them: believe it, and store them anew.

        A block that is there after all costs one needless write, which leaves it as it is.
        """
        for tier in self._shared:
            for key in keys:
                if self._index.is_ready(key, tier):
                    self._stage.withdraw(key, tier, Reason.MISSING)

    # --- pins

    def pin(self, keys: Sequence[BlockKey]) -> Pinned:
        """Have eviction pass over these blocks, in the host pool and in the tiers, until as many `unpin` have come.

        Also for blocks that are not held yet. Bounded by `pin_share` of each place: the answer names the leading
        blocks that are pinned, and how many of them each place keeps; the rest is refused. Pins live in this engine:
        they end with it, and other processes on a shared tier do not know them. They hold against eviction only, not
        against damage, an operator, or `drop_host_copies`.
        """
        return self._stage.pin(keys)

    def unpin(self, keys: Sequence[BlockKey]) -> None:
        """Give back one pin on each of these blocks. Keys that are not pinned are ignored."""
        self._stage.unpin(keys)

    def drop_host_copies(self) -> int:
        """Forget every unpinned host copy that some tier holds too; returns how many. Their slots are free."""
        spare = [
            key
            for key, _ in self._index.copies(HOST)
            if self._index.is_evictable(key, HOST) and any(self._index.is_ready(key, t) for t in self._stage.order)
        ]
        for key in spare:
            self._stage.forget(key, HOST, Reason.ASKED)
        return len(spare)

    # --- time

    def now_ns(self) -> int:
        return self._stage.now_ns()

    def jobs(self) -> frozenset[JobId]:
        """What is in flight, and is waited for."""
        return frozenset(self._stage.jobs)

    @property
    def idle(self) -> bool:
        """No job in flight and no load open."""
        return not self._stage.jobs and self._loads.idle and not self._stores.queued

    def poll(self) -> list[Loaded]:
        """Apply every job that has ended, start what became possible, and say which loads are over. Never blocks."""
        for result in self._stage.ended_jobs():
            match result.job.kind:
                case JobKind.READ:
                    self._stores.promote(self._loads.on_read(result), result.job.tier)
                case JobKind.COPY_IN:
                    self._loads.on_copied_in(result)
                case JobKind.COPY_OUT:
                    self._stores.on_copied_out(result, self._loads.on_copied_out(result))
                case JobKind.WRITE:
                    self._stores.on_written(result)
                case JobKind.PROBE if self._stores.asked(result.job.job_id):
                    self._stores.on_probed(result)
                case JobKind.PROBE:
                    self._on_probed(result)
        self._stage.apply_changes()
        for copy_out in self._stores.give_up_copies():
            self._loads.abandon_fills(copy_out)
        self._loads.advance()
        self._stores.advance()
        self._tell_state()
        ended = self._loads.take_ended()
        if self._chooser is not None:
            for loaded in ended:
                self._chooser.loaded(loaded.request_id, loaded.blocks, self.now_ns())
        return ended

    def _tell_state(self) -> None:
        now_ns = self.now_ns()
        if now_ns < self._state_due_ns:
            return
        traffic = (*self._flow.traffic(self._stores.queued_blocks()), *self._stage.scrubs())
        if any(view.moved_bytes or view.in_flight_blocks or view.waiting_blocks for view in traffic):
            self._state_due_ns = now_ns + self._state_every_ns
            self._stage.emit(FlowState(now_ns, len(self._flow.queue.in_order()), self.channels(), traffic))

    def wait(self, until_ns: int) -> None:
        """Block until `poll` may have something to say, or the clock reaches `until_ns`. Changes nothing."""
        if not self._loads.has_ended:
            times = (self._loads.next_ns(), self._stores.next_ns(), self._flow.next_ns(self.now_ns()))
            self._stage.wait(min((until_ns, *(at_ns for at_ns in times if at_ns is not None))))

    def close(self) -> None:
        """Let running jobs end, and close the tiers. Blocks that were not written by then are lost to later runs."""
        self._stage.close()
        self._at_close()

    # --- the promises, for tests

    def check(self) -> None:
        """Raises InvariantBroken unless slots, bytes, pins and credits add up. Costs a walk over everything."""
        self._index.check(self._stage.pool.slots - self._stage.stranded_slots, self._stage.pool.free_slots)
        expected = self._loads.pins() + self._stores.pins()
        for job in self._stage.jobs.values():
            if job.kind is JobKind.WRITE:
                expected.update((key, HOST) for key in job.keys)
        for place in (HOST, *self._stage.order):
            for key, copy in self._index.copies(place):
                held = expected[key, place] + (copy.state is CopyState.FILLING)
                if copy.pins != held:
                    raise InvariantBroken(f"{place}: {copy.pins} pins where {held} are held")
        reading = self._stage.reading()
        for view in self._flow.channels():
            if view.in_flight_blocks != reading[view.channel]:
                raise InvariantBroken(f"{view.in_flight_blocks} credits are out where {reading[view.channel]} are used")

    def check_idle(self) -> None:
        """At rest: nothing pinned, half filled or on its way out, and every claim about an unshared tier true.

        But for what writes that hang may still do.
        """
        self.check()
        if not (self.idle and self._stores.idle) or self._probes:
            raise InvariantBroken("something is still under way")
        held, hung = self._loads.pins() + self._stores.pins(), self._stores.hung()
        for place in (HOST, *self._stage.order):
            for key, copy in self._index.copies(place):
                if (key, place) in hung:
                    continue
                if copy.pins != held[key, place] or copy.state is not CopyState.READY:
                    raise InvariantBroken(f"{place}: {copy} left behind")
                checkable = place != HOST and not self._stage.specs[place].shared
                if checkable and not self._stage.tiers[place].contains((key,))[0]:
                    raise InvariantBroken(f"{place} does not hold a block that the index says is READY")
