"""Context of the attention backbone: keys and values of the positions that its layers still see.

Letters: L layers, B batch, J key heads, C capacity, K head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.draft.config import DraftConfig
from dspark.draft.context import DraftContext
from dspark.draft.packed import PackedWeights
from dspark.draft.ring import Ring
from dspark.draft.rotary import Rotary


@dataclass(frozen=True)
class LayerBuffers:
    """Layers that see equally far: which, their ring, and key and value buffers [L, B, J, C, K]."""

    layers: tuple[int, ...]
    ring: Ring
    keys: Tensor
    values: Tensor


class AttentionContext(DraftContext):
    """Buffers per reach: the whole text, or a sliding window.

    Attributes:
        buffers: One for each reach.
        of_layer: Ring, keys and values [B, J, C, K] of each layer; views of `buffers`.
        reach: Context positions that the furthest layer sees.

    Args:
        config: Shape of the drafter.
        batch: B.
        max_length: Longest text in tokens that will be appended to one row.
        device: Where the buffers live.
        dtype: Dtype of keys and values.
        weights: The drafter's weights, as they are now: keys of one set of weights and queries of
            another do not belong together, so a context keeps the set it was made with.
    """

    def __init__(
        self,
        config: DraftConfig,
        batch: int,
        max_length: int,
        device: torch.device,
        dtype: torch.dtype,
        weights: PackedWeights,
    ) -> None:
        super().__init__(batch, max_length, device)
        self.weights = weights
        rotary = Rotary.of(config, device, dtype)
        assert rotary is not None
        self.rotary = rotary
        reaches = [
            min(config.window(layer) or max_length, max_length)
            for layer in range(config.num_layers)
        ]
        self.buffers: list[LayerBuffers] = []
        by_layer: dict[int, tuple[Ring, Tensor, Tensor]] = {}
        for size in sorted(set(reaches)):
            layers = tuple(layer for layer, reach in enumerate(reaches) if reach == size)
            ring = Ring(size, config.block_size)
            shape = (
                len(layers), batch, config.num_key_value_heads, ring.capacity, config.head_dim
            )  # fmt: skip
            # Zeros, not empty: rows behind a length are masked, and 0 * NaN would still be NaN.
            keys, values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
            self.buffers.append(LayerBuffers(layers, ring, keys, values))
            by_layer |= {layer: (ring, keys[i], values[i]) for i, layer in enumerate(layers)}
        self.of_layer = [by_layer[layer] for layer in range(config.num_layers)]
        self.reach = max(reaches)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        held = [tensor for each in self.buffers for tensor in (each.keys, each.values)]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)
