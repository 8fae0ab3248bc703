"""Real text for the sessions, without a network: the language reference and the sources that come with Python."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from forebay.errors import ConfigError

_SHORTEST_CHARACTERS = 20_000
"""A source file below this length is no long document."""

_QUESTIONS = {
    "debugger": ("The Python debugger", "Which command of the debugger sets a breakpoint?"),
    "string-methods": ("String methods", "What does the method str.capitalize return?"),
    "compound": ("Compound statements", "What is the with statement used for?"),
    "formatstrings": ("Format string syntax", "Which method of strings uses replacement fields?"),
    "types": ("The standard type hierarchy", "What does the type None stand for?"),
    "specialnames": ("Special method names", "What does the method __repr__ compute?"),
    "typesseq": ("Sequence types", "Which are the three basic sequence types?"),
}
"""Long topics of the language reference: a title, and a question that the first pages answer."""


@dataclass(frozen=True, slots=True)
class Document:
    title: str
    question: str
    text: str


def documents(count: int, *, first: int, stdlib: Path | None = None) -> tuple[Document, ...]:
    """`count` different documents, beginning with number `first` and going round.

    Raises ConfigError when this Python has not as many.
    """
    found = tuple(islice(_all(stdlib or Path(sysconfig.get_paths()["stdlib"])), max(count, len(_QUESTIONS))))
    if len(found) < count:
        raise ConfigError(
            f"this Python comes with {len(found)} long texts, and {count} sessions need one each: ask for fewer"
        )
    return tuple(found[(first + i) % len(found)] for i in range(count))


def _all(stdlib: Path) -> Iterator[Document]:
    topics = _topics()
    yield from (
        Document(title, question, _after(topics, name))
        for name, (title, question) in _QUESTIONS.items()
        if name in topics
    )
    for path in sorted(stdlib.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) >= _SHORTEST_CHARACTERS:
            yield Document(f"The source of {path.name}", f"What is the module {path.stem} for?", text)


def _topics() -> Mapping[str, str]:
    """The language reference as `help()` shows it; some distributions leave it out."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return {}
    found: Mapping[str, str] = topics
    return found


def _after(topics: Mapping[str, str], name: str) -> str:
    """A topic, and the others behind it, so that no session is too long for it."""
    return "\n\n\n".join([topics[name], *(text for other, text in sorted(topics.items()) if other != name)])
