"""Sequential temperature scaling: one temperature per slot, from left to right.

    T_j = argmin_T  ECE( s_{j-1} sigmoid(l_j / T),  1(a >= j) )      T_1..T_{j-1} stay as they are

over 41 values from 0.1 to 10, equal steps of log T, then 21 finer ones between the neighbours of
the best. Left to right because the survival product of slot j contains the earlier slots: fitted
on its own, a slot would also pay for their errors, or not notice them. Ties go to the temperature
nearest to 1. (DSpark paper, section on calibration; SGLang's fit uses the same grid.)

Letters: n rounds, G slots, s survival product, l logit, a accepted slots.
"""

from __future__ import annotations

import numpy as np

from dspark.draft.reliability import ConfidenceRounds, Floats, ece, sigmoid, survival

LOWEST, HIGHEST, STEPS = 0.1, 10.0, 41
REFINED_STEPS = 21
GRID: Floats = np.geomspace(LOWEST, HIGHEST, STEPS)


def fit_temperatures(rounds: ConfidenceRounds, *, refine: bool = True) -> tuple[float, ...]:
    """G temperatures. A slot that no round verified keeps 1, its logit as it is."""
    before = np.ones(len(rounds))
    temperatures = []
    for slot in range(rounds.slots):
        seen = rounds.judged(slot)
        labels = rounds.survived(slot)[seen]
        logits = rounds.logits[seen, slot]
        best = 1.0
        if seen.any():
            best = _best(GRID, before[seen], logits, labels)
            if refine:
                step = (HIGHEST / LOWEST) ** (1 / (STEPS - 1))
                around = np.geomspace(best / step, best * step, REFINED_STEPS)
                best = _best(around.clip(LOWEST, HIGHEST), before[seen], logits, labels)
        temperatures.append(best)
        # Rounds that were not judged here are not judged later either: their value is never read.
        before[seen] *= sigmoid(logits / best)
    return tuple(temperatures)


def _best(grid: Floats, before: Floats, logits: Floats, labels: np.ndarray) -> float:
    """The temperature of the grid whose product is calibrated best."""
    errors = ece(before * sigmoid(logits / grid[:, None]), labels)
    order = np.lexsort((np.abs(np.log(grid)), errors))
    return float(grid[order[0]])


def scaled(temperatures: tuple[float, ...], rounds: ConfidenceRounds) -> Floats:
    """Survival scores [n, G] at those temperatures."""
    return survival(rounds.logits, temperatures)
