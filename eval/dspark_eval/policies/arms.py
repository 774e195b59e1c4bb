"""The policies that are compared: constant lengths, rules at their fitted thresholds, and auto."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.draft.calibration import Stops
from dspark.runtime.cost_model import CostModel
from dspark.runtime.policies import (
    Auto,
    Bands,
    Confidence,
    Delayed,
    Entropy,
    Fixed,
    Policy,
    Throughput,
)
from dspark.runtime.policies.replay import S_GRID, Blocks, sweep

CAREFUL = 0.9
"""Acceptance rate that the `careful` threshold is chosen for."""


@dataclass(frozen=True, eq=False)
class Arm:
    """One policy under the name it has in the tables. `constant`: the same length every round."""

    name: str
    policy: Policy
    constant: bool = False


def make_arms(
    slots: int, stops: Stops, careful: float | None, cost: CostModel, has_trees: bool
) -> list[Arm]:
    """All arms of a drafter of that block size; those that read a confidence if there is one."""
    arms = [Arm(f"fixed {length}", Fixed(length), constant=True) for length in range(1, slots + 1)]
    arms.append(Arm(f"entropy {stops.h_stop:g}", Entropy(h_stop=stops.h_stop)))
    if stops.s_stop is None:
        return [*arms, Arm("auto (entropy)", Auto(Entropy(h_stop=stops.h_stop), cost))]
    fitted = Confidence(s_stop=stops.s_stop)
    arms.append(Arm(f"confidence {stops.s_stop:g}", fitted))
    if careful is not None:
        arms.append(
            Arm(f"confidence {careful:g}, careful", Confidence(s_stop=careful, min_draft=1))
        )
    arms += [
        Arm("throughput", Throughput(cost=cost, min_draft=1)),
        Arm("throughput-delayed", Delayed(cost)),
        Arm("auto (throughput)", Auto(Throughput(cost=cost, min_draft=1), cost)),
    ]
    if has_trees:
        arms.append(Arm("throughput, bands", Bands(Throughput(cost=cost), low=0.0)))
    return arms


def careful_threshold(blocks: Blocks, cost: CostModel) -> float | None:
    """The lowest threshold whose replayed acceptance rate reaches `CAREFUL`; None: no one does."""
    if blocks.confidence is None:
        return None
    points = sweep(lambda s: Confidence(s_stop=s, min_draft=1), S_GRID, blocks, cost)
    rates = ((point.threshold, point.replay.acceptance_rate) for point in points)
    return next((s for s, rate in rates if rate is not None and rate >= CAREFUL), None)
