"""The policies that are compared: constant lengths, rules at their fitted thresholds, and auto."""

from __future__ import annotations

from collections.abc import Callable
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
from dspark.runtime.policies.replay import H_GRID, S_GRID, Blocks, sweep

CAREFUL = 0.9
"""Acceptance rate that the `careful` threshold is chosen for."""


@dataclass(frozen=True, eq=False)
class Arm:
    """One policy under the name it has in the tables. `constant`: the same length every round."""

    name: str
    policy: Policy
    constant: bool = False


def make_arms(
    slots: int, stops: Stops, careful: Arm | None, cost: CostModel, has_trees: bool
) -> list[Arm]:
    """All arms of a drafter of that block size; those that read a confidence if there is one."""
    arms = [Arm(f"fixed {length}", Fixed(length), constant=True) for length in range(1, slots + 1)]
    arms.append(Arm(f"entropy {stops.h_stop:g}", Entropy(h_stop=stops.h_stop)))
    arms += [] if careful is None else [careful]
    if stops.s_stop is None:
        return [*arms, Arm("auto (entropy)", Auto(Entropy(h_stop=stops.h_stop)))]
    arms += [
        Arm(f"confidence {stops.s_stop:g}", Confidence(s_stop=stops.s_stop)),
        Arm("throughput", Throughput(cost=cost)),
        Arm("throughput-delayed", Delayed(cost)),
        Arm("auto (entropy)", Auto(Entropy(h_stop=stops.h_stop))),
        Arm("auto (throughput)", Auto(Throughput(cost=cost))),
    ]
    if has_trees:
        arms.append(Arm("throughput, bands", Bands(Throughput(cost=cost), low=0.0)))
    return arms


def careful_arm(blocks: Blocks, cost: CostModel) -> Arm | None:
    """Of the thresholds whose replayed acceptance rate reaches `CAREFUL` the fastest; None: none
    does. The first position may be left out too, which `min_draft` 2 would not allow."""
    found = [
        (point.replay.tokens_per_s, name, rule(point.threshold))
        for name, rule, grid in RULES
        if name == "entropy" or blocks.confidence is not None
        for point in sweep(rule, grid, blocks, cost)
        if (point.replay.acceptance_rate or 0) >= CAREFUL
    ]
    if not found:
        return None
    _, name, policy = max(found, key=lambda entry: entry[0])
    threshold = policy.settings()["h_stop" if name == "entropy" else "s_stop"]
    return Arm(f"{name} {threshold:g}, careful", policy)


RULES: tuple[tuple[str, Callable[[float], Policy], tuple[float, ...]], ...] = (
    ("entropy", lambda h: Entropy(h_stop=h, min_draft=1), H_GRID),
    ("confidence", lambda s: Confidence(s_stop=s, min_draft=1), S_GRID),
)
