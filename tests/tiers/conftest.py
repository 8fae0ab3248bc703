from __future__ import annotations

import pytest

from forebay.tiers.file import Io
from forebay.tiers.file.native import find_kernel

pytest.register_assert_rewrite("file_tier_kit")
import file_tier_kit  # noqa: E402


@pytest.fixture(params=[Io.NATIVE, Io.PYTHON], ids=lambda io: io.value)
def io(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Io:
    """Both ways of reading: for modules that say `pytestmark = pytest.mark.usefixtures("io")`."""
    if request.param is Io.NATIVE and find_kernel().kernel is None:
        pytest.skip(find_kernel().words)
    monkeypatch.setattr(file_tier_kit, "IO", request.param)
    return request.param
