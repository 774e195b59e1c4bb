"""Tiny random models of many transformers architectures, each with what is odd about its kind."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

SIZES = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_UNTIED = {**SIZES, "tie_word_embeddings": False}  # tied, a random one repeats its last token
_FOUR = {**SIZES, "num_key_value_heads": 4}
_HEAD = {"head_dim": 8}
_ALTERNATE = ["sliding_attention", "full_attention"] * 2
_GATED = ["linear_attention", "full_attention"] * 2
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**SIZES, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", SIZES),
    "qwen2-window": (
        "Qwen2",
        {**SIZES, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", {**SIZES, **_HEAD}),
    "qwen3-moe": ("Qwen3Moe", {**SIZES, **_HEAD, **_EXPERTS}),
    "mistral-window": ("Mistral", {**SIZES, **_HEAD, "sliding_window": 8}),
    "gemma": ("Gemma", {**_UNTIED, **_HEAD}),
    "gemma2": (
        "Gemma2",
        {
            **_UNTIED,
            **_HEAD,
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "final_logit_softcapping": 0.5,
            "attn_logit_softcapping": 0.5,
        },
    ),
    "gemma3": (
        "Gemma3",
        {**_UNTIED, **_HEAD, "sliding_window": 8, "layer_types": _ALTERNATE},
    ),
    "granite": ("Granite", {**SIZES, "logits_scaling": 4.0, "embedding_multiplier": 3.0}),
    "cohere": ("Cohere", {**SIZES, "logit_scale": 0.25}),
    "cohere2": (
        "Cohere2",
        {**SIZES, "logit_scale": 0.25, "sliding_window": 8, "layer_types": _ALTERNATE},
    ),
    "gpt-neox": ("GPTNeoX", {**SIZES, "rotary_pct": 0.25}),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": 120,
            "n_embd": 32,
            "n_layer": 4,
            "n_head": 4,
            "n_positions": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "olmo2": ("Olmo2", SIZES),
    "phi": ("Phi", _FOUR),
    "phi3": ("Phi3", {**SIZES, "sliding_window": 8}),
    "stablelm": ("StableLm", SIZES),
    "starcoder2": ("Starcoder2", {**SIZES, "sliding_window": 8}),
    "smollm3": ("SmolLM3", SIZES),
    "gpt-oss": (
        "GptOss",
        {
            **SIZES,
            **_HEAD,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "layer_types": _ALTERNATE,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **_FOUR,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 2,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
    ),
}
"""Attention models: architecture and configuration, by the name of the test."""

REPLAY: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi-linear": (
        "KimiLinear",
        {
            **_FOUR,
            "moe_intermediate_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "mlp_layer_types": ["dense"] + ["sparse"] * 3,
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "linear_conv_kernel_dim": 4,
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        {
            **SIZES,
            **_HEAD,
            **_EXPERTS,
            "shared_expert_intermediate_size": 16,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": _GATED,
        },
    ),
    "mamba": (
        "Mamba",
        {
            "vocab_size": 120,
            "hidden_size": 32,
            "state_size": 8,
            "num_hidden_layers": 4,
            "time_step_rank": 4,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "mamba2": (
        "Mamba2",
        {
            "vocab_size": 120,
            "hidden_size": 32,
            "state_size": 8,
            "num_hidden_layers": 4,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "jamba": (
        "Jamba",
        {
            **SIZES,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "lfm2": (
        "Lfm2",
        {**SIZES, "layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 16},
    ),
    "bloom": (
        "Bloom",
        {
            "tie_word_embeddings": False,
            "vocab_size": 120,
            "hidden_size": 32,
            "n_layer": 4,
            "n_head": 4,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}
"""Models with recurrent layers, and one (bloom) whose positions are in its own mask."""


def tiny_hf(name: str, seed: int = 0, **more: Any) -> PreTrainedModel:
    """A model in float32 whose next tokens depend on what it has read; ``more`` settings."""
    architecture, settings = {**ROWS, **REPLAY}[name]
    config_class = _class(f"{architecture}TextConfig") or _class(f"{architecture}Config")
    assert config_class is not None, architecture
    torch.manual_seed(seed)
    model_class = _class(f"{architecture}ForCausalLM") or _class(f"{architecture}LMHeadModel")
    model = model_class(config_class(**{**settings, **more})).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                # Fresh weights are so small that every row would say the same.
                parameter.mul_(0.25 / parameter.std().clamp(min=1e-3))
    return model.eval()


def _class(name: str) -> Any:
    return getattr(transformers, name, None)
