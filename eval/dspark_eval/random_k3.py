"""Decoders of published shapes with random weights, made where they will run.

Speed does not depend on what weights hold, but routing does: a router whose logits have a standard
deviation near one spreads its choices as a trained one does, which `init_weights` gives.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dspark.k3 import layout
from dspark.k3.config import K3Config
from dspark.k3.model import K3ForCausalLM

KIMI_LINEAR = K3Config(
    vocab_size=163_840,
    hidden_size=2304,
    num_hidden_layers=27,
    full_attention_layers=(3, 7, 11, 15, 19, 23, 26),
    num_attention_heads=32,
    intermediate_size=9216,
    kda_num_heads=32,
    kda_head_dim=128,
    kda_gate_lower_bound=None,
    kda_full_rank_output_gate=False,
    kv_lora_rank=512,
    mla_output_gate=False,
    num_experts=256,
    num_experts_per_token=8,
    num_shared_experts=1,
    moe_intermediate_size=1024,
    latent_moe_norm=False,
    routed_scaling_factor=2.446,
    hidden_act="silu",
    attn_res_block_size=None,
)
"""Kimi-Linear-48B-A3B."""

TINY = replace(
    KIMI_LINEAR,
    vocab_size=509,
    hidden_size=64,
    num_hidden_layers=4,
    full_attention_layers=(3,),
    num_attention_heads=2,
    intermediate_size=96,
    kda_num_heads=2,
    kda_head_dim=16,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    num_experts=8,
    num_experts_per_token=2,
    moe_intermediate_size=32,
)
"""The same on a CPU, to try a command out."""

SHAPES = {"kimi-linear-32": replace(KIMI_LINEAR, num_experts=32), "tiny": TINY}
"""Names that commands take; the first has 7.9 billion parameters, the original's active ones."""


def random_model(
    config: K3Config, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> K3ForCausalLM:
    """A model in eval mode whose weights never exist anywhere but on ``device``."""
    with torch.device("meta"):
        model = K3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        kind = torch.float32 if layout.is_float32(name) else dtype
        made = torch.ones(parameter.shape, dtype=kind, device=device)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(made, parameter.requires_grad))
    model.init_weights(torch.Generator(device).manual_seed(seed))
    return model.eval().requires_grad_(False)
