"""A bundle verifies, and nothing else does: any changed byte, hostile archives, other keys."""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.bench.bundle import (
    BundleUnsound,
    generate_key,
    read_private_key,
    read_public_key,
    sign_bundle,
    verify_bundle,
    write_bundle,
)
from forebay.bench.bundle.archive import measure, write_archive
from forebay.bench.bundle.bundle import MANIFEST, SIGNATURES
from forebay.cli import run
from forebay.errors import ConfigError

CONTENTS = {"gates.json": b'{"a": 1}\n', "g1/record.json": b"x" * 30, "g1/empty.txt": b"", "plan.toml": b"title = 1"}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    files = {}
    for number, (name, content) in enumerate(CONTENTS.items()):
        files[name] = tmp_path / f"file{number}"
        files[name].write_bytes(content)
    write_bundle(tmp_path / "run.zip", files, title="a run", created="2026-01-01T00:00:00+00:00")
    return tmp_path / "run.zip"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    generate_key(tmp_path / "seller")
    return tmp_path / "seller"


def refusal(path: Path, trusted_key: bytes | None = None) -> str:
    with pytest.raises(BundleUnsound) as refused:
        verify_bundle(path, trusted_key)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_bundle_verifies_and_any_zip_tool_opens_it(bundle: Path) -> None:
    verified = verify_bundle(bundle)
    assert {each.name for each in verified.manifest.files} == set(CONTENTS)
    assert verified.signed_by == ()
    with zipfile.ZipFile(bundle) as opened:
        assert opened.testzip() is None
        assert {name: opened.read(name) for name in opened.namelist() if name != MANIFEST} == CONTENTS


