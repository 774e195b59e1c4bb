"""The KDA layer: projections, short convolution, gate, recurrence, gated norm, output.

    q, k, v = silu(conv4(x W_q)), ..;  q = q / |q| K^-1/2;  k = k / |k|;  |x| = sqrt(sum x^2 + 1e-6)
    g = lower_bound * sigmoid(exp(A) (x W_fa W_fb + dt))  in (lower_bound, 0)
        or, without a bound, -exp(A) softplus(x W_fa W_fb + dt)
    beta = sigmoid(x W_b);  o = recurrence;  y = (RMSNorm(o) * sigmoid(x W_g)) W_o

Gate, decay, recurrence and norm run in float32. The recurrence is ``dspark_kernels.kda``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark import ops
from dspark.k3.config import K3Config
from dspark.k3.layers import Packable, linear, rms_norm
from dspark.k3.state import Block, KDAInputs, KDAState

L2_EPS = 1e-6


class ShortConv(nn.Module):
    """Owner of one depthwise causal convolution's weight [C, 1, W], float32, no bias."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))


class GatedNorm(nn.Module):
    """RMSNorm over the head width with a float32 weight, then a sigmoid gate; both in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return rms_norm(x.float(), self.weight.float(), self.eps) * gate.float().sigmoid()


class KDA(Packable):
    """One Kimi Delta Attention layer."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        D, H, K = config.hidden_size, config.kda_num_heads, config.kda_head_dim
        self.config, self.heads, self.width = config, H, K
        self.q_proj, self.k_proj, self.v_proj = (linear(D, H * K) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            ShortConv(H * K, config.kda_conv_size) for _ in range(3)
        )
        self.A_log = nn.Parameter(torch.empty(H))
        self.dt_bias = nn.Parameter(torch.empty(H * K))
        self.f_a_proj, self.f_b_proj = linear(D, K), linear(K, H * K)
        self.b_proj = linear(D, H)
        if config.kda_full_rank_output_gate:
            self.g_proj = linear(D, H * K)
        else:
            self.g_a_proj, self.g_b_proj = linear(D, K), linear(K, H * K)
        self.o_norm = GatedNorm(K, config.rms_norm_eps)
        self.o_proj = linear(H * K, D)

    def _packable(self) -> list[nn.Linear]:
        gate = self.g_proj if self.config.kda_full_rank_output_gate else self.g_a_proj
        return [self.q_proj, self.k_proj, self.v_proj, gate, self.f_a_proj, self.b_proj]

    def pack_(self) -> None:
        super().pack_()
        self._packed_taps = self.conv_taps().detach()

    def forward(self, x: Tensor, state: KDAState | None, block: Block | None) -> Tensor:
        """x [B, T, D] -> [B, T, D]. Without a state: a whole sequence from nothing, for
        training."""
        B, T, _ = x.shape
        q, k, v, gate, f_a, b = self._project(x)
        if not self.config.kda_full_rank_output_gate:
            gate = self.g_b_proj(gate)
        rows = torch.cat((q, k, v), dim=-1)
        windowed = (
            state.with_window(rows) if state is not None else F.pad(rows, (0, 0, self._window, 0))
        )
        taps = block.taps if block is not None else None
        q, k, v = self._convolve(windowed, T, taps).view(B, T, 3, self.heads, self.width).unbind(2)
        q, k = _unit(q) * self.width**-0.5, _unit(k)
        new = KDAInputs(k, v, self._log_decay(f_a), b.float().sigmoid())
        if state is not None and block is not None:
            out = state.advance(q, new, windowed, block)
        else:
            zero = torch.zeros(
                B, self.heads, self.width, self.width, dtype=torch.float32, device=x.device
            )
            bound = self.config.kda_gate_lower_bound
            out, _ = ops.kda_chunk(q, new.k, new.v, new.g, new.beta, zero, bound)
        out = self.o_norm(out, gate.view(B, T, self.heads, self.width))
        return self.o_proj(out.to(x.dtype).flatten(2))

    @property
    def _window(self) -> int:
        return self.config.kda_conv_size - 1

    def _convolve(self, windowed: Tensor, rows: int, taps: Tensor | None) -> Tensor:
        """silu of y_t = sum_i w_i u_{t-3+i} over window and rows, [B, T, 3 H K] float32.

        ``taps`` [B or 1, T, W] are the places of u_{t-3}, .., u_t where the rows form a tree.
        """
        w = self._packed_taps if self._packed is not None else self.conv_taps()
        u = windowed.float()
        if taps is not None:
            batch = torch.arange(len(u), device=u.device)[:, None, None]
            return F.silu((u[batch, taps] * w).sum(2))
        out = u[:, :rows] * w[0]
        for i in range(1, w.shape[0]):
            out = torch.addcmul(out, u[:, i : i + rows], w[i])
        return F.silu(out)

    def conv_taps(self) -> Tensor:
        """The weights of the three convolutions by tap, [W, 3 H K] float32."""
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        return torch.cat([conv.weight[:, 0].float() for conv in convs]).t().contiguous()

    def _log_decay(self, f_a: Tensor) -> Tensor:
        """g [B, T, H, K] float32."""
        f = (self.f_b_proj(f_a).float() + self.dt_bias.float()).unflatten(
            -1, (self.heads, self.width)
        )
        rate = self.A_log.float().exp().unsqueeze(-1)
        bound = self.config.kda_gate_lower_bound
        if bound is None:
            return -rate * F.softplus(f)
        return bound * torch.sigmoid(rate * f)


def _unit(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + eps): eps inside the root, as the published kernels have it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
