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
import torch.nn.functional as F
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


TILE = 128
"""Queries and keys of a tile of the mask."""


def block_mask(sight: Sight, valid: Tensor, anchors: Tensor, slots: int) -> BlockMask:
    """The predicate with the tiles that hold anything, computed once a pass.

    A tile is left out, or computed without the predicate, by the smallest and largest anchor among
    its queries: asking the predicate about every element takes longer than the attention does.
    """
    from torch.nn.attention.flex_attention import BlockMask

    queries, keys = anchors.shape[1] * slots, valid.shape[1] + anchors.shape[1] * slots
    some, every = tiles(sight, valid, anchors, slots)
    partial = _ordered(some & ~every)
    whole = _ordered(every)
    return BlockMask.from_kv_blocks(
        *partial, *whole, BLOCK_SIZE=TILE, seq_lengths=(queries, keys),
        mask_mod=mask_predicate(sight, valid, anchors, slots),
    )  # fmt: skip


def tiles(sight: Sight, valid: Tensor, anchors: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Tiles [B, queries / TILE, keys / TILE] that may hold anything, and that hold everything."""
    length, count = valid.shape[1], anchors.shape[1] * slots
    device = valid.device

    def starts(total: int) -> Tensor:
        return torch.arange(0, total, TILE, device=device)

    first_q = starts(count)
    last_q = (first_q + TILE).clamp(max=count) - 1
    first_k = starts(length + count)
    last_k = (first_k + TILE).clamp(max=length + count) - 1
    of_rows = anchors.repeat_interleave(slots, 1)
    padding = -count % TILE
    lowest = F.pad(of_rows, (0, padding), value=length).unflatten(1, (-1, TILE)).amin(-1)
    highest = F.pad(of_rows, (0, padding), value=0).unflatten(1, (-1, TILE)).amax(-1)
    lowest, highest = lowest[..., None], highest[..., None]
    real = F.pad(valid, (0, -length % TILE)).unflatten(1, (-1, TILE))
    real = F.pad(real, (0, 0, 0, len(first_k) - real.shape[1]))
    any_real, all_real = real.any(-1)[:, None], real.all(-1)[:, None]
    some = (first_k < highest) & any_real
    every = (last_k < lowest) & all_real
    if sight.window is not None:
        some = some & (last_k >= lowest - sight.window)
        every = every & (first_k >= highest - sight.window)
    # Among the blocks: tiles whose blocks meet. None of them is whole.
    own = (last_k >= length) & ((last_k - length) // slots >= first_q[:, None] // slots)
    own = own & ((first_k - length).clamp(min=0) // slots <= last_q[:, None] // slots)
    return some | own, every


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles each row of tiles has, and which, those first: int32 with a head dimension."""
    count = chosen.sum(-1, dtype=torch.int32)
    order = chosen.int().argsort(dim=-1, descending=True, stable=True).int()
    return count[:, None], order[:, None]


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
