"""How many drafts were sent and accepted, by how unsure the drafter was of the whole block.

    H = (H_1 + ... + H_g) / g      nats, of the g tokens a round drafted, at temperature 1

H is known before anything is verified, so it can explain a round without knowing its outcome.
Rounds that drafted nothing are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark.runtime.records import RoundRecord

EDGES = (0.1, 0.25, 0.5, 1.0)
"""Nats. A drafter that is sure of every token has H near 0; a vocabulary of V at most ln V."""


def lengths_by_entropy(rounds: Sequence[RoundRecord]) -> list[dict[str, Any]]:
    """By bucket of H, `low` to below `high` (None: and more): counts of rounds.

    `verified[k]` rounds sent k drafts, `accepted[k]` had k of them accepted. Empty buckets are
    left out.
    """
    drafted = [record for record in rounds if record.entropy]
    longest = max((record.drafted for record in drafted), default=0)
    means = [float(np.mean(record.entropy)) for record in drafted]
    buckets = np.searchsorted(EDGES, means, side="right")
    found = []
    for index, (low, high) in enumerate(zip((0.0, *EDGES), (*EDGES, None), strict=True)):
        held = [record for record, bucket in zip(drafted, buckets, strict=True) if bucket == index]
        if held:
            found.append(
                {
                    "low": low,
                    "high": high,
                    "rounds": len(held),
                    "verified": _counts([record.verified for record in held], longest),
                    "accepted": _counts([record.accepted for record in held], longest),
                }
            )
    return found


def _counts(values: Sequence[int], longest: int) -> list[int]:
    return np.bincount(values, minlength=longest + 1).tolist()
