"""What a batch of requests owns in the target: KDA states, convolution windows, latents, lengths.

A block of rows enters through ``begin`` and stays pending until ``commit(n)`` says how many of its
first rows were accepted (``rollback`` is ``commit(0)``). Nothing is undone: nothing was done.

- a KDA layer keeps its committed state and the block's inputs (k, v, g, beta); the next forward
  folds the accepted ones in while it reads its own rows (replay). No state is ever copied;
- a convolution keeps the block's rows behind its window; committing picks the last ones before the
  cut;
- an MLA layer wrote its latents after the committed ones; committing moves the length.

Rows that are padding (beyond a batch row's count) have beta = 0 and g = 0, which leaves a state as
it is.

Letters: B batch, T rows of a block, H heads, K key width, V value width, C convolution channels,
L slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dspark import ops
from dspark.k3.config import K3Config


@dataclass(frozen=True)
class Block:
    """The rows of one forward and where they stand.

    ``counts`` [B] is the number of real rows per batch row, None when all T are real. ``start`` is
    the common committed length where all batch rows share one, else None; ``lengths`` [B] always
    holds them.
    """

    rows: int
    counts: Tensor | None
    commit: bool
    start: int | None
    lengths: Tensor
    visible: int
    """Latent slots [0, visible) hold everything that any row of the block may read."""
    mask: Tensor | None
    """[B or 1, T, visible] bool, True = may read; None where every row reads every slot."""


@dataclass(frozen=True)
class KDAInputs:
    """Rows of a KDA layer ready for the recurrence: [B, T, H, *] float32, beta [B, T, H]."""

    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def first(self, n: int | Tensor) -> KDAInputs:
        """Only the first n rows count: cut to them, or (n per batch row) neutralise the others."""
        if isinstance(n, int):
            return KDAInputs(self.k[:, :n], self.v[:, :n], self.g[:, :n], self.beta[:, :n])
        keep = torch.arange(self.k.shape[1], device=n.device) < n.unsqueeze(1)
        return replace(
            self,
            g=self.g.masked_fill(~keep[..., None, None], 0.0),
            beta=self.beta.masked_fill(~keep.unsqueeze(-1), 0.0),
        )

    def then(self, later: KDAInputs) -> KDAInputs:
        pairs = ((self.k, later.k), (self.v, later.v), (self.g, later.g), (self.beta, later.beta))
        return KDAInputs(*(torch.cat(pair, dim=1) for pair in pairs))

    @property
    def rows(self) -> int:
        return self.k.shape[1]


class KDAState:
    """State [B, H, K, V] float32 and convolution window [B, W-1, C] of one KDA layer."""

    def __init__(
        self, config: K3Config, batch: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        H, K = config.kda_num_heads, config.kda_head_dim
        self.state = torch.zeros(batch, H, K, K, dtype=torch.float32, device=device)
        self.window = torch.zeros(
            batch, config.kda_conv_size - 1, 3 * H * K, dtype=dtype, device=device
        )
        self.replay: KDAInputs | None = None
        self._pending: KDAInputs | None = None
        self._pending_rows: Tensor | None = None

    def with_window(self, rows_BTC: Tensor) -> Tensor:
        """The convolution's input: the window followed by the block's rows, [B, W-1+T, C]."""
        return torch.cat((self.window, rows_BTC), dim=1)

    def advance(self, q: Tensor, new: KDAInputs, windowed: Tensor, block: Block) -> Tensor:
        """Outputs [B, T, H, V] of the block's rows; ``windowed`` is what ``with_window``
        returned."""
        if block.counts is not None:
            new = new.first(block.counts)
        if block.commit and new.rows > ops.KDA_CHUNK:
            self.fold()
            out, self.state = ops.kda_chunk(q, new.k, new.v, new.g, new.beta, self.state)
        else:
            out = self._step(q, new, block.commit)
        if block.commit:
            self._move_window(windowed, new.rows if block.counts is None else block.counts)
        else:
            self._pending, self._pending_rows = new, windowed
        return out

    def _step(self, q: Tensor, new: KDAInputs, commit: bool) -> Tensor:
        replay, self.replay = self.replay, None
        both, done = new, 0
        if replay is not None:
            both, done = replay.then(new), replay.rows
            q = torch.cat((replay.k, q), dim=1)  # the outputs of replayed rows are not used
        keep = done + new.rows if commit else done
        out, self.state = ops.kda_step(q, both.k, both.v, both.g, both.beta, self.state, keep)
        return out[:, done:] if done else out

    def fold(self) -> None:
        """Fold a pending replay into the state."""
        if self.replay is None:
            return
        r, self.replay = self.replay, None
        _, self.state = ops.kda_step(r.k, r.k, r.v, r.g, r.beta, self.state, r.rows)

    def _move_window(self, windowed: Tensor, n: int | Tensor) -> None:
        width = self.window.shape[1]
        if isinstance(n, int):
            self.window = windowed[:, n : n + width].clone()
        else:
            index = n.unsqueeze(1) + torch.arange(width, device=n.device)
            self.window = windowed.gather(1, index.unsqueeze(-1).expand(-1, -1, windowed.shape[2]))

    def commit(self, n: int | Tensor) -> None:
        assert self._pending is not None
        assert self._pending_rows is not None
        self._move_window(self._pending_rows, n)
        accepted = self._pending.first(n)
        self.replay = accepted if accepted.rows else None
        self._pending = self._pending_rows = None

    def select(self, index: Tensor) -> None:
        self.fold()
        self.state, self.window = self.state[index], self.window[index]

    @property
    def nbytes(self) -> int:
        held = [self.state, self.window]
        for rows in (self.replay, self._pending):
            held += [rows.k, rows.v, rows.g, rows.beta] if rows is not None else []
        held += [self._pending_rows] if self._pending_rows is not None else []
        return sum(t.numel() * t.element_size() for t in held)


class LatentState:
    """Latents of one MLA layer: [B, L, R + P], the normalised c and the raw shared key."""

    def __init__(
        self, config: K3Config, batch: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        width = config.kv_lora_rank + config.qk_rope_head_dim
        self.latents = torch.zeros(batch, length, width, dtype=dtype, device=device)

    def write(self, rows_BTX: Tensor, block: Block) -> Tensor:
        """Put the block's latents after the committed ones; returns every visible slot [B,
        visible, X]."""
        if block.start is not None:
            self.latents[:, block.start : block.start + block.rows] = rows_BTX
        else:
            slots = block.lengths.unsqueeze(1) + torch.arange(block.rows, device=rows_BTX.device)
            self.latents.scatter_(1, slots.unsqueeze(-1).expand_as(rows_BTX), rows_BTX)
        return self.latents[:, : block.visible]

    def select(self, index: Tensor) -> None:
        self.latents = self.latents[index]

    @property
    def nbytes(self) -> int:
        return self.latents.numel() * self.latents.element_size()


class K3Cache:
    """The state of a batch of requests in one target.

    Args:
        batch: number of requests B.
        max_length: most tokens that a request may hold, pending rows included.
        dtype: of latents and convolution windows; KDA states are float32 always.
    """

    def __init__(
        self,
        config: K3Config,
        batch: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_length = max_length
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.layers: list[KDAState | LatentState] = [
            LatentState(config, batch, max_length, dtype, device)
            if config.is_full_attention(i)
            else KDAState(config, batch, dtype, device)
            for i in range(config.num_hidden_layers)
        ]
        self._uniform: int | None = 0
        self._longest = 0
        self._pending: Block | None = None

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
                f"{rows} new rows after {self._longest} tokens exceed the cache's max_length, "
                f"{self.max_length}"
            )
        return Block(
            rows, counts, commit, self._uniform, self.lengths, visible, self._mask(rows, visible)
        )

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
        """Accept the first n rows of the pending block: one number, or int64 [B], one per batch
        row.

        Raises:
            ValueError: no block is pending; a number outside 0..T, or beyond a batch row's real
            rows.
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
