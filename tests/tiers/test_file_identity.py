"""Blocks of another world are never served, every namespace can be explained, and no name leads out of a root."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import unicodedata
from pathlib import Path

import pytest
from file_tier_kit import block_file, open_tier, set_aside, write_all

from forebay.errors import ConfigError
from forebay.keys import block_keys, namespace_key, tenant_digest
from forebay.testing.schedule import BLOCK_BYTES, NAMESPACE, truth
from forebay.testing.tier_contract import key_of, payload_of, slot
from forebay.tiers import file
from forebay.tiers.file import FileTier, admin, layout
from forebay.tiers.file.format import VERSION, checksum
from forebay.types import BlockKey, Namespace, Outcome

TOKENS = range(4 * NAMESPACE.block_tokens)
FIELDS = [field.name for field in dataclasses.fields(Namespace)]
HOSTILE = [
    "../x", "../../../../etc/passwd", "/etc/passwd", ".", "..", "", "x" * 300, "a\0b", "a\nb", "\x1b[31m", "~", "-rf",
    "CON", "a/b", "a_b", "a%2Fb", "a b", "a b ", "A/B", "\u202egnp.exe", "\N{LATIN SMALL LETTER E WITH ACUTE}",
    unicodedata.normalize("NFD", "\N{LATIN SMALL LETTER E WITH ACUTE}"), "forebay-pool.json", "tmp", "quarantine",
]  # fmt: skip


def open_for(root: Path, namespace: Namespace, name: str = "file") -> FileTier:
    options = file.Options(roots=(file.RootOptions(path=str(root)),), capacity_bytes=2**30, name=name)
    return file.build(options, namespace, bytes(namespace_key(namespace)))


def store(root: Path, namespace: Namespace) -> tuple[BlockKey, ...]:
    keys = block_keys(namespace, TOKENS)
    tier = open_for(root, namespace)
    views = [memoryview(bytearray(truth(key)).ljust(namespace.block_bytes)) for key in keys]
    assert tier.write(keys, views) == [Outcome.OK] * len(keys)
    tier.close()
    return keys


def other_in(field: str) -> Namespace:
    value = getattr(NAMESPACE, field)
    return dataclasses.replace(NAMESPACE, **{field: value + "x" if isinstance(value, str) else value + 1})


def path_of(root: Path, namespace: Namespace, key: BlockKey) -> Path:
    return Path(layout.block_path(str(root), namespace_key(namespace).hex(), key))


@pytest.mark.parametrize("field", FIELDS)
def test_blocks_of_a_namespace_that_differs_in_any_field_are_never_served(tmp_path: Path, field: str) -> None:
    """Not under their own keys, not when asked for by the other's keys, and not even when their file is put there."""
    other = other_in(field)
    theirs, mine = store(tmp_path / "pool", other), block_keys(NAMESPACE, TOKENS)
    assert not set(theirs) & set(mine)
    tier = open_for(tmp_path / "pool", NAMESPACE)
    views = [slot(max(BLOCK_BYTES, other.block_bytes)) for _ in mine]
    for keys in (theirs, mine):
        assert list(tier.contains(keys)) == [False] * len(keys)
        assert list(tier.read(keys, views)) == [Outcome.MISSING] * len(keys)
    for key in theirs:
        target = path_of(tmp_path / "pool", NAMESPACE, key)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path_of(tmp_path / "pool", other, key), target)
    assert list(tier.read(theirs, views)) == [Outcome.CORRUPT] * len(theirs)
    assert set(set_aside(tmp_path / "pool")) == {"wrong-namespace"}
    tier.close()


@pytest.mark.parametrize("version", [0, VERSION + 1, 2**31])
def test_blocks_of_another_format_version_are_never_served(tmp_path: Path, version: int) -> None:
    root = tmp_path / "pool"
    key, *_ = store(root, NAMESPACE)
    path = path_of(root, NAMESPACE, key)
    page = bytearray(path.read_bytes())
    page[8:12] = version.to_bytes(4, "little")
    page[4080:4096] = checksum(bytes(page[:4080]))
    path.write_bytes(page)
    tier = open_for(root, NAMESPACE)
    [outcome] = tier.read([key], [slot(BLOCK_BYTES)])
    assert outcome is (Outcome.CORRUPT if version < VERSION else Outcome.MISSING)
    tier.close()


