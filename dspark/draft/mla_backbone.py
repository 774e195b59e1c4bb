"""The mla backbone at work: drafting in the latent space, training with all blocks at once.

A draft pass takes its queries into the latent space and attends to the cached rows [c | turn(k_p)]
as one key head that all query heads share, whose values are c itself:

    s = [q_n W_k | turn(q_p)] [c | turn(k_p)]^T * scale,     o = (softmax(s) c) W_v

The layers and their training pass are in `mla.py`, weights and buffers in `mla_context.py`.

Letters: B batch, G slots, D hidden, H heads, C cached rows, L layers; widths as in `mla.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.draft.attention import rms_norm
from dspark.draft.config import DraftConfig
from dspark.draft.mla import mla_shape, turned
from dspark.draft.mla_context import MLAContext, PackedMLALayer, pack_mla
from dspark.draft.packed import Packing
from dspark.draft.ring import BlockPlace
from dspark.draft.rotary import Rotation, softmax_scale
from dspark.draft.sight import train_blocks
from dspark.k3.storage import Storage


class MLABackbone:
    """See `dspark.draft.backbone.Backbone`."""

    def __init__(self, config: DraftConfig, layers: nn.ModuleList) -> None:
        self.config, self.layers = config, layers
        self.shape, self.scale = mla_shape(config), softmax_scale(config)
        self.packing = Packing(layers, pack_mla)

    def new_context(
        self, batch: int, max_length: int, storage: Storage | None = None
    ) -> MLAContext:
        """An empty context that drafts with the weights of this moment."""
        weight = next(iter(self.layers.parameters()))
        place, weights = (weight.device, weight.dtype), self.packing.current()
        return MLAContext(self.config, batch, max_length, *place, weights, storage)

    def extend(self, context: MLAContext, features: Tensor, kept: list[int] | Tensor) -> None:
        """Appends the latents of committed positions."""
        length, start = context.uniform_length(kept), 0
        if length is not None and isinstance(kept, list):
            # Positions that no layer will see need no latents.
            late = max(0, kept[0] - context.reach)
            features, start = features[:, late : kept[0]], length + late
        rotation = self._rotation(context, features.shape[1], start if length is not None else None)
        packed, config, shape = context.weights, self.config, self.shape
        rows = F.linear(features, packed.context).unflatten(-1, (config.num_layers, -1))
        c, k_p = rows.split((shape.kv_lora_rank, shape.qk_rope_head_dim), -1)  # [B, n, L, .]
        wide = torch.promote_types(c.dtype, torch.float32)
        c = F.rms_norm(c.to(wide), c.shape[-1:], None, config.rms_norm_eps).to(c.dtype)
        rows = torch.cat((c * packed.context_norm, turned(k_p, rotation)), -1)
        for ring, buffer, layer in zip(context.rings, context.latents, rows.unbind(2), strict=True):
            if length is None:
                ring.append_ragged([(buffer, layer[:, None])], context, kept)
            else:
                ring.append(buffer, layer[:, None], start)

    def block(self, hidden: Tensor, context: MLAContext) -> Tensor:
        """One block per row against the cached latents."""
        batch, slots, width = hidden.shape
        rotation = self._rotation(context, slots, context.common_length)
        places: dict[tuple[int, bool], BlockPlace] = {}
        hidden = hidden.reshape(batch * slots, width)
        for index, layer in enumerate(context.weights.layers):
            kind = (context.rings[index].size, self.config.causal(index))
            if kind not in places:
                places[kind] = context.rings[index].place(context, kind[1])
            q, row, gate = self._project(hidden, layer, rotation, (batch, slots))
            latents = places[kind].write(context.latents[index], row)
            mixed = self._attend(q, latents[:, 0], places[kind].mask, layer)
            if gate is not None:
                mixed = mixed * gate.sigmoid()
            hidden = layer.mlp.add(torch.addmm(hidden, mixed, layer.output))
        return hidden.view(batch, slots, width)

    def train(self, hidden: Tensor, features: Tensor, valid: Tensor, anchors: Tensor) -> Tensor:
        """All blocks of a batch in one differentiable pass."""
        return train_blocks(self.config, self.layers, hidden, features, valid, anchors)

    def _rotation(self, context: MLAContext, rows: int, start: int | None) -> Rotation | None:
        """Of `rows` positions from `start`, or from each batch row's own length."""
        if context.rotary is None:
            return None
        if start is None:
            return context.rotary.at(context.positions(rows))
        return context.rotary.span(start, start + rows)

    def _project(
        self,
        hidden: Tensor,
        layer: PackedMLALayer,
        rotation: Rotation | None,
        shape: tuple[int, int],
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries in the latent space [B, H*G, R+p], the block's rows [B, 1, G, R+p], and a gate.

        The gate, where there is one, is [B*G, H*v].
        """
        eps, sizes, heads = self.config.rms_norm_eps, self.shape, self.config.num_attention_heads
        low = F.linear(rms_norm(hidden, layer.norm, eps), layer.down)
        q, c, k_p, gate = low.tensor_split(
            (
                sizes.q_lora_rank,
                sizes.q_lora_rank + sizes.kv_lora_rank,
                sizes.q_lora_rank + sizes.kv_lora_rank + sizes.qk_rope_head_dim,
            ),
            -1,
        )
        q = F.linear(rms_norm(q, layer.q_norm, eps), layer.q_up).view(*shape, heads, -1)
        q_n, q_p = q.split((sizes.qk_nope_head_dim, sizes.qk_rope_head_dim), -1)
        # The shared key part is turned along with the queries', as one head more.
        parts = torch.cat((q_p, k_p.view(*shape, 1, -1)), 2)
        parts = turned(parts, rotation).transpose(1, 2)  # [B, H+1, G, p]
        q_latent = torch.matmul(q_n.transpose(1, 2), layer.key_up)
        queries = torch.cat((q_latent, parts[:, :-1]), -1).flatten(1, 2)
        latent = rms_norm(c, layer.kv_norm, eps).view(shape[0], 1, shape[1], -1)
        row = torch.cat((latent, parts[:, -1:]), -1)
        return queries, row, gate if sizes.output_gate else None

    def _attend(
        self, q: Tensor, latents: Tensor, mask: Tensor | None, layer: PackedMLALayer
    ) -> Tensor:
        """q [B, H*G, R+p] over latents [B, C, R+p] -> [B*G, H*v]; softmax in float32."""
        batch, heads = q.shape[0], self.config.num_attention_heads
        scores = torch.matmul(q * self.scale, latents.transpose(1, 2))
        if mask is not None:
            by_head = scores.unflatten(1, (heads, -1))
            scores = by_head.masked_fill(~mask, -torch.inf).flatten(1, 2)
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.softmax(-1, dtype=wide).to(q.dtype)
        mixed = torch.matmul(weights, latents[..., : self.shape.kv_lora_rank])
        mixed = torch.matmul(mixed.unflatten(1, (heads, -1)), layer.value_up)  # [B, H, G, v]
        return mixed.transpose(1, 2).reshape(batch * mixed.shape[2], -1)
