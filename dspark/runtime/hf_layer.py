"""The buffers behind one layer of a transformers model, written row by row.

A model hands over the keys and values of a block; the layer puts each row where `RowCache` said it
lies and gives back every slot of the buffer, of which the mask hides what a row must not see.

Letters: B batch, T new rows, S slots, H key-value heads, K head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from dspark.runtime.hf_mask import Ring

ROOM = 128
"""New rows that a sliding layer takes at once: longer prompts run in pieces, blocks are shorter."""


class RowLayer(CacheLayerMixin):
    """Keys and values [B, H, S + 1, K] of one layer, the last slot being where padding goes."""

    is_sliding = False

    def __init__(self, ring: Ring, slots: int) -> None:
        super().__init__()
        self.ring = ring
        self.slots = slots if ring.capacity is None else ring.capacity
        self.at = torch.empty(0)
        self.width = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (self._room(states) for states in (key_states, value_states))
        self.device = key_states.device
        self.is_initialized = True

    def _room(self, states: Tensor) -> Tensor:
        batch, heads, _, size = states.shape
        return states.new_zeros(batch, heads, self.slots + 1, size)

    def update(
        self, key_states: Tensor, value_states: Tensor, cache_kwargs: Any = None, kwargs: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Write the block's rows [B, H, T, K] at their slots; return the slots of the mask.

        What models hand over besides (two names are in use) concerns caches of other kinds.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.write(self.at, key_states.transpose(1, 2), value_states.transpose(1, 2))
        return self.keys[:, :, : self.width], self.values[:, :, : self.width]

    def write(self, slots: Tensor, keys: Tensor | float, values: Tensor | float) -> None:
        """Slots [B, T] take rows [B, T, H, K] or a number."""
        rows = torch.arange(len(slots), device=slots.device).unsqueeze(1)
        self.keys[rows, :, slots] = keys
        self.values[rows, :, slots] = values

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Slots [B, T] -> copies [B, T, H, K]."""
        rows = torch.arange(len(slots), device=slots.device).unsqueeze(1)
        return self.keys[rows, :, slots], self.values[rows, :, slots]

    def grow(self, slots: int) -> None:
        """Make room for `slots` slots where the layer holds every position."""
        if self.ring.capacity is not None or slots <= self.slots:
            return
        held, self.slots = self.slots, slots + ROOM
        if self.is_initialized:
            keys, values = self.keys, self.values
            self.lazy_initialization(keys, values)
            self.keys[:, :, :held] = keys[:, :, :held]
            self.values[:, :, :held] = values[:, :, :held]

    def adopt(self, keys: Tensor, values: Tensor) -> None:
        """Take these buffers as its own."""
        self.keys, self.values, self.device = keys, values, keys.device
        self.is_initialized = True

    def read_row(self, row: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copies [n, H, K] of one batch row's slots [n]."""
        return (
            self.keys[row][:, slots].transpose(0, 1).contiguous(),
            self.values[row][:, slots].transpose(0, 1).contiguous(),
        )

    def write_row(self, row: int, slots: Tensor, pair: tuple[Tensor, Tensor], batch: int) -> None:
        """Put rows [n, H, K] at slots [n] of one batch row out of `batch`."""
        if not self.is_initialized:
            like = (part.transpose(0, 1).unsqueeze(0).expand(batch, -1, -1, -1) for part in pair)
            self.lazy_initialization(*like)
        self.keys[row][:, slots] = pair[0].transpose(0, 1).to(self.keys)
        self.values[row][:, slots] = pair[1].transpose(0, 1).to(self.values)

    def clear_row(self, row: int) -> None:
        """Zero all slots of one batch row."""
        if self.is_initialized:
            self.keys[row] = 0.0
            self.values[row] = 0.0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.width, 0

    def get_seq_length(self) -> int:
        return max(0, self.width - self.at.shape[-1])

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class Absent(CacheLayerMixin):
    """Stands in for a layer that keeps no keys and values (an MLP alone, shared attention)."""

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise RuntimeError("this layer was said to keep no keys and values")

    def update(
        self, key_states: Tensor, value_states: Tensor, cache_kwargs: Any = None, kwargs: Any = None
    ) -> tuple[Tensor, Tensor]:
        raise RuntimeError("this layer was said to keep no keys and values")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


@dataclass(frozen=True, eq=False)
class RowSnapshot:
    """The committed state of one batch row, as a fresh prefill would leave it.

    layers  keys and values [n, H, K] of each layer, the newest n positions that it must hold;
            None: a layer that was never written
    """

    length: int
    layers: tuple[tuple[Tensor, Tensor] | None, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(
            tensor.numel() * tensor.element_size() for pair in self.layers for tensor in pair or ()
        )

    def to(self, device: torch.device | str) -> RowSnapshot:
        """The same on another device."""
        moved = tuple(
            None if pair is None else (pair[0].to(device), pair[1].to(device))
            for pair in self.layers
        )
        return RowSnapshot(self.length, moved)
