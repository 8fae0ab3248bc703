"""A bundle: the files of a run, a manifest of their SHA-256 sums, and who signed that manifest.

    MANIFEST.json      every other file, with its length and sum
    SIGNATURES.json    Ed25519 signatures of MANIFEST.json, one a key; both sides of a sale may sign. Optional
    ...                the files, in the order of the manifest

Without a signature a bundle proves that it was not damaged, and not who wrote it: anybody can write another one.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from forebay.bench.bundle.archive import (
    Archive,
    BundleUnsound,
    Member,
    check_fits,
    check_names,
    measure,
    open_archive,
    write_archive,
)
from forebay.bench.bundle.keys import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, SigningKey, is_signed_by
from forebay.errors import ConfigError

MANIFEST, SIGNATURES = "MANIFEST.json", "SIGNATURES.json"
_MOST_MANIFEST_BYTES = 8 * 2**20
_MOST_SIGNATURES = 16
_PURPOSE = b"forebay-bundle/1\0"
"""Before the manifest in what is signed: a signature for something else is none for a bundle."""


class BundledFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    content_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    schema: str = "forebay-bundle/1"
    title: str
    created: str
    """ISO 8601, UTC."""
    files: tuple[BundledFile, ...]


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    public_key: str
    """Hex, 32 bytes."""
    signature: str
    """Hex, 64 bytes."""


class Signatures(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    algorithm: str = "ed25519"
    signatures: tuple[Signature, ...]


_Document = TypeVar("_Document", Manifest, Signatures)


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """What a sound bundle says of itself."""

    manifest: Manifest
    manifest_sha256: str
    signed_by: tuple[str, ...]
    """Public keys in hex, all of whose signatures are good. Whose they are, a bundle cannot prove."""


def write_bundle(target: Path, files: Mapping[str, Path | bytes], *, title: str, created: str) -> Manifest:
    """Bundle these files, or contents, under these names; the bundle is there whole, or not at all.

    Raises ConfigError for files that cannot be read, change meanwhile, or have names that no bundle takes.
    """
    ordered = dict(sorted(files.items()))
    if taken := {MANIFEST, SIGNATURES} & ordered.keys():
        raise ConfigError(f"{min(taken)} is the bundle's own: give that file another name")
    try:
        check_names([MANIFEST, *ordered])
    except BundleUnsound as error:
        raise ConfigError(f"cannot bundle: {error}") from None
    members, listed = list[Member](), list[BundledFile]()
    for name, content in zip(ordered, _opened(ordered.values()), strict=True):
        member = measure(name, content)
        content.seek(0)
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
        members.append(member)
        listed.append(BundledFile(name=name, content_bytes=member.content_bytes, sha256=sha256))
    manifest = Manifest(title=title, created=created, files=tuple(listed))
    text = _encode(manifest)
    _write(target, [_measured(MANIFEST, text), *members], chain([io.BytesIO(text)], _opened(ordered.values())))
    return manifest


def verify_bundle(path: Path, trusted_key: bytes | None = None) -> Verification:
    """Prove every byte of it. With a key, its owner must be among those who signed.

    Raises BundleUnsound when it is not what its writer wrote, ConfigError when that cannot be found out.
    """
    with open_archive(path) as archive:
        found = _Found(archive)
        manifest = _decode(MANIFEST, found.manifest_text, Manifest)
        listed = {each.name: each for each in manifest.files}
        _check_complete(manifest, found.members)
        signed_by = _signed_by(found)
        if trusted_key is not None and trusted_key.hex() not in signed_by:
            raise BundleUnsound(_who_else(trusted_key, signed_by))
        for member in found.members:
            digest = hashlib.sha256()
            for piece in archive.pieces(member):
                digest.update(piece)
            if digest.hexdigest() != listed[member.name].sha256:
                raise BundleUnsound(f"{member.name} is not the file that the manifest names: its sum is another one")
    return Verification(
        manifest=manifest, manifest_sha256=hashlib.sha256(found.manifest_text).hexdigest(), signed_by=signed_by
    )


def read_member(path: Path, name: str, most_bytes: int) -> bytes:
    """One file of a bundle that has been verified. Raises BundleUnsound when it is not there, or larger."""
    with open_archive(path) as archive:
        for member in archive.members:
            if member.name == name:
                return archive.content(member, most_bytes)
    raise BundleUnsound(f"it holds no {name}")


def sign_bundle(path: Path, key: SigningKey) -> Verification:
    """Add a signature to a sound bundle. Raises BundleUnsound for another, ConfigError when this key signed it before.

    The bundle is replaced at once: it is there whole, at any moment.
    """
    verified = verify_bundle(path)
    if key.public_bytes.hex() in verified.signed_by:
        raise ConfigError(f"{path} is signed with this key already")
    with open_archive(path) as archive:
        found = _Found(archive)
        if hashlib.sha256(found.manifest_text).hexdigest() != verified.manifest_sha256:
            raise BundleUnsound("it changed while it was signed")
        ours = Signature(public_key=key.public_bytes.hex(), signature=key.sign(_PURPOSE + found.manifest_text).hex())
        everybody = sorted((*found.signatures, ours), key=lambda each: each.public_key)
        text = _encode(Signatures(signatures=tuple(everybody)))
        contents = (io.BufferedReader(_Pieces(archive.pieces(member))) for member in found.members)
        _write(
            path,
            [_measured(MANIFEST, found.manifest_text), _measured(SIGNATURES, text), *found.members],
            chain([io.BytesIO(found.manifest_text), io.BytesIO(text)], contents),
        )
    return verify_bundle(path, key.public_bytes)


class _Found:
    """The parts of an archive that is a bundle. Raises BundleUnsound where one is missing or out of place."""

    def __init__(self, archive: Archive) -> None:
        names = [member.name for member in archive.members]
        if names[:1] != [MANIFEST]:
            raise BundleUnsound(f"it has no {MANIFEST} in front: it is an archive, but no bundle")
        signed = names[1:2] == [SIGNATURES]
        self.members = archive.members[1 + signed :]
        self.manifest_text = archive.content(archive.members[0], _MOST_MANIFEST_BYTES)
        self.signatures: tuple[Signature, ...] = ()
        if signed:
            text = archive.content(archive.members[1], _MOST_MANIFEST_BYTES)
            self.signatures = _decode(SIGNATURES, text, Signatures).signatures


def _check_complete(manifest: Manifest, members: Sequence[Member]) -> None:
    """The manifest names exactly the members, in their order."""
    listed = [each.name for each in manifest.files]
    names = [member.name for member in members]
    if missing := next((name for name in listed if name not in set(names)), None):
        raise BundleUnsound(f"{missing[:100]!a} is missing: the manifest names it")
    if extra := next((name for name in names if name not in set(listed)), None):
        raise BundleUnsound(f"{extra!r} does not belong to it: the manifest does not name it")
    if listed != names:
        raise BundleUnsound("its files are not in the order of the manifest")
    for each, member in zip(manifest.files, members, strict=True):
        if each.content_bytes != member.content_bytes:
            raise BundleUnsound(f"{each.name} is not as long as the manifest says")


def _signed_by(found: _Found) -> tuple[str, ...]:
    """The keys of all signatures. Raises BundleUnsound if any is bad, or none where there should be one."""
    keys = [each.public_key for each in found.signatures]
    if keys != sorted(set(keys)) or len(keys) > _MOST_SIGNATURES:
        raise BundleUnsound("its signatures are not in order, or too many")
    for each in found.signatures:
        public, signature = _bytes_of(each.public_key, PUBLIC_KEY_BYTES), _bytes_of(each.signature, SIGNATURE_BYTES)
        if not is_signed_by(public, signature, _PURPOSE + found.manifest_text):
            raise BundleUnsound(f"the signature of key {each.public_key} is not one of this manifest")
    return tuple(keys)


def _bytes_of(text: str, wanted_bytes: int) -> bytes:
    """Lower-case hex only: else two texts would mean the same."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != wanted_bytes or found.hex() != text:
        raise BundleUnsound(f"a key or signature in {SIGNATURES} is not {wanted_bytes} bytes in hex")
    return found


