"""The state of one layer: KDA state and convolution window, or MLA latents; and the block's rows.

A block's rows stay pending until it is known how many of the first ones were accepted. Nothing is
undone then, because nothing was done:

- a KDA layer keeps its committed state and the block's inputs (k, v, g, beta); the next forward
  folds the accepted ones in while it reads its own rows (replay). No state is ever copied;
- a convolution keeps the block's rows behind its window; committing picks those before the cut;
- an MLA layer wrote its latents after the committed ones; committing moves the length.

Padding rows (beyond a batch row's count) have beta = 0 and g = 0, which leaves a state as it is.
The rows of a pending block may form a tree; then a path of it is accepted, and what is replayed is
that path, a chain again.

Letters: B batch, T rows of a block, P rows of a path, H heads, K and V widths, C convolution
channels, W convolution width, L slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dspark import ops
from dspark.k3.config import K3Config
from dspark.k3.storage import Kind
from dspark.k3.tree import Path, Tree


@dataclass(frozen=True)
class Block:
    """The rows of one forward and where they stand.

    ``counts`` [B] is the number of real rows per batch row, None when all T are real. ``lengths``
    [B] holds the committed lengths, ``start`` the one they share, or None where they differ.
    """

    rows: int
    counts: Tensor | None
    commit: bool
    start: int | None
    lengths: Tensor
    visible: int
    """Latent slots [0, visible) hold everything that any row of the block may read."""
    mask: Tensor | None
    """[B or 1, T, visible] bool, True = may read; None where every row reads every slot, or
    where ``tiled``."""
    tiled: bool = False
    """So many rows over so many slots that no mask of them is made: row t reads the slots up to
    its own, and attention takes them in tiles."""
    tree: Tree | None = None
    """None where each row follows the one before it."""
    taps: Tensor | None = None
    """Of a tree, [B or 1, T, W]: where the convolution of each row reads in ``with_window``."""
    upto: Tensor | None = None
    """Of a tree, [B or 1, R+T, R+T] bool: ancestors-or-self, behind the R rows to be replayed."""


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

    def along(self, path: Tensor) -> KDAInputs:
        """The rows path [B, P], all zero where it is -1: whatever a rejected row holds is gone."""
        batch = torch.arange(len(path), device=path.device).unsqueeze(1)
        index, none = path.clamp(min=0), (path < 0).unsqueeze(-1)
        k, v, g = (
            x[batch, index].masked_fill(none.unsqueeze(-1), 0.0) for x in (self.k, self.v, self.g)
        )
        return KDAInputs(k, v, g, self.beta[batch, index].masked_fill(none, 0.0))

    def without(self, row: int) -> KDAInputs:
        """Nothing to replay in one batch row."""
        keep = torch.arange(len(self.beta), device=self.beta.device) != row
        return self._map(lambda x: x.where(keep.view(-1, *[1] * (x.dim() - 1)), 0.0))

    def row(self, row: int) -> KDAInputs:
        return self._map(lambda x: x[row : row + 1])

    def clone(self) -> KDAInputs:
        return self._map(Tensor.clone)

    def select(self, index: Tensor) -> KDAInputs:
        return self._map(lambda x: x[index])

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.k, self.v, self.g, self.beta

    def _map(self, change: Callable[[Tensor], Tensor]) -> KDAInputs:
        return KDAInputs(*(change(x) for x in self.tensors()))

    def then(self, later: KDAInputs) -> KDAInputs:
        pairs = ((self.k, later.k), (self.v, later.v), (self.g, later.g), (self.beta, later.beta))
        return KDAInputs(*(torch.cat(pair, dim=1) for pair in pairs))

    @property
    def rows(self) -> int:
        return self.k.shape[1]


class KDAState:
    """State [B, H, K, V] float32 and convolution window [B, W-1, C] of one KDA layer."""

    def __init__(self, config: K3Config, state: Tensor, window: Tensor) -> None:
        self.lower_bound = config.kda_gate_lower_bound
        self.state, self.window = state.zero_(), window.zero_()
        self.replay: KDAInputs | None = None
        self._pending: KDAInputs | None = None
        self._pending_rows: Tensor | None = None

    def with_window(self, rows_BTC: Tensor) -> Tensor:
        """The convolution's input: the window followed by the block's rows, [B, W-1+T, C]."""
        return torch.cat((self.window, rows_BTC), dim=1)

    def advance(self, q: Tensor, new: KDAInputs, windowed: Tensor, block: Block) -> Tensor:
        """Outputs [B, T, H, V] of the block's rows; ``windowed`` comes from ``with_window``."""
        if block.counts is not None:
            new = new.first(block.counts)
        if block.commit and new.rows > ops.KDA_CHUNK:
            self.fold()
            out, state = ops.kda_chunk(
                q, new.k, new.v, new.g, new.beta, self.state, self.lower_bound
            )
            self.state.copy_(state)
        else:
            out = self._step(q, new, block)
        if block.commit:
            self._move_window(windowed, new.rows if block.counts is None else block.counts)
        else:
            self._pending, self._pending_rows = new, windowed
        return out

    def _step(self, q: Tensor, new: KDAInputs, block: Block) -> Tensor:
        replay, self.replay = self.replay, None
        both, done = new, 0
        if replay is not None:
            both, done = replay.then(new), replay.rows
            q = torch.cat((replay.k, q), dim=1)  # the outputs of replayed rows are not used
        keep = done + new.rows if block.commit else done
        state = self.state
        out, _ = ops.kda_step(
            q, both.k, both.v, both.g, both.beta, state, keep, out=state, upto=block.upto
        )
        return out[:, done:] if done else out

    def fold(self) -> None:
        """Fold a pending replay into the state."""
        if self.replay is None:
            return
        r, self.replay = self.replay, None
        ops.kda_step(r.k, r.k, r.v, r.g, r.beta, self.state, r.rows, out=self.state)

    def _move_window(self, windowed: Tensor, n: int | Tensor) -> None:
        width = self.window.shape[1]
        if isinstance(n, int):
            self.window.copy_(windowed[:, n : n + width])
        else:
            index = n.unsqueeze(1) + torch.arange(width, device=n.device)
            index = index.unsqueeze(-1).expand(-1, -1, windowed.shape[2])
            torch.gather(windowed, 1, index, out=self.window)

    def commit(self, n: int | Tensor) -> None:
        """Accept the first n rows."""
        assert self._pending is not None
        assert self._pending_rows is not None
        self._move_window(self._pending_rows, n)
        accepted = self._pending.first(n)
        self.replay = accepted if accepted.rows else None
        self._pending = self._pending_rows = None

    def commit_path(self, path: Path, window: Tensor) -> None:
        """Accept the rows of a path; ``window`` [B, W-1] is where the new window stands."""
        assert self._pending is not None
        assert self._pending_rows is not None
        index = window.unsqueeze(-1).expand(-1, -1, self.window.shape[2])
        torch.gather(self._pending_rows, 1, index, out=self.window)
        self.replay = self._pending.along(path.rows)
        self._pending = self._pending_rows = None

    def parts(self, row: int) -> tuple[Tensor, Tensor]:
        """State [H, K, V], replay folded, and window [W-1, C] of one batch row; views where that is
        possible."""
        if self.replay is None:
            return self.state[row], self.window[row]
        r = self.replay.row(row)
        _, state = ops.kda_step(r.k, r.k, r.v, r.g, r.beta, self.state[row : row + 1], r.rows)
        return state[0], self.window[row]

    def put(self, row: int, state: Tensor | None, window: Tensor | None) -> None:
        """Replace one batch row; None: as before the first token."""
        if self.replay is not None:
            self.replay = self.replay.without(row)
        for held, given in ((self.state[row], state), (self.window[row], window)):
            held.zero_() if given is None else held.copy_(given)

    def held(self) -> list[tuple[Kind, Tensor]]:
        """The tensors that came from the storage."""
        return [(Kind.STATE, self.state), (Kind.WINDOW, self.window)]

    def hold(self, kind: Kind, tensor: Tensor) -> None:
        """Go on with another tensor."""
        if kind is Kind.STATE:
            self.state = tensor
        else:
            self.window = tensor

    def round_tensors(self) -> list[Tensor]:
        """What is held from one forward to the next, beside state and window."""
        kept = [r for r in (self.replay, self._pending) if r is not None]
        rows = [] if self._pending_rows is None else [self._pending_rows]
        return rows + [x for r in kept for x in r.tensors()]


