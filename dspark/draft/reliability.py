"""How far a confidence may be believed: predicted survival beside what became of it.

    l_k    logit of the confidence head for slot k, known before the token of slot k
    s_j    = prod_{k<=j} sigmoid(l_k / T_k)           predicted chance that slots 1..j are accepted
    y_j    = 1(a >= j)                                over the rounds in which j was verified
    ECE_j  = sum_bins (n_bin / n) |mean s_j - mean y_j|     15 equal bins of s_j, as SGLang's fit
    AUC_j  = P(s_j of a survivor > s_j of another) + 1/2 P(equal)
    Brier_j = mean (s_j - y_j)^2

The survival product is what draft-length policies use, so it is what is calibrated. A binned ECE
is never 0: even a perfect forecast scores about 0.8 sqrt(bins p(1-p) / n), `ece_floor` here, so an
ECE means something beside the number of rounds only. (DSpark paper, section on calibration.)

Letters: n rounds, G slots; slots count from 1 in the formulas, from 0 in arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

BINS = 15
RESAMPLES = 200
FLOOR_DRAWS = 50


@dataclass(frozen=True, eq=False)
class ConfidenceRounds:
    """What rounds of the run-time process say about a confidence head.

    The tokens are not here: neither fitting nor judging can look at x_k.

    logits    [n, G] raw logits of the head, NaN in slots that were not drafted
    accepted  [n] accepted slots, a
    verified  [n] slots that the target judged, a <= verified <= G
    prompt    [n] which prompt a round belongs to: rounds of one prompt resemble each other, so
              halves and resamples are made of whole prompts
    """

    logits: Floats
    accepted: Ints
    verified: Ints
    prompt: Ints

    def __post_init__(self) -> None:
        n, slots = self.logits.shape
        if not len(self.accepted) == len(self.verified) == len(self.prompt) == n:
            raise ValueError(f"{n} rows of logits, other columns have another length")
        if ((self.accepted > self.verified) | (self.verified > slots) | (self.accepted < 0)).any():
            raise ValueError("0 <= accepted <= verified <= slots does not hold")
        drafted = np.arange(slots) < self.verified[:, None]
        if np.isnan(self.logits[drafted]).any():
            raise ValueError("a verified slot has no logit")

    def __len__(self) -> int:
        return len(self.accepted)

    @property
    def slots(self) -> int:
        """G."""
        return self.logits.shape[1]

    @property
    def prompts(self) -> int:
        """Prompts with at least one round."""
        return len(np.unique(self.prompt))

    def judged(self, slot: int) -> Bools:
        """[n], rounds in which slot (from 0) was verified: those that have a label there."""
        return self.verified > slot

    def survived(self, slot: int) -> Bools:
        """[n], label 1(a >= slot + 1); means something where `judged` only."""
        return self.accepted > slot

    @property
    def reached(self) -> tuple[int, ...]:
        """[G], rounds that tell how likely a slot is, once all before it are accepted."""
        return tuple(
            int((self.judged(slot) & (self.accepted >= slot)).sum()) for slot in range(self.slots)
        )

    def take(self, rows: Bools | Ints) -> ConfidenceRounds:
        """Some of the rounds."""
        return ConfidenceRounds(
            self.logits[rows], self.accepted[rows], self.verified[rows], self.prompt[rows]
        )


@dataclass(frozen=True)
class Reliability:
    """Of one forecast, slot by slot; None in slots that no round verified, AUC also where all
    rounds ended alike. `ece_floor` is the ECE of a perfect forecast on as many rounds."""

    ece: tuple[float | None, ...]
    ece_floor: tuple[float | None, ...]
    auc: tuple[float | None, ...]
    brier: tuple[float | None, ...]
    rounds: tuple[int, ...]

    @property
    def average_ece(self) -> float | None:
        """Mean over the slots that were measured."""
        return average(self.ece)


def average(values: Sequence[float | None]) -> float | None:
    """Mean of what was measured; None if nothing was."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)) without overflow; NaN stays NaN, which is how a missing logit is told."""
    with np.errstate(invalid="ignore"):
        return np.exp(-np.logaddexp(0.0, -x))


