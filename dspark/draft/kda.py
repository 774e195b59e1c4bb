"""One layer of the linearised KDA backbone: a frozen state of the context, a block without a solve.

Context features c and block inputs x = norm(h) + e (e a learned vector per slot: mask tokens are
alike and KDA knows no positions) go through the same projections, in K3's form and names:

    q, k, v = silu(conv(x W_q)), ..;   q = q / |q| K^-1/2;   k = k / |k|;   beta = sigmoid(x W_b)
    g = bound sigmoid(exp(A) (x W_fa W_fb + dt))          log-decay per channel, bound < g < 0
    context:  S before the anchor, exactly, row by row
    block:    o = linear_kda(q, k, v, g, beta, S, order)        reads S, never changes it
    h <- h + (RMSNorm(o) sigmoid(x W_g)) W_o,   h <- h + down(silu(gate) * up)

The convolution of a block's first rows reaches back into the context. With `block_softmax` the
slots also attend to each other in both directions, with a learned temperature, on the same q, k
and v: o <- o + a softmax(q.k / |q||k| exp(s)) v per head, a starting at zero.

This file holds the parameters and the training pass, in which the blocks of all anchors run side by
side. Drafting uses the same weights and the same functions through `kda_backbone.py`.

Letters: B batch, S context, A anchors, G slots, D hidden, H heads, K head dim (keys and values), W
rows of the convolution, R gate rank, C = 3 H K channels of q, k and v.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark import ops
from dspark.draft.attention import DraftMLP, RMSNorm
from dspark.draft.config import DraftConfig
from dspark.draft.shapes import KDAShape

L2_EPS = 1e-6


def kda_shape(config: DraftConfig) -> KDAShape:
    """The sizes that `DraftConfig` guarantees for this backbone."""
    assert config.kda is not None
    return config.kda


def wide(x: Tensor) -> Tensor:
    """x in float32, or float64 as it is: everything from the convolution to the norm runs there."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def convolve(windowed: Tensor, taps: Tensor, parts: int, heads: int) -> Tensor:
    """silu of the causal convolution of the rows behind a window, in float32.

    Args:
        windowed: [..., W-1+n, P heads K], the rows before and the rows themselves.
        taps: [W, P heads K], the weight of the row itself last.
        parts, heads: P of q, k and v, and the heads in each.

    Returns:
        [..., n, P, heads, K]
    """
    rows = windowed.shape[-2] - taps.shape[0] + 1
    windowed = wide(windowed)
    out = windowed[..., :rows, :] * taps[0]
    for i in range(1, taps.shape[0]):
        out = torch.addcmul(out, windowed[..., i : i + rows, :], taps[i])
    return F.silu(out).unflatten(-1, (parts, heads, -1))


