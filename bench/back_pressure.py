"""What a disk that takes 2 s a write does to everybody else, in real time.

    python bench/back_pressure.py ROOT [--seconds 10] [--rounds 3] [--offers 500] [--write-s 2] [--json]

In each round, over one pool: reads alone, and the same reads while blocks are offered that the disk cannot take. Prints
the blocks read a second in both (medians, and of their ratio within a round), the p50, p99 and worst time of an offer,
the host slots that stores ever held, and what was dropped. Exits with 1 when an offer's p99 is 1 ms or more, or reads
keep less than 90 % of their idle rate. ROOT must be new or empty; each write of a block is held up by a wait below the
file tier, and so done by Python; reads go the way that they always do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forebay.engine import Engine
from forebay.events import Totals
from forebay.executor import ThreadExecutor
from forebay.hostpool import HostPool
from forebay.keys import block_keys, namespace_key
from forebay.policies.admit_all import AdmitAll
from forebay.policies.prefix_aware import Options as PrefixAwareOptions
from forebay.policies.prefix_aware import build as prefix_aware
from forebay.sim.ghosts import GhostMemory
from forebay.stage import Policies
from forebay.tiers.file import FileTier, Options, RootOptions
from forebay.tiers.file.directio import REAL_CALLS
from forebay.types import HOST, BlockKey, DeviceBlock, Namespace, Request

BLOCK_BYTES, SLOTS, PROMPT_BLOCKS, PROMPTS = 512 * 1024, 128, 16, 8
LOADS = 2
"""At a time, so that the disk has work while one ends and the next begins."""
NAMESPACE = Namespace(
    model="back pressure", weights_digest="none", kv_dtype="uint8", rope="none", layers=1, kv_heads=1, head_dim=1,
    block_tokens=4, block_bytes=BLOCK_BYTES, layout="bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    read_blocks_per_s: float
    offer_times_ns: tuple[int, ...]
    """Sorted."""
    most_slots_of_stores: int


class Bench:
    def __init__(self, root: Path) -> None:
        self._write_s = 0.0

        def pwritev(descriptor: int, parts: Sequence[memoryview], at: int) -> int:
            time.sleep(self._write_s)
            return os.pwritev(descriptor, parts, at)

        options = Options(roots=(RootOptions(path=str(root)),), capacity_bytes=2**34)
        tier = FileTier(options, NAMESPACE, bytes(namespace_key(NAMESPACE)), replace(REAL_CALLS, pwritev=pwritev))
        self.totals = Totals()
        policies = Policies({place: prefix_aware(PrefixAwareOptions()) for place in (HOST, "file")}, AdmitAll())
        self.engine = Engine(
            HostPool(SLOTS, BLOCK_BYTES), {"file": tier}, policies, GhostMemory(time.monotonic_ns),
            ThreadExecutor(close_within_s=5.0), self.totals.add,
        )  # fmt: skip
        self._prompts = [block_keys(NAMESPACE, [number] * (4 * PROMPT_BLOCKS)) for number in range(PROMPTS)]
        self._loads = 0

    def fill(self) -> None:
        for prompt in self._prompts:
            for key in prompt:
                while not self.engine.offer([key], [DeviceBlock(0)]):
                    self.engine.poll()
            self.settle()

    def settle(self) -> None:
        """What is under way comes to its end."""
        self._write_s = 0.0
        while not self.engine.idle:
            self.engine.poll()
            self.engine.wait(self.engine.now_ns() + 1_000_000)
        self.engine.drop_host_copies()

    def measure(self, seconds: float, offers_per_s: int, write_s: float) -> Measured:
        """Read prompts in turn, LOADS at a time, cold from the tier, and offer blocks evenly meanwhile."""
        self._write_s = write_s
        fresh = block_keys(NAMESPACE, [10_000 + self._loads] * (4 * int(offers_per_s * seconds)))
        times_ns, reading, blocks, most_slots = list[int](), 0, 0, 0
        began_s = time.monotonic()
        while (elapsed_s := time.monotonic() - began_s) < seconds:
            for key in fresh[len(times_ns) : int(elapsed_s * offers_per_s)]:
                times_ns.append(self._offer(key))
            for _ in range(LOADS - reading):
                self._start()
            reading = LOADS
            for loaded in self.engine.poll():
                blocks, reading = blocks + loaded.blocks, reading - 1
            most_slots = max(most_slots, len(self.engine._stores._in_transit))
            self.engine.wait(self.engine.now_ns() + 500_000)
        self.settle()
        return Measured(blocks / seconds, tuple(sorted(times_ns)), most_slots)

    def _offer(self, key: BlockKey) -> int:
        began_ns = time.perf_counter_ns()
        self.engine.offer([key], [DeviceBlock(0)])
        return time.perf_counter_ns() - began_ns

    def _start(self) -> None:
        self._loads += 1
        self.engine.drop_host_copies()
        plan = self.engine.plan_load(Request(f"r{self._loads}", tuple(self._prompts[self._loads % PROMPTS])))
        assert plan is not None
        self.engine.start_load(plan, [DeviceBlock(i) for i in range(plan.hit_blocks)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--offers", type=int, default=500)
    parser.add_argument("--write-s", type=float, default=2.0)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    bench = Bench(chosen.root)
    bench.fill()
    rounds = [
        (bench.measure(chosen.seconds, 0, 0.0), bench.measure(chosen.seconds, chosen.offers, chosen.write_s))
        for _ in range(chosen.rounds)
    ]
    bench.engine.close()
    times_ns = sorted(each for _, busy in rounds for each in busy.offer_times_ns)
    found: dict[str, Any] = {
        "idle_read_blocks_per_s": statistics.median(idle.read_blocks_per_s for idle, _ in rounds),
        "busy_read_blocks_per_s": statistics.median(busy.read_blocks_per_s for _, busy in rounds),
        "kept": [busy.read_blocks_per_s / idle.read_blocks_per_s for idle, busy in rounds],
        "offers": len(times_ns),
        "offer_p50_ms": times_ns[len(times_ns) // 2] / 1e6,
        "offer_p99_ms": times_ns[len(times_ns) * 99 // 100] / 1e6,
        "offer_most_ms": times_ns[-1] / 1e6,
        "most_slots_of_stores": max(busy.most_slots_of_stores for _, busy in rounds),
        "dropped_blocks": sum(bench.totals.refused.values()),
    }
    kept = statistics.median(found["kept"])
    if chosen.json:
        print(json.dumps(found))
    else:
        print(f"reads     {found['idle_read_blocks_per_s']:.0f} blocks/s alone, {found['busy_read_blocks_per_s']:.0f} "
              f"beside, {kept:.1%} (of {', '.join(f'{each:.1%}' for each in found['kept'])})")  # fmt: skip
        print(f"offers    {found['offers']}: p50 {found['offer_p50_ms']:.3f} ms, p99 {found['offer_p99_ms']:.3f}, "
              f"worst {found['offer_most_ms']:.3f}")  # fmt: skip
        print(f"queue     {found['most_slots_of_stores']} of {SLOTS} host slots at most; {found['dropped_blocks']} "
              "blocks dropped, counted")  # fmt: skip
    return 0 if found["offer_p99_ms"] < 1.0 and kept >= 0.9 else 1


if __name__ == "__main__":
    raise SystemExit(main())
