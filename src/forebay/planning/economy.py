"""What capacity keeps, what that writes and wears, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.assemble import Named, open_policy
from forebay.bench.policy.replay import Prompts, replay
from forebay.planning.options import CandidatePart, bytes_or_none
from forebay.planning.results import Cost, HitRate, Wear
from forebay.planning.setting import Setting, capacity_bytes

_DAY_S, _YEAR_DAYS = 86_400, 365.25
_SHARES = (0.05, 0.1, 0.25, 0.5, 1.0)
"""Capacities to show, beside those of the candidates, as shares of all that is to be kept."""
_ALIKE = 0.05
"""Capacities nearer to each other than that are shown once."""
_POLICY, _ADMISSION = "prefix_aware", "admit_all"
"""The defaults of a tier."""


def hit_rates(setting: Setting) -> tuple[HitRate, ...]:
    """By capacity: replayed where there is a trace, else with all sessions equally likely to come back."""
    whole_bytes = _whole_bytes(setting)
    capacities = {each for each in (capacity_bytes(setting.file, one) for one in setting.file.candidates) if each}
    for share in _SHARES:
        if not any(abs(each - share * whole_bytes) < _ALIKE * each for each in capacities):
            capacities.add(max(1, round(share * whole_bytes)))
    return tuple(hit_rate(setting, capacity) for capacity in sorted(capacities))


def basis(setting: Setting) -> str:
    prompts = setting.traffic.prompts
    if prompts is None:
        return "every session that is kept is equally likely to come back"
    said = f"{prompts.name}: {len(prompts.chains)} requests replayed with {_POLICY}"
    times = _whole_bytes(setting) / _trace_bytes(setting, prompts)
    return said if times == 1 else f"{said}; its KV stands for {times:,.1f} times as much, that of all sessions"


def hit_rate(setting: Setting, capacity: int) -> HitRate:
    prompts = setting.traffic.prompts
    if prompts is None:
        kept = min(1.0, capacity / setting.volume.total_bytes) * setting.traffic.reuse
        return HitRate(capacity_bytes=capacity, token_hit_rate=kept, written_share=1 - kept)
    blocks = max(1, int(capacity / _whole_bytes(setting) * prompts.distinct_blocks))
    score = replay(
        prompts, min(blocks, prompts.distinct_blocks), open_policy(Named(kind=_POLICY)),
        open_policy(Named(kind=_ADMISSION)),
    )  # fmt: skip
    hit_tokens, written_tokens = (each * prompts.block_tokens for each in (score.hit_blocks, score.written_blocks))
    return HitRate(
        capacity_bytes=capacity,
        token_hit_rate=hit_tokens / prompts.prompt_tokens,
        written_share=written_tokens / prompts.prompt_tokens,
    )


def _whole_bytes(setting: Setting) -> int:
    """All that is to be kept. A trace of fewer sessions than the plan has stands for all of them: what share of its
    blocks a capacity keeps, it keeps of theirs."""
    prompts, total = setting.traffic.prompts, setting.volume.total_bytes
    return total if prompts is None else max(total, _trace_bytes(setting, prompts))


def _trace_bytes(setting: Setting, prompts: Prompts) -> int:
    token_bytes = setting.volume.token_bytes * setting.volume.copies
    return max(1, round(prompts.distinct_blocks * prompts.block_tokens * token_bytes))


def wear(setting: Setting, candidate: CandidatePart, hits: Sequence[HitRate]) -> Wear | None:
    """Bytes a day: what was not restored is computed and written, and so is what is new. None without a rate."""
    rate, capacity = setting.traffic.requests_per_s, capacity_bytes(setting.file, candidate)
    if rate is None:
        return None
    workload, found = setting.file.workload, next((each for each in hits if each.capacity_bytes == capacity), None)
    written_share = 1 - setting.traffic.reuse if found is None else found.written_share
    tokens = setting.traffic.context_tokens * written_share + workload.followup_tokens + workload.output_tokens
    per_day = rate * _DAY_S * tokens * setting.volume.token_bytes * setting.volume.copies
    endurance = bytes_or_none(candidate.endurance)
    rated = None if endurance is None else endurance * candidate.drives
    return Wear(
        candidate=candidate.name,
        written_bytes_per_day=per_day,
        years=None if rated is None else rated / per_day / _YEAR_DAYS,
    )


def price(setting: Setting, candidate: CandidatePart) -> float | None:
    if not candidate.together:
        return candidate.price
    prices = [each.price for each in setting.file.candidates if each.name in candidate.together]
    known = [each for each in prices if each is not None]
    return sum(known) if len(known) == len(prices) else None


def cost(setting: Setting, candidate: CandidatePart) -> Cost | None:
    """None without a price."""
    found = price(setting, candidate)
    if found is None:
        return None
    per_year, rate, fleet = found / setting.file.budget.life_years, setting.traffic.requests_per_s, setting.file.fleet
    millions = None
    if rate is not None:
        millions = rate * setting.file.workload.output_tokens * _DAY_S * _YEAR_DAYS / 1e6
    with_fleet = None if fleet.cost_per_year is None else fleet.cost_per_year + per_year
    return Cost(
        candidate=candidate.name,
        per_year=per_year,
        per_million_tokens=None if millions is None else per_year / millions,
        with_fleet_per_million_tokens=None if millions is None or with_fleet is None else with_fleet / millions,
    )
