"""`forebay vllm-args`: what it prints is what vLLM and the connectors accept."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from forebay.cli import run as run_command_line
from forebay.cli.vllm_args import vllm_args
from forebay.connectors.vllm.options import read_options
from forebay.connectors.vllm.tier_options import TierOptions, read_tier_options
from forebay.errors import ConfigError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(vllm_args, arguments)


def config(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def test_the_connector(tmp_path: Path) -> None:
    given = config(str(tmp_path / "pool"), "--capacity", "500GiB", "--cpu-gib", "4")
    assert given["kv_connector"] == "ForebayConnector"
    assert given["kv_connector_module_path"] == "forebay.connectors.vllm"
    assert given["kv_load_failure_policy"] == "recompute"
    options = read_options(given["kv_connector_extra_config"])
    assert (options.pool, options.capacity_gib, options.host_gib) == (str(tmp_path / "pool"), 500.0, 4.0)


def test_the_native_tier(tmp_path: Path) -> None:
    given = config(str(tmp_path / "pool"), "--native", "--capacity", "1TiB", "--cpu-gib", "2", "--identity", "m-1")
    assert given["kv_connector"] == "OffloadingConnector"
    assert given["kv_load_failure_policy"] == "recompute"
    extra = given["kv_connector_extra_config"]
    assert extra["spec_name"] == "TieringOffloadingSpec"
    assert extra["cpu_bytes_to_use"] == 2 * 2**30
    (tier,) = extra["secondary_tiers"]
    assert (tier.pop("type"), tier.pop("module_path")) == ("forebay", "forebay.connectors.vllm.tier")
    assert read_tier_options(tier) == TierOptions(pool=str(tmp_path / "pool"), capacity_gib=1024.0, identity="m-1")


def test_a_line_to_paste(tmp_path: Path) -> None:
    result = run(str(tmp_path / "my pool"), "--capacity", "1GiB")
    flag, text, *beside = shlex.split(result.stdout)
    assert flag == "--kv-transfer-config"
    assert beside == ["--prefix-caching-hash-algo", "sha256_cbor", "--shutdown-timeout", "15"]
    assert json.loads(text)["kv_connector_extra_config"]["pool"] == str(tmp_path / "my pool")


def test_the_pool_is_named_absolutely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert config("pool", "--capacity", "1GiB")["kv_connector_extra_config"]["pool"] == str(tmp_path / "pool")


def test_the_default_capacity_is_said(tmp_path: Path) -> None:
    result = run(str(tmp_path / "yet to be"), "--json")
    capacity_gib = json.loads(result.stdout)["kv_connector_extra_config"]["capacity_gib"]
    assert capacity_gib > 0
    assert f"capacity: {capacity_gib} GiB" in result.stderr
    assert str(tmp_path) in result.stderr


@pytest.mark.parametrize("place", ["missing/pool", "file/pool"])
@pytest.mark.parametrize("more", [(), ("--capacity", "1GiB"), ("--native",)])
def test_a_pool_with_nothing_to_make_it_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, more: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    assert run_command_line(["vllm-args", str(tmp_path / place), *more]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert str((tmp_path / place).parent) in said.err


@pytest.mark.parametrize("arguments", [("--capacity", "500"), ("--capacity", "0GiB"), ("--cpu-gib", "0")])
def test_sizes_that_make_no_sense(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = run(str(tmp_path), "--capacity", "1GiB", *arguments)
    assert result.exit_code != 0
    assert result.stdout == ""


@pytest.mark.parametrize("more", [(), ("--native",)])
@pytest.mark.parametrize("cpu_gib", ["inf", "nan", "1e305", "-1"])
def test_no_number_of_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cpu_gib: str, more: tuple[str, ...]
) -> None:
    pool = ["vllm-args", str(tmp_path / "pool"), "--capacity", "1GiB"]
    assert run_command_line([*pool, "--cpu-gib", cpu_gib, *more]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "--cpu-gib" in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -1.0, 1e305])
@pytest.mark.parametrize("name", ["capacity_gib", "host_gib", "lookup_deadline_s", "held_share", "drain_s"])
def test_bad_numbers_of_the_connector_are_named(name: str, bad: float) -> None:
    with pytest.raises(ConfigError, match=name) as refused:
        read_options({"pool": "/p", "capacity_gib": 1.0, name: bad})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"capacity_gib": 1.0}, "pool"),
        ({"pool": "/p"}, "capacity_gib"),
        ({"pool": "/p", "capacity_gib": 0}, "capacity_gib"),
        ({"pool": "/p", "capacity_gib": 1.0, "capacity_gb": 2}, "capacity_gb"),
        ({"pool": "/p", "capacity_gib": 1.0, "eviction": "best"}, "eviction"),
        ({"pool": "/p", "capacity_gib": 1.0, "locality": "near"}, "locality"),
        ({"pool": "/p", "capacity_gib": 1.0, "lookup_deadline_s": -1}, "lookup_deadline_s"),
        ({"pool": "/p", "capacity_gib": float("inf")}, "capacity_gib"),
        ({"pool": "/p", "capacity_gib": 1.0, "lookup_deadline_s": float("nan")}, "lookup_deadline_s"),
        ({"pool": "/p", "capacity_gib": 1.0, "turn_s": float("inf")}, "turn_s"),
        ({"pool": "/p", "capacity_gib": 1.0, "file": {"shared": True}}, "shared"),
    ],
)
def test_bad_options_of_the_native_tier_are_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        read_tier_options(given)
    assert "\n" not in str(refused.value)


def test_several_directories() -> None:
    options = read_tier_options({"pool": ["/a", "/b"], "capacity_gib": 1.0, "file": {"reads_in_flight": 4}})
    assert options.roots == ("/a", "/b")
