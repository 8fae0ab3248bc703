"""The contract suite and the state machine, on every tier of ours."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from file_tier_kit import block_file, digest_of, flip, open_tier
from hypothesis import settings

from forebay.ports import Tier
from forebay.testing.fault import FaultPlan, FaultTier
from forebay.testing.tier_contract import Subject, TierContract, TierMachine, namespace_of
from forebay.tiers import memory
from forebay.tiers.file import DirectMode, Io
from forebay.tiers.memory import MemoryTier
from forebay.types import BlockKey


def memory_tier(block_bytes: int) -> MemoryTier:
    namespace = namespace_of(block_bytes)
    return memory.build(memory.Options(capacity_bytes=2**24), namespace, digest_of(namespace))


class TestMemoryTier(TierContract):
    @pytest.fixture
    def subject(self) -> Subject:
        made: list[MemoryTier] = []

        def make(block_bytes: int) -> Tier:
            made.append(memory_tier(block_bytes))
            return made[-1]

        return Subject(make=make, damage=lambda key: made[-1].damage(key))


@pytest.mark.usefixtures("io")
class TestFileTier(TierContract):
    @pytest.fixture(params=[DirectMode.AUTO, DirectMode.NEVER])
    def direct(self, request: pytest.FixtureRequest) -> DirectMode:
        return request.param

    @pytest.fixture
    def subject(self, tmp_path: Path, direct: DirectMode) -> Subject:
        return Subject(
            make=lambda block_bytes: open_tier(tmp_path / "a", block_bytes=block_bytes, direct=direct),
            survives_close=True,
            damage=lambda key: flip(block_file(tmp_path / "a", key), 4096 + 1234),
        )


@pytest.mark.usefixtures("io")
class TestFileTierOverThreeRoots(TierContract):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Subject:
        roots = [tmp_path / name for name in "abc"]

        def damage(key: BlockKey) -> None:
            [path] = [path for root in roots if (path := block_file(root, key)).exists()]
            flip(path, 4096)

        return Subject(
            make=lambda block_bytes: open_tier(*roots, block_bytes=block_bytes), survives_close=True, damage=damage
        )


class TestFaultTierWithoutFaults(TierContract):
    @pytest.fixture
    def subject(self) -> Subject:
        return Subject(make=lambda block_bytes: FaultTier(memory_tier(block_bytes), FaultPlan(seed=1)))


class MemoryMachine(TierMachine):
    def make_tier(self) -> Tier:
        return memory_tier(self.block_bytes)


class FileMachine(TierMachine):
    survives_close = True
    io = Io.AUTO

    def __init__(self) -> None:
        super().__init__()
        self.storage = Path(tempfile.mkdtemp(prefix="forebay-machine-"))

    def make_tier(self) -> Tier:
        return open_tier(self.storage / "a", self.storage / "b", reads_in_flight=1, writes_in_flight=1, io=self.io)

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.storage)


class PythonFileMachine(FileMachine):
    io = Io.PYTHON


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestFileMachine = FileMachine.TestCase
TestFileMachine.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)
TestPythonFileMachine = PythonFileMachine.TestCase
TestPythonFileMachine.settings = TestFileMachine.settings
