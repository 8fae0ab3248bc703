"""The KV of one running session, as the model's attention reads it: contiguous for each layer, appended in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from forebay.types import DeviceBlock

from .device import BlockShape
from .memory import touched


class SessionLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer over its part of a session's buffer: keys and values are [1, kv_heads, capacity_tokens, head_dim].

    The library's own growing layer concatenates the whole KV again for each token; this one writes the new tokens
    behind the old ones and hands out a view.
    """

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.tokens = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the buffer was there first."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.tokens + key_states.shape[-2]
        self.keys[:, :, self.tokens : end] = key_states
        self.values[:, :, self.tokens : end] = value_states
        self.tokens = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return int(self.keys.shape[-2])


class SessionKV:
    """A buffer [layers, 2, kv_heads, capacity_tokens, head_dim] and the library's `Cache` over it.

    Tokens at or past `tokens` are scratch: whatever an earlier session left there.
    """

    def __init__(self, shape: BlockShape, capacity_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.capacity_tokens = capacity_blocks * shape.block_tokens
        axes = (shape.layers, 2, shape.kv_heads, self.capacity_tokens, shape.head_dim)
        self.buffer = touched(axes, shape.dtype, device)
        self._by_block = self.buffer.unflatten(3, (capacity_blocks, shape.block_tokens))
        """The same memory, [layers, 2, kv_heads, capacity_blocks, block_tokens, head_dim]."""
        self._layers = [SessionLayer(layer[0].unsqueeze(0), layer[1].unsqueeze(0)) for layer in self.buffer]
        self.cache = Cache(layers=list(self._layers))

    @property
    def held_bytes(self) -> int:
        return int(self.buffer.nbytes)

    @property
    def tokens(self) -> int:
        """How many leading tokens are valid."""
        return self._layers[0].tokens

    @tokens.setter
    def tokens(self, tokens: int) -> None:
        for layer in self._layers:
            layer.tokens = tokens

    def gather(self, start_block: int, blocks: torch.Tensor, chosen: Sequence[DeviceBlock]) -> None:
        """Copy the device blocks `chosen` to the session's blocks `start_block` and up, in order: one call for all.

        `blocks` is [num_blocks, layers, 2, kv_heads, block_tokens, head_dim].
        """
        index = torch.tensor(chosen, dtype=torch.long, device=blocks.device)
        into = self._by_block[:, :, :, start_block : start_block + len(chosen)]
        torch.index_select(blocks.permute(1, 2, 3, 0, 4, 5), 3, index, out=into)

    def scatter(self, start_block: int, blocks: torch.Tensor, chosen: Sequence[DeviceBlock]) -> None:
        """The inverse of `gather`."""
        index = torch.tensor(chosen, dtype=torch.long, device=blocks.device)
        source = self._by_block[:, :, :, start_block : start_block + len(chosen)]
        blocks.index_copy_(0, index, source.permute(3, 0, 1, 2, 4, 5))
