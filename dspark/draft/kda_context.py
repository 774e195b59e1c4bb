"""Context of the KDA backbone: one state per layer, and the rows its convolutions still reach.

Its size does not depend on how much text was read. The layers stand side by side as further heads
of one recurrence, so that folding rows into all of them is one call.

Letters: L layers, B batch, H heads, K head dim, W rows of the convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.draft.config import DraftConfig
from dspark.draft.context import DraftContext
from dspark.draft.kda import kda_shape
from dspark.draft.kda_packed import PackedKDA
from dspark.k3.storage import Storage


class KDAContext(DraftContext):
    """States [B, L*H, K, K] in float32 and windows [B, W-1, 3, L, H*K] of q, k and v rows.

    In memory of its own every operation replaces both tensors and never writes into them, so
    whoever keeps the old ones has a snapshot for nothing; a storage's memory is written in place.

    Args:
        config: Shape of the drafter.
        batch: B.
        max_length: Longest text in tokens; nothing is sized by it.
        device: Where the tensors live.
        dtype: Dtype of the windows.
        weights: The drafter's weights, as they are now.
        storage: See `DraftContext`.
    """

    def __init__(
        self,
        config: DraftConfig,
        batch: int,
        max_length: int,
        device: torch.device,
        dtype: torch.dtype,
        weights: PackedKDA,
        storage: Storage | None = None,
    ) -> None:
        super().__init__(batch, max_length, device, weights, storage)
        self.weights: PackedKDA = weights
        layers, heads, width = config.num_layers, config.num_attention_heads, config.head_dim
        self.heads = heads
        high = torch.promote_types(dtype, torch.float32)
        before = kda_shape(config).conv_size - 1
        self.state, self.window = self._take(
            [
                ((batch, layers * heads, width, width), high),
                ((batch, before, 3, layers, heads * width), dtype),
            ]
        )

    @property
    def room(self) -> Tensor | None:
        """Where the next states are written: over these, or, None, to memory of their own."""
        return None if self._storage is None else self.state

    def hold(self, state: Tensor, window: Tensor) -> None:
        """From now on the context is this."""
        if self._storage is None:
            self.state, self.window = state, window
        else:
            if state is not self.state:
                self.state.copy_(state)
            self.window.copy_(window)

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        held = (self.state, self.window)
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """State [B, H, K, K] and window [B, W-1, 3, H*K] of one layer, views both."""
        state = self.state[:, index * self.heads : (index + 1) * self.heads]
        return state, self.window[:, :, :, index]

    def _write_row(self, row: int, other: KDAContext | None) -> None:
        if self._storage is None:
            self.state, self.window = self.state.clone(), self.window.clone()
        self.state[row] = 0.0 if other is None else other.state[0]
        self.window[row] = 0.0 if other is None else other.window[0]

    def _select_rows(self, rows: Tensor) -> None:
        self.state = self._rows_of(self.state, rows)
        self.window = self._rows_of(self.window, rows)
