"""What the records of one root's catalogue add up to. In memory, no I/O, no lock: `catalogue.py` guards it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.tiers.file.records import (
    CATALOGUE_VERSION,
    Doubtful,
    Limit,
    Operation,
    Record,
    Records,
    empty,
    seal,
    writers_and_keys,
)
from forebay.types import BlockKey, Change, ChangeKind

DAY_S = 86_400
_TIME_BITS = 32


class Intent(NamedTuple):
    writer: int
    reserved_bytes: int


@dataclass(slots=True)
class Space:
    """One namespace in one root."""

    digest: bytes
    tenant: bytes
    """Digest of the tenant; zeros without one."""
    held: dict[BlockKey, int] = field(default_factory=dict)
    """Length of the block's file and the second in which it was published, packed; oldest first. Neighbours that agree
    in both share one number, which is why they are packed."""
    held_bytes: int = 0
    intents: dict[BlockKey, tuple[Intent, ...]] = field(default_factory=dict)
    reserved_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        return self.held_bytes + self.reserved_bytes

    def times_s(self) -> NDArray[np.uint32]:
        """Of the blocks held, in their order."""
        mask = 2**_TIME_BITS - 1
        return np.fromiter((value & mask for value in self.held.values()), np.uint32, len(self.held))

    def lengths_bytes(self) -> NDArray[np.uint64]:
        """Of the blocks held, in their order."""
        return np.fromiter((value >> _TIME_BITS for value in self.held.values()), np.uint64, len(self.held))

    def length_bytes(self, key: BlockKey) -> int | None:
        value = self.held.get(key)
        return None if value is None else value >> _TIME_BITS


@dataclass(slots=True)
class Meter:
    """Bytes written here by all processes, across restarts."""

    written_bytes: int = 0
    since_s: int = 0
    today_s: int = 0
    """When the day began of which `today_bytes` tells."""
    today_bytes: int = 0

    def add(self, written_bytes: int, time_s: int) -> None:
        self.written_bytes += written_bytes
        today_s = time_s - time_s % DAY_S
        if today_s > self.today_s:
            self.today_s, self.today_bytes = today_s, 0
        self.today_bytes += written_bytes

    def add_many(self, written_bytes: NDArray[np.uint64], times_s: NDArray[np.uint32]) -> None:
        """As `add`, for each in turn."""
        days_s = times_s - times_s % DAY_S
        self.written_bytes += int(written_bytes.sum())
        begins = int(days_s.argmax())
        if days_s[begins] > self.today_s:
            self.today_s, self.today_bytes = int(days_s[begins]), 0
            written_bytes = written_bytes[begins:]
        self.today_bytes += int(written_bytes.sum())

    def today(self, now_s: float) -> int:
        """Bytes written since midnight (UTC)."""
        return self.today_bytes if now_s < self.today_s + DAY_S else 0


class Holdings:
    """`apply` is the only way to change it, so every process that has read the same records has the same holdings."""

    def __init__(self, tenant: bytes = bytes(32)) -> None:
        self.tenant = tenant
        """Whose changes are ours."""
        self.spaces: list[Space] = []
        self.numbers: dict[bytes, int] = {}
        """Digest of a namespace -> its place in `spaces`, its number in the records."""
        self.writers: dict[int, int] = {}
        """Writers that have not closed -> the boot they live in."""
        self.meter = Meter()
        self.limits: dict[Limit, int] = {}
        self.successor: int | None = None
        """Seed of the file that begins with these holdings, once they are sealed."""

    @property
    def used_bytes(self) -> int:
        """Bytes that blocks occupy and bytes that are reserved for them, in all namespaces."""
        return sum(space.used_bytes for space in self.spaces)

    @property
    def blocks(self) -> int:
        return sum(len(space.held) for space in self.spaces)

    def tenant_bytes(self, tenant: bytes) -> int:
        return sum(space.used_bytes for space in self.spaces if space.tenant == tenant)

    def space(self, digest: bytes) -> Space | None:
        number = self.numbers.get(digest)
        return None if number is None else self.spaces[number]

    def intents(self) -> Iterator[tuple[int, BlockKey, Intent]]:
        for number, space in enumerate(self.spaces):
            for key, intents in space.intents.items():
                for intent in intents:
                    yield number, key, intent

    # --- records in ----------------------------------------------------------------------------

    def adopt(self, records: Records) -> None:
        """What `apply` does to empty holdings, many records at a time: with the last that was said of each block."""
        operations = records["operation"] & 0xFF
        is_rare = (operations < Operation.INTENT) | (operations > Operation.GONE)
        for operation, *rest in records[is_rare].tolist():
            self._apply_rare(Record(operation & 0xFF, operation >> 8, *rest[:-1]))
        written = records[operations == Operation.WRITTEN]
        if len(written):
            self.meter.add_many(written["amount"], written["time_s"])
        numbers = records["operation"] >> 8
        for number in np.unique(numbers[~is_rare]).tolist():
            mine = ~is_rare & (numbers == number)
            space = self._numbered(number)
            _adopt_blocks(space, records[mine & (operations != Operation.INTENT)])
            if len(self.writers) and np.isin(records["writer"][mine], list(self.writers)).any():
                _adopt_intents(space, records[mine & np.isin(records["writer"], list(self.writers))])

    def apply(self, records: Records, mine: int = 0) -> list[Change]:
        """Follow these records, in order. Returns what other writers than `mine` added and removed.

        Raises Doubtful for records that make no sense.
        """
        changes: list[Change] = []
        operations = (records["operation"] & 0xFF).tolist()
        numbers = (records["operation"] >> 8).tolist()
        columns = (records[name].tolist() for name in ("time_s", "amount", "writer", "key"))
        for operation, number, time_s, amount, writer, key in zip(operations, numbers, *columns, strict=True):
            if operation < Operation.INTENT or operation > Operation.GONE:
                self._apply_rare(Record(operation, number, time_s, amount, writer, key))
                continue
            if number >= len(self.spaces):
                raise Doubtful(f"a block of namespace {number}, which it does not name")
            space = self.spaces[number]
            if operation == Operation.INTENT:
                if writer not in self.writers:
                    continue  # it has ended, and all its intents with it
                space.intents[key] = (*space.intents.get(key, ()), Intent(writer, amount))
                space.reserved_bytes += amount
                continue
            if key in space.intents:
                self._end_intents(space, key, writer)
            before = space.held.pop(key, None)
            if before is not None:
                space.held_bytes -= before >> _TIME_BITS
            if operation != Operation.GONE:
                space.held[key] = amount << _TIME_BITS | time_s
                space.held_bytes += amount
            if operation == Operation.WRITTEN:
                self.meter.add(amount, time_s)
            if writer != mine and (before is None) != (operation == Operation.GONE):
                kind = ChangeKind.ADDED if before is None else ChangeKind.REMOVED
                length_bytes = amount if before is None else before >> _TIME_BITS
                changes.append(Change(key, length_bytes, kind, space.tenant == self.tenant))
        return changes

    def _apply_rare(self, record: Record) -> None:
        match record.operation:
            case Operation.START:
                if self.spaces:
                    raise Doubtful("it begins twice")
            case Operation.NAMESPACE:
                if record.namespace != len(self.spaces) or record.key in self.numbers:
                    raise Doubtful("its namespaces are not in order")
                self.numbers[record.key] = len(self.spaces)
                self.spaces.append(Space(record.key, bytes(32)))
            case Operation.TENANT:
                self._numbered(record.namespace).tenant = record.key
            case Operation.TOTAL:
                self.meter.written_bytes, self.meter.since_s = record.amount, record.time_s
            case Operation.TODAY:
                self.meter.today_bytes, self.meter.today_s = record.amount, record.time_s
            case Operation.OPENED:
                self.writers[record.writer] = record.amount
            case Operation.CLOSED:
                self.writers.pop(record.writer, None)
                for number, key in {(n, key) for n, key, intent in self.intents() if intent.writer == record.writer}:
                    self._end_intents(self.spaces[number], key, record.writer)
            case Operation.LIMIT if record.namespace in tuple(Limit):
                self.limits[Limit(record.namespace)] = record.amount
            case Operation.SEALED:
                self.successor = record.amount
            case _:
                raise Doubtful(f"no such operation, {record.operation}")

    def _end_intents(self, space: Space, key: BlockKey, writer: int) -> None:
        left = tuple(intent for intent in space.intents[key] if intent.writer != writer)
        space.reserved_bytes -= sum(i.reserved_bytes for i in space.intents[key] if i.writer == writer)
        if left:
            space.intents[key] = left
        else:
            del space.intents[key]

    def _numbered(self, number: int) -> Space:
        if number >= len(self.spaces):
            raise Doubtful(f"namespace {number} has no name")
        return self.spaces[number]

    # --- without records ----------------------------------------------------------------------

    def take_over(self, spaces: Sequence[Space]) -> None:
        """Hold what was found on the disk."""
        self.spaces = list(spaces)
        self.numbers = {space.digest: number for number, space in enumerate(self.spaces)}

    def carry_over(self, old: Holdings, is_alive: Callable[[int], bool], now_s: int) -> None:
        """What the disk does not tell: who is writing, and what was ever written."""
        self.limits = old.limits
        self.meter = old.meter if old.meter.since_s else self._metered_anew(now_s)
        self.writers = {writer: boot for writer, boot in old.writers.items() if is_alive(writer)}
        for number, key, intent in old.intents():
            digest = old.spaces[number].digest
            if intent.writer in self.writers and digest not in self.numbers:
                self.numbers[digest] = len(self.spaces)
                self.spaces.append(Space(digest, old.spaces[number].tenant))
            if intent.writer in self.writers:
                space = self.spaces[self.numbers[digest]]
                space.intents[key] = (*space.intents.get(key, ()), intent)
                space.reserved_bytes += intent.reserved_bytes

    def _metered_anew(self, now_s: int) -> Meter:
        """When nothing tells what was written: of today at least what is still there, so that no budget begins anew."""
        today_s = now_s - now_s % DAY_S
        today_bytes = sum(int(space.lengths_bytes()[space.times_s() >= today_s].sum()) for space in self.spaces)
        return Meter(since_s=now_s, today_s=today_s, today_bytes=today_bytes)

    # --- records out ---------------------------------------------------------------------------

    def snapshot(self, seed: int, inode: int, now_s: int) -> Records:
        """The records with which a new file begins, from which `adopt` and `apply` make equal holdings."""
        few = [
            Record(Operation.TOTAL, time_s=self.meter.since_s, amount=self.meter.written_bytes),
            Record(Operation.TODAY, time_s=self.meter.today_s, amount=self.meter.today_bytes),
        ]
        few += [Record(Operation.LIMIT, limit, now_s, amount) for limit, amount in self.limits.items()]
        few += [Record(Operation.OPENED, time_s=now_s, amount=boot, writer=who) for who, boot in self.writers.items()]
        for number, space in enumerate(self.spaces):
            few.append(Record(Operation.NAMESPACE, number, now_s, key=space.digest))
            few.append(Record(Operation.TENANT, number, now_s, key=space.tenant))
        few += [Record(Operation.INTENT, n, now_s, i.reserved_bytes, i.writer, key) for n, key, i in self.intents()]
        total = 1 + len(few) + self.blocks
        start = Record(
            Operation.START, CATALOGUE_VERSION, now_s, total, inode, seed.to_bytes(8, "little") + bytes(24)
        )  # fmt: skip
        records = empty(total)
        for place, record in enumerate([start, *few]):
            records[place] = (record.operation | record.namespace << 8, *record[2:], 0)
        at = 1 + len(few)
        for number, space in enumerate(self.spaces):
            part = records[at : at + len(space.held)]
            part["operation"] = Operation.HELD | number << 8
            part["time_s"], part["amount"] = space.times_s(), space.lengths_bytes()
            part["key"] = np.frombuffer(b"".join(space.held), dtype="V32")
            at += len(part)
        seal(records, seed, 0)
        return records


def differences(old: Holdings, new: Holdings) -> Iterator[Change]:
    """What has to be added to the old and removed from it to have the new."""
    for gone, there, kind in ((new, old, ChangeKind.REMOVED), (old, new, ChangeKind.ADDED)):
        for space in there.spaces:
            other = gone.space(space.digest)
            for key, value in space.held.items():
                if other is None or key not in other.held:
                    yield Change(key, value >> _TIME_BITS, kind, space.tenant == new.tenant)


def packed(length_bytes: int, time_s: int) -> int:
    """A value of `Space.held`."""
    return length_bytes << _TIME_BITS | time_s


def _adopt_blocks(space: Space, records: Records) -> None:
    """HELD, WRITTEN and GONE of one namespace."""
    keys = records["key"].tolist()
    space.held = dict(zip(keys, _packed(records["amount"], records["time_s"]), strict=True))
    if len(space.held) < len(keys) or (records["operation"] & 0xFF == Operation.GONE).any():
        last = np.sort(np.fromiter(dict(zip(keys, range(len(keys)), strict=True)).values(), dtype=np.int64))
        records = records[last[records["operation"][last] & 0xFF != Operation.GONE]]
        values = _packed(records["amount"], records["time_s"])
        space.held = dict(zip(records["key"].tolist(), values, strict=True))
    space.held_bytes = int(records["amount"].sum())


def _packed(lengths_bytes: NDArray[np.uint64], times_s: NDArray[np.uint32]) -> Sequence[int]:
    """For `Space.held`; neighbours that are equal are one object."""
    changes = (lengths_bytes[1:] != lengths_bytes[:-1]) | (times_s[1:] != times_s[:-1])
    begins = np.flatnonzero(np.concatenate((np.ones(min(1, len(times_s)), dtype=bool), changes)))
    shared = [
        a << _TIME_BITS | b for a, b in zip(lengths_bytes[begins].tolist(), times_s[begins].tolist(), strict=True)
    ]
    repeats = np.diff(np.append(begins, len(times_s)))
    return [shared[i] for i in np.repeat(np.arange(len(begins)), repeats).tolist()]


def _adopt_intents(space: Space, records: Records) -> None:
    """Intents that no later record of the same writer has ended, of one namespace."""
    is_intent = records["operation"] & 0xFF == Operation.INTENT
    ends, begins = np.flatnonzero(~is_intent), np.flatnonzero(is_intent)
    ended = dict(zip(writers_and_keys(records[ends]), ends.tolist(), strict=True))
    for place, name in zip(begins.tolist(), writers_and_keys(records[begins]), strict=True):
        if ended.get(name, -1) < place:
            _, _, reserved_bytes, writer, key, _ = records[place].item()
            space.intents[key] = (*space.intents.get(key, ()), Intent(writer, reserved_bytes))
            space.reserved_bytes += reserved_bytes
