"""Times and throughput of every candidate at every concurrency: the storm case.

TTFT comes from the simulator (`storms`): set-up, restores by the real engine and flow, prefill of what is new.

    throughput  all output tokens / (last TTFT + one decode step for each token after the first)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from forebay.bench.progress import Progress
from forebay.bench.storm.results import percentile
from forebay.bench.units import parse_rate
from forebay.fairness import Order
from forebay.planning.options import CandidatePart
from forebay.planning.results import Cell, Gain, Recompute, Steady
from forebay.planning.setting import Setting
from forebay.planning.storms import computing_nothing, storm
from forebay.sim.storm import StormWave

BUSY_SHARE = 0.85
"""A medium is saturated where it delivers so much of its ceiling, on average over a storm. Published measurements on an
8-GPU machine with a 480B model: the local SSD delivers 88 % of its peak with 8 sessions and gains 1 % of throughput
beyond 16; four SSDs over 100 GbE deliver 73 % with 8, 79 % with 16, and 91 % with 32."""
SAME_SHARE = 0.05
"""Two independent rounds of one published cell differ by up to 5 %: what differs by less is the same."""
_ARRIVALS, _ARRIVALS_SEED = 60, 0
_MOST_STEADY_LOAD = 0.98


class Basis(Enum):
    """What a conclusion is drawn from."""

    SIMULATED = "simulated"
    MEASURED = "measured"


def all_cells(setting: Setting, progress: Progress) -> tuple[Cell, ...]:
    found = []
    for candidate in setting.file.candidates:
        progress.begins(f"{candidate.name}: storms")
        shared, ordered = (waves(setting, candidate.name, order) for order in (Order.INTERLEAVED, Order.FAIR_SOJOURN))
        for concurrency in setting.file.workload.concurrency:
            found.append(storm_cell(setting, candidate, shared[concurrency], ordered[concurrency]))
            progress.ended(f"{candidate.name}, {concurrency} sessions: TTFT p50 {found[-1].best_p50_s:.2f} s")
    return tuple(found)


def waves(setting: Setting, candidate: str, order: Order) -> dict[int, StormWave]:
    """By concurrency: the storm of so many sessions, cold, or one of those in a row."""
    workload, restores = setting.file.workload, setting.restores(candidate)
    found = {
        each: storm(restores, (each,), order).last for each in workload.concurrency if each not in workload.in_a_row
    }
    if workload.in_a_row:
        found |= zip(workload.in_a_row, storm(restores, workload.in_a_row, order).waves, strict=True)
    return found


def storm_cell(setting: Setting, candidate: CandidatePart, shared: StormWave, ordered: StormWave) -> Cell:
    reached, concurrency, last_s = setting.reached_bytes_per_s(candidate.name), shared.sessions, max(shared.ttft_s)
    measured = next((each for each in candidate.measured if each.concurrency == concurrency), None)
    busy = parse_rate(measured.busy_mean) if measured is not None and measured.busy_mean else None
    return Cell(
        candidate=candidate.name,
        concurrency=concurrency,
        ttft_p50_s=shared.ttft_at_s(0.5),
        ttft_p99_s=shared.ttft_at_s(0.99),
        ordered_p50_s=ordered.ttft_at_s(0.5),
        ordered_mean_s=ordered.ttft_mean_s,
        ordered_p99_s=ordered.ttft_at_s(0.99),
        throughput_tok_s=_throughput(setting, concurrency, last_s),
        busy_share=shared.read_bytes / last_s / reached,
        measured_p50_s=measured.ttft_p50_s if measured is not None else None,
        measured_throughput_tok_s=measured.throughput_tok_s if measured is not None else None,
        measured_busy_share=busy / reached if busy is not None else None,
    )


def _throughput(setting: Setting, concurrency: int, last_ttft_s: float) -> float:
    tokens = setting.file.workload.output_tokens
    instance_sessions = -(-concurrency // setting.file.fleet.instances)
    return concurrency * tokens / (last_ttft_s + (tokens - 1) * setting.engine.step_s(instance_sessions))


def recompute_cell(setting: Setting, concurrency: int) -> Recompute:
    """No store: each instance computes its sessions' contexts one after the other."""
    engine, workload = setting.engine, setting.file.workload
    one_s = (setting.traffic.context_tokens + workload.followup_tokens) / engine.prefill_tokens_per_s
    ttft_s = [(number // setting.file.fleet.instances + 1) * one_s for number in range(concurrency)]
    return Recompute(
        concurrency=concurrency,
        ttft_p50_s=percentile(ttft_s, 0.5),
        ttft_p90_s=percentile(ttft_s, 0.9),
        throughput_tok_s=_throughput(setting, concurrency, max(ttft_s)),
    )


def all_gains(setting: Setting, cells: Sequence[Cell]) -> tuple[Gain, ...]:
    base = {cell.concurrency: cell for cell in cells if cell.candidate == setting.file.baseline}
    found = []
    for cell in cells:
        under = base[cell.concurrency]
        over, beside = cell.measured_throughput_tok_s, under.measured_throughput_tok_s
        found.append(
            Gain(
                candidate=cell.candidate,
                concurrency=cell.concurrency,
                simulated=cell.throughput_tok_s / under.throughput_tok_s - 1,
                measured=over / beside - 1 if over is not None and beside is not None else None,
            )
        )
    return tuple(found)


def saturation(setting: Setting, cells: Sequence[Cell], basis: Basis) -> dict[str, int | None]:
    """By candidate: the least concurrency at which it is busy."""
    found: dict[str, int | None] = {}
    for candidate in setting.file.candidates:
        own = [cell for cell in cells if cell.candidate == candidate.name]
        shares = {
            cell.concurrency: cell.busy_share if basis is Basis.SIMULATED else cell.measured_busy_share or 0.0
            for cell in own
        }
        found[candidate.name] = min(
            (each for each, share in shares.items() if round(share, 2) >= BUSY_SHARE), default=None
        )
    return found


def best_concurrency(setting: Setting, cells: Sequence[Cell], basis: Basis) -> dict[str, int | None]:
    """By candidate: the fewest sessions with which it gives all but `SAME_SHARE` of the throughput it ever gives.

    From there on, more sessions only wait longer. None: the basis has nothing of it.
    """
    found: dict[str, int | None] = {}
    for candidate in setting.file.candidates:
        speeds = {
            cell.concurrency: speed
            for cell in cells
            if cell.candidate == candidate.name
            for speed in (cell.throughput_tok_s if basis is Basis.SIMULATED else cell.measured_throughput_tok_s,)
            if speed is not None
        }
        most = max(speeds.values(), default=0.0)
        found[candidate.name] = min((each for each in speeds if speeds[each] >= (1 - SAME_SHARE) * most), default=None)
    return found


def tie_context_tokens(setting: Setting, concurrency: int) -> int:
    """The longest context at which so many sessions demand no more than the baseline delivers.

    Demand: the bytes of a storm over the time of all that no bandwidth shortens. As long as it is below the ceiling of
    the slower medium, transfers hide behind computing, and a faster one changes little.
    """
    hidden_bytes = setting.reached_bytes_per_s(setting.file.baseline) * setting.unshortened_s(concurrency)
    low, high = 0, 1 << 24
    while low < high:
        middle = (low + high + 1) // 2
        if concurrency * setting.restored_bytes(middle) <= hidden_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def demand_bytes_per_s(setting: Setting, concurrency: int, context_tokens: int) -> float:
    return concurrency * setting.restored_bytes(context_tokens) / setting.unshortened_s(concurrency)


def steady(setting: Setting, candidate: str) -> Steady | None:
    """Restores at the mean rate, arriving at random and served in order; None where no rate is known."""
    rate = setting.traffic.requests_per_s
    if rate is None or setting.traffic.reuse == 0:
        return None
    rate *= setting.traffic.reuse
    reached = setting.reached_bytes_per_s(candidate)
    load = rate * setting.volume.restored_bytes / reached
    if load > _MOST_STEADY_LOAD:
        return Steady(candidate=candidate, load_share=load, restore_p50_s=None, restore_p99_s=None)
    rng, at_s, arrivals = random.Random(_ARRIVALS_SEED), 0.0, []
    for _ in range(_ARRIVALS):
        at_s += rng.expovariate(rate)
        arrivals.append(at_s)
    restores = setting.restores(candidate)
    alone = replace(restores, profile=computing_nothing(restores.profile), setup_s=0.0)
    waited = storm(alone, (_ARRIVALS,), Order.FAIR_SOJOURN, arrivals).last.ttft_s
    return Steady(
        candidate=candidate,
        load_share=load,
        restore_p50_s=percentile(waited, 0.5),
        restore_p99_s=percentile(waited, 0.99),
    )
