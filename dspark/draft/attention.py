"""One backbone layer: grouped-query attention over context features and block, then SwiGLU.

The block attends to the context (features of the positions before its anchor) and to itself, in
both directions. Keys and values of both come from the same projections; the layer's input norm
applies to the block only, since context features arrive normed (DeepSpec's convention):

    q, k_b, v_b = W(norm(h))      k_c, v_c = W(c)      c = hidden_norm(fc(taps))
    h <- h + W_o softmax(q [k_c; k_b]^T K^-1/2) [v_c; v_b],   h <- h + down(silu(gate) * up)

This file holds the parameters and the training pass, in which all blocks of a row run side by
side. Drafting uses the same weights through `packed.py`.

Letters: B batch, S context, A anchors, G slots, D hidden, H query heads, J key heads, K head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.draft.config import DraftConfig


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


@dataclass(frozen=True)
class Rotary:
    """Rotary tables [P, K] for positions 0..P-1 (rope type `default`, halves rotated).

    `sin` carries the sign of the rotated half, so that a turn is x*cos + roll(x, K/2)*sin.
    Computed in fp32 for as many positions as are asked for: no maximum is built in.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def build(
        cls, positions: int, head_dim: int, theta: float, device: torch.device, dtype: torch.dtype
    ) -> Rotary:
        exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
        angle = torch.outer(
            torch.arange(positions, device=device, dtype=torch.float32), 1.0 / theta**exponent
        )
        cos, sin = angle.cos(), angle.sin()
        return cls(torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))

    def at(self, positions: Tensor | slice) -> Rotary:
        """Rows of the tables: positions [...] -> tables [..., 1, K] that broadcast over heads."""
        return Rotary(self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2))

    def turn(self, x: Tensor) -> Tensor:
        """Rotates x [..., K] by tables of broadcastable shape."""
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.sin)


@dataclass(frozen=True)
class BlockLayout:
    """Geometry of a training pass, computed once and used by every layer.

    context: rotary tables of the context positions, [S, 1, K]
    block: rotary tables of the block positions p+k, [B, A*G, 1, K]
    groups: runs of anchors that attend together, each with its bool mask [B, 1, a*G, S + a*G]
    slots: G
    """

    context: Rotary
    block: Rotary
    groups: tuple[tuple[int, int, Tensor], ...]
    slots: int


def block_layout(
    config: DraftConfig,
    valid: Tensor,
    anchors: Tensor,
    *,
    anchors_per_group: int,
    dtype: torch.dtype,
) -> BlockLayout:
    """Positions and masks of all blocks of a batch.

    A block sees the valid context before its own anchor, whatever other anchors lie near, and all
    of itself. So no row of the mask is empty: the first slot of a block at position 0, or of a
    block in a row of padding, still sees its block. Anchors are grouped because each group's mask
    also spans the group's own blocks, which grows with the square of the group.

    Args:
        config: Gives G, head size and rotary base.
        valid: [B, S] bool, real context positions.
        anchors: [B, A] int64 anchor positions p.
        anchors_per_group: Anchors that share one attention call.
        dtype: Dtype of the rotary tables.
    """
    batch, length = valid.shape
    slots, device = config.block_size, valid.device
    table = Rotary.build(length + slots, config.head_dim, config.rope_theta, device, dtype)
    positions = (anchors[..., None] + torch.arange(slots, device=device)).reshape(batch, -1)
    before = torch.arange(length, device=device) < anchors[..., None]
    visible = (before & valid[:, None, :]).repeat_interleave(slots, dim=1)
    groups = []
    for start in range(0, anchors.shape[1], anchors_per_group):
        stop = min(start + anchors_per_group, anchors.shape[1])
        owner = torch.arange(stop - start, device=device).repeat_interleave(slots)
        same = (owner[:, None] == owner).expand(batch, -1, -1)
        mask = torch.cat((visible[:, start * slots : stop * slots], same), -1)
        groups.append((start, stop, mask[:, None]))
    return BlockLayout(table.at(slice(length)), table.at(positions), tuple(groups), slots)


class DraftAttention(nn.Module):
    """Parameters of one attention layer and its training pass."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        width, key_width = self.heads * self.head_dim, self.key_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, hidden: Tensor, context: Tensor, layout: BlockLayout) -> Tensor:
        """Attention of all blocks: hidden [B, A*G, D], context [B, S, D] -> [B, A*G, D]."""
        q = self._heads(self.q_proj(hidden))
        q = layout.block.turn(self.q_norm(q)).transpose(1, 2)
        k_block, v_block = self._keys(hidden, layout.block)
        k_context, v_context = self._keys(context, layout.context)
        grouped = self.heads != self.key_heads
        outputs = []
        for start, stop, mask in layout.groups:
            rows = slice(start * layout.slots, stop * layout.slots)
            k = torch.cat((k_context, k_block[:, :, rows]), 2)
            v = torch.cat((v_context, v_block[:, :, rows]), 2)
            outputs.append(
                F.scaled_dot_product_attention(
                    q[:, :, rows], k, v, attn_mask=mask, enable_gqa=grouped
                )
            )
        return self.o_proj(torch.cat(outputs, 2).transpose(1, 2).flatten(2))

    def _keys(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Turned keys and values, each [B, J, rows, K]."""
        k = rotary.turn(self.k_norm(self._heads(self.k_proj(x))))
        return k.transpose(1, 2), self._heads(self.v_proj(x)).transpose(1, 2)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class DraftMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, context: Tensor, layout: BlockLayout) -> Tensor:
        """hidden [B, A*G, D], context [B, S, D] -> [B, A*G, D]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), context, layout)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