def _who_else(trusted_key: bytes, signed_by: Sequence[str]) -> str:
    if not signed_by:
        return f"it is not signed; key {trusted_key.hex()} was asked for"
    return f"it is signed by {', '.join(signed_by)}, and not by {trusted_key.hex()}, which was asked for"


def _encode(value: Manifest | Signatures) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def _decode(name: str, text: bytes, kind: type[_Document]) -> _Document:
    """Raises BundleUnsound unless it is written exactly as `_encode` writes."""
    try:
        value = msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BundleUnsound(f"{name} cannot be read: {error}") from None
    if _encode(value) != text:
        raise BundleUnsound(f"{name} is not in the form in which a bundle has it")
    return value


def _measured(name: str, text: bytes) -> Member:
    return measure(name, io.BytesIO(text))


def _opened(contents: Iterable[Path | bytes]) -> Iterator[io.BufferedReader | io.BytesIO]:
    """One after the other: there may be more files than a process may open."""
    for path in contents:
        if isinstance(path, bytes):
            yield io.BytesIO(path)
            continue
        try:
            file = path.open("rb")
        except OSError as error:
            raise ConfigError(f"{path} cannot be bundled ({error.strerror})") from None
        with file:
            yield file


class _Pieces(io.RawIOBase):
    """A content as a file, in memory only as far as it is read."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest:
            self._rest = next(self._pieces, b"")
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def _write(target: Path, members: Sequence[Member], contents: Iterable[BinaryIO]) -> None:
    check_fits(members)
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                write_archive(file, members, contents)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error.strerror}): name another place") from None
