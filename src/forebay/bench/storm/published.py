"""Published measurements of restore storms, to say what another order would do to them.

Source: report R2 of the storage reports "mingxin-kvcache-bench" (Mingxin Technology; result data CC-BY-4.0), workload
"long-context cold restore" of Qwen3-Coder-480B-FP8 on 8 accelerators, TP8: sessions of about 29.8k tokens, each wave
restored once from cold storage. There p50 and p90 of a wave are within 0.02 s of each other: all sessions end together.
"""

from __future__ import annotations

from dataclasses import dataclass

SESSION_BYTES = 7_671_382_016
"""118 chunks of 256 tokens, 253,952 bytes of KV a token (bf16)."""
CHUNK_BYTES = 8_126_464
"""One of the 944 files of a session: 256 tokens of one of 8 shards."""


@dataclass(frozen=True, slots=True)
class Medium:
    name: str
    bytes_per_s: float
    """Peak of its reads; the reports print 10.26 and 6.78 in units of 1.024e9 bytes."""


@dataclass(frozen=True, slots=True)
class Cell:
    medium: Medium
    sessions: int
    ttft_p50_s: float


NVME_OF = Medium("4 SSDs over NVMe-oF, 100 GbE", 10.5e9)
LOCAL_NVME = Medium("1 local SSD, PCIe 4", 6.9e9)

CELLS = (
    Cell(NVME_OF, 8, 7.53),
    Cell(NVME_OF, 16, 11.85),
    Cell(NVME_OF, 32, 26.35),
    Cell(LOCAL_NVME, 8, 10.17),
    Cell(LOCAL_NVME, 16, 17.31),
    Cell(LOCAL_NVME, 32, 35.73),
)