def survival(logits: Floats, temperatures: Sequence[float]) -> Floats:
    """s_j for every slot: [n, G] logits -> [n, G]; NaN from the first missing logit on."""
    scaled = logits / np.asarray(temperatures, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        return np.exp(-np.logaddexp(0.0, -scaled).cumsum(axis=1))


def bin_sums(scores: Floats, labels: Bools, bins: int = BINS) -> Floats:
    """[..., n] scores in [0, 1] and [n] labels -> [..., 3, bins]: count, sum score, sum label."""
    flat = scores.reshape(math.prod(scores.shape[:-1]), scores.shape[-1])  # -1: not of nothing
    which = np.minimum((flat * bins).astype(np.int64), bins - 1)
    which += bins * np.arange(len(flat))[:, None]
    marks = np.broadcast_to(labels.astype(np.float64), flat.shape)
    sums = [
        np.bincount(which.ravel(), weights, minlength=bins * len(flat)).reshape(-1, bins)
        for weights in (None, flat.ravel(), marks.ravel())
    ]
    return np.stack(sums, axis=1).reshape(*scores.shape[:-1], 3, bins).astype(np.float64)


def ece(scores: Floats, labels: Bools, bins: int = BINS) -> Floats:
    """Expected calibration error of [..., n] scores against [n] labels -> [...]."""
    sums = bin_sums(scores, labels, bins)
    return np.abs(sums[..., 1, :] - sums[..., 2, :]).sum(-1) / max(len(labels), 1)


def ece_floor(scores: Floats, *, seed: int = 0, bins: int = BINS) -> float:
    """Mean ECE of [n] scores that are exactly right: labels are drawn from the scores."""
    generator = np.random.default_rng(seed)
    draws = [ece(scores, generator.random(len(scores)) < scores, bins) for _ in range(FLOOR_DRAWS)]
    return float(np.mean(draws))


def auc(scores: Floats, labels: Bools) -> float | None:
    """Area under the ROC curve from mid-ranks; None if all labels are equal."""
    positive = int(labels.sum())
    negative = len(labels) - positive
    if not positive or not negative:
        return None
    _, which, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    ranks = (last - (counts - 1) / 2)[which]
    return float((ranks[labels].sum() - positive * (positive + 1) / 2) / (positive * negative))


def reliability(scores: Floats, rounds: ConfidenceRounds) -> Reliability:
    """Judge survival scores [n, G] of those rounds."""
    columns: list[tuple[float | None, float | None, float | None, float | None, int]] = []
    for slot in range(rounds.slots):
        seen = rounds.judged(slot)
        s, y = scores[seen, slot], rounds.survived(slot)[seen]
        if not len(s):
            columns.append((None, None, None, None, 0))
            continue
        error = float(((s - y) ** 2).mean())
        columns.append((float(ece(s, y)), ece_floor(s), auc(s, y), error, len(s)))
    parts = list(zip(*columns, strict=True)) or [()] * 5
    return Reliability(*parts)


def average_ece_ci95(
    scores: Floats, rounds: ConfidenceRounds, *, seed: int = 0
) -> tuple[float, float] | None:
    """95 % interval of the average ECE over slots, resampling whole prompts; None below two.

    Resampled rounds repeat, which lifts a binned ECE: the percentiles of the resamples are moved
    down by that lift, so that the interval lies around the measured value.
    """
    names, which = np.unique(rounds.prompt, return_inverse=True)
    if len(names) < 2:
        return None
    # Sums of each prompt in each bin: a resample is then a weighted sum, one product per slot.
    size = len(names)
    weights = np.random.default_rng(seed).multinomial(size, np.full(size, 1 / size), size=RESAMPLES)
    exact, errors = [], []
    for slot in range(rounds.slots):
        seen = rounds.judged(slot)
        if seen.any():
            s, y = scores[seen, slot], rounds.survived(slot)[seen]
            exact.append(float(ece(s, y)))
            errors.append(_resampled_ece(s, y, which[seen], weights))
    if not errors:
        return None
    resampled = np.nanmean(errors, axis=0)
    lift = float(np.nanmean(resampled)) - float(np.mean(exact))
    low, high = np.nanpercentile(resampled, (2.5, 97.5)) - lift
    return max(float(low), 0.0), float(high)


def _resampled_ece(scores: Floats, labels: Bools, owner: Ints, weights: Ints) -> Floats:
    """[B] ECE of resamples in which prompt p counts weights[b, p] times."""
    size = weights.shape[1]
    cell = owner * BINS + np.minimum((scores * BINS).astype(np.int64), BINS - 1)
    gap = np.bincount(cell, scores - labels, minlength=size * BINS).reshape(size, BINS)
    total = weights @ np.bincount(owner, minlength=size)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.abs(weights @ gap).sum(axis=1) / total


def split_prompts(rounds: ConfidenceRounds, *, seed: int = 0) -> tuple[Bools, Bools]:
    """Two disjoint halves of the rounds, as [n] masks; no prompt is in both."""
    names = np.random.default_rng(seed).permutation(np.unique(rounds.prompt))
    first = np.isin(rounds.prompt, names[: (len(names) + 1) // 2])
    return first, ~first
