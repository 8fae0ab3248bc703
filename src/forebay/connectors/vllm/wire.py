"""What the scheduler's side and the workers' sides of the connector tell each other, once a step.

    scheduler -> workers:   StepPlan       what to load and store, and what to give up
    workers -> scheduler:   WorkerReport   which device blocks are vLLM's again
                            Handshake      once, at start: in which parts a rank stores its KV, and whose it is

vLLM carries these; a block is named by vLLM's hash of the whole prefix up to its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.connectors.vllm.options import Part
from forebay.types import Namespace


@dataclass(frozen=True, slots=True)
class Load:
    """Bring these blocks of the pool to these device blocks."""

    number: int
    """Never used twice by one engine."""
    request_id: str
    prefix: tuple[bytes, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """These device blocks are full once the step has run. They stay as they are until every part has released them."""

    number: int
    prefix: tuple[bytes, ...]
    blocks: tuple[int, ...]
    absent_from: int
    """Position from which on the blocks were looked for in the pool and not found; their number if none was."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    loads: tuple[Load, ...] = ()
    stores: tuple[Store, ...] = ()
    cancelled: tuple[int, ...] = ()
    """Loads that nobody waits for any more. They still have to end."""
    revoked: tuple[int, ...] = ()
    """Stores of which only what is being copied shall be finished."""
    forget: bool = False
    """Delete whatever the pool holds of this model, and store nothing more until that is done."""
    idle: bool = False
    """The model computes nothing in this step."""
    prompts: tuple[tuple[bytes, ...], ...] = ()
    """Requests that have come, with all of their full blocks: policies learn from each once, whether or not something
    is loaded."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Of one part, or of several added up."""

    released: dict[int, int] = field(default_factory=dict)
    """Store -> parts that have released its blocks."""
    forgotten: int = 0
    """How many parts have done what a plan's `forget` asked for."""
    broken: bool = False
    """A worker has met a bug of ours and neither loads nor stores any more."""

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        released = dict(self.released)
        for number, parts in other.released.items():
            released[number] = released.get(number, 0) + parts
        return WorkerReport(released, self.forgotten + other.forgotten, self.broken or other.broken)


@dataclass(frozen=True, slots=True)
class StoredPart:
    part: Part
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class Handshake:
    """What a rank stores."""

    parts: tuple[StoredPart, ...]
