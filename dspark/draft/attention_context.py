"""Context of the attention backbone: keys and values of the positions that its layers still see.

Letters: L layers, B batch, J key heads, C capacity, K head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dspark.draft.config import DraftConfig
from dspark.draft.context import DraftContext
from dspark.draft.packed import PackedWeights
from dspark.draft.ring import Ring
from dspark.draft.rotary import Rotary
from dspark.k3.storage import Storage


@dataclass(frozen=True)
class LayerBuffers:
    """Layers that see equally far: which, their ring, and key and value buffers [L, B, J, C, K].

    index holds ``layers`` on the device, None where they are all.
    """

    layers: tuple[int, ...]
    ring: Ring
    keys: Tensor
    values: Tensor
    index: Tensor | None


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
        storage: See `DraftContext`.
    """

    def __init__(
        self,
        config: DraftConfig,
        batch: int,
        max_length: int,
        device: torch.device,
        dtype: torch.dtype,
        weights: PackedWeights,
        storage: Storage | None = None,
    ) -> None:
        super().__init__(batch, max_length, device, weights, storage)
        self.weights: PackedWeights = weights
        self._count = config.num_layers
        rotary = Rotary.of(config, device, dtype)
        assert rotary is not None
        self.rotary = rotary
        reaches = [
            min(config.window(layer) or max_length, max_length)
            for layer in range(config.num_layers)
        ]
        kinds: list[tuple[tuple[int, ...], Ring]] = []
        shapes: list[tuple[tuple[int, ...], torch.dtype]] = []
        for size in sorted(set(reaches)):
            layers = tuple(layer for layer, reach in enumerate(reaches) if reach == size)
            ring = Ring(size, config.block_size)
            shape = (
                len(layers), batch, config.num_key_value_heads, ring.capacity, config.head_dim
            )  # fmt: skip
            kinds.append((layers, ring))
            shapes += [(shape, dtype)] * 2
        taken = iter(self._take(shapes))
        self.buffers = [
            LayerBuffers(*kind, next(taken), next(taken), self._index(kind[0])) for kind in kinds
        ]
        self.of_layer = self._views()
        self.reach = max(reaches)

    def _index(self, layers: tuple[int, ...]) -> Tensor | None:
        every = len(layers) == self._count
        return None if every else torch.tensor(layers, device=self.device)

    def _views(self) -> list[tuple[Ring, Tensor, Tensor]]:
        by_layer = {
            layer: (each.ring, each.keys[i], each.values[i])
            for each in self.buffers
            for i, layer in enumerate(each.layers)
        }
        return [by_layer[layer] for layer in range(len(by_layer))]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        held = [tensor for each in self.buffers for tensor in (each.keys, each.values)]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def _write_row(self, row: int, other: AttentionContext | None) -> None:
        if other is None:
            for each in self.buffers:
                each.keys[:, row].zero_()
                each.values[:, row].zero_()
            return
        if other.fixed:
            for each, theirs in zip(self.buffers, other.buffers, strict=True):
                each.keys[:, row] = theirs.keys[:, 0]
                each.values[:, row] = theirs.values[:, 0]
            return
        for mine, its in zip(self.of_layer, other.of_layer, strict=True):
            for buffer, rows in zip(mine[1:], its[1:], strict=True):
                mine[0].copy_row(buffer[row], rows[0], its[0], other.row_lengths[0])

    def _select_rows(self, rows: Tensor) -> None:
        self.buffers = [
            replace(
                each,
                keys=self._rows_of(each.keys, rows, 1),
                values=self._rows_of(each.values, rows, 1),
            )
            for each in self.buffers
        ]
        self.of_layer = self._views()
