"""What the published figures would be if something else were so: each simulated, and held against the table."""

from __future__ import annotations

import msgspec

from forebay.bench.calibration.model import DRAM_TIER_BYTES, Assumptions, plan
from forebay.bench.calibration.published import Quantity, published
from forebay.bench.calibration.validate import steps, validate
from forebay.bench.progress import Progress, Silence
from forebay.fairness import Order
from forebay.sim.host import Hosting
from forebay.sim.storm import StormSpec, run_storm


class Hypothesis(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    assumed: Assumptions


class Tested(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    worst_headline_error: float
    median_headline_error: float
    worst_row: str
    worst_quantity: Quantity


class Aside(msgspec.Struct, frozen=True, kw_only=True):
    """A figure that the reports give in passing."""

    name: str
    published: str
    simulated: float
    unit: str


HYPOTHESES = (
    Hypothesis(name="as modelled", assumed=Assumptions()),
    Hypothesis(name="nothing is left in DRAM by the wave before", assumed=Assumptions(is_tail_found=False)),
    Hypothesis(name="all of 4 GB a rank is left", assumed=Assumptions(dram_bytes_per_rank=DRAM_TIER_BYTES)),
    Hypothesis(
        name="4 GB are the limit of the machine, not of a rank",
        assumed=Assumptions(dram_bytes_per_rank=DRAM_TIER_BYTES // 8),
    ),
    Hypothesis(name="a session is 7.15 GB, not GiB", assumed=Assumptions(stored_tokens=28_160)),
    Hypothesis(name="in order, and steps go on", assumed=Assumptions(order=Order.ARRIVAL, hosting=Hosting.OVERLAPPED)),
    Hypothesis(name="both instances are equally fast", assumed=Assumptions(far_speed=1.0)),
    Hypothesis(name="the small staging pool does no harm", assumed=Assumptions(repeats_a_pool=False)),
)


def hypothesis_steps() -> int:
    return sum(steps(each.assumed) for each in HYPOTHESES)


def try_hypotheses(progress: Progress | None = None) -> tuple[Tested, ...]:
    """Simulates all rows once for each hypothesis."""
    return tuple(_try(each, progress or Silence()) for each in HYPOTHESES)


def _try(hypothesis: Hypothesis, progress: Progress) -> Tested:
    found = validate(progress, hypothesis.assumed)
    worst = max((cell for cell in found.cells if cell.is_headline), key=lambda cell: abs(cell.error))
    return Tested(
        name=hypothesis.name,
        worst_headline_error=found.worst_headline_error,
        median_headline_error=found.median_headline_error,
        worst_row=worst.row,
        worst_quantity=worst.quantity,
    )


def asides() -> tuple[Aside, ...]:
    """R3 shared_own at 16 once more with a DRAM tier of 64 GB a rank: restored from disk, and then from DRAM."""
    row = next(row for row in published() if row.report == "R3" and row.group == "shared_own" and row.sessions == 16)
    storm = plan(row, Assumptions(repeats_a_pool=False)).storm
    roomy: StormSpec = msgspec.structs.replace(storm, waves=(16, 16), host_bytes=4 * 64 * 10**9)
    first, second = run_storm(roomy).waves
    return (
        Aside(name=f"{row.name}, 64 GB: TTFT p50", published="13.1 to 15.4", simulated=first.ttft_at_s(0.5), unit="s"),
        Aside(name=f"{row.name}, 64 GB, again: TTFT p50", published="1.8", simulated=second.ttft_at_s(0.5), unit="s"),
    )
