"""Attention of anchored blocks: every block reads the context before its anchor, and itself.

Slot n of block n // G, anchored at p, sees the context keys k < p (those with k >= p - W behind a
window) and the slots of its own block (those up to itself where blocks are causal):

    out = softmax(scale q [K_seen; K_own]^T) [V_seen; V_own]

Keys and values come as [context; all slots]. Query heads that share a key head are rows of one
tile, so keys are read once for all of them. Reference in torch with a mask over everything; the
kernels visit the tiles that hold something.

Letters: B batch, S context, A blocks, G slots of a block, N = A G, H/J query/key heads, D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def block_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    anchors: Tensor,
    lengths: Tensor,
    slots: int,
    scale: float,
    window: int | None = None,
    causal: bool = False,
) -> Tensor:
    """Differentiable in q, keys and values.

    Args:
        q: [B, N, H, D].
        keys, values: [B, S + N, J, D]; J divides H.
        anchors: [B, A] int64, in any order.
        lengths: [B] int64, context keys that are there; those after are padding.
        slots: G.
        scale: Of the products.
        window: W; None: no window.
        causal: Whether a slot sees only slots of its block up to itself.

    Returns:
        [B, N, H, D].
    """
    seen = mask(anchors, lengths, slots, keys.shape[1], window, causal)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2),
        attn_mask=seen[:, None], scale=scale, enable_gqa=q.shape[2] != keys.shape[2],
    )  # fmt: skip
    return out.transpose(1, 2)


def mask(
    anchors: Tensor,
    lengths: Tensor,
    slots: int,
    keys: int,
    window: int | None = None,
    causal: bool = False,
) -> Tensor:
    """What every slot sees: [B, N, S + N] bool."""
    count = anchors.shape[1] * slots
    key = torch.arange(keys, device=anchors.device)
    slot = torch.arange(count, device=anchors.device)[:, None]
    anchor = anchors.repeat_interleave(slots, 1)[..., None]
    before = (key < anchor) & (key < lengths[:, None, None])
    if window is not None:
        before = before & (key >= anchor - window)
    own = key - (keys - count)
    same = (own // slots == slot // slots) & (own >= 0)
    if causal:
        same = same & (own <= slot)
    return torch.where(own < 0, before, same)


def cost(anchors: Tensor, slots: int, heads: int, width: int) -> tuple[int, int]:
    """Operations of the forward and of the backward pass, seen keys alone; without a window."""
    pairs = int(anchors.sum()) * slots + anchors.numel() * slots * slots
    product = 2 * pairs * heads * width
    return 2 * product, 5 * product
