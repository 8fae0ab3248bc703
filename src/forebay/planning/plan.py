"""A plan's file, worked out: cells, rules, and what to take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import forebay
from forebay.bench.progress import Progress, Silence
from forebay.flow import FlowOptions
from forebay.planning import cells, economy
from forebay.planning.cells import SAME_SHARE, Basis
from forebay.planning.options import CandidatePart, PlanFile, bytes_or_none
from forebay.planning.results import Cell, Cost, Demand, Plan, Wear
from forebay.planning.rules import Facts, findings
from forebay.planning.setting import Setting, capacity_bytes, read_setting
from forebay.sim.sizing import units_text

_Known = TypeVar("_Known")


def steps(file: PlanFile) -> int:
    """How many steps of progress a plan has."""
    return len(file.candidates) * (len(file.workload.concurrency) + 1)


def make_plan(file: PlanFile, folder: Path, progress: Progress | None = None) -> Plan:
    """`folder`: that of the file, from which paths in it lead. Deterministic. Raises ConfigError."""
    progress = progress or Silence()
    setting = read_setting(file, folder)
    demand = _demand(setting)
    found = cells.all_cells(setting, progress)
    gains = cells.all_gains(setting, found)
    recompute = tuple(cells.recompute_cell(setting, each) for each in file.workload.concurrency)
    saturation = cells.saturation(setting, found, Basis.SIMULATED)
    hits = economy.hit_rates(setting)
    worn = _known(economy.wear(setting, each, hits) for each in file.candidates)
    costs = _known(economy.cost(setting, each) for each in file.candidates)
    steady = []
    for candidate in file.candidates:
        progress.begins(f"{candidate.name}, mean rate")
        steady.append(cells.steady(setting, candidate.name))
        progress.ended(f"{candidate.name}, mean rate")
    chosen = _choose(setting, demand, found, worn, costs)
    return Plan(
        version=forebay.__version__,
        name=file.name,
        source=file.source,
        currency=file.currency,
        baseline=file.baseline,
        volume=setting.volume,
        demand=demand,
        cells=found,
        recompute=recompute,
        gains=gains,
        saturation=saturation,
        measured_saturation=cells.saturation(setting, found, Basis.MEASURED),
        tie_context_tokens={each: cells.tie_context_tokens(setting, each) for each in file.workload.concurrency},
        best_concurrency=cells.best_concurrency(setting, found, Basis.SIMULATED),
        measured_best_concurrency=cells.best_concurrency(setting, found, Basis.MEASURED),
        steady=_known(steady),
        hit_rates=hits,
        hit_rate_basis=economy.basis(setting),
        wear=worn,
        costs=costs,
        findings=findings(Facts(setting, demand, found, gains, recompute, saturation, worn)),
        recommended=chosen.name,
        reasons=chosen.reasons,
    )


def _known(found: Iterable[_Known | None]) -> tuple[_Known, ...]:
    return tuple(each for each in found if each is not None)


def _demand(setting: Setting) -> Demand:
    traffic, volume, peak, fleet = setting.traffic, setting.volume, setting.storm_sessions, setting.file.fleet
    instance_sessions, rank_share = -(-peak // fleet.instances), volume.session_rank_bytes / volume.session_bytes
    streamed_bytes, dram_bytes = _streamed_blocks(setting) * volume.block_bytes, bytes_or_none(setting.file.budget.dram)
    mean = None
    if traffic.requests_per_s is not None:
        mean = traffic.requests_per_s * traffic.reuse * volume.restored_bytes
    return Demand(
        requests_per_s=traffic.requests_per_s,
        reuse=traffic.reuse,
        mean_read_bytes_per_s=mean,
        peak_sessions=peak,
        peak_read_bytes_per_s=cells.demand_bytes_per_s(setting, peak, traffic.context_tokens),
        held_staging_bytes=peak * volume.restored_bytes,
        held_staging_rank_bytes=round(instance_sessions * volume.restored_bytes * rank_share),
        streamed_staging_bytes=streamed_bytes,
        streamed_staging_rank_bytes=round(streamed_bytes / fleet.instances * rank_share),
        dram_bytes=dram_bytes,
        dram_rank_bytes=None if dram_bytes is None else dram_bytes // fleet.ranks,
    )


def _streamed_blocks(setting: Setting) -> int:
    """Over the fleet: what each instance begins with, or what keeps the medium busy that needs most; and as many being
    copied on."""
    begun = setting.file.fleet.instances * FlowOptions().first_depth_blocks
    return 2 * max(begun, *(each.busy_blocks(setting.volume.block_bytes) for each in setting.media.values()))


@dataclass(frozen=True, slots=True)
class _Choice:
    name: str
    reasons: tuple[str, ...]


def _choose(
    setting: Setting, demand: Demand, found: Sequence[Cell], worn: Sequence[Wear], costs: Sequence[Cost]
) -> _Choice:
    """Of the candidates that fit the budget, those that cover the peak tie, and the cheapest of them is taken. Where
    none covers it: the cheapest of those that are fastest in a storm. Then the baseline goes first."""
    storm = {cell.candidate: cell for cell in found if cell.concurrency == setting.storm_sessions}
    fitting, reasons = _fitting(setting, storm, worn)
    peak, by_cost = demand.peak_read_bytes_per_s, {cost.candidate: cost.per_year for cost in costs}
    alike = [each for each in fitting if setting.reached_bytes_per_s(each.name) >= peak]
    if alike:
        why = f"delivers the {peak / 1e9:.1f} GB/s that the storm asks for"
    else:
        best_s = min(storm[each.name].ttft_p50_s for each in fitting)
        alike = [each for each in fitting if storm[each.name].ttft_p50_s <= best_s * (1 + SAME_SHARE)]
        why = f"is the fastest; nothing here delivers the {peak / 1e9:.1f} GB/s that the storm asks for"

    def rank(candidate: CandidatePart) -> tuple[float, bool]:
        return by_cost.get(candidate.name, float("inf")), candidate.name != setting.file.baseline

    chosen = min(alike, key=rank)
    reasons.append(f"{chosen.name} {why}.")
    if len(alike) > 1:
        names = ", ".join(each.name for each in alike if each is not chosen)
        priced = all(each.name in by_cost for each in alike)
        reasons.append(f"{names} would do as well{', for no less' if priced else '; not all prices are given'}.")
    cell, base = storm[chosen.name], storm[setting.file.baseline]
    beside = f", against {base.ttft_p50_s:.1f} s of {base.candidate}" if base is not cell else ""
    reasons.append(
        f"A storm of {cell.concurrency} sessions: TTFT p50 {cell.ttft_p50_s:.1f} s simulated{beside}; with ordered "
        f"flow {cell.ordered_p50_s:.1f} s."
    )
    kept = capacity_bytes(setting.file, chosen)
    if kept is not None and kept < setting.volume.total_bytes:
        reasons.append(
            f"It holds {units_text(kept)} of the {units_text(setting.volume.total_bytes)} of all sessions: see the hit "
            "rates by capacity."
        )
    return _Choice(chosen.name, tuple(reasons))


def _fitting(setting: Setting, storm: dict[str, Cell], worn: Sequence[Wear]) -> tuple[list[CandidatePart], list[str]]:
    budget, reasons = setting.file.budget, []
    fitting = list(setting.file.candidates)

    def keep(kept: list[CandidatePart], why: str) -> None:
        nonlocal fitting
        out = [each.name for each in fitting if each not in kept]
        if kept:
            fitting = kept
            if out:
                reasons.append(f"{', '.join(out)}: {why}, so not taken.")
        else:
            reasons.append(f"No candidate that is left avoids this: {why}.")

    if budget.price is not None:
        limit = budget.price
        prices = {each.name: economy.price(setting, each) for each in fitting}
        keep([each for each in fitting if prices[each.name] is not None], "without a price, and there is a budget")
        keep([each for each in fitting if (prices[each.name] or 0.0) <= limit], "dearer than the budget")
    if budget.ttft_p50_s is not None:
        limit_s = budget.ttft_p50_s
        slow = f"more than {limit_s:g} s of TTFT p50 at {setting.storm_sessions} sessions, even with ordered flow"
        keep([each for each in fitting if storm[each.name].ordered_p50_s <= limit_s], slow)
    short = {each.candidate for each in worn if each.years is not None and each.years < budget.life_years}
    if short:
        keep([each for each in fitting if each.name not in short], f"worn out before {budget.life_years:g} years")
    base = storm[setting.file.baseline]
    if any(each.name == base.candidate for each in fitting):
        most_s = base.ttft_p50_s * (1 + SAME_SHARE)
        kept = [each for each in fitting if storm[each.name].ttft_p50_s <= most_s]
        keep(kept, f"slower than {base.candidate} in a storm of {base.concurrency} sessions")
    return fitting, reasons
