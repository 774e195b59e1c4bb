"""Verify while a prefix is likely enough to be accepted whole.

s_k = c_1 c_2 ... c_k          the chance that x_1..x_k are all accepted, if c is calibrated
verify k while s_k >= s_stop
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
class Confidence(Limits):
    """s_stop  in 0..1; `dspark calibrate` fits the one with most tokens per second"""

    name: ClassVar[str] = "confidence"
    needs_confidence: ClassVar[bool] = True

    s_stop: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.s_stop <= 1:
            raise UserError(f"s_stop: expected a probability, 0..1, got {self.s_stop}")

    def plan(self, frontier: Frontier) -> None:
        survival = torch.ones_like(frontier.confidence)

        def rule() -> Tensor:
            nonlocal survival
            survival = survival * frontier.confidence
            return survival >= self.s_stop

        self._walk(frontier, rule)
