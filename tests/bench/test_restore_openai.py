"""The target that asks servers: cold by restart and by reset, its accounts, its bounds, its processes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_openai import BLOCK_BYTES, Server

from forebay.assemble import Named, open_workload
from forebay.bench.restore.options import GroupOptions, RestoreOptions
from forebay.bench.restore.results import RestoreRecord, Role
from forebay.bench.restore.run import run_restore, target_of
from forebay.bench.restore.serving import keeper
from forebay.bench.restore.serving.accounts import cached_since, cached_so_far
from forebay.bench.restore.serving.endpoint import Endpoint
from forebay.bench.restore.serving.process import free_ports
from forebay.bench.restore.sessions import Sessions, returning, sessions_for
from forebay.cli import cli
from forebay.errors import ConfigError

FAKE = Path(__file__).with_name("fake_openai.py")
WORKLOAD = Named(kind="cold", options={"sessions": 4, "prefix_tokens": 512, "question_tokens": 8, "output_tokens": 3})
COMMAND = [sys.executable, "-S", str(FAKE), "{port}"]
QUICK = {"settle_s": 0.01, "warmup_tokens": 8, "stop_limit_s": 5.0}


def group(role: Role, roots: Sequence[Path] = (), instances: int = 1, **options: Any) -> GroupOptions:
    return GroupOptions(
        name=role.value, role=role, target="openai", roots=tuple(roots), instances=instances, options=QUICK | options
    )


@pytest.fixture
def serve() -> Iterator[Any]:
    made: list[Server] = []

    def start(pool: Path | None = None, *, tells_cached: bool = True) -> Server:
        made.append(Server(0, pool, tells_cached=tells_cached))
        threading.Thread(target=made[-1].serve_forever, args=(0.02,), daemon=True).start()
        return made[-1]

    yield start
    for server in made:
        server.shutdown()
        server.server_close()


def sessions(instances: int = 1, *, is_shared: bool = False) -> Sessions:
    workload = open_workload(WORKLOAD)
    return sessions_for(workload, returning(workload, 4), instances=instances, seed=0, is_shared=is_shared)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def record(root: Path) -> RestoreRecord:
    options = RestoreOptions(
        group=(
            group(Role.RECOMPUTE, command=[*COMMAND, "-"]),
            group(Role.SHARED, [root], 2, command=[*COMMAND, "{pool}"]),
        ),
        workload=WORKLOAD,
        concurrency=(4,),
        rounds=2,
    )
    return run_restore(options)


class TestStarted:
    """Servers of its own, in processes: the whole benchmark, with a restart before each wave."""

    def test_every_request_is_answered_and_accounted_for(self, record: RestoreRecord) -> None:
        assert len(record.requests) == 2 * 2 * 4
        for each in record.requests:
            assert (each.error, each.output_tokens, each.prompt_tokens) == ("", 3, 520)
            stored = 0 if each.group == "recompute" else 512
            assert (each.stored_tokens, each.hit_tokens) == (stored, stored)
            assert each.hit_source == ("file" if stored else None)
        assert [each.tokens_equal for each in record.comparisons] == [True]
        assert not [reason for reason in record.verdict.reasons if "requests" in reason]

    def test_instances_of_a_shared_pool_read_what_the_others_stored(self, record: RestoreRecord) -> None:
        shared = [each for each in record.requests if each.group == "shared"]
        assert {each.instance for each in shared} == {0, 1}
        assert {each.instance == each.written_by for each in shared} == {True, False}

    def test_what_had_to_be_read_is_known_from_what_was_stored(self, record: RestoreRecord) -> None:
        for wave in record.waves:
            assert wave.wanted_bytes == (4 * 512 // 16 * BLOCK_BYTES if wave.group == "shared" else 0)

    def test_the_record_says_what_was_measured(self, record: RestoreRecord) -> None:
        facts = record.groups[1].facts
        assert facts["model"] == "fake-model"
        assert facts["engine"] == "vLLM 0.fake"
        assert facts["made cold by"] == "restart"

    def test_nothing_is_left_behind(self, record: RestoreRecord, root: Path) -> None:
        assert record.requests
        assert not list(root.iterdir())
        assert not [line for line in processes() if str(root) in line]


def processes() -> list[str]:
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                found.append((place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
    return found


def test_a_command_gets_files_and_settings_and_a_throttle(tmp_path: Path) -> None:
    out = tmp_path / "told.json"
    program = (
        "import json, os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(json.dumps("
        "[os.environ['A'], pathlib.Path(sys.argv[2]).read_text(), sys.argv[3]])); sys.exit(3)"
    )
    made = GroupOptions(
        name="throttled", role=Role.BASELINE, target="openai", roots=(tmp_path,), limit="80MB/s",
        options=QUICK | {
            "command": [sys.executable, "-c", program, str(out), "{files}/store.toml", '{"a": {instance}}'],
            "environment": {"A": "{pool1}"},
            "files": {"store.toml": "rate = {limit_bytes_per_s}"},
        },
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"\{pool1\} is a directory in a root that is not given"):
        target_of(made, 0)
    made.options["environment"] = {"A": "{pool}"}
    target = target_of(made, 0)
    with pytest.raises(ConfigError, match=r"group throttled: .*python\S* ended with 3: it said nothing"):
        target.populate(())
    target.close()
    pool, rate, word = json.loads(out.read_text())
    assert Path(pool).parent.parent == tmp_path
    assert (rate, word) == ("rate = 80000000", '{"a": 0}')
    assert [path.name for path in tmp_path.iterdir()] == ["told.json"]


def test_instances_draw_different_ports() -> None:
    assert len(set(free_ports(200))) == 200


def test_a_server_that_does_not_come_up_is_said_with_its_last_words(tmp_path: Path) -> None:
    program = "import sys, time; print('no weights here', flush=True); time.sleep(60)"
    made = group(Role.RECOMPUTE, command=[sys.executable, "-c", program], start_limit_s=0.3)
    target = target_of(made, 0)
    with pytest.raises(ConfigError, match=r"did not answer /health within 0.3 s: no weights here"):
        target.populate(())
    target.close()
    missing = target_of(group(Role.RECOMPUTE, command=["no-such-engine"]), 0)
    with pytest.raises(ConfigError, match=r"no-such-engine ended with 127: .*No such file"):
        missing.populate(())
    missing.close()


class TestRunning:
    def test_a_reset_is_tried_until_it_succeeds(self, serve: Any, tmp_path: Path) -> None:
        server = serve(tmp_path / "pool")
        target = target_of(group(Role.CANDIDATE, [tmp_path / "pool"], urls=[server.url], cold="reset"), 0)
        asked = sessions()
        target.populate(asked.populated)
        target.forget()
        assert server.resets == 2
        wave = target.wave(asked.questions)
        assert [(each.hit_tokens, each.hit_source) for each in wave.answers] == [(512, "file")] * 4
        assert wave.wanted_bytes == 4 * 32 * BLOCK_BYTES
        again = target.wave(asked.questions)
        assert {each.hit_source for each in again.answers} == {"device"}
        assert [each.output_digest for each in again.answers] == [each.output_digest for each in wave.answers]

    def test_a_server_left_warm_is_seen_to_be(self, serve: Any, tmp_path: Path) -> None:
        server = serve(tmp_path / "pool")
        target = target_of(group(Role.CANDIDATE, [tmp_path / "pool"], urls=[server.url], cold="none"), 0)
        target.populate(sessions().populated)
        target.forget()
        assert {each.hit_source for each in target.wave(sessions().questions).answers} == {"device"}

    def test_what_a_server_does_not_tell_is_not_made_up(self, serve: Any) -> None:
        server = serve(tells_cached=False)
        target = target_of(group(Role.CANDIDATE, urls=[server.url], cold="none"), 0)
        target.populate(sessions().populated)
        assert [(each.hit_tokens, each.hit_source) for each in target.wave(sessions().questions).answers] == [
            (None, None)
        ] * 4
        recompute = target_of(group(Role.RECOMPUTE, urls=[server.url], cold="reset"), 0)
        recompute.populate(sessions().populated)
        recompute.forget()
        answers = recompute.wave(sessions().questions).answers
        assert [each.hit_tokens for each in answers] == [0] * 4  # its counters say that nothing was found

    def test_text_for_servers_that_take_no_ids(self, serve: Any, tmp_path: Path) -> None:
        server = serve(tmp_path / "pool")
        options = {"urls": [server.url], "cold": "reset", "prompts": "text", "body": {"seed": 1}}
        target = target_of(group(Role.CANDIDATE, [tmp_path / "pool"], **options), 0)
        target.populate(sessions().populated)
        target.forget()
        wave = target.wave(sessions().questions)
        assert {(each.prompt_tokens, each.stored_tokens, each.hit_tokens) for each in wave.answers} == {(520, 512, 512)}
        assert all(isinstance(asked["prompt"], str) and asked["seed"] == 1 for asked in server.asked)
        assert len({each.output_digest for each in wave.answers}) == 4

    def test_a_failed_request_is_an_answer_with_an_error(self, serve: Any) -> None:
        server, gone = serve(), serve()
        target = target_of(group(Role.CANDIDATE, urls=[server.url, gone.url], cold="none", instances=2), 0)
        asked = sessions(2)
        target.populate(asked.populated)
        gone.shutdown()
        gone.server_close()
        answers = target.wave(asked.questions).answers
        assert [each.session for each in answers] == [0, 1, 2, 3]
        assert [bool(each.error) for each in answers] == [False, True, False, True]
        assert answers[1].first_token_ns is None

    def test_a_prompt_that_cannot_be_stored_ends_the_run_with_a_hint(self, serve: Any) -> None:
        target = target_of(group(Role.CANDIDATE, urls=[serve().url], cold="none", body={"stream_options": 1}), 0)
        target.populate(sessions().populated)  # what the target needs wins over more fields
        refused = target_of(group(Role.CANDIDATE, urls=[f"{serve().url}/nowhere"], model="m", cold="none"), 0)
        with pytest.raises(ConfigError, match=r"HTTP 404.*prompts = 'text'"):
            refused.populate(sessions().populated)

    def test_a_pool_elsewhere_than_the_roots_is_noticed(self, serve: Any, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        made = group(Role.CANDIDATE, [tmp_path / "elsewhere"], urls=[serve(tmp_path / "pool").url], cold="reset")
        with pytest.raises(ConfigError, match="nothing new was stored in the roots"):
            target_of(made, 0).populate(sessions().populated)

    def test_keys_are_sent_and_not_recorded(self, serve: Any, tmp_path: Path) -> None:
        (tmp_path / "key").write_text("s3cret\n")
        made = group(Role.RECOMPUTE, urls=[serve().url], cold="none", api_key_file=str(tmp_path / "key"))
        target = target_of(made, 0)
        target.populate(())
        assert "s3cret" not in json.dumps(target.describe().facts)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "give either urls"),
        ({"urls": ["http://h:1"], "command": ["x"], "cold": "none"}, "give either urls"),
        ({"urls": ["http://h:1", "http://h:2"], "cold": "none"}, "2 urls for 1 instances"),
        ({"urls": ["http://h:1"]}, "only what a command started can be restarted"),
        ({"urls": ["h:1"], "cold": "none"}, "is no address of a server"),
        ({"urls": ["http://h:1"], "cold": "none", "api_key_file": "/no/such"}, "cannot read"),
        ({"command": ["x", "{pool}"]}, "in a root that is not given"),
        ({"command": ["x", "{line}"]}, "need a limit"),
        ({"command": ["x"], "files": {"../x": ""}}, "is no name of a file"),
        ({"command": ["x"], "vocabulary": [5, 5]}, "vocabulary"),
        ({"command": ["x"], "block_tokens": 0}, "block_tokens"),
        ({"command": ["x"], "answer_limit_s": -1.0}, "answer_limit_s"),
        ({"command": ["x"], "reset_path": "http://else"}, "reset_path"),
        ({"command": ["x"], "colour": "red"}, "colour"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        target_of(group(Role.CANDIDATE, **options), 0)


def test_a_limit_that_nothing_keeps_to_is_refused(tmp_path: Path) -> None:
    made = GroupOptions(
        name="b", role=Role.BASELINE, target="openai", roots=(tmp_path,), limit="1MB/s", options={"command": ["x"]}
    )
    with pytest.raises(ConfigError, match="cannot be throttled from outside"):
        target_of(made, 0)


class TestKeeper:
    """A command, its orphans, and an asker that is killed."""

    STUBBORN = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        " time.sleep(300)', sys.argv[1]], start_new_session=True)\n"
        "print('up', flush=True)\n"
        "time.sleep(300)\n"
    )

    def test_all_ends_when_the_asker_is_killed(self, tmp_path: Path) -> None:
        mark = str(tmp_path / "mark")
        asker = (
            "import subprocess, sys\n"
            "kept = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.PIPE)\n"
            "print(kept.pid, flush=True)\n"
            "kept.wait()\n"
        )
        command = [sys.executable, "-c", asker, keeper.__file__, "0.2", sys.executable, "-c", self.STUBBORN, mark]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asked:
            assert asked.stdout is not None
            first = [asked.stdout.readline().strip() for _ in range(2)]
            pid = int(next(line for line in first if line.isdecimal()))
            assert any(mark in line for line in processes())
            gone = os.pidfd_open(pid)
            asked.send_signal(signal.SIGKILL)
        wait_for(gone)
        assert not [line for line in processes() if mark in line]

    def test_the_code_of_the_command_is_passed_on(self) -> None:
        for program, code in (("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)):
            ended = subprocess.run([sys.executable, keeper.__file__, "1", sys.executable, "-c", program], check=False,
                                   stdin=subprocess.DEVNULL)  # fmt: skip
            assert ended.returncode in (code, 128 + 15)  # no asker at all: it may be asked to end before it does


def wait_for(pidfd: int) -> None:
    ready, _, _ = select.select([pidfd], [], [], 30)
    os.close(pidfd)
    assert ready, "the keeper did not end"


def test_counters_of_vllm_and_sglang(serve: Any) -> None:
    server = serve()
    endpoint = Endpoint.of(server.url)
    before = cached_so_far(endpoint)
    assert before == {"device": 0, "disk": 0}
    server.cache.cached["disk"] += 64
    assert cached_since(before, cached_so_far(endpoint)) == {"disk": 64}
    assert cached_since(before, None) is None
    assert cached_so_far(Endpoint("127.0.0.1", 1)) is None


def test_a_signed_bundle_verifies_until_one_byte_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    (tmp_path / "out").mkdir()
    (tmp_path / "pool").mkdir()
    (tmp_path / "plan.toml").write_text(
        PLAN.format(command=json.dumps([*COMMAND, "{pool}"]), root=tmp_path / "pool", settle_s=0.01)
    )
    bundle, key = tmp_path / "evidence.zip", tmp_path / "key"
    call = CliRunner().invoke
    assert call(cli, ["bundle", "keygen", str(key)]).exit_code == 0
    command = ["bench", "restore", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "out"), "--key", str(key)]
    assert "--key signs a bundle" in str(call(cli, command).exception)
    plan = (tmp_path / "plan.toml").read_bytes()

    def and_edit_the_plan(*given: Any, **more: Any) -> RestoreRecord:
        (tmp_path / "plan.toml").write_text("another")
        return run_restore(*given, **more)

    monkeypatch.setattr("forebay.bench.restore.run.run_restore", and_edit_the_plan)
    ran = call(cli, [*command, "--bundle", str(bundle)])
    assert ran.exit_code in (0, 3), ran.output
    verify = ["bundle", "verify", str(bundle), "--key", f"{key}.pub"]
    assert call(cli, verify, standalone_mode=False).return_value == 0
    whole = bytearray(bundle.read_bytes())
    with zipfile.ZipFile(bundle) as found:
        assert {"plan.toml", "restore.json", "requests.jsonl", "restore.svg"} <= set(found.namelist())
        assert found.read("plan.toml") == plan  # the one that ran
        place = found.getinfo("restore.json").header_offset + 1000
    whole[place] ^= 1
    bundle.write_bytes(whole)
    assert call(cli, verify, standalone_mode=False).return_value == 1


PLAN = """
concurrency = [2]
rounds = 1
[workload]
kind = "cold"
options = {{ sessions = 2, prefix_tokens = 256, question_tokens = 8, output_tokens = 2 }}
[[group]]
name = "pool"
role = "candidate"
target = "openai"
roots = ["{root}"]
options = {{ command = {command}, settle_s = {settle_s}, warmup_tokens = 0 }}
"""