def test_a_newer_block_of_the_same_length_is_not_held_not_replaced_and_counted(tmp_path: Path) -> None:
    root = tmp_path / "pool"
    key, other, *_ = store(root, NAMESPACE)
    path = path_of(root, NAMESPACE, key)
    page = bytearray(path.read_bytes())
    page[8:12] = (VERSION + 1).to_bytes(4, "little")
    page[4080:4096] = checksum(bytes(page[:4080]))
    path.write_bytes(page)
    view = memoryview(bytearray(truth(key)))
    writer = open_for(root, NAMESPACE)
    assert list(writer.write([key, other], [view, memoryview(bytearray(truth(other)))])) == [Outcome.FAILED, Outcome.OK]
    assert list(writer.contains([key, other])) == [False, True]
    assert writer.describe()[0].events == {"newer format": 1}
    writer.close()
    reader = open_for(root, NAMESPACE)
    assert list(reader.read([key], [slot(BLOCK_BYTES)])) == [Outcome.MISSING]
    assert list(reader.contains([key])) == [False]
    assert list(reader.write([key], [view])) == [Outcome.FAILED]
    assert path.read_bytes() == page
    path.unlink()  # whoever made it has evicted it
    assert list(reader.write([key], [view])) == [Outcome.OK]
    assert list(reader.contains([key])) == [True]
    assert list(reader.read([key], [slot(BLOCK_BYTES)])) == [Outcome.OK]
    reader.close()


def test_a_write_is_not_ok_on_the_word_of_a_foreign_file_of_the_right_length(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "a")
    write_all(tier, [1])
    path = block_file(tmp_path / "a", key_of(1))
    path.write_bytes(os.urandom(path.stat().st_size))
    assert write_all(tier, [1]) == [Outcome.OK]
    view = slot(5000)
    assert list(tier.read([key_of(1)], [view])) == [Outcome.OK]
    assert bytes(view[:5000]) == payload_of(1, 5000)
    assert set_aside(tmp_path / "a") == ["bad-magic"]
    tier.close()


