"""Tiny K3 decoders with every feature on and no two sizes equal, so that a transpose cannot hide.

Random weights in which nothing is neutral: norms are not one, biases and Attention Residuals
queries are not zero, so that leaving any of them out changes the logits.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dspark.k3.config import K3Config
from dspark.k3.kda import KDA
from dspark.k3.model import K3ForCausalLM

TINY = K3Config(
    vocab_size=61,
    hidden_size=64,
    num_hidden_layers=7,
    full_attention_layers=(2, 5, 6),
    kda_num_heads=3,
    kda_head_dim=16,
    num_attention_heads=2,
    q_lora_rank=20,
    kv_lora_rank=24,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    intermediate_size=80,
    num_experts=6,
    num_experts_per_token=2,
    num_shared_experts=2,
    moe_intermediate_size=32,
    routed_expert_hidden_size=96,
    routed_scaling_factor=1.5,
    attn_res_block_size=3,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
"""K3 in small: MLA twice at the end, one dense layer, a last block that is not full."""

PLAIN = replace(
    TINY,
    q_lora_rank=None,
    mla_output_gate=False,
    kda_gate_lower_bound=None,
    kda_full_rank_output_gate=False,
    routed_expert_hidden_size=None,
    latent_moe_norm=False,
    hidden_act="silu",
    attn_res_block_size=None,
    num_shared_experts=1,
)
"""Kimi-Linear in small: softplus gate, low-rank output gate, ordinary residual stream."""


def tiny_model(config: K3Config = TINY, seed: int = 0) -> K3ForCausalLM:
    """A float32 model in eval mode with random, nowhere neutral weights."""
    model = K3ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random(name, parameter, generator))
        for module in model.modules():
            if isinstance(module, KDA):
                _lean_keys_to_queries(module)
    return model.requires_grad_(False)


def tiny_tokens(batch: int, length: int, config: K3Config = TINY, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, config.vocab_size, (batch, length), generator=generator)


def _lean_keys_to_queries(layer: KDA) -> None:
    """Correlate k with q, as training does.

    The first row of a recurrence reads beta (q.k) v, which is then normed: with q.k near zero that
    turns float32 noise into errors of 1e-4, in any implementation.
    """
    for key, query in ((layer.k_proj, layer.q_proj), (layer.k_conv1d, layer.q_conv1d)):
        key.weight.mul_(0.5).add_(query.weight)


def _random(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(like.shape, generator=generator)
    if "norm" in name:
        return 1 + 0.2 * noise
    if name.endswith(("dt_bias", "A_log")):
        return 0.7 * noise
    if name.endswith("e_score_correction_bias"):
        return 0.3 * noise
    if "conv1d" in name or "embed" in name:
        return 0.5 * noise
    return noise * like.shape[-1] ** -0.5
