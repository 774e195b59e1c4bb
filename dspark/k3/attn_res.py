"""Attention Residuals: a layer reads a softmax mixture of earlier block sums, not one running sum.

For a read with norm weight w_n and query row w_p, over V = [bank_0, .., bank_n-1, prefix], float32:

    score_j = sum_d w_p w_n V_j / sqrt(mean V_j^2 + eps) ;  out = sum_j softmax(score)_j V_j

Keys are normed, values are raw. The prefix is the sum of the sublayer outputs since the last block
boundary: it starts again from nothing every ``attn_res_block_size`` layers, when its old value
joins the bank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.k3.layers import RMSNorm, rms


def mix(prefix: Tensor, bank: Tensor | None, norm: RMSNorm, query: nn.Linear) -> Tensor:
    """One read.

    Args:
        prefix: [B, T, D] sum of the sublayer outputs since the last boundary.
        bank: [B, T, n, D] finished block sums; None before the first boundary, where the read is
            the prefix itself.
        norm: w_n [D]. query: w_p as a linear of weight [1, D].

    Returns:
        [B, T, D] in the dtype of the prefix.
    """
    if bank is None:
        return prefix
    values = torch.cat((bank, prefix.unsqueeze(-2)), dim=-2).float()
    key_weight = query.weight[0].float() * norm.weight.float()
    scores = torch.matmul(values, key_weight) / rms(values, norm.eps).squeeze(-1)
    return torch.matmul(scores.softmax(dim=-1).unsqueeze(-2), values).squeeze(-2).to(prefix.dtype)
