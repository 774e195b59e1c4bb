"""The block masks of a training pass as one flex-attention call, for GPUs.

`sight.py` attends in groups of anchors under dense masks: right anywhere, and fast on a CPU. With
hundreds of anchors over thousands of positions most of a mask is empty, block against block nearly
all of it. Here the mask is a predicate over (query, key), all keys stand side by side as
[context; all blocks], and a compiled kernel skips the tiles of 128 x 128 that hold nothing.

The first call compiles, for ten to twenty seconds; sizes are symbolic, so later ones do not.

Letters: B batch, S context, A anchors, G slots, H heads, W window.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from dspark.draft.sight import Sight

PAYS_FROM = 2**23
"""Elements of the whole mask, B x A*G x (S + A*G), from which the compiled kernel is used.

Measured on an H200, bf16, a step of forward and backward in ms, groups and this: 12.9 and 17.9 at
2^19 elements, 29.5 and 25.9 at 2^22, 188 and 53 (8.9 and 3.9 GB) at 2^25, which is 512 anchors of 7
slots over 4,096 positions.
"""

NARROWEST = 16
"""Channels of a head, of keys and of values, below which there is no compiled kernel."""


def pays(valid: Tensor, anchors: Tensor, slots: int, channels: int) -> bool:
    """Whether a training pass of this size should take this path: on CUDA, when it is large.

    `channels` is the fewest that a head has of keys or of values.
    """
    queries = anchors.shape[1] * slots
    size = len(valid) * queries * (valid.shape[1] + queries)
    return valid.device.type == "cuda" and size >= PAYS_FROM and channels >= NARROWEST


def mask_predicate(
    sight: Sight, valid: Tensor, anchors: Tensor, slots: int
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether query q of row b sees key k, for index tensors of any one shape.

    Args:
        sight: Of the layers that this is for.
        valid: [B, S] bool, real context positions.
        anchors: [B, A] int64.
        slots: G.
    """
    length = valid.shape[1]

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        del h
        anchor, own = anchors[b, q // slots], k - length
        before = (k < anchor) & valid[b, k.clamp(max=length - 1)]
        if sight.window is not None:
            before = before & (k >= anchor - sight.window)
        same = own // slots == q // slots
        if sight.causal:
            same = same & (own <= q)
        return torch.where(k < length, before, same)

    return sees


def block_mask(sight: Sight, valid: Tensor, anchors: Tensor, slots: int) -> BlockMask:
    """The predicate with the tiles that hold anything, computed once a pass."""
    from torch.nn.attention.flex_attention import create_block_mask

    batch, queries = len(anchors), anchors.shape[1] * slots
    return create_block_mask(
        mask_predicate(sight, valid, anchors, slots),
        batch, None, queries, valid.shape[1] + queries, device=str(valid.device),
    )  # fmt: skip


def flex_attend(
    mask: BlockMask,
    q: Tensor,
    context: tuple[Tensor, Tensor],
    block: tuple[Tensor, Tensor],
    scale: float,
) -> Tensor:
    """As `BlockLayout.attend` under a mask of `block_mask`: [B, H, A*G, V]."""
    keys, values = (torch.cat(pair, 2) for pair in zip(context, block, strict=True))
    return attend_whole(mask, q, keys, values, scale)


def attend_whole(mask: BlockMask, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """`flex_attend` of keys and values that stand side by side already, [B, J, S + A*G, .]."""
    # Under autocast values leave a product in bfloat16, normed queries and keys stay in float32.
    # Scaled dot-product attention casts them; here not every torch version does.
    q, keys = q.to(values.dtype), keys.to(values.dtype)
    out: Tensor = _attention(q.is_cuda)(
        q, keys, values, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != keys.shape[1]
    )
    return out


@cache
def _attention(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention
