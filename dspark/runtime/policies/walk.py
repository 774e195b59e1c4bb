"""Policies that decide row by row and one position after the other, all rows at once.

    verify k    while k <= min_draft, or the policy's rule holds, and k <= max_draft

A row that has stopped stays stopped. Nothing here waits for a device: on one that computes ahead
of the host the loop runs to `max_draft` with rows masked out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from dspark.errors import UserError
from dspark.runtime.policies.frontier import LONGEST_DRAFT, Frontier
from dspark.runtime.records import Band, RoundRecord

Rule = TypeVar("Rule", bound="Limits")


@dataclass(frozen=True)
class Limits:
    """Between which lengths a policy decides.

    min_draft  tokens verified whatever the rule says
    max_draft  most tokens drafted and verified; None: 8, or the block size if that is smaller
    """

    name: ClassVar[str]
    siblings: ClassVar[int] = 0
    needs_confidence: ClassVar[bool] = False

    min_draft: int = 2
    max_draft: int | None = None

    def __post_init__(self) -> None:
        if self.min_draft < 0:
            raise UserError(f"min_draft: expected 0 or more, got {self.min_draft}")
        if self.max_draft is not None and self.max_draft < max(self.min_draft, 1):
            raise UserError(
                f"max_draft: expected at least min_draft {self.min_draft} and 1, got "
                f"{self.max_draft}"
            )

    def draft_length(self, block_size: int) -> int:
        """The most that may be verified: what is worth verifying shows only once it is drafted."""
        return min(LONGEST_DRAFT, block_size) if self.max_draft is None else self.max_draft

    def observe(self, record: RoundRecord) -> None:
        """Rules that learn nothing."""

    def bands(self, confidence: Sequence[float]) -> tuple[Band, ...]:
        """Nothing here depends on a band."""
        return ()

    def fresh(self: Rule) -> Rule:
        return replace(self)

    def settings(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.init}
        return {"name": self.name, **values}

    def _walk(self, frontier: Frontier, rule: Callable[[], Tensor]) -> None:
        """Extend every row while `rule()` [B] bool holds for its next position.

        The rule is asked once for each position, in order, the first ones included.
        """
        going = frontier.open
        for k in range(min(frontier.slots, self.draft_length(frontier.slots))):
            holds = rule()
            going = going & frontier.open if k < self.min_draft else going & holds
            if going.device.type == "cpu" and not bool(going.any()):
                return
            frontier.extend(going)
