"""Ed25519 keys in PEM files, as other tools write them too. Needs the package `cryptography`, the extra `evidence`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PUBLIC_KEY_BYTES, SIGNATURE_BYTES = 32, 64
_MOST_KEY_FILE_BYTES = 16_384


def require_cryptography() -> None:
    """Raises ConfigError that says what to install."""
    try:
        import cryptography.hazmat.primitives.asymmetric.ed25519  # noqa: F401
    except ImportError:
        raise ConfigError(
            "signatures need the package cryptography: pip install 'forebay[evidence]', or pip install cryptography"
        ) from None


class SigningKey:
    """The private half. It is never printed, and written by `generate_key` only."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @property
    def public_bytes(self) -> bytes:
        return self._key.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


def is_signed_by(public_bytes: bytes, signature: bytes, message: bytes) -> bool:
    """Whether the owner of this key signed the message. Raises ConfigError without `cryptography`."""
    require_cryptography()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public_bytes).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def generate_key(path: Path) -> bytes:
    """Make a key pair: the private half at `path`, for its owner only, the public half beside it as `.pub`.

    Returns the public half. Raises ConfigError when a file is there already: a key that is replaced is lost.
    """
    require_cryptography()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key, public_path = Ed25519PrivateKey.generate(), public_path_of(path)
    private_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public_pem = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    for taken in (path, public_path):
        if os.path.lexists(taken):
            raise ConfigError(f"{taken} is there already: name another file, or move that key away")
    _create(path, private_pem, 0o600)
    _create(public_path, public_pem, 0o644)
    return key.public_key().public_bytes_raw()


def public_path_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.pub")


def _create(path: Path, content: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): name another file") from None


def read_private_key(path: Path) -> SigningKey:
    """Raises ConfigError for what is no Ed25519 private key without a password."""
    require_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(_content(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} holds no Ed25519 private key without a password: make one with bundle keygen")
    return SigningKey(key)


def read_public_key(path: Path) -> bytes:
    """Raises ConfigError for what is no Ed25519 public key."""
    require_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    key: Ed25519PublicKey | object | None
    try:
        key = load_pem_public_key(_content(path))
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{path} holds no Ed25519 public key: give the .pub file of the signer")
    return key.public_bytes_raw()


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_KEY_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name the file of a key") from None
