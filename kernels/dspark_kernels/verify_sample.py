"""The verdict on a drafted chain, on the device: accept, correct or go on, for a ragged batch.

    accept x_k     while k < L and u_k q_k(x_k) < p_k(x_k), up to the first that is not
    correct from   max(p_a - q_a, 0) at the first position a < L that was not accepted
    bonus from     p_L when all L were

which leaves the target's law untouched (Leviathan et al. 2023; Chen et al. 2023). p and q are laws
of rows of logits (`law`); q is the one the tokens were drawn from. Without scores the draft is a
point mass per token, q_k = [x = x_k]. A residual without mass can only come from rounding: p stands
in for it. At temperature 0 a token is accepted if and only if it is the target's argmax, and the
next token is the argmax behind the accepted ones.

With G = 0 this is plain sampling of one token.

Letters: B batch, G tokens drafted, L <= G of them sent, V vocabulary, V' of the drafter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dspark_kernels.law import Law, draw, law_of, probs_of

ALL_ACCEPTED, CORRECTED, CUT = 0, 2, 3
"""Levels, numbered as the runtime's verdicts are."""


class Judged(NamedTuple):
    """The verdict, [B] int64 each.

    accepted    length of the accepted prefix, 0..L
    next_token  the correction or the bonus: the next anchor
    level       ALL_ACCEPTED | CORRECTED | CUT
    fault       0 where the logits of all L + 1 rows define a distribution, else
                1 + 3 row + kind of the first that does not: NaN, +inf, nothing but -inf
    """

    accepted: Tensor
    next_token: Tensor
    level: Tensor
    fault: Tensor


def verify_sample(
    logits: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    scores: Tensor | None = None,
    law: Law | None = None,
    coins: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    where: Tensor | None = None,
) -> Judged:
    """Judge what was drafted by the target's logits.

    Args:
        logits: [B, G + 1, V] of the target, any float dtype; row k answers [anchor, x_1..x_k].
            Rows behind row L of a request are not read.
        tokens: [B, G] int64, drafted.
        lengths: [B] int64, L in 0..G.
        scores, law: [B, G, V'] float32 and their law, of `markov_sample`; None: point masses.
        coins: [B, G + 1] float64 uniforms in [0, 1), the last for the correction or bonus; not
            read where a temperature is 0.
        temperature, top_k, top_p: [B], as for `markov_sample`, and the same as there.
        where: [V] int64, the draft id of each target id, -1 for none; None: V' = V.
    """
    batch, count = tokens.shape
    cold = torch.zeros(batch, device=logits.device) if temperature is None else temperature
    rows = torch.arange(count + 1, device=logits.device)
    read = rows <= lengths.unsqueeze(1)
    # What is not read may be anything, NaN included.
    known = torch.where(read.unsqueeze(-1), logits.float(), 0.0)
    warm = cold.unsqueeze(1).expand(batch, count + 1)
    wide = [None if x is None else x.unsqueeze(1).expand_as(warm) for x in (top_k, top_p)]
    p = probs_of(known, law_of(known, warm, *wide), warm)
    q = _draft_law(p, tokens, scores, law, warm, where)
    u = torch.zeros_like(warm, dtype=torch.float64) if coins is None else coins
    index = tokens.unsqueeze(-1)
    p_x, q_x = (x[:, :count].gather(-1, index).squeeze(-1) for x in (p, q))
    sent = rows[:count] < lengths.unsqueeze(1)
    taken = torch.where(cold.unsqueeze(1) == 0, p_x > 0, u[:, :count] * q_x < p_x)
    accepted = (sent & taken).long().cumprod(1).sum(1)
    at = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    here = p.gather(1, at).squeeze(1)
    offered = torch.cat((q, torch.zeros_like(here).unsqueeze(1)), 1).gather(1, at).squeeze(1)
    offered = offered.masked_fill((accepted == lengths).unsqueeze(1), 0.0)
    residual = (here - offered).clamp(min=0.0)
    drawn = draw(torch.where(residual.sum(-1, keepdim=True) > 0, residual, here), u[:, -1])
    greedy = known.argmax(-1).gather(1, accepted.unsqueeze(1)).squeeze(1)
    level = torch.where(lengths < count, CUT, ALL_ACCEPTED)
    return Judged(
        accepted=accepted,
        next_token=torch.where(cold == 0, greedy, drawn),
        level=torch.where(accepted < lengths, CORRECTED, level),
        fault=_fault(known, read),
    )


def _draft_law(
    p: Tensor,
    tokens: Tensor,
    scores: Tensor | None,
    law: Law | None,
    warm: Tensor,
    where: Tensor | None,
) -> Tensor:
    """q [B, G, V] float64."""
    if scores is None or law is None:
        return torch.zeros_like(p[:, :-1]).scatter_(-1, tokens.unsqueeze(-1), 1.0)
    q = probs_of(scores, law, warm[:, :-1])
    if where is None:
        return q
    return torch.where(where >= 0, q[..., where.clamp(min=0)], 0.0)


def _fault(logits: Tensor, read: Tensor) -> Tensor:
    peak = logits.amax(-1)
    bad = ~torch.isfinite(peak) & read
    row = bad.byte().argmax(1, keepdim=True)
    found = peak.gather(1, row)
    kind = torch.where(found.isnan(), 0, torch.where(found > 0, 1, 2))
    return torch.where(bad.any(1), (1 + 3 * row + kind).squeeze(1), 0)


def moved_bytes(batch: int, count: int, vocab: int, itemsize: int, drawn: bool) -> int:
    """Bytes of one call: every row of logits once; to draw, one of them again and one of scores."""
    rows = batch * (count + 1) * vocab * itemsize
    return rows + (batch * vocab * (itemsize + 4) if drawn else 0)
