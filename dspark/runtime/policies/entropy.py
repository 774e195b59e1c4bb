"""Verify while the drafter is sure of what it says, whatever its confidence head thinks.

    verify k while (H_1 + ... + H_k) / k <= h_stop        H in nats, temperature 1, unfiltered

Needs no confidence head and no calibration: long drafts in text of low entropy, short ones where
many continuations are good.
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
class Entropy(Limits):
    """h_stop  nats; `dspark calibrate` fits the one with most tokens per second"""

    name: ClassVar[str] = "entropy"

    h_stop: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.h_stop >= 0:
            raise UserError(f"h_stop: expected nats, 0 or more, got {self.h_stop}")

    def plan(self, frontier: Frontier) -> None:
        total = torch.zeros_like(frontier.entropy)

        def rule() -> Tensor:
            nonlocal total
            total = total + frontier.entropy
            return total <= self.h_stop * (frontier.position + 1)

        self._walk(frontier, rule)