def test_the_same_files_are_the_same_bytes(bundle: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(bundle) as opened:
        opened.extractall(tmp_path / "out")
    files = {name: tmp_path / "out" / name for name in reversed(CONTENTS)}
    write_bundle(tmp_path / "again.zip", files, title="a run", created="2026-01-01T00:00:00+00:00")
    assert (tmp_path / "again.zip").read_bytes() == bundle.read_bytes()


@pytest.mark.parametrize("is_signed", [False, True])
def test_no_byte_can_be_changed(bundle: Path, key: Path, is_signed: bool) -> None:
    if is_signed:
        sign_bundle(bundle, read_private_key(key))
    sound = bundle.read_bytes()
    for at in range(0, len(sound), 1 if is_signed else 3):
        changed = bytearray(sound)
        changed[at] ^= 1 << at % 8
        bundle.write_bytes(changed)
        refusal(bundle)
    bundle.write_bytes(sound)
    verify_bundle(bundle)


@settings(max_examples=60)
@given(st.data())
def test_nor_cut_lengthened_or_rearranged(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("b")
    (folder / "f").write_bytes(b"content" * 5)
    write_bundle(folder / "b.zip", {"f": folder / "f"}, title="t", created="c")
    sound = (folder / "b.zip").read_bytes()
    start = data.draw(st.integers(0, len(sound)))
    end = data.draw(st.integers(start, len(sound)))
    other = sound[:start] + data.draw(st.binary(max_size=40)) + sound[end:]
    (folder / "b.zip").write_bytes(other)
    if other == sound:
        verify_bundle(folder / "b.zip")
    else:
        refusal(folder / "b.zip")


# --- signatures


def test_who_signed_it(bundle: Path, key: Path, tmp_path: Path) -> None:
    buyer = generate_key(tmp_path / "buyer")
    seller = read_public_key(tmp_path / "seller.pub")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert "is not signed" in refusal(bundle, seller)
    assert sign_bundle(bundle, read_private_key(key)).signed_by == (seller.hex(),)
    assert f"and not by {buyer.hex()}" in refusal(bundle, buyer)
    sign_bundle(bundle, read_private_key(tmp_path / "buyer"))
    assert set(verify_bundle(bundle, buyer).signed_by) == {buyer.hex(), seller.hex()}
    with pytest.raises(ConfigError, match="signed with this key already"):
        sign_bundle(bundle, read_private_key(key))
    assert verify_bundle(bundle, seller)


def test_a_doctored_run_does_not_keep_its_signature(bundle: Path, key: Path, tmp_path: Path) -> None:
    """Sound in form, sums that fit, and the signature of the original."""
    sign_bundle(bundle, read_private_key(key))
    with zipfile.ZipFile(bundle) as opened:
        members = {name: opened.read(name) for name in opened.namelist()}
    (tmp_path / "better").write_bytes(b'{"a": 2}\n')
    files = {"gates.json": tmp_path / "better"}
    for name in CONTENTS.keys() - files.keys():
        files[name] = tmp_path / name.replace("/", "-")
        files[name].write_bytes(CONTENTS[name])
    write_bundle(bundle, files, title="a run", created="2026-01-01T00:00:00+00:00")
    with zipfile.ZipFile(bundle) as opened:
        forged = {name: opened.read(name) for name in opened.namelist()}
    pack(bundle, {MANIFEST: forged.pop(MANIFEST), SIGNATURES: members[SIGNATURES], **forged})
    assert "is not one of this manifest" in refusal(bundle)


@pytest.mark.parametrize("content", [b"", b"no key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_what_is_no_key(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "k").write_bytes(content)
    with pytest.raises(ConfigError, match="no Ed25519 private key"):
        read_private_key(tmp_path / "k")
    with pytest.raises(ConfigError, match="no Ed25519 public key"):
        read_public_key(tmp_path / "k")


def test_halves_are_not_confused_and_keys_not_replaced(key: Path) -> None:
    with pytest.raises(ConfigError, match="no Ed25519 public key"):
        read_public_key(key)
    with pytest.raises(ConfigError, match="no Ed25519 private key"):
        read_private_key(key.with_name("seller.pub"))
    before = key.read_bytes()
    with pytest.raises(ConfigError, match="is there already"):
        generate_key(key)
    assert key.read_bytes() == before


# --- hostile archives


def pack(path: Path, members: dict[str, bytes]) -> None:
    """In the form of a bundle, whatever the names and contents are."""
    measured = [measure(name, io.BytesIO(content)) for name, content in members.items()]
    with path.open("wb") as file:
        write_archive(file, measured, [io.BytesIO(content) for content in members.values()])


def manifest_of(**members: bytes) -> bytes:
    files = [
        {"name": name, "content_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in members.items()
    ]
    text = json.dumps(
        {"schema": "forebay-bundle/1", "title": "t", "created": "c", "files": files}, indent=1, separators=(",", ": ")
    )
    return text.encode() + b"\n"


def foreign_zip(path: Path, change: Callable[[zipfile.ZipFile], None]) -> None:
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(MANIFEST, manifest_of())
        change(made)


def linked(made: zipfile.ZipFile) -> None:
    entry = zipfile.ZipInfo("gates.json")
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    made.writestr(entry, "/etc/passwd")


def bomb(made: zipfile.ZipFile) -> None:
    made.writestr("gates.json", b"\0" * 50_000_000, zipfile.ZIP_DEFLATED)


def comment(made: zipfile.ZipFile) -> None:
    made.comment = b"hidden"


@pytest.mark.parametrize(
    ("change", "words"),
    [(linked, "symbolic link"), (bomb, "is compressed"), (comment, "appended"), (lambda made: None, "headers")],
)
def test_archives_of_others(tmp_path: Path, change: Callable[[zipfile.ZipFile], None], words: str) -> None:
    foreign_zip(tmp_path / "b.zip", change)
    assert words in refusal(tmp_path / "b.zip")


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/x",
        "a/../x",
        "a//x",
        "",
        "a/",
        "a\\x",
        "C:x",
        ".hidden",
        "a\nb",
        "\u202ex",
        "a" * 101,
        "a/" * 8 + "x",
    ],
)
def test_names_that_lead_elsewhere(tmp_path: Path, name: str) -> None:
    pack(tmp_path / "b.zip", {MANIFEST: manifest_of(), name: b"x"})
    assert "no name for a member" in refusal(tmp_path / "b.zip")
    (tmp_path / "f").write_bytes(b"x")
    with pytest.raises(ConfigError, match="no name for a member"):
        write_bundle(tmp_path / "c.zip", {name: tmp_path / "f"}, title="t", created="c")


def test_extra_missing_and_doubled_files(tmp_path: Path) -> None:
    path = tmp_path / "b.zip"
    pack(path, {MANIFEST: manifest_of(a=b"1"), "a": b"1", "b": b"2"})
    assert "'b' does not belong to it" in refusal(path)
    pack(path, {MANIFEST: manifest_of(a=b"1", b=b"2"), "a": b"1"})
    assert "'b' is missing" in refusal(path)
    pack(path, {MANIFEST: manifest_of(a=b"1"), "a": b"1", "A": b"2"})
    assert "'A' is in it twice" in refusal(path)
    pack(path, {MANIFEST: manifest_of(a=b"1"), "a": b"1", "a/b": b"2"})
    assert "both a file and a folder" in refusal(path)
    pack(path, {MANIFEST: manifest_of(a=b"1"), "a": b"2"})
    assert "a is not the file that the manifest names" in refusal(path)
    pack(path, {"a": b"2"})
    assert "no MANIFEST.json" in refusal(path)
    pack(path, {MANIFEST: manifest_of(a=b"1") + b" ", "a": b"1"})
    assert "not in the form" in refusal(path)
    pack(path, {MANIFEST: b"[" * 100_000})
    assert "cannot be read" in refusal(path)
    pack(path, {MANIFEST: manifest_of(a=b"1"), "a": b"1"})
    verify_bundle(path)


@pytest.mark.parametrize(
    "content", [b"", b"x" * 5, b"x" * 500, struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 9, 9, 0, 0, 0)]
)
def test_what_is_no_archive(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "b.zip").write_bytes(content)
    refusal(tmp_path / "b.zip")


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", tmp_path / "absent"):
        with pytest.raises(ConfigError, match=r"no file|cannot be read"):
            verify_bundle(path)


# --- the command


def test_the_command(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bundle", "keygen", str(tmp_path / "mine")]) == 0
    assert run(["bundle", "sign", str(bundle), "--key", str(tmp_path / "mine")]) == 0
    assert run(["bundle", "verify", str(bundle), "--key", str(tmp_path / "mine.pub")]) == 0
    assert "the key that was asked for" in capsys.readouterr().out
    assert run(["bundle", "verify", str(bundle), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verified"] is True
    changed = bytearray(bundle.read_bytes())
    changed[len(changed) // 2] ^= 1
    bundle.write_bytes(changed)
    assert run(["bundle", "verify", str(bundle)]) == 1
    assert run(["bundle", "sign", str(bundle), "--key", str(tmp_path / "mine")]) == 1
    assert run(["bundle", "verify", str(bundle), "--json"]) == 1
    capsys.readouterr()
    assert run(["bundle", "verify", str(tmp_path / "absent.zip")]) == 2
    assert run(["bundle", "verify", str(bundle), "--key", str(tmp_path / "absent.pub")]) == 2
    assert run(["bundle", "sign", str(bundle), "--key", str(bundle)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_without_cryptography(
    bundle: Path, key: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unsigned = bundle.read_bytes()
    sign_bundle(bundle, read_private_key(key))
    for name in [name for name in sys.modules if name.startswith("cryptography")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for arguments in (["verify", str(bundle)], ["sign", str(bundle), "--key", str(key)], ["keygen", "never-made"]):
        assert run(["bundle", *arguments]) == 2
        assert "pip install 'forebay[evidence]'" in capsys.readouterr().err
    bundle.write_bytes(unsigned)
    assert run(["bundle", "verify", str(bundle)]) == 0
