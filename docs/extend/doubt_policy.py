"""A policy in 45 lines: verify while the doubts about the block so far are small together.

    verify k while (1 - c_1) + ... + (1 - c_k) <= budget       c from the calibrated confidence head

The sum bounds the chance that any of them is rejected. `Limits` brings `min_draft` and `max_draft`;
the frontier shows one undecided position of each row, so this cannot look ahead by mistake.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dspark.errors import UserError
from dspark.runtime.policies.frontier import Frontier
from dspark.runtime.policies.walk import Limits


@dataclass(frozen=True)
class Doubt(Limits):
    """budget  most expected rejections of a block"""

    name: ClassVar[str] = "doubt"
    needs_confidence: ClassVar[bool] = True

    budget: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.budget >= 0:
            raise UserError(f"budget: expected 0 or more, got {self.budget}")

    def plan(self, frontier: Frontier) -> None:
        doubt = torch.zeros_like(frontier.confidence)

        def rule() -> Tensor:
            nonlocal doubt
            doubt = doubt + (1 - frontier.confidence)
            return doubt <= self.budget

        self._walk(frontier, rule)
