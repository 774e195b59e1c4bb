"""Small drafters of every kind of attention, with weights large enough that every term shows."""

from __future__ import annotations

from dataclasses import replace

import torch

from dspark.draft import DraftConfig, DSparkDrafter
from dspark.draft.shapes import MLAShape, Yarn

FULL = DraftConfig(
    hidden_size=48,
    num_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=80,
    vocab_size=120,
    num_target_layers=9,
    target_layer_ids=(1, 4, 6),
    target_tap_kind="residual",
    mask_token_id=7,
    block_size=5,
    markov_rank=12,
)
TAP_WIDTH = len(FULL.target_layer_ids) * FULL.hidden_size
YARN = Yarn(factor=4.0, original_max_position_embeddings=16)
WINDOW = 6
SLIDING, WHOLE = "sliding_attention", "full_attention"

MLA = replace(
    FULL,
    backbone="mla",
    num_key_value_heads=6,
    mla=MLAShape(
        q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10
    ),
    rope_theta=50_000.0,
    yarn=replace(YARN, mscale=1.0, mscale_all_dim=1.0),
)

CASES = {
    "yarn": replace(FULL, yarn=YARN),
    "causal": replace(FULL, block_causal="all"),
    "sliding": replace(FULL, sliding_window=WINDOW, layer_types=(SLIDING, SLIDING)),
    "mixed": replace(
        FULL, sliding_window=WINDOW, layer_types=(SLIDING, WHOLE), block_causal="sliding"
    ),
    "narrow": replace(FULL, sliding_window=1, layer_types=(WHOLE, SLIDING), yarn=YARN),
    "mla": MLA,
    "mla-gated-nope": replace(
        MLA,
        mla=replace(MLA.mla, rope=False, output_gate=True),  # type: ignore[type-var]
        yarn=None,
        hidden_act="situ",
    ),
    "mla-sliding": replace(MLA, sliding_window=WINDOW, layer_types=(SLIDING, SLIDING)),
    "mla-mixed": replace(
        MLA, sliding_window=WINDOW, layer_types=(WHOLE, SLIDING), block_causal="all"
    ),
}
"""Every feature of the softmax backbones at least once; plain full attention is in
test_draft_model.py."""


def make_drafter(config: DraftConfig, seed: int = 0) -> DSparkDrafter:
    """A drafter whose norms differ from one and whose products are of order one."""
    generator = torch.Generator().manual_seed(seed)
    drafter = DSparkDrafter(config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(1.5 * noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.3 * noise)
    return drafter


def train_blocks(
    drafter: DSparkDrafter, features: torch.Tensor, embeds: torch.Tensor, anchors: list[list[int]]
) -> torch.Tensor:
    """The training pass where every position and every anchor is real."""
    positions = torch.tensor(anchors)
    return drafter.train_hidden(
        features,
        torch.ones(features.shape[:2], dtype=torch.bool),
        embeds,
        positions,
        torch.ones_like(positions, dtype=torch.bool),
    )


def draft(
    drafter: DSparkDrafter, features: torch.Tensor, embeds: torch.Tensor, max_length: int = 64
) -> torch.Tensor:
    """One block [B, G, D] after a context that arrived in one piece."""
    context = drafter.new_context(features.shape[0], max_length)
    if features.shape[1]:
        drafter.extend(context, features)
    return drafter.block_hidden(embeds, context)
