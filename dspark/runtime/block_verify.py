"""Block verification: the acceptance of a whole prefix instead of one token after the other.

    w_0 = 1,  w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i))
    s_i = sum_x max(w_i p_{i+1}(x) - q_{i+1}(x), 0)                     for i < L
    h_i = s_i / (s_i + 1 - w_i), 1 where w_i = 1;  h_L = w_L
    accept up to the largest i with u_i < h_i, none if there is none
    go on from p_{L+1} after L, from norm(max(w_i p_{i+1} - q_{i+1}, 0)) after i < L

(Sun et al. 2024, "Block verification accelerates speculative decoding".) A token that was lucky,
p > q, makes up for an unlucky one after it, which token-wise verification forgets at once: for
every pair of p and q at least as many tokens are accepted, and what comes out has the law of p all
the same. Its conditional acceptance at k is E[w_k] / E[w_{k-1}] and no longer 1 - TV.

L is where the block was cut. What the drafter said about position L+1 must not be looked at, even
though it was drawn: h_L = w_L knows nothing of q_{L+1}, and neither does the bonus.

Letters: B batch, K positions, V vocab.
"""

from __future__ import annotations

import torch
from torch import Tensor


def block_weights(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """w_0..w_K [B, K+1] float64 of tokens [B, K] under p [B, K or more, V] and q [B, K, V]."""
    index = tokens.unsqueeze(-1)
    p_x = p[:, : tokens.shape[1]].gather(-1, index).squeeze(-1).double()
    ratio = p_x / q.gather(-1, index).squeeze(-1).double()
    last = torch.ones(tokens.shape[0], dtype=torch.float64, device=tokens.device)
    weights = [last]
    for step in ratio.unbind(1):
        last = (last * step).clamp(max=1.0)
        weights.append(last)
    return torch.stack(weights, dim=1)


def block_chances(p: Tensor, q: Tensor, weights: Tensor, lengths: Tensor) -> Tensor:
    """h_1..h_K [B, K] float64, 0 behind `lengths` [B]; p [B, K+1, V], q [B, K, V]."""
    count = q.shape[1]
    w = weights[:, 1:]
    spare = (w[:, :-1, None] * p[:, 1:count] - q[:, 1:]).clamp(min=0.0).sum(dim=-1)
    spare = torch.cat((spare, torch.zeros_like(w[:, :1])), dim=1)[:, :count]
    inner = torch.where(w == 1, 1.0, spare / (spare + 1 - w))
    position = torch.arange(1, count + 1, device=p.device)
    end = lengths.unsqueeze(1)
    return torch.where(position < end, inner, torch.where(position == end, w, 0.0))


def largest(ok: Tensor) -> Tensor:
    """[B, K] bool -> [B] int64, the largest position 1..K that is True, 0 if none is."""
    position = torch.arange(1, ok.shape[1] + 1, device=ok.device)
    none = position.new_zeros(ok.shape[0], 1)
    return torch.cat((none, position * ok), dim=1).amax(dim=1)
