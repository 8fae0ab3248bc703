"""vLLM with a tiered KV store: `ForebayConnector`, a KVConnector of its V1 interface.

Importing this package does not import vLLM; naming `ForebayConnector` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.connectors.vllm.connector import ForebayConnector

__all__ = ["ForebayConnector"]


def __getattr__(name: str) -> object:
    if name == "ForebayConnector":  # vLLM looks the class up in the module that its configuration names
        from forebay.connectors.vllm.connector import ForebayConnector

        return ForebayConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
