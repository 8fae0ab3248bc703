"""Events on disk and their explanation."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from forebay.bench.choice.host import Host, Prefill, Source, Storm
from forebay.cli import run
from forebay.errors import ConfigError
from forebay.events import Chosen, Dropped, Event, Reason, both
from forebay.journal import Journal, JournalOptions, encode, read_choices

STORM = Storm(
    sessions=4,
    block_tokens=512,
    sources=(Source(name="fast", blocks=8, block_s=0.05),),
    new_tokens=100,
    prefill=Prefill(tokens_per_s=50_000, half_speed_tokens=32_768),
)
DROPPED = Dropped(1, "host", 1, Reason.EVICTED)


def played(path: Path) -> list[Event]:
    """The events of a storm, which are also written to a file."""
    events: list[Event] = []
    journal = Journal(JournalOptions(path=str(path)))
    host = Host(STORM, emit=both(events.append, journal.add))
    host.learn()
    host.run()
    journal.close()
    return events


def test_every_event_is_a_line_and_decisions_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = played(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == [type(event).__name__ for event in events]
    assert list(read_choices(path)) == [event for event in events if isinstance(event, Chosen)]


def test_a_decision_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, svg = tmp_path / "events.jsonl", tmp_path / "choices.svg"
    played(path)
    assert run(["explain", str(path), "--request", "storm-1", "--svg", str(svg)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("storm-1: 8 of 8 blocks are stored")
    assert "first token in" in out
    assert "1 decisions" in out
    assert ElementTree.fromstring(svg.read_text()).tag.endswith("svg")
    assert run(["explain", str(path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 4
    assert run(["explain", str(path), "--request", "nobody"]) == 1


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"[]",
        b'{"event": 3}',
        b'{"event": "Chosen"}',
        b"\xff\xfe",
        b'{"event":' + b"[" * 100_000,
        b'"' + b"x" * 2**21 + b'"',
    ],
)
def test_a_broken_line_is_named_by_its_number(tmp_path: Path, line: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(encode(DROPPED) + b"\n" + line + b"\n")
    assert run(["explain", str(path)]) == 2
    error = capsys.readouterr().err
    assert "line 2 " in error
    assert error.count("\n") == 1


def test_contradicting_numbers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    chosen = next(event for event in played(path) if isinstance(event, Chosen))
    line = json.loads(encode(chosen)) | {"chosen_blocks": 99}
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match="line 1 "):
        list(read_choices(path))


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = played(path)
    path.write_bytes(path.read_bytes() + b'{"event": "Chos')
    assert len(list(read_choices(path))) == sum(isinstance(event, Chosen) for event in events)


def test_a_full_disk_costs_events_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(JournalOptions(path="/dev/full"))
    for _ in range(100):
        journal.add(DROPPED)
    journal.close()
    assert journal.lost_events > 0
    assert "events are lost" in caplog.text


def test_a_file_that_has_grown_makes_room(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * 2**20)
    journal = Journal(JournalOptions(path=str(path), most_bytes=2**20))
    journal.add(DROPPED)
    journal.close()
    assert path.with_name("events.jsonl.1").stat().st_size > 2**20
    assert path.stat().st_size == 0


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        Journal(JournalOptions(path=str(tmp_path / "none" / "events.jsonl")))
