"""The scheduler's side by itself: what it has loaded and stored, and which device blocks it keeps vLLM from reusing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from forebay.connectors.vllm.adapters import Adapters
from forebay.connectors.vllm.choosers import Choice, Chooser, Loaded
from forebay.connectors.vllm.lookup import Answer, Found, Lookup
from forebay.connectors.vllm.options import ConnectorOptions, StoredTokens
from forebay.connectors.vllm.scheduler import SchedulerSide
from forebay.connectors.vllm.wire import StepPlan, WorkerReport

B, BLOCKS, PARTS = 4, 100, 2
SECOND_NS = 1_000_000_000


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0
    is_null: bool = False


class BlockPool:
    """vLLM's, as far as it is used here. A block is free when nobody refers to it."""

    def __init__(self) -> None:
        self.blocks = [Block(i, is_null=i == 0) for i in range(BLOCKS)]
        self.num_gpu_blocks = BLOCKS

    def touch(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            assert block.ref_cnt > 0
            block.ref_cnt -= 1

    def get_num_free_blocks(self) -> int:
        return sum(block.ref_cnt == 0 for block in self.blocks[1:])


@dataclass
class Request:
    request_id: str
    num_tokens: int
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    lora_request: Any = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or self.num_tokens

    @property
    def block_hashes(self) -> list[bytes]:
        return [f"{self.request_id}/{i}".encode() for i in range(self.num_tokens // B)]


class Pool:
    """A `Lookup` that knows the answer."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.answers = True
        self.sure = True
        self.doubts: list[bytes] = []
        self.dropped: list[str] = []

    def ask(self, request_id: str, prefix: Sequence[bytes]) -> Answer | None:
        if not self.answers:
            return None
        leading = next((i for i, name in enumerate(prefix) if name not in self.held), len(prefix))
        if leading == len(prefix):
            return Answer(leading, Found.ALL)
        return Answer(leading, Found.MISSING if self.sure else Found.UNKNOWN)

    def drop(self, request_id: str) -> None:
        self.dropped.append(request_id)

    def doubt(self, prefix_hash: bytes) -> None:
        self.doubts.append(prefix_hash)

    def close(self) -> None:
        pass


class KnownAdapters:
    """`Adapters` that are read when the test says so."""

    def __init__(self) -> None:
        self.digests: dict[str, Future[bytes | None]] = {}

    def digest(self, lora: str) -> Future[bytes | None]:
        return self.digests.setdefault(lora, Future())

    def close(self) -> None:
        pass


class World:
    def __init__(self, chooser: Chooser | None = None, **options: Any) -> None:
        self.now_ns = 1
        self.pool, self.adapters, self.device = Pool(), KnownAdapters(), BlockPool()
        self.side = SchedulerSide(
            ConnectorOptions(pool="/pool", capacity_gib=1, **options),
            B,
            PARTS,
            cast("Lookup", self.pool),
            cast("Adapters", self.adapters),
            lambda: self.now_ns,
            chooser,
        )
        self.side.bind_pool(self.device)
        self._next_block = 1

    def allocate(self, request: Request, blocks: int) -> None:
        fresh = list(range(self._next_block, self._next_block + blocks))
        self._next_block += blocks
        request.blocks += fresh
        self.device.touch(self.device.blocks[i] for i in fresh)

    def free(self, request: Request) -> None:
        self.device.free_blocks(self.device.blocks[i] for i in request.blocks)
        request.blocks = []

    def start(self, request: Request, local_tokens: int = 0) -> int | None:
        """Look up and, if it is decided, allocate: tokens to be loaded."""
        tokens = self.side.matched_tokens(request, local_tokens)
        if tokens is not None:
            self.allocate(request, -(-request.num_tokens // B))
            self.side.allocated(request, request.blocks, tokens)
            request.num_computed_tokens = local_tokens + tokens
        return tokens

    def step(self, *requests: Request, tokens: int = 10**6) -> StepPlan:
        """Compute up to `tokens` tokens of each request."""
        scheduled = {each.request_id: min(tokens, each.num_tokens - each.num_computed_tokens) for each in requests}
        tables = {each.request_id: each.blocks for each in requests}
        plan = self.side.plan({name: count for name, count in scheduled.items() if count}, tables.get)
        for each in requests:
            each.num_computed_tokens += scheduled[each.request_id]
        return plan

    def release(self, *numbers: int, parts: int = PARTS) -> None:
        self.side.apply(WorkerReport(dict.fromkeys(numbers, parts)), (), ())


# --- stores


def test_blocks_are_offered_once_as_they_become_full_and_held_until_every_part_has_them() -> None:
    world, request = World(), Request("r", 5 * B + 3)
    assert world.start(request) == 0
    (first,) = world.step(request, tokens=2 * B + 1).stores
    assert (first.prefix, first.blocks) == (tuple(request.block_hashes[:2]), tuple(request.blocks[:2]))
    (second,) = world.step(request).stores
    assert (second.prefix, second.blocks) == (tuple(request.block_hashes[2:5]), tuple(request.blocks[2:5]))
    assert world.step(request).stores == ()
    world.side.finished(request)
    blocks = list(request.blocks)
    world.free(request)
    world.release(first.number, parts=1)
    assert world.device.get_num_free_blocks() == BLOCKS - 1 - 5, "nothing that may still be read is free"
    world.release(first.number, second.number, parts=1)
    assert [world.device.blocks[i].ref_cnt for i in blocks] == [0, 0, 1, 1, 1, 0]
    world.release(second.number, parts=1)
    assert world.device.get_num_free_blocks() == BLOCKS - 1
    assert world.side.open_stores == 0


def test_what_was_looked_for_and_not_found_is_said_with_the_store() -> None:
    world = World()
    request = Request("r", 6 * B + 1)
    world.pool.held = set(request.block_hashes[:2])
    world.start(request)
    (store,) = world.step(request).stores
    assert (store.prefix, store.absent_from) == (tuple(request.block_hashes[2:6]), 0)
    unsure = Request("u", 6 * B + 1)
    world.pool.sure = False
    world.start(unsure)
    (store,) = world.step(unsure).stores
    assert store.absent_from == 6


def test_blocks_on_the_device_already_are_not_offered_again() -> None:
    world, request = World(), Request("r", 6 * B)
    world.start(request, local_tokens=4 * B)
    (store,) = world.step(request).stores
    assert store.prefix == tuple(request.block_hashes[4:6])


def test_generated_tokens_are_left_out_if_the_operator_says_so() -> None:
    world, request = World(stored_tokens=StoredTokens.PROMPT), Request("r", 6 * B, num_prompt_tokens=3 * B + 1)
    world.start(request)
    (store,) = world.step(request).stores
    assert len(store.prefix) == 3


def test_null_blocks_are_never_stored() -> None:
    world, request = World(), Request("r", 3 * B)
    world.start(request)
    request.blocks[1] = 0
    assert world.step(request).stores == ()
    assert world.side.open_stores == 0


# --- giving blocks back


def _held_alone(world: World, blocks: int, name: str = "r") -> tuple[Request, int]:
    """A request has gone, and `blocks` of its blocks are held for a store alone."""
    request = Request(name, blocks * B)
    world.start(request)
    (store,) = world.step(request).stores
    world.side.finished(request)
    world.free(request)
    return request, store.number


def test_a_few_blocks_are_held_for_a_while_and_then_revoked() -> None:
    world = World()
    _, number = _held_alone(world, 3)
    assert world.step().revoked == ()
    world.now_ns += 6 * SECOND_NS
    assert world.step().revoked == (number,)
    assert world.step().revoked == (), "once is enough"
    assert world.device.get_num_free_blocks() == BLOCKS - 1 - 3, "until the worker has let go"
    world.release(number)
    assert world.device.get_num_free_blocks() == BLOCKS - 1


def test_too_many_held_blocks_are_revoked_at_once() -> None:
    world = World(held_share=0.1)
    _, number = _held_alone(world, 11)
    assert world.step().revoked == (number,)


def test_a_vllm_that_is_short_of_blocks_gets_them_and_waits_for_them() -> None:
    world = World()
    assert not world.side.has_blocks_to_give()
    _, number = _held_alone(world, 3)
    assert world.side.has_blocks_to_give()
    assert world.step().revoked == (number,)
    scarce = World()
    _, number = _held_alone(scarce, 3)
    scarce.device.touch(scarce.device.blocks[4:99])
    assert scarce.step().revoked == (number,)


def test_blocks_of_running_requests_cost_nothing_to_hold() -> None:
    world, request = World(held_share=0.01), Request("r", 20 * B)
    world.start(request)
    world.step(request)
    world.now_ns += 100 * SECOND_NS
    assert world.step().revoked == ()
    assert not world.side.has_blocks_to_give()


def test_what_was_revoked_is_offered_again_by_whoever_finds_it_on_the_device() -> None:
    world = World()
    _, number = _held_alone(world, 6)
    world.now_ns += 6 * SECOND_NS
    world.step()
    world.release(number)
    again = Request("r", 8 * B)
    world.start(again, local_tokens=6 * B)
    (store,) = world.step(again).stores
    assert store.prefix == tuple(again.block_hashes)
    world.side.finished(again)
    third = Request("r", 9 * B)
    world.start(third, local_tokens=8 * B)
    (store,) = world.step(third).stores
    assert store.prefix == tuple(third.block_hashes[8:]), "but not once more"


# --- loads


def test_all_of_a_prompt_may_be_loaded() -> None:
    """vLLM then computes its last token again, in a block that is not stored again."""
    world, request = World(), Request("r", 6 * B)
    world.pool.held = set(request.block_hashes)
    assert world.start(request) == 6 * B
    (load,) = world.step().loads
    assert (load.prefix, load.blocks) == (tuple(request.block_hashes), tuple(request.blocks))
    world.side.apply(None, (), ["r"])
    request.num_computed_tokens = 6 * B - 1  # as vLLM sets it
    assert world.step(request, tokens=1).stores == ()


def test_a_hit_is_loaded_behind_what_the_device_has() -> None:
    world, request = World(), Request("r", 6 * B)
    world.pool.held = set(request.block_hashes[:5])
    assert world.start(request, local_tokens=2 * B) == 3 * B
    plan = world.step()
    (load,) = plan.loads
    assert (load.prefix, load.blocks) == (tuple(request.block_hashes[2:5]), tuple(request.blocks[2:5]))
    assert plan.idle
    world.side.apply(None, (), ["r"])
    (store,) = world.step(request).stores
    assert store.prefix == tuple(request.block_hashes[5:]), "what came from the pool does not go back"


def test_unanswered_is_asked_again_and_costs_nothing_when_dropped() -> None:
    world, request = World(), Request("r", 6 * B)
    world.pool.answers = False
    assert world.start(request) is None
    assert world.step().idle
    world.side.finished(request)
    assert world.pool.dropped == ["r"]
    assert world.step() == StepPlan()


def test_short_hits_are_computed_if_the_operator_says_so() -> None:
    world, request = World(min_load_tokens=3 * B), Request("r", 6 * B)
    world.pool.held = set(request.block_hashes[:2])
    assert world.start(request) == 0
    world.pool.held = set(request.block_hashes[:3])
    assert world.side.matched_tokens(request, 0) == 3 * B


class Rule:
    """Loads so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.asked: list[Choice] = []
        self.told: list[Loaded] = []

    def choose(self, choice: Choice) -> int:
        self.asked.append(choice)
        return self.tokens

    def loaded(self, load: Loaded) -> None:
        self.told.append(load)


@pytest.mark.parametrize(("wanted", "loaded"), [(-1, 0), (0, 0), (B - 1, 0), (2 * B + 1, 2 * B), (99 * B, 5 * B)])
def test_a_rule_says_how_much_of_a_hit_is_loaded(wanted: int, loaded: int) -> None:
    rule = Rule(wanted)
    world, request = World(rule), Request("r", 7 * B)
    world.pool.held = set(request.block_hashes[1:6])
    assert world.start(request, local_tokens=B) == loaded
    assert rule.asked == [Choice("r", 7 * B, B, 5 * B, 0)]
    loads = world.step().loads
    assert sum(len(load.blocks) for load in loads) * B == loaded
    world.side.apply(None, (), ["r"])
    stored = [name for store in world.step(request).stores for name in store.prefix]
    assert stored == request.block_hashes[1 + loaded // B :], "what is computed is offered to the pool"


def test_a_rule_hears_how_long_loads_took_and_what_was_ahead_of_them() -> None:
    rule = Rule(99 * B)
    world, first, second, broken = World(rule), Request("a", 4 * B), Request("b", 6 * B), Request("c", 2 * B)
    for request in (first, second, broken):
        world.pool.held |= set(request.block_hashes)
        world.start(request)
    assert [choice.loading_tokens for choice in rule.asked] == [0, 4 * B, 10 * B]
    loads = world.step().loads
    world.now_ns += 3_000_000_000
    world.side.apply(None, [loads[2].blocks[0]], ["b", "c"])
    assert rule.told == [Loaded(6 * B, 4 * B, 3.0)], "one that failed says nothing"
    world.side.finished(first)
    world.side.apply(None, (), ["a"])
    assert len(rule.told) == 1, "nor does one that was cancelled"


def test_a_rule_that_fails_costs_nothing_but_itself(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Rule):
        def choose(self, choice: Choice) -> int:
            raise ZeroDivisionError

    world, request = World(Broken(0)), Request("r", 6 * B)
    world.pool.held = set(request.block_hashes)
    assert world.start(request) == 6 * B
    assert "load_or_compute has failed" in caplog.text
    world.side.apply(None, (), ["r"])


def test_after_a_failed_block_the_rest_is_computed_and_stored_and_the_block_is_in_doubt() -> None:
    world, request = World(), Request("r", 6 * B)
    world.pool.held = set(request.block_hashes)
    world.start(request)
    (load,) = world.step().loads
    world.side.apply(None, [load.blocks[3], load.blocks[2], load.blocks[4]], ["r"])
    assert world.pool.doubts == [request.block_hashes[2]]
    request.num_computed_tokens = 2 * B  # as vLLM sets it
    (store,) = world.step(request).stores
    assert store.prefix == tuple(request.block_hashes[2:])
    assert world.side.counts.failed_blocks == 4
    assert world.side.matched_tokens(request, 0) == 0, "one failed load is enough for a request"


def test_an_aborted_load_is_cancelled_and_ends_in_its_own_time() -> None:
    world, request = World(), Request("r", 6 * B)
    world.pool.held = set(request.block_hashes)
    world.start(request)
    (load,) = world.step().loads
    world.side.finished(request)
    assert world.step().cancelled == (load.number,)
    world.side.apply(None, [], ["r"])
    assert world.step() == StepPlan()


# --- adapters, forgetting, bugs


@pytest.mark.parametrize("digest", [b"a" * 32, b"b" * 32])
def test_an_adapter_gives_blocks_other_names_once_it_has_been_read(digest: bytes) -> None:
    world, request = World(), Request("r", 4 * B, lora_request="adapter")
    assert world.start(request) is None
    assert world.step().idle
    world.adapters.digests["adapter"].set_result(digest)
    world.start(request)
    (store,) = world.step(request).stores
    assert not set(store.prefix) & set(request.block_hashes)
    assert len(set(store.prefix)) == 4


def test_an_adapter_that_cannot_be_read_keeps_its_requests_from_the_pool() -> None:
    world, request = World(), Request("r", 4 * B, lora_request="adapter")
    world.pool.held = set(request.block_hashes)
    world.start(request)
    world.adapters.digests["adapter"].set_result(None)
    assert world.start(request) == 0
    assert world.step(request).stores == ()
    slow = Request("s", 4 * B, lora_request="slow")
    assert world.start(slow) is None
    world.now_ns += 11 * SECOND_NS
    assert world.start(slow) == 0
    assert world.step(slow).stores == ()


def test_what_is_told_to_forget_finds_nothing_old_and_shows_nothing_new() -> None:
    world, old, running = World(), Request("r", 4 * B), Request("running", 8 * B)
    world.pool.held = set(old.block_hashes)
    world.start(running)
    (before,) = world.step(running, tokens=4 * B).stores
    world.release(before.number)
    assert not world.side.needs_steps
    world.side.forget()
    assert world.side.needs_steps
    plan = world.step(running)
    assert plan.forget
    assert plan.stores == (), "what was computed before may be of other weights"
    assert not world.step().forget
    assert world.side.needs_steps
    world.side.apply(WorkerReport(forgotten=PARTS - 1), (), ())
    assert world.side.needs_steps
    world.side.apply(WorkerReport(forgotten=1), (), ())
    assert not world.side.needs_steps, "every part has deleted it"
    assert world.start(old) == 0
    (store,) = world.step(old).stores
    assert not set(store.prefix) & set(old.block_hashes)
    world.pool.held = set(store.prefix)
    assert world.start(Request("r", 4 * B)) == 4 * B, "it finds its own"


def test_a_broken_worker_ends_all_use_of_the_pool() -> None:
    world, request = World(), Request("r", 4 * B)
    world.pool.held = set(request.block_hashes)
    world.side.apply(WorkerReport({}, broken=True), (), ())
    assert world.start(request) == 0
    assert world.step(request).stores == ()


def test_the_workers_are_told_of_each_prompt_once() -> None:
    world = World()
    request = Request("r", 4 * B + 1, blocks=list(range(1, 6)))
    world.side.matched_tokens(request, 0)
    world.side.allocated(request, request.blocks, 0)
    world.side.allocated(request, request.blocks, 0)  # it was preempted meanwhile
    assert world.side.plan({}, lambda request_id: None).prompts == (tuple(request.block_hashes),)
    assert world.side.plan({}, lambda request_id: None).prompts == ()
    short = Request("short", B - 1, blocks=[9])
    world.side.matched_tokens(short, 0)
    world.side.allocated(short, short.blocks, 0)
    assert world.side.plan({}, lambda request_id: None).prompts == ()
