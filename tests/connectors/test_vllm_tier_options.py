"""What an operator writes for the tier below vLLM's native offloading."""

from __future__ import annotations

import pkgutil

import pytest

import forebay.policies
from forebay.connectors.vllm.tier_options import make_eviction, read_tier_options
from forebay.errors import ConfigError

ENTRY = {"pool": "/nowhere", "capacity_gib": 1.0}
EVICTION = {"lru", "lrfu", "s3fifo", "prefix_aware"}


@pytest.mark.parametrize("name", sorted(module.name for module in pkgutil.iter_modules(forebay.policies.__path__)))
def test_every_eviction_policy_can_be_named_and_nothing_else(name: str) -> None:
    if name in EVICTION:
        policy = make_eviction(read_tier_options({**ENTRY, "eviction": name}))
        assert type(policy).__module__ == f"forebay.policies.{name}"
        assert policy is not make_eviction(read_tier_options({**ENTRY, "eviction": name}))
    else:
        with pytest.raises(ConfigError, match=f"'eviction': .*{name}"):
            read_tier_options({**ENTRY, "eviction": name})


def test_an_unknown_name_is_one_line() -> None:
    with pytest.raises(ConfigError, match="'eviction': no 'oldest' among the policies") as caught:
        read_tier_options({**ENTRY, "eviction": "oldest"})
    assert "\n" not in str(caught.value)
