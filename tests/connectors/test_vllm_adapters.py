"""Adapters are read on a thread of their own, and a disk that hangs keeps nobody from ending."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from forebay.connectors.vllm import adapters


def test_closing_does_not_wait_for_a_disk_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(adapters, "_digest", lambda *_: go_on.wait(60))
    monkeypatch.setattr(adapters, "_CLOSE_WITHIN_S", 0.05)
    reading = adapters.Adapters()
    lora = SimpleNamespace(lora_int_id=1, lora_path="/nowhere", lora_name="one")
    assert not reading.digest(lora).done()
    reading.close()
    assert ["left behind" in record.getMessage() for record in caplog.records] == [True]
    go_on.set()


def test_a_bug_costs_one_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = {Path("/good"): b"good"}
    monkeypatch.setattr(adapters, "_digest", lambda _, directory: sound[directory])
    reading = adapters.Adapters()
    for number, (path, digest) in enumerate([("/bad", None), ("/good", b"good")]):
        lora = SimpleNamespace(lora_int_id=number, lora_path=path, lora_name=path)
        assert reading.digest(lora).result(60) == digest
    reading.close()


def test_an_adapter_without_files_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reading = adapters.Adapters()
    lora = SimpleNamespace(lora_int_id=1, lora_path=str(tmp_path / "none"), lora_name="one")
    assert reading.digest(lora).result(60) is None
    assert reading.digest(lora) is reading.digest(lora)
    reading.close()
    assert "adapter one" in caplog.text
