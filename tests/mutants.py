"""Put known bugs back, one at a time, in a copy of the sources; the tests must catch each.

    python tests/mutants.py [--check | --every N | NAME ...]
    python tests/mutants.py --check      only see whether each of them still applies: in a moment, and without a test

Each mutant is a bug that this code had, or that code like it had elsewhere. A mutant that no longer applies (its text
is gone from the source) is an error too: then the list has to follow the code. Exits with 1 unless every one is caught.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGINE = ("tests/test_engine.py", "tests/test_schedules.py")
LATE = ("tests/test_late.py",)
TIMEOUT_S = 180
"""A hang counts as caught."""


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...] = ENGINE


MUTANTS = (
    Mutant(
        "evict-pinned", "index.py",
        "return copy is not None and copy.state is CopyState.READY and copy.pins == 0",
        "return copy is not None and copy.state is CopyState.READY",
    ),
    Mutant(
        "commit-failed-read", "loads.py",
        "                if result.outcomes[key] is Outcome.OK:\n                    arrived.append(key)",
        "                if True:\n                    arrived.append(key)",
    ),
    Mutant(
        "load-past-a-hole", "loads.py",
        'return (bytes(self.arrived[: self.limit]) + b"\\0").index(0)',
        "return sum(self.arrived)",
    ),
    Mutant(
        "plan-with-holes", "planner.py",
        "        if source is None:\n            break",
        "        if source is None:\n            continue",
    ),
    Mutant(
        "write-without-pin", "stores.py",
        "                self._index.pin(key, HOST)\n",
        "",
    ),
    Mutant(
        "commit-failed-write", "stores.py",
        "            if result.outcomes[key] is Outcome.OK:\n                self._index.commit(key, tier)",
        "            if True:\n                self._index.commit(key, tier)",
    ),
    Mutant(
        "leak-slot-of-failed-fill", "stage.py",
        "        if still_written_by is None:\n            self.pool.give(slot)",
        "        if still_written_by is None:\n            pass",
    ),
    Mutant(
        "forget-before-delete-landed", "stores.py",
        "            index.begin_drop(victim, tier)\n",
        "            index.forget(victim, tier)\n            index.adopt(victim, tier, 0)\n"
        "            index.begin_drop(victim, tier)\n            index.drop(victim, tier)\n",
    ),
    Mutant(
        "cancelled-load-counts", "loads.py",
        "        self._cut(load, 0)\n        if not load.started:",
        "        if not load.started:",
    ),
    Mutant(
        "waiters-forgotten", "loads.py",
        "                load.parked.remove(position)\n                self._make_ready(load, position)",
        "                load.parked.remove(position)",
    ),
    Mutant(
        "tail-pins-starve-the-head", "loads.py",
        "            elif source == HOST:\n                self._take_from_host(load, position)",
        "            elif source == HOST and position == 0:\n                self._take_from_host(load, position)",
    ),
    Mutant(
        "keep-claim-of-lost-block", "loads.py",
        "        if self._is_disproved(key, tier, outcome) and self._index.is_ready(key, tier):",
        "        if self._is_disproved(key, tier, outcome) and self._index.is_evictable(key, tier):",
    ),
    Mutant(
        "believe-a-failed-delete", "stores.py",
        "            if outcomes.get(key) is Outcome.MISSING:\n                self._index.drop(key, job.tier)",
        "            if True:\n                self._index.drop(key, job.tier)",
    ),
    Mutant(
        "write-although-nothing-left", "stage.py",
        "    if any(outcome is not Outcome.OK for outcome in gone.values()):",
        "    if False:",
    ),
    Mutant(
        "stores-take-every-slot", "stage.py",
        "return self.pool.slots - self._reserved_slots - self.pins.blocks(HOST)",
        "return self.pool.slots",
    ),
    Mutant(
        "evict-what-is-pinned", "stage.py",
        "            if self.pins.holds(key, place):",
        "            if False:",
        ("tests/test_pins.py",),
    ),
    Mutant(
        "unpinned-blocks-stay-for-ever", "stage.py",
        "                self.eviction[place].inserted((key,))\n\n    def reserve_host",
        "                pass\n\n    def reserve_host",
        ("tests/test_pins.py",),
    ),
    Mutant(
        "offered-block-evicted-before-its-write", "stores.py",
        "        most = self._write_at_hand(keys)  # first, since the slots taken below may be theirs\n",
        "        most = len(keys)\n",
    ),
    Mutant(
        "late-read-writes-to-a-lent-slot", "stage.py",
        "        if still_written_by is None:\n            self.pool.give(slot)",
        "        if True:\n            self.pool.give(slot)",
        LATE,
    ),
    Mutant(
        "findings-of-late-reads-ignored", "stage.py",
        "        if result.job.kind in (JobKind.READ, JobKind.PROBE):\n            self._believe(result)\n",
        "",
        LATE,
    ),
    Mutant(
        "late-load-holds-its-blocks", "loads.py",
        "            self._strand(job_id)\n        self._unpark",
        "        self._unpark",
        LATE,
    ),
    Mutant(
        "hung-place-is-waited-for-again", "flow.py",
        "        return self.state is not ChannelState.CLOSED",
        "        return True",
        LATE,
    ),
    Mutant(
        "credit-of-a-late-read-lost", "flow.py",
        "        lane.in_flight[job.traffic] -= len(job.keys)\n        lane.cost.stalled",
        "        lane.cost.stalled",
        ("tests/test_flow.py",),
    ),
    Mutant(
        "scrub-in-the-way-of-loads", "tiers/file/scrub.py",
        "while self.demand_waits and waited_s",
        "while False and waited_s",
        ("tests/tiers/test_file_scrub.py",),
    ),
    Mutant(
        "slots-of-a-hung-write-lent-again", "stores.py",
        "held = (*self._queues.values(), *(job.keys for job in self._late.values()))",
        "held = self._queues.values()",
        LATE,
    ),
    Mutant(
        "hung-write-blocks-its-tier-for-ever", "stores.py",
        "            self._jobs[job.tier] -= 1\n            queue = ",
        "            queue = ",
        LATE,
    ),
    Mutant(
        "hung-copy-out-keeps-loads-waiting", "engine.py",
        "            self._loads.abandon_fills(copy_out)",
        "            pass",
        LATE,
    ),
    Mutant(
        "long-loads-starve", "fairness.py",
        "rank = self._fair.enter(name, work_bytes) + work_bytes * self._stretch",
        "rank = float(work_bytes)",
        ("tests/test_flow.py",),
    ),
    Mutant(
        "given-up-load-slows-the-clock", "fairness.py",
        "        self._present.pop(name, None)",
        "        pass",
        ("tests/test_flow.py",),
    ),
    Mutant(
        "prefetch-holds-its-slots-against-demand", "loads.py",
        "and self._is_starved() and self._yield_prefetch()",
        "and False",
        ("tests/test_prefetch.py",),
    ),
    Mutant(
        "prefetched-blocks-unpinned", "loads.py",
        "        load.arrived[position] = 1\n        self._prefetched[key] += 1",
        "        load.arrived[position] = 1\n        self._release(load, position)\n        self._prefetched[key] += 1",
        ("tests/test_prefetch.py",),
    ),
    Mutant(
        "prefetch-without-its-head-stays-pinned", "loads.py",
        "        if load.traffic is Traffic.PREFETCH:\n            self._let_go_of_arrived(load)\n",
        "        if load.traffic is Traffic.PREFETCH and load.limit:\n            self._let_go_of_arrived(load)\n",
        ("tests/test_prefetch.py",),
    ),
    Mutant(
        "both-reads-of-a-hedge-count", "stage.py",
        "copy.state is CopyState.FILLING and copy.slot == job.slots[job.keys.index(key)]",
        "copy.state is CopyState.FILLING",
        ("tests/test_hedges.py",),
    ),
    Mutant(
        "hedges-without-a-budget", "hedges.py",
        "affordable = int(self._budget_bytes // stage.pool.block_bytes)",
        "affordable = len(keys)",
        ("tests/test_hedges.py",),
    ),
    Mutant(
        "hung-second-read-keeps-its-credits", "hedges.py",
        "            self._due.add(stage.flow.due_ns(channel, self._deadline_ns, now_ns), job.job_id)\n",
        "",
        ("tests/test_hedges.py",),
    ),
    Mutant(
        "failures-teach-a-bandwidth", "flow.py",
        "return sum(result.outcomes[key] is Outcome.OK for key in result.job.keys)",
        "return len(result.job.keys)",
        ("tests/test_flow.py",),
    ),
    Mutant(
        "a-pool-without-slots-spins", "flow.py",
        " and lane.gate.opens_ns > now_ns:",
        ":",
        ("tests/test_flow.py",),
    ),
    Mutant(
        "key-not-chained", "keys.py",
        "sha256(parent + ids[start : start + step].tobytes())",
        "sha256(ids[start : start + step].tobytes())",
        ("tests/test_keys.py",),
    ),
    Mutant(
        "fields-run-together", "keys.py",
        "        digest.update(_framed(str(value).encode()))",
        "        digest.update(str(value).encode())",
        ("tests/test_keys.py",),
    ),
    Mutant(
        "glance-closes-the-case", "tiers/file/breaker.py",
        "self._failures = self._failures if call.is_glance else 0",
        "self._failures = 0",
        ("tests/tiers/test_file_breaker.py",),
    ),
    Mutant(
        "hang-goes-unnoticed", "tiers/file/breaker.py",
        "            if now_ns - call.began_ns <= self._limits.hang_ns:\n                break\n",
        "            break\n",
        ("tests/tiers/test_file_breaker.py",),
    ),
    Mutant(
        "try-queues-behind-what-hangs", "tiers/file/breaker.py",
        "has_thread = len(self._in_flight) < self._limits.threads",
        "has_thread = True",
        ("tests/tiers/test_file_breaker.py",),
    ),
    Mutant(
        "full-disk-stops-the-root", "tiers/file/health.py",
        "if error.errno not in NO_ROOM | _NOT_THE_ROOTS:",
        "if error.errno not in _NOT_THE_ROOTS:",
        ("tests/tiers/test_file_health.py",),
    ),
    Mutant(
        "stopped-root-is-never-tried", "tiers/file/tier.py",
        "            if member.root.health.reads.is_due():",
        "            if False:",
        ("tests/tiers/test_file_health.py",),
    ),
    Mutant(
        "newer-block-is-held", "tiers/file/root.py",
        "return self._fits(found) and key not in self._newer",
        "return self._fits(found)",
        ("tests/tiers/test_file_identity.py",),
    ),
    Mutant(
        "namespace-of-a-block-unchecked", "tiers/file/format.py",
        "    if header.shape.namespace_digest != shape.namespace_digest:",
        "    if False:",
        ("tests/tiers/test_file_identity.py",),
    ),
    Mutant(
        "scrub-position-off-by-one", "tiers/file/layout.py",
        "if entry.name[:-3] > key_hex]",
        "if entry.name[:-3] >= key_hex]",
        ("tests/tiers/test_file_scrub.py",),
    ),
    Mutant(
        "removal-not-announced", "tiers/file/catalogue.py",
        "            self.intend(digest, keys)\n        lengths_bytes",
        "            pass\n        lengths_bytes",
        ("tests/tiers/test_file_killed.py",),
    ),
    Mutant(
        "scrub-tells-nobody", "tiers/file/root.py",
        "        return self.catalogue.removing(bytes.fromhex(file.namespace_hex), (file.key,))",
        "        return contextlib.nullcontext()",
        ("tests/tiers/test_file_told.py",),
    ),
    Mutant(
        "what-a-root-holds-is-forgotten-with-it", "tiers/file/root.py",
        "            self.catalogue.tell_held()",
        "            pass",
        ("tests/tiers/test_file_engine_faults.py",),
    ),
    Mutant(
        "an-interrupted-read-returns-at-once", "tiers/file/lanes.py",
        "        _break_off([batch for _, batch in parts])\n",
        "",
        ("tests/tiers/test_file_interrupted.py",),
    ),
    Mutant(
        "lock-waited-for-without-end", "tiers/file/journal.py",
        "            if time.monotonic() >= until_s:",
        "            if False:",
        ("tests/tiers/test_file_locked.py",),
    ),
    Mutant(
        "refused-opening-keeps-its-roots", "tiers/file/tier.py",
        "            close_roots(roots, Patience(options.hang_s))\n",
        "",
        ("tests/tiers/test_file_locked.py",),
    ),
    Mutant(
        "floor-forgets-what-others-reserved", "tiers/file/freespace.py",
        " - self.floor_bytes - reserved_bytes",
        " - self.floor_bytes",
        ("tests/tiers/test_file_catalogue.py",),
    ),
    Mutant(
        "closing-waits-for-a-hung-disk", "tiers/file/lanes.py",
        "            thread.join(max(_MOMENT_S, self._until_s - time.monotonic()))",
        "            thread.join()",
        ("tests/tiers/test_file_hung.py",),
    ),
    Mutant(
        "restore-memory-is-cold", "bench/restore/audit.py",
        "if each.hit_tokens and not each.shared_tokens and each.hit_source not in (COLD_SOURCE, None)",
        "if False",
        ("tests/bench/test_restore_audit.py",),
    ),
    Mutant(
        "restore-passes-without-samples", "bench/restore/audit.py",
        "        if not timed:\n",
        "        if not rounds:\n",
        ("tests/bench/test_restore_audit.py",),
    ),
    Mutant(
        "restore-counts-its-own-reads-as-foreign", "bench/restore/run.py",
        "max(0, all_.whole_bytes - own.whole_bytes)",
        "max(0, all_.whole_bytes)",
        ("tests/bench/test_restore_host.py",),
    ),
    Mutant(
        "restore-outputs-stand-on-keys-alone", "bench/restore/targets/emulated.py",
        "fold = self.arrived[key] if at < len(loaded) else self._stamp.fold(key, self._block_bytes)",
        "fold = self._stamp.fold(key, self._block_bytes)",
        ("tests/bench/test_restore_audit.py",),
    ),
    Mutant(
        "throttle-each-engine-alone", "bench/restore/throttled.py",
        "free_at_ns = max(free_at_ns, now_ns) + takes_ns",
        "free_at_ns = now_ns + takes_ns",
        ("tests/bench/test_restore_throttled.py",),
    ),
    Mutant(
        "gate-kills-every-worker-again", "bench/gates/stability/faults.py",
        "return 0 if turn == 0 else 1 + (turn - 1) % (workers - 1)",
        "return turn % workers",
        ("tests/bench/test_stability.py",),
    ),
    Mutant(
        "gate-explains-errors-for-ever", "bench/gates/stability/findings.py",
        "if not is_quiet([fault], from_s, to_s, settle_s)]",
        "if fault]",
        ("tests/bench/test_stability.py",),
    ),
    Mutant(
        "gate-takes-memory-for-a-disk", "bench/gates/stability/findings.py",
        "if self._doubt:\n            return",
        "if not self.starts:\n            return",
        ("tests/bench/test_stability.py",),
    ),
    Mutant(
        "gate-goes-on-with-spoilt-evidence", "bench/gates/restoring.py",
        'cause = self.lost(requests) or next(iter(lasting), "")',
        'cause = self.lost(requests)',
        ("tests/bench/test_gates_restore.py",),
    ),
    Mutant(
        "gate-compares-tokens-with-the-baseline-only", "bench/gates/g3_main.py",
        "for other in computed:",
        "for other in computed[:0]:",
        ("tests/bench/test_gates_restore.py",),
    ),
    Mutant(
        "gate-ends-when-a-look-fails", "bench/gates/stability/disks.py",
        "with contextlib.suppress(OSError):  # it has gone, or its device has",
        "with contextlib.suppress(FileNotFoundError):",
        ("tests/bench/test_stability.py",),
    ),
    Mutant(
        "restore-asks-what-was-not-stored", "bench/restore/sessions.py",
        "known = everywhere if is_shared else held[reader]",
        "known = everywhere",
        ("tests/bench/test_restore_sessions.py",),
    ),
    Mutant(
        "rounds-ask-different-sessions", "bench/restore/sessions.py",
        "    rounds = round_number - 1 if _alike(questions) else 0\n",
        "    rounds = round_number - 1\n",
        ("tests/bench/test_restore_sessions.py",),
    ),
    Mutant(
        "duplicates-only-within-a-folder", "bench/restore/contents.py",
        "next(pool for pool in pools if path.is_relative_to(pool))",
        "path.parent / path.name[:-1]",
        ("tests/bench/test_restore_host.py",),
    ),
    Mutant(
        "bandwidth-of-a-moment", "bench/restore/sampler.py",
        "_LEAST_SHARE = 0.5",
        "_LEAST_SHARE = 0.0",
        ("tests/bench/test_restore_host.py",),
    ),
    Mutant(
        "half-an-answer-is-a-whole-one", "bench/restore/serving/exchange.py",
        'return self._objection() if self._heard.has_finished else "the stream ended before the answer did"',
        "return self._objection()",
        ("tests/bench/test_restore_exchange.py",),
    ),
    Mutant(
        "orphans-outlive-the-benchmark", "bench/restore/serving/keeper.py",
        "    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the command become children of this process\n",
        "",
        ("tests/bench/test_restore_openai.py",),
    ),
    Mutant(
        "device-memory-is-cold", "bench/restore/targets/openai.py",
        "{COLD if place in self._options.cold_sources else place for place in places}",
        "{COLD for place in places}",
        ("tests/bench/test_restore_openai.py",),
    ),
    Mutant(
        "builtin-recompute-reuses", "bench/restore/targets/builtin.py",
        "reuse=reuse.OFF if is_recomputed else reuse.ON",
        "reuse=reuse.ON",
        ("tests/bench/test_restore_builtin.py",),
    ),
    Mutant(
        "vllm-counter-shrinks", "connectors/vllm/setup.py",
        '"lookups|answered": asked.answered,',
        '"lookups|answered": asked.answered - asked.timed_out,',
        ("tests/connectors/test_vllm_setup.py",),
    ),
    Mutant(
        "vllm-count-twice", "connectors/vllm/lookup.py",
        "        elif not question.answered_ns:\n",
        "        else:\n",
        ("tests/connectors/test_vllm_lookup.py",),
    ),
    Mutant(
        "vllm-heads-as-they-lie", "connectors/vllm/device.py",
        "pages[0].is_contiguous() if by_head else _is_dense(pages[0])",
        "_is_dense(pages[0])",
        ("tests/connectors/test_vllm_parts.py",),
    ),
    Mutant(
        "vllm-release-before-copied", "connectors/vllm/worker.py",
        "if any(self._device.is_copying_out(block) for block in store.blocks[: store.offered]):",
        "if False:",
        ("tests/connectors/test_vllm_worker.py",),
    ),
    Mutant(
        "vllm-store-while-forgetting", "connectors/vllm/worker.py",
        "        while self._waiting and not self.forgets:\n",
        "        while self._waiting:\n",
        ("tests/connectors/test_vllm_worker.py",),
    ),
    Mutant(
        "vllm-gpu-scatters-nothing", "connectors/vllm/device.py",
        "            scatter(pages, staging, ids)\n",
        "            pass\n",
        ("tests/connectors/test_vllm_device.py",),
    ),
)  # fmt: skip


def tests_fail(copy: Path, tests: tuple[str, ...]) -> bool:
    try:
        run = pytest_run(copy, tests)
    except subprocess.TimeoutExpired:
        return True
    if run.returncode and " failed" not in run.stdout:
        raise SystemExit(f"pytest could not run\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    return run.returncode != 0


def pytest_run(copy: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "auto", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*pytest, *(str(copy / name) for name in tests)], cwd=copy, env={**os.environ, "PYTHONPATH": str(copy / "src")},
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip


def misfit(mutant: Mutant) -> str:
    """Why a mutant does not apply to these sources; empty when it does."""
    path = ROOT / "src" / "forebay" / mutant.file
    found = path.read_text().count(mutant.before) if path.exists() else 0
    if found != 1:
        return f"mutant {mutant.name}: its text stands {found} times in {mutant.file}, not once"
    missing = [name for name in mutant.tests if not (ROOT / name).exists()]
    return f"mutant {mutant.name}: there is no {', '.join(missing)}" if missing else ""


def check() -> int:
    troubles = [trouble for mutant in MUTANTS if (trouble := misfit(mutant))]
    names = [mutant.name for mutant in MUTANTS]
    troubles += [f"two mutants are named {name}" for name in sorted({n for n in names if names.count(n) > 1})]
    print("\n".join(troubles) or f"all {len(MUTANTS)} mutants apply")
    return 1 if troubles else 0


def is_caught(mutant: Mutant, copy: Path) -> bool:
    """Whether the tests fail with this mutant in the copy of the sources; the copy is whole again afterwards."""
    path = copy / "src" / "forebay" / mutant.file
    original = path.read_text()
    if trouble := misfit(mutant):
        raise SystemExit(trouble)
    path.write_text(original.replace(mutant.before, mutant.after))
    try:
        return tests_fail(copy, mutant.tests)
    finally:
        path.write_text(original)


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        return check()
    if sys.argv[1:2] == ["--every"]:
        chosen = list(MUTANTS[:: int(sys.argv[2])])
    else:
        chosen = [mutant for mutant in MUTANTS if not sys.argv[1:] or mutant.name in sys.argv[1:]]
    missed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="forebay-mutants-") as folder:
        copy = Path(folder)
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, copy / name)
        shutil.copy(ROOT / "pyproject.toml", copy)
        for tests in sorted({mutant.tests for mutant in chosen}):
            if tests_fail(copy, tests):
                raise SystemExit(f"{' '.join(tests)} fail without any mutant: mend that first")
        for number, mutant in enumerate(chosen, 1):
            started = time.monotonic()
            caught = is_caught(mutant, copy)
            seconds = time.monotonic() - started
            print(
                f"{number}/{len(chosen)} {'caught' if caught else 'MISSED'} {mutant.name} ({seconds:.0f} s)", flush=True
            )
            if not caught:
                missed.append(mutant.name)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} known bugs are caught")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
