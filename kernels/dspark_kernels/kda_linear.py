"""One block of a drafter with the `kda` backbone, from its projections to what its heads answer.

    q, k, v = silu(conv(rows)), the first rows reaching back into the window
    q = q / |q| K^-1/2,   k = k / |k|,   beta = sigmoid(.),   g = bound sigmoid(rate (low D + dt))
    o = linearised KDA of order r against the entry state           `linear_kda.block`
    o = o + gain softmax(q.k / |q||k| exp(sharpness)) v             all slots, where there is one
    out = RMSNorm(o) w sigmoid(gate)

The state is read once and never written: what a block leaves behind is nobody's concern. Plain
torch: the specification, and what runs on a CPU.

Letters: B batch, G slots, H heads, K head dim, W rows of the convolution, R gate rank, C = 3 H K.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_kernels import linear_kda
from dspark_kernels.linear_kda import Order

L2_EPS = 1e-6


def kda_linear(
    inputs: Tensor,
    window: Tensor,
    conv: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    rate: Tensor,
    norm: Tensor,
    state: Tensor,
    order: Order,
    lower_bound: float,
    eps: float,
    sharpness: Tensor | None = None,
    gain: Tensor | None = None,
) -> Tensor:
    """What the heads answer, before the output projection.

    Args:
        inputs: [B, G, C + HK + R + H], projections of the slots side by side: q, k, v, output gate,
            low-rank decay, beta.
        window: [B, W-1, 3, HK], the rows of q, k and v before the block.
        conv: [W, C] float32, the weight of a row itself last.
        decay: [R, HK], what widens the low-rank decay.
        dt_bias: [H, K] float32.
        rate: [H, 1] float32, exp(A_log).
        norm: [K].
        state: [B, H, K, K] float32, before the block.
        order: 0..G-1, or "gla".
        lower_bound: Of the log-decays, < 0.
        eps: Of the norm.
        sharpness, gain: [H] and [H, 1], of the softmax between slots; None: there is none.

    Returns:
        [B, G, HK] in the dtype of ``inputs``.
    """
    heads, width = dt_bias.shape
    channels = heads * width
    split = (3 * channels, channels, decay.shape[0], heads)
    rows, gate, low, beta = inputs.split(split, -1)
    rows = torch.cat((window.flatten(2), rows), 1)
    q, k, v = convolved(rows, conv, 3, heads).unbind(-3)
    q, k = unit(q) * width**-0.5, unit(k)
    f = (low @ decay).view(k.shape)
    g = lower_bound * torch.sigmoid(rate * (wide(f) + dt_bias))
    beta = wide(beta).sigmoid()
    out = linear_kda.block(q, k, v, g, beta, state, order, None, lower_bound)
    if sharpness is not None and gain is not None:
        out = out + gain * slot_softmax(q, k, v, sharpness)
    normed = F.rms_norm(out, norm.shape, norm.to(out.dtype), eps)
    out = normed * gate.reshape(out.shape).to(out.dtype).sigmoid()
    return out.to(inputs.dtype).flatten(-2)


def wide(x: Tensor) -> Tensor:
    """float32, or float64 as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def slot_softmax(q: Tensor, k: Tensor, v: Tensor, sharpness: Tensor) -> Tensor:
    """Attention of all slots to all slots: [B, G, H, K] each, q carrying K^-1/2 already."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scale = q.shape[-1] ** 0.5 * sharpness.exp()[:, None, None]
    scores = torch.matmul(q * scale, k.transpose(-1, -2))
    return torch.matmul(scores.softmax(-1), v).transpose(1, 2)


def convolved(windowed: Tensor, conv: Tensor, parts: int, heads: int) -> Tensor:
    """silu of the causal convolution: [B, W-1+G, C] -> [B, G, parts, H, K]."""
    rows = windowed.shape[1] - conv.shape[0] + 1
    windowed = wide(windowed)
    out = windowed[:, :rows] * conv[0]
    for i in range(1, conv.shape[0]):
        out = torch.addcmul(out, windowed[:, i : i + rows], conv[i])
    return F.silu(out).unflatten(-1, (parts, heads, -1))


def unit(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def moved_bytes(
    batch: int, slots: int, heads: int, width: int, rank: int, taps: int, itemsize: int
) -> int:
    """Bytes of one call if everything is read or written once."""
    channels = heads * width
    rows = batch * slots * (5 * channels + rank + heads) + batch * (taps - 1) * 3 * channels
    weights = itemsize * (rank * channels + width) + 4 * (3 * taps * channels + channels + heads)
    return itemsize * rows + weights + 4 * batch * channels * width


def flops(batch: int, slots: int, heads: int, width: int, rank: int, order: Order) -> int:
    """Matrix products, a multiply and an add being two; an exact order counts as its series."""
    terms = 0 if order == "gla" else 1 + int(order)
    scores = 2 * slots * slots * width * (1 if terms == 0 else 2)
    reads = 2 * slots * width * width * (1 if terms == 0 else 2)
    sums = 2 * slots * slots * width * max(1, terms)
    return batch * heads * (scores + reads + sums + 2 * slots * rank * width)
