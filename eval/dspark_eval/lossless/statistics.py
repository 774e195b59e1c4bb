"""The one test: Pearson's chi-square against a known law, with its false alarms and its power.

    X = sum_i (n_i - n p_i)^2 / (n p_i)         chi-square with cells - 1 degrees of freedom

Cells that expect fewer than `FEWEST` draws are taken together, which keeps the tail of X that of
chi-square down to the levels used here. A draw of an impossible token fails at once.

False alarms. N tests at level ALPHA / N raise one with probability below ALPHA (Bonferroni).

Power. A law that is off by e, with a total variation d = 1/2 sum |e|, makes X noncentral with

    lambda = n sum e_i^2 / p_i  >=  n (sum |e_i|)^2 = n (2 d)^2            (Cauchy-Schwarz)

whatever the shape of e, so that one number bounds the chance to miss any error of that size. Taking
cells together can hide what cancels inside: the bound is about the law of the cells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ALPHA = 1e-3
"""Chance that a whole run raises a false alarm."""
TV = 0.01
"""Total variation that has to be found."""
FEWEST = 50


@dataclass(frozen=True)
class Fit:
    """How draws agree with a law: p-value, estimated total variation, degrees of freedom."""

    p: float
    distance: float
    freedom: int


def fit(counts: Tensor, law: Tensor) -> Fit:
    """Counts [n] of draws against probabilities [n] float64."""
    counts, draws = counts.double(), float(counts.sum())
    law = law / law.sum()
    distance = 0.5 * float((counts / draws - law).abs().sum())
    if counts[law == 0].sum() > 0:
        return Fit(0.0, distance, 0)
    expected = draws * law
    thick = expected >= FEWEST
    seen = torch.cat((counts[thick], counts[~thick].sum()[None]))
    wanted = torch.cat((expected[thick], expected[~thick].sum()[None]))
    if wanted[-1] < FEWEST:  # too thin to stand alone
        seen = torch.cat((seen[:-2], seen[-2:].sum()[None]))
        wanted = torch.cat((wanted[:-2], wanted[-2:].sum()[None]))
    freedom = len(wanted) - 1
    if freedom < 1:
        return Fit(1.0, distance, 0)
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    return Fit(tail(statistic, freedom), distance, freedom)


def tail(statistic: float, freedom: int) -> float:
    """Chance that chi-square exceeds the statistic."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def critical(level: float, freedom: int) -> float:
    """What chi-square exceeds with probability `level`."""
    low, high = 0.0, 10.0 * freedom + 1000.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, freedom) > level else (low, middle)
    return high


def power(draws: int, distance: float, freedom: int, level: float) -> float:
    """Least chance to find an error of that total variation; a Poisson mixture of tails."""
    half = draws * (2 * distance) ** 2 / 2
    x = torch.tensor(critical(level, freedom) / 2, dtype=torch.float64)
    terms = torch.arange(int(half + 40 * math.sqrt(half) + 40), dtype=torch.float64)
    log_weight = terms * math.log(half) - half - torch.lgamma(terms + 1)
    return float((log_weight.exp() * torch.special.gammaincc(freedom / 2 + terms, x)).sum())


def detectable(draws: int, freedom: int, level: float, wanted: float) -> float:
    """The smallest total variation that is found with a chance of `wanted`."""
    low, high = 0.0, 0.5
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (
            (low, middle) if power(draws, middle, freedom, level) >= wanted else (middle, high)
        )
    return high
