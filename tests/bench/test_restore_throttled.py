"""A tier held to a rate: it is the tier behind, but slower, and those who share a medium share the rate."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.assemble import Named, StoreConfig, TierConfig, open_engine, open_tier
from forebay.bench.restore.throttled import Line, ThrottledTier
from forebay.bench.storm.device import StampDevice
from forebay.bench.storm.run import storm_namespace
from forebay.bench.storm.wave import restore, store
from forebay.errors import ConfigError, TierUnavailable
from forebay.keys import block_keys, namespace_key
from forebay.ports import Catalogued, Metered, Observed, Routed, Watched
from forebay.types import BlockKey, Outcome

BLOCK_BYTES = 8192
NAMESPACE = storm_namespace(BLOCK_BYTES)


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 10**12

    def now_ns(self) -> int:
        return self.now

    def sleep_ns(self, wait_ns: int) -> None:
        self.now += wait_ns


def file_tier(root: Path) -> dict[str, object]:
    return {"kind": "file", "options": {"roots": [{"path": str(root)}], "capacity_bytes": 10**9}}


def throttled(tier: dict[str, object], bytes_per_s: float = 1e9, pipe: str = "") -> ThrottledTier:
    options = {"tier": tier, "read_bytes_per_s": bytes_per_s, "pipe": pipe}
    named = Named(kind="forebay.bench.restore.throttled", options=options)
    tier_found = open_tier(named, NAMESPACE, bytes(namespace_key(NAMESPACE)))
    assert isinstance(tier_found, ThrottledTier)
    return tier_found


def keys(count: int) -> list[BlockKey]:
    return [BlockKey(number.to_bytes(32)) for number in range(count)]


def views(count: int) -> list[memoryview]:
    return [memoryview(bytearray(os.urandom(BLOCK_BYTES))) for _ in range(count)]


def test_it_holds_and_gives_what_the_tier_behind_does(tmp_path: Path) -> None:
    tier = throttled(file_tier(tmp_path / "pool"))
    written, read = views(5), views(5)
    assert tier.write(keys(5), written) == [Outcome.OK] * 5
    assert tier.read(keys(6), [*read, *views(1)]) == [Outcome.OK] * 5 + [Outcome.MISSING]
    assert [bytes(view) for view in read] == [bytes(view) for view in written]
    assert tier.delete(keys(1)) == [Outcome.OK]
    assert tier.contains(keys(2)) == [False, True]
    tier.close()


def test_it_has_the_abilities_of_the_tier_behind_and_no_others(tmp_path: Path) -> None:
    of_file = throttled(file_tier(tmp_path / "pool"))
    of_memory = throttled({"kind": "memory", "options": {"capacity_bytes": 10**6}})
    for ability in (Catalogued, Metered, Observed, Routed, Watched):
        assert isinstance(of_file, ability)
        assert not isinstance(of_memory, ability)
    of_file.close()
    of_memory.close()


def test_an_engine_restores_through_it(tmp_path: Path) -> None:
    options = {"tier": file_tier(tmp_path / "pool"), "read_bytes_per_s": 50e6}
    config = StoreConfig(
        host_bytes=64 * BLOCK_BYTES, tiers=(TierConfig(kind="forebay.bench.restore.throttled", options=options),)
    )
    session = block_keys(NAMESPACE, range(400))
    for is_new in (True, False):
        engine = open_engine(config, NAMESPACE, lambda pool: StampDevice(pool, lambda: 0))
        if is_new:
            store(engine, session)
        else:
            assert restore(engine, [session]).blocks == 100
        engine.check_idle()
        engine.close()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 10**7)), min_size=1, max_size=20))
def test_lines_on_one_file_carry_together_what_one_would_alone(moves: list[tuple[int, int]]) -> None:
    clock = Clock()
    with tempfile.NamedTemporaryFile() as file:
        lines = [Line(Path(file.name), 1e9, clock.now_ns, clock.sleep_ns) for _ in range(3)]
        ends = [lines[at].queue(moved) for at, moved in moves]
        for line in lines:
            line.close()
    assert ends == sorted(ends)
    assert ends[-1] == clock.now + sum(moved for _, moved in moves)  # 1 ns a byte, and no time has passed


def test_idle_time_is_not_saved_up() -> None:
    clock = Clock()
    line = Line(None, 1e6, clock.now_ns, clock.sleep_ns)
    began_ns = clock.now
    line.wait(line.queue(1000))
    clock.now += 10**9
    line.wait(line.queue(1000))
    assert clock.now - began_ns == 2 * 10**6 + 10**9
    line.close()
    with pytest.raises(TierUnavailable):
        line.queue(1)


@pytest.mark.parametrize("left", [b"\xff" * 7 + b"\x7f", b"\x80" * 8, b"abc", b""])
def test_what_a_line_finds_in_its_file_is_not_trusted(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "line").write_bytes(left)
    clock = Clock()
    line = Line(tmp_path / "line", 1e9, clock.now_ns, clock.sleep_ns)
    began_ns = clock.now
    line.wait(line.queue(5000))
    assert clock.now - began_ns == 5000
    line.close()


def test_bad_options_are_refused(tmp_path: Path) -> None:
    memory = {"kind": "memory", "options": {"capacity_bytes": 10**6}}
    for rate in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="read_bytes_per_s must be above 0"):
            throttled(memory, rate)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be used"):
        throttled(memory, pipe=str(tmp_path / "link"))
    with pytest.raises(ConfigError, match="cannot be used"):
        throttled(memory, pipe="a\0b")
    assert not (tmp_path / "elsewhere").exists()
