"""The scrub: finds damage at its pace, goes on where it stopped, and keeps out of the way of another."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from file_tier_kit import BLOCK_BYTES, STORED_BYTES, block_file, flip, open_tier, set_aside, write_all

from forebay.errors import ConfigError
from forebay.testing.tier_contract import get, key_of, payload_of, put
from forebay.tiers.file import admin
from forebay.tiers.file.admin import ScrubLimits
from forebay.tiers.file.scrub import PASS_EVERY_S, BackgroundScrub, Pace, Scrub
from forebay.types import Outcome


def undisturbed(*file: object) -> AbstractContextManager[None]:
    """Around what a scrub removes where no catalogue is told."""
    return nullcontext()


FAST = ScrubLimits(bytes_per_s=1e12)
NUMBERS = range(20)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tier = open_tier(tmp_path / "a")
    put(tier, NUMBERS, BLOCK_BYTES)
    tier.close()
    return tmp_path / "a"


def scrub(root: Path, limits: ScrubLimits = FAST, **more: object) -> admin.CheckReport:
    return admin.scrub([root], limits, **{"sleep": lambda _: None, **more})  # type: ignore[arg-type]


def test_the_pace_is_kept_and_a_pause_is_no_credit() -> None:
    now_ns = 0
    pace = Pace(100.0, lambda: now_ns)
    assert pace.after(50) == 0.5
    assert pace.after(50) == 1.0
    now_ns = 1_000_000_000
    assert pace.after(100) == 1.0
    now_ns = 60_000_000_000
    assert pace.after(100) == 1.0


def test_a_scrub_is_as_fast_as_it_is_told(root: Path) -> None:
    now_ns = 0

    def sleep(seconds: float) -> None:
        nonlocal now_ns
        now_ns += round(seconds * 1e9)

    report = scrub(root, ScrubLimits(bytes_per_s=STORED_BYTES / 2), sleep=sleep, clock_ns=lambda: now_ns)
    assert (report.checked_blocks, report.checked_bytes) == (20, 20 * STORED_BYTES)
    assert now_ns == 20 * 2 * 10**9


def test_damage_is_set_aside_and_named_once(root: Path) -> None:
    flip(block_file(root, key_of(3)), 4096 + 9)
    os.truncate(block_file(root, key_of(4)), 77)
    report = scrub(root)
    assert {Path(found.path).name[:64] for found in report.set_aside} == {key_of(3).hex(), key_of(4).hex()}
    assert set_aside(root) == ["payload-checksum", "wrong-length"]
    again = scrub(root)
    assert (again.checked_blocks, again.set_aside) == (18, ())


def test_it_goes_on_where_it_was_interrupted(root: Path) -> None:
    seen: list[int] = []

    def interrupt(blocks: int, _: int) -> None:
        seen.append(blocks)
        if blocks == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scrub(root, progress=interrupt)
    rest = scrub(root)
    assert rest.checked_blocks == 20 - 7
    assert scrub(root).checked_blocks == 20, "a finished pass begins anew"
    with pytest.raises(KeyboardInterrupt):
        scrub(root, progress=interrupt)
    assert scrub(root, afresh=True).checked_blocks == 20


def test_every_block_is_seen_once_whatever_comes_and_goes_between_two_runs(root: Path) -> None:
    order = sorted(key_of(number).hex() for number in NUMBERS)
    seen: list[str] = []
    with Scrub(root, 0.0, lambda: 0.0, undisturbed) as first:
        for step in first.steps():
            seen.append(step.file.key.hex())
            if len(seen) == 10:
                break
        first.keep_position()
    block_file(root, bytes.fromhex(order[9])).unlink()  # where it stands
    block_file(root, bytes.fromhex(order[10])).unlink()
    with Scrub(root, 0.0, lambda: 0.0, undisturbed) as second:
        seen.extend(step.file.key.hex() for step in second.steps())
    assert seen == order[:10] + order[11:]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"[" * 5000,
        b'{"after": 3}',
        b'{"after": "../../x"}',
        b'{"after": "zzzz/zzzz"}',
        b"\xff" * 99,
        b'{"began_unix_s": 1e300}',
    ],
)
def test_a_damaged_position_means_from_the_beginning(root: Path, content: bytes) -> None:
    (root / "scrub.json").write_bytes(content)
    assert scrub(root).checked_blocks == 20


def test_a_pass_that_began_in_the_future_does_not_keep_the_next_one_away(root: Path) -> None:
    (root / "scrub.json").write_text('{"began_unix_s": 1e300}')
    run = Background(root)
    run.let(20)
    assert run.pauses[:20] == [1.0] * 20
    run.close()


def test_two_do_not_scrub_one_root(root: Path) -> None:
    with Scrub(root, 0.0, lambda: 0.0, undisturbed) as mine, Scrub(root, 0.0, lambda: 0.0, undisturbed) as theirs:
        assert (mine.is_mine, theirs.is_mine) == (True, False)
        with pytest.raises(ConfigError, match="another process"):
            scrub(root)
    assert scrub(root).checked_blocks == 20


def test_a_link_in_its_place_is_not_followed(root: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (root / "scrub.json").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        scrub(root)
    assert victim.read_text() == "mine"


def test_what_is_past_its_time_is_removed(root: Path) -> None:
    for number in range(8):
        os.utime(block_file(root, key_of(number)), ns=(0, 1_000 * 10**9))
    limits = ScrubLimits(bytes_per_s=1e12, ttl_s=3600.0)
    late = block_file(root, key_of(9)).stat().st_mtime + 10
    report = scrub(root, limits, wall_s=lambda: late)
    assert (report.checked_blocks, report.expired_blocks, report.expired_bytes) == (12, 8, 8 * STORED_BYTES)
    assert not block_file(root, key_of(0)).exists()
    assert block_file(root, key_of(9)).exists()


class Background:
    """A background scrub whose clock and pauses are the test's; it goes as far as `let` says, pause by pause."""

    def __init__(self, root: Path, ttl_s: float = 0.0) -> None:
        self.wall_s = 1e9
        self.now_ns = 0
        self.pauses: list[float] = []
        self.noticed: list[str] = []
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._stop = False
        limits = ScrubLimits(bytes_per_s=STORED_BYTES, ttl_s=ttl_s)
        self.scrub = BackgroundScrub(
            lambda: [root], limits, lambda root, kind: self.noticed.append(kind),
            lambda: self.now_ns, lambda: self.wall_s, self._pause, removing=undisturbed,
        )  # fmt: skip

    def _pause(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        self.now_ns += round(seconds * 1e9)
        self._paused.release()
        self._go.acquire()
        return self._stop

    def let(self, pauses: int) -> None:
        """Let it go on until it has paused so many times."""
        for _ in range(pauses):
            assert self._paused.acquire(timeout=60)
            self._go.release()

    def close(self) -> None:
        assert self._paused.acquire(timeout=60)
        self._stop = True
        self._go.release()
        for thread in self.scrub.close():
            thread.join(60)


def test_the_background_scrub_paces_itself_and_rests_after_a_pass(root: Path) -> None:
    flip(block_file(root, key_of(5)), 4096)
    run = Background(root)
    run.let(22)
    assert run.pauses[:20] == [1.0] * 20
    assert run.pauses[20:22] == [60.0, 60.0]
    assert run.noticed == ["payload-checksum"]
    run.wall_s += PASS_EVERY_S
    run.let(20)
    assert run.pauses[-15:-5] == [1.0] * 10, "the next pass, when its time has come"
    run.close()


def test_the_background_scrub_stands_aside_for_loads_and_changes_its_rate(root: Path) -> None:
    run = Background(root)
    run.let(2)
    run.scrub.demand_waits = True
    run.let(203)  # two blocks, and between them a hundred looks at whether loads still wait
    aside = run.pauses[3:203]
    assert aside.count(0.1) >= 190
    assert aside.count(1.0) <= 2
    run.scrub.demand_waits = False
    run.scrub.pace.bytes_per_s = 4 * STORED_BYTES
    run.let(6)
    assert run.pauses[-4:] == [0.25] * 4
    assert run.scrub.read_bytes >= 8 * STORED_BYTES
    run.close()


def test_the_background_scrub_goes_on_after_a_restart(root: Path) -> None:
    first = Background(root)
    first.let(7)
    first.close()
    second = Background(root)
    second.let(13 - 1)
    assert second.pauses[:12] == [1.0] * 12
    second.let(1)
    assert second.pauses[12] in (60.0, 1.0)
    second.close()


def test_a_tier_scrubs_in_the_background(tmp_path: Path) -> None:
    """The real thread, clock and pauses, at a rate that ends at once."""
    root = tmp_path / "a"
    tier = open_tier(root)
    put(tier, NUMBERS, BLOCK_BYTES)
    tier.close()
    flip(block_file(root, key_of(7)), 4096)
    tier = open_tier(root, scrub_bytes_per_s=1e12)
    threads = {thread.name for thread in threading.enumerate()}
    assert "forebay-scrub" in threads
    _wait_for(lambda: set_aside(root) == ["payload-checksum"])
    assert get(tier, 7, BLOCK_BYTES) is Outcome.MISSING
    assert write_all(tier, [7]) == [Outcome.OK]
    assert get(tier, 7, BLOCK_BYTES) == payload_of(7, BLOCK_BYTES)
    _wait_for(lambda: tier.describe()[0].events.get("payload-checksum") == 1)
    tier.close()
    assert "forebay-scrub" not in {thread.name for thread in threading.enumerate()}


def test_without_the_option_there_is_no_scrub(root: Path) -> None:
    tier = open_tier(root)
    assert "forebay-scrub" not in {thread.name for thread in threading.enumerate()}
    tier.close()


@pytest.mark.parametrize(
    "options", [{"scrub_bytes_per_s": -1.0}, {"scrub_bytes_per_s": float("nan")}, {"ttl_s": -1.0}, {"hang_s": 0.0}]
)
def test_wrong_options_are_one_line(tmp_path: Path, options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="file tier: ") as caught:
        open_tier(tmp_path / "a", **options)
    assert "\n" not in str(caught.value)


def _wait_for(holds: Callable[[], bool]) -> None:
    """Let other threads run until it holds."""
    turn = threading.Event()
    for _ in range(6000):
        if holds():
            return
        turn.wait(0.01)
    raise AssertionError("it never came to hold")
