"""A device far too slow for what is offered: a bounded queue, drops that are counted, reads that do not feel it.

2 s a write and 500 offers a second for 10 s, under virtual time. `bench/back_pressure.py` does it in real time.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine_world import SECOND_NS, World, make_world
from forebay.engine import EngineOptions
from forebay.events import Refused
from forebay.keys import block_keys
from forebay.testing.schedule import NAMESPACE
from forebay.types import HOST, BlockKey, Job, JobKind

SLOTS, READ_BLOCKS = 64, 16
OPTIONS = EngineOptions(batch_blocks=4)
OFFERS_PER_S, OFFER_S, WRITE_NS, READ_NS = 500, 10, 2 * SECOND_NS, 1_000_000


def cost_ns(job: Job) -> int:
    return WRITE_NS * len(job.keys) if job.kind is JobKind.WRITE else READ_NS * len(job.keys)


def read_blocks(world: World, prompt: Sequence[BlockKey], fresh: Sequence[BlockKey]) -> int:
    """Load one prompt after the other for 10 s, while `fresh` is offered evenly; returns the blocks that came."""
    world.settle()
    began_ns, offered, reading, loaded = world.executor.now_ns(), 0, "", 0
    ends_ns = began_ns + OFFER_S * SECOND_NS
    block = world.lend(100, 1)
    number, most_held, most_queued = 0, 0, 0
    while (now_ns := world.executor.now_ns()) < ends_ns:
        due = min(len(fresh), (now_ns - began_ns) * OFFERS_PER_S // SECOND_NS)
        while offered < due:
            world.engine.offer(fresh[offered : offered + 1], block)  # once, whether it is taken or not
            offered += 1
        if not reading:
            world.engine.drop_host_copies()
            number, reading = number + 1, f"r{number}"
            plan = world.plan(reading, prompt)
            world.engine.start_load(plan, world.lend(0, plan.hit_blocks))
        for ended in world.engine.poll():
            assert ended.request_id == reading
            loaded, reading = loaded + ended.blocks, ""
        stores = world.engine._stores
        most_held = max(most_held, len(stores._in_transit))
        most_queued = max(most_queued, sum(len(queue) for queue in stores._queues.values()))
        world.engine.wait(min(ends_ns, now_ns + SECOND_NS // OFFERS_PER_S))
    assert most_queued <= most_held <= stores.most_slots < SLOTS, "the queue has a bound"
    assert offered >= len(fresh) - 1
    return loaded


def test_a_slow_device_costs_the_writes_and_not_the_reads() -> None:
    prompt = block_keys(NAMESPACE, list(range(READ_BLOCKS * NAMESPACE.block_tokens)))
    fresh = block_keys(NAMESPACE, [7] * (OFFERS_PER_S * OFFER_S * NAMESPACE.block_tokens))
    world = make_world(slots=SLOTS, tiers={"disk": 10_000}, options=OPTIONS)
    world.store(prompt)
    world.executor._cost_ns = cost_ns
    idle = read_blocks(world, prompt, ())
    assert idle > 1000
    busy = read_blocks(world, prompt, fresh)
    assert busy >= 0.9 * idle
    written = world.count(JobKind.WRITE, "disk") - len(prompt)
    refused = sum(event.blocks for event in world.events if isinstance(event, Refused))
    assert written <= 2 * OFFER_S, "what the device can"
    left = len(world.engine._stores._in_transit)
    assert refused >= len(fresh) - 1 - written - left, "every block that was dropped is counted"
    world.executor._cost_ns = lambda job: 1000
    world.settle()
    world.engine.check_idle()
    assert world.engine._stage.pool.slots == SLOTS
    assert world.engine._index.used_bytes(HOST) <= SLOTS * world.engine._stage.pool.slot_bytes
