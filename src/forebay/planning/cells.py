"""Times and throughput of every candidate at every concurrency: the storm case.

The restores come from the real engine and flow under virtual time (`storms`). Around them:

    TTFT        setup + restore + prefill of what is new, first come first served within an instance
    throughput  all output tokens / (last TTFT + one decode step for each token after the first)
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from forebay.bench.progress import Progress
from forebay.bench.storm.results import percentile
from forebay.bench.units import parse_rate
from forebay.fairness import Order
from forebay.planning.options import CandidatePart
from forebay.planning.results import Cell, Gain, Recompute, Steady
from forebay.planning.setting import Setting
from forebay.planning.storms import StormSpec, run_storm

BUSY_SHARE = 0.85
"""A medium is saturated where it delivers so much of its ceiling, on average over a storm. Published measurements on an
8-GPU machine with a 480B model: the local SSD delivers 88 % of its peak with 8 sessions and gains 1 % of throughput
beyond 16; four SSDs over 100 GbE deliver 73 % with 8, 79 % with 16, and 91 % with 32."""
_ARRIVALS, _ARRIVALS_SEED = 60, 0
_MOST_STEADY_LOAD = 0.98


def all_cells(setting: Setting, progress: Progress) -> tuple[Cell, ...]:
    found = []
    for candidate in setting.file.candidates:
        for concurrency in setting.file.workload.concurrency:
            doing = f"{candidate.name}, {concurrency} sessions"
            progress.begins(doing)
            found.append(storm_cell(setting, candidate, concurrency))
            progress.ended(f"{doing}: TTFT p50 {found[-1].best_p50_s:.2f} s")
    return tuple(found)


def storm_cell(setting: Setting, candidate: CandidatePart, concurrency: int) -> Cell:
    medium = setting.media[candidate.name]
    shared, ordered = (
        _ttft_s(setting, candidate.name, concurrency, order) for order in (Order.INTERLEAVED, Order.FAIR_SOJOURN)
    )
    moved_bytes = concurrency * setting.volume.restored_bytes
    measured = next((each for each in candidate.measured if each.concurrency == concurrency), None)
    busy = parse_rate(measured.busy_mean) if measured is not None and measured.busy_mean else None
    return Cell(
        candidate=candidate.name,
        concurrency=concurrency,
        ttft_p50_s=percentile(shared, 0.5),
        ttft_p99_s=percentile(shared, 0.99),
        ordered_p50_s=percentile(ordered, 0.5),
        ordered_mean_s=sum(ordered) / len(ordered),
        ordered_p99_s=percentile(ordered, 0.99),
        throughput_tok_s=_throughput(setting, concurrency, max(shared)),
        busy_share=moved_bytes / max(shared) / medium.bytes_per_s,
        measured_p50_s=measured.ttft_p50_s if measured is not None else None,
        measured_throughput_tok_s=measured.throughput_tok_s if measured is not None else None,
        measured_busy_share=busy / medium.bytes_per_s if busy is not None else None,
    )


def _ttft_s(setting: Setting, candidate: str, concurrency: int, order: Order) -> list[float]:
    """Of each session. Sessions are dealt to the instances in turn; each computes what is new one by one."""
    restored = run_storm(_storm(setting, candidate, concurrency, order)).restored_s
    engine, workload = setting.engine, setting.file.workload
    followup_s = workload.followup_tokens / engine.prefill_tokens_per_s
    free_s = [0.0] * setting.file.fleet.instances
    found = []
    for number in sorted(range(concurrency), key=lambda at: (restored[at], at)):
        instance = number % len(free_s)
        free_s[instance] = max(free_s[instance], restored[number]) + followup_s
        found.append(engine.setup_s + free_s[instance])
    return found


def _storm(
    setting: Setting, candidate: str, sessions: int, order: Order, arrivals_s: Sequence[float] = ()
) -> StormSpec:
    return StormSpec(
        medium=setting.media[candidate],
        session_bytes=setting.volume.restored_bytes,
        block_bytes=setting.volume.block_bytes,
        sessions=sessions,
        order=order,
        arrivals_s=tuple(arrivals_s),
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


def saturation(setting: Setting, cells: Sequence[Cell]) -> dict[str, int | None]:
    """By candidate: the least concurrency at which it is busy; by measurements alone where there are any."""
    found: dict[str, int | None] = {}
    for candidate in setting.file.candidates:
        own = [cell for cell in cells if cell.candidate == candidate.name]
        measured = [cell for cell in own if cell.measured_busy_share is not None]
        busy = [cell.concurrency for cell in measured or own if cell.best_busy_share >= BUSY_SHARE]
        found[candidate.name] = min(busy, default=None)
    return found


def best_concurrency(setting: Setting, gains: Sequence[Gain]) -> dict[str, int]:
    """By candidate: where it gains most over the baseline; of measured gains alone where there are any."""
    found = {}
    for candidate in setting.file.candidates:
        own = [gain for gain in gains if gain.candidate == candidate.name]
        known = [gain for gain in own if gain.measured is not None] or own
        found[candidate.name] = max(known, key=lambda gain: (gain.best, -gain.concurrency)).concurrency
    return found


def tie_context_tokens(setting: Setting, concurrency: int) -> int:
    """The longest context at which so many sessions demand no more than the baseline delivers.

    Demand: the bytes of a storm over the time of all that no bandwidth shortens. As long as it is below the ceiling of
    the slower medium, transfers hide behind computing, and a faster one changes little.
    """
    hidden_bytes = setting.media[setting.file.baseline].bytes_per_s * setting.unshortened_s(concurrency)
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
    reached = setting.media[candidate].reached_bytes_per_s(setting.volume.block_bytes)
    load = rate * setting.volume.restored_bytes / reached
    if load > _MOST_STEADY_LOAD:
        return Steady(candidate=candidate, load_share=load, restore_p50_s=None, restore_p99_s=None)
    rng, at_s, arrivals = random.Random(_ARRIVALS_SEED), 0.0, []
    for _ in range(_ARRIVALS):
        at_s += rng.expovariate(rate)
        arrivals.append(at_s)
    waited = run_storm(_storm(setting, candidate, _ARRIVALS, Order.FAIR_SOJOURN, arrivals)).restored_s
    return Steady(
        candidate=candidate,
        load_share=load,
        restore_p50_s=percentile(waited, 0.5),
        restore_p99_s=percentile(waited, 0.99),
    )
