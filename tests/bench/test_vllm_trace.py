"""What `bench/vllm_trace.py` says of a trace that it cannot send, before it starts a server. vLLM is not needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "vllm_trace.py"
SHORT = json.dumps({"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]})
LONG = json.dumps({"timestamp": 1, "input_length": 60000, "output_length": 9, "hash_ids": [1]})


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        (None, "cannot read the trace {path}: No such file or directory"),
        (f"{SHORT}\n[1]\n", "{path}: line 2 is no request in Mooncake's form"),
        (f"{SHORT}\n{LONG}\n", "{path} has 1 requests of up to 32768 tokens, not 2"),
    ],
    ids=["missing", "foreign", "short"],
)
def test_a_trace_that_cannot_be_sent_is_refused_in_one_line(tmp_path: Path, trace: str | None, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    if trace is not None:
        path.write_text(trace)
    ended = subprocess.run([sys.executable, BENCH, path, "--requests", "2"], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"vllm_trace.py: {words.format(path=path)}\n"
