"""Taps of plain frames, kept until a drafter is about to be asked.

Where plain frames take turns with drafts, a drafter's context has to read what they wrote. Reading
it row by row costs every plain frame a pass over the context's weights; whole stretches cost one.

    rows    [B, R, N*D]    taps that the context has not read
    count   [B] int64      how many of them each seat has

Letters: B seats, R places, N taps, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.draft.context import DraftContext
from dspark.draft.model import DSparkDrafter

PLACES = 16
"""Plain frames whose taps are read at once: more save little, and a kernel takes so many rows."""


class WaitingTaps:
    """Places for the taps of `PLACES` plain frames; the caller sees that they are read in time."""

    def __init__(self, seats: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = torch.zeros(seats, PLACES, width, dtype=dtype, device=device)
        self.count = torch.zeros(seats, dtype=torch.int64, device=device)

    def add(self, taps: Tensor, count: Tensor) -> None:
        """One row [B, 1, N*D]; it waits in the seats that ``count`` [B] 0 or 1, says so of."""
        self.rows.scatter_(1, self.count[:, None, None].expand(taps.shape), taps)
        self.count.add_(count)

    def read(self, drafter: DSparkDrafter, context: DraftContext) -> None:
        """Into the context with all that waits."""
        drafter.extend(context, self.rows, self.count)
        self.count.zero_()
