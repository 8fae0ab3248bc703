from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.keys import KEY_BYTES, block_keys, derived_key, namespace_key, tenant_digest
from forebay.testing.schedule import NAMESPACE
from forebay.types import Namespace

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
TEXT_FIELDS = [f.name for f in dataclasses.fields(Namespace) if f.type == "str"]
INT_FIELDS = [f.name for f in dataclasses.fields(Namespace) if f.type == "int"]


def test_every_field_is_text_or_a_number() -> None:
    assert len(TEXT_FIELDS) + len(INT_FIELDS) == len(dataclasses.fields(Namespace))


@pytest.mark.parametrize("name", TEXT_FIELDS + INT_FIELDS)
def test_namespaces_that_differ_in_one_field_share_no_key(name: str) -> None:
    value = getattr(NAMESPACE, name)
    other = dataclasses.replace(NAMESPACE, **{name: value + "x" if isinstance(value, str) else value + 1})
    tokens = list(range(64))
    assert not set(block_keys(NAMESPACE, tokens)) & set(block_keys(other, tokens))


@given(st.lists(st.text(max_size=6), min_size=4, max_size=4), st.lists(st.text(max_size=6), min_size=4, max_size=4))
def test_two_different_field_lists_never_collide(left: list[str], right: list[str]) -> None:
    """Moving characters from one field to its neighbour gives another namespace."""
    names = ("model", "weights_digest", "adapter_digest", "kv_dtype")
    a = dataclasses.replace(NAMESPACE, **dict(zip(names, left, strict=True)))
    b = dataclasses.replace(NAMESPACE, **dict(zip(names, right, strict=True)))
    assert (namespace_key(a) == namespace_key(b)) == (left == right)


@given(TOKENS)
def test_one_key_for_each_full_block(tokens: list[int]) -> None:
    keys = block_keys(NAMESPACE, tokens)
    assert len(keys) == len(tokens) // NAMESPACE.block_tokens
    assert len(set(keys)) == len(keys)
    assert all(len(key) == KEY_BYTES for key in keys)


@given(TOKENS, TOKENS)
def test_keys_agree_exactly_on_the_common_prefix(left: list[int], right: list[int]) -> None:
    step = NAMESPACE.block_tokens
    for i, (a, b) in enumerate(zip(block_keys(NAMESPACE, left), block_keys(NAMESPACE, right), strict=False)):
        assert (a == b) == (left[: (i + 1) * step] == right[: (i + 1) * step])


@given(TOKENS)
def test_lists_and_arrays_of_any_integer_type_give_the_same_keys(tokens: list[int]) -> None:
    expected = block_keys(NAMESPACE, tokens)
    assert block_keys(NAMESPACE, np.array(tokens, dtype=np.int64)) == expected
    assert block_keys(NAMESPACE, np.array(tokens, dtype=np.uint32)) == expected
    assert block_keys(NAMESPACE, np.array(tokens * 2, dtype=">u4")[: len(tokens)]) == expected


@pytest.mark.parametrize("tokens", [[-1], [2**32], [0.5], [[1, 2]]])
def test_what_is_no_token_id_is_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="token"):
        block_keys(NAMESPACE, tokens)


def test_two_fresh_processes_agree_whatever_their_hash_seed() -> None:
    program = (
        "from forebay.keys import block_keys; from forebay.testing.schedule import NAMESPACE;"
        "print(*(key.hex() for key in block_keys(NAMESPACE, range(99))))"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1] == [key.hex() for key in block_keys(NAMESPACE, range(99))]


def test_the_key_scheme_is_stable() -> None:
    """A pool outlives the program that wrote it: changing these digests orphans every stored block."""
    assert namespace_key(NAMESPACE).hex()[:16] == "81caae44e9d0fa91"
    assert block_keys(NAMESPACE, range(8))[1].hex()[:16] == "a1076d477574e050"


def test_a_tenants_salt_is_not_kept_and_separates() -> None:
    assert tenant_digest("") == ""
    assert "secret" not in tenant_digest("secret")
    assert tenant_digest("secret") != tenant_digest("secret2")


@given(st.binary(max_size=40), st.binary(max_size=40), TOKENS)
def test_derived_keys_differ_by_namespace_and_hash_and_are_no_keys_of_tokens(
    left: bytes, right: bytes, tokens: list[int]
) -> None:
    root, other = namespace_key(NAMESPACE), namespace_key(dataclasses.replace(NAMESPACE, shard=1, shard_count=2))
    assert (derived_key(root, left) == derived_key(root, right)) == (left == right)
    assert derived_key(root, left) != derived_key(other, left)
    assert len(derived_key(root, left)) == KEY_BYTES
    assert derived_key(root, left) not in block_keys(NAMESPACE, tokens)
