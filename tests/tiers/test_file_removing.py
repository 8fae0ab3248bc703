"""`purge` by choice and `gc`: exactly what is meant, with a dry run that says the same and does nothing."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from file_tier_kit import STORED_BYTES, block_file, flip, namespace_dir, open_tier, write_all

from forebay.errors import ConfigError
from forebay.keys import block_keys, namespace_key, tenant_digest
from forebay.testing.schedule import NAMESPACE, truth
from forebay.testing.tier_contract import get, key_of, payload_of, put
from forebay.tiers import file
from forebay.tiers.file import admin, layout
from forebay.tiers.file.admin import Effect, GcLimits, Selection, removing
from forebay.tiers.file.directio import REAL_CALLS, Access, create_temp
from forebay.types import Outcome

NOW_S = 2_000_000_000.0
DAY_S = 86_400.0
ALICE, BOB = (dataclasses.replace(NAMESPACE, tenant_digest=tenant_digest(salt)) for salt in ("alice", "bob"))
OTHER = dataclasses.replace(NAMESPACE, model="other/model", tenant_digest=tenant_digest("alice"))
PLAIN = NAMESPACE


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four blocks in each of four namespaces; block i is i days old."""
    for namespace in (ALICE, BOB, OTHER, PLAIN):
        keys = block_keys(namespace, range(4 * namespace.block_tokens))
        options = file.Options(roots=(file.RootOptions(path=str(tmp_path / "pool")),), capacity_bytes=2**30)
        tier = file.build(options, namespace, bytes(namespace_key(namespace)))
        assert set(tier.write(keys, [memoryview(bytearray(truth(key))) for key in keys])) == {Outcome.OK}
        tier.close()
        for days, key in enumerate(keys):
            at_ns = round((NOW_S - days * DAY_S - 60) * 1e9)
            os.utime(layout.block_path(str(tmp_path / "pool"), namespace_key(namespace).hex(), key), ns=(at_ns, at_ns))
    return tmp_path / "pool"


def left(root: Path) -> dict[str, int]:
    named = {"alice": ALICE, "bob": BOB, "other": OTHER, "plain": PLAIN}
    names = {namespace_key(namespace).hex(): name for name, namespace in named.items()}
    return {names[listing.digest]: listing.blocks for listing in admin.ls([root]) if listing.blocks}


ALL = {"alice": 4, "bob": 4, "other": 4, "plain": 4}


@pytest.mark.parametrize(
    ("selection", "stays"),
    [
        (Selection(), {}),
        (Selection(namespace=namespace_key(BOB).hex()[:12]), {"alice": 4, "other": 4, "plain": 4}),
        (Selection(tenant=tenant_digest("alice")[:8]), {"bob": 4, "plain": 4}),
        (Selection(tenant=tenant_digest("alice"), model="other/model"), {"alice": 4, "bob": 4, "plain": 4}),
        (Selection(model=NAMESPACE.model), {"other": 4}),
        (Selection(older_than_s=2 * DAY_S), {"alice": 2, "bob": 2, "other": 2, "plain": 2}),
        (Selection(older_than_s=30 * DAY_S), ALL),
        (Selection(tenant=tenant_digest("bob"), older_than_s=DAY_S), {**ALL, "bob": 1}),
    ],
)
def test_purge_takes_what_is_meant(root: Path, selection: Selection, stays: dict[str, int]) -> None:
    would = admin.purge([root], selection, now_unix_s=NOW_S, effect=Effect.DRY_RUN)
    assert left(root) == ALL
    seen: list[int] = []
    did = admin.purge([root], selection, now_unix_s=NOW_S, progress=lambda blocks, _: seen.append(blocks))
    assert left(root) == stays
    assert did.removed_blocks == 16 - sum(stays.values()) == len(seen)
    assert dataclasses.replace(would, effect=Effect.REMOVE) == did


