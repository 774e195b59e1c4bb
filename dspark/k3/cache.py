"""The cache of a batch of requests: one state per layer, and the lengths they agree on.

A block of rows enters through ``begin`` and stays pending until ``commit(n)`` says how many of its
first rows were accepted; ``rollback`` is ``commit(0)``. How each layer does that without undoing
anything is in ``dspark.k3.state``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.k3.config import K3Config
from dspark.k3.state import Block, KDAState, LatentState
from dspark.k3.storage import Kind, PrivateStorage, Storage, take_all
from dspark.k3.tiled_attention import TILE_ROWS, TILE_SLOTS


class K3Cache:
    """The state of a batch of requests in one target.

    Args:
        batch: number of requests B.
        max_length: most tokens that a request may hold, pending rows included.
        dtype: of latents and convolution windows; KDA states are float32 always.
        storage: where states, windows and latents come from; None: memory of the cache's own.
    """

    def __init__(
        self,
        config: K3Config,
        batch: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        storage: Storage | None = None,
    ) -> None:
        self.config, self.max_length = config, max_length
        self._storage = storage or PrivateStorage()
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.layers = self._take_layers(batch, dtype, device)
        self._uniform: int | None = 0
        self._longest = 0
        self._pending: Block | None = None

    def _take_layers(
        self, batch: int, dtype: torch.dtype, device: torch.device
    ) -> list[KDAState | LatentState]:
        config = self.config
        H, K = config.kda_num_heads, config.kda_head_dim
        latents = (batch, self.max_length, config.kv_lora_rank + config.qk_rope_head_dim)
        wanted: list[tuple[Kind, int, tuple[int, ...], torch.dtype]] = []
        for i in range(config.num_hidden_layers):
            if config.is_full_attention(i):
                wanted.append((Kind.LATENTS, i, latents, dtype))
                continue
            wanted.append((Kind.STATE, i, (batch, H, K, K), torch.float32))
            wanted.append((Kind.WINDOW, i, (batch, config.kda_conv_size - 1, 3 * H * K), dtype))
        taken = iter(take_all(self._storage, wanted, device))
        return [
            LatentState(next(taken))
            if config.is_full_attention(i)
            else KDAState(config, next(taken), next(taken))
            for i in range(config.num_hidden_layers)
        ]

    def begin(self, rows: int, counts: Tensor | None, commit: bool) -> Block:
        """Announce a block of ``rows`` rows; ``finish`` it once every layer has seen it.

        Raises:
            RuntimeError: the previous block was neither committed nor rolled back.
            ValueError: the block does not fit into ``max_length``.
        """
        if self._pending is not None:
            raise RuntimeError("a block is pending: commit or roll it back before the next forward")
        visible = self._longest + rows
        if visible > self.max_length:
            raise ValueError(
                f"{rows} new rows after {self._longest} tokens exceed the cache's max_length "
                f"{self.max_length}"
            )
        tiled = commit and rows > 1 and rows * visible > TILE_ROWS * TILE_SLOTS
        mask = None if tiled else self._mask(rows, visible)
        return Block(rows, counts, commit, self._uniform, self.lengths, visible, mask, tiled)

    def _mask(self, rows: int, visible: int) -> Tensor | None:
        device = self.lengths.device
        if self._uniform is not None:
            if rows == 1:
                return None
            return torch.ones(1, rows, visible, dtype=torch.bool, device=device).tril(self._uniform)
        last = self.lengths.unsqueeze(1) + torch.arange(rows, device=device)
        return torch.arange(visible, device=device) <= last.unsqueeze(-1)

    def finish(self, block: Block) -> None:
        """Every layer has seen the block: its rows are committed now, or wait for ``commit``."""
        if not block.commit:
            self._pending = block
        else:
            self._advance(block.rows if block.counts is None else block.counts)

    def _advance(self, n: int | Tensor) -> None:
        self.lengths = self.lengths + n
        if isinstance(n, int) and self._uniform is not None:
            self._uniform = self._longest = self._uniform + n
            return
        shortest, self._longest = (int(x) for x in self.lengths.aminmax())
        self._uniform = self._longest if shortest == self._longest else None

    def commit(self, n: int | Tensor) -> None:
        """Accept the first n rows of the pending block; n is a number or int64 [B], per batch row.

        Raises:
            ValueError: no block is pending, or n lies outside 0..T or beyond a row's real rows.
        """
        if self._pending is None:
            raise ValueError("no block is pending: there is nothing to commit")
        self._check(n, self._pending)
        for layer in self.layers:
            if isinstance(layer, KDAState):
                layer.commit(n)
        self._pending = None
        self._advance(n)

    @staticmethod
    def _check(n: int | Tensor, block: Block) -> None:
        limit = block.rows if block.counts is None else block.counts
        ok = (
            (n >= 0) & (n <= limit)
            if not isinstance(n, int) or block.counts is not None
            else 0 <= n <= limit
        )
        if not bool(ok.all() if isinstance(ok, Tensor) else ok):
            raise ValueError(
                f"cannot accept {n} rows of a block with {limit}; expected 0 to that many"
            )

    def rollback(self) -> None:
        """Accept nothing of the pending block."""
        self.commit(0)

    def fold(self) -> None:
        """Fold every pending replay into its state, as the next forward would."""
        for layer in self.layers:
            if isinstance(layer, KDAState):
                layer.fold()

    def select(self, index: Tensor) -> None:
        """Keep only the batch rows ``index`` (int64), in that order.

        Raises:
            RuntimeError: a block is pending.
        """
        if self._pending is not None:
            raise RuntimeError("a block is pending: commit or roll it back before selecting rows")
        for layer in self.layers:
            layer.select(index)
        self.lengths = self.lengths[index]
        shortest, self._longest = (int(x) for x in self.lengths.aminmax())
        self._uniform = self._longest if shortest == self._longest else None

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor the cache holds, replay rows included."""
        return (
            sum(layer.nbytes for layer in self.layers)
            + self.lengths.numel() * self.lengths.element_size()
        )
