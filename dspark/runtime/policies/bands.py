"""Verification by confidence: where siblings stand by, and where a block is cut at once.

    high   c_k >= high                        the primary alone
    low    c_k < low  and  k > min_draft      the block is cut before k
    mid    all others                         the primary, and `count` siblings if it is rejected

Bands go on top of any policy: it decides on the positions that are left to it, sees a low one as
the end of the row, and pays for the rows of siblings. At the default thresholds a mid position is
one whose primary is rejected often enough for a second try to be worth rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dspark.errors import UserError
from dspark.runtime.policies.frontier import Frontier, Policy
from dspark.runtime.records import Band, RoundRecord

HIGH, LOW, SIBLINGS = 0.9, 0.3, 2
"""Thresholds on the calibrated confidence, and the siblings of a mid position."""
MOST_SIBLINGS = 64
"""More at a position make a pass of hundreds of rows: minutes where a plain step takes moments."""
MIN_DRAFT = 2


def band_names(
    confidence: Sequence[float], high: float = HIGH, low: float = LOW, min_draft: int = MIN_DRAFT
) -> tuple[Band, ...]:
    """The band of each position of a block, from its first."""
    return tuple(
        "high" if c >= high else "low" if c < low and k >= min_draft else "mid"
        for k, c in enumerate(confidence)
    )


@dataclass(frozen=True)
class Bands:
    """A policy with bands.

    inner      decides how far, within what the bands leave
    high, low  thresholds on c_k, 0 <= low <= high <= 1
    count      siblings of a mid position, 0 to MOST_SIBLINGS
    min_draft  positions that are never cut for a low confidence
    """

    inner: Policy
    high: float = HIGH
    low: float = LOW
    count: int = SIBLINGS
    min_draft: int = MIN_DRAFT

    needs_confidence = True

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= 1:
            raise UserError(
                f"bands: expected 0 <= low <= high <= 1, got low {self.low} and high {self.high}"
            )
        if not 0 <= self.count <= MOST_SIBLINGS or self.min_draft < 0:
            raise UserError(
                f"bands: expected 0..{MOST_SIBLINGS} siblings and a min_draft of 0 or more, got "
                f"{self.count} and {self.min_draft}"
            )

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def siblings(self) -> int:
        return max(self.count, self.inner.siblings)

    def draft_length(self, block_size: int) -> int:
        return self.inner.draft_length(block_size)

    def plan(self, frontier: Frontier) -> None:
        self.inner.plan(_Banded(frontier, self))

    def observe(self, record: RoundRecord) -> None:
        self.inner.observe(record)

    def bands(self, confidence: Sequence[float]) -> tuple[Band, ...]:
        return band_names(confidence, self.high, self.low, self.min_draft)

    def fresh(self) -> Bands:
        return replace(self, inner=self.inner.fresh())

    def settings(self) -> dict[str, Any]:
        own = {"high": self.high, "low": self.low, "siblings": self.count}
        return {**self.inner.settings(), "bands": {**own, "min_draft": self.min_draft}}


class _Banded(Frontier):
    """A frontier on which low positions are the end and mid ones come with siblings."""

    def __init__(self, under: Frontier, bands: Bands) -> None:
        self._under = under
        self._bands = bands
        self.slots = under.slots
        self._look()

    @property
    def width(self) -> Tensor:
        return 1 + self._standing_by()

    def extend(self, rows: Tensor, siblings: Tensor | None = None) -> None:
        counts = self._standing_by()
        if siblings is not None:
            counts = torch.maximum(counts, siblings)
        self._under.extend(rows & self.open, counts)
        self._look()

    def extend_unseen(self, count: int) -> None:
        """With bands every position is looked at: by them."""
        for _ in range(min(count, self.slots)):
            self.extend(self.open)

    def _standing_by(self) -> Tensor:
        mid = self.open & (self._under.confidence < self._bands.high)
        return torch.where(mid, self._bands.count, 0)

    def _look(self) -> None:
        under, bands = self._under, self._bands
        self.position, self.rows = under.position, under.rows
        low = (under.confidence < bands.low) & (under.position >= bands.min_draft)
        self.open = under.open & ~low
        self.entropy = torch.where(self.open, under.entropy, torch.inf)
        self._confidence = torch.where(self.open, under.confidence, 0.0)
