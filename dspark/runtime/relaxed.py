"""Relaxed acceptance: typical tokens pass where the drafter is confident. Lossy, off by default.

    typical(x) = P(x) > min(epsilon, delta * exp(-H(P)))       P = softmax(target logits)
    accept x_k, if c_k >= high, with probability 1 if typical(x_k), else as usual

(Typical acceptance of Medusa, Cai et al. 2024.) P is the target at temperature 1 without filters,
at every sampling temperature, so that greedy decoding relaxes too; a token that a filter removed is
never typical. A rejected token is corrected as usual.

What that costs is known exactly at every position, because both distributions are at hand. With
a(x) the chance that x is accepted, what comes out of the position has the law

    out = q a + (1 - sum q a) norm(max(p - q, 0)),     distance = 1/2 sum |out - p|

Letters: B batch, K positions, V vocab.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.errors import UserError


@dataclass(frozen=True)
class Relaxed:
    """When a token passes without asking p. Invalid values raise UserError.

    high     confidence from which a position is relaxed
    epsilon  probability that is typical whatever the entropy
    delta    share of exp(-H) that is typical
    """

    high: float = 0.9
    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        for name in ("high", "epsilon", "delta"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 <= value <= 1):
                raise UserError(f"relaxed {name}: expected a number in [0, 1], got {value}")

    def passes(self, logits: Tensor, p: Tensor | None, confidence: Tensor) -> Tensor:
        """[B, K, V] bool, tokens accepted without asking p.

        logits [B, K, V] of the target; p [B, K, V] what is sampled from, None at temperature 0;
        confidence [B, K].
        """
        log_p = torch.log_softmax(logits.float(), dim=-1)
        entropy = -(log_p.exp() * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(dim=-1)
        bound = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon).unsqueeze(-1)
        typical = log_p.exp() > bound
        if p is not None:
            typical = typical & (p > 0)
        return typical & (confidence >= self.high).unsqueeze(-1)


def relaxed_distance(p: Tensor, q: Tensor, passes: Tensor) -> Tensor:
    """[B, K] float32 total variation between p and the law of what comes out of each position."""
    p, q = p.double(), q.double()
    kept = torch.where(passes, q, torch.minimum(p, q))
    residual = (p - q).clamp(min=0.0)
    total = residual.sum(dim=-1, keepdim=True)
    correction = torch.where(total > 0, residual / total, p)
    out = kept + (1 - kept.sum(dim=-1, keepdim=True)) * correction
    away = 0.5 * (out - p).abs().sum(dim=-1)
    # Without a token that passes the two are equal, whatever rounding makes of their difference.
    return torch.where(passes.any(dim=-1), away, 0.0).float()
