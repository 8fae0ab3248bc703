"""Questions about documents that many share: a few documents are asked about often, most of them seldom."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate

import msgspec

from forebay.errors import ConfigError
from forebay.workloads.arrival import (
    Arrival,
    Prompt,
    Prompts,
    Workload,
    about,
    check_from_one,
    check_positive,
    in_order,
    starts,
)  # fmt: skip


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    seed: int = 0
    requests: int = 4000
    duration_s: float = 3600.0
    documents: int = 500
    skew: float = 0.9
    """Zipf: the n-th document is asked about in proportion to n**-skew. 0: all equally often."""
    document_tokens: int = 4000
    """On average."""
    documents_a_prompt: int = 2
    """At most; in the order in which they were found, so that the second one is shared only behind the same first."""
    system_tokens: int = 512
    question_tokens: int = 100
    output_tokens: int = 200
    block_tokens: int = 256


def build(options: Options) -> Workload:
    check_from_one(
        requests=options.requests, documents=options.documents, document_tokens=options.document_tokens,
        documents_a_prompt=options.documents_a_prompt, system_tokens=options.system_tokens,
        question_tokens=options.question_tokens, output_tokens=options.output_tokens,
        block_tokens=options.block_tokens,
    )  # fmt: skip
    check_positive(duration_s=options.duration_s)
    if not 0 <= options.skew <= 10:
        raise ConfigError(f"skew must be from 0 to 10, not {options.skew}")
    return in_order("rag", options.block_tokens, _arrivals(options))


def _arrivals(options: Options) -> Iterator[Arrival]:
    rng, prompts = random.Random(options.seed), Prompts(options.block_tokens)
    lengths = [about(rng, options.document_tokens) for _ in range(options.documents)]
    weights = list(accumulate((rank + 1) ** -options.skew for rank in range(options.documents)))
    for number, at_s in enumerate(starts(rng, options.requests, options.duration_s)):
        prompt = Prompt(prompts)
        prompt.add("system", options.system_tokens)
        found = rng.choices(range(options.documents), cum_weights=weights, k=rng.randint(1, options.documents_a_prompt))
        for document in dict.fromkeys(found):
            prompt.add(f"document {document}", lengths[document])
        prompt.add(f"question {number}", about(rng, options.question_tokens))
        yield prompt.arrival(at_s, number, about(rng, options.output_tokens))
