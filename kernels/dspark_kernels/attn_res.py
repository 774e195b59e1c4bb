"""A read of Attention Residuals, fused with the additions before it and the norm after it.

Over V = [bank_0, .., bank_n-1, prefix] of one row, in float32:

    prefix <- prefix + added
    score_j = sum_d w_d V_j,d / sqrt(mean V_j^2 + eps) ;  mixed = sum_j softmax(score)_j V_j
    normed = RMSNorm(mixed)

w is the product of the read's norm weight and its query. Without a bank mixed is the prefix. At a
block boundary the prefix joins the bank after the read.

Letters: N rows of all sequences, D hidden, n entries of the bank.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attn_res_mix(
    prefix: Tensor,
    bank: Tensor,
    count: int,
    key_weight: Tensor,
    eps: float,
    weight: Tensor,
    norm_eps: float,
    added: Tensor | None = None,
    append: bool = False,
) -> tuple[Tensor, Tensor]:
    """One read and the norm that follows it.

    Args:
        prefix: [..., D] sum of the sublayer outputs since the last boundary. Written in place where
            ``added`` is given.
        bank: [n_max, ..., D] buffer of finished block sums.
        count: n, how many of them there are; the others are not read.
        key_weight: [D] w, float32.
        eps: of the keys' norm.
        weight, norm_eps: [D] and eps of the norm that follows.
        added: [..., D] the last sublayer's output, joins the prefix first; None: it already has.
        append: the prefix becomes ``bank[count]``.

    Returns:
        mixed and normed, both [..., D] in the dtype of the prefix.
    """
    if added is not None:
        prefix += added
    wide = torch.promote_types(prefix.dtype, torch.float32)
    mixed = prefix.clone()
    if count:
        values = torch.cat((bank[:count], prefix.unsqueeze(0))).to(wide)
        scores = (values * key_weight.to(wide)).sum(-1) * _inverse_rms(values, eps).squeeze(-1)
        mixed = (scores.softmax(0).unsqueeze(-1) * values).sum(0).to(prefix.dtype)
    if append:
        bank[count] = prefix
    normed = mixed.to(wide)
    return mixed, (normed * _inverse_rms(normed, norm_eps)).to(prefix.dtype) * weight


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def cost(rows: int, width: int, count: int, added: bool, append: bool) -> tuple[int, int]:
    """Bytes (16 bits a number, float32 keys) and operations of one call."""
    entries = count + 1 + 2 + 2 * added + append  # read; two outputs; the sum and where it goes
    return 2 * rows * width * entries + 6 * width, rows * width * (6 * (count + 1) + 4)
