"""Published measurements on an 8-GPU machine with a 480B model, as data.

Source: the storage reports R1 to R3 "mingxin-kvcache-bench" (Mingxin Technology; result data CC-BY-4.0). 8 x MI308X
with 192 GB each, vLLM 0.20.1 with LMCache, Qwen3-Coder-480B-FP8 with bf16 KV. Sessions of about 29.8k tokens, of which
30,208 are stored, with 64 output tokens; waves of N sessions at once, HBM and page caches cold, a DRAM tier of 4 GB.
TP4x2 is two instances with half of the sessions each. `fx100` is a RAID0 of 4 drives behind one 100 GbE port (NVMe-oF,
RoCEv2), `local_nvme` one PCIe 4 SSD. R1 is Qwen2.5-32B on one GPU. Independent rounds of one cell differ by up to 5 %.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import resources

KI_GB = 1.024e9
"""Bytes of the unit that the reports print rates in: kibibytes a second, divided by a million."""


class Quantity(Enum):
    """What was measured. The value is its column's name, with its unit."""

    TTFT_P50 = "ttft_p50_s"
    TTFT_P90 = "ttft_p90_s"
    TTFT_P99 = "ttft_p99_s"
    TTFT_MEAN = "ttft_mean_s"
    TPOT_P50 = "tpot_p50_ms"
    THROUGHPUT = "tokens_per_s"
    READ_PEAK = "read_peak_ki_gb_per_s"
    READ_BUSY = "read_busy_ki_gb_per_s"


@dataclass(frozen=True, slots=True)
class Published:
    """One row of the reports."""

    report: str
    form: str
    """Tensor-parallel ranks, by instances."""
    group: str
    medium: str
    sessions: int
    measured: Mapping[Quantity, float]

    @property
    def name(self) -> str:
        return f"{self.report} {self.form} {self.medium} {self.group} {self.sessions}"


def published() -> tuple[Published, ...]:
    text = resources.files(__package__).joinpath("published.csv").read_text(encoding="utf-8")
    return tuple(
        Published(
            row["report"], row["form"], row["group"], row["medium"], int(row["sessions"]),
            {quantity: float(row[quantity.value]) for quantity in Quantity if row[quantity.value]},
        )
        for row in csv.DictReader(text.splitlines())
    )  # fmt: skip