@pytest.mark.parametrize(
    ("selection", "says"),
    [
        (Selection(tenant=""), "does not name a tenant"),
        (Selection(tenant="../x"), "does not name a tenant"),
        (Selection(tenant="a" * 65), "does not name a tenant"),
        (Selection(tenant="0" * 64), "0 tenants begin with"),
        (Selection(model="no/such"), "no namespace of a model named 'no/such'"),
        (Selection(model="\x1b[31m\n"), "no namespace of a model named"),
        (Selection(namespace="x" * 300), "does not name a namespace"),
    ],
)
def test_a_choice_of_nothing_is_one_line_and_removes_nothing(root: Path, selection: Selection, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        admin.purge([root], selection, now_unix_s=NOW_S)
    assert str(caught.value).isprintable()
    assert left(root) == ALL


def test_a_namespace_that_does_not_explain_itself_is_no_tenants_and_no_models(root: Path) -> None:
    (root / namespace_key(ALICE).hex() / "namespace.json").write_text("gone")
    admin.purge([root], Selection(tenant=tenant_digest("alice")))
    admin.purge([root], Selection(model=NAMESPACE.model))
    (listing,) = [found for found in admin.ls([root]) if found.blocks]
    assert listing.digest == namespace_key(ALICE).hex()


def gc(root: Path, effect: Effect = Effect.REMOVE, **limits: float | None) -> admin.GcReport:
    return admin.gc([root], GcLimits(**{"now_unix_s": NOW_S, "quarantine_s": 1e12, **limits}), effect=effect)  # type: ignore[arg-type]


def test_gc_of_a_tidy_pool_removes_nothing(root: Path) -> None:
    report = gc(root)
    assert [value for value in dataclasses.astuple(report)[:-1] if value] == []
    assert left(root) == ALL


def test_gc_removes_expired_blocks_and_then_their_directories(root: Path) -> None:
    would = gc(root, Effect.DRY_RUN, ttl_s=2 * DAY_S)
    assert (would.expired_blocks, left(root)) == (8, ALL)
    assert gc(root, ttl_s=2 * DAY_S).expired_blocks == 8
    assert left(root) == dict.fromkeys(ALL, 2)
    last = gc(root, ttl_s=0.0)
    assert last.expired_blocks == 8
    assert layout.walk_namespaces(str(root)) == []
    assert gc(root, ttl_s=0.0).empty_directories == 0


def test_gc_removes_what_dead_writers_left_and_nothing_of_live_ones(tmp_path: Path) -> None:
    root = tmp_path / "a"
    tier = open_tier(root)
    program = """
import os, sys
from forebay.tiers.file.directio import REAL_CALLS, Access, create_temp
for name in "abc":
    os.write(create_temp(REAL_CALLS, sys.argv[1], name, Access.BUFFERED).descriptor, b"x" * 1000)
os._exit(9)
"""
    subprocess.run([sys.executable, "-c", program, str(root / "tmp")], check=False)
    live = create_temp(REAL_CALLS, str(root / "tmp"), "live", Access.BUFFERED)
    for effect in (Effect.DRY_RUN, Effect.REMOVE):
        report = gc(root, effect)
        assert (report.unfinished_files, report.unfinished_bytes) == (3, 3000)
    assert os.listdir(root / "tmp") == [Path(live.path).name]
    os.close(live.descriptor)
    tier.close()


def test_gc_empties_old_quarantine_only(tmp_path: Path) -> None:
    root = tmp_path / "a"
    tier = open_tier(root)
    write_all(tier, [1, 2])
    flip(block_file(root, key_of(1)), 4096)
    admin.verify([root])
    [aside] = (root / "quarantine").iterdir()
    set_aside_s = aside.stat().st_ctime
    foreign = root / "quarantine" / "notes.txt"
    foreign.write_text("mine")
    assert gc(root, now_unix_s=set_aside_s + DAY_S - 1, quarantine_s=DAY_S).set_aside_files == 0
    report = gc(root, now_unix_s=set_aside_s + DAY_S + 1, quarantine_s=DAY_S)
    assert (report.set_aside_files, report.set_aside_bytes) == (1, STORED_BYTES)
    assert list((root / "quarantine").iterdir()) == [foreign]
    tier.close()


def test_gc_removes_empty_directories_under_an_open_store(tmp_path: Path) -> None:
    root = tmp_path / "a"
    tier = open_tier(root)
    put(tier, range(6), 5000)
    fans = len(layout.walk_fans(str(root), namespace_dir(root).name))
    tier.delete([key_of(number) for number in range(6)])
    assert gc(root, Effect.DRY_RUN).empty_directories == fans + 1
    assert gc(root).empty_directories == fans + 1
    assert not namespace_dir(root).exists()
    put(tier, range(6), 5000)
    assert get(tier, 3, 5000) == payload_of(3, 5000)
    (namespace_dir(root) / "notes.txt").write_text("mine")
    tier.delete([key_of(number) for number in range(6)])
    gc(root)
    assert sorted(path.name for path in namespace_dir(root).iterdir()) == ["namespace.json", "notes.txt"]
    tier.close()


def test_stat_counts_the_room_of_all_that_no_store_claims(tmp_path: Path) -> None:
    root = tmp_path / "a"
    tier = open_tier(root)
    write_all(tier, [1, 2, 3])
    os.truncate(block_file(root, key_of(2)), 20_000)  # as a newer format might have it
    flip(block_file(root, key_of(3)), 4096)
    get(tier, 3, 5000)
    (root / "tmp" / "abc.0123456789abcdef.tmp").write_bytes(b"x" * 70)
    [found] = admin.stat([root])
    assert (found.blocks, found.stored_bytes) == (2, STORED_BYTES + 20_000)
    assert (found.odd_files, found.odd_bytes) == (1, 20_000)
    assert (found.set_aside_files, found.set_aside_bytes) == (1, STORED_BYTES)
    assert (found.unfinished_files, found.unfinished_bytes) == (1, 70)
    tier.close()


def test_a_namespace_stays_explained_although_a_store_writes_while_it_is_purged(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = root / namespace_key(ALICE).hex()
    remove = removing.remove_if_there

    def written_meanwhile(path: str) -> None:
        remove(path)
        if path.startswith(str(directory)):
            (directory / "ab").mkdir()

    monkeypatch.setattr(removing, "remove_if_there", written_meanwhile)
    report = admin.purge([root], Selection(namespace=directory.name))
    assert report.kept == (str(directory),)
    assert {listing.digest: listing.namespace for listing in admin.ls([root])}[directory.name] == ALICE
