"""The state of a batch of requests in tensors that stay where they are from the first step on.

Between two steps a KDA layer holds the state after all committed tokens but those of the last
block, and that block's raw rows; ``accepted`` says, on the device, how many of them count. The next
step replays those and reads its own rows in one pass over the state, which it writes once: nothing
is ever undone, because nothing was done. An MLA layer wrote the latents of the block behind the
committed ones; accepting moves the length.

    rows      [N, B, W-1+P, C]    raw rows before the convolution: window, then the last block
    decay     [N, B, P, HK]       decay pre-activations of the last block
    beta      [N, B, P, H]        write strengths of the last block, before the sigmoid
    state     [N, B, H, K, K]     float32
    latents   [M, B, L, R+p]
    lengths, accepted [B] int64   committed tokens, and how many of them wait to be replayed

Letters: N KDA layers, M MLA layers, B batch, P most rows of a step, L slots, C = 3 H K channels, W
width of the convolution, H heads, K head dim, R latent rank, p shared-key width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.k3.cache import K3Cache
from dspark.k3.config import K3Config
from dspark.k3.snapshot import Snapshot


class StaticCache:
    """State of a fixed number of seats, each a request or empty.

    Args:
        batch: B.
        max_length: Longest text of a seat. A step writes behind it, so L is this and ``rows``.
        rows: P.
        dtype: Of rows and latents; states are float32 always.

    No method but `load` waits for the device. `commit` checks nothing, since that would be to read
    it: the caller keeps counts within the block and texts within ``max_length``.
    """

    def __init__(
        self,
        config: K3Config,
        batch: int,
        max_length: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config, self.max_length, self.rows_most = config, max_length, rows
        H, K = config.kda_num_heads, config.kda_head_dim
        full = len(config.full_attention_layers)
        linear, window = config.num_hidden_layers - full, config.kda_conv_size - 1
        width = config.kv_lora_rank + config.qk_rope_head_dim

        def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.rows = zeros(linear, batch, window + rows, 3 * H * K)
        self.decay = zeros(linear, batch, rows, H * K)
        self.beta = zeros(linear, batch, rows, H)
        self.state = zeros(linear, batch, H, K, K, kind=torch.float32)
        self.latents = zeros(full, batch, max_length + rows, width)
        self.lengths = zeros(batch, kind=torch.int64)
        self.accepted = zeros(batch, kind=torch.int64)

    @property
    def batch(self) -> int:
        """B."""
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        held = (self.rows, self.decay, self.beta, self.state, self.latents)
        return sum(x.numel() * x.element_size() for x in (*held, self.lengths, self.accepted))

    def keep(self, rows: Tensor, decay: Tensor, beta: Tensor) -> None:
        """The block of this step takes the place of the last one.

        Args:
            rows: [N, B, T, C]. decay: [N, B, T, HK]. beta: [N, B, T, H].
        """
        window, count = self.config.kda_conv_size - 1, rows.shape[2]
        at = self.accepted[:, None] + torch.arange(window, device=rows.device)
        index = at[None, :, :, None].expand(len(rows), -1, -1, rows.shape[3])
        self.rows[:, :, :window] = self.rows.gather(2, index)
        self.rows[:, :, window : window + count] = rows
        self.decay[:, :, :count] = decay
        self.beta[:, :, :count] = beta

    def commit(self, accepted: Tensor) -> None:
        """Accept the first rows of the last block, [B] int64 of 0..T; after every step, once."""
        self.accepted.copy_(accepted)
        self.lengths.add_(accepted)

    def commit_path(self, path: Tensor, accepted: Tensor) -> None:
        """Accept a path of the last block, which was a tree.

        Args:
            path: [B, T] int64, rows of the block from the root; what stands behind the first
                ``accepted`` [B] of them does not matter, as long as it lies in 0..T-1.
        """
        window = self.config.kda_conv_size - 1
        for held, before in ((self.rows, window), (self.decay, 0), (self.beta, 0)):
            index = (before + path)[None, :, :, None].expand(len(held), -1, -1, held.shape[3])
            held[:, :, before : before + path.shape[1]] = held.gather(2, index)
        here = self.lengths[:, None] + torch.arange(path.shape[1], device=path.device)
        there = self.lengths[:, None] + path
        shape = (len(self.latents), *path.shape, self.latents.shape[3])
        moved = self.latents.gather(2, there[None, :, :, None].expand(shape))
        self.latents.scatter_(2, here[None, :, :, None].expand(shape), moved)
        self.commit(accepted)

    def load(self, seat: int, cache: K3Cache, row: int = 0) -> None:
        """Seat a request of an ordinary cache, which stays as it is.

        Raises:
            RuntimeError: rows are pending there.
            ValueError: the request is longer than ``max_length``, or of another configuration.
        """
        given = cache.snapshot(row)
        if given.config != self.config:
            raise ValueError("this cache is of a model of another configuration")
        if given.length > self.max_length:
            raise ValueError(f"a text of {given.length} tokens into seats of {self.max_length}")
        self.reset(seat)
        self._write(seat, given)

    def _write(self, seat: int, given: Snapshot) -> None:
        window = self.config.kda_conv_size - 1
        for i, (state, rows) in enumerate(given.recurrent):
            self.state[i, seat].copy_(state)
            self.rows[i, seat, :window].copy_(rows)
        for i, latents in enumerate(given.latents):
            self.latents[i, seat, : given.length].copy_(latents)
        self.lengths[seat] = given.length

    def reset(self, seat: int) -> None:
        """Empty a seat; whatever it held, also NaN, is gone."""
        for held in (self.rows, self.decay, self.beta, self.state, self.latents):
            held[:, seat].zero_()
        self.lengths[seat] = 0
        self.accepted[seat] = 0
