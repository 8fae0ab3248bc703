"""`forebay vllm-args`: the options that put a pool under vLLM, ready to paste behind `vllm serve MODEL`."""

from __future__ import annotations

import math
import os
import shlex
from pathlib import Path
from typing import Any

import click
import msgspec

from forebay.cli.progress import Bytes
from forebay.connectors.vllm.options import GIB, read_options
from forebay.connectors.vllm.tier_options import read_tier_options
from forebay.errors import ConfigError

_FREE_SHARE = 0.8
"""Of what is free on the pool's file system, when no capacity is given."""
_BESIDE = ("--prefix-caching-hash-algo", "sha256_cbor", "--shutdown-timeout", "15")
"""Options of vLLM's own. Without a timeout a stopped server kills its engine at once, with blocks on their way."""


@click.command("vllm-args")
@click.argument("pool", type=click.Path(path_type=Path, file_okay=False))
@click.option("--native", is_flag=True, help="As a tier below vLLM's own DRAM tier, instead of as a connector.")
@click.option(
    "--cpu-gib", type=float, default=8.0, show_default=True, help="DRAM for KV in GiB, for all ranks together."
)
@click.option(
    "--capacity",
    type=Bytes(),
    metavar="SIZE",
    help="Room for blocks in the pool, for all ranks together, such as 500GiB. Default: 80 % of what is free there.",
)
@click.option("--identity", default="", help="A name for exactly these weights, instead of reading the weight files.")
@click.option("--json", "as_json", is_flag=True, help="Only the JSON, on one line.")
def vllm_args(pool: Path, native: bool, cpu_gib: float, capacity: int | None, identity: str, as_json: bool) -> None:
    """Print the options of `vllm serve` that keep its KV cache in POOL, a directory.

    In a script: vllm serve MODEL --prefix-caching-hash-algo sha256_cbor --shutdown-timeout 15 --kv-transfer-config
    "$(forebay vllm-args POOL --json)"
    """
    root = str(_placed(pool))
    capacity_gib = _capacity_gib(pool, capacity)
    shared: dict[str, Any] = {"pool": root, "capacity_gib": capacity_gib}
    if identity:
        shared["identity"] = identity
    if not 0 < cpu_gib * GIB < math.inf:
        raise ConfigError(f"--cpu-gib must be a finite number above 0, not {cpu_gib}")
    config = _native(shared, cpu_gib) if native else _connector(shared, cpu_gib)
    text = msgspec.json.encode(config).decode()
    arguments = ["--kv-transfer-config", text, *_BESIDE]
    click.echo(text if as_json else shlex.join(arguments))


def _connector(shared: dict[str, Any], cpu_gib: float) -> dict[str, Any]:
    options = {**shared, "host_gib": cpu_gib}
    read_options(options)
    return {
        "kv_connector": "ForebayConnector",
        "kv_connector_module_path": "forebay.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": options,
    }


def _native(shared: dict[str, Any], cpu_gib: float) -> dict[str, Any]:
    read_tier_options(shared)
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": int(cpu_gib * GIB),
            "secondary_tiers": [{"type": "forebay", "module_path": "forebay.connectors.vllm.tier", **shared}],
        },
    }


def _placed(pool: Path) -> Path:
    """Absolute. vLLM makes a pool when it starts, but only where its parent is: else the disk may not be mounted."""
    absolute = pool.absolute()
    if not absolute.parent.is_dir():
        raise ConfigError(
            f"{absolute.parent} is no directory: mount its disk or make it, then a pool can be made in it"
        )
    return absolute


def _capacity_gib(pool: Path, capacity_bytes: int | None) -> float:
    if capacity_bytes is not None:
        if capacity_bytes <= 0:
            raise ConfigError("--capacity must be above 0")
        return round(capacity_bytes / GIB, 3)
    place = pool.absolute() if pool.exists() else pool.absolute().parent
    space = os.statvfs(place)
    capacity_gib = round(space.f_bavail * space.f_frsize * _FREE_SHARE / GIB, 1)
    if not capacity_gib > 0:
        raise ConfigError(f"nothing is free on the file system of {place}: make room, or give --capacity")
    click.echo(f"capacity: {capacity_gib} GiB, {_FREE_SHARE:.0%} of what is free at {place}", err=True)
    return capacity_gib
