"""Attention Residuals: a layer reads a softmax mixture of earlier block sums, not one running sum.

For a read with norm weight w_n and query row w_p, over V = [bank_0, .., bank_n-1, prefix], float32:

    score_j = sum_d w_p w_n V_j / sqrt(mean V_j^2 + eps) ;  out = sum_j softmax(score)_j V_j

Keys are normed, values are raw. The prefix is the sum of the sublayer outputs since the last block
boundary: it starts again from nothing every ``attn_res_block_size`` layers, when its old value
joins the bank.

The bank is a list, not one stacked tensor: a pass over many rows holds every entry once. A read
stacks them for some rows at a time, so that what it needs beside them does not grow with the bank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dspark.k3.layers import RMSNorm, rms

READ_ROWS = 2048
"""Rows times values of one read: what it needs at a time, in units of one row of the model."""


def mix(prefix: Tensor, bank: Sequence[Tensor], norm: RMSNorm, query: nn.Linear) -> Tensor:
    """One read.

    Args:
        prefix: [B, T, D] sum of the sublayer outputs since the last boundary.
        bank: finished block sums, each [B, T, D]; empty before the first boundary, where the read
            is the prefix itself.
        norm: w_n [D]. query: w_p as a linear of weight [1, D].

    Returns:
        [B, T, D] in the dtype of the prefix.
    """
    if not bank:
        return prefix
    key_weight = query.weight[0].float() * norm.weight.float()
    batch, rows, _ = prefix.shape
    step = max(1, READ_ROWS // (batch * (len(bank) + 1)))
    if rows <= step or torch.is_grad_enabled():
        return _read([*bank, prefix], key_weight, norm.eps)
    out = torch.empty_like(prefix)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        out[:, part] = _read([value[:, part] for value in (*bank, prefix)], key_weight, norm.eps)
    return out


def _read(entries: list[Tensor], key_weight: Tensor, eps: float) -> Tensor:
    values = torch.stack(entries, dim=-2).float()
    scores = torch.matmul(values, key_weight) / rms(values, eps).squeeze(-1)
    mixed = torch.matmul(scores.softmax(dim=-1).unsqueeze(-2), values).squeeze(-2)
    return mixed.to(entries[-1].dtype)
