"""`forebay bench restore` against the real vLLM: the plan of examples/restore-vllm.toml at a small size, signed."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from forebay.bench.evidence import Kernel, Validity
from forebay.bench.restore.results import RestoreRecord
from forebay.cli import cli
from forebay.testing.small_models import TELLING, save_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "restore-vllm.toml"
BLOCK_TOKENS, PREFIX_TOKENS, QUESTION_TOKENS, OUTPUT_TOKENS = 32, 768, 8, 6
TOKEN_BYTES = 1024
"""float32, K and V, 2 layers of 2 heads of 32."""
HOST_BLOCKS, RATE_BYTES_PER_S = 64, 4_000_000


def small(text: str, model: Path, pool: Path) -> str:
    """The example with another model, fewer tokens, a slower throttle, and one round."""
    for before, after in {
        "rounds = 3": "rounds = 1",
        "control_drift = 0.25": "rounds = 1\nforeign_share = 1e9",  # other tests may be at the disk
        "prefix_tokens = 3072, question_tokens = 16, output_tokens = 8": (
            f"prefix_tokens = {PREFIX_TOKENS}, question_tokens = {QUESTION_TOKENS}, output_tokens = {OUTPUT_TOKENS}"
        ),
        "vocabulary = [0, 8000]": "vocabulary = [0, 500]\nsettle_s = 0.5",
        "host_bytes = 25_200_000": f"host_bytes = {HOST_BLOCKS * BLOCK_TOKENS * TOKEN_BYTES}",
        '"75MB/s"': f'"{RATE_BYTES_PER_S // 10**6}MB/s"',
        '"vllm", "serve", "model"': f'"{Path(sys.executable).with_name("vllm")}", "serve", "{model}"',
        'roots = ["pool"]': f'roots = ["{pool}"]',
    }.items():
        assert before in text
        text = text.replace(before, after)
    return text


def test_a_signed_run_of_the_example_restores_what_computing_gives(
    make_model: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    model, pool, plan, key, bundle = (tmp_path / name for name in ("model", "pool", "plan.toml", "key", "run.zip"))
    make_model(path=model)  # type: ignore[operator]
    save_tokenizer(model, TELLING)
    pool.mkdir()
    plan.write_text(small(EXAMPLE.read_text(), model, pool))
    call = CliRunner().invoke
    assert call(cli, ["bundle", "keygen", str(key)]).exit_code == 0
    ran = call(
        cli, ["bench", "restore", str(plan), "--out", str(tmp_path), "--bundle", str(bundle), "--key", str(key)]
    )  # fmt: skip
    record = msgspec.json.decode((tmp_path / "restore.json").read_bytes(), type=RestoreRecord)
    check(record, has_a_disk=not Kernel().medium_of(pool).doubt)
    assert ran.exit_code == (0 if record.verdict.validity is Validity.VALID else 3), ran.output
    assert not list(pool.iterdir())

    verify = ["bundle", "verify", str(bundle), "--key", f"{key}.pub"]
    assert call(cli, verify, standalone_mode=False).return_value == 0
    with zipfile.ZipFile(bundle) as found:
        assert found.read("plan.toml") == plan.read_bytes()
        place = found.getinfo("requests.jsonl").header_offset + 500
    changed = bytearray(bundle.read_bytes())
    changed[place] ^= 1
    bundle.write_bytes(changed)
    assert call(cli, verify, standalone_mode=False).return_value == 1


def check(record: RestoreRecord, *, has_a_disk: bool) -> None:
    assert [(each.name, each.facts["engine"][:7]) for each in record.groups] == [
        ("recompute", "vLLM 0."), ("baseline", "vLLM 0."), ("candidate", "vLLM 0."),
    ]  # fmt: skip
    assert len(record.requests) == 3 * (2 + 4)
    for each in record.requests:
        found = 0 if each.group == "recompute" else PREFIX_TOKENS
        assert (each.error, each.output_tokens, each.prompt_tokens) == (
            "", OUTPUT_TOKENS, PREFIX_TOKENS + QUESTION_TOKENS,
        )  # fmt: skip
        assert (each.stored_tokens, each.hit_tokens, each.hit_source) == (found, found, "file" if found else None)
    assert [each.tokens_equal for each in record.comparisons] == [True] * 6  # three pairs, 2 and 4 at once
    assert len({each.output_digest for each in record.requests}) == 4  # each session has its own answer
    for wave in record.waves:
        if wave.group == "baseline":
            assert wave.wanted_bytes > wave.concurrency * PREFIX_TOKENS * TOKEN_BYTES
            assert wave.whole_s > 0.9 * wave.concurrency * PREFIX_TOKENS * TOKEN_BYTES / RATE_BYTES_PER_S
    assert (record.verdict.validity is Validity.VALID) == has_a_disk, record.verdict.reasons
