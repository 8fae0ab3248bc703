"""`forebay bench policy`: hits by hand, the bound against brute force, the same result from one process and several."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.assemble import Named, StoreConfig, open_policy
from forebay.bench.policy.bound import most_hits
from forebay.bench.policy.options import EVICTION, PolicyOptions
from forebay.bench.policy.picture import render_picture
from forebay.bench.policy.record import BOUND, PolicyRecord
from forebay.bench.policy.replay import Prompts, prompts_of, replay
from forebay.bench.policy.run import run_bench, steps
from forebay.bench.progress import Silence
from forebay.cli import cli, run
from forebay.errors import ConfigError
from forebay.policies.admit_all import AdmitAll
from forebay.policies.lru import LRU
from forebay.types import BlockKey
from forebay.workloads import chat


def prompts(*chains: str) -> Prompts:
    """Each letter a block; a chain must be a path from the start, as the letters of a prompt are."""
    keys = tuple(tuple(BlockKey(letter.encode().ljust(32)) for letter in chain) for chain in chains)
    return Prompts("test", 1, keys, sum(map(len, keys)))


def lru_hits(cache_blocks: int, *chains: str) -> int:
    return replay(prompts(*chains), cache_blocks, LRU(), AdmitAll()).hit_blocks


def test_a_hit_needs_every_block_before_it() -> None:
    assert lru_hits(9, "abc", "abd", "abc") == 2 + 3
    # b and c have gone (tails first), and c is of no use without b
    assert lru_hits(3, "abc", "xy", "abc") == 1


def test_a_prompt_never_evicts_its_own_blocks() -> None:
    score = replay(prompts("abcdef", "abcdef"), 4, LRU(), AdmitAll())
    assert (score.hit_blocks, score.written_blocks) == (4, 4)


@settings(max_examples=60)
@given(st.lists(st.sampled_from("abcd"), max_size=9), st.integers(1, 3))
def test_the_bound_is_what_the_best_of_all_choices_gets(uses: list[str], cache_blocks: int) -> None:
    def best(at: int, held: frozenset[str]) -> int:
        if at == len(uses):
            return 0
        now = held | {uses[at]}
        choices = (frozenset(kept) for kept in itertools.combinations(now, min(cache_blocks, len(now))))
        return (uses[at] in held) + max(best(at + 1, kept) for kept in choices)

    assert most_hits(prompts(*uses), cache_blocks) == best(0, frozenset())


@settings(max_examples=30)
@given(st.integers(0, 10), st.sampled_from(EVICTION), st.integers(1, 400))
def test_no_policy_exceeds_the_bound(seed: int, policy: str, cache_blocks: int) -> None:
    played = prompts_of(chat.build(chat.Options(sessions=15, seed=seed)))
    hits = replay(played, cache_blocks, open_policy(Named(kind=policy)), AdmitAll()).hit_blocks
    assert hits <= most_hits(played, cache_blocks) <= played.wanted_blocks - played.distinct_blocks


def test_several_processes_give_the_same_record(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    lines = [
        {"timestamp": at, "input_length": 3 * 512, "output_length": 1, "hash_ids": [0, 1 + at % 7, 100 + at % 21]}
        for at in range(60)
    ]
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    options = PolicyOptions(trace=trace, workloads=(), policies=("lru", "prefix_aware"), cache_blocks=(5, 20))
    one = run_bench(options, command=(), progress=Silence())
    two = run_bench(msgspec.structs.replace(options, processes=2), command=(), progress=Silence())
    assert one == two
    assert [(row.policy, row.cache_blocks) for row in one.rows if row.admission == "admit_all"] == [
        (policy, blocks) for blocks in (5, 20) for policy in ("lru", "prefix_aware", BOUND)
    ]
    assert steps(options) == 4
    row = one.rows[0]
    assert row.hit_tokens == row.hit_blocks * 512
    assert row.block_hit_rate == row.token_hit_rate == row.hit_blocks / 180


def test_the_command_writes_json_and_a_picture_and_prints_tables(tmp_path: Path) -> None:
    arguments = ["bench", "policy", "--workload", "restore", "--policy", "lru", "--share", "0.1", "--out"]
    answer = CliRunner().invoke(cli, [*arguments, str(tmp_path)], standalone_mode=False)
    assert answer.return_value == 0, answer.output
    assert "restore: 959 requests" in answer.stdout
    assert "writes saved" in answer.stdout
    record = msgspec.json.decode((tmp_path / "policy.json").read_bytes(), type=PolicyRecord)
    assert {row.policy for row in record.rows} == {"lru", BOUND}
    assert ET.fromstring((tmp_path / "policy.svg").read_text()).tag.endswith("svg")


def test_json_is_all_that_goes_to_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "policy", "--workload", "restore", "--policy", "lru", "--cache-blocks", "100", "--json"]
    assert run([*arguments, "--out", str(tmp_path)]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=PolicyRecord).rows[0].cache_blocks == 100


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--policy", "nosuch"), "no 'nosuch' among the policies"),
        (("--workload", "none"), "nothing to replay"),
        (("--workload", "nosuch"), "no 'nosuch' among the workloads"),
        (("--cache-blocks", "0"), "a cache must have 1 block or more"),
        (("--share", "nan"), "above 0 and at most 1"),
        (("--processes", "0"), "processes must be from 1 to 256"),
        (("--out", "/nonexistent"), "is no directory"),
        (("/nonexistent",), "cannot read the trace"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(
    wrong: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "policy", "--out", str(tmp_path), *wrong]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert message in said[0]


def test_a_hostile_name_of_a_trace_stays_text_in_the_picture(tmp_path: Path) -> None:
    trace = tmp_path / "<script>&.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}')
    options = PolicyOptions(trace=trace, workloads=(), policies=("lru",), cache_blocks=(1,))
    picture = render_picture(run_bench(options, command=(), progress=Silence()))
    assert "<script>" not in picture
    assert any("<script>&.jsonl" in (text.text or "") for text in ET.fromstring(picture).iter())


def test_bad_options_are_refused_before_anything_is_replayed() -> None:
    with pytest.raises(ConfigError, match="no policy to replay"):
        run_bench(PolicyOptions(policies=()), command=(), progress=Silence())


def test_the_default_policy_is_the_one_that_wins_in_the_published_tables() -> None:
    """By the share of the best in its column, over all columns; and on the real trace in every column."""
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    section = page.partition("## Eviction\n")[2].partition("\n## ")[0]
    tables: list[dict[str, list[float]]] = []
    is_hit_rates = False
    for line in section.splitlines():
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        if cells[0].endswith(", blocks held"):
            tables.append({})
            is_hit_rates = True
        elif not line.startswith("|"):
            is_hit_rates = False
        elif cells[0].startswith("`") and is_hit_rates:
            tables[-1][cells[0].strip("`")] = [float(cell) for cell in cells[1:]]
    assert len(tables) >= 4
    shares: dict[str, list[float]] = {}
    for table in tables:
        best = [max(column) for column in zip(*table.values(), strict=True)]
        for name, row in table.items():
            shares.setdefault(name, []).extend(mine / most for mine, most in zip(row, best, strict=True))
    config = StoreConfig.embedded([Path("pool")], host_bytes=2**30, capacity_bytes=2**30)
    default = config.tiers[0].eviction.kind
    assert config.host_eviction.kind == default
    assert max(shares, key=lambda name: sum(shares[name])) == default
    assert all(share == 1 for share in shares[default][: len(next(iter(tables[0].values())))])
