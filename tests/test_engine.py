"""The engine, step by step, in virtual time: what a host engine may rely on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest

from engine_world import PROMPT, SECOND_NS, make_world
from forebay.engine import Engine, EngineOptions
from forebay.errors import ConfigError, InvariantBroken
from forebay.events import Dropped, JobEnded, Reason, Refused, Totals
from forebay.hostpool import HostPool
from forebay.keys import block_keys
from forebay.loads import Loads
from forebay.policies.admit_all import AdmitAll
from forebay.policies.lru import LRU
from forebay.ports import Tier
from forebay.stage import Policies
from forebay.testing.fault import FaultPlan, FaultTier
from forebay.testing.schedule import BLOCK_BYTES, NAMESPACE, truth
from forebay.tiers import memory
from forebay.types import (
    HOST,
    BlockKey,
    Change,
    ChangeKind,
    JobKind,
    Loaded,
    Outcome,
    Request,
    TierSpec,
)


def test_a_stored_prompt_comes_back_from_dram_and_then_from_the_tier() -> None:
    world = make_world()
    world.store(PROMPT)
    assert world.load("dram", PROMPT) == 40
    assert world.count(JobKind.READ, "disk") == 0
    assert world.engine.drop_host_copies() == 40
    assert world.load("disk", PROMPT) == 40
    assert world.count(JobKind.READ, "disk") == 40
    world.engine.check_idle()


def test_only_the_unbroken_prefix_counts() -> None:
    world = make_world()
    world.store([*PROMPT[:5], *PROMPT[6:]])
    plan = world.plan("r", PROMPT)
    assert (plan.hit_blocks, plan.compute_blocks) == (5, 35)
    world.engine.cancel_load("r")
    world.engine.check_idle()


def test_a_prefix_longer_than_the_pool_streams_through_it_and_a_store_gets_slots_meanwhile() -> None:
    world = make_world(slots=8)
    world.store(PROMPT)
    plan = world.plan("long", PROMPT)
    assert plan.hit_blocks == 40
    world.engine.start_load(plan, world.lend(0, 40))
    other = block_keys(NAMESPACE, [7] * NAMESPACE.block_tokens * 3)
    blocks = world.lend(190, 3)
    taken_while_loading = 0
    for _ in range(1_000):
        world.ended += world.engine.poll()
        if world.ended:
            break
        if taken_while_loading < len(other):
            taken_while_loading += world.engine.offer(other[taken_while_loading:], blocks[taken_while_loading:])
        world.engine.wait(world.executor.now_ns() + SECOND_NS)
    assert world.ended == [Loaded("long", 40)]
    assert taken_while_loading == 3
    assert [world.device.memory[i] for i in range(40)] == [truth(key) for key in PROMPT]
    world.ended.clear()
    world.settle()
    world.engine.check_idle()


def test_a_tail_held_in_a_full_pool_does_not_block_its_own_head() -> None:
    """Every slot but one holds a block of the prompt that comes later, pinned by the load: the head finds room."""
    world = make_world(slots=4)
    world.store(PROMPT[:16])
    world.engine.drop_host_copies()
    world.store(PROMPT[16:20])  # these four fill the pool
    plan = world.plan("r", PROMPT[:20])
    assert [read.source for read in plan.reads] == ["disk"] * 16 + [HOST] * 4
    world.engine.start_load(plan, world.lend(0, 20))
    assert world.settle() == [Loaded("r", 20)]


def test_two_loads_of_one_prompt_read_each_block_once() -> None:
    world = make_world()
    world.store(PROMPT)
    world.engine.drop_host_copies()
    first, second = world.plan("a", PROMPT), world.plan("b", PROMPT)
    world.engine.start_load(first, world.lend(0, 40))
    world.engine.start_load(second, world.lend(50, 40))
    assert sorted(world.settle(), key=lambda loaded: loaded.request_id) == [Loaded("a", 40), Loaded("b", 40)]
    assert world.count(JobKind.READ, "disk") == 40
    assert [world.device.memory[50 + i] for i in range(40)] == [truth(key) for key in PROMPT]


def test_damage_ends_the_load_before_it_and_is_forgotten() -> None:
    world = make_world()
    world.store(PROMPT)
    world.engine.drop_host_copies()
    world.tiers["disk"].damage(PROMPT[10])
    assert world.load("r", PROMPT) == 10
    assert world.plan("again", PROMPT).hit_blocks == 10
    world.engine.cancel_load("again")
    assert Dropped(at_ns=0, place="disk", blocks=1, reason=Reason.CORRUPT) in [
        dataclasses.replace(event, at_ns=0) for event in world.events if isinstance(event, Dropped)
    ]
    world.engine.check_idle()


def test_a_lost_block_is_forgotten_although_another_plan_still_holds_it() -> None:
    world = make_world()
    world.store(PROMPT[:3])
    world.engine.drop_host_copies()
    world.plan("holder", PROMPT[:3])
    world.tiers["disk"].damage(PROMPT[1])
    plan = world.plan("finder", PROMPT[:3])
    world.engine.start_load(plan, world.lend(0, 3))
    ended: list[Loaded] = []
    for _ in range(100):
        ended += world.engine.poll()
        world.engine.wait(world.executor.now_ns() + SECOND_NS)
    assert ended == [Loaded("finder", 1)]
    world.engine.cancel_load("holder")
    assert world.plan("r", PROMPT[:3]).hit_blocks == 1
    world.engine.cancel_load("r")
    world.engine.check_idle()


def test_a_block_that_one_tier_lost_comes_from_the_next() -> None:
    world = make_world(tiers={"fast": 100, "slow": 100})
    world.store(PROMPT)
    world.engine.drop_host_copies()
    world.tiers["fast"].damage(PROMPT[3])
    assert world.load("r", PROMPT) == 40
    assert world.count(JobKind.READ, "slow") == 1
    assert world.tiers["fast"].contains([PROMPT[3]]) == [True], "and is promoted again"


def test_a_cancelled_load_ends_once_with_no_blocks_and_copies_no_more() -> None:
    world = make_world(slots=8)
    world.store(PROMPT)
    plan = world.plan("r", PROMPT)
    world.engine.start_load(plan, world.lend(0, 40))
    world.engine.cancel_load("r")
    assert world.settle() == [Loaded("r", 0)]
    world.device.lent.clear()  # from here on a copy would be caught
    world.engine.wait(world.executor.now_ns() + SECOND_NS)
    assert world.engine.poll() == []
    world.engine.check_idle()


def test_an_empty_plan_may_be_started_and_ends() -> None:
    world = make_world()
    plan = world.plan("r", PROMPT)
    assert plan.hit_blocks == 0
    world.engine.start_load(plan, [])
    assert world.settle() == [Loaded("r", 0)]


def test_a_tier_stays_within_its_capacity_and_evicts_tails_first() -> None:
    world = make_world(slots=4, tiers={"disk": 10})
    world.store(PROMPT[:10])
    other = block_keys(NAMESPACE, [9] * NAMESPACE.block_tokens * 4)
    world.store(other)
    held = world.tiers["disk"].contains(PROMPT[:10])
    assert sum(held) == 6
    assert world.tiers["disk"].contains(other) == [True] * 4
    world.engine.check_idle()


def test_a_full_medium_below_the_capacity_is_written_by_evicting() -> None:
    world = make_world(slots=4, tiers={"disk": 1000}, options=EngineOptions(batch_blocks=1, full_backoff_s=10.0))
    world.store(PROMPT[:8])
    disk = world.tiers["disk"]
    write = disk.write
    disk.write = lambda keys, views: (  # type: ignore[method-assign]
        [Outcome.FULL] * len(keys) if len(list(disk.scan())) >= 8 else write(keys, views)
    )
    world.store(PROMPT[8:12])
    assert len(list(disk.scan())) == 8
    assert disk.contains([PROMPT[11]]) == [True], "after the first refusal, blocks go in as others leave"
    world.engine.check_idle()


def test_failed_writes_leave_nothing_behind() -> None:
    world = make_world(wrap=lambda tier: FaultTier(tier, FaultPlan(seed=1, write_failed=1.0)))
    world.store(PROMPT)
    assert list(world.tiers["disk"].scan()) == []
    assert world.load("dram", PROMPT) == 40, "the copies in DRAM are good all the same"
    world.engine.check_idle()


def test_nothing_is_written_into_room_that_a_delete_failed_to_make() -> None:
    class RoomierThanItSays(FaultTier):
        """Nothing but the engine keeps it to 4 blocks."""

        @property
        def spec(self) -> TierSpec:
            return dataclasses.replace(super().spec, capacity_bytes=4 * BLOCK_BYTES)

    plan = FaultPlan(seed=1, delete_failed=1.0)
    world = make_world(slots=4, tiers={"disk": 100}, wrap=lambda tier: RoomierThanItSays(tier, plan))
    disk = world.tiers["disk"]
    world.store(PROMPT)
    assert 0 < len(list(disk.scan())) <= 4
    world.engine.check_idle()


def test_an_offer_stores_copies_that_only_dram_has_before_it_takes_their_slots() -> None:
    world = make_world(slots=4)
    disk = world.tiers["disk"]
    write = disk.write
    disk.write = lambda keys, views: [Outcome.FAILED] * len(keys)  # type: ignore[method-assign]
    world.store(PROMPT[:3])
    disk.write = write  # type: ignore[method-assign]
    world.store(PROMPT[:6])
    assert disk.contains(PROMPT[:6]) == [True] * 6


def test_a_refused_offer_can_be_made_again() -> None:
    world = make_world(slots=4)
    blocks = world.lend(0, 40)
    taken = world.engine.offer(PROMPT, blocks)
    assert 0 < taken < 40
    assert [event.reason for event in world.events if isinstance(event, Refused)] == [Reason.NO_SLOT]
    world.settle()
    assert world.engine.offer(PROMPT[taken:], blocks[taken:]) > 0
    world.settle()


def test_a_shared_tier_is_asked_for_what_the_index_does_not_know() -> None:
    world = make_world(shared=("disk",))
    for key in PROMPT:
        world.tiers["disk"].write([key], [memoryview(bytearray(truth(key)))])  # another process
    assert world.engine.plan_load(Request("r", PROMPT)) is None
    world.engine.wait(world.executor.now_ns() + SECOND_NS)
    world.engine.poll()
    assert world.load("r", PROMPT) == 40
    world.engine.check_idle()


def test_a_lookup_has_a_deadline() -> None:
    world = make_world(shared=("disk",), options=EngineOptions(probe_deadline_s=1e-6))
    assert world.engine.plan_load(Request("r", PROMPT)) is None
    world.engine.wait(world.executor.now_ns() + 2_000)  # the answer takes longer than that
    assert world.plan("r", PROMPT).hit_blocks == 0
    world.settle()
    world.engine.check_idle()


def test_blocks_of_an_earlier_run_are_known_from_the_start() -> None:
    world = make_world()
    world.store(PROMPT)
    tiers: dict[str, Tier] = {"disk": world.tiers["disk"]}
    policies = Policies({HOST: LRU(), "disk": LRU()}, AdmitAll())
    pool = HostPool(8, BLOCK_BYTES)
    again = Engine(pool, tiers, policies, world.device, world.executor, lambda event: None)
    assert all(again.holds(PROMPT))


def test_totals_add_up() -> None:
    world = make_world()
    world.store(PROMPT)
    world.engine.drop_host_copies()
    world.load("r", PROMPT)
    totals = Totals()
    for event in world.events:
        totals.add(event)
    assert totals.hit_blocks["disk"] == totals.loaded_blocks == 40
    assert totals.moved_bytes["disk", JobKind.READ] == totals.moved_bytes["disk", JobKind.WRITE] == 40 * BLOCK_BYTES
    assert totals.dropped[HOST, Reason.ASKED] == 40


def test_check_finds_a_lost_pin() -> None:
    world = make_world()
    world.store(PROMPT[:1])
    world.engine._index.pin(PROMPT[0], "disk")
    with pytest.raises(InvariantBroken, match="1 pins where 0 are held"):
        world.engine.check()


def test_blocks_that_somebody_did_not_find_in_a_shared_tier_are_stored_anew() -> None:
    world = make_world(tiers={"near": 100, "far": 100}, shared=("far",))
    world.store(PROMPT[:8])
    world.tiers["far"].delete(PROMPT[2:6])  # by another process: this engine does not know
    world.store(PROMPT[:8])
    assert world.count(JobKind.WRITE, "far") == 8
    world.engine.distrust(PROMPT[4:10])
    world.engine.check()
    world.store(PROMPT[:8])
    assert world.tiers["far"].contains(PROMPT[:8]) == [True, True, False, False, True, True, True, True]
    assert world.count(JobKind.WRITE, "near") == 8, "a tier that nobody else writes to is not doubted"
    world.engine.check_idle()


@pytest.mark.parametrize("odd", [True, None, "ok"])
def test_a_tier_that_answers_nonsense_costs_a_recompute(odd: object) -> None:
    world = make_world()
    world.store(PROMPT)
    world.engine.drop_host_copies()
    world.tiers["disk"].read = lambda keys, into: [odd] * len(keys)  # type: ignore[assignment,method-assign,return-value]
    assert world.load("r", PROMPT) == 0
    world.engine.check_idle()


class StubbornPolicy(LRU):
    """Proposes a block that nobody knows."""

    def victims(self, count: int, evictable: Callable[[BlockKey], bool]) -> Sequence[BlockKey]:
        return [BlockKey(b"?" * 32)]


@pytest.mark.parametrize("place", [HOST, "disk"])
def test_a_policy_that_proposes_nonsense_is_not_followed(place: str) -> None:
    world = make_world(slots=4, tiers={"disk": 6})
    world.engine._stage.eviction[place] = StubbornPolicy()  # type: ignore[index]
    blocks = world.lend(0, 40)
    taken = world.engine.offer(PROMPT, blocks)
    world.settle()
    world.engine.offer(PROMPT[taken:], blocks[taken:])
    world.settle()
    world.engine.check_idle()
    assert len(list(world.tiers["disk"].scan())) <= 6


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (EngineOptions(batch_blocks=0), "batch_blocks must be 1 or more"),
        (EngineOptions(reserve_share=0.9), "reserve_share must be above 0"),
        (EngineOptions(probe_deadline_s=float("nan")), "probe_deadline_s must be a number of seconds"),
    ],
)
def test_options_that_cannot_work_are_refused(options: EngineOptions, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_world(options=options)


def test_a_block_that_cannot_be_read_twice_is_written_anew() -> None:
    world = make_world()
    world.store(PROMPT[:5])
    disk = world.tiers["disk"]
    read = disk.read
    disk.read = lambda keys, into: [  # type: ignore[method-assign]
        Outcome.FAILED if key == PROMPT[2] else read([key], [view])[0] for key, view in zip(keys, into, strict=True)
    ]
    for name in ("once", "twice"):
        world.engine.drop_host_copies()
        assert world.load(name, PROMPT[:5]) == 2
    assert world.plan("third", PROMPT[:5]).hit_blocks == 2
    world.engine.cancel_load("third")
    disk.read = read  # type: ignore[method-assign]
    world.store(PROMPT[:5])
    world.engine.drop_host_copies()
    assert world.load("mended", PROMPT[:5]) == 5
    assert world.count(JobKind.WRITE, "disk") == 6
    world.engine.check_idle()


def test_one_failed_read_does_not_cost_the_block() -> None:
    world = make_world(wrap=lambda tier: FaultTier(tier, FaultPlan(seed=1)))
    world.store(PROMPT[:5])
    world.engine.drop_host_copies()
    disk = world.tiers["disk"]
    read = disk.read
    disk.read = lambda keys, into: [Outcome.FAILED] * len(keys)  # type: ignore[method-assign]
    assert world.load("unlucky", PROMPT[:5]) == 0
    disk.read = read  # type: ignore[method-assign]
    assert world.load("again", PROMPT[:5]) == 5
    disk.read = lambda keys, into: [Outcome.FAILED] * len(keys)  # type: ignore[method-assign]
    world.engine.drop_host_copies()
    assert world.load("unlucky again", PROMPT[:5]) == 0
    disk.read = read  # type: ignore[method-assign]
    assert world.load("and again", PROMPT[:5]) == 5


def test_a_shared_tier_that_never_answers_is_not_asked_without_end() -> None:
    world = make_world(shared=("disk",), options=EngineOptions(probe_deadline_s=1e-9))
    world.executor._cost_ns = lambda job: 10**15
    unanswered = 0
    for number in range(100):
        request = Request(f"r{number}", PROMPT)
        unanswered += world.engine.plan_load(request) is None
        world.engine.wait(world.executor.now_ns() + 1_000)
        world.engine.cancel_load(request.request_id)
    assert unanswered == 8
    assert len(world.engine._stage.jobs) == 8


def test_starting_many_loads_costs_each_of_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(slots=4)
    world.store(PROMPT)
    world.engine.drop_host_copies()
    granted = 0
    grant = Loads._grant

    def counting(loads: Loads, load: object, now_ns: int) -> bool:
        nonlocal granted
        granted += 1
        return grant(loads, load, now_ns)  # type: ignore[arg-type]

    monkeypatch.setattr(Loads, "_grant", counting)
    blocks = world.lend(0, 5)
    for number in range(200):
        world.engine.start_load(world.plan(f"r{number}", PROMPT[number % 30 :][:5]), blocks)
    assert granted <= 2 * 200
    assert {loaded.blocks for loaded in world.settle()} == {5}
    world.engine.check_idle()


class Rooms:
    """A memory tier in several places, by the first byte of a key's digest; records what each read was given."""

    def __init__(self, tier: Tier, places: int) -> None:
        self.spec, self.contains, self.write, self.delete = tier.spec, tier.contains, tier.write, tier.delete
        self.scan, self.close, self._tier, self._places = tier.scan, tier.close, tier, places
        self.calls: list[set[int]] = []

    def route(self, key: BlockKey) -> int:
        return key[0] % self._places

    def read(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> Sequence[Outcome]:
        self.calls.append({self.route(key) for key in keys})
        return self._tier.read(keys, into)


def test_each_place_of_a_routed_tier_gets_read_jobs_of_its_own() -> None:
    rooms: list[Rooms] = []

    def wrap(tier: Tier) -> Tier:
        rooms.append(Rooms(tier, 3))
        return rooms[0]

    world = make_world(wrap=wrap)
    world.store(PROMPT)
    world.engine.drop_host_copies()
    assert world.load("r", PROMPT) == 40
    assert {frozenset(call) for call in rooms[0].calls} == {frozenset({0}), frozenset({1}), frozenset({2})}
    routes = {event.job.route for event in world.events if isinstance(event, JobEnded)}
    assert routes == {0, 1, 2}


class Gossip:
    """A shared tier that hears what others did."""

    def __init__(self, tier: Tier) -> None:
        self.spec, self.contains, self.write, self.delete = tier.spec, tier.contains, tier.write, tier.delete
        self.scan, self.close, self.read = tier.scan, tier.close, tier.read
        self.heard: list[Change] = []

    def changes(self) -> Sequence[Change]:
        heard, self.heard = self.heard, []
        return heard


def test_what_others_do_to_a_shared_tier_reaches_the_index() -> None:
    gossips: list[Gossip] = []

    def wrap(tier: Tier) -> Tier:
        gossips.append(Gossip(tier))
        return gossips[0]

    world = make_world(wrap=wrap, shared=("disk",))
    world.store(PROMPT[:4])
    world.engine.drop_host_copies()
    gone, new = PROMPT[0], PROMPT[4]
    world.tiers["disk"].delete([gone])
    world.tiers["disk"].write([new], [memoryview(bytearray(truth(new)))])
    gossips[0].heard = [
        Change(gone, BLOCK_BYTES, ChangeKind.REMOVED),
        Change(new, BLOCK_BYTES, ChangeKind.ADDED),
        Change(PROMPT[1], BLOCK_BYTES, ChangeKind.ADDED),  # known already
        Change(PROMPT[9], BLOCK_BYTES, ChangeKind.REMOVED),  # never known
    ]
    world.settle()
    assert world.engine.holds(PROMPT[:5]) == [False, True, True, True, True]
    assert [event.reason for event in world.events if isinstance(event, Dropped)][-1] is Reason.REMOVED
    world.engine.check_idle()


class Listener(LRU):
    """An LRU that hears of whole prompts, and of uses."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[tuple[BlockKey, ...]] = []
        self.uses: list[BlockKey] = []

    def requested(self, keys: Sequence[BlockKey]) -> None:
        self.prompts.append(tuple(keys))

    def accessed(self, keys: Sequence[BlockKey]) -> None:
        self.uses += keys


class UsesOnly(LRU):
    def __init__(self) -> None:
        super().__init__()
        self.uses: list[BlockKey] = []

    def accessed(self, keys: Sequence[BlockKey]) -> None:
        self.uses += keys


def test_policies_hear_of_every_prompt_once_as_a_whole_and_in_every_place() -> None:
    world = make_world()
    listener, uses_only = Listener(), UsesOnly()
    world.engine._stage.eviction = {HOST: uses_only, "disk": listener}
    world.store(PROMPT[:4])
    world.load("a", PROMPT[:6])  # from the pool, and no less a use of what the tier holds
    assert listener.prompts == [PROMPT[:6]]
    assert uses_only.uses == list(PROMPT[:4])
    world.engine.announce(PROMPT[:6])
    for start in (0, 3):
        plan = world.engine.plan_load(Request(f"part {start}", PROMPT[start : start + 3], announced=True))
        assert plan is not None
        world.engine.cancel_load(f"part {start}")
    assert listener.prompts == [PROMPT[:6]] * 2
    assert uses_only.uses == list(PROMPT[:4]) * 2
    assert listener.uses == []


def test_what_a_tier_held_before_ranks_by_its_age() -> None:
    tier = memory.MemoryTier(memory.Options(name="disk", capacity_bytes=8 * BLOCK_BYTES), BLOCK_BYTES)
    for key in PROMPT[:8]:
        tier.write((key,), (memoryview(truth(key)),))
    world = make_world(tiers={"disk": 8}, wrap=lambda made: tier)
    world.store(PROMPT[20:23])
    assert [tier.contains((key,))[0] for key in PROMPT[:8]] == [False] * 3 + [True] * 5
