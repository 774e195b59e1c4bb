"""Keys and values of a transformers model, in buffers that any row can take back.

transformers' own caches are rectangles: all batch rows as long as each other, cropped together,
and a sliding window forgets what a crop would need. Here every batch row writes at its own length,
so that rows may accept different numbers of tokens:

    full layer       position p at slot p
    sliding layer    position p at slot p mod C, C = window - 1 + ROOM

New rows are written behind the committed ones and stay pending. `commit` keeps a prefix, or a path
of a tree moved together, and clears the rest: nothing rejected is left behind. A ring of window - 1
+ ROOM slots never overwrites, with up to ROOM new rows, what the row after a rollback must see.

Letters: B batch, T new rows, P rows of a path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin

from dspark.runtime.hf_layer import ROOM, Absent, RowLayer, RowSnapshot
from dspark.runtime.hf_mask import NewRows, Ring, additive, new_rows, visible
from dspark.runtime.target import Cache, Snapshot


@dataclass(frozen=True, eq=False)
class _Pending:
    """A block that waits for its verdict."""

    rows: NewRows
    counts: list[int]


@dataclass(frozen=True, eq=False)
class Pass:
    """What a model needs to run a block: positions [B, T] and a mask per kind of layer."""

    positions: Tensor
    masks: dict[Ring, Tensor]


class RowCache:
    """The cache of a batch of requests; see `dspark.runtime.target.Cache`.

    `lengths` are known to the host as well: a commit of counts on an accelerator waits for them.

    Args:
        rings: The layout of each layer; None: a layer without keys and values of its own.
        batch: Requests B.
        max_length: Tokens to make room for; blocks that lie past it make more.
    """

    def __init__(
        self,
        rings: Sequence[Ring | None],
        batch: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rings = tuple(rings)
        self.max_length = max_length
        self.dtype = dtype
        self.device = device
        self.model_cache = TransformersCache(layers=[_layer(ring, max_length) for ring in rings])
        self._lengths = [0] * batch
        self._pending: _Pending | None = None
        self._real = torch.ones(1, 1, dtype=torch.bool, device=device)

    @property
    def _layers(self) -> list[RowLayer]:
        return [layer for layer in self.model_cache.layers if isinstance(layer, RowLayer)]

    @property
    def room(self) -> int | None:
        """New rows that fit at once; None: any number."""
        ringed = any(layer.ring.capacity is not None for layer in self._layers)
        return ROOM if ringed else None

    @property
    def lengths(self) -> Tensor:
        return torch.tensor(self._lengths, dtype=torch.int64, device=self.device)

    @property
    def nbytes(self) -> int:
        kept = [layer for layer in self._layers if layer.is_initialized]
        return sum(
            tensor.numel() * tensor.element_size()
            for layer in kept
            for tensor in (layer.keys, layer.values)
        )

    def begin(self, new: int, valid: Tensor | None, parents: Tensor | None) -> Pass:
        """Announce a block of `new` rows; the model then writes it, and it is pending.

        valid [B, T] bool marks the real ones; None: all, and nothing waits for a device to say so.
        Raises RuntimeError if another one is, and ValueError for more rows than `room`.
        """
        if self._pending is not None:
            raise RuntimeError("a block is pending: commit or roll it back before the next forward")
        if self.room is not None and new > self.room:
            raise ValueError(f"expected at most {self.room} new rows, got {new}")
        batch = len(self._lengths)
        counts = [new] * batch if valid is None else valid.sum(1).tolist()
        valid = self._real.expand(batch, new) if valid is None else valid
        rows = new_rows(valid, parents)
        lengths = self.lengths
        width = max(1, *map(int.__add__, self._lengths, counts))  # attention over nothing is NaN
        masks: dict[Ring, Tensor] = {}
        places: dict[tuple[Ring, int], Tensor] = {}  # alike for all layers of a kind: found once
        for layer in self._layers:
            layer.grow(width)
            layer.width = width if layer.ring.capacity is None else layer.ring.capacity
            kind = layer.ring, layer.slots
            if kind not in places:
                slots = layer.ring.slot(lengths.unsqueeze(1) + rows.order)
                places[kind] = torch.where(valid, slots, layer.slots)
            layer.at = places[kind]
            if layer.ring not in masks:
                allowed = visible(lengths, rows, layer.ring, layer.width)
                masks[layer.ring] = additive(allowed, self.dtype)
        self._pending = _Pending(rows, counts)
        return Pass((lengths.unsqueeze(1) + rows.depth).clamp(min=0), masks)

    def commit(self, n: int | Tensor) -> None:
        pending = self._pending
        if pending is None:
            raise ValueError("no block is pending: there is nothing to commit")
        counts = [n] * len(self._lengths) if isinstance(n, int) else [int(x) for x in n.tolist()]
        most = pending.counts
        if any(not 0 <= count <= limit for count, limit in zip(counts, most, strict=True)):
            raise ValueError(f"cannot accept {counts} rows of blocks with {most}")
        rows, kept = pending.rows, torch.tensor(counts, device=self.device).unsqueeze(1)
        if rows.tree and bool(
            ((rows.order < kept) & rows.valid & (rows.depth != rows.order)).any()
        ):
            raise ValueError("these rows of a tree are no chain: commit_path says which to keep")
        if counts != most:
            self._clear(rows.order >= kept)
        self._advance(counts)

    def commit_path(self, path: Tensor) -> None:
        """Keep the rows of one path per batch row: path [B, P] int64 row indices, -1 at the end.

        Raises ValueError unless each path starts behind the text and follows parents.
        """
        pending = self._pending
        if pending is None:
            raise ValueError("no block is pending: there is nothing to commit")
        path = path.to(self.device)
        used = path >= 0
        counts = used.sum(1)
        steps = torch.arange(path.shape[1], device=self.device)
        rows, index = pending.rows, path.clamp(min=0)
        depth_ok = (rows.depth.gather(1, index) == steps) & rows.valid.gather(1, index)
        last = index.gather(1, (counts - 1).clamp(min=0).unsqueeze(1))
        whole = rows.ancestors[torch.arange(len(path), device=self.device), last[:, 0]]
        ok = (used == (steps < counts.unsqueeze(1))) & (~used | (depth_ok & whole.gather(1, index)))
        if not bool(ok.all()):
            raise ValueError("commit_path: expected row indices of a path from its first row on")
        base = self.lengths.unsqueeze(1)
        moved = base + rows.order.gather(1, index)
        for layer in self._layers:
            if layer.is_initialized and path.shape[1]:
                keys, values = layer.read(layer.ring.slot(moved))
                to = torch.where(used, layer.ring.slot(base + steps), layer.slots)
                layer.write(to, keys, values)
        self._clear(rows.order >= counts.unsqueeze(1))
        self._advance(counts.tolist())

    def rollback(self) -> None:
        self.commit(0)

    def _clear(self, rejected: Tensor) -> None:
        """Zero the slots of rejected rows [B, T]: whatever they hold, even NaN, is gone."""
        assert self._pending is not None
        rejected = rejected & self._pending.rows.valid
        if not bool(rejected.any()):
            return
        for layer in self._layers:
            if layer.is_initialized:
                layer.write(torch.where(rejected, layer.at, layer.slots), 0.0, 0.0)

    def _advance(self, counts: list[int]) -> None:
        self._lengths = [a + b for a, b in zip(self._lengths, counts, strict=True)]
        self._pending = None

    def _settled(self, what: str) -> None:
        if self._pending is not None:
            raise RuntimeError(f"a block is pending: commit or roll it back before {what}")

    def select(self, rows: Tensor) -> None:
        self._settled("selecting rows")
        for layer in self._layers:
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]
        self._lengths = [self._lengths[row] for row in rows.tolist()]

    def fork(self) -> RowCache:
        """An independent copy."""
        self._settled("forking")
        other = RowCache(self.rings, len(self._lengths), self.max_length, self.dtype, self.device)
        other._lengths = list(self._lengths)
        for mine, copy in zip(self._layers, other._layers, strict=True):
            copy.slots = mine.slots
            if mine.is_initialized:
                copy.adopt(mine.keys.clone(), mine.values.clone())
        return other

    def snapshot(self, row: int) -> RowSnapshot:
        """Copies of what batch row `row` has committed, as far as anything can still read it."""
        self._settled("taking a snapshot")
        length, layers = self._lengths[row], self._layers
        return RowSnapshot(
            length,
            tuple(
                layer.read_row(row, self._held(layer.ring, length))
                if layer.is_initialized
                else None
                for layer in layers
            ),
        )

    def restore(self, row: int, snapshot: Snapshot) -> None:
        """Batch row `row` becomes what the snapshot holds.

        Raises ValueError for a snapshot of another kind of model.
        """
        self._settled("restoring")
        layers = self._layers
        if not isinstance(snapshot, RowSnapshot) or len(layers) != len(snapshot.layers):
            raise ValueError(f"a {type(snapshot).__name__} of another kind of target")
        for layer, pair in zip(layers, snapshot.layers, strict=True):
            layer.grow(snapshot.length)
            layer.clear_row(row)
            if pair is not None:
                layer.write_row(
                    row, self._held(layer.ring, snapshot.length), pair, len(self._lengths)
                )
        self._lengths[row] = snapshot.length

    def put(self, row: int, other: Cache) -> None:
        """A request joins: batch row `row` becomes the only row of `other`."""
        if not isinstance(other, RowCache):
            raise ValueError(f"a {type(other).__name__} of another kind of target")
        if len(other._lengths) != 1:
            raise ValueError(f"expected a cache of one row, got {len(other._lengths)}")
        self.restore(row, other.snapshot(0))

    def reset(self, row: int) -> None:
        """A request left: batch row `row` is empty, its slots zero."""
        self._settled("resetting a row")
        for layer in self._layers:
            layer.clear_row(row)
        self._lengths[row] = 0

    def offload(self) -> None:
        """Move everything to the host; `onload` before the next forward."""
        self._settled("moving the cache")
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        """Move everything back to the model's device."""
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        for layer in self._layers:
            if layer.is_initialized:
                layer.adopt(layer.keys.to(device), layer.values.to(device))

    def _held(self, ring: Ring, length: int) -> Tensor:
        """Slots of the committed positions that a later row can see, oldest first."""
        first = 0 if ring.window is None else length - ring.window + 1
        return ring.slot(torch.arange(max(0, first), length, device=self.device))


def _layer(ring: Ring | None, slots: int) -> CacheLayerMixin:
    return Absent() if ring is None else RowLayer(ring, slots)
