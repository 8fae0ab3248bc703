"""The list of known bugs follows the code. Whether each is caught, `make mutants` finds out."""

from __future__ import annotations

import pytest

import mutants


def test_every_mutant_applies(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.check() == 0, capsys.readouterr().out
    assert "mutants apply" in capsys.readouterr().out
