"""Figures of a replay as it goes: a fold over the engine's events and the host's sessions."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from forebay.bench.replay.options import Variant
from forebay.bench.replay.results import Bin, Outcome
from forebay.events import Event, JobEnded, Planned, Refused
from forebay.sim.host import Session
from forebay.sim.storm import quantile
from forebay.types import HOST, JobKind


@dataclass(slots=True)
class _Bin:
    wanted_blocks: int = 0
    dram_blocks: int = 0
    disk_blocks: int = 0
    read_blocks: int = 0
    written_blocks: int = 0
    ttft_s: list[float] = field(default_factory=list)


class Recorder:
    """One replay."""

    def __init__(self, bin_s: float, block_bytes: int, disk: str) -> None:
        self._bin_ns, self._block_bytes, self._disk = round(bin_s * 1e9), block_bytes, disk
        self._bins: defaultdict[int, _Bin] = defaultdict(_Bin)
        self._refused_blocks = self._loaded_blocks = self._loaded_tokens = self._prompt_tokens = 0

    def add(self, event: Event) -> None:
        match event:
            case Planned():
                each = self._bins[event.at_ns // self._bin_ns]
                each.wanted_blocks += event.wanted_blocks
                for place, blocks in event.hits:
                    if place == HOST:
                        each.dram_blocks += blocks
                    else:
                        each.disk_blocks += blocks
            case JobEnded(job=job) if job.tier == self._disk and job.kind is JobKind.READ:
                self._bins[event.at_ns // self._bin_ns].read_blocks += len(job.keys)
            case JobEnded(job=job) if job.tier == self._disk and job.kind is JobKind.WRITE:
                self._bins[event.at_ns // self._bin_ns].written_blocks += len(job.keys)
            case Refused() if event.place == self._disk:  # what the pool refuses is offered again
                self._refused_blocks += event.blocks
            case _:
                pass

    def ended(self, session: Session, block_tokens: int) -> None:
        ttft_s = (session.first_token_ns - session.arrived_ns) / 1e9
        self._bins[session.arrived_ns // self._bin_ns].ttft_s.append(ttft_s)
        self._loaded_blocks += session.loaded_blocks
        self._loaded_tokens += session.prefill_from_tokens
        self._prompt_tokens += session.prompt_tokens

    def outcome(self, variant: Variant, now_ns: int, unstored_blocks: int) -> Outcome:
        bins = tuple(self._bin(at, self._bins[at]) for at in range(max(self._bins) + 1))
        whole = self._bins.values()
        ttft_s = [each for held in whole for each in held.ttft_s]
        return Outcome(
            variant=variant,
            requests=len(ttft_s),
            wanted_blocks=sum(each.wanted_blocks for each in whole),
            dram_blocks=sum(each.dram_blocks for each in whole),
            disk_blocks=sum(each.disk_blocks for each in whole),
            loaded_blocks=self._loaded_blocks,
            prompt_tokens=self._prompt_tokens,
            loaded_tokens=self._loaded_tokens,
            ttft_mean_s=sum(ttft_s) / len(ttft_s),
            ttft_p50_s=quantile(ttft_s, 0.5),
            ttft_p90_s=quantile(ttft_s, 0.9),
            ttft_p99_s=quantile(ttft_s, 0.99),
            read_bytes=sum(each.read_blocks for each in whole) * self._block_bytes,
            written_bytes=sum(each.written_blocks for each in whole) * self._block_bytes,
            read_peak_bytes_per_s=max(each.read_bytes_per_s for each in bins),
            refused_blocks=self._refused_blocks,
            unstored_blocks=unstored_blocks,
            whole_s=now_ns / 1e9,
            bins=bins,
        )

    def _bin(self, at: int, held: _Bin) -> Bin:
        bin_s = self._bin_ns / 1e9
        return Bin(
            at_s=at * bin_s,
            requests=len(held.ttft_s),
            wanted_blocks=held.wanted_blocks,
            dram_blocks=held.dram_blocks,
            disk_blocks=held.disk_blocks,
            ttft_p50_s=quantile(held.ttft_s, 0.5) if held.ttft_s else None,
            ttft_p99_s=quantile(held.ttft_s, 0.99) if held.ttft_s else None,
            read_bytes_per_s=held.read_blocks * self._block_bytes / bin_s,
            write_bytes_per_s=held.written_blocks * self._block_bytes / bin_s,
        )
