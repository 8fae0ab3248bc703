"""Every published figure beside the simulated one, and the verdict over them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import msgspec

from forebay.bench.calibration.model import PARAMETERS, Assumptions, Plan, Role, plan, role
from forebay.bench.calibration.published import KI_GB, Published, Quantity, published
from forebay.bench.progress import Progress, Silence
from forebay.sim.storm import StormResult, StormSpec, StormWave, quantile, run_storm

MOST_ERROR, MEDIAN_ERROR = 0.10, 0.05
"""The goal, over all TTFT p50 and throughput cells: relative errors."""
_HEADLINES = (Quantity.TTFT_P50, Quantity.THROUGHPUT)


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One figure."""

    row: str
    quantity: Quantity
    measured: float
    simulated: float
    role: Role

    @property
    def error(self) -> float:
        """Relative, signed."""
        return self.simulated / self.measured - 1.0

    @property
    def is_headline(self) -> bool:
        return self.quantity in _HEADLINES


class FittedParameter(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    value: float
    unit: str
    meaning: str
    fitted_on: str


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "forebay-sim-validation/1"
    cells: tuple[Cell, ...]
    parameters: tuple[FittedParameter, ...]
    worst_headline_error: float
    median_headline_error: float
    is_met: bool


def runs(rows: Iterable[Published], assumed: Assumptions | None = None) -> list[StormSpec]:
    """The storms of these rows, each once."""
    found: list[StormSpec] = []
    for row in rows:
        spec = plan(row, assumed).storm
        if spec not in found:
            found.append(spec)
    return found


def steps(assumed: Assumptions | None = None) -> int:
    return len(runs(published(), assumed))


def validate(progress: Progress | None = None, assumed: Assumptions | None = None) -> Validation:
    """Simulates all rows. Deterministic."""
    progress, rows = progress or Silence(), published()
    results: list[tuple[StormSpec, StormResult]] = []
    for spec in runs(rows, assumed):
        what = f"{spec.profile.name}, {spec.media[0].name if spec.media else 'recompute'}, {spec.waves}"
        progress.begins(what)
        results.append((spec, run_storm(spec)))
        progress.ended(what)
    cells = tuple(cell for row in rows for cell in _cells(row, _wave(plan(row, assumed), results)))
    errors = [abs(cell.error) for cell in cells if cell.is_headline]
    worst, median = max(errors), statistics.median(errors)
    return Validation(
        cells=cells,
        parameters=tuple(
            FittedParameter(
                name=each.name, value=each.value, unit=each.unit, meaning=each.meaning, fitted_on=each.fitted_on
            )
            for each in PARAMETERS
        ),
        worst_headline_error=worst,
        median_headline_error=median,
        is_met=worst <= MOST_ERROR and median <= MEDIAN_ERROR,
    )


def _wave(planned: Plan, results: list[tuple[StormSpec, StormResult]]) -> StormWave:
    return next(result for spec, result in results if spec == planned.storm).waves[planned.wave]


def _cells(row: Published, wave: StormWave) -> list[Cell]:
    """Figures that were measured and are not 0: nothing is read where all is recomputed."""
    return [
        Cell(
            row=row.name,
            quantity=quantity,
            measured=measured,
            simulated=_simulated(row, wave, quantity),
            role=role(row, quantity),
        )
        for quantity, measured in row.measured.items()
        if measured
    ]


def _simulated(row: Published, wave: StormWave, quantity: Quantity) -> float:
    match quantity:
        case Quantity.TTFT_P50:
            return wave.ttft_at_s(0.5)
        case Quantity.TTFT_P90:
            return wave.ttft_at_s(0.9)
        case Quantity.TTFT_P99:
            return wave.ttft_at_s(0.99)
        case Quantity.TTFT_MEAN:
            return wave.ttft_mean_s
        case Quantity.TPOT_P50:
            return 1e3 * quantile(wave.tpot_s, 0.5)
        case Quantity.THROUGHPUT:
            return wave.tokens_per_s
        case Quantity.READ_PEAK:
            return wave.read_peak_bytes_per_s / KI_GB
        case Quantity.READ_BUSY if row.report == "R1":  # which prints the mean over all of the reading
            return wave.read_bytes / wave.read_span_s / KI_GB
        case Quantity.READ_BUSY:
            return wave.read_busy_bytes_per_s / KI_GB
