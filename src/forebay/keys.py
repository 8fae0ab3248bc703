"""Namespace and tokens -> block keys. Pure.

root      = SHA-256("forebay/namespace/1", then for each field its tag, type and length-prefixed value)
key[0]    = SHA-256(root   || tokens of block 0 as little-endian uint32)
key[i]    = SHA-256(key[i-1] || tokens of block i)

A key therefore stands for the whole prefix up to the end of its block, in one exact namespace. Tags and length
prefixes make the encoding of a namespace injective: no two different field lists have the same bytes.

A host engine that names its blocks by a hash of the whole prefix has no need of the chain:

derived   = SHA-256("forebay/derived/1" || root || that hash), each part with its length before it
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from forebay.types import BlockKey, Namespace

KEY_BYTES = 32
_NAMESPACE_TAG = b"forebay/namespace/1"
_TENANT_TAG = b"forebay/tenant/1"
_DERIVED_TAG = b"forebay/derived/1"

Tokens = Sequence[int] | npt.NDArray[np.integer]
"""Token ids in [0, 2**32). An array is hashed without copying when it is contiguous little-endian uint32 or int32."""


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(8, "little") + part


def namespace_key(namespace: Namespace) -> BlockKey:
    """The root of every key of this namespace: the digest over all fields, by name, type and value."""
    digest = hashlib.sha256(_framed(_NAMESPACE_TAG))
    for field in dataclasses.fields(namespace):
        value = getattr(namespace, field.name)
        digest.update(_framed(field.name.encode()))
        digest.update(_framed(type(value).__name__.encode()))
        digest.update(_framed(str(value).encode()))
    return BlockKey(digest.digest())


def tenant_digest(salt: str) -> str:
    """What a `Namespace` keeps of a tenant's salt. An empty salt (no tenants) stays empty."""
    if not salt:
        return ""
    return hashlib.sha256(_framed(_TENANT_TAG) + _framed(salt.encode())).hexdigest()


def block_keys(namespace: Namespace, tokens: Tokens) -> tuple[BlockKey, ...]:
    """One key for each full block of `namespace.block_tokens` tokens; a partial tail has none.

    Raises ValueError for token ids outside [0, 2**32).
    """
    ids = token_ids(tokens)
    sha256, step = hashlib.sha256, namespace.block_tokens
    parent = namespace_key(namespace)
    keys: list[BlockKey] = []
    for start in range(0, len(ids) - step + 1, step):
        parent = BlockKey(sha256(parent + ids[start : start + step].tobytes()).digest())
        keys.append(parent)
    return tuple(keys)


def derived_key(root: BlockKey, prefix_hash: bytes) -> BlockKey:
    """The key of a block that its host engine names by a hash of the whole prefix, in the namespace with this root."""
    return BlockKey(hashlib.sha256(_framed(_DERIVED_TAG) + _framed(root) + _framed(prefix_hash)).digest())


def token_ids(tokens: Tokens) -> npt.NDArray[np.uint32]:
    """uint32 [tokens], little-endian. Raises ValueError for what is no flat sequence of ids in [0, 2**32)."""
    wide = np.asarray(tokens if len(tokens) else (), dtype=None if len(tokens) else np.uint32)
    if wide.ndim != 1 or not np.issubdtype(wide.dtype, np.integer):
        raise ValueError(f"tokens must be a flat sequence of integers, not {wide.dtype} with {wide.ndim} axes")
    if len(wide) and not (0 <= int(wide.min()) and int(wide.max()) < 2**32):
        raise ValueError("token ids must lie in [0, 2**32)")
    return np.ascontiguousarray(wide, dtype="<u4")
