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

from dspark.draft.attention import block_layout, rms_norm
from dspark.draft.attention_context import AttentionContext
from dspark.draft.config import DraftConfig
from dspark.draft.packed import PackedLayer, PackedWeights, pack, weight_stamp

GROUP_SLOTS = 64
"""Block slots that share one attention call in training (measured on CPU; see `block_layout`)."""


class AttentionBackbone:
    """See `dspark.draft.backbone.Backbone`."""

    def __init__(self, config: DraftConfig, layers: nn.ModuleList) -> None:
        self.config, self.layers = config, layers
        self._packed: tuple[tuple[tuple[int, int], ...], PackedWeights] | None = None

    def new_context(self, batch: int, max_length: int) -> AttentionContext:
        """An empty context that drafts with the weights of this moment."""
        weight = next(iter(self.layers.parameters()))
        return AttentionContext(
            self.config, batch, max_length, weight.device, weight.dtype, self._pack()
        )

    def extend(self, context: AttentionContext, features: Tensor, kept: list[int]) -> None:
        """Appends the keys and values of committed positions."""
        rows = features.shape[1]
        length = context.common_length
        uniform = length is not None and all(count == kept[0] for count in kept)
        if uniform:
            features = features[:, : kept[0]]
        packed, config = context.weights, self.config
        heads = (2, config.num_layers, config.num_key_value_heads, config.head_dim)
        projected = F.linear(features, packed.context).unflatten(-1, heads)
        keys, values = projected.permute(2, 3, 0, 1, 4, 5)  # each [L, B, n, J, K]
        if uniform:
            assert length is not None
            span = slice(length, length + kept[0])
            keys = context.rotary.at(span).turn(self._norm_keys(keys, packed))
            context.keys[:, :, :, span] = keys.transpose(2, 3)
            context.values[:, :, :, span] = values.transpose(2, 3)
        else:
            # Rows beyond a count land behind the length, where they are masked.
            positions = context.positions(rows)
            keys = context.rotary.at(positions).turn(self._norm_keys(keys, packed))
            context.scatter(context.keys, keys.transpose(2, 3), positions)
            context.scatter(context.values, values.transpose(2, 3), positions)

    def block(self, hidden: Tensor, context: AttentionContext) -> Tensor:
        """One block per row against the cached keys."""
        batch, slots, width = hidden.shape
        length, mask = context.common_length, None
        if length is not None:
            positions = None
            rotary = context.rotary.at(slice(length, length + slots))
            end = length + slots
        else:
            positions = context.positions(slots)
            rotary = context.rotary.at(positions)
            end = max(context.row_lengths) + slots
            columns = torch.arange(end, device=hidden.device)
            mask = (columns < context.lengths[:, None] + slots)[:, None, None]
        hidden = hidden.reshape(batch * slots, width)
        for index, layer in enumerate(context.weights.layers):
            keys, values = context.keys[index], context.values[index]
            qk, v = self._block_heads(hidden, layer, (batch, slots))
            qk = rotary.turn(qk)
            heads = self.config.num_attention_heads
            k, v = qk[:, :, heads:].transpose(1, 2), v.transpose(1, 2)
            if positions is None:
                keys[:, :, length:end] = k
                values[:, :, length:end] = v
            else:
                context.scatter(keys, k, positions)
                context.scatter(values, v, positions)
            mixed = self._attend(qk[:, :, :heads], keys[:, :, :end], values[:, :, :end], mask)
            hidden = torch.addmm(hidden, mixed, layer.output)
            hidden = self._mlp(hidden, layer)
        return hidden.view(batch, slots, width)

    def train(self, hidden: Tensor, features: Tensor, valid: Tensor, anchors: Tensor) -> Tensor:
        """All blocks of a batch in one differentiable pass."""
        batch, count, slots, width = hidden.shape
        layout = block_layout(
            self.config,
            valid,
            anchors,
            anchors_per_group=max(1, GROUP_SLOTS // slots),
            dtype=hidden.dtype,
        )
        hidden = hidden.reshape(batch, count * slots, width)
        for layer in self.layers:
            hidden = layer(hidden, features, layout)
        return hidden.view(batch, count, slots, width)

    def _pack(self) -> PackedWeights:
        stamp = weight_stamp(self.layers.parameters())
        if self._packed is None or self._packed[0] != stamp:
            self._packed = (stamp, pack(self.layers))  # type: ignore[arg-type]
        return self._packed[1]

    def _norm_keys(self, keys: Tensor, packed: PackedWeights) -> Tensor:
        """Key norm of all layers at once: [L, B, n, J, K]."""
        return _norm_heads(keys, packed.context_norm[:, None, None], self.config.rms_norm_eps)

    def _block_heads(
        self, hidden: Tensor, layer: PackedLayer, shape: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Normed queries and keys side by side [B, G, H+J, K], and values [B, G, J, K]."""
        config = self.config
        normed = rms_norm(hidden, layer.attention_norm, config.rms_norm_eps)
        qkv = F.linear(normed, layer.qkv).view(*shape, -1, config.head_dim)
        turned = config.num_attention_heads + config.num_key_value_heads
        qk = _norm_heads(qkv[:, :, :turned], layer.qk_norm, config.rms_norm_eps)
        return qk, qkv[:, :, turned:]

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """q [B, G, H, K] over keys and values [B, J, C, K] -> [B*G, H*K].

        All slots of a block see the same positions, so the query heads that share a key head are
        stacked as more rows of it: keys are never repeated.
        """
        batch, slots, heads, dim = q.shape
        key_heads = keys.shape[1]
        split = (batch, slots, key_heads, heads // key_heads, dim)
        q = q.reshape(split).permute(0, 2, 3, 1, 4).reshape(batch, key_heads, -1, dim)
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        mixed = mixed.view(batch, key_heads, heads // key_heads, slots, dim)
        return mixed.permute(0, 3, 1, 2, 4).reshape(batch * slots, heads * dim)

    def _mlp(self, hidden: Tensor, layer: PackedLayer) -> Tensor:
        normed = rms_norm(hidden, layer.mlp_norm, self.config.rms_norm_eps)
        gate, up = F.linear(normed, layer.gate_up).chunk(2, -1)
        return torch.addmm(hidden, F.silu(gate) * up, layer.down)


def _norm_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` per head with a weight that differs between heads or layers."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), x.shape[-1:], None, eps).to(x.dtype) * weight
