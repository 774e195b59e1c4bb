"""How far the confidence on record may be believed: of survival, and of each position alone.

    survival   s_j = c_1 ... c_j against 1(a >= j), over rounds that verified j: what policies use
               and what is calibrated (`dspark.draft.reliability`; the DSpark paper's Fig. 6)
    position   c_j against 1(a >= j), over rounds that accepted j - 1 and verified j: what the head
               was trained for, 1 - TV at position j

Both with ECE (15 equal bins), its floor (what a perfect forecast shows on as many rounds), AUC and
Brier score by position, and the bins themselves for a reliability diagram. Calibration, where the
drafter has one, is in the records already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from dspark.draft.calibration import describe
from dspark.draft.reliability import (
    ConfidenceRounds,
    auc,
    average,
    average_ece_ci95,
    bin_sums,
    ece,
    ece_floor,
    reliability,
    sigmoid,
    survival,
)
from dspark.runtime.confidence import confidence_rounds
from dspark.runtime.records import RoundRecord
from dspark.runtime.sampling import SamplingParams
from dspark_eval.pair import Pair

Bins = dict[str, list[float]]


def confidence_report(
    pair: Pair, sampling: SamplingParams, by_prompt: Sequence[Sequence[RoundRecord]]
) -> dict[str, Any] | None:
    """Reliability of survival by slot, and under `positions` of each slot alone; None without a
    confidence head.

    `calibrated_for` is the setting of the calibration entry that was applied, None if none was.
    """
    rounds = confidence_rounds(by_prompt, pair.drafter.config.block_size)
    if not len(rounds):
        return None
    calibration = pair.drafter.calibration
    applied = None if calibration is None else calibration.nearest(sampling)
    scores = survival(rounds.logits, (1.0,) * rounds.slots)
    found = reliability(scores, rounds)
    return {
        "calibrated_for": applied and describe(applied[0]),
        "exact_setting": applied is not None and applied[1],
        "average_ece": found.average_ece,
        "average_ece_ci95": average_ece_ci95(scores, rounds),
        "average_ece_floor": average(found.ece_floor),
        **asdict(found),
        "diagram": [_survival_bins(rounds, scores, slot) for slot in range(rounds.slots)],
        "positions": [position_reliability(rounds, slot) for slot in range(rounds.slots)],
    }


def _survival_bins(rounds: ConfidenceRounds, scores: np.ndarray, slot: int) -> Bins:
    seen = rounds.judged(slot)
    return _bins(scores[seen, slot], rounds.survived(slot)[seen])


def _bins(scores: np.ndarray, labels: np.ndarray) -> Bins:
    """Of 15 equal bins of the score: rounds, sum of scores, rounds that were accepted."""
    names = ("rounds", "predicted_sum", "survived")
    return dict(zip(names, bin_sums(scores, labels).tolist(), strict=True))


def position_reliability(rounds: ConfidenceRounds, slot: int) -> dict[str, Any]:
    """c of one slot (from 0) against its acceptance, over the rounds that reached it."""
    held = rounds.take(rounds.judged(slot) & (rounds.accepted >= slot))
    scores, labels = sigmoid(held.logits[:, slot]), held.survived(slot)
    if not len(held):
        nothing = dict.fromkeys(("mean", "observed", "ece", "ece_floor", "auc", "brier"))
        return {"rounds": 0, **nothing, "diagram": _bins(scores, labels)}
    return {
        "rounds": len(held),
        "mean": float(scores.mean()),
        "observed": float(labels.mean()),
        "ece": float(ece(scores, labels)),
        "ece_floor": ece_floor(scores),
        "auc": auc(scores, labels),
        "brier": float(((scores - labels) ** 2).mean()),
        "diagram": _bins(scores, labels),
    }
