"""Traces from files: both formats, and every way in which a line can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.workloads import Arrival, trace

LINE = {"timestamp": 1500, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2]}


def written(path: Path, *lines: object) -> trace.Options:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return trace.Options(path=str(path))


def test_json_lines_are_read_in_the_order_of_their_times(tmp_path: Path) -> None:
    later = {**LINE, "timestamp": 2000.5, "input_length": 1024, "hash_ids": [0, 1], "more": "is ignored"}
    workload = trace.build(written(tmp_path / "t.jsonl", later, "", LINE))
    assert workload.arrivals == (
        Arrival(1_500_000_000, None, (0, 1, 2), 1100, 20),
        Arrival(2_000_500_000, None, (0, 1), 1024, 20),
    )
    assert (workload.name, workload.block_tokens) == ("t.jsonl", 512)
    assert workload.full_blocks(workload.arrivals[0]) == (0, 1)


def test_an_azure_trace_has_times_and_lengths_and_shares_nothing(tmp_path: Path) -> None:
    options = written(
        tmp_path / "azure.CSV",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:17:03.9799600,513,44",
        "2023-11-16 18:17:04.0319600,0,1",
        "2023-11-16 18:17:05.9799600,512,2",
    )
    workload = trace.build(options)
    assert workload.arrivals == (
        Arrival(0, None, (0, 1), 513, 44),
        Arrival(52_000_000, None, (), 0, 1),
        Arrival(2_000_000_000, None, (2,), 512, 2),
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ("[" * 100_000, "line 2"),
        ({**LINE, "timestamp": -1}, "timestamp must be from 0"),
        ({**LINE, "timestamp": 1e300}, "timestamp must be from 0"),
        ('{"timestamp": 1e999, "input_length": 0, "output_length": 0, "hash_ids": []}', "line 2"),
        ({**LINE, "input_length": -5}, "input_length"),
        ({**LINE, "input_length": 10**30}, "input_length"),
        ({**LINE, "output_length": "20"}, "output_length"),
        ({**LINE, "hash_ids": [0, 1]}, r"1100 tokens are 3 blocks of 512, and there are 2 hash_ids"),
        ({**LINE, "hash_ids": [0, 1, -2]}, "hash_ids"),
        ({**LINE, "hash_ids": [0, 1, 2**63]}, "hash_ids"),
        ({**LINE, "hash_ids": [1, 0, 2]}, "hash id 1 follows another block than before"),
        ({key: LINE[key] for key in ("timestamp", "input_length", "output_length")}, "hash_ids"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        trace.build(written(tmp_path / "t.jsonl", LINE, line))
    assert "t.jsonl, line 2" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("a,b,c",), "line 1: the columns must be"),
        (("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:00:00,1"), "line 2: 2 fields instead of 3"),
        (("TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,1,1"), "line 2: "),
        (("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:00:00,-1,1"), "is not a number of tokens"),
        (("TIMESTAMP,ContextTokens,GeneratedTokens", f"2023-11-16 18:00:00,{10**11},1"), "is not a number of tokens"),
        (
            ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:00:00,1,1", "2023-11-16 17:00:00,1,1"),
            "line 3: earlier than the first",
        ),
        (
            ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:00:00,1,1", "2023-11-16 18:00:00+00:00,1,1"),
            "line 3: ",
        ),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trace.build(written(tmp_path / "t.csv", *rows))


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 10)
    for name, message in (("absent", "No such file"), ("empty", "no requests"), ("binary", "cannot read|line 1")):
        with pytest.raises(ConfigError, match=message):
            trace.build(trace.Options(path=str(tmp_path / name)))
    with pytest.raises(ConfigError, match="cannot read the trace"):
        trace.build(trace.Options(path="nul\0"))
    with pytest.raises(ConfigError, match="cannot read the trace"):
        trace.build(trace.Options(path=str(tmp_path)))


def test_no_more_is_read_than_asked_for(tmp_path: Path) -> None:
    options = written(tmp_path / "t.jsonl", LINE, LINE, "broken")
    assert len(trace.build(trace.Options(path=options.path, most_requests=2)).arrivals) == 2
    with pytest.raises(ConfigError, match="most_requests must be 1 or more"):
        trace.build(trace.Options(path=options.path, most_requests=0))
    with pytest.raises(ConfigError, match="block_tokens must be 1 or more"):
        trace.build(trace.Options(path=options.path, block_tokens=0))


@given(st.binary(max_size=300), st.sampled_from(("t.jsonl", "t.csv")))
def test_any_bytes_are_a_trace_or_one_clear_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str
) -> None:
    path = tmp_path_factory.mktemp("trace") / name
    path.write_bytes(content)
    said = ""
    try:
        assert trace.build(trace.Options(path=str(path))).arrivals
    except ConfigError as error:
        said = str(error)
    assert "\n" not in said
