"""The speed-up that acceptance and step times predict, at batch 1.

    tau(g)     = 1 + sum_{j<=g} prod_{i<=j} C_i       tokens a round with draft length g
    speed-up   = tau(g) t(1) / t(1 + g)
    tokens/s   = tau(g) / t(1 + g)

C_j is the chance that position j is accepted once all before it were (conditional acceptance),
t(1) the time of a plain step and t(1 + g) that of a whole round which drafts g tokens and verifies
1 + g rows. tau counts the target's own token of every round. The sum is exact where acceptance at a
position depends on nothing but that all before it were accepted; the end of an answer is left out.

Letters: g draft length, t(n) time of n verified rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Prediction:
    """What one draft length is worth. `tokens_per_s` is None where times are only proportions."""

    draft_length: int
    accepted_length: float
    speed_up: float
    tokens_per_s: float | None


def accepted_length(conditional: Sequence[float], draft_length: int) -> float:
    """tau(g). Raises ValueError where fewer than g positions are known."""
    if not 0 <= draft_length <= len(conditional):
        raise ValueError(f"draft length {draft_length}: {len(conditional)} positions are known")
    total = survives = 1.0
    for chance in conditional[:draft_length]:
        survives *= chance
        total += survives
    return total


def predict(
    conditional: Sequence[float], times: Mapping[int, float], *, seconds: bool
) -> list[Prediction]:
    """Every draft length that both sides know, ascending.

    Args:
        conditional: C_1, C_2, ...
        times: Rows -> t(rows); 1 has to be there.
        seconds: Whether times are seconds, or only in proportion to each other.
    """
    found = []
    for rows in sorted(times):
        length = rows - 1
        if not 1 <= length <= len(conditional):
            continue
        tau = accepted_length(conditional, length)
        speed = tau / times[rows]
        found.append(Prediction(length, tau, speed * times[1], speed if seconds else None))
    return found


def best(predictions: Sequence[Prediction]) -> Prediction | None:
    """The draft length with the highest speed-up; the shorter of two that are equal."""
    return max(predictions, key=lambda p: (p.speed_up, -p.draft_length), default=None)
