"""Siblings: other candidates for a position whose primary was rejected.

    propose   y_1, y_2, ... ~ q without x, without replacement
    try       r_1 = residual of the primary;  q_1 = q without x, normalised
              accept y_j with probability min(1, r_j(y_j) / q_j(y_j))
              else r_{j+1} = norm(max(r_j - q_j, 0)),  q_{j+1} = q_j without y_j, normalised
    correct   from the last r, if none was accepted

This is recursive rejection sampling: y_j is distributed as q_j given everything tried before it,
so that "accept or go on from what is left" produces r_j exactly, whatever j, and with it p. How
many are tried may therefore depend on anything but their identity and the coins thrown for them.

At temperature 0 (`probs` None) both sides are point masses: the siblings are the drafter's next
best tokens and one is accepted if and only if it is the target's argmax. The same holds for any
deterministic draft: y_j is then judged as a point mass.

A residual without mass can only come from rounding; the last one that had some stands.

Letters: B batch, V vocab, m siblings per position; "..." any leading shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.runtime.sampling import draw_at


def draw_siblings(probs: Tensor, tokens: Tensor, u: Tensor) -> Tensor:
    """Draw from q [..., V] without the primaries [...]: uniforms [..., m] -> [..., m] int64.

    -1 stands where q has no other token left.
    """
    left = probs.scatter(-1, tokens.unsqueeze(-1), 0.0)
    drawn = []
    for coin in u.unbind(-1):
        token = draw_at(left, coin)
        drawn.append(torch.where(left.amax(dim=-1) > 0, token, -1))
        left.scatter_(-1, token.unsqueeze(-1), 0.0)
    return torch.stack(drawn, dim=-1)


def next_best(logits: Tensor, tokens: Tensor, count: int) -> Tensor:
    """The `count` largest logits [..., V] besides `tokens` [...], ties to the lowest id.

    -1 stands where no token of finite logit is left.
    """
    left = logits.scatter(-1, tokens.unsqueeze(-1), -torch.inf)
    best = []
    for _ in range(count):
        token = left.argmax(dim=-1)
        best.append(torch.where(left.amax(dim=-1) > -torch.inf, token, -1))
        left.scatter_(-1, token.unsqueeze(-1), -torch.inf)
    return torch.stack(best, dim=-1)


@dataclass(frozen=True, eq=False)
class Ladder:
    """What becomes of a rejected primary.

    chances  [B, m] float64: that sibling j is accepted once all before it were rejected
    left     [B, V] float64: weights to correct from when all of them were
    """

    chances: Tensor
    left: Tensor


def ladder(
    residual: Tensor, q: Tensor | None, primary: Tensor, siblings: Tensor, live: Tensor
) -> Ladder:
    """Judge the siblings of one position per batch row.

    Args:
        residual: Weights [B, V] float64 left by the primary, not all zero.
        q: The distribution [B, V] they were drawn from, the primary included; None: point masses.
        primary: [B] int64.
        siblings: [B, m] int64.
        live: [B, m] bool, which of them are tried; the others are passed over.
    """
    left, chances = residual, []
    rest = None if q is None else q.double().scatter(1, primary.unsqueeze(1), 0.0)
    for token, tried in zip(siblings.clamp(min=0).unbind(1), live.unbind(1), strict=True):
        y, on = token.unsqueeze(1), tried.unsqueeze(1)
        r = left / left.sum(dim=1, keepdim=True)
        if rest is None:
            offer = torch.zeros_like(r).scatter_(1, y, 1.0)
        else:
            offer = rest / rest.sum(dim=1, keepdim=True)
            rest = torch.where(on, rest.scatter(1, y, 0.0), rest)
        chance = (r.gather(1, y) / offer.gather(1, y)).clamp(max=1.0)
        chances.append(torch.where(on, chance, 0.0).squeeze(1))
        after = (r - offer).clamp(min=0.0)
        left = torch.where(on & (after.sum(dim=1, keepdim=True) > 0), after, r)
    return Ladder(torch.stack(chances, dim=1), left)
