"""Drafters of equal size: the MLP width at which one has as many parameters as another."""

from __future__ import annotations

from collections.abc import Callable

from dspark.distill.config import DistillConfig
from dspark.distill.fresh import new_drafter
from dspark.runtime.loading import LoadedTarget

WIDTH_STEP = 8


def count_parameters(config: DistillConfig, loaded: LoadedTarget) -> int:
    """Trainable parameters of the drafter that a configuration describes."""
    drafter = new_drafter(config, loaded.target, loaded.tokenizer)
    return sum(p.numel() for p in drafter.parameters())


def matched_width(parameters: Callable[[int], int], goal: int) -> int:
    """The MLP width, a multiple of 8, that comes nearest to `goal` parameters; they are linear."""
    low, high = parameters(WIDTH_STEP), parameters(2 * WIDTH_STEP)
    return WIDTH_STEP * max(1, round(1 + (goal - low) / (high - low)))
