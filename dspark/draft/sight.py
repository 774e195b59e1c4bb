"""What the slots of a training pass see: masks of all blocks of a batch, and attention under them.

A block anchored at p sees the valid context positions s < p, of which a sliding layer keeps those
with s >= p - W, and its own slots: all of them, or in a causal layer those up to each slot itself.
The window is counted from the anchor, so all slots of a block see the same context. That is how
speculators trains; an engine that counts from the query's own position (Hugging Face, flash
attention: a query at q sees s > q - W) shows slot k the same context less its k+1 oldest positions.

Blocks never see each other, whatever anchors lie near. No row of a mask is empty: the first slot of
a block at position 0, or of a block in a row of padding, still sees itself.

Letters: B batch, S context, A anchors, G slots, H heads, W window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.draft import flex
from dspark.draft.config import DraftConfig
from dspark.draft.rotary import Rotary, Rotation

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

GROUP_SLOTS = 64
"""Block slots that share one attention call in training (measured on CPU; see `block_layout`)."""


@dataclass(frozen=True)
class Sight:
    """`window`: context positions seen before the anchor, None for all; `causal`: in the block."""

    window: int | None
    causal: bool

    @classmethod
    def of(cls, config: DraftConfig, layer: int) -> Sight:
        """What layer `layer` sees."""
        return cls(config.window(layer), config.causal(layer))


@dataclass(frozen=True)
class BlockLayout:
    """Geometry of a training pass, computed once and used by every layer.

    context: rotation of the context positions, [S, 1, K]; None without rotary positions
    block: rotation of the block positions p+k, [B, A*G, 1, K]
    groups: per sight, runs of anchors that attend together, each with its mask [B, 1, a*G, S + a*G]
    slots: G
    fused: per sight, the mask of one call for all anchors (`flex.py`) instead of groups
    """

    context: Rotation | None
    block: Rotation | None
    groups: dict[Sight, tuple[tuple[int, int, Tensor], ...]]
    slots: int
    fused: dict[Sight, BlockMask] | None = None

    def attend(
        self,
        sight: Sight,
        q: Tensor,
        context: tuple[Tensor, Tensor],
        block: tuple[Tensor, Tensor],
        scale: float,
    ) -> Tensor:
        """Attention of all blocks over context and themselves.

        Args:
            sight: Of the layer.
            q: [B, H, A*G, K] turned queries.
            context: Keys and values of the context, [B, J, S, .]; J divides H.
            block: Keys and values of the blocks, [B, J, A*G, .].
            scale: Of the products.

        Returns:
            [B, A*G, H*V], V the width of a value.
        """
        if self.fused is not None:
            whole = flex.flex_attend(self.fused[sight], q, context, block, scale)
            return whole.transpose(1, 2).flatten(2)
        grouped = q.shape[1] != block[0].shape[1]
        outputs = []
        for start, stop, mask in self.groups[sight]:
            rows = slice(start * self.slots, stop * self.slots)
            keys = torch.cat((context[0], block[0][:, :, rows]), 2)
            values = torch.cat((context[1], block[1][:, :, rows]), 2)
            outputs.append(
                F.scaled_dot_product_attention(
                    q[:, :, rows], keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped
                )
            )
        return torch.cat(outputs, 2).transpose(1, 2).flatten(2)


def block_layout(
    config: DraftConfig,
    valid: Tensor,
    anchors: Tensor,
    *,
    anchors_per_group: int,
    dtype: torch.dtype,
    fused: bool = False,
) -> BlockLayout:
    """Positions and masks of all blocks of a batch.

    Anchors are grouped because each group's mask also spans the group's own blocks, which grows
    with the square of the group.

    Args:
        config: Gives G, rotary positions and what each layer sees.
        valid: [B, S] bool, real context positions.
        anchors: [B, A] int64 anchor positions p.
        anchors_per_group: Anchors that share one attention call.
        dtype: Dtype of the rotary tables.
        fused: Masks for one flex-attention call instead of groups.
    """
    slots = config.block_size
    groups, masks = {}, None
    if fused:
        masks = _masks(config, valid, anchors)
    else:
        for sight in {Sight.of(config, layer) for layer in range(config.num_layers)}:
            groups[sight] = tuple(_groups(sight, valid, anchors, slots, anchors_per_group))
    return BlockLayout(*_rotations(config, valid, anchors, dtype), groups, slots, masks)


def _groups(
    sight: Sight, valid: Tensor, anchors: Tensor, slots: int, size: int
) -> list[tuple[int, int, Tensor]]:
    """Masks of at most `size` anchors each, as `BlockLayout.groups` holds them."""
    batch, length = valid.shape
    position = torch.arange(length, device=valid.device)
    seen = (position < anchors[..., None]) & valid[:, None, :]
    if sight.window is not None:
        seen &= position >= anchors[..., None] - sight.window
    seen = seen.repeat_interleave(slots, dim=1)
    groups = []
    for start in range(0, anchors.shape[1], size):
        stop = min(start + size, anchors.shape[1])
        owner = torch.arange(stop - start, device=valid.device).repeat_interleave(slots)
        same = owner[:, None] == owner
        if sight.causal:
            same = same.tril()
        mask = torch.cat(
            (seen[:, start * slots : stop * slots], same.expand(batch, -1, -1)), dim=-1
        )
        groups.append((start, stop, mask[:, None]))
    return groups


def train_blocks(
    config: DraftConfig,
    layers: nn.ModuleList,
    hidden: Tensor,
    features: Tensor,
    valid: Tensor,
    anchors: Tensor,
    alike: bool = False,
) -> Tensor:
    """`dspark.draft.backbone.Backbone.train` for layers that take a `BlockLayout`."""
    batch, count, slots, width = hidden.shape
    large = flex.pays(valid, anchors, slots, _channels(config))
    flat = hidden.reshape(batch, count * slots, width)
    if large and config.backbone == "attention":
        like = slots if alike else 0
        flat = _in_regions(config, layers, flat, features, valid, anchors, like)
        return flat.view(batch, count, slots, width)
    layout = block_layout(
        config,
        valid,
        anchors,
        anchors_per_group=max(1, GROUP_SLOTS // slots),
        dtype=hidden.dtype,
        fused=large,
    )
    for layer in layers:
        flat = layer(flat, features, layout)
    return flat.view(batch, count, slots, width)


def _in_regions(
    config: DraftConfig,
    layers: nn.ModuleList,
    hidden: Tensor,
    features: Tensor,
    valid: Tensor,
    anchors: Tensor,
    alike: int,
) -> Tensor:
    """The `attention` backbone at sizes where kernels of its own pay: hidden [B, A*G, D]."""
    from dspark.draft import passes, regions  # which import attention.py, and that this file

    context, block = _rotations(config, valid, anchors, hidden.dtype)
    assert context is not None
    assert block is not None
    if regions.kernel_serves(config, valid):
        attend = regions.by_kernel(valid, anchors, config.block_size)
        if passes.serves(config) and hidden.dtype == torch.float32:
            tables = regions.side_by_side(context, block)
            return passes.run_layers(config, layers, hidden, features, tables, attend, alike=alike)
    else:
        attend = regions.by_flex(_masks(config, valid, anchors))
    return regions.run_layers(config, layers, hidden, features, (context, block), attend)


def _rotations(
    config: DraftConfig, valid: Tensor, anchors: Tensor, dtype: torch.dtype
) -> tuple[Rotation | None, Rotation | None]:
    """Of the context positions and of all block positions, as `BlockLayout` has them."""
    rotary = Rotary.of(config, valid.device, dtype)
    if rotary is None:
        return None, None
    slots = torch.arange(config.block_size, device=valid.device)
    positions = (anchors[..., None] + slots).flatten(1)
    return rotary.span(0, valid.shape[1]), rotary.at(positions)


def _masks(config: DraftConfig, valid: Tensor, anchors: Tensor) -> dict[Sight, BlockMask]:
    """A flex mask for every kind of layer."""
    sights = {Sight.of(config, layer) for layer in range(config.num_layers)}
    return {sight: flex.block_mask(sight, valid, anchors, config.block_size) for sight in sights}


def _channels(config: DraftConfig) -> int:
    """The fewest channels that a head has of keys or of values."""
    if config.mla is None:
        return config.head_dim
    return min(config.mla.qk_nope_head_dim + config.mla.qk_rope_head_dim, config.mla.v_head_dim)
