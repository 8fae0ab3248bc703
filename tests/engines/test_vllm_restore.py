"""The restore benchmark's target for servers against the real vLLM: hits, where they came from, a throttled tier."""

from __future__ import annotations

import json
import os
from pathlib import Path

from forebay.assemble import Named, open_workload
from forebay.bench.restore.options import GroupOptions
from forebay.bench.restore.results import Role
from forebay.bench.restore.run import target_of
from forebay.bench.restore.sessions import returning, sessions_for
from forebay.testing.small_models import TELLING, save_tokenizer
from forebay.testing.vllm_server import serving

BLOCK_TOKENS, PREFIX_TOKENS, SESSIONS = 32, 768, 6
HOST_BYTES, RATE_BYTES_PER_S = 2_000_000, 4_000_000
STORE = """
host_bytes = {host}
engine = {{ probe_deadline_s = 2.0 }}
[[tiers]]
kind = "forebay.bench.restore.throttled"
[tiers.options]
read_bytes_per_s = {rate}.0
[tiers.options.tier]
kind = "file"
options = {{ name = "file", roots = [{{ path = "{pool}" }}], capacity_bytes = 1_000_000_000, shared = true }}
"""


def test_cold_sessions_are_restored_as_they_would_be_computed(make_model: object, tmp_path: Path) -> None:
    model, pool, store = tmp_path / "model", tmp_path / "pool", tmp_path / "store.toml"
    make_model(path=model)  # type: ignore[operator]
    save_tokenizer(model, TELLING)
    pool.mkdir()
    store.write_text(STORE.format(host=HOST_BYTES, rate=RATE_BYTES_PER_S, pool=pool))
    connector = {
        "kv_connector": "ForebayConnector", "kv_connector_module_path": "forebay.connectors.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config": str(store)},
    }  # fmt: skip
    settings = {
        "dtype": "float32", "block-size": BLOCK_TOKENS, "max-model-len": 1024, "num-gpu-blocks-override": 256,
        "seed": 0, "prefix-caching-hash-algo": "sha256_cbor", "kv-transfer-config": json.dumps(connector),
    }  # fmt: skip
    arguments = [argument for name, value in settings.items() for argument in (f"--{name}", str(value))]
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1", "PYTHONHASHSEED": "0",
        "VLLM_LOGGING_LEVEL": "INFO",
    }  # fmt: skip
    with serving(model, [*arguments, "--enforce-eager", "--enable-prompt-tokens-details"], environment) as server:
        check(server.url, pool)


def check(url: str, pool: Path) -> None:
    given = {"sessions": SESSIONS, "prefix_tokens": PREFIX_TOKENS, "question_tokens": 8, "output_tokens": 6}
    workload = open_workload(Named(kind="cold", options=given))
    sessions = sessions_for(workload, returning(workload, SESSIONS), instances=1, seed=0, is_shared=False)
    options = {
        "urls": [url], "cold": "reset", "block_tokens": BLOCK_TOKENS, "vocabulary": [0, 500], "settle_s": 0.5,
    }  # fmt: skip
    candidate = target_of(
        GroupOptions(name="pool", role=Role.CANDIDATE, target="openai", roots=(pool,), options=options), 0
    )
    candidate.populate(sessions.populated)
    assert candidate.describe().facts["engine"].startswith("vLLM 0.")
    candidate.forget()
    restored = candidate.wave(sessions.questions)
    for answer in restored.answers:
        assert (answer.error, answer.output_tokens, answer.prompt_tokens) == ("", 6, PREFIX_TOKENS + 8)
        assert (answer.stored_tokens, answer.hit_tokens, answer.hit_source) == (PREFIX_TOKENS, PREFIX_TOKENS, "file")
    assert restored.wanted_bytes > SESSIONS * PREFIX_TOKENS * 1024  # float32, K and V, 2 layers of 2 heads of 32
    took_s = (max(a.ended_ns for a in restored.answers) - min(a.sent_ns for a in restored.answers)) / 1e9
    assert took_s > 0.9 * (SESSIONS * PREFIX_TOKENS * 1024 - HOST_BYTES) / RATE_BYTES_PER_S  # the rest may be in DRAM

    warm = candidate.wave(sessions.questions)
    assert {answer.hit_source for answer in warm.answers} == {"device"}

    options |= {"reset_path": "/reset_prefix_cache?reset_external=true"}  # which deletes what the connector stored
    recompute = target_of(
        GroupOptions(name="recompute", role=Role.RECOMPUTE, target="openai", options=options), 0
    )  # fmt: skip
    recompute.populate(())
    recompute.forget()
    computed = recompute.wave(sessions.questions)
    assert [(answer.error, answer.hit_tokens) for answer in computed.answers] == [("", 0)] * SESSIONS
    assert [a.output_digest for a in computed.answers] == [a.output_digest for a in restored.answers]
    assert len({answer.output_digest for answer in computed.answers}) == SESSIONS
