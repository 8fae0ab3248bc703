"""The built-in engine as a target: recompute, disk and throttled disk, with a tiny model of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.assemble import Named
from forebay.bench.restore.options import GroupOptions, RestoreOptions
from forebay.bench.restore.results import RestoreRecord, Role
from forebay.bench.restore.run import run_restore, target_of
from forebay.errors import ConfigError

pytest.importorskip("torch")

TINY = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocabulary": 256}
BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 16
"""K and V, layers, heads, dimension, float32, tokens of a block."""
PREFIX_TOKENS = 512


def group(role: Role, *roots: Path, limit: str = "", instances: int = 1, **options: Any) -> GroupOptions:
    given = {"random": TINY, "block_tokens": 16, "host_bytes": 2**20, "threads": 1} | options
    return GroupOptions(
        name=role.value, role=role, target="builtin", roots=roots, limit=limit, instances=instances, options=given
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def record(root: Path) -> RestoreRecord:
    options = RestoreOptions(
        group=(
            group(Role.RECOMPUTE),
            group(Role.BASELINE, root, limit="2MB/s"),
            group(Role.SHARED, root, instances=2),
        ),
        workload=Named(
            kind="cold",
            options={"sessions": 4, "prefix_tokens": PREFIX_TOKENS, "question_tokens": 5, "output_tokens": 3},
        ),
        concurrency=(2, 4),
        rounds=1,
    )
    return run_restore(options)


def test_outputs_are_those_of_recomputing(record: RestoreRecord) -> None:
    assert len(record.requests) == 3 * 6
    for each in record.requests:
        stored = 0 if each.group == "recompute" else PREFIX_TOKENS
        assert (each.error, each.output_tokens, each.prompt_tokens) == ("", 3, PREFIX_TOKENS + 5)
        assert (each.stored_tokens, each.hit_tokens) == (stored, stored)
        assert each.hit_source == ("file" if stored else None)
    assert len({each.output_digest for each in record.requests}) == 4
    assert record.comparisons
    assert all(each.tokens_equal for each in record.comparisons)


def test_a_wave_waits_in_the_queue_of_its_instance(record: RestoreRecord) -> None:
    wave = [each for each in record.requests if each.group == "recompute" and each.concurrency == 4]
    assert len({each.sent_s for each in wave}) == 1
    assert sorted(wave, key=lambda each: each.ttft_s or 0) == sorted(wave, key=lambda each: each.ended_s)


def test_the_throttled_root_is_as_slow_as_it_says(record: RestoreRecord) -> None:
    waves = [wave for wave in record.waves if wave.group == "baseline"]
    assert [wave.wanted_bytes for wave in waves] == [2 * 32 * BLOCK_BYTES, 4 * 32 * BLOCK_BYTES]
    for wave in waves:
        assert wave.whole_s >= wave.wanted_bytes / 2e6
    assert "2MB/s" in record.groups[1].facts["throttled"]


def test_instances_of_a_shared_pool_read_what_the_others_stored(record: RestoreRecord) -> None:
    shared = [each for each in record.requests if each.group == "shared"]
    assert {each.instance == each.written_by for each in shared} == {True, False}


def test_nothing_is_left_behind(record: RestoreRecord, root: Path) -> None:
    assert record.requests
    assert not list(root.iterdir())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model": "/no/such", "random": {}}, "no model at /no/such"),
        ({"model": "x"}, "exclude each other"),
        ({"random": {"colour": 1}}, "random has no 'colour'"),
        ({"random": {"layers": "many"}}, "random: Expected `int`"),
        ({"block_tokens": 0}, "block_tokens must be 1 or more"),
        ({"threads": 0}, "threads must be from 1"),
        ({"host_bytes": 4096}, "holds less than 16 blocks"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], error: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=error):
        target_of(group(Role.CANDIDATE, tmp_path, **options), 0)
    assert not list(tmp_path.iterdir())


def test_roots_go_with_roles(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave out its roots"):
        target_of(group(Role.RECOMPUTE, tmp_path), 0)
    with pytest.raises(ConfigError, match="give one or more roots"):
        target_of(group(Role.CANDIDATE), 0)


def test_a_prompt_that_the_model_does_not_take_is_refused() -> None:
    target = target_of(group(Role.RECOMPUTE, random=TINY | {"max_tokens": 128}), 0)
    options = RestoreOptions(group=(group(Role.RECOMPUTE, random=TINY | {"max_tokens": 128}),), concurrency=(1,))
    target.close()
    with pytest.raises(ConfigError, match="takes 128 with its answer"):
        run_restore(options)
