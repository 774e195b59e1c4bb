"""Token-wise rejection sampling: keep the target's distribution, whatever the drafter proposed.

    accept x_k        with probability min(1, p_k(x_k) / q_k(x_k)), stop at the first rejection
    correct from      max(p_k - q_k, 0) normalised, at the rejected position
    bonus from        p_{L+1}, when all L verified tokens were accepted

The token at each position is then distributed as p exactly (Leviathan et al. 2023; Chen et al.
2023): a token x comes out of position k with probability min(p, q)(x) as a proposal plus
(1 - sum min(p, q)) * max(p - q, 0)(x) / sum max(p - q, 0) = p(x) - min(p, q)(x) as a correction.
q is `proposal.probs` itself, the tensor the tokens were drawn from; it is never computed again.

A proposal without probs is a point mass per token. At temperature 0 the rule becomes "accept if
and only if x_k is the target's argmax"; at higher ones the same formulas hold with a one-hot q:
accept with probability p(x_k), correct from p without x_k.

If rounding leaves no residual (p <= q everywhere), p itself stands in for it.

Letters: B batch, G proposed tokens, K verified tokens, V vocab.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.runtime.records import ALL_ACCEPTED, CORRECTED, CUT, Proposal, Verdict
from dspark.runtime.sampling import (
    Generators,
    SamplingParams,
    check_logits,
    draw,
    to_probs,
    uniform,
)


@torch.no_grad()
def verify(
    proposal: Proposal,
    target_logits: Tensor,
    sampling: SamplingParams,
    generator: Generators,
    lengths: Tensor | None = None,
) -> Verdict:
    """Judge a proposal of G tokens by the target's logits [B, K+1, V], K <= G.

    Row k of the logits is the target's answer after [anchor, x_1..x_k]. `lengths` [B] int64 (each
    0..K; None: K for every row) is where a policy cut the block: tokens from there on are not
    looked at. Whoever chooses `lengths` may use x_1..x_{k-1} to decide on x_k, never x_k itself.

    Raises BadLogits naming row and position. Otherwise waits for no device: the check comes last,
    when the whole verdict is queued.
    """
    verified = target_logits.shape[1] - 1
    tokens = proposal.tokens[:, :verified]
    if lengths is None:
        lengths = tokens.new_full((tokens.shape[0],), verified)
    inside = torch.arange(verified, device=tokens.device) < lengths.unsqueeze(1)
    if sampling.greedy:
        best = target_logits.argmax(dim=-1)
        accepted = _prefix(inside & (tokens == best[:, :verified]))
        next_token = best.gather(1, accepted.unsqueeze(1)).squeeze(1)
    else:
        p = to_probs(target_logits, sampling, check=False)
        q = None if proposal.probs is None else proposal.probs[:, :verified]
        accepted = _prefix(inside & _coins(p[:, :verified], q, tokens, generator))
        weights = _next_weights(p, q, tokens, accepted, accepted == lengths)
        next_token = draw(weights, generator)
    check_logits(target_logits)
    uncut = torch.where(lengths < proposal.tokens.shape[1], CUT, ALL_ACCEPTED)
    return Verdict(accepted, next_token, torch.where(accepted < lengths, CORRECTED, uncut))


def _prefix(ok: Tensor) -> Tensor:
    """[B, K] bool -> [B] int64, length of the leading run of True."""
    return ok.long().cumprod(dim=1).sum(dim=1)


def _coins(p: Tensor, q: Tensor | None, tokens: Tensor, generator: Generators) -> Tensor:
    """[B, K] bool, each True with probability min(1, p/q) of its token."""
    index = tokens.unsqueeze(-1)
    p_x = p.gather(-1, index).squeeze(-1).double()
    q_x = torch.ones_like(p_x) if q is None else q.gather(-1, index).squeeze(-1).double()
    # u < p/q without the division; u < 1, so equal probabilities always accept.
    return uniform(tuple(tokens.shape), generator, p.device) * q_x < p_x


def _next_weights(
    p: Tensor, q: Tensor | None, tokens: Tensor, accepted: Tensor, bonus: Tensor
) -> Tensor:
    """[B, V] weights of the token after the accepted prefix: p where `bonus`, else the residual."""
    rows = torch.arange(p.shape[0], device=p.device)
    p_next = p[rows, accepted]
    if tokens.shape[1] == 0:
        return p_next
    at = accepted.clamp(max=tokens.shape[1] - 1)
    if q is None:
        residual = p_next.scatter(1, tokens[rows, at].unsqueeze(1), 0.0)
    else:
        residual = (p_next - q[rows, at]).clamp_(min=0.0)
    keep_p = bonus | (residual.sum(dim=1) <= 0)
    return torch.where(keep_p.unsqueeze(1), p_next, residual)
