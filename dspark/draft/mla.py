"""Multi-head latent attention for a drafter: the layer of the MLA-native K3 drafter.

    q  = W_qb norm(W_qa x) = [q_n | q_p] per head       x = norm(h) of the block
    [c | k_p] = W_kva y,  c = norm(c)                   y = x in the block, features in the context
    expanded:  [k_n | v]_h = W_kvb,h c,  s = (q_n k_n + turn(q_p) turn(k_p)) * scale,  o_h = p v
    absorbed:  s = ((q_n W_k,h) c + turn(q_p) turn(k_p)) * scale,  o_h = W_v,h (p c)

Training expands keys and values of every position once; drafting (`mla_backbone.py`) keeps c and
turned k_p, kv_lora_rank + qk_rope_head_dim numbers a token and layer, and never expands them.
Optional: no rotation (NoPE) and a gate o * sigmoid(W_g x) before W_o, as in K3's own attention.

The norms of both latents use `rms_norm_eps`, as vLLM serves this layout and NeMo trains it. (K3's
target leaves 1e-6 there, a class default; latents of unit size do not show the difference.)

Letters: B batch, S context, A anchors, G slots, D hidden, H heads, R latent rank, n unrotated and
p rotated channels, v value channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.draft.attention import RMSNorm
from dspark.draft.config import DraftConfig
from dspark.draft.rotary import Rotation, softmax_scale
from dspark.draft.shapes import MLAShape
from dspark.draft.sight import BlockLayout, Sight


def mla_shape(config: DraftConfig) -> MLAShape:
    """The sizes that a configuration of this backbone always has."""
    assert config.mla is not None
    return config.mla


class DraftMLA(nn.Module):
    """Parameters of one layer's attention and its training pass."""

    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__()
        shape, heads = mla_shape(config), config.num_attention_heads
        self.shape, self.heads = shape, heads
        self.sight, self.scale = Sight.of(config, layer), softmax_scale(config)
        width, eps = config.hidden_size, config.rms_norm_eps
        key = shape.qk_nope_head_dim + shape.qk_rope_head_dim
        self.q_a_proj = nn.Linear(width, shape.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(shape.q_lora_rank, eps)
        self.q_b_proj = nn.Linear(shape.q_lora_rank, heads * key, bias=False)
        latent = shape.kv_lora_rank + shape.qk_rope_head_dim
        self.kv_a_proj_with_mqa = nn.Linear(width, latent, bias=False)
        self.kv_a_layernorm = RMSNorm(shape.kv_lora_rank, eps)
        expanded = shape.qk_nope_head_dim + shape.v_head_dim
        self.kv_b_proj = nn.Linear(shape.kv_lora_rank, heads * expanded, bias=False)
        if shape.output_gate:
            self.g_proj = nn.Linear(width, heads * shape.v_head_dim, bias=False)
        self.o_proj = nn.Linear(heads * shape.v_head_dim, width, bias=False)

    def forward(self, hidden: Tensor, context: Tensor, layout: BlockLayout) -> Tensor:
        """Attention of all blocks: hidden [B, A*G, D], context [B, S, D] -> [B, A*G, D]."""
        shape = self.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden))).unflatten(-1, (self.heads, -1))
        q_n, q_p = q.split((shape.qk_nope_head_dim, shape.qk_rope_head_dim), -1)
        q = torch.cat((q_n, turned(q_p, layout.block)), -1).transpose(1, 2)
        keys = self._expand(context, layout.context), self._expand(hidden, layout.block)
        mixed = layout.attend(self.sight, q, *keys, self.scale)
        if shape.output_gate:
            mixed = mixed * self.g_proj(hidden).sigmoid()
        return self.o_proj(mixed)

    def _expand(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        """Keys [B, H, rows, n+p] and values [B, H, rows, v] of x [B, rows, D]."""
        shape = self.shape
        c, k_p = self.kv_a_proj_with_mqa(x).split((shape.kv_lora_rank, shape.qk_rope_head_dim), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(c)).unflatten(-1, (self.heads, -1))
        k_n, v = kv.split((shape.qk_nope_head_dim, shape.v_head_dim), -1)
        k_p = turned(k_p.unsqueeze(-2), rotation).expand(-1, -1, self.heads, -1)
        return torch.cat((k_n, k_p.to(k_n.dtype)), -1).transpose(1, 2), v.transpose(1, 2)


def turned(x: Tensor, rotation: Rotation | None) -> Tensor:
    """x [..., heads, p], rotated where positions are rotary."""
    return x if rotation is None else rotation.turn(x)
