"""Sequential temperature scaling: one temperature per slot, from left to right.

    T_j = argmin_T  mean_b ECE_b( s_{j-1} sigmoid(l_j / T),  1(a >= j) )   T_1..T_{j-1} stay as are

over 41 values from 0.1 to 10, equal steps of log T, then 21 finer ones between the neighbours of
the best. Left to right because the survival product of slot j contains the earlier slots: fitted
on its own, a slot would neither pay for their errors nor make up for them. Ties go to the
temperature nearest to 1. (DSpark paper, section on calibration; SGLang's fit uses the same grid.)

b runs over several numbers of bins. With one number, a round that steps over the edge of a bin
moves the minimum, and on a few hundred rounds the fit follows such steps.

What is left is the business of `curves`; SGLang's format has the temperatures alone.

s_j is measured in every round, c_j = s_j / s_{j-1} in those that reached slot j only: a >= j - 1.
Where no round did, any c_j goes with survivals that are right, and both fits run off to where they
say 0 or 1. So below `MIN_REACHED` such rounds a slot has temperature and curve of the slot before;
with enough of them, all rejected, its curve but not its temperature, which no loss would bound.

Letters: n rounds, G slots, s survival product, l logit, a accepted slots, c confidence.
"""

from __future__ import annotations

import numpy as np

from dspark.draft.calibration import MIN_REACHED, Fitted, Sampling
from dspark.draft.curves import IDENTITY, Curve, curved_survival, fit_curves
from dspark.draft.reliability import (
    Bools,
    ConfidenceRounds,
    Floats,
    average_ece_ci95,
    ece,
    reliability,
    sigmoid,
    split_prompts,
    survival,
)

LOWEST, HIGHEST, STEPS = 0.1, 10.0, 41
REFINED_STEPS = 21
GRID: Floats = np.geomspace(LOWEST, HIGHEST, STEPS)
FIT_BINS = (5, 8, 10, 12, 15, 20)


def fit_temperatures(rounds: ConfidenceRounds) -> tuple[float, ...]:
    """G temperatures. A slot that no round verified keeps 1, its logit as it is."""
    before = np.ones(len(rounds))
    step = (HIGHEST / LOWEST) ** (1 / (STEPS - 1))
    temperatures = []
    for slot in range(rounds.slots):
        seen = rounds.judged(slot)
        labels = rounds.survived(slot)[seen]
        logits = rounds.logits[seen, slot]
        best = 1.0
        if seen.any():
            best = _best(GRID, before[seen], logits, labels)
            around = np.geomspace(best / step, best * step, REFINED_STEPS)
            best = _best(around.clip(LOWEST, HIGHEST), before[seen], logits, labels)
        temperatures.append(best)
        # Rounds that were not judged here are not judged later either: their value is never read.
        before[seen] *= sigmoid(logits / best)
    return tuple(temperatures)


def _best(grid: Floats, before: Floats, logits: Floats, labels: Bools) -> float:
    """The temperature of the grid whose product is calibrated best."""
    scores = before * sigmoid(logits / grid[:, None])
    errors = np.mean([ece(scores, labels, bins) for bins in FIT_BINS], axis=0)
    order = np.lexsort((np.abs(np.log(grid)), errors))
    return float(grid[order[0]])


def fit_slots(rounds: ConfidenceRounds) -> tuple[tuple[float, ...], tuple[Curve, ...]]:
    """Temperatures and curves of all slots, those of too few rounds being the slot's before them.

    The first slots that have enough are as `fit_temperatures` and `fit_curves` have them. Without
    any, nothing is changed: temperature 1 and the identity.
    """
    reached = rounds.reached
    temperatures = list(fit_temperatures(rounds))
    for slot in range(rounds.slots):
        if reached[slot] < MIN_REACHED or not rounds.survived(slot).any():
            temperatures[slot] = temperatures[slot - 1] if slot else 1.0
    curves = list(fit_curves(rounds, temperatures))
    for slot in range(rounds.slots):
        if reached[slot] < MIN_REACHED:
            curves[slot] = curves[slot - 1] if slot else IDENTITY
    return tuple(temperatures), tuple(curves)


def held_out_survival(rounds: ConfidenceRounds, *, seed: int = 0) -> tuple[Floats, Floats]:
    """[n, G] survival by temperatures alone, and with curves.

    Each half of the prompts is judged by what was fitted on the other half.
    """
    scaled = np.full(rounds.logits.shape, np.nan)
    curved = scaled.copy()
    first, second = split_prompts(rounds, seed=seed)
    for fitted_on, judged in ((first, second), (second, first)):
        temperatures, curves = fit_slots(rounds.take(fitted_on))
        scaled[judged] = survival(rounds.logits[judged], temperatures)
        curved[judged] = curved_survival(rounds.logits[judged], temperatures, curves)
    return scaled, curved


def fit_setting(
    rounds: ConfidenceRounds, sampling: Sampling, *, seed: int = 0
) -> tuple[Fitted, Floats]:
    """The calibration entry of one sampling setting, and the survival [n, G] it was judged by.

    Temperatures and curves come from all rounds; every figure but `ece_before` from cross-fitted
    scores, where no prompt is judged by a fit that has seen it. On few rounds a fit can be worse
    than none, so what has the lowest average ECE there is kept: temperatures and curves, or
    temperatures alone (curves become the identity), or nothing (temperatures become 1 as well).

    Raises ValueError below two prompts with rounds: there is nothing to hold out.
    """
    if rounds.prompts < 2:
        raise ValueError(f"rounds of {rounds.prompts} prompts: at least 2 are needed")
    temperatures, curves = fit_slots(rounds)
    raw = survival(rounds.logits, (1.0,) * rounds.slots)
    candidates = (raw, *held_out_survival(rounds, seed=seed))
    judged = [reliability(scores, rounds) for scores in candidates]
    best = min(range(3), key=lambda index: judged[index].average_ece or 0.0)
    if best < 2:
        curves = (IDENTITY,) * rounds.slots
    if best < 1:
        temperatures = (1.0,) * rounds.slots
    after = judged[best]
    entry = Fitted(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        method="token",
        temperatures=temperatures,
        curves=curves,
        ece_before=judged[0].ece,
        ece_scaled=judged[min(best, 1)].ece,
        ece_after=after.ece,
        ece_floor=after.ece_floor,
        auc=after.auc,
        brier=after.brier,
        average_ece_after_ci95=average_ece_ci95(candidates[best], rounds, seed=seed),
        rounds=len(rounds),
        prompts=rounds.prompts,
        reached=rounds.reached,
    )
    return entry, candidates[best]
