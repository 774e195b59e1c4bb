"""The shape of k3-nano: every feature of Kimi K3 in fewer than five million parameters.

Nine layers (KDA x3, MLA, KDA x3, MLA, MLA: two MLA layers at the end, as K3 ends), a dense first
MLP and eight LatentMoE layers, Attention Residuals in blocks of three, SiTU, full-rank output
gates, untied head.
"""

from __future__ import annotations

from dspark.k3.config import K3Config


def nano_config(*, vocab_size: int, bos: int, eos: int, pad: int) -> K3Config:
    """Configuration of k3-nano for a tokenizer with these special ids."""
    return K3Config(
        vocab_size=vocab_size,
        hidden_size=192,
        num_hidden_layers=9,
        full_attention_layers=(3, 7, 8),
        kda_num_heads=6,
        kda_head_dim=32,
        num_attention_heads=6,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        intermediate_size=512,
        num_experts=8,
        num_experts_per_token=2,
        num_shared_experts=2,
        moe_intermediate_size=64,
        routed_expert_hidden_size=96,
        attn_res_block_size=3,
        initializer_range=0.05,
        max_position_embeddings=65536,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )
