"""What people read: numbers with their units, and foreign text that can do no harm.

Decimal everywhere (a GB is 10**9 bytes), so that sizes and rates agree.
"""

from __future__ import annotations

import re
from typing import Any

from forebay.errors import ConfigError

_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")
_BINARY = ("KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS = {unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL)} | {
    unit.lower(): 1024 ** (power + 1) for power, unit in enumerate(_BINARY)
}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([smhdw])\s*", re.ASCII)
_BIDI_CONTROLS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
NOTHING = "–"
"""Shown where there is no such figure."""


def parse_bytes(text: str) -> int:
    """`2GiB`, `500 MB`, `4096B` -> bytes. Raises ConfigError without a unit, so that no one has to guess it."""
    match = _QUANTITY.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{text!r} is not a size: give a number and its unit, such as 2GiB or 500MB")
    quantity_bytes = float(match[1]) * factor
    if quantity_bytes >= 2**63:
        raise ConfigError(f"a size of {match[1][:12]}... {match[2]} is more than any machine has: give less")
    return int(quantity_bytes)


def parse_rate(text: str) -> float:
    """`200MB/s` -> bytes a second, more than 0. Raises ConfigError without a unit."""
    quantity, slash, unit = text.partition("/")
    try:
        bytes_per_s = parse_bytes(quantity) if slash and unit.strip() == "s" else 0
    except ConfigError:
        bytes_per_s = 0
    if bytes_per_s <= 0:
        raise ConfigError(f"{text[:80]!a} is not a rate: give a number above 0 and its unit, such as 200MB/s")
    return bytes_per_s


def parse_seconds(text: str) -> float:
    """`90s`, `15m`, `12h`, `7d`, `2w` -> seconds. Raises ConfigError without a unit."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text[:80]!a} is not a time: give a number and its unit, s, m, h, d or w, such as 7d")
    return float(match[1]) * _SECONDS[match[2]]


def bytes_text(quantity_bytes: float | None) -> str:
    """`917.50 MB`: the largest decimal unit that keeps the number above 1."""
    if quantity_bytes is None:
        return NOTHING
    value, power = float(quantity_bytes), 0
    while abs(value) >= 1000 and power < len(_DECIMAL) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.0f} B" if power == 0 else f"{value:.2f} {_DECIMAL[power]}"


def seconds_text(quantity_s: float | None) -> str:
    """`14.8 s`, `0.532 s`, `12 ms`: three digits that mean something."""
    if quantity_s is None:
        return NOTHING
    if quantity_s < 0.1:
        return f"{quantity_s * 1e3:.1f} ms"
    return f"{quantity_s:.3f} s" if quantity_s < 10 else f"{quantity_s:.1f} s"


def rate_text(gigabytes_per_s: float | None) -> str:
    return NOTHING if gigabytes_per_s is None else f"{gigabytes_per_s:.2f} GB/s"


def tokens_rate_text(tokens_per_s: float | None) -> str:
    return NOTHING if tokens_per_s is None else f"{tokens_per_s:.2f} tokens/s"


def factor_text(factor: float | None) -> str:
    """`21x`, `3.4x`."""
    if factor is None:
        return NOTHING
    return f"{factor:.0f}x" if factor >= 10 else f"{factor:.1f}x"


def harmless(text: str) -> str:
    """Text from outside, such as a model's, without the characters that steer a terminal or turn a line around."""
    return "".join(
        character if character in "\n\t" or (character.isprintable() and character not in _BIDI_CONTROLS) else "\ufffd"
        for character in text
    )


def encodable(value: Any) -> Any:
    """The same builtins, in which what is no text (a path need not be) is written as escapes: JSON has no other way."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {encodable(name): encodable(item) for name, item in value.items()}
        case list() | tuple():
            return [encodable(item) for item in value]
        case _:
            return value
