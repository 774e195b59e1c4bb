"""Context of the attention backbone: keys and values of every committed position, per layer.

Buffers are allocated once for the longest text; a round writes rows and moves a length, and never
copies or grows anything. Behind the committed rows lies room for one block: the block's own keys
and values go there while it is drafted and are overwritten by the next rows.

Letters: L layers, B batch, J key heads, C capacity, K head dim, N new rows, G block slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.draft.attention import Rotary
from dspark.draft.config import DraftConfig
from dspark.draft.context import DraftContext
from dspark.draft.packed import PackedWeights


class AttentionContext(DraftContext):
    """Per-layer key and value buffers [L, B, J, C, K].

    While all rows have one length (always so at batch 1) every operation is a slice and attention
    needs no mask.

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
        capacity = max_length + config.block_size
        shape = (config.num_layers, batch, config.num_key_value_heads, capacity, config.head_dim)
        # Zeros, not empty: rows behind a length are masked, and 0 * NaN would still be NaN.
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.rotary = Rotary.build(capacity, config.head_dim, config.rope_theta, device, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held on the device, rotary tables included."""
        held = (self.keys, self.values, self.rotary.cos, self.rotary.sin)
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def positions(self, rows: int) -> Tensor:
        """[B, rows] positions of the rows after each length, cut at the end of the buffers."""
        offsets = torch.arange(rows, device=self.keys.device)
        return (self.lengths[:, None] + offsets).clamp(max=self.keys.shape[3] - 1)

    def scatter(self, buffer: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Writes rows [..., B, J, n, K] of a buffer [..., B, J, C, K] at positions [B, n]."""
        index = positions[:, None, :, None].expand(rows.shape)
        buffer.scatter_(-2, index, rows)
