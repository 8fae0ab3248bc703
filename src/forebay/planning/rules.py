"""Rules by which the field chooses storage for KV. Each says when it applies, what follows, and where it is from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from forebay.bench.units import bytes_text, parse_bytes
from forebay.planning.cells import SAME_SHARE, demand_bytes_per_s, tie_context_tokens
from forebay.planning.options import CandidatePart, rate_or_none
from forebay.planning.results import Cell, Demand, Finding, Gain, Recompute, Wear
from forebay.planning.setting import Setting
from forebay.sim.sizing import units_text

PUBLISHED = "published measurements on an 8-GPU machine with a 480B model"
"""Storage reports R2 to R4 of "mingxin-kvcache-bench" (Mingxin Technology; result data CC-BY-4.0)."""
SMALL_CONCURRENCY, FEW_GPUS = 4, 2
MOST_LEFT = 0.5
"""Of the time that the fastest medium saves: a medium that saves less takes most of it away."""
LITTLE_SHARE = 0.2
"""Of throughput: a gain that nobody would call little."""


@dataclass(frozen=True, slots=True)
class Facts:
    setting: Setting
    demand: Demand
    cells: tuple[Cell, ...]
    gains: tuple[Gain, ...]
    recompute: tuple[Recompute, ...]
    saturation: dict[str, int | None]
    wear: tuple[Wear, ...]

    @property
    def others(self) -> list[CandidatePart]:
        return [each for each in self.setting.file.candidates if each.name != self.setting.file.baseline]

    def cells_of(self, candidate: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.candidate == candidate]

    def gains_of(self, candidate: str) -> list[Gain]:
        return [gain for gain in self.gains if gain.candidate == candidate]


def findings(facts: Facts) -> tuple[Finding, ...]:
    return tuple(found for rule in RULES for found in rule(facts))


def small_concurrency(facts: Facts) -> Iterator[Finding]:
    few = [gain for gain in facts.gains if gain.concurrency <= SMALL_CONCURRENCY]
    if not few:
        return
    only = "This plan asks for no more. " if facts.setting.storm_sessions <= SMALL_CONCURRENCY else ""
    most = max(few, key=lambda gain: gain.best)
    whole = max(gain.best for gain in facts.gains_of(most.candidate))
    here = f"{most.candidate} {most.best:+.0%} at {most.concurrency}, of {whole:+.0%} at best"
    more = " That is more than the rule has it: these sessions are long." if most.best > LITTLE_SHARE else ""
    yield Finding(
        rule="small concurrency",
        text=f"{only}At a concurrency of {SMALL_CONCURRENCY} or less a faster medium gains little: look at quantised "
        f"KV or a shorter window first. Simulated here: {here}.{more}",
        source=f"Rule of the field. In the {PUBLISHED} gains were seen from 8 sessions on",
    )


def sata(facts: Facts) -> Iterator[Finding]:
    best = min(facts.cells, key=lambda cell: (-cell.concurrency, cell.best_p50_s))
    for candidate in facts.setting.file.candidates:
        if not candidate.is_sata:
            continue
        cell = next(each for each in facts.cells_of(candidate.name) if each.concurrency == best.concurrency)
        computed = next(each for each in facts.recompute if each.concurrency == best.concurrency)
        saved = computed.ttft_p50_s - best.best_p50_s
        left = (computed.ttft_p50_s - cell.best_p50_s) / saved if saved > 0 else 0.0
        taken = "takes most of the gain away" if left < MOST_LEFT else "leaves most of the gain"
        yield Finding(
            rule="SATA",
            text=f"{candidate.name} {taken}: TTFT p50 {cell.best_p50_s:.1f} s at "
            f"{best.concurrency} sessions, where {best.candidate} has {best.best_p50_s:.1f} s and recomputing "
            f"{computed.ttft_p50_s:.1f} s. It saves {max(0.0, left):.0%} of what the other does.",
            source="Serial ATA 3 moves 6 Gbit/s with 8b/10b coding: at most 0.6 GB/s, a tenth of one NVMe drive",
        )


def tie(facts: Facts) -> Iterator[Finding]:
    """Below the ceiling of the baseline the media tie."""
    setting, base = facts.setting, facts.setting.file.baseline
    reached = setting.reached_bytes_per_s(base)
    lengths = {setting.traffic.context_tokens: setting.file.workload.concurrency}
    shorter = setting.file.tie_context_tokens
    if shorter is not None:
        lengths[shorter] = setting.file.workload.concurrency
    for context_tokens, concurrencies in lengths.items():
        tied = [each for each in concurrencies if demand_bytes_per_s(setting, each, context_tokens) <= reached]
        if tied:
            demand = demand_bytes_per_s(setting, max(tied), context_tokens)
            longest = tie_context_tokens(setting, max(concurrencies))
            yield Finding(
                rule="tie",
                text=f"Sessions of {context_tokens:,} tokens: up to a concurrency of {max(tied)} they demand "
                f"{demand / 1e9:.1f} GB/s, which {base} delivers ({reached / 1e9:.1f} GB/s). "
                "Below that ceiling the media tie in steady work, and a faster one only ends a single storm sooner. At "
                f"{max(concurrencies)} the tie ends at {longest:,} tokens.",
                source=f"In the {PUBLISHED} sessions of 8k tokens, which demand about 5.5 GB/s, tied",
            )


def plan_for_peak(facts: Facts) -> Iterator[Finding]:
    peak, mean = facts.demand.peak_read_bytes_per_s, facts.demand.mean_read_bytes_per_s
    beside = f" The mean is {mean / 1e9:.2f} GB/s, {peak / mean:.0f} times less." if mean else ""
    yield Finding(
        rule="plan for the peak",
        text=f"A storm of {facts.demand.peak_sessions} sessions asks for {peak / 1e9:.1f} GB/s if its transfers are "
        f"to take no longer than the rest.{beside} Choose the medium by the storm.",
        source=f"In the {PUBLISHED} every storm reached its medium's peak, whatever the mean over it",
    )


def gain_grows(facts: Facts) -> Iterator[Finding]:
    for candidate in facts.others:
        gains = facts.gains_of(candidate.name)
        if len(gains) < 2 or max(gain.best for gain in gains) <= SAME_SHARE:
            continue
        full = facts.saturation[candidate.name]
        most = max(gains, key=lambda gain: gain.best)
        where = f"It saturates near {full}, simulated." if full is not None else "Nothing asked for here saturates it."
        yield Finding(
            rule="gain grows with concurrency",
            text=f"{candidate.name} gains {gains[0].best:+.0%} of throughput over {facts.setting.file.baseline} at "
            f"{gains[0].concurrency}, and most at {most.concurrency}: {most.best:+.0%}. {where}",
            source=f"{PUBLISHED}: +29 % at 8, +40 % at 16, +33 % at 32, with the local SSD saturated near 8 and the "
            "network medium near 32",
        )


def few_gpus(facts: Facts) -> Iterator[Finding]:
    gpus = facts.setting.file.fleet.gpus
    if gpus <= FEW_GPUS:
        yield Finding(
            rule="few GPUs",
            text=f"A box of {gpus} GPU{'s' if gpus > 1 else ''} gains less from a faster medium than a large machine: "
            "it runs few sessions at a time, of a smaller model, and computes them sooner. One good NVMe drive is "
            "where to begin.",
            source=f"Rule of the field; the gains of the {PUBLISHED} are of 8 GPUs",
        )


def network(facts: Facts) -> Iterator[Finding]:
    for candidate in facts.setting.file.candidates:
        link = rate_or_none(candidate.link)
        if not candidate.is_remote:
            continue
        said = "check that the ports, the switch and RDMA deliver what is planned with"
        if link is not None and rate_or_none(candidate.read or "") is not None:
            media = rate_or_none(candidate.read) or 0.0
            narrow = "the link decides" if link < media else "the drives decide"
            said = f"{narrow}: {min(link, media) / 1e9:.1f} GB/s of {max(link, media) / 1e9:.1f}; " + said
        yield Finding(
            rule="check the network",
            text=f"{candidate.name}: {said}, with as many streams as a storm has.",
            source=f"In the {PUBLISHED} four SSDs behind one 100 GbE port (12.5 GB/s of line rate) peaked at 10.5 GB/s",
        )


def staging(facts: Facts) -> Iterator[Finding]:
    budget = facts.setting.file.budget.dram
    demand = facts.demand
    needed = (
        f"A storm has {units_text(demand.held_staging_bytes)} in flight where the engine keeps whole sessions in "
        f"DRAM, and {units_text(demand.streamed_staging_bytes)} where blocks stream through, as Forebay's do."
    )
    if budget:
        dram_bytes = parse_bytes(budget)
        if dram_bytes < demand.streamed_staging_bytes:
            needed += f" The {units_text(dram_bytes)} of this plan are too little for either."
        elif dram_bytes < demand.held_staging_bytes:
            needed += f" The {units_text(dram_bytes)} of this plan do for streaming only."
    yield Finding(
        rule="staging",
        text=needed,
        source=f"In the {PUBLISHED} 4 GB of staging against 57 GiB in flight made allocations fail and time out; 64 GB "
        "put it right",
    )


def copies(facts: Facts) -> Iterator[Finding]:
    volume = facts.setting.volume
    if volume.copies > 1:
        yield Finding(
            rule="copies",
            text=f"The ranks of an instance hold {volume.copies:.1f} copies of each element, and all are counted here. "
            "Data-parallel attention, or a store that keeps one copy for all ranks, takes the rest away.",
            source="KV heads are copied where ranks outnumber them; a latent vector has none (forebay.sim.sizing)",
        )


def recompute_wins(facts: Facts) -> Iterator[Finding]:
    for candidate in facts.setting.file.candidates:
        slower = [
            cell.concurrency
            for cell, computed in zip(facts.cells_of(candidate.name), facts.recompute, strict=True)
            if cell.best_p50_s > computed.ttft_p50_s
        ]
        if slower:
            yield Finding(
                rule="recomputing is faster",
                text=f"{candidate.name} restores more slowly than the engine computes, at a concurrency of "
                f"{', '.join(map(str, slower))}: it stores {bytes_text(facts.setting.volume.session_bytes)} a session "
                "for nothing there.",
                source="TTFT p50 of both in this plan",
            )


def ordered_flow(facts: Facts) -> Iterator[Finding]:
    for candidate in facts.setting.file.candidates:
        cells = [cell for cell in facts.cells_of(candidate.name) if cell.concurrency > 1]
        if candidate.together or not cells:
            continue
        cell = max(cells, key=lambda each: each.concurrency)
        implied = cell.best_p50_s * cell.ordered_p50_s / cell.ttft_p50_s
        basis = "measured p50 times that" if cell.measured_p50_s is not None else "simulated"
        yield Finding(
            rule="ordered flow",
            text=f"{candidate.name}, {cell.concurrency} sessions at once: in order, with steps that go on, the "
            f"p50 of TTFT is {1 - cell.ordered_p50_s / cell.ttft_p50_s:.0%} lower than shared evenly with steps that "
            f"wait, and the p99 {cell.ordered_p99_s / cell.ttft_p99_s - 1:+.1%}: {cell.best_p50_s:.1f} s become "
            f"{implied:.1f} s ({basis}). It costs nothing.",
            source="The Fair Sojourn Protocol (Friedman and Henderson, 2003), as forebay.fairness has it, under "
            "virtual time",
        )


def wear(facts: Facts) -> Iterator[Finding]:
    life = facts.setting.file.budget.life_years
    for each in facts.wear:
        if each.years is not None and each.years < life:
            yield Finding(
                rule="wear",
                text=f"{each.candidate} takes {bytes_text(each.written_bytes_per_day)} a day if everything is written, "
                f"and is worn out in {each.years:.1f} years, not {life:g}: admit less (`frugal`), or set a write "
                "budget a day.",
                source="Rated endurance over the bytes of all tokens that were not restored",
            )


def curves(facts: Facts) -> Iterator[Finding]:
    for candidate in facts.setting.file.candidates:
        if candidate.curve:
            yield Finding(
                rule="measured curve",
                text=f"{candidate.name}: {facts.setting.media[candidate.name].source}.",
                source="The curve gives one read at a time and the best depth; Little's law all between",
            )


RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    tie, plan_for_peak, gain_grows, ordered_flow, small_concurrency, sata, few_gpus, network, staging, copies, wear,
    recompute_wins, curves,
)  # fmt: skip