class LatentState:
    """Latents of one MLA layer: [B, L, R + P], the normalised c and the raw shared key."""

    def __init__(self, latents: Tensor) -> None:
        self.latents = latents

    def write(self, rows_BTX: Tensor, block: Block) -> Tensor:
        """Put the block's latents after the committed ones; returns [B, visible, X]."""
        if block.start is not None:
            self.latents[:, block.start : block.start + block.rows] = rows_BTX
        else:
            slots = block.lengths.unsqueeze(1) + torch.arange(block.rows, device=rows_BTX.device)
            self.latents.scatter_(1, slots.unsqueeze(-1).expand_as(rows_BTX), rows_BTX)
        return self.latents[:, : block.visible]

    def place(self, there: Tensor, here: Tensor, none: Tensor) -> None:
        """Move latents from slots ``there`` to ``here``, zeros where ``none``; each [B, P]."""
        rows = self.latents.gather(1, there.unsqueeze(-1).expand(-1, -1, self.latents.shape[2]))
        rows = rows.masked_fill(none.unsqueeze(-1), 0.0)
        self.latents.scatter_(1, here.unsqueeze(-1).expand_as(rows), rows)

    def held(self) -> list[tuple[Kind, Tensor]]:
        """The tensor that came from the storage."""
        return [(Kind.LATENTS, self.latents)]

    def hold(self, kind: Kind, tensor: Tensor) -> None:
        """Go on with another tensor."""
        assert kind is Kind.LATENTS
        self.latents = tensor
