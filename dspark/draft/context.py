"""What a drafter remembers of a text, as far as every backbone agrees on it: lengths.

Lengths live on the host: a slice needs them there, and reading them back from a device would stall
every round.

Letters: B batch, N new rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


class DraftContext:
    """A batch of texts with a length for each row; subclasses hold what a backbone keeps of them.

    Args:
        batch: B.
        max_length: Longest text in tokens that will be appended to one row.
        device: Where its tensors live.
    """

    def __init__(self, batch: int, max_length: int, device: torch.device) -> None:
        if batch < 1 or max_length < 1:
            raise ValueError(f"batch {batch} and max_length {max_length} must both be at least 1")
        self.batch, self.max_length, self.device = batch, max_length, device
        self.row_lengths = [0] * batch

    @property
    def lengths(self) -> Tensor:
        """[B] int64 committed positions per row; also the position of the next anchor."""
        return torch.tensor(self.row_lengths, dtype=torch.int64, device=self.device)

    @property
    def common_length(self) -> int | None:
        """The length that all rows share, or None where they differ."""
        first = self.row_lengths[0]
        return first if all(length == first for length in self.row_lengths) else None

    def uniform_length(self, kept: list[int]) -> int | None:
        """The length that all rows share now and will after `kept` more, or None."""
        return self.common_length if all(count == kept[0] for count in kept) else None

    def positions(self, rows: int) -> Tensor:
        """[B, rows] positions after each row's length."""
        return self.lengths[:, None] + torch.arange(rows, device=self.device)

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        raise NotImplementedError

    def counts(self, new_rows: int, counts: int | Tensor | None) -> list[int]:
        """Checks how many of N new rows each batch row keeps, and returns them as a list.

        Raises:
            ValueError: a count outside 0..N, or a text longer than `max_length`.
        """
        if counts is None:
            counts = new_rows
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

    def move(self, kept: list[int]) -> None:
        """Adds the rows that `extend` kept to the lengths."""
        self.row_lengths = [a + b for a, b in zip(self.row_lengths, kept, strict=True)]
