"""What a drafter remembers of a batch of texts, as far as every backbone agrees on it.

Lengths live on the host: a slice needs them there, and reading them back from a device would stall
every round. A loop that must not wait at all calls `fix_shapes`: from then on lengths live on the
device, counts are never read, and no shape depends on a length.

Rows of the batch are texts that come and go: `put` and `reset` replace one, `select` drops some,
`fork` copies all. None of them touches another row.

Letters: B batch, N new rows.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from dspark.k3.storage import Kind, Storage, Wanted, take_all

Self = TypeVar("Self", bound="DraftContext")


class DraftContext:
    """A batch of texts with a length for each row; subclasses hold what a backbone keeps of them.

    Args:
        batch: B.
        max_length: Longest text in tokens that will be appended to one row.
        device: Where its tensors live.
        weights: The drafter's weights, as they are now: what one set of weights has read, another
            cannot draft from, so a context keeps the set it was made with.
        storage: Where its tensors live from beginning to end; None: in memory of its own.
    """

    def __init__(
        self,
        batch: int,
        max_length: int,
        device: torch.device,
        weights: object = None,
        storage: Storage | None = None,
    ) -> None:
        if batch < 1 or max_length < 1:
            raise ValueError(f"batch {batch} and max_length {max_length} must both be at least 1")
        self.batch, self.max_length, self.device = batch, max_length, device
        self.weights = weights
        self.row_lengths = [0] * batch
        """Exact until `fix_shapes`, which leaves nothing to read here but zeros."""
        self._lengths: Tensor | None = None
        self._in_place = False
        self._storage = storage

    def _take(self, wanted: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
        """Zeroed tensors of these shapes and dtypes: all, or what the storage raises.

        Zeros, because rows behind a length are masked, and 0 * NaN would still be NaN.
        """
        if self._storage is None:
            return [torch.zeros(shape, dtype=dtype, device=self.device) for shape, dtype in wanted]
        numbered = [
            Wanted(Kind.CONTEXT, i, tuple(shape), dtype) for i, (shape, dtype) in enumerate(wanted)
        ]
        return [tensor.zero_() for tensor in take_all(self._storage, numbered, self.device)]

    def _rows_of(self, held: Tensor, rows: Tensor, dim: int = 0) -> Tensor:
        """These batch rows of a tensor: a new one, or the same memory where that is a storage's."""
        kept = held.index_select(dim, rows)
        return kept if self._storage is None else held.narrow(dim, 0, len(rows)).copy_(kept)

    @property
    def lengths(self) -> Tensor:
        """[B] int64 committed positions per row; also the position of the next anchor."""
        if self._lengths is not None:
            return self._lengths
        return torch.tensor(self.row_lengths, dtype=torch.int64, device=self.device)

    @property
    def fixed(self) -> bool:
        """Whether lengths live on the device and shapes depend on none of them."""
        return self._lengths is not None

    def fix_shapes(self, *, in_place: bool = False) -> None:
        """Move the lengths to the device for good.

        Counts given as a tensor are not checked any more, since that would be to read them: the
        caller keeps every text within `max_length`.

        Args:
            in_place: They stay in one tensor, as a captured graph needs it: whoever holds it sees
                them change. Buffers stay where they are too if they come from a storage.
        """
        if self._lengths is None:
            self._lengths = self.lengths
            self.row_lengths = [0] * self.batch
        self._in_place = in_place

    @property
    def common_length(self) -> int | None:
        """The length that all rows share, or None where they differ or are not known here."""
        first = self.row_lengths[0]
        same = not self.fixed and all(length == first for length in self.row_lengths)
        return first if same else None

    def uniform_length(self, kept: list[int] | Tensor) -> int | None:
        """The length that all rows share now and will after `kept` more, or None."""
        if isinstance(kept, Tensor):
            return None
        return self.common_length if all(count == kept[0] for count in kept) else None

    def positions(self, rows: int) -> Tensor:
        """[B, rows] positions after each row's length."""
        return self.lengths[:, None] + torch.arange(rows, device=self.device)

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        raise NotImplementedError

    def counts(self, new_rows: int, counts: int | Tensor | None) -> list[int] | Tensor:
        """How many of N new rows each batch row keeps: checked and read, or untouched if fixed.

        Raises:
            ValueError: a count outside 0..N, or a text longer than `max_length`.
        """
        if counts is None:
            counts = new_rows
        if self.fixed:
            if isinstance(counts, Tensor):
                return counts
            return torch.full((self.batch,), counts, device=self.device)
        wanted = [counts] * self.batch if isinstance(counts, int) else counts.tolist()
        if len(wanted) != self.batch or not all(0 <= count <= new_rows for count in wanted):
            raise ValueError(f"counts {wanted}: {self.batch} numbers in 0..{new_rows} expected")
        for length, count in zip(self.row_lengths, wanted, strict=True):
            if length + count > self.max_length:
                raise ValueError(
                    f"context of {length} + {count} positions is longer than the {self.max_length} "
                    "it was made for; give new_context a larger max_length"
                )
        return wanted

    def move(self, kept: list[int] | Tensor) -> None:
        """Adds the rows that `extend` kept to the lengths."""
        if self._lengths is not None:
            more = torch.as_tensor(kept, device=self.device)
            if self._in_place:
                self._lengths.add_(more)
            else:
                self._lengths = self._lengths + more
            return
        assert isinstance(kept, list)
        self.row_lengths = [a + b for a, b in zip(self.row_lengths, kept, strict=True)]

    def put(self: Self, row: int, other: Self) -> None:
        """Replace a batch row by the only row of another context of the same drafter: it joins.

        `other` may have fixed shapes if this context has them too and was made for the same length.

        Raises:
            ValueError: `other` has more rows than one or other weights, fixed shapes that are not
                those of this context, its text is too long for it, or there is no such row.
        """
        self._check_row(row)
        if type(other) is not type(self) or other.weights is not self.weights:
            raise ValueError("put: the other context belongs to another drafter, or other weights")
        same = self.fixed and self.max_length == other.max_length
        if other.batch != 1 or (other.fixed and not same):
            raise ValueError(
                "put: a context of one row, its length known to the host or its shapes fixed like "
                "those of this one, is needed"
            )
        if other.row_lengths[0] > self.max_length:
            raise ValueError(
                f"put: a text of {other.row_lengths[0]} tokens into a context made for "
                f"{self.max_length}"
            )
        self._write_row(row, other)
        self._set_length(row, other.lengths[0] if other.fixed else other.row_lengths[0])

    def reset(self, row: int) -> None:
        """Forget a batch row: its request left. Whatever it held, also NaN, is overwritten."""
        self._check_row(row)
        self._write_row(row, None)
        self._set_length(row, 0)

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows ([b] int64, distinct, b >= 1), in this order."""
        self._select_rows(rows)
        self.batch = len(rows)
        if self._lengths is not None:
            self._lengths = self._lengths[rows]
            self.row_lengths = [0] * self.batch
        else:
            self.row_lengths = [self.row_lengths[row] for row in rows.tolist()]

    def fork(self: Self) -> Self:
        """A copy in memory of its own, sharing nothing but the drafter's weights."""
        other = copy.copy(self)
        other._storage = None
        other.row_lengths = list(self.row_lengths)
        other._lengths = None if self._lengths is None else self._lengths.clone()
        other._select_rows(torch.arange(self.batch, device=self.device))
        return other

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.batch:
            raise ValueError(f"row {row}: expected 0..{self.batch - 1}")

    def _set_length(self, row: int, length: int | Tensor) -> None:
        if self._lengths is None:
            assert isinstance(length, int)
            self.row_lengths[row] = length
            return
        if not self._in_place:
            # a new tensor: whoever holds the old one (a frame in flight, a fork) keeps what it read
            self._lengths = self._lengths.clone()
        self._lengths[row] = length

    def _write_row(self: Self, row: int, other: Self | None) -> None:
        """Overwrite all that is held of a row by the other's only row, or by zeros.

        Another of fixed shapes has buffers of the same shapes: all they hold is copied.
        """
        raise NotImplementedError

    def _select_rows(self, rows: Tensor) -> None:
        """Replace every tensor by one of these rows: a new one, unless a storage owns it."""
        raise NotImplementedError
