"""The published K3 drafters as their folders are laid out: names, keys and nesting are theirs.

`Sizes` makes them small enough for a tiny K3; `PUBLISHED` has the sizes they really have, whose
tensors are only counted. Nothing in these files says what a tap holds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Sizes:
    """What differs between the small and the real ones. `taps` are completed layers from 0."""

    hidden: int = 64
    ffn: int = 48
    vocab: int = 61
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    latents: tuple[int, int, int, int, int] = (12, 10, 6, 4, 5)
    rank: int = 8
    taps: tuple[int, ...] = (0, 2, 4)
    target_layers: int = 7
    mask: int = 60
    original: int = 64
    window: int = 6


PUBLISHED: dict[str, Sizes] = {
    "radixark": Sizes(
        7168, 14336, 163840, 5, 64, 16, 64, rank=256, taps=(7, 23, 51, 67, 83), target_layers=93,
        mask=163824, original=65536,
    ),
    "inferact": Sizes(
        7168, 14336, 163840, 5, 64, 64, 0, (1536, 512, 128, 64, 128), 256, (2, 23, 47, 71, 89),
        93, 163837, 32768,
    ),
    "redhat": Sizes(
        7168, 14336, 163840, 5, 96, 16, 64, rank=256, taps=(23, 47, 71, 87, 91), target_layers=93,
        mask=163837, window=2048,
    ),
}  # fmt: skip


def _heads(s: Sizes) -> Shapes:
    return {
        "markov_head.markov_w1.weight": (s.vocab, s.rank),
        "markov_head.markov_w2.weight": (s.vocab, s.rank),
        "confidence_head.proj.weight": (1, s.hidden + s.rank),
        "confidence_head.proj.bias": (1,),
    }


def _layer(s: Sizes, i: int, attention: Shapes) -> Shapes:
    return {
        f"layers.{i}.input_layernorm.weight": (s.hidden,),
        f"layers.{i}.post_attention_layernorm.weight": (s.hidden,),
        **{f"layers.{i}.self_attn.{name}.weight": shape for name, shape in attention.items()},
        f"layers.{i}.mlp.gate_proj.weight": (s.ffn, s.hidden),
        f"layers.{i}.mlp.up_proj.weight": (s.ffn, s.hidden),
        f"layers.{i}.mlp.down_proj.weight": (s.hidden, s.ffn),
    }


def gqa_shapes(s: Sizes) -> Shapes:
    """62 tensors at the real size, of RadixArk's and, with both tables, of Red Hat's drafter."""
    width, key_width = s.heads * s.head_dim, s.kv_heads * s.head_dim
    attention: Shapes = {
        "q_proj": (width, s.hidden),
        "k_proj": (key_width, s.hidden),
        "v_proj": (key_width, s.hidden),
        "o_proj": (s.hidden, width),
        "q_norm": (s.head_dim,),
        "k_norm": (s.head_dim,),
    }
    shapes: Shapes = {"fc.weight": (s.hidden, len(s.taps) * s.hidden)}
    shapes |= {"hidden_norm.weight": (s.hidden,), "norm.weight": (s.hidden,)}
    for i in range(s.layers):
        shapes |= _layer(s, i, attention)
    return shapes | _heads(s)


def mla_shapes(s: Sizes) -> Shapes:
    """Inferact's 68 tensors, one of them the target's embedding."""
    q, kv, nope, rope, value = s.latents
    attention: Shapes = {
        "q_a_proj": (q, s.hidden),
        "q_a_layernorm": (q,),
        "q_b_proj": (s.heads * (nope + rope), q),
        "kv_a_proj_with_mqa": (kv + rope, s.hidden),
        "kv_a_layernorm": (kv,),
        "kv_b_proj": (s.heads * (nope + value), kv),
        "o_proj": (s.hidden, s.heads * value),
    }
    shapes: Shapes = {"context_proj.weight": (s.hidden, len(s.taps) * s.hidden)}
    shapes |= {"context_norm.weight": (s.hidden,), "final_norm.weight": (s.hidden,)}
    shapes["embed_tokens.weight"] = (s.vocab, s.hidden)
    for i in range(s.layers):
        shapes |= _layer(s, i, attention)
    return shapes | _heads(s)


def radixark(s: Sizes, *, scaled: bool = True) -> dict[str, Any]:
    """Revision 3c5bac30, or eb03982e without the scaling."""
    rope: dict[str, Any] = {"rope_theta": 10000.0, "rope_type": "default"}
    if scaled:
        rope = {
            "rope_theta": 10000.0,
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": s.original,
        }
    return {
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        "model_type": "qwen3",
        "block_size": 7,
        "hidden_size": s.hidden,
        "intermediate_size": s.ffn,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": s.vocab,
        "max_position_embeddings": 16 * s.original,
        "layer_types": ["full_attention"] * s.layers,
        "num_target_layers": s.target_layers,
        "markov_rank": s.rank,
        "markov_head_type": "vanilla",
        "rope_parameters": rope,
        "dtype": "bfloat16",
        "dflash_config": {
            "target_layer_ids": list(s.taps),
            "mask_token_id": s.mask,
            "attention_mode": "gqa",
            "projector_type": "dspark",
            "markov_rank": s.rank,
            "markov_head_type": "vanilla",
            "confidence_head_alpha": 1.0,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        },
    }


def inferact(s: Sizes) -> dict[str, Any]:
    """Revision cf6b8244. There is no block size and no word on the slot layout."""
    q, kv, nope, rope, value = s.latents
    return {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        "hidden_size": s.hidden,
        "intermediate_size": s.ffn,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.heads,
        "q_lora_rank": q,
        "kv_lora_rank": kv,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "mla_use_nope": False,
        "mla_use_output_gate": False,
        "vocab_size": s.vocab,
        "draft_vocab_size": s.vocab,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576,
        "rope_theta": 50000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": s.original,
            "rope_theta": 50000.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "target_hidden_size": s.hidden,
        "target_num_hidden_layers": s.target_layers,
        "num_target_layers": len(s.taps),
        "target_layer_ids": list(s.taps),
        "mask_token_id": s.mask,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "markov_rank": s.rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "_torchspec_version": "0.1.0",
    }


def redhat(s: Sizes) -> dict[str, Any]:
    """Speculators' nesting, ids counted with the embedding, causal windows, no target depth."""
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_version": "0.8.0.dev0",
        "aux_hidden_state_layer_ids": [layer + 1 for layer in s.taps],
        "block_size": 8,
        "draft_vocab_size": s.vocab,
        "mask_token_id": s.mask,
        "markov_rank": s.rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "transformer_layer_config": {
            "model_type": "qwen3",
            "hidden_size": s.hidden,
            "intermediate_size": s.ffn,
            "num_hidden_layers": s.layers,
            "num_attention_heads": s.heads,
            "num_key_value_heads": s.kv_heads,
            "head_dim": s.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "vocab_size": s.vocab,
            "max_position_embeddings": 1048576,
            "layer_types": ["sliding_attention"] * s.layers,
            "sliding_window": s.window,
            "use_sliding_window": True,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 8,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {
                "name_or_path": "moonshotai/Kimi-K3",
                "architectures": ["KimiK3ForConditionalGeneration"],
            },
        },
    }


def random_weights(shapes: Shapes, seed: int = 0) -> dict[str, Tensor]:
    """bfloat16 weights of those shapes, norms around one."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        scaled = 1 + 0.1 * noise if "norm" in name else noise * shape[-1] ** -0.5
        weights[name] = scaled.bfloat16()
    return weights


def write(folder: Path, raw: dict[str, Any], weights: dict[str, Tensor], shards: int = 1) -> Path:
    """The folder, its weights in one file or in shards with an index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    owner = {
        name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors"
        for i, name in enumerate(weights)
    }
    for file in set(owner.values()):
        part = {name: tensor for name, tensor in weights.items() if owner[name] == file}
        save_file(part, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owner}))
    return folder
