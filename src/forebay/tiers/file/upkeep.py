"""A root's catalogue in the hands of an operator's command: told of what the command removes or finds."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from forebay.tiers.file import layout
from forebay.tiers.file.catalogue import Catalogue, CatalogueSettings, boot_digest
from forebay.tiers.file.directio import REAL_CALLS
from forebay.tiers.file.rebuild import log_progress
from forebay.types import BlockKey

_PATIENCE_S = 60.0
"""Nothing else waits for a command: so it need not give up as early as a store."""


class Upkeep:
    """A context around the command. The catalogue is opened when it is first needed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._opening = threading.Lock()
        self._opened: Catalogue | None = None

    def __enter__(self) -> Upkeep:
        return self

    def __exit__(self, *_: object) -> None:
        if self._opened is not None:
            self._opened.close()

    @property
    def catalogue(self) -> Catalogue:
        with self._opening:
            if self._opened is None:
                settings = CatalogueSettings(
                    calls=REAL_CALLS, now_s=time.time, boot=boot_digest(), tenant=bytes(32), limits={},
                    progress=log_progress, patience_s=_PATIENCE_S,
                )  # fmt: skip
                self._opened = Catalogue(self._root, settings)
            return self._opened

    def remove(self, file: layout.BlockFile) -> bool:
        """Whether it was there to be removed. Raises OSError when it cannot be."""
        with self.removing(file):
            return layout.remove_block(file)

    def removing(self, file: layout.BlockFile) -> contextlib.AbstractContextManager[None]:
        """Around whatever moves or removes the file. Any thread."""
        return self.catalogue.removing(bytes.fromhex(file.namespace_hex), (file.key,))

    def compare(self, found: Iterable[tuple[str, BlockKey]]) -> int:
        """Put right what the catalogue says too much and too little, given all blocks; returns of how many blocks."""
        there: dict[bytes, set[BlockKey]] = {}
        for namespace_hex, key in found:
            there.setdefault(bytes.fromhex(namespace_hex), set()).add(key)
        known = {space.digest: set(space.held) for space in self.catalogue.spaces()}
        wrong = 0
        for digest in there.keys() | known.keys():
            doubtful = there.get(digest, set()) ^ known.get(digest, set())
            if doubtful:
                self.catalogue.correct(digest, doubtful)
                wrong += len(doubtful)
        return wrong
