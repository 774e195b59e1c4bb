"""Rounds of a cache: a block of rows enters, stays pending, and some of it is accepted.

``begin`` announces a block and ``finish`` ends it; it then waits for ``commit(n)``, which says how
many of its first rows were accepted, or ``commit_path``, which path of its tree. ``rollback`` is
``commit(0)``. How each layer does that without undoing anything is in ``dspark.k3.state``.

Latents behind a row's length are never relied on. Where rows have different lengths the shorter
ones' masks hide slots that nobody wrote; those are made finite when they first come into sight,
because a masked NaN is still a NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.k3.state import Block, KDAState, LatentState
from dspark.k3.tiled_attention import TILE_ROWS, TILE_SLOTS
from dspark.k3.tree import Path, check_path, first_rows, plant


class Rounds:
    """Layers of one batch, [B] lengths, and the block that is pending on them."""

    def __init__(
        self, layers: list[KDAState | LatentState], lengths: Tensor, max_length: int, conv_size: int
    ) -> None:
        self.layers, self.lengths = layers, lengths
        self.max_length, self.conv_size = max_length, conv_size
        self.offloaded = False
        self._touched = 0  # latent slots before it hold finite numbers in every row
        self._pending: Block | None = None
        self._entered = False
        self._uniform: int | None = 0
        self._longest = 0

    def begin(
        self,
        rows: int,
        counts: Tensor | None,
        commit: bool,
        parents: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> Block:
        """Announce a block of ``rows`` rows; ``finish`` it once every layer has seen it.

        Args:
            counts: [B] int64, real rows of a chain per batch row, which come first; None: all.
            parents: [B, T] or [T] int64 makes it a tree; only for a block that stays pending.
            valid: [B, T] bool, real rows of a tree; None: all.

        Raises:
            RuntimeError: the previous block was neither committed nor rolled back, its forward
                broke off, or the cache is offloaded.
            ValueError: the block does not fit into ``max_length``, or is no tree.
        """
        self._settled("the next forward")
        visible = self._longest + rows
        if visible > self.max_length:
            raise ValueError(
                f"{rows} new rows after {self._longest} tokens exceed the cache's max_length "
                f"{self.max_length}"
            )
        block = Block(rows, counts, commit, self._uniform, self.lengths, visible, None)
        if parents is not None:
            block = self._tree(block, parents, valid)
        elif commit and rows > 1 and rows * visible > TILE_ROWS * TILE_SLOTS:
            block = replace(block, tiled=True)
        else:
            block = replace(block, mask=self._mask(rows, visible))
        self._touch(visible, clear=self._uniform is None)
        self._entered = True
        return block

    def _tree(self, block: Block, parents: Tensor, valid: Tensor | None) -> Block:
        if block.commit:
            raise ValueError("a tree stays pending until one of its paths is chosen: commit=False")
        tree = plant(parents, valid, len(self.lengths), block.rows)
        replayed = next((x.replay.rows for x in self._kda() if x.replay is not None), 0)
        return replace(
            block,
            tree=tree,
            mask=tree.readable(self.lengths, block.visible),
            taps=tree.taps(self.conv_size),
            upto=tree.behind(replayed),
        )

    def _mask(self, rows: int, visible: int) -> Tensor | None:
        device = self.lengths.device
        if self._uniform is not None:
            if rows == 1:
                return None
            return torch.ones(1, rows, visible, dtype=torch.bool, device=device).tril(self._uniform)
        last = self.lengths.unsqueeze(1) + torch.arange(rows, device=device)
        return torch.arange(visible, device=device) <= last.unsqueeze(-1)

    def _touch(self, visible: int, clear: bool) -> None:
        """Slots that come into sight. Where lengths differ no block writes all of them: clear."""
        if visible <= self._touched:
            return
        if clear:
            for mla in self._mla():
                mla.latents[:, self._touched : visible].zero_()
        self._touched = visible

    def finish(self, block: Block) -> None:
        """Every layer has seen the block: its rows are committed now, or wait for ``commit``."""
        self._entered = False
        if not block.commit:
            self._pending = replace(block, mask=None, taps=None, upto=None)
        else:
            self._advance(block.rows if block.counts is None else block.counts)

    def _advance(self, n: int | Tensor) -> None:
        self.lengths = self.lengths + n
        if isinstance(n, int) and self._uniform is not None:
            self._uniform = self._longest = self._uniform + n
            return
        self._measure()

    def _measure(self) -> None:
        shortest, self._longest = (int(x) for x in self.lengths.aminmax())
        self._uniform = self._longest if shortest == self._longest else None

    def commit(self, n: int | Tensor) -> None:
        """Accept the first n rows of the pending block; n is a number or int64 [B], per batch row.

        Raises:
            ValueError: no block is pending, n lies outside 0..T or beyond a row's real rows, or, in
                a tree, the first n rows are not a path.
        """
        block = self._awaiting()
        n = self._checked(n, block)
        if block.tree is not None:
            counts = n if isinstance(n, Tensor) else torch.full_like(self.lengths, n)
            self.commit_path(first_rows(counts).rows)
        elif isinstance(n, int):
            self._accept(n, block)
        else:
            self._accept_path(first_rows(n), block, moved=False)

    def commit_path(self, path: Tensor) -> None:
        """Accept the rows of one path of the pending block, per batch row.

        Args:
            path: [B, P] int64, rows of the block in order from the root, -1 after the last. Of a
                chain only its first real rows are one.

        Raises:
            ValueError: no block is pending, or that is no such path.
        """
        block = self._awaiting()
        if block.tree is not None:
            parents, valid = block.tree.parents, block.tree.valid
        else:
            own = torch.arange(block.rows, device=self.lengths.device)
            parents = (own - 1).unsqueeze(0)
            valid = None if block.counts is None else own < block.counts.unsqueeze(1)
        accepted = check_path(path, parents, valid, len(self.lengths))
        longest = accepted.rows.shape[1]
        steps = torch.arange(longest, device=path.device)
        first = bool(((accepted.rows == steps) | (accepted.rows < 0)).all())
        if first and int(accepted.counts.min()) == longest:
            self._accept(longest, block)
        else:
            self._accept_path(accepted, block, moved=not first)

    def rollback(self) -> None:
        """Accept nothing of the pending block."""
        self.commit(0)

    def _accept(self, n: int, block: Block) -> None:
        for kda in self._kda():
            kda.commit(n)
        if len(self.lengths) > 1 and n < block.rows:
            own = torch.arange(n, device=self.lengths.device)
            self._place(own.expand(len(self.lengths), -1), block)
        self._pending = None
        self._advance(n)

    def _accept_path(self, path: Path, block: Block, *, moved: bool) -> None:
        window = path.window(self.conv_size)
        for kda in self._kda():
            kda.commit_path(path, window)
        if moved or len(self.lengths) > 1:
            self._place(path.rows, block)
        self._pending = None
        self._advance(path.counts)

    def _place(self, path: Tensor, block: Block) -> None:
        """Latents of a path to where they would stand had they been the first rows, zeros after
        them: a longer row may look past a shorter one's end, and a rejected row may hold anything.
        """
        rows = F.pad(path, (0, block.rows - path.shape[1]), value=-1)
        start = self.lengths.unsqueeze(1)
        there = start + rows.clamp(min=0)
        here = start + torch.arange(block.rows, device=rows.device)
        for mla in self._mla():
            mla.place(there, here, rows < 0)

    def _awaiting(self) -> Block:
        if self._pending is None:
            raise ValueError("no block is pending: there is nothing to commit")
        return self._pending

    def _checked(self, n: int | Tensor, block: Block) -> int | Tensor:
        """n, as one number where all rows accept alike."""
        limit = block.rows if block.counts is None else block.counts
        if isinstance(n, Tensor) and n.shape != self.lengths.shape:
            raise ValueError(f"{list(n.shape)} counts for a batch of {len(self.lengths)}")
        low, high = (n, n) if isinstance(n, int) else (int(x) for x in n.aminmax())
        fits = block.counts is None or bool((block.counts >= n).all())
        if low < 0 or high > block.rows or not fits:
            raise ValueError(
                f"cannot accept {n} rows of a block with {limit}; expected 0 to that many"
            )
        return low if low == high else n

    def fold(self) -> None:
        """Fold every pending replay into its state, as the next forward would."""
        for kda in self._kda():
            kda.fold()

    def _settled(self, before: str) -> None:
        if self._entered:
            raise RuntimeError(
                "a forward broke off inside the model: this cache is not whole, make a new one"
            )
        if self._pending is not None:
            raise RuntimeError(f"a block is pending: commit or roll it back before {before}")
        if self.offloaded:
            raise RuntimeError(f"the cache is offloaded: onload it before {before}")

    def _kda(self) -> Iterator[KDAState]:
        return (layer for layer in self.layers if isinstance(layer, KDAState))

    def _mla(self) -> Iterator[LatentState]:
        return (layer for layer in self.layers if isinstance(layer, LatentState))
