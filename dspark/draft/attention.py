"""One backbone layer: grouped-query attention over context features and block, then a gated MLP.

The block attends to the context (features of the positions before its anchor) and to itself; how
much of both a layer sees is in `sight.py`. Keys and values of both come from the same projections;
the layer's input norm applies to the block only, since context features arrive normed (DeepSpec's
convention):

    q, k_b, v_b = W(norm(h))      k_c, v_c = W(c)      c = hidden_norm(fc(taps))
    h <- h + W_o softmax(q [k_c; k_b]^T K^-1/2) [v_c; v_b],   h <- h + down(silu(gate) * up)

This file holds the parameters and the training pass, in which all blocks of a row run side by
side. Drafting uses the same weights through `packed.py`. Norm, MLP and layer serve `mla` too.

Letters: B batch, S context, A anchors, G slots, D hidden, H query heads, J key heads, K head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.draft.config import DraftConfig
from dspark.draft.rotary import Rotation, softmax_scale
from dspark.draft.sight import BlockLayout, Sight
from dspark.k3.layers import situ

SITU_BETA, SITU_LINEAR_BETA = 4.0, 25.0
"""K3's `activation_situ_beta` and `activation_situ_linear_beta`."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, statistics in fp32, as Qwen3 does it.

    Below fp32 the normalised value is rounded to x's dtype before the weight is applied, which is
    what checkpoints in this layout were trained with. An fp32 weight is applied in fp32 even then:
    near 1 a bf16 weight would swallow most of what training changes.
    """
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
    return weight * F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with its weight [width]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class DraftAttention(nn.Module):
    """Parameters of one attention layer and its training pass."""

    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.sight, self.scale = Sight.of(config, layer), softmax_scale(config)
        width, key_width = self.heads * self.head_dim, self.key_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, hidden: Tensor, context: Tensor, layout: BlockLayout) -> Tensor:
        """Attention of all blocks: hidden [B, A*G, D], context [B, S, D] -> [B, A*G, D]."""
        assert layout.context is not None
        assert layout.block is not None
        q = self._heads(self.q_proj(hidden))
        q = layout.block.turn(self.q_norm(q)).transpose(1, 2)
        keys = self._keys(context, layout.context), self._keys(hidden, layout.block)
        return self.o_proj(layout.attend(self.sight, q, *keys, self.scale))

    def _keys(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Turned keys and values, each [B, J, rows, K]."""
        k = rotation.turn(self.k_norm(self._heads(self.k_proj(x))))
        return k.transpose(1, 2), self._heads(self.v_proj(x)).transpose(1, 2)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


def gated(act: str, gate: Tensor, up: Tensor) -> Tensor:
    """act(gate) * up; SiTU, which also bounds `up`, with K3's own constants."""
    if act == "silu":
        return F.silu(gate) * up
    return situ(gate, up, SITU_BETA, SITU_LINEAR_BETA)


class DraftMLP(nn.Module):
    """Gated MLP: down(act(gate(x)) * up(x))."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.act = config.hidden_act
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.act, self.gate_proj(x), self.up_proj(x)))


class DraftLayer(nn.Module):
    """Pre-norm attention of any kind and MLP, with residuals.

    Args:
        config: Sizes.
        attention: Maps (normed hidden, context features, layout) to what is added to hidden.
    """

    def __init__(self, config: DraftConfig, attention: nn.Module) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = DraftMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, context: Tensor, layout: BlockLayout) -> Tensor:
        """hidden [B, A*G, D], context [B, S, D] -> [B, A*G, D]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), context, layout)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
