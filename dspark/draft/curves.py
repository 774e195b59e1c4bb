"""What temperatures leave over: one monotone curve per slot, from product to survival.

    P_j = prod_{k<=j} sigmoid(l_k / T_k)                        temperatures stay as fitted
    s_j = min_{i<=j} sigmoid( a_i ln P_i - b_i ln(1 - P_i) + d_i ),   a, b >= 0

A product of calibrated conditional chances need not be calibrated: rounds that look bad in several
slots survive more often than the product says, and no temperature bends its low end without moving
the rest. The curve is that of beta calibration (Kull, Silva Filho and Flach 2017): a = b = 1, d = 0
is the identity, a = b and d are a Platt scaling of P. The minimum keeps s from rising with j.

Fitted by maximum likelihood of 1(a >= j), with a prior worth about one round on the identity; the
problem is convex, and a coefficient that would turn negative is held at 0. s_j depends on l_1..l_j
only, so the chance of slot j is known before its token, like the logit itself.

Letters: n rounds, G slots, l logit, T temperature.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspark.draft.reliability import Bools, ConfidenceRounds, Floats, sigmoid, survival

Curve = tuple[float, float, float]
"""a, b, d of one slot."""

IDENTITY: Curve = (1.0, 1.0, 0.0)
PRIOR = 1.0
NEWTON_STEPS = 50
_SMALLEST = 1e-7


def fit_curves(rounds: ConfidenceRounds, temperatures: Sequence[float]) -> tuple[Curve, ...]:
    """G curves on top of those temperatures; the identity in slots that no round verified."""
    products = survival(rounds.logits, temperatures)
    curves = []
    for slot in range(rounds.slots):
        seen = rounds.judged(slot)
        curve = IDENTITY
        if seen.any():
            curve = _fit(_features(products[seen, slot]), rounds.survived(slot)[seen])
        curves.append(curve)
    return tuple(curves)


def curved_survival(
    logits: Floats, temperatures: Sequence[float], curves: Sequence[Curve]
) -> Floats:
    """s_j for every slot: [n, G] logits -> [n, G]; NaN from the first missing logit on."""
    features = _features(survival(logits, temperatures))
    bent = sigmoid((features * np.array(curves)).sum(axis=-1))
    return np.minimum.accumulate(bent, axis=1)


def _features(products: Floats) -> Floats:
    """[...] -> [..., 3]: ln P, -ln(1 - P), 1."""
    inside = products.clip(_SMALLEST, 1 - _SMALLEST)
    return np.stack([np.log(inside), -np.log1p(-inside), np.ones_like(inside)], axis=-1)


def _fit(features: Floats, labels: Bools) -> Curve:
    """Newton's method; where a or b turns negative it is held at 0 and the rest fitted again."""
    free = np.ones(3, dtype=bool)
    while True:
        theta = _newton(features, labels, free)
        negative = (theta[:2] < 0) & free[:2]
        if not negative.any():
            a, b, d = theta.tolist()
            return a, b, d
        free[int(np.argmin(theta[:2]))] = False


def _newton(features: Floats, labels: Bools, free: Bools) -> Floats:
    prior = np.array(IDENTITY)
    theta = np.where(free, prior, 0.0)
    loss = _loss(theta, features, labels)
    for _ in range(NEWTON_STEPS):
        chance = sigmoid(features @ theta)
        slope = features.T @ (chance - labels) + PRIOR * (theta - prior)
        bend = (features.T * (chance * (1 - chance))) @ features + PRIOR * np.eye(3)
        step = np.zeros(3)
        step[free] = np.linalg.solve(bend[np.ix_(free, free)], slope[free])
        size = 1.0
        while size > 1e-6 and _loss(theta - size * step, features, labels) > loss:
            size /= 2
        theta = theta - size * step
        before, loss = loss, _loss(theta, features, labels)
        if before - loss < 1e-9 * max(1.0, before):
            break
    return theta


def _loss(theta: Floats, features: Floats, labels: Bools) -> float:
    """Negative log likelihood and prior."""
    scores = features @ theta
    likelihood = np.logaddexp(0.0, np.where(labels, -scores, scores)).sum()
    return float(likelihood + PRIOR / 2 * ((theta - np.array(IDENTITY)) ** 2).sum())
