"""The law a row of logits stands for, as three numbers that go with the row.

    y = s log2(e) / T                                   float64
    w(x) = 2^(y - floor y) 2^(floor y - base)           float32, times a power of two: exact
           0 where s < cut, or below 2^-149
    p(x) = w(x) / mass,   mass = sum_x w(x)             float64;  base = floor max y

A probability is made when it is asked for, from the row itself, and by the same arithmetic wherever
that happens: in the tile that sums it, in the one that draws it and in the one that judges it. No
[V] row of probabilities is written, and what a token was drawn from is what it is judged against.
The power of two is why `base` may differ from tile to tile: it scales and never rounds.

    top-k   cut is the k-th largest logit
    top-p   cut is the smallest v with  (mass of s > v) < p (mass after top-k)

Both keep every token tied with the last one kept, and the most likely token always. Temperature 0
is the argmax, ties to the lowest id; its law is the point mass there: base, mass and cut unused.

Letters: V vocabulary; "..." any leading shape.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LOG2E = math.log2(math.e)
LEAST = -149
"""Exponent below which a weight is zero, as it is in float32 probabilities."""
BELOW_ONE = 1.0 - torch.finfo(torch.float64).eps
"""Factor that keeps u * mass under mass, which rounding alone would not promise."""


class Law(NamedTuple):
    """What turns scores [..., V] into probabilities; all [...].

    base  float64, a whole number
    cut   float32, the least logit that is kept
    mass  float64
    """

    base: Tensor
    cut: Tensor
    mass: Tensor


def law_of(
    scores: Tensor, temperature: Tensor, top_k: Tensor | None = None, top_p: Tensor | None = None
) -> Law:
    """The law of scores [..., V] float32.

    Args:
        temperature: [...] float32; where it is 0 the law is not used.
        top_k: [...] int64, 0 is off; None: off everywhere.
        top_p: [...] float32, 1 is off; None: off everywhere.
    """
    base = torch.floor(scores.amax(-1).double() * scale_of(temperature))
    cut = torch.full_like(base, -torch.inf, dtype=torch.float32)
    law = Law(base, cut, base)
    if top_k is not None or top_p is not None:
        ordered = scores.sort(dim=-1, descending=True).values
        if top_k is not None:
            law = law._replace(cut=_top_k(ordered, top_k))
        if top_p is not None:
            law = law._replace(cut=_top_p(ordered, law, temperature, top_p))
    return law._replace(mass=weights(scores, law, temperature).sum(-1))


def weights(scores: Tensor, law: Law, temperature: Tensor) -> Tensor:
    """w [..., V] float64 of scores [..., V]."""
    y = scores.double() * scale_of(temperature).unsqueeze(-1)
    whole = torch.floor(y)
    exponent = whole - law.base.unsqueeze(-1)
    fraction = torch.exp2((y - whole).float()).double()
    kept = (scores >= law.cut.unsqueeze(-1)) & (exponent >= LEAST)
    # exp2 of a whole number in float64 is exact
    return torch.where(kept, fraction * torch.exp2(exponent.clamp(LEAST, 0)), 0.0)


def probs_of(scores: Tensor, law: Law, temperature: Tensor) -> Tensor:
    """p [..., V] float64; a point mass on the argmax where the temperature is 0."""
    p = weights(scores, law, temperature) / law.mass.unsqueeze(-1)
    best = torch.zeros_like(p).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
    return torch.where(temperature.unsqueeze(-1) == 0, best, p)


def draw(weight: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF draw: weights [..., V] float64, u [...] float64 in [0, 1) -> [...] int64.

    The first token whose cumulated weight exceeds u * total; never one of weight 0, but for a row
    that is all zero or NaN, which gives some id below V.
    """
    cdf = weight.cumsum(-1)
    level = (u * BELOW_ONE).unsqueeze(-1) * cdf[..., -1:]
    token = torch.searchsorted(cdf, level, right=True).clamp_(max=weight.shape[-1] - 1)
    # A parallel prefix sum need not be monotone to the last bit: step off a weightless token.
    best = weight.argmax(-1, keepdim=True)
    return torch.where(weight.gather(-1, token) > 0, token, best).squeeze(-1)


def scale_of(temperature: Tensor) -> Tensor:
    """log2(e) / T in float64; some finite number where T is 0."""
    return LOG2E / temperature.double().clamp(min=torch.finfo(torch.float32).tiny)


def _top_k(ordered: Tensor, top_k: Tensor) -> Tensor:
    width = ordered.shape[-1]
    off = (top_k <= 0) | (top_k >= width)
    kth = ordered.gather(-1, (top_k.clamp(1, width) - 1).unsqueeze(-1)).squeeze(-1)
    return torch.where(off, -torch.inf, kth)


def _top_p(ordered: Tensor, law: Law, temperature: Tensor, top_p: Tensor) -> Tensor:
    """From scores in descending order: the first whose mass, ties included, reaches p."""
    upto = weights(ordered, law, temperature).cumsum(-1)
    short = (upto < top_p.double().unsqueeze(-1) * upto[..., -1:]).sum(-1, keepdim=True)
    cut = ordered.gather(-1, short.clamp(max=ordered.shape[-1] - 1)).squeeze(-1)
    return torch.where(top_p >= 1, law.cut, torch.maximum(cut, law.cut))
