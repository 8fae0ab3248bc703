"""From requests and waves to cells and comparisons. Pure: the same record gives the same figures, bootstrap included.

Quantiles are interpolated linearly between the two nearest values, as the benchmarks of vLLM and SGLang do. Intervals
are percentile bootstraps (B. Efron, "Bootstrap methods: another look at the jackknife", 1979) over requests, or over
rounds for a figure of a whole wave. Sessions of one wave share a medium, so they are not independent, and an interval
over requests says how far they scatter rather than how well a round repeats: for that look at the rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from forebay.bench.restore.results import (
    BandwidthSample,
    Cell,
    Comparison,
    Group,
    RequestRecord,
    Role,
    Spread,
    WaveRecord,
)

_RESAMPLES = 2000
_OUTER_SHARES = (0.025, 0.975)
"""Of the resampled figures, between which lie 95 %."""
_BUSY_SHARE = 0.05
"""A sample counts as busy from this share of the largest one on."""

Values = npt.NDArray[np.float64]
Figure = Callable[[Values], Values]
"""Of each row of a matrix of resamples."""


def quantile_of(share: float) -> Figure:
    return lambda rows: np.quantile(rows, share, axis=-1)


def mean(rows: Values) -> Values:
    return np.asarray(rows.mean(axis=-1))


def spread(values: Sequence[float], figure: Figure, seed: int) -> Spread | None:
    """None without values."""
    if not values:
        return None
    whole = np.asarray(values, dtype=np.float64)
    rows = whole[_picks(len(whole), seed)]
    return _spread(float(figure(whole[None, :])[0]), figure(rows))


def _picks(count: int, seed: int) -> npt.NDArray[np.int64]:
    return np.random.Generator(np.random.PCG64(seed)).integers(0, count, (_RESAMPLES, count))


def _spread(value: float, resampled: Values) -> Spread:
    low, high = np.quantile(resampled, _OUTER_SHARES)
    return Spread(value=value, low=float(low), high=float(high))


# ---- cells


def cell_of(group: Group, concurrency: int, requests: Sequence[RequestRecord], waves: Sequence[WaveRecord], seed: int
            ) -> Cell:  # fmt: skip
    """`requests` and `waves`: of this group at this concurrency. Failed requests count as such, and no further."""
    good = [each for each in requests if not each.error]
    ttft_s = [each.ttft_s for each in good if each.ttft_s is not None]
    own_s = [each.ttft_s for each in good if each.ttft_s is not None and each.written_by == each.instance]
    others_s = [each.ttft_s for each in good if each.ttft_s is not None and each.written_by != each.instance]
    is_shared = group.role is Role.SHARED
    hits = [each.hit_tokens for each in good if each.hit_tokens is not None]
    busy = [rate for wave in waves for rate in (_busy_mean(wave),) if rate is not None]
    return Cell(
        group=group.name,
        role=group.role,
        concurrency=concurrency,
        rounds=len({wave.round for wave in waves}),
        requests=len(requests),
        failed=len(requests) - len(good),
        ttft_mean_s=spread(ttft_s, mean, seed),
        ttft_p50_s=spread(ttft_s, quantile_of(0.5), seed),
        ttft_p90_s=spread(ttft_s, quantile_of(0.9), seed),
        ttft_p99_s=spread(ttft_s, quantile_of(0.99), seed),
        ttft_p50_of_rounds_s=round_p50s(good),
        tpot_p50_s=spread([each.tpot_s for each in good if each.tpot_s is not None], quantile_of(0.5), seed),
        end_to_end_p50_s=spread([each.end_to_end_s for each in good], quantile_of(0.5), seed),
        output_tokens_per_s=_throughput(good, seed),
        hit_tokens=sum(hits) if hits else None,
        peak_bytes_per_s=max((sample.bytes_per_s for wave in waves for sample in wave.bandwidth), default=None),
        busy_mean_bytes_per_s=sum(busy) / len(busy) if busy else None,
        core_s_per_gb=_core_s_per_gb(waves),
        core_s_per_request=_core_s_per_request(waves, len(requests)),
        own_ttft_p50_s=spread(own_s, quantile_of(0.5), seed) if is_shared else None,
        others_ttft_p50_s=spread(others_s, quantile_of(0.5), seed) if is_shared else None,
    )


def round_p50s(requests: Sequence[RequestRecord]) -> tuple[float, ...]:
    """p50 of the TTFT of each round that has one, in order."""
    rounds: dict[int, list[float]] = {}
    for each in requests:
        if each.ttft_s is not None:
            rounds.setdefault(each.round, []).append(each.ttft_s)
    return tuple(float(np.quantile(rounds[number], 0.5)) for number in sorted(rounds))


def round_rates(requests: Sequence[RequestRecord]) -> tuple[float, ...]:
    """Output tokens a second of each round that has any, in order."""
    return tuple(
        float(tokens / taken_s) for tokens, taken_s in _tokens_and_times(requests) if tokens > 0 and taken_s > 0
    )


def _throughput(requests: Sequence[RequestRecord], seed: int) -> Spread | None:
    rounds = _tokens_and_times(requests)
    value = _rate(rounds)
    return _spread(value, _resampled_rates(rounds, seed)) if value is not None else None


def _tokens_and_times(requests: Sequence[RequestRecord]) -> Values:
    """[rounds, 2]: output tokens of a wave, and from its first request to its last token, over all instances."""
    rounds: dict[int, list[RequestRecord]] = {}
    for each in requests:
        rounds.setdefault(each.round, []).append(each)
    rows = [
        (
            sum(each.output_tokens for each in wave),
            max(each.ended_s for each in wave) - min(each.sent_s for each in wave),
        )
        for _, wave in sorted(rounds.items())
    ]
    return np.asarray(rows, dtype=np.float64).reshape(len(rows), 2)


def _rate(rounds: Values) -> float | None:
    """Tokens a second; None without tokens or time."""
    if not len(rounds) or not rounds[:, 0].sum() > 0 or not rounds[:, 1].min() > 0:
        return None
    return float(rounds[:, 0].sum() / rounds[:, 1].sum())


def _resampled_rates(rounds: Values, seed: int) -> Values:
    picked = rounds[_picks(len(rounds), seed)].sum(axis=1)
    return np.asarray(picked[:, 0] / picked[:, 1])


def _busy_mean(wave: WaveRecord) -> float | None:
    """Bytes a second over the samples in which the device was busy; None when it never was."""
    top = max((sample.bytes_per_s for sample in wave.bandwidth), default=0.0)
    if top <= 0:
        return None
    moved_bytes = seconds = 0.0
    for sample, lasted_s in zip(wave.bandwidth, _lengths(wave), strict=True):
        if sample.bytes_per_s >= _BUSY_SHARE * top:
            moved_bytes += sample.bytes_per_s * lasted_s
            seconds += lasted_s
    return moved_bytes / seconds if seconds > 0 else None


def _lengths(wave: WaveRecord) -> list[float]:
    ends: list[BandwidthSample] = list(wave.bandwidth)
    begins = [wave.began_s, *(sample.at_s for sample in ends[:-1])]
    return [sample.at_s - begin for sample, begin in zip(ends, begins, strict=True)]


def _core_s_per_gb(waves: Sequence[WaveRecord]) -> float | None:
    core_s = sum(wave.core_s for wave in waves if wave.core_s is not None)
    wanted_bytes = sum(wave.wanted_bytes for wave in waves)
    return core_s / (wanted_bytes / 1e9) if wanted_bytes and core_s else None


def _core_s_per_request(waves: Sequence[WaveRecord], requests: int) -> float | None:
    """None where the processor time of any wave is unknown."""
    core_s = [wave.core_s for wave in waves if wave.core_s is not None]
    return sum(core_s) / requests if requests and core_s and len(core_s) == len(waves) else None


# ---- comparisons

_AGAINST = {
    Role.RECOMPUTE: (),
    Role.BASELINE: (Role.RECOMPUTE,),
    Role.CANDIDATE: (Role.BASELINE, Role.RECOMPUTE),
    Role.SHARED: (Role.CANDIDATE, Role.BASELINE, Role.RECOMPUTE),
}  # fmt: skip


def comparisons(groups: Sequence[Group], requests: Sequence[RequestRecord], seed: int) -> tuple[Comparison, ...]:
    """Each group against those of the roles before its own, at each concurrency."""
    found = []
    for concurrency in sorted({each.concurrency for each in requests}):
        of = {
            group.name: [each for each in requests if each.group == group.name and each.concurrency == concurrency]
            for group in groups
        }
        for group in groups:
            for role in _AGAINST[group.role]:
                found += [
                    _compare(group.name, other.name, concurrency, of[group.name], of[other.name], seed)
                    for other in groups
                    if other.role is role
                ]
    return tuple(found)


def _compare(
    name: str,
    against: str,
    concurrency: int,
    mine: Sequence[RequestRecord],
    others: Sequence[RequestRecord],
    seed: int,
) -> Comparison:
    return Comparison(
        group=name,
        against=against,
        concurrency=concurrency,
        ttft_p50_change=_ttft_change(mine, others, seed),
        throughput_change=_throughput_change(mine, others, seed),
        tokens_equal=_tokens_equal(mine, others),
    )


def _ttft_change(mine: Sequence[RequestRecord], others: Sequence[RequestRecord], seed: int) -> Spread | None:
    """Resampled in pairs, the same session of the same round in both: what a session waits for its turn is in both."""
    one, other = _ttft_by_turn(mine), _ttft_by_turn(others)
    if not one or not other or not np.quantile(list(other.values()), 0.5) > 0:
        return None
    whole = float(np.quantile(list(one.values()), 0.5) / np.quantile(list(other.values()), 0.5)) - 1
    turns = [turn for turn in sorted(one.keys() & other.keys()) if other[turn] > 0]
    if not turns:
        return Spread(value=whole, low=whole, high=whole)
    picks, p50 = _picks(len(turns), seed), quantile_of(0.5)
    pairs = np.asarray([(one[turn], other[turn]) for turn in turns])[picks]
    return _spread(whole, np.asarray(p50(pairs[..., 0]) / p50(pairs[..., 1]) - 1))


def _ttft_by_turn(requests: Sequence[RequestRecord]) -> dict[tuple[int, int], float]:
    """By round and session."""
    return {(each.round, each.session): each.ttft_s for each in requests if each.ttft_s is not None and not each.error}


def _throughput_change(
    mine: Sequence[RequestRecord], others: Sequence[RequestRecord], seed: int
) -> Spread | None:  # fmt: skip
    one, other = (_tokens_and_times([each for each in requests if not each.error]) for requests in (mine, others))
    one_rate, other_rate = _rate(one), _rate(other)
    if one_rate is None or other_rate is None:
        return None
    return _spread(one_rate / other_rate - 1, _resampled_rates(one, seed) / _resampled_rates(other, seed + 1) - 1)


def _tokens_equal(mine: Sequence[RequestRecord], others: Sequence[RequestRecord]) -> bool:
    """Each session's outputs the same in both, and there is one in both."""
    one, other = _outputs(mine), _outputs(others)
    return bool(one) and one == other and all(len(found) == 1 and "" not in found for found in one.values())


def _outputs(requests: Sequence[RequestRecord]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for each in requests:
        found.setdefault(each.session, set()).add(each.output_digest)
    return found
