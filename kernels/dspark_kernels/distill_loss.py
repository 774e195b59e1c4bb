"""The softmaxes of a distillation loss: terms of every slot, and their gradient in the logits.

Two calls, because what a term of a slot is worth may depend on the terms of its whole block:

    terms   drafter's logits z and target's t -> the five terms of each slot, and four numbers of it
    pull    those, and a coefficient for each term of each slot -> the gradient, in place of z

With q = softmax z, p = softmax t and x the label, per slot:

    ce = -log q(x)    l1 = sum |p - q|    nla = -log a    a = sum min(p, q)
    kl = sum p log(p/q)    reverse_kl = sum q log(q/p)

    H(v) = 1 if p(v) > q(v), 1/2 if equal, 0 else        b = <q, H>
    pull = q (c_ce + c_kl - (2 c_l1 + c_nla / a)(H - b) - c_rkl (log(p/q) + reverse_kl))
           - c_kl p - c_ce e_x

Slots that imitate the same position of the target share a row of t: `rows` says which is whose.

Letters: c slots, m rows of the target, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

TERMS = 5
"""ce, l1, nla, kl, reverse_kl."""
NORMS = 4
"""log sum exp of z and of t, b, a."""


def terms(
    z: Tensor, target: Tensor, rows: Tensor, labels: Tensor, divergences: bool
) -> tuple[Tensor, Tensor]:
    """Terms of every slot and what the gradient needs of it.

    Args:
        z: [c, V] drafter's logits, any float dtype; only read.
        target: [m, V] target's logits.
        rows: [c] int64, the slot's row of `target`.
        labels: [c] int64 in [0, V).
        divergences: Whether the two KL terms are wanted; zeros otherwise.

    Returns:
        [5, c] and [4, c] in float32 (float64 for float64 logits).
    """
    wide = torch.promote_types(z.dtype, torch.float32)
    z, t = z.to(wide), target.to(wide)[rows]
    norm_q, norm_p = z.logsumexp(-1, keepdim=True), t.logsumexp(-1, keepdim=True)
    ce = (norm_q - z.gather(-1, labels[:, None]))[:, 0]
    q, p = (z - norm_q).exp(), (t - norm_p).exp()
    l1, overlap = (p - q).abs().sum(-1), torch.minimum(p, q).sum(-1)
    overlap = overlap.clamp_min(torch.finfo(wide).tiny)
    pulled = (q * _higher(p, q)).sum(-1)
    kl = reverse_kl = torch.zeros_like(ce)
    if divergences:
        ratio = (t - norm_p) - (z - norm_q)
        kl, reverse_kl = (p * ratio).sum(-1), -(q * ratio).sum(-1)
    return (
        torch.stack((ce, l1, -overlap.log(), kl, reverse_kl)),
        torch.stack((norm_q[:, 0], norm_p[:, 0], pulled, overlap)),
    )


def pull(
    z: Tensor,
    target: Tensor,
    rows: Tensor,
    labels: Tensor,
    divergences: bool,
    found: tuple[Tensor, Tensor],
    coefficients: Tensor,
) -> Tensor:
    """Gradient of sum (coefficients x terms) in z; written over z, which is returned.

    Args:
        z, target, rows, labels, divergences: As given to `terms`.
        found: What it returned.
        coefficients: [5, c].
    """
    values, norms = found
    wide = values.dtype
    ce, l1, nla, kl, reverse_kl = coefficients.to(wide)[:, :, None]
    norm_q, norm_p, pulled, overlap = norms[:, :, None]
    log_q, log_p = z.to(wide) - norm_q, target.to(wide)[rows] - norm_p
    q, p = log_q.exp(), log_p.exp()
    gradient = ce - (2 * l1 + nla / overlap) * (_higher(p, q) - pulled)
    if divergences:
        gradient = gradient + kl - reverse_kl * (log_p - log_q + values[4][:, None])
    gradient = gradient * q
    if divergences:
        gradient = gradient - kl * p
    return z.copy_(gradient.scatter_add_(-1, labels[:, None], -ce))


def _higher(p: Tensor, q: Tensor) -> Tensor:
    """H: 1 where p is larger, 1/2 where both are equal."""
    return ((p - q).sign() + 1) / 2


def cost(slots: int, target_rows: int, vocabulary: int, size: int = 2) -> tuple[int, int]:
    """Bytes that both calls must move, and operations, for logits of `size` bytes.

    Each call reads z, and the target's rows once however many slots share them; `pull` writes z.
    Operations count an exponential as one: two of them and about 20 others a logit.
    """
    return (3 * slots + 2 * target_rows) * vocabulary * size, 30 * slots * vocabulary
