"""Documents and questions -> token ids, with the model's own chat template where it has one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from forebay.bench.demo.texts import Document
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay.connectors.transformers import LoadedModel

_MARK = "\0document\0"
_CHARACTERS_PER_TOKEN = 6
"""A first guess at how much text has to be encoded; when it does not suffice, twice as much is."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A document with a question behind it."""

    document: Document
    ids: npt.NDArray[np.uint32]
    document_tokens: int
    """The first of `ids`, with what the chat template puts before the document. The question comes after them."""

    @property
    def document_ids(self) -> npt.NDArray[np.uint32]:
        return self.ids[: self.document_tokens]


class Chat:
    """How this model is spoken to. Raises ConfigError for one that has neither a tokenizer nor 256 token ids."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._tokenizer = cast(Any, loaded.tokenizer)
        self.speaks = bool(getattr(self._tokenizer, "chat_template", None))
        """Whether it has a chat template; without one the question is asked in plain text."""
        if self._tokenizer is None and loaded.facts.vocabulary < 256:
            raise ConfigError(
                f"{loaded.name} has no tokenizer and {loaded.facts.vocabulary} token ids: use another model"
            )
        self._before, self._after = "", "\nAnswer:"
        if self.speaks:
            self._before, mark, self._after = self._render(loaded.name).partition(_MARK)
            if not mark:
                raise ConfigError(
                    f"the chat template of {loaded.name} does not show the user's message: use another model"
                )
        generation = getattr(loaded.model, "generation_config", None)
        self._name, self._vocabulary = loaded.name, loaded.facts.vocabulary
        self.stop_tokens = _ids(getattr(self._tokenizer, "eos_token_id", None)) | _ids(
            getattr(generation, "eos_token_id", None) if self._tokenizer is not None else None
        )

    def prompt(self, document: Document, document_tokens: int) -> Prompt:
        """Exactly `document_tokens` tokens of template and document, then the question.

        Raises ConfigError when the text is too short, not even the template fits, or the tokenizer is not this model's.
        """
        before = self._encode(self._before) if self.speaks else self._beginning()
        wanted = document_tokens - len(before)
        if wanted < 1:
            raise ConfigError(
                f"{document_tokens} tokens a document leave no room beside the chat template: ask for more"
            )
        body = self._leading(document, wanted)
        after = self._encode(f"\n\n{document.question}{self._after}")
        ids = [*before, *body, *after]
        if max(ids) >= self._vocabulary:
            raise ConfigError(
                f"the tokenizer of {self._name} gives token id {max(ids)}, and the model has {self._vocabulary}: "
                "use the model's own tokenizer"
            )
        return Prompt(document, np.array(ids, dtype=np.uint32), document_tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            return bytes(token % 256 for token in tokens).decode(errors="replace")
        if hasattr(self._tokenizer, "eos_token_id"):
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()
        return str(self._tokenizer.decode(list(tokens)))

    def _render(self, name: str) -> str:
        """One turn in the chat template, which is a program that came with the model and may fail in any way."""
        turns = [{"role": "user", "content": _MARK}]
        try:
            return str(self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        except Exception as error:
            said = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"the chat template of {name} cannot be rendered ({type(error).__name__}: {said}): use another model"
            ) from None

    def _leading(self, document: Document, wanted: int) -> list[int]:
        characters = wanted * _CHARACTERS_PER_TOKEN
        while True:
            ids = self._encode(document.text[:characters])
            if len(ids) > wanted:  # the last token of a cut text may be another one than in the whole
                return ids[:wanted]
            if characters >= len(document.text):
                raise ConfigError(f"{document.title!r} has {len(ids):,} tokens, not {wanted:,}: ask for fewer --tokens")
            characters *= 2

    def _beginning(self) -> list[int]:
        """What the tokenizer puts before every text, such as a begin token."""
        return list(self._tokenizer.encode("")) if hasattr(self._tokenizer, "eos_token_id") else []

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            return list(text.encode())
        if hasattr(self._tokenizer, "eos_token_id"):  # a tokenizer of the library; quiet about long texts
            return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))
        return list(self._tokenizer.encode(text))


def _ids(found: Any) -> frozenset[int]:
    """The library gives one id, several, or None."""
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list | tuple) else [found])
