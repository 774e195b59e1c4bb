"""The one protocol that hides a model from the rest of the runtime.

A target embeds, runs and un-embeds tokens, and its cache can take back what it has just read.
Speculative decoding needs exactly one more thing than plain decoding: rows that stay *pending*
until it is known which of them were right. Those rows are a chain, or a tree when some of them are
alternatives to others.

Letters: B batch, T new rows, D hidden, V vocab, N number of taps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dspark.taps import TapSet


@dataclass(frozen=True, eq=False)
class TargetOutput:
    """Result of one pass over T new rows.

    hidden  [B, T, D], after the final norm: `Target.logits(hidden)` are the next-token logits
    taps    [B, T, N*D], tapped states side by side, ascending layer id; None if none were asked
    """

    hidden: Tensor
    taps: Tensor | None


class Snapshot(Protocol):
    """State of one request at one moment. Frozen: nothing that happens to a cache changes it."""

    @property
    def length(self) -> int:
        """Committed tokens it stands for."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        ...

    def to(self, device: torch.device | str) -> Snapshot:
        """The same state on another device, for example in host memory."""
        ...


class Cache(Protocol):
    """All state of a batch of requests: attention latents, recurrent states, windows, lengths.

    Invariant: whatever was proposed, taken back and committed before, the cache equals that of a
    fresh prefill of the committed tokens. A batch row whose `valid` is all False and that commits
    nothing is an idle slot: it costs its share of the pass and keeps its state.

    Every operation but `commit`, `commit_path`, `rollback`, `lengths` and `nbytes` raises
    RuntimeError while rows are pending.
    """

    @property
    def lengths(self) -> Tensor:
        """[B] int64, committed tokens per row; pending rows are not counted."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held, pending block included."""
        ...

    def commit(self, n: int | Tensor) -> None:
        """Keep the first n (an int, or [B] per row) of the T pending rows and drop the rest.

        Raises ValueError if n is outside 0..T or nothing is pending.
        """
        ...

    def commit_path(self, path: Tensor) -> None:
        """Keep the pending rows `path` [B, P] int64, per batch row from the anchor down, -1 padded
        at the end, and drop the rest; each row must be the parent of the next.

        Raises ValueError if an index is outside -1..T-1 or nothing is pending.
        """
        ...

    def rollback(self) -> None:
        """Drop all pending rows: `commit(0)`."""
        ...

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows ([b] int64, distinct), in this order."""
        ...

    def fork(self) -> Cache:
        """An independent copy with the same rows."""
        ...

    def snapshot(self, row: int) -> Snapshot:
        """Copy of what batch row `row` holds."""
        ...

    def restore(self, row: int, snapshot: Snapshot) -> None:
        """Put a snapshot of the same target in place of whatever batch row `row` holds."""
        ...

    def put(self, row: int, other: Cache) -> None:
        """Replace batch row `row` by the only row of `other`: a request joins."""
        ...

    def reset(self, row: int) -> None:
        """Empty batch row `row`: a request left."""
        ...

    def offload(self) -> None:
        """Move states to host memory (pinned, where there is an accelerator) until `onload`."""
        ...

    def onload(self) -> None:
        """Bring back what `offload` moved. Nothing to do if nothing was."""
        ...


class Target(Protocol):
    """A causal language model that can be verified against."""

    name: str
    vocab_size: int
    """Logical size: `logits` has exactly this width, padding rows of the table are cut off."""
    table_size: int
    """Rows of the embedding, at least `vocab_size`. Ids past it pad the table: `embed` takes them,
    since a drafter's mask token may be one, but nothing else does and none is ever emitted."""
    hidden_size: int
    num_layers: int
    max_positions: int
    """Longest text it claims to read, in tokens. Nothing is sized by it."""
    tap_kinds: tuple[str, ...]
    end_token_ids: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    supports_trees: bool
    """Whether `forward` takes `parents`."""
    notes: tuple[str, ...]
    """What a user should know before measuring anything, a sentence each."""

    def embed(self, tokens: Tensor) -> Tensor:
        """[...] int64 -> [..., D]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] post-norm states -> [..., V] float32, the caller's to overwrite."""
        ...

    def head(self, ids: Tensor) -> Callable[[Tensor], Tensor]:
        """`logits` of some ids alone: [n] int64 -> a function, [..., D] -> [..., n] float32.

        The function reads n rows of the LM head, copied here once, and is differentiable in its
        argument.
        """
        ...

    def head_weight(self) -> Tensor:
        """[rows, D], the LM head's matrix with its padding rows, for layouts that store a copy.

        A factor of the logits is in it; `head_rest` is not.
        """
        ...

    @property
    def head_rest(self) -> str:
        """What `logits` does beyond `head_weight`, in words; empty: nothing."""
        ...

    def plain_head(self) -> Tensor | None:
        """[V, D], the LM head's matrix where `logits` is the product with it and nothing else."""
        ...

    def new_cache(self, batch: int, max_length: int) -> Cache:
        """Empty cache for `batch` rows of at most `max_length` tokens, pending rows included."""
        ...

    def forward(
        self,
        tokens: Tensor,
        cache: Cache,
        *,
        valid: Tensor | None = None,
        parents: Tensor | None = None,
        taps: TapSet | None = None,
        commit: bool,
    ) -> TargetOutput:
        """Run [B, T] tokens after what the cache holds.

        valid [B, T] bool marks real tokens (None: all): of a left- or right-padded batch, or of a
        tree anywhere in the row. What comes out of the others is unspecified.
        parents [T] or [B, T] int64, smaller than the row's own index, -1 for a row that follows the
        committed tokens: each row sees those, its ancestors and itself, and stands one position
        after its parent. None is the chain -1, 0, 1, ... Only for pending rows of a target that
        `supports_trees`; ValueError otherwise.
        commit True: rows are folded into the cache at once (prefill, plain decoding);
        False: they stay pending until `cache.commit(n)`, or `cache.commit_path(path)` for a tree.
        """
        ...
