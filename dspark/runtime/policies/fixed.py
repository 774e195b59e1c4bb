"""The same number of tokens every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dspark.errors import UserError
from dspark.runtime.policies.frontier import Frontier
from dspark.runtime.records import Band, RoundRecord


@dataclass(frozen=True)
class Fixed:
    """Draft and verify `length` tokens; None: the drafter's whole block."""

    name: ClassVar[str] = "fixed"
    siblings: ClassVar[int] = 0
    needs_confidence: ClassVar[bool] = False

    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 0:
            raise UserError(f"draft length: expected 0 or more, got {self.length}")

    def draft_length(self, block_size: int) -> int:
        return block_size if self.length is None else self.length

    def plan(self, frontier: Frontier) -> None:
        frontier.extend_unseen(self.draft_length(frontier.slots))

    def observe(self, record: RoundRecord) -> None:
        """Nothing to learn."""

    def bands(self, confidence: Sequence[float]) -> tuple[Band, ...]:
        """Nothing here depends on a band."""
        return ()

    def fresh(self) -> Fixed:
        return replace(self)

    def settings(self) -> dict[str, Any]:
        return {"name": self.name, "length": self.length}
