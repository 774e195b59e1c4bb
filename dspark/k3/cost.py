"""Bytes that one pass of the decoder moves, from its configuration alone.

    every weight that all rows share is read once, embeddings not at all
    a routed expert is read if any row chose it: E (1 - (1 - k/E)^T) of E for T rows that choose
        k each, independently and evenly; rows of one text agree more, so this is the upper end
    a KDA state is read and written, its convolution window too; MLA latents are read

For Kimi K3 as published, one row: 137.0 GB of weights, 138.1 GB with 8,192 tokens of context. The
rows of a block that verify a draft read the same shared weights and 120 experts a layer.

Letters: T rows, E experts, k experts of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from dspark.k3.config import K3Config
from dspark.k3.layout import is_float32
from dspark.k3.model import K3ForCausalLM
from dspark.k3.mxfp4 import GROUP


@dataclass(frozen=True)
class PassBytes:
    """Bytes of one pass of T rows of one text.

    shared: weights that every row uses
    experts: routed experts, as many as T rows are expected to choose
    state: recurrent states and windows, read and written
    latents: keys and values of the context
    """

    shared: float
    experts: float
    state: float
    latents: float

    @property
    def total(self) -> float:
        """All of a pass."""
        return self.shared + self.experts + self.state + self.latents


@dataclass(frozen=True)
class _Counted:
    """Numbers of all weights that a pass may read: float32 ones, routed experts, and the rest."""

    wide: int
    experts: int
    plain: int


@lru_cache(maxsize=8)
def _count(config: K3Config) -> _Counted:
    with torch.device("meta"):
        model = K3ForCausalLM(config)
    wide = experts = plain = 0
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            experts += parameter.numel()
        elif is_float32(name):
            wide += parameter.numel()
        elif not name.endswith("embed_tokens.weight") or config.tie_word_embeddings:
            plain += parameter.numel()
    return _Counted(wide, experts, plain)


def pass_bytes(config: K3Config, rows: int, context: int, dtype: torch.dtype) -> PassBytes:
    """Bytes of one pass.

    Args:
        config: Of the decoder; packed experts count as such.
        rows: T, of one text.
        context: Tokens before them.
        dtype: Of weights, latents and windows; states are float32.
    """
    counted = _count(config)
    each: float = dtype.itemsize
    if config.expert_quantization == "mxfp4":
        each = 0.5 + 1 / GROUP
    linear = config.num_hidden_layers - len(config.full_attention_layers)
    width = config.kda_num_heads * config.kda_head_dim
    state = width * config.kda_head_dim * torch.float32.itemsize
    window = (config.kda_conv_size - 1) * 3 * width * dtype.itemsize
    latent = (config.kv_lora_rank + config.qk_rope_head_dim) * dtype.itemsize
    return PassBytes(
        float(counted.wide * torch.float32.itemsize + counted.plain * dtype.itemsize),
        counted.experts * each * expected_share(config, rows),
        2.0 * linear * (state + window),
        float(len(config.full_attention_layers) * context * latent),
    )


def expected_share(config: K3Config, rows: int) -> float:
    """Share of a layer's experts that at least one of so many rows is expected to choose."""
    if not config.num_experts:
        return 0.0
    return 1 - (1 - config.num_experts_per_token / config.num_experts) ** rows
