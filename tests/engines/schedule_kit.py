"""Random schedules of requests over an engine with a pool, whichever way the pool is connected."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pool_files import DAMAGES, block_files

Tokens = tuple[int, ...]


class Steered(Protocol):
    """A vLLM in this process that a test steps by hand."""

    answers: dict[str, Tokens]

    def send(self, request_id: str, tokens: list[int], *, max_tokens: int = 8) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> None: ...
    def finish(self) -> None: ...
    def check_at_rest(self) -> None: ...
    def make_cold(self) -> None: ...
    def end_doubts(self) -> None: ...


def run_schedules(running: Steered, library: Sequence[list[int]], answers: Sequence[Tokens], pool: Path) -> None:
    """Requests that share prefixes come, go and are aborted, while blocks are damaged and devices forget."""
    for seed in range(200):
        draw = random.Random(seed)
        sent: dict[str, int] = {}
        for number in range(draw.randint(1, 5)):
            request_id, choice = f"{seed}-{number}", draw.randrange(len(library))
            sent[request_id] = choice
            running.send(request_id, library[choice])
            for _ in range(draw.randint(0, 4)):
                running.step()
            if draw.random() < 0.25:
                given_up = draw.choice(sorted(sent))
                running.abort(given_up)
                del sent[given_up]
            if draw.random() < 0.2:
                with contextlib.suppress(FileNotFoundError):  # set aside meanwhile, for an earlier damage
                    draw.choice(DAMAGES)(draw.choice(block_files(pool)))
        running.finish()
        said = {request_id: running.answers[request_id] for request_id in sent}
        assert said == {request_id: answers[choice] for request_id, choice in sent.items()}, seed
        running.answers.clear()
        running.check_at_rest()
        if draw.random() < 0.7:
            running.make_cold()
            running.end_doubts()
