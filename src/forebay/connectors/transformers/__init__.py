"""Hugging Face transformers with a tiered KV store: hot, warm and cold in one process."""

from forebay.connectors.transformers.facts import LoadedModel, ModelFacts, adopt_model, namespace_of, weights_digest
from forebay.connectors.transformers.models import (
    ByteTokenizer,
    Directory,
    ModelSource,
    Packaged,
    RandomWeights,
    compute_threads,
    load_model,
    set_compute_threads,
)
from forebay.connectors.transformers.runner import Generation, Reuse, Runner, RunnerOptions
from forebay.connectors.transformers.store import DEVICE, StoreCounts

__all__ = [
    "DEVICE",
    "ByteTokenizer",
    "Directory",
    "Generation",
    "LoadedModel",
    "ModelFacts",
    "ModelSource",
    "Packaged",
    "RandomWeights",
    "Reuse",
    "Runner",
    "RunnerOptions",
    "StoreCounts",
    "adopt_model",
    "compute_threads",
    "load_model",
    "namespace_of",
    "set_compute_threads",
    "weights_digest",
]
