"""Reading the small files that people write for the simulator and the planner."""

from __future__ import annotations

from pathlib import Path

from forebay.errors import ConfigError


def read_small(path: Path, most_bytes: int, what: str, label: str = "") -> bytes:
    """The whole file. Of a larger one it is asked whether it is `what` ("a plan"); `label` stands before the path.

    Raises ConfigError for a file that cannot be read, and for one of more than `most_bytes`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {label}{path}: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > most_bytes:
        raise ConfigError(f"{path} is larger than {most_bytes} bytes: is it {what}?")
    return content
