"""The state of a batch of requests in tensors that stay where they are from the first step on.

Between two steps a KDA layer holds the state before the rows that were accepted last, and those
rows as its projections made them; ``accepted`` says, on the device, how many they are. The next
step replays them and reads its own rows in one pass over the state, which it writes once: nothing
is ever undone, because nothing was done. An MLA layer wrote the latents of the block behind the
committed ones; accepting moves the length.

A cache without slots is for plain decoding: every row of a step counts, and the state goes past it
at once. ``folding`` lends the seats of one with slots for such steps.

    rows      [N, B, W-1+P, C]    window of the convolution, then the slots
    decay     [N, B, P, HK]       decay pre-activations of the slots
    beta      [N, B, P, H]        write strengths of the slots, before the sigmoid
    state     [N, B, H, K, K]     float32
    latents   [M, B, L, R+p]
    lengths, accepted [B] int64   committed tokens, and how many of them wait in the slots

Letters: N KDA layers, M MLA layers, B seats, T rows of a step, P slots, L places for latents,
C = 3 H K channels, W width of the convolution, H heads, K head dim, R latent rank, p shared-key
width.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from dspark import ops
from dspark.k3.cache import K3Cache
from dspark.k3.config import K3Config
from dspark.k3.snapshot import Snapshot


class StaticCache:
    """State of a fixed number of seats, each a request or empty.

    Args:
        batch: B.
        max_length: Longest text of a seat.
        rows: Most rows of a step; a step writes behind ``max_length``, so L is the sum of the two.
        slots: Whether rows stay pending, P = ``rows``; otherwise P = 0.
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
        *,
        slots: bool = True,
    ) -> None:
        self.config, self.max_length, self.most_rows = config, max_length, rows
        self.folds = not slots
        """Whether every row of a step counts at once."""
        H, K = config.kda_num_heads, config.kda_head_dim
        full, window = len(config.full_attention_layers), config.kda_conv_size - 1
        linear, count = config.num_hidden_layers - full, rows if slots else 0
        width = config.kv_lora_rank + config.qk_rope_head_dim

        def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.rows = zeros(linear, batch, window + count, 3 * H * K)
        self.decay = zeros(linear, batch, count, H * K)
        self.beta = zeros(linear, batch, count, H)
        self.state = zeros(linear, batch, H, K, K, kind=torch.float32)
        self.latents = zeros(full, batch, max_length + rows, width)
        self.lengths = zeros(batch, kind=torch.int64)
        self.accepted = zeros(batch, kind=torch.int64)

    @property
    def batch(self) -> int:
        """B."""
        return len(self.lengths)

    @property
    def waits(self) -> bool:
        """Whether there are slots, in which accepted rows may wait."""
        return self.decay.shape[2] > 0

    def folding(self, *, waits: bool) -> StaticCache:
        """The same seats for steps whose rows all count at once.

        Args:
            waits: Rows may wait in the slots: a step folds them before its own, and ``accepted`` is
                to be zeroed behind it. Otherwise it is zero in every seat already.
        """
        lent = copy.copy(self)
        lent.folds = True
        if not waits:
            window = self.config.kda_conv_size - 1
            lent.rows = self.rows[:, :, :window]
            lent.decay, lent.beta = self.decay[:, :, :0], self.beta[:, :, :0]
        return lent

    @property
    def nbytes(self) -> int:
        """Bytes held from step to step."""
        held = (*self._seats(), self.lengths, self.accepted)
        return sum(x.numel() * x.element_size() for x in held)

    def _seats(self) -> tuple[Tensor, ...]:
        return self.rows, self.decay, self.beta, self.state, self.latents

    def commit(self, counts: Tensor, path: Tensor | None = None) -> None:
        """Accept rows of the last step, after every step and once.

        Args:
            counts: [B] int64, how many. A cache without slots knows all of them or, in a seat
                whose text has ended, none.
            path: [B, T'] int64, which rows these are, from the root of a tree down; behind
                ``counts`` anything of i..T-1 at place i. None: the first ones.
        """
        if path is not None:
            ops.kda_path(self.rows, self.decay, self.beta, path)
            self._place(path)
        if not self.folds:
            self.accepted.copy_(counts)
        self.lengths.add_(counts)

    def _place(self, path: Tensor) -> None:
        """Latents of a path to where they would stand had they been the first rows."""
        here = self.lengths[:, None] + torch.arange(path.shape[1], device=path.device)
        there = self.lengths[:, None] + path
        shape = (len(self.latents), *path.shape, self.latents.shape[3])
        moved = self.latents.gather(2, there[None, :, :, None].expand(shape))
        self.latents.scatter_(2, here[None, :, :, None].expand(shape), moved)

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
        for held in self._seats():
            held[:, seat].zero_()
        self.lengths[seat] = 0
        self.accepted[seat] = 0
