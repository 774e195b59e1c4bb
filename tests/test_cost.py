"""Bytes per draft step: the two published K3 drafters to the byte, and what a context really
holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dspark.draft import DraftConfig
from dspark.draft.cost import context_bytes, parameters, weight_bytes
from dspark.draft.shapes import KDAShape, MLAShape
from tests.tiny_drafters import CASES, FULL, TAP_WIDTH, make_drafter

K3 = {
    "hidden_size": 7168,
    "num_layers": 5,
    "intermediate_size": 14336,
    "vocab_size": 163_840,
    "num_target_layers": 93,
    "markov_rank": 256,
    "num_attention_heads": 64,
    "rms_norm_eps": 1e-5,
    "block_size": 7,
}
MLA_NATIVE = DraftConfig(
    **K3, backbone="mla", num_key_value_heads=64, head_dim=128, target_tap_kind="raw_prefix",
    target_layer_ids=(2, 23, 47, 71, 89), mask_token_id=163_837,
    mla=MLAShape(1536, 512, 128, 64, 128),
)  # fmt: skip
GQA = DraftConfig(
    **K3, num_key_value_heads=16, head_dim=64, target_tap_kind="attn_res_mixture",
    target_layer_ids=(7, 23, 51, 67, 83), mask_token_id=163_824,
)  # fmt: skip
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("config", "owned", "backbone", "total", "token"),
    [
        (MLA_NATIVE, 2_387_907_841, 4.608e9, 7.04e9, 5_760),
        (GQA, 2_249_289_601, 4.331e9, 6.76e9, 20_480),
    ],
    ids=["mla-native", "gqa"],
)
def test_the_published_k3_drafters(
    config: DraftConfig, owned: int, backbone: float, total: float, token: int
) -> None:
    assert parameters(config) == owned
    weights = weight_bytes(config, BF16)
    assert weights.backbone == pytest.approx(backbone, abs=0.5e6)
    assert weights.markov_w2 == 163_840 * 256 * 2
    assert weights.lm_head == 163_840 * 7168 * 2
    assert weights.total == pytest.approx(total, abs=5e6)
    assert context_bytes(config, 1, BF16) == token
    assert context_bytes(config, 8192, BF16) == 8192 * token
    assert context_bytes(config, 8192, torch.float32) == 2 * 8192 * token


def test_a_million_tokens_of_context() -> None:
    """6.04 GB of latents, 21.47 GB of keys and values; with windows of 2,048 hardly any."""
    million = 1_048_576
    assert context_bytes(MLA_NATIVE, million, BF16) == pytest.approx(6.04e9, abs=5e6)
    assert context_bytes(GQA, million, BF16) == pytest.approx(21.47e9, abs=5e6)
    sliding = replace(GQA, sliding_window=2048, layer_types=("sliding_attention",) * 5)
    assert context_bytes(sliding, million, BF16) == 2048 * 20_480
    assert context_bytes(sliding, 100, BF16) == 100 * 20_480
    mixed = replace(
        GQA, sliding_window=2048, layer_types=("sliding_attention",) * 4 + ("full_attention",)
    )
    assert context_bytes(mixed, million, BF16) == (4 * 2048 + million) * 4096


def test_a_reduced_vocabulary_reads_fewer_rows() -> None:
    reduced = weight_bytes(replace(GQA, draft_vocab_size=32_768), BF16)
    full = weight_bytes(GQA, BF16)
    assert reduced.lm_head * 5 == full.lm_head
    assert reduced.markov_w2 * 5 == full.markov_w2
    assert reduced.backbone == full.backbone


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
@pytest.mark.parametrize("length", [3, 20])
def test_what_is_counted_is_what_a_context_holds(config: DraftConfig, length: int) -> None:
    """Buffers hold one block more than the text they were made for."""
    drafter = make_drafter(config)
    context = drafter.new_context(1, length)
    drafter.extend(context, torch.randn(1, length, TAP_WIDTH))
    row = context_bytes(replace(config, layer_types=None, sliding_window=None), 1, torch.float32)
    room = config.block_size * row
    assert context.nbytes == context_bytes(config, length, torch.float32) + room
    state = drafter.state_dict()
    owned = sum(tensor.numel() for tensor in state.values())
    assert parameters(config) == owned
    head = config.vocab_size * (config.hidden_size - config.markov_rank)  # LM head for w1
    assert weight_bytes(config, torch.float32).total == 4 * (owned + head)


def test_a_kda_context_does_not_grow() -> None:
    config = replace(
        FULL, backbone="kda", num_key_value_heads=6, kda=KDAShape(conv_size=4, gate_rank=8)
    )
    # Per layer: 6 heads x 8 x 8 in float32, and three rows of q, k and v.
    expected = 2 * (6 * 8 * 8 * 4 + 3 * 3 * 48 * 2)
    assert context_bytes(config, 10, BF16) == expected
    assert context_bytes(config, 1_000_000, BF16) == expected
    context = make_drafter(config).new_context(1, 50)
    assert context.nbytes == context_bytes(config, 50, torch.float32)
