from __future__ import annotations

import dataclasses
import random
import threading
from pathlib import Path

import pytest

from forebay.assemble import Named, RateLimit, StoreConfig, TierConfig, open_engine, read_config
from forebay.engine import Engine
from forebay.errors import ConfigError
from forebay.hostpool import HostPool
from forebay.ports import DevicePort
from forebay.testing.schedule import BLOCK_BYTES, NAMESPACE, Chances, ModelDevice


def open_store(config: StoreConfig) -> Engine:
    return open_engine(config, NAMESPACE, lambda pool: ModelDevice(pool, 8, Chances(), random.Random(0)))


def memory(name: str = "memory", **options: object) -> TierConfig:
    return TierConfig(kind="memory", options={"name": name, "capacity_bytes": 100 * BLOCK_BYTES, **options})


def test_a_toml_file_becomes_an_engine(tmp_path: Path) -> None:
    path = tmp_path / "store.toml"
    path.write_text(
        f"""
        host_bytes = 65536
        host_eviction = {{ kind = "lru" }}

        [[tiers]]
        kind = "file"
        options = {{ roots = [{{ path = "{tmp_path / "root"}" }}], capacity_bytes = 1000000 }}
        eviction = {{ kind = "lrfu", options = {{ half_life = 50.0 }} }}

        [engine]
        batch_blocks = 8
        """
    )
    engine = open_store(read_config(path))
    engine.check_idle()
    engine.close()
    assert (tmp_path / "root" / "forebay-pool.json").is_file()


def test_the_embedded_default_is_one_file_tier(tmp_path: Path) -> None:
    config = StoreConfig.embedded([tmp_path / "root"], host_bytes=2**20, capacity_bytes=2**20)
    assert [tier.kind for tier in config.tiers] == ["file"]
    open_store(config).close()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (StoreConfig(host_bytes=2**20, tiers=(TierConfig(kind="tape"),)), "no 'tape' among the tiers"),
        (StoreConfig(host_bytes=2**20, tiers=(TierConfig(kind="json.decoder"),)), "not one of the tiers"),
        (StoreConfig(host_bytes=2**20, tiers=(memory(speed=1),)), "options of memory: .*unknown field `speed`"),
        (
            StoreConfig(host_bytes=2**20, limits=(RateLimit(tier="tape", traffic="write", bytes_per_s=1e9),)),
            "no tier is named 'tape'",
        ),
        (
            StoreConfig(
                host_bytes=2**20,
                tiers=(memory(),),
                limits=(RateLimit(tier="memory", traffic="write", bytes_per_s=0.0),),
            ),
            "must be above 0 bytes a second",
        ),
        (StoreConfig(host_bytes=2**20, tiers=(memory(), memory())), "two tiers are named 'memory'"),
        (StoreConfig(host_bytes=2**20, tiers=(memory("host"),)), "two tiers are named 'host'"),
        (StoreConfig(host_bytes=2**20, host_eviction=Named(kind="random")), "no 'random' among the policies"),
        (StoreConfig(host_bytes=4096), "needs 2 slots or more"),
        *(
            (StoreConfig(host_bytes=2**20, host_eviction=Named(kind=kind)), "names none of the policies")
            for kind in ("..", ".x", "x.", "", " ", "a b", "\0", "\udcff")
        ),
    ],
)
def test_a_bad_configuration_is_refused_in_one_line(config: StoreConfig, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        open_store(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"), [("model", "\udcff"), ("layout", "x\ud800"), ("block_tokens", 0), ("block_bytes", -5)]
)
def test_a_namespace_that_cannot_be_is_refused_in_one_line(field: str, value: object, tmp_path: Path) -> None:
    config = StoreConfig.embedded([tmp_path / "root"], host_bytes=2**20, capacity_bytes=2**20)
    namespace = dataclasses.replace(NAMESPACE, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=field if isinstance(value, str) else "or more") as caught:
        open_engine(config, namespace, lambda pool: ModelDevice(pool, 8, Chances(), random.Random(0)))
    str(caught.value).encode()
    assert list(tmp_path.iterdir()) == []


def test_an_open_that_fails_late_leaves_no_thread_behind(tmp_path: Path) -> None:
    config = StoreConfig.embedded([tmp_path / "root"], host_bytes=2**20, capacity_bytes=2**20)

    def no_device(pool: HostPool) -> DevicePort:
        raise ConfigError("device memory too small")

    before = threading.active_count()
    with pytest.raises(ConfigError, match="device memory too small"):
        open_engine(config, NAMESPACE, no_device)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("host_bytes = ", "Invalid value"),
        ("host_byte = 1", "unknown field `host_byte`"),
        ("host_bytes = 'much'", "Expected `int`, got `str` - at `\\$.host_bytes`"),
    ],
)
def test_a_bad_file_is_named_with_its_fault(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "store.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere.toml: No such file"):
        read_config(tmp_path / "nowhere.toml")


def test_the_example_configuration_is_valid() -> None:
    config = read_config(Path(__file__).parents[1] / "examples" / "store.toml")
    assert config.host_bytes == 8 * 2**30
    assert [tier.kind for tier in config.tiers] == ["file"]
