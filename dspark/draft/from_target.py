"""A drafter's KDA layers as copies of a target's: which weight goes where, before anything is cut.

The target's layer reads RMSNorm(h) w; the drafter's block reads RMSNorm(h) w' + e and its context
the feature c, all through the same projections. So w moves into every projection, W <- W diag(w),
the drafter's norm becomes one, and c has to be RMSNorm(h): then the copy at full size and exact
order computes what the target's layer does. What differs in form is brought over as follows.

    low-rank output gate      W_g = W_gb W_ga
    decay W_fb W_fa           the best approximation of the drafter's gate rank, by SVD
    convolution of W rows     its last rows, or zeros in front of them
    dense MLP                 as it is
    shared and routed experts one dense MLP, expert beside expert: gate and up W_e W_down,
                              down W_up diag(w / rms) W_e2 p_e, p_e its mean router weight

Letters: D hidden, F MLP width, I expert width, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.draft.attention import SITU_BETA, SITU_LINEAR_BETA, gated
from dspark.draft.config import DraftConfig
from dspark.draft.kda import DraftKDA, KDALayer, kda_shape
from dspark.errors import UserError
from dspark.k3.config import K3Config
from dspark.k3.kda import KDA
from dspark.k3.layers import GatedMLP
from dspark.k3.model import DecoderLayer
from dspark.k3.moe import LatentMoE


@dataclass(frozen=True, eq=False)
class DenseMLP:
    """Weights of a gated MLP: gate and up [F, D], down [D, F]."""

    gate: Tensor
    up: Tensor
    down: Tensor

    @property
    def width(self) -> int:
        """F."""
        return len(self.gate)

    def hidden(self, x: Tensor, act: str) -> Tensor:
        """What the down projection reads: [n, D] -> [n, F]."""
        return gated(act, F.linear(x, self.gate), F.linear(x, self.up))


def check_copyable(config: DraftConfig, source: K3Config) -> None:
    """Raises UserError naming what a `kda` drafter of that configuration cannot copy."""
    if source.kda_gate_lower_bound is None:
        raise UserError(
            "drafter.init is target: this target's decay has no lower bound, which the kda "
            "backbone needs; use random"
        )
    betas = (source.situ_beta, source.situ_linear_beta)
    if source.hidden_act == "situ" and betas != (SITU_BETA, SITU_LINEAR_BETA):
        raise UserError(
            f"drafter.init is target: its SiTU constants {betas} are not the drafter's "
            f"({SITU_BETA}, {SITU_LINEAR_BETA}); use random"
        )
    for key, ours, theirs in (
        ("num_heads", config.num_attention_heads, source.kda_num_heads),
        ("head_dim", config.head_dim, source.kda_head_dim),
    ):
        if ours > theirs:
            raise UserError(
                f"drafter.{key} is {ours}: with drafter.init target at most {theirs}, what a KDA "
                "layer of the target has"
            )


def target_form(config: DraftConfig, source: K3Config) -> DraftConfig:
    """The configuration with what a copy has to share with its source: activation, bound, eps."""
    bound = source.kda_gate_lower_bound
    assert bound is not None
    return replace(
        config,
        hidden_act=source.hidden_act,
        rms_norm_eps=source.rms_norm_eps,
        kda=replace(kda_shape(config), gate_lower_bound=bound),
    )


def uncut_config(config: DraftConfig, source: K3Config, width: int) -> DraftConfig:
    """The size before anything is cut: the target's heads, and MLPs of `width` channels."""
    heads = source.kda_num_heads
    return replace(
        config,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=source.kda_head_dim,
        intermediate_size=width,
    )


@torch.no_grad()
def copy_layer(layer: KDALayer, source: DecoderLayer, mlp: DenseMLP) -> None:
    """Fill a layer of the uncut size. MLP channels past `mlp`'s width stay fresh and unread."""
    mixer = source.self_attn
    assert isinstance(mixer, KDA)
    _copy_mixer(layer.self_attn, mixer, source.input_layernorm.weight)
    layer.input_layernorm.weight.fill_(1.0)
    layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
    width = mlp.width
    layer.mlp.gate_proj.weight[:width] = mlp.gate
    layer.mlp.up_proj.weight[:width] = mlp.up
    layer.mlp.down_proj.weight.zero_()
    layer.mlp.down_proj.weight[:, :width] = mlp.down


def _copy_mixer(ours: DraftKDA, theirs: KDA, norm: Tensor) -> None:
    norm = norm.float()
    for name in ("q_proj", "k_proj", "v_proj", "b_proj"):
        getattr(ours, name).weight.copy_(getattr(theirs, name).weight.float() * norm)
    ours.g_proj.weight.copy_(_output_gate(theirs) * norm)
    decay = theirs.f_b_proj.weight.double() @ (theirs.f_a_proj.weight.double() * norm.double())
    wide, narrow = low_rank(decay, ours.shape.gate_rank)
    ours.f_b_proj.weight.copy_(wide)
    ours.f_a_proj.weight.copy_(narrow)
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        taps, source = getattr(ours, name).weight, getattr(theirs, name).weight
        rows = min(taps.shape[-1], source.shape[-1])
        taps.zero_()
        taps[..., -rows:] = source[..., -rows:]
    for name in ("A_log", "dt_bias"):
        getattr(ours, name).copy_(getattr(theirs, name))
    ours.o_norm.weight.copy_(theirs.o_norm.weight)
    ours.o_proj.weight.copy_(theirs.o_proj.weight)


def _output_gate(mixer: KDA) -> Tensor:
    if mixer.config.kda_full_rank_output_gate:
        return mixer.g_proj.weight.float()
    return mixer.g_b_proj.weight.float() @ mixer.g_a_proj.weight.float()


def low_rank(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best factors [m, rank] and [rank, n] of a matrix, equally sized, zeros past its rank."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    kept = min(rank, len(s))
    root = s[:kept].sqrt()
    wide = F.pad(u[:, :kept] * root, (0, rank - kept))
    return wide, F.pad(root[:, None] * v[:kept], (0, 0, 0, rank - kept))


def dense_mlp(mlp: GatedMLP) -> DenseMLP:
    """A dense MLP or a shared expert as it is."""
    parts = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return DenseMLP(*(part.weight.float() for part in parts))


def compose_experts(
    moe: LatentMoE, chosen: Sequence[int], weights: Tensor, scale: float
) -> DenseMLP:
    """The shared expert and some routed ones, side by side in one dense MLP.

    Args:
        moe: The layer's experts.
        chosen: Ids of routed experts.
        weights: [E] mean router weight of each, 0 where it was not chosen.
        scale: Mean of 1 / rms of the sum of experts, where the layer norms it; else 1.
    """
    parts = [dense_mlp(moe.shared_experts)] if moe.shared else []
    latent = [moe.experts.w1.float(), moe.experts.w3.float(), moe.experts.w2.float()]
    for expert in chosen:
        gate, up, down = (stack[expert] for stack in latent)
        down = down * weights[expert]
        if moe.normed:
            down = down * (moe.routed_expert_norm.weight.float() * scale)[:, None]
        if moe.latent:
            into = moe.routed_expert_down_proj.weight.float()
            gate, up = gate @ into, up @ into
            down = moe.routed_expert_up_proj.weight.float() @ down
        parts.append(DenseMLP(gate, up, down))
    return DenseMLP(
        torch.cat([part.gate for part in parts]),
        torch.cat([part.up for part in parts]),
        torch.cat([part.down for part in parts], 1),
    )
