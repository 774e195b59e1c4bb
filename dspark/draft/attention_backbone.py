"""The attention backbone at work: drafting against cached keys, training with all blocks at once.

All layers take their context keys and values from one feature, so `extend` computes those of all
layers in one matrix product; drafting uses the packed weights of `packed.py`. The layers themselves
and the training pass of one layer are in `attention.py`. (Layout of DeepSpec.)

Letters: B batch, A anchors, G slots, D hidden, H/J query/key heads, K head dim, L layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark import ops
from dspark.draft.attention_context import AttentionContext
from dspark.draft.config import DraftConfig
from dspark.draft.packed import PackedLayer, PackedWeights, Packing, pack
from dspark.draft.ring import BlockPlace
from dspark.draft.rotary import Rotation
from dspark.draft.sight import train_blocks
from dspark.k3.storage import Storage


class AttentionBackbone:
    """See `dspark.draft.backbone.Backbone`."""

    def __init__(self, config: DraftConfig, layers: nn.ModuleList) -> None:
        self.config, self.layers = config, layers
        self.packing = Packing(layers, pack)

    def new_context(
        self, batch: int, max_length: int, storage: Storage | None = None
    ) -> AttentionContext:
        """An empty context that drafts with the weights of this moment."""
        weight = next(iter(self.layers.parameters()))
        place, weights = (weight.device, weight.dtype), self.packing.current()
        return AttentionContext(self.config, batch, max_length, *place, weights, storage)

    def extend(self, context: AttentionContext, features: Tensor, kept: list[int] | Tensor) -> None:
        """Appends the keys and values of committed positions."""
        length = context.uniform_length(kept)
        if length is not None and isinstance(kept, list):
            # Positions that no layer will see need no keys.
            late = max(0, kept[0] - context.reach)
            features, start = features[:, late : kept[0]], length + late
            rotation = context.rotary.span(start, start + features.shape[1])
        else:
            rotation = context.rotary.at(context.positions(features.shape[1]))
        packed, config = context.weights, self.config
        heads = (2, config.num_layers, config.num_key_value_heads, config.head_dim)
        projected = F.linear(features, packed.context).unflatten(-1, heads)
        keys, values = projected.permute(2, 3, 0, 1, 4, 5)  # each [L, B, n, J, K]
        keys = rotation.turn(self._norm_keys(keys, packed)).transpose(2, 3)
        values = values.transpose(2, 3)
        for each in context.buffers:
            own = [x if each.index is None else x[each.index] for x in (keys, values)]
            pairs = list(zip((each.keys, each.values), own, strict=True))
            if length is None:
                each.ring.append_ragged(pairs, context, kept)
                continue
            for buffer, rows in pairs:
                each.ring.append(buffer, rows, start)

    def block(self, hidden: Tensor, context: AttentionContext) -> Tensor:
        """One block per row against the cached keys."""
        batch, slots, width = hidden.shape
        length = context.common_length
        if length is not None:
            rotation = context.rotary.span(length, length + slots)
        else:
            rotation = context.rotary.at(context.positions(slots))
        places: dict[tuple[int, bool], BlockPlace] = {}
        hidden = hidden.reshape(batch * slots, width)
        for index, layer in enumerate(context.weights.layers):
            ring, keys, values = context.of_layer[index]
            kind = (ring.size, self.config.causal(index))
            if kind not in places:
                places[kind] = ring.place(context, kind[1])
            place = places[kind]
            q, k, v = self._block_heads(hidden, layer, rotation, (batch, slots))
            seen = place.write(keys, k), place.write(values, v)
            mixed = self._attend(q, *seen, place.mask)
            hidden = ops.linear_rows(mixed, layer.output, residual=hidden)
            hidden = layer.mlp.add(hidden)
        return hidden.view(batch, slots, width)

    def train(
        self,
        hidden: Tensor,
        features: Tensor,
        valid: Tensor,
        anchors: Tensor,
        alike: bool = False,
    ) -> Tensor:
        """All blocks of a batch in one differentiable pass."""
        return train_blocks(self.config, self.layers, hidden, features, valid, anchors, alike)

    def _norm_keys(self, keys: Tensor, packed: PackedWeights) -> Tensor:
        """Key norm of all layers at once: [L, B, n, J, K]."""
        return _norm_heads(keys, packed.context_norm[:, None, None], self.config.rms_norm_eps)

    def _block_heads(
        self, hidden: Tensor, layer: PackedLayer, rotation: Rotation, shape: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Turned queries [B, G, H, K]; turned keys and values [B, J, G, K]."""
        config = self.config
        heads = config.num_attention_heads
        qkv = ops.linear_rows(hidden, layer.qkv, norm=layer.norm, eps=config.rms_norm_eps)
        qkv = qkv.view(*shape, -1, config.head_dim)
        turned = heads + config.num_key_value_heads
        qk = rotation.turn(_norm_heads(qkv[:, :, :turned], layer.qk_norm, config.rms_norm_eps))
        return (
            qk[:, :, :heads],
            qk[:, :, heads:].transpose(1, 2),
            qkv[:, :, turned:].transpose(1, 2),
        )

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """q [B, G, H, K] over keys and values [B, J, C, K] -> [B*G, H*K].

        The query heads that share a key head are stacked as more rows of it, so keys are never
        repeated.
        """
        batch, slots, heads, dim = q.shape
        key_heads = keys.shape[1]
        shared = heads // key_heads
        q = q.reshape(batch, slots, key_heads, shared, dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(batch, key_heads, -1, dim)
        if mask is not None and mask.shape[2] > 1:
            mask = mask.repeat(1, 1, shared, 1)
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        mixed = mixed.view(batch, key_heads, shared, slots, dim)
        return mixed.permute(0, 3, 1, 2, 4).reshape(batch * slots, heads * dim)


def _norm_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` per head with a weight that differs between heads or layers."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), x.shape[-1:], None, eps).to(x.dtype) * weight
