"""The result of a run: values that go into JSON, the table and the picture."""

from __future__ import annotations

import msgspec

BOUND = "bound"
"""In place of a policy's name: Belady's MIN on block hits."""


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One policy over one workload at one cache size."""

    workload: str
    policy: str
    admission: str
    cache_blocks: int
    hit_blocks: int
    wanted_blocks: int
    hit_tokens: int
    prompt_tokens: int
    written_blocks: int
    """0 for the bound, which writes nothing."""

    @property
    def block_hit_rate(self) -> float:
        return self.hit_blocks / self.wanted_blocks if self.wanted_blocks else 0.0

    @property
    def token_hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Subject(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was replayed."""

    workload: str
    requests: int
    block_tokens: int
    wanted_blocks: int
    distinct_blocks: int
    cache_blocks: tuple[int, ...]


class PolicyRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    version: str
    command: tuple[str, ...]
    seed: int
    subjects: tuple[Subject, ...]
    rows: tuple[Row, ...]
    """All with the admission `admit_all`, and the default eviction policy also with the frugal one."""

    def of(self, workload: str) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.workload == workload)
