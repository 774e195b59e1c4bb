"""What a `kda` drafter's context makes of new text, for all layers at once, before the recurrence.

The layers stand side by side as further heads. Rows come as one projection made them; out come what
`kda_step` folds into the states, and the rows that the convolutions still reach:

    k = unit(silu(conv k)) ;  v = silu(conv v)
    g = bound sigmoid(rate (low W + dt)) ;  beta = sigmoid(its logit)

Rows from ``keep`` on change nothing: g = 0 and beta = 0 there. Queries of a context are asked by
nobody; only their rows are kept, for the convolution of the block behind them.

Letters: B batch, n rows, L layers, H heads of a layer, K width of a head, R rank of the decay,
W rows of the convolution, C = 3 L H K channels: q of every layer, then k, then v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_kernels.kda_linear import convolved, unit, wide

Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def kda_context_rows(
    inputs: Tensor,
    window: Tensor,
    conv: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    rate: Tensor,
    lower_bound: float,
    keep: Tensor | None = None,
) -> Rows:
    """Rows ready for the recurrence, and the next window.

    Args:
        inputs: [B, n, C + L R + L H]: q, k, v, low-rank decay, beta.
        window: [B, W-1, C], the rows of q, k and v before them.
        conv: [W, C] float32, the weight of a row itself last.
        decay: [L, R, H K], what widens the low-rank decay.
        dt_bias: [L H, K] float32.
        rate: [L H, 1] float32, exp(A_log).
        lower_bound: Of the log-decays, < 0.
        keep: [B] int64, how many rows count, from the first; None: all.

    Returns:
        k, v, g [B, n, L H, K] and beta [B, n, L H], float32 or float64 as ``conv``; the next window
        [B, W-1, C] in the dtype of ``window``.
    """
    heads, width = dt_bias.shape
    layers, rank, _ = decay.shape
    count, channels = inputs.shape[1], 3 * heads * width
    rows, low, beta = inputs.split((channels, layers * rank, heads), -1)
    rows = torch.cat((window, rows), 1)
    asked = channels // 3
    k, v = convolved(rows[..., asked:], conv[:, asked:], 2, heads).unbind(-3)
    k = unit(k)
    low = low.reshape(-1, layers, rank).transpose(0, 1)
    f = torch.bmm(low, decay).transpose(0, 1).reshape(k.shape)
    g = lower_bound * torch.sigmoid(rate * (wide(f) + dt_bias))
    beta = wide(beta).sigmoid()
    if keep is None:
        return k, v, g, beta, rows[:, count:].clone()
    dropped = torch.arange(count, device=g.device) >= keep[:, None]
    g = g.masked_fill(dropped[..., None, None], 0.0)
    beta = beta.masked_fill(dropped[..., None], 0.0)
    places = keep[:, None] + torch.arange(window.shape[1], device=g.device)
    return k, v, g, beta, rows[torch.arange(len(keep), device=g.device)[:, None], places]


def moved_bytes(
    batch: int, n: int, layers: int, heads: int, width: int, rank: int, taps: int, itemsize: int
) -> int:
    """Bytes of one call if everything is read or written once."""
    channels = 3 * layers * heads * width
    rows = batch * (n * (channels + layers * (rank + heads)) + 2 * (taps - 1) * channels)
    weights = itemsize * rank * channels // 3 + 4 * (2 * taps + 1) * channels // 3
    return itemsize * rows + weights + 4 * batch * n * (channels + layers * heads)
