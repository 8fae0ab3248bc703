import pytest

pytest.register_assert_rewrite("forebay.testing.tier_contract", "file_tier_kit")
