"""LatentMoE: routed experts that work in a narrow latent space, beside one always-on shared MLP.

    s = sigmoid(x W_r) in float32;  choose the top k of s + bias;  w = s / (sum s + 1e-20) * scaling
    z = x W_down;  y = RMSNorm(sum_e w_e E_e(z));  out = y W_up + shared(x)

The correction bias only chooses: the weights come from s without it. The norm stands between the
expert sum and the up-projection, so partial sums must be complete before it. Kimi-Linear is the
same without the latent space (W_down, W_up and the norm are the identity).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.k3.config import K3Config
from dspark.k3.layers import GatedMLP, RMSNorm, activation, linear

DENSE_EXPERTS_NUMEL = 2**20
"""Below this many expert weights a layer computes every expert: launches cost more than bytes."""


class Router(nn.Module):
    """Sigmoid top-k router in float32 whatever the model's dtype."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(
            torch.zeros(config.num_experts), requires_grad=False
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [n, D] -> weights [n, k] float32 and expert ids [n, k] int64."""
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        chosen = (
            (scores + self.e_score_correction_bias)
            .topk(self.config.num_experts_per_token, dim=-1)
            .indices
        )
        weights = scores.gather(-1, chosen)
        if self.config.moe_renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if self.config.routed_scaling_factor != 1.0:
            weights = weights * self.config.routed_scaling_factor
        return weights, chosen


class Experts(nn.Module):
    """The routed experts, stacked: w1 gate and w3 up [E, I, L], w2 down [E, L, I]."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        E, I, L = config.num_experts, config.moe_intermediate_size, config.expert_width  # noqa: E741
        self.w1 = nn.Parameter(torch.empty(E, I, L))
        self.w3 = nn.Parameter(torch.empty(E, I, L))
        self.w2 = nn.Parameter(torch.empty(E, L, I))
        self.act = activation(config)

    def pack_(self) -> None:
        """Store w2 with its experts' inputs outermost, so that ``_all`` reads it without a copy."""
        self.w2.data = self.w2.data.transpose(1, 2).contiguous().transpose(1, 2)

    def forward(self, z: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """z [n, L], weights and chosen [n, k] -> weighted sum of the chosen outputs [n, L]."""
        if self.w1.numel() <= DENSE_EXPERTS_NUMEL:
            return self._all(z, weights, chosen)
        return self._chosen(z, weights, chosen)

    def _chosen(self, z: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Read each distinct expert once; the form that says what is meant."""
        out = torch.zeros_like(z, dtype=torch.float32)
        for expert in chosen.unique().tolist():
            row, slot = (chosen == expert).nonzero(as_tuple=True)
            hidden = self.act(F.linear(z[row], self.w1[expert]), F.linear(z[row], self.w3[expert]))
            y = F.linear(hidden, self.w2[expert])
            out.index_add_(0, row, y.float() * weights[row, slot, None])
        return out.to(z.dtype)

    def _all(self, z: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Every expert in three products, weighted by zero where not chosen: no gather, no loop."""
        E, I, L = self.w1.shape  # noqa: E741
        gate, up = F.linear(z, self.w1.view(E * I, L)), F.linear(z, self.w3.view(E * I, L))
        dense = torch.zeros(z.shape[0], E, dtype=weights.dtype, device=z.device).scatter(
            1, chosen, weights
        )
        hidden = self.act(gate, up).view(-1, E, I) * dense.to(z.dtype).unsqueeze(-1)
        return torch.matmul(hidden.view(-1, E * I), self.w2.transpose(1, 2).reshape(E * I, L))


class LatentMoE(nn.Module):
    """Router, latent projections, routed experts and the shared MLP."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        D, L = config.hidden_size, config.expert_width
        self.gate = Router(config)
        self.experts = Experts(config)
        self.latent = config.routed_expert_hidden_size is not None
        if self.latent:
            self.routed_expert_down_proj = linear(D, L)
            self.routed_expert_up_proj = linear(L, D)
        if config.latent_moe_norm:
            self.routed_expert_norm = RMSNorm(L, config.rms_norm_eps)
        self.normed = config.latent_moe_norm
        if config.num_shared_experts:
            self.shared_experts = GatedMLP(
                config, config.moe_intermediate_size * config.num_shared_experts
            )
        self.shared = config.num_shared_experts > 0

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(flat)
        y = self.experts(
            self.routed_expert_down_proj(flat) if self.latent else flat, weights, chosen
        )
        if self.normed:
            y = self.routed_expert_norm(y)
        if self.latent:
            y = self.routed_expert_up_proj(y)
        if self.shared:
            y = y + self.shared_experts(flat)
        return y.view_as(x)
