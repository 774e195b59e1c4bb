"""Bytes that one draft step reads, from a configuration alone: weights once, and the context.

At batch 1 a step takes as long as its bytes take to arrive, whatever it computes with them. One
pass over the block reads every weight once: the backbone with its projections, norms and heads, one
row of w1 (not counted), all of w2, and the target's LM head over the draft vocabulary.

For the two published K3 drafters in bf16 this gives 7.04 GB (MLA) and 6.76 GB (GQA), of which the
LM head is 2.35 GB, and 5,760 and 20,480 bytes per token of context.

Letters: L layers, D hidden, J key heads, K head dim, R latent rank, p shared key width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark.draft.config import DraftConfig
from dspark.draft.kinds import registered
from dspark.draft.model import DSparkDrafter

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of weights that one draft step reads.

    backbone: everything the drafter owns but w1 and w2
    markov_w2: the previous token's bias, streamed once
    lm_head: the target's, over the draft vocabulary
    """

    backbone: int
    markov_w2: int
    lm_head: int

    @property
    def total(self) -> int:
        """All of a step."""
        return self.backbone + self.markov_w2 + self.lm_head


def parameters(config: DraftConfig) -> int:
    """Numbers that a drafter owns; embedding and LM head are the target's."""
    return sum(_sizes(config).values())


def weight_bytes(config: DraftConfig, dtype: torch.dtype) -> WeightBytes:
    """Bytes of weights of one draft step, all held in `dtype`."""
    sizes = _sizes(config)
    w2 = sizes[W2]
    own = sum(sizes.values()) - sizes[W1] - w2
    head = config.draft_vocab * config.hidden_size
    return WeightBytes(*(count * dtype.itemsize for count in (own, w2, head)))


def context_bytes(config: DraftConfig, length: int, dtype: torch.dtype) -> int:
    """Bytes of context that one draft step of one text reads.

    Args:
        config: Of the drafter.
        length: Tokens before the anchor; a sliding layer reads its window of them, `kda` a state
            that does not grow.
        dtype: Of keys, values and latents (`kda` keeps its state in float32).
    """
    if (kind := registered(config.backbone)) is not None:
        return kind.context_bytes(config, length, dtype)
    if config.kda is not None:
        width = config.num_attention_heads * config.head_dim
        state = width * config.head_dim * torch.float32.itemsize
        rows = (config.kda.conv_size - 1) * 3 * width * dtype.itemsize
        return config.num_layers * (state + rows)
    seen = sum(min(length, config.window(layer) or length) for layer in range(config.num_layers))
    return seen * _token_width(config) * dtype.itemsize


def _token_width(config: DraftConfig) -> int:
    """Numbers that a layer keeps of a token: keys and values, or a latent and a shared key."""
    if config.mla is not None:
        return config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    return 2 * config.num_key_value_heads * config.head_dim


def _sizes(config: DraftConfig) -> dict[str, int]:
    """Elements of every parameter, by name; nothing is allocated."""
    with torch.device("meta"):
        drafter = DSparkDrafter(config)
    return {name: parameter.numel() for name, parameter in drafter.named_parameters()}
