"""Parts of a drafter's configuration that only some backbones have, and position scaling.

Each is a frozen dataclass; impossible values raise `ValueError("key: why")`, the key as it stands
in `DraftConfig`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

INIT_SCALES = ("fan_in", "normal")
"""How fresh weights are sized; `start.py` says what each means."""

GLA = "gla"
"""The order below 0: the block does not even subtract what the entry state already holds."""

ATTENTION_KINDS = ("full_attention", "sliding_attention")

BLOCK_CAUSAL = ("none", "sliding", "all")
"""Layers whose slots see only the slots before them in their block, beside the context."""

ACTIVATIONS = ("silu", "situ")


@dataclass(frozen=True)
class Yarn:
    """YaRN scaling of rotary positions (Peng et al. 2023), with the names of Hugging Face configs.

    Attributes:
        factor: Target length over `original_max_position_embeddings`; above 1.
        original_max_position_embeddings: Length that the unscaled frequencies were trained for.
        beta_fast, beta_slow: Rotations over that length between which frequencies are blended.
        mscale, mscale_all_dim: DeepSeek's temperature terms, both or neither.
        attention_factor: Scale of cosine and sine; None means the rule of `dspark.draft.rotary`.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor > 1):
            raise ValueError(f"yarn.factor: {self.factor} given, a number above 1 is needed")
        if self.original_max_position_embeddings < 1:
            raise ValueError(
                f"yarn.original_max_position_embeddings: {self.original_max_position_embeddings} "
                "given, at least 1 is needed"
            )
        if not math.inf > self.beta_fast > self.beta_slow > 0:
            raise ValueError(
                f"yarn.beta_fast, yarn.beta_slow: {self.beta_fast}, {self.beta_slow} given, "
                "two finite numbers, beta_fast > beta_slow > 0, are needed"
            )
        for name in ("mscale", "mscale_all_dim", "attention_factor"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"yarn.{name}: {value} given, a number above 0 is needed")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError(
                f"yarn.mscale, yarn.mscale_all_dim: {self.mscale}, {self.mscale_all_dim} given; "
                "both or neither are needed (engines disagree on what one alone means)"
            )


@dataclass(frozen=True)
class MLAShape:
    """Sizes of multi-head latent attention, as in the MLA-native K3 drafter.

    Heads and their number come from `DraftConfig.num_attention_heads`; there is one latent for all.

    Attributes:
        q_lora_rank, kv_lora_rank: Widths of the query and the key-value latent.
        qk_nope_head_dim, qk_rope_head_dim: Unrotated and rotated channels of a head's query.
        v_head_dim: Channels of a head's value.
        rope: Whether the rotated channels really are; false is NoPE, K3's own attention.
        output_gate: Whether heads are multiplied by sigmoid(g_proj(x)), as in K3's own attention.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: bool = True
    output_gate: bool = False

    def __post_init__(self) -> None:
        _at_least_one(
            self,
            "mla",
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        )
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"mla.qk_rope_head_dim: {self.qk_rope_head_dim} is odd, rotary positions need pairs"
            )


@dataclass(frozen=True)
class KDAShape:
    """Linearised KDA: sizes beside `num_attention_heads` and `head_dim` (key and value width).

    Attributes:
        order: 0..G-1, terms of the series kept inside the block (G-1 is exact), or `GLA`.
        conv_size: Rows of the short convolution.
        gate_rank: Width of the low-rank decay projection.
        gate_lower_bound: Every log-decay lies above it; -5 <= bound < 0.
        block_softmax: Adds a small bidirectional softmax attention between the slots of a block.
    """

    order: int | str = 0
    conv_size: int = 4
    gate_rank: int = 32
    gate_lower_bound: float = -5.0
    block_softmax: bool = False

    def __post_init__(self) -> None:
        _at_least_one(self, "kda", "conv_size", "gate_rank")
        if self.order != GLA and (not isinstance(self.order, int) or self.order < 0):
            raise ValueError(f"kda.order: {self.order!r} given, 0..block_size-1 or {GLA!r} needed")
        if not -5 <= self.gate_lower_bound < 0:
            raise ValueError(
                f"kda.gate_lower_bound: {self.gate_lower_bound} given, -5 <= bound < 0 is needed"
            )


def _at_least_one(shape: object, prefix: str, *names: str) -> None:
    for name in names:
        value = getattr(shape, name)
        if value < 1:
            raise ValueError(f"{prefix}.{name}: {value} given, at least 1 is needed")
