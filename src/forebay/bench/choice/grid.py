"""Every cell of a grid: a storm, what the engine chooses in it, and the best that could have been chosen.

The best of a storm of equal sessions is sought among all numbers of sessions that compute everything while the others
load everything, in three orders; for a single session, among all lengths of the prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

import msgspec

from forebay.bench.choice.host import Host, Limit, Outcomes, Prefill, Source, Storm

KV_BYTES_PER_TOKEN = 131_072
"""Llama-3-8B in bfloat16: 32 layers, 8 KV heads of 128, keys and values."""
_BLOCKS = 16
"""Of each session's stored prefix: enough for splits that matter, and few enough to try them all."""
_HALF_SPEED_TOKENS = 65_536


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One storm. Rates are of the device and the accelerator, not of a session."""

    prefill_tokens_per_s: float
    bytes_per_s: float
    context_tokens: int
    """Of each session, stored."""
    sessions: int
    new_tokens: int = 256
    slow_share: float = 0.0
    """Share of each prefix, at its end, that lies in a tier a tenth as fast."""
    host_share: float = 0.0
    """Share of each prefix, at its beginning, that is in DRAM."""

    def storm(self) -> Storm:
        host, slow = round(_BLOCKS * self.host_share), round(_BLOCKS * self.slow_share)
        block_tokens = self.context_tokens // _BLOCKS
        block_s = block_tokens * KV_BYTES_PER_TOKEN / self.bytes_per_s
        sources = [Source(name="fast", blocks=_BLOCKS - host - slow, block_s=block_s)]
        if slow:
            sources.append(Source(name="slow", blocks=slow, block_s=10 * block_s))
        return Storm(
            sessions=self.sessions,
            block_tokens=block_tokens,
            sources=tuple(sources),
            host_blocks=host,
            new_tokens=self.new_tokens,
            prefill=Prefill(tokens_per_s=self.prefill_tokens_per_s, half_speed_tokens=_HALF_SPEED_TOKENS),
        )


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """Mean seconds until the first token, over the sessions of a cell."""

    cell: Cell
    chosen_s: float
    best_s: float
    load_s: float
    """All load everything."""
    compute_s: float
    """All compute everything."""
    best_way: str

    @property
    def regret(self) -> float:
        """How much longer than the best, as a share of it. Negative where splits beat all that was tried."""
        return self.chosen_s / self.best_s - 1.0

    @property
    def regret_of_ends(self) -> float:
        """The same against the better of loading all and computing all."""
        return self.chosen_s / min(self.load_s, self.compute_s) - 1.0


def storm_cells() -> list[Cell]:
    """Prefill rates, bandwidths, context lengths and queue depths: 320 cells."""
    return [
        Cell(prefill_tokens_per_s=rate, bytes_per_s=bandwidth, context_tokens=context, sessions=sessions)
        for rate, bandwidth, context, sessions in product(
            (2_000.0, 8_000.0, 32_000.0, 128_000.0),
            (0.5e9, 2e9, 8e9, 32e9),
            (4_096, 16_384, 65_536, 131_072),
            (1, 2, 4, 8, 16),
        )
    ]


def source_cells() -> list[Cell]:
    """Single sessions whose prefix lies partly in DRAM and partly in a tier a tenth as fast: 192 cells."""
    return [
        Cell(
            prefill_tokens_per_s=rate, bytes_per_s=bandwidth, context_tokens=context, sessions=1, slow_share=slow,
            host_share=host,
        )
        for rate, bandwidth, context, slow, host in product(
            (2_000.0, 8_000.0, 32_000.0, 128_000.0),
            (0.5e9, 2e9, 8e9, 32e9),
            (16_384, 131_072),
            (0.25, 0.5, 0.75),
            (0.0, 0.25),
        )
    ]  # fmt: skip


def judge(cell: Cell) -> Judged:
    """Play a cell with the engine's choice, and with every other that counts."""
    storm = cell.storm()
    ways = dict(_ways(storm))
    tried = {name: _play(storm, limit).mean_s for name, limit in ways.items()}
    best_way = min(tried, key=lambda name: tried[name])
    return Judged(
        cell=cell,
        chosen_s=_play(storm, None).mean_s,
        best_s=tried[best_way],
        load_s=tried["load all"],
        compute_s=tried["compute all"],
        best_way=best_way,
    )


def judge_all(cells: Iterable[Cell]) -> Iterator[Judged]:
    return (judge(cell) for cell in cells)


def _play(storm: Storm, limit: Limit | None) -> Outcomes:
    host = Host(storm)
    host.learn()
    host.warm()
    return host.run() if limit is None else host.run(limit)


def _ways(storm: Storm) -> Iterator[tuple[str, Limit]]:
    everything, sessions = storm.stored_blocks, storm.sessions
    yield "load all", _all_load(everything)
    yield "compute all", _all_load(0)
    if sessions == 1:
        for blocks in range(1, everything):
            yield f"load {blocks} of {everything} blocks", _all_load(blocks)
        return
    for computing in range(1, sessions):
        turns = [number * computing // sessions for number in range(sessions + 1)]
        spread = {number for number in range(sessions) if turns[number + 1] > turns[number]}
        orders = {"first": set(range(computing)), "last": set(range(sessions - computing, sessions)), "evenly": spread}
        for order, chosen in orders.items():
            yield f"compute {computing} of {sessions} sessions, {order}", _some_compute(chosen, everything)


def _all_load(blocks: int) -> Limit:
    return lambda number: blocks


def _some_compute(computing: set[int], blocks: int) -> Limit:
    return lambda number: 0 if number in computing else blocks
