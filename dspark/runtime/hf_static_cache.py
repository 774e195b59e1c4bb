"""Keys and values of a transformers model in tensors that stay where they are.

Position p of a text lies at place p of its seat, in layers behind a sliding window too: what a row
may see is the mask's business. A step writes its rows behind the committed ones; rows that are not
accepted are written over by the next step, since ``lengths`` did not move past them, and nothing
is undone. A shorter step clears the places of a longer one that it does not write: a score against
NaN is NaN whatever the mask adds.

    keys, values [B, H, S, K] of every layer, those of one shape side by side in one tensor
    lengths      [B] int64

Letters: B seats, T rows of a step, H key-value heads, S places, K head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin

from dspark.runtime.hf_cache import RowCache
from dspark.runtime.hf_layer import Absent
from dspark.runtime.target import Cache

ALIGNED = 16
"""S is a multiple of it: attention kernels copy a mask whose rows are not aligned."""


@dataclass(frozen=True)
class LayerShape:
    """What a layer keeps of a row: keys and values of ``heads`` heads."""

    heads: int
    key: int
    value: int
    dtype: torch.dtype


@dataclass(eq=False)
class _Places:
    """Where the rows of the step lie, for all layers: seat [B, 1] and place [B, T]."""

    seat: Tensor
    place: Tensor


class StaticLayer(CacheLayerMixin):
    """Keys and values [B, H, S, K] of one layer, as a transformers cache layer."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, places: _Places) -> None:
        super().__init__()
        self.keys, self.values, self._places = keys, values, places
        self.device = keys.device
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise RuntimeError("the tensors of a static layer are made with it")

    def update(
        self, key_states: Tensor, value_states: Tensor, cache_kwargs: Any = None, kwargs: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Write the step's rows [B, H, T, K]; return all places, of which the mask hides some."""
        seat, place = self._places.seat, self._places.place
        self.keys[seat, :, place] = key_states.transpose(1, 2)
        self.values[seat, :, place] = value_states.transpose(1, 2)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return self.keys.shape[2] - self._places.place.shape[1]

    def get_max_length(self) -> int:
        return self.keys.shape[2]

    def get_max_cache_shape(self) -> int:
        return self.keys.shape[2]


@dataclass(frozen=True, eq=False)
class Rows:
    """What the model needs of a step: positions [B, T], and by window an additive mask
    [B, 1, T, S]; None stands for no window."""

    positions: Tensor
    masks: dict[int | None, Tensor]


class HFStaticCache:
    """State of a fixed number of seats; see `dspark.runtime.static_pass.StaticSeats`.

    Args:
        shapes: Of each layer of the model; None: it keeps nothing of its own.
        windows: Sliding windows that its masks know, None for full attention.
        batch: B.
        max_length: Longest text of a seat.
        rows: Most rows of a step; a step writes behind ``max_length``, so S is at least the sum.
        dtype: Of masks.

    No method but `load` waits for the device, and none checks what it would have to read there:
    the caller keeps texts within ``max_length``.
    """

    folds = True
    """Every accepted row counts at once: moving ``lengths`` is all there is to it."""

    def __init__(
        self,
        shapes: Sequence[LayerShape | None],
        windows: Sequence[int | None],
        batch: int,
        max_length: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_length, self.most_rows = max_length, rows
        self.clears = True
        """Whether a shorter step clears places. Where a text is read from its beginning, onto
        zeros and every place once, there is nothing to clear."""
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.accepted = torch.zeros(batch, dtype=torch.int64, device=device)
        places = -(-(max_length + rows) // ALIGNED) * ALIGNED
        self._columns = torch.arange(places, device=device)
        seat = torch.arange(batch, device=device).unsqueeze(1)
        self._places = _Places(seat, self._columns[:rows].expand(batch, rows))
        self._shapes, self._windows = tuple(shapes), tuple(windows)
        self._open, self._shut = (
            torch.full((), number, dtype=dtype, device=device)
            for number in (0.0, torch.finfo(dtype).min)
        )
        self._held = {
            shape: _tensors(shape, shapes.count(shape), batch, places, device)
            for shape in dict.fromkeys(shapes)
            if shape is not None
        }
        rest = {shape: zip(*pair, strict=True) for shape, pair in self._held.items()}
        self._layers = [
            None if shape is None else StaticLayer(*next(rest[shape]), self._places)
            for shape in shapes
        ]
        self.model_cache = TransformersCache(layers=[layer or Absent() for layer in self._layers])

    @property
    def batch(self) -> int:
        """B."""
        return len(self.lengths)

    @property
    def waits(self) -> bool:
        """Never: nothing is replayed."""
        return False

    def folding(self, *, waits: bool) -> HFStaticCache:
        """These seats as they are: every step of them counts at once."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes held from step to step."""
        held = [*self._all(), self.lengths, self.accepted]
        return sum(x.numel() * x.element_size() for x in held)

    def _all(self) -> list[Tensor]:
        return [tensor for pair in self._held.values() for tensor in pair]

    def begin(self, count: int) -> Rows:
        """Announce a step of ``count`` rows; the model then writes them."""
        at = self.lengths.unsqueeze(1) + self._columns[: self.most_rows]
        if count < self.most_rows and self.clears:
            for held in self._all():
                held[:, self._places.seat, :, at[:, count:]] = self._open.to(held.dtype)
        at = at[:, :count]
        self._places.place = at
        behind = at.unsqueeze(2) - self._columns
        future = behind < 0
        hidden = {
            window: future if window is None else future | (behind >= window)
            for window in self._windows
        }
        return Rows(
            # no row that counts lies behind the text's last place, where a table of positions ends
            at.clamp(max=self.max_length - 1),
            {
                window: torch.where(what, self._shut, self._open).unsqueeze(1)
                for window, what in hidden.items()
            },
        )

    def load(self, seat: int, cache: Cache | HFStaticCache) -> None:
        """Seat the request of a cache of one row, or of one seat, which stays as it is.

        Raises:
            RuntimeError: rows are pending there.
            ValueError: the request is longer than ``max_length``, or of another model.
        """
        if isinstance(cache, HFStaticCache):
            self._copy(seat, cache)
            return
        if not isinstance(cache, RowCache) or len(cache.rings) != len(self._layers):
            raise ValueError(f"a {type(cache).__name__} of another kind of target")
        given = cache.snapshot(0)
        if given.length > self.max_length:
            raise ValueError(f"a text of {given.length} tokens into seats of {self.max_length}")
        self.reset(seat)
        kept = iter(given.layers)
        for layer, ring in zip(self._layers, cache.rings, strict=True):
            pair = None if ring is None else next(kept)
            if pair is None:
                continue
            if layer is None:
                raise ValueError("the cache holds a layer that this model has no place for")
            for held, rows in zip((layer.keys, layer.values), pair, strict=True):
                first = given.length - len(rows)
                held[seat, :, first : given.length] = rows.transpose(0, 1)
        self.lengths[seat] = given.length

    def _copy(self, seat: int, other: HFStaticCache) -> None:
        """What another cache holds in its only seat; its length is not read."""
        theirs = (other.batch, other.max_length, other._shapes)
        if theirs != (1, self.max_length, self._shapes):
            raise ValueError("a seat of another length, or of another kind of target")
        for held, its in zip(self._all(), other._all(), strict=True):
            held[:, seat, :, : self.max_length] = its[:, 0, :, : self.max_length]
            held[:, seat, :, self.max_length :] = 0
        self.lengths[seat] = other.lengths[0]

    def reset(self, seat: int) -> None:
        """Empty a seat; whatever it held, also NaN, is gone."""
        for held in self._all():
            held[:, seat].zero_()
        self.lengths[seat] = 0


def _tensors(
    shape: LayerShape, layers: int, batch: int, places: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Keys and values [layers, B, H, S, K] of all layers of one shape."""
    keys, values = (
        torch.zeros(layers, batch, shape.heads, places, width, dtype=shape.dtype, device=device)
        for width in (shape.key, shape.value)
    )
    return keys, values
