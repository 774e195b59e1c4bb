"""The best size within a budget.

Every axis has a price list: how much the loss rises if it is cut to some numbers of units, measured
by doing it, all else whole (`dspark.distill.effects`); between two measured numbers it is read off
a line. A size is expected to cost the sum of its prices. Among all sizes within the budget the one
with the lowest expected loss is taken, the larger one of equals.

This is one ranking over layers, heads, MLP channels and ranks in one unit, nats. A first-order
estimate per unit would rank them too, but it sees only small cuts and calls removing half of
everything as cheap as twice a quarter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dspark.draft.pruning.sizes import Grid, Size

AXES = ("layers", "heads", "mlp", "rank")


@dataclass(frozen=True)
class Choice:
    """A size, its cost in the budget's unit, and the loss it is expected to add, in nats."""

    size: Size
    cost: float
    expected: float


def choose(
    grid: Grid, prices: Mapping[str, Mapping[int, float]], costs: np.ndarray, budget: float
) -> Choice | None:
    """The best size with cost <= budget; None where even the smallest is above it.

    Args:
        grid: Sizes there are.
        prices: Axis of `AXES` -> units kept -> rise of the loss; whole and smallest are among them.
        costs: Of every size of the grid.
        budget: In the unit of `costs`.
    """
    expected = expected_loss(grid, prices)
    inside = costs <= budget
    if not inside.any():
        return None
    lowest = np.where(inside, expected, np.inf).min()
    equal = inside & (expected <= lowest + 1e-12)
    index = np.unravel_index(np.where(equal, costs, -np.inf).argmax(), costs.shape)
    size = grid.size([int(i) for i in index])
    return Choice(size, float(costs[index]), float(expected[index]))


def expected_loss(grid: Grid, prices: Mapping[str, Mapping[int, float]]) -> np.ndarray:
    """Sum of prices of every size, [layers, heads, mlp, ranks]. Smaller never costs less."""
    units = (range(1, len(grid.order) + 1), grid.heads, grid.mlp, grid.ranks)
    parts = [_price(prices[name], kept) for name, kept in zip(AXES, units, strict=True)]
    layers, heads, mlp, rank = parts
    return layers[:, None, None, None] + heads[:, None, None] + mlp[:, None] + rank


def _price(measured: Mapping[int, float], units: object) -> np.ndarray:
    """Prices at `units`, falling with the units kept and never below 0: noise earns nothing."""
    known = sorted(measured)
    falling = np.maximum.accumulate([max(measured[k], 0.0) for k in reversed(known)])[::-1]
    return np.interp(np.array(list(units)), known, falling)  # type: ignore[call-overload]