def lines_at_opening(root: Path, namespace: Namespace, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        open_for(root, namespace).close()
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("field", [name for name in FIELDS if name not in ("model", "shard", "tenant_digest")])
def test_one_line_names_the_field_that_differs(tmp_path: Path, field: str, caplog: pytest.LogCaptureFixture) -> None:
    there = other_in(field)
    store(tmp_path / "pool", there)
    [line] = lines_at_opening(tmp_path / "pool", NAMESPACE, caplog)
    assert line.endswith(f"differs in: {field} ({getattr(there, field)!r} there, {getattr(NAMESPACE, field)!r} here)")
    assert NAMESPACE.model in line


def test_of_many_namespaces_the_nearest_is_named_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "pool"
    store(root, dataclasses.replace(NAMESPACE, kv_dtype="far", layout="far", weights_digest="far"))
    store(root, dataclasses.replace(NAMESPACE, weights_digest="near"))
    store(root, dataclasses.replace(NAMESPACE, model="another", weights_digest="near"))
    [line] = lines_at_opening(root, NAMESPACE, caplog)
    assert "2 other namespaces" in line
    assert "differs in: weights_digest ('near' there" in line
    assert "far" not in line


def test_nothing_is_said_where_there_is_nothing_to_wonder_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "pool"
    store(root, dataclasses.replace(NAMESPACE, shard=1, tenant_digest=tenant_digest("another")))
    assert lines_at_opening(root, NAMESPACE, caplog) == []
    store(root, NAMESPACE)
    open_for(root, dataclasses.replace(NAMESPACE, kv_dtype="float8")).close()  # stores nothing
    assert lines_at_opening(root, NAMESPACE, caplog) == []
    store(root, dataclasses.replace(NAMESPACE, kv_dtype="float8"))
    assert lines_at_opening(root, NAMESPACE, caplog) == []  # it has blocks here itself


@pytest.mark.parametrize("field", ["shard", "tenant_digest"])
def test_what_differs_by_design_is_told_to_the_curious(
    tmp_path: Path, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The wrong salt or shard: no warning, since ranks and tenants share pools, but the field can be found out."""
    root, there = tmp_path / "pool", other_in(field)
    store(root, there)
    with caplog.at_level(logging.INFO, "forebay.tiers.file"):
        store(root, NAMESPACE)
        open_for(root, NAMESPACE).close()
    [line] = [record for record in caplog.records if "differs in" in record.getMessage()]
    assert line.levelno == logging.INFO
    assert line.getMessage().endswith(f"{field} ({getattr(there, field)!r} there, {getattr(NAMESPACE, field)!r} here)")


@pytest.mark.parametrize("field", ["model", "adapter_digest", "tenant_digest", "weights_digest", "layout"])
def test_hostile_names_in_a_namespace_neither_leave_the_root_nor_collide(tmp_path: Path, field: str) -> None:
    root = tmp_path / "deep" / "pool"
    root.parent.mkdir()
    namespaces = [dataclasses.replace(NAMESPACE, **{field: name}) for name in HOSTILE]
    keys = [store(root, namespace) for namespace in namespaces]
    assert len({key for some in keys for key in some}) == len(HOSTILE) * len(keys[0])
    for namespace, some in zip(namespaces, keys, strict=True):
        tier = open_for(root, namespace)
        views = [slot(BLOCK_BYTES) for _ in some]
        assert list(tier.read(some, views)) == [Outcome.OK] * len(some)
        assert [bytes(view[:BLOCK_BYTES]) for view in views] == [truth(key) for key in some]
        tier.close()
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert [path.name for path in root.parent.iterdir()] == ["pool"]
    assert {getattr(listing.namespace, field) for listing in admin.ls([root])} == set(HOSTILE)


def test_a_namespace_too_long_to_write_down_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shorten its texts"):
        open_for(tmp_path / "pool", dataclasses.replace(NAMESPACE, rope="x" * 40_000))
    store(tmp_path / "pool", dataclasses.replace(NAMESPACE, rope="\x01" * 4_000))
    assert admin.ls([tmp_path / "pool"])[0].namespace is not None


@pytest.mark.parametrize("name", ["", "x" * 300, "a\0b", "a\nb", "\x1b[31m", "\u202ex"])
def test_a_tier_wants_a_name_that_can_be_printed(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be named") as caught:
        open_for(tmp_path / "pool", NAMESPACE, name)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 250
    assert not (tmp_path / "pool").exists()


def test_a_tier_named_like_a_path_touches_no_path(tmp_path: Path) -> None:
    open_for(tmp_path / "pool", NAMESPACE, "../x").close()
    assert [path.name for path in tmp_path.iterdir()] == ["pool"]


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 300])
def test_a_root_that_cannot_be_a_path_is_one_line(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name) if name else ""
    options = file.Options(roots=(file.RootOptions(path=path),), capacity_bytes=1)
    with pytest.raises(ConfigError) as caught:
        file.build(options, NAMESPACE, bytes(namespace_key(NAMESPACE)))
    assert "\n" not in str(caught.value)
    assert "\0" not in str(caught.value)


def test_what_is_set_aside_twice_for_one_reason_is_kept_twice(tmp_path: Path) -> None:
    root = tmp_path / "a"
    tier = open_tier(root)
    for number, content in enumerate((b"one", b"two", b"three")):
        write_all(tier, [1])
        block_file(root, key_of(1)).write_bytes(content)
        assert list(tier.read([key_of(1)], [slot(5000)])) == [Outcome.CORRUPT]
        if number == 0:
            assert len(admin.verify([root]).set_aside) == 1
    assert {path.read_bytes() for path in (root / "quarantine").iterdir()} == {b"one", b"two", b"three"}
    assert set_aside(root) == ["wrong-length"] * 3
    assert len(admin.verify([root]).set_aside) == 2
    assert admin.verify([root]).set_aside == ()
    for _ in range(2):  # a directory cannot be renamed over another one that has something in it
        block_file(root, key_of(1)).mkdir()
        (block_file(root, key_of(1)) / "thing").write_text("x")
        assert list(tier.read([key_of(1)], [slot(5000)])) == [Outcome.CORRUPT]
    assert write_all(tier, [1]) == [Outcome.OK]
    tier.close()


def test_hostile_names_in_quarantine_are_nobodys_business(tmp_path: Path) -> None:
    root = tmp_path / "a"
    tier = open_tier(root)
    tier.close()
    digest = "ab" * 32
    hostile = [
        f"{digest}.{digest}.", f"{digest}.{digest}.UPPER", f"{digest}.{digest}.x.named.named", f"{digest}.{digest}.a.b",
        f"{digest}.{digest}.wrong-key\n", f"{digest[:-1]}.{digest}.wrong-key", ".hidden", "x" * 200,
    ]  # fmt: skip
    for name in hostile:
        (root / "quarantine" / name).write_text("mine")
    assert layout.set_aside_files(str(root)) == []
    assert admin.verify([root]).set_aside == ()
    admin.purge([root])
    assert sorted(path.name for path in (root / "quarantine").iterdir()) == sorted(hostile)