def block_heads(windowed: Tensor, taps: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [..., n, heads, K] of block rows, q and k unit vectors, q times K^-1/2."""
    rows = convolve(windowed, taps, 3, heads)
    q, k = _unit(rows[..., :2, :, :]).unbind(-3)
    return q * q.shape[-1] ** -0.5, k, rows[..., 2, :, :]


def context_heads(windowed: Tensor, taps: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """k and v [..., n, heads, K] of context rows, which nobody asks.

    Args:
        windowed: [..., W-1+n, 2 heads K], k and v.
        taps: [W, 3 heads K], of q, k and v.
        heads: Heads in a third of them.
    """
    k, v = convolve(windowed, taps[:, taps.shape[1] // 3 :], 2, heads).unbind(-3)
    return _unit(k), v


def log_decay(f: Tensor, dt_bias: Tensor, rate: Tensor, bound: float) -> Tensor:
    """g [..., heads, K] from f of that shape, dt_bias [heads, K] and rate = exp(A) [heads, 1]."""
    return bound * torch.sigmoid(rate * (wide(f) + dt_bias))


def slot_softmax(q: Tensor, k: Tensor, v: Tensor, sharpness: Tensor) -> Tensor:
    """Attention of all slots to all slots: [N, G, H, K] each, sharpness [H], -> [N, G, H, K]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scale = q.shape[-1] ** 0.5 * sharpness.exp()[:, None, None]  # q carries K^-1/2 already
    scores = torch.matmul(q * scale, k.transpose(-1, -2))
    return torch.matmul(scores.softmax(-1), v).transpose(1, 2)


def gated_norm(o: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """RMSNorm(o) sigmoid(gate) over the last dimension, in the dtype of o."""
    return F.rms_norm(o, weight.shape, weight.to(o.dtype), eps) * gate.to(o.dtype).sigmoid()


def _unit(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + eps): eps inside the root, as the target's kernels have it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


class ShortConv(nn.Module):
    """Owner of one depthwise causal convolution's weight [channels, 1, W], no bias."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, width))


class DraftKDA(nn.Module):
    """Parameters of one KDA layer and its training pass."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        shape = kda_shape(config)
        self.config, self.shape = config, shape
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        D, width = config.hidden_size, config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(D, width, bias=False)
        self.k_proj = nn.Linear(D, width, bias=False)
        self.v_proj = nn.Linear(D, width, bias=False)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            ShortConv(width, shape.conv_size) for _ in range(3)
        )
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.dt_bias = nn.Parameter(torch.zeros(width))
        self.f_a_proj = nn.Linear(D, shape.gate_rank, bias=False)
        self.f_b_proj = nn.Linear(shape.gate_rank, width, bias=False)
        self.b_proj = nn.Linear(D, self.heads, bias=False)
        self.g_proj = nn.Linear(D, width, bias=False)
        self.o_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(width, D, bias=False)
        self.slot_embedding = nn.Parameter(torch.zeros(config.block_size, D))
        if shape.block_softmax:
            self.softmax_sharpness = nn.Parameter(torch.ones(self.heads))
            self.softmax_gain = nn.Parameter(torch.zeros(self.heads))

    def forward(self, hidden: Tensor, context: Tensor, anchors: Tensor) -> Tensor:
        """All blocks: hidden [B, A, G, D], context [B, S, D], anchors [B, A] -> [B, A, G, D]."""
        state, window = self._entries(context, anchors)
        x = (hidden + self.slot_embedding).flatten(0, 1)
        q, k, v, g, beta = self._block_rows(x, window)
        bound = self.shape.gate_lower_bound
        out = ops.linear_kda_block(q, k, v, g, beta, state, self.shape.order, None, bound)
        if self.shape.block_softmax:
            seen = slot_softmax(q, k, v, self.softmax_sharpness)
            out = out + self.softmax_gain[:, None] * seen
        gate = self.g_proj(x).unflatten(-1, (self.heads, -1))
        out = gated_norm(out, self.o_norm.weight, gate, self.o_norm.eps)
        return self.o_proj(out.to(x.dtype).flatten(-2)).view_as(hidden)

    def coupling_norms(self, hidden: Tensor, context: Tensor, anchors: Tensor) -> Tensor:
        """|A| of every block and head, [B, A, H]; arguments as for `forward`."""
        _, window = self._entries(context, anchors)
        x = (hidden + self.slot_embedding).flatten(0, 1)
        _, k, _, g, beta = self._block_rows(x, window)
        return ops.linear_kda_norm(k, g, beta).view(*anchors.shape, -1)

    def conv_taps(self) -> Tensor:
        """The three convolutions by row, [W, C]."""
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        return torch.cat([wide(conv.weight[:, 0]) for conv in convs]).t()

    def _entries(self, context: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """What each block starts from: state [B*A, H, K, K] and window [B*A, W-1, C]."""
        before = self.shape.conv_size - 1
        padded = F.pad(context, (0, 0, before, 0))  # no bias anywhere: zeros stay zeros
        rows = torch.cat((self.k_proj(padded), self.v_proj(padded)), -1)
        k, v = context_heads(rows, self.conv_taps(), self.heads)
        g, beta = self._decay(context)
        zero = k.new_zeros(len(context), self.heads, self.head_dim, self.head_dim)
        bound = self.shape.gate_lower_bound
        states = ops.kda_states_at(k, v, g, beta, zero, anchors, bound)
        # queries of the context are needed where a block's convolution reaches back, and only there
        batch = torch.arange(len(context), device=context.device)[:, None, None]
        reached = anchors[..., None] + torch.arange(before, device=context.device)
        window = torch.cat((self.q_proj(padded[batch, reached]), rows[batch, reached]), -1)
        return states.flatten(0, 1), window.flatten(0, 1)

    def _block_rows(self, x: Tensor, window: Tensor) -> tuple[Tensor, ...]:
        """q, k, v [N, G, H, K], g and beta of blocks x [N, G, D] behind their windows."""
        rows = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), -1)
        rows = torch.cat((window, rows), 1)
        return (*block_heads(rows, self.conv_taps(), self.heads), *self._decay(x))

    def _decay(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """g [..., H, K] and beta [..., H]."""
        f = self.f_b_proj(self.f_a_proj(x)).unflatten(-1, (self.heads, -1))
        dt_bias = wide(self.dt_bias).view(self.heads, -1)
        rate = wide(self.A_log).exp()[:, None]
        g = log_decay(f, dt_bias, rate, self.shape.gate_lower_bound)
        return g, wide(self.b_proj(x)).sigmoid()


class KDALayer(nn.Module):
    """Pre-norm KDA and MLP with residuals."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = DraftKDA(config)
        self.mlp = DraftMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, context: Tensor, anchors: Tensor) -> Tensor:
        """hidden [B, A, G, D], context [B, S, D], anchors [B, A] -> [B, A, G, D]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), context, anchors)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
