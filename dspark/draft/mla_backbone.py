"""The mla backbone at work: drafting in the latent space, training with all blocks at once.

A draft pass takes its queries into the latent space and attends to the cached rows [c | turn(k_p)]
as one key head that all query heads share, whose values are c itself:

    s = [q_n W_k | turn(q_p)] [c | turn(k_p)]^T * scale,     o = (softmax(s) c) W_v

The layers and their training pass are in `mla.py`, weights and buffers in `mla_context.py`.

Letters: B batch, G slots, D hidden, H heads, C cached rows, L layers; widths as in `mla.py`.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark import ops
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
        starts: dict[int, Tensor] = {}
        hidden = hidden.reshape(batch * slots, width)
        for index, layer in enumerate(context.weights.layers):
            ring, causal = context.rings[index], self.config.causal(index)
            if (ring.size, causal) not in places:
                places[ring.size, causal] = ring.place(context, causal)
                starts[ring.size] = ring.starts(context)
            q, row, gate = self._project(hidden, layer, rotation, (batch, slots))
            latents = places[ring.size, causal].write(context.latents[index], row)
            mixed = ops.mla_output(
                q, latents[:, 0], starts[ring.size], self.shape.kv_lora_rank, layer.value_up, gate,
                None if causal else self._every_slot(slots, hidden.device),
            )  # fmt: skip
            hidden = ops.linear_rows(mixed.flatten(0, 1), layer.output, residual=hidden)
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
        """Queries in the latent space [B, G, H, R+p], scaled; the block's rows [B, 1, G, R+p].

        And the gate [B, G, H*v], where there is one.
        """
        eps, sizes, heads = self.config.rms_norm_eps, self.shape, self.config.num_attention_heads
        low = ops.linear_rows(hidden, layer.down, norm=layer.norm, eps=eps)
        q, c, k_p, gate = low.tensor_split(
            (
                sizes.q_lora_rank,
                sizes.q_lora_rank + sizes.kv_lora_rank,
                sizes.q_lora_rank + sizes.kv_lora_rank + sizes.qk_rope_head_dim,
            ),
            -1,
        )
        q = ops.linear_rows(q.contiguous(), layer.q_up, norm=layer.q_norm, eps=eps)
        q = q.view(*shape, heads, -1)
        q_n, q_p = q.split((sizes.qk_nope_head_dim, sizes.qk_rope_head_dim), -1)
        # The shared key part is turned along with the queries', as one head more.
        parts = torch.cat((q_p, k_p.view(*shape, 1, -1)), 2)
        parts = turned(parts, rotation).transpose(1, 2)  # [B, H+1, G, p]
        q_latent = torch.matmul(q_n.transpose(1, 2), layer.key_up)
        queries = torch.cat((q_latent, parts[:, :-1]), -1).transpose(1, 2) * self.scale
        latent = rms_norm(c, layer.kv_norm, eps).view(shape[0], 1, shape[1], -1)
        row = torch.cat((latent, parts[:, -1:]), -1)
        return queries, row, gate.view(*shape, -1) if sizes.output_gate else None

    @staticmethod
    @cache
    def _every_slot(slots: int, device: torch.device) -> Tensor:
        """[1, G, G] bool: a slot sees the whole block."""
        return torch.ones(1, slots, slots, dtype=torch.bool, device=device)
