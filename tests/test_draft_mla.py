"""The mla backbone against transformers' DeepSeek-V3 attention and NeMo's Kimi K3 drafter."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

from dspark.draft import DraftConfig, DSparkDrafter, block_inputs
from dspark.draft.mla import DraftMLA
from dspark.draft.shapes import MLAShape
from dspark.draft.sight import block_layout
from tests import oracles
from tests.tiny_drafters import CASES, FULL, MLA, TAP_WIDTH, draft, make_drafter, train_blocks
from tests.tolerance import assert_close, errors

G, D = FULL.block_size, FULL.hidden_size
# Moonshot's and DeepSeek's own code leave 1e-6 at the norms of both latents.
LIKE_DEEPSEEK = replace(MLA, rms_norm_eps=1e-6)


def deepseek_attention(attention: DraftMLA) -> tuple[torch.nn.Module, torch.nn.Module]:
    """transformers' attention with the same weights, and its rotary embedding."""
    shape, yarn = attention.shape, LIKE_DEEPSEEK.yarn
    assert yarn is not None
    rope = {"rope_type": "yarn", "rope_theta": LIKE_DEEPSEEK.rope_theta}
    rope |= {key: value for key, value in vars(yarn).items() if value is not None}
    config = deepseek.DeepseekV3Config(
        hidden_size=D,
        num_attention_heads=attention.heads,
        num_key_value_heads=attention.heads,
        q_lora_rank=shape.q_lora_rank,
        kv_lora_rank=shape.kv_lora_rank,
        qk_nope_head_dim=shape.qk_nope_head_dim,
        qk_rope_head_dim=shape.qk_rope_head_dim,
        v_head_dim=shape.v_head_dim,
        rope_parameters=rope,
        rope_interleave=True,
        attention_bias=False,
        attn_implementation="eager",
    )
    oracle = deepseek.DeepseekV3Attention(config, 0)
    oracle.load_state_dict(attention.state_dict())
    return oracle, deepseek.DeepseekV3RotaryEmbedding(config)


@pytest.mark.parametrize("length", [0, 1, 9, 60])
def test_attention_equals_deepseek_v3_over_context_and_block(length: int) -> None:
    """Interleaved pairs, YaRN frequencies and the squared mscale, at positions from `length` on."""
    attention = make_drafter(LIKE_DEEPSEEK).layers[0].self_attn
    oracle, rotary = deepseek_attention(attention)
    context, block = torch.randn(1, max(length, 1), D), torch.randn(1, G, D)
    valid = torch.ones(1, max(length, 1), dtype=torch.bool)
    layout = block_layout(
        LIKE_DEEPSEEK, valid, torch.tensor([[length]]), anchors_per_group=1, dtype=torch.float32
    )
    sequence = torch.cat((context[:, :length], block), 1)
    positions = torch.arange(length + G)[None]
    everything = torch.zeros(1, 1, length + G, length + G)  # additive: nothing is masked
    with torch.no_grad():
        ours = attention(block, context, layout)
        theirs, _ = oracle(sequence, rotary(sequence, positions), everything)
    assert_close(ours, theirs[:, length:], limit=1e-5)


def test_halves_or_a_lost_mscale_are_seen() -> None:
    """The two faults that served drafters had: both move the output far beyond rounding."""
    drafter = make_drafter(LIKE_DEEPSEEK)
    features, embeds = torch.randn(1, 30, TAP_WIDTH), torch.randn(1, 1, G, D)
    right = train_blocks(drafter, features, embeds, [[29]])
    unscaled = copy.deepcopy(drafter)
    for layer in unscaled.layers:
        layer.self_attn.scale = 20**-0.5
    plain = make_drafter(replace(LIKE_DEEPSEEK, yarn=None))
    halves = copy.deepcopy(drafter)
    for layer in halves.layers:  # pairs (a, a + 4) where (2a, 2a + 1) was meant
        shape, order = layer.self_attn.shape, [0, 2, 4, 6, 1, 3, 5, 7]
        q = layer.self_attn.q_b_proj.weight.data.unflatten(0, (6, -1))
        q[:, shape.qk_nope_head_dim :] = q[:, shape.qk_nope_head_dim :][:, order]
        k = layer.self_attn.kv_a_proj_with_mqa.weight.data
        k[shape.kv_lora_rank :] = k[shape.kv_lora_rank :][order]
    for wrong in (unscaled, plain, halves):
        assert errors(train_blocks(wrong, features, embeds, [[29]]), right).rms > 1e-3


@pytest.mark.oracle
@pytest.mark.parametrize("anchors", [[1, 20, 31], [5, 6, 30]])
def test_hidden_states_equal_nemos_kimi_k3_drafter(anchors: list[int]) -> None:
    """NoPE, output gate and SiTU: what NeMo trains is this backbone with those three switched."""
    nemo = oracles.require("nemo_automodel.components.speculative.dspark.draft_kimi_k3")
    config = replace(CASES["mla-gated-nope"], rms_norm_eps=1e-5)
    drafter = make_drafter(config)
    oracle = nemo.KimiK3DSparkModel(_nemo_config(config)).float().eval()
    missing, unexpected = oracle.load_state_dict(drafter.state_dict(), strict=False)
    assert not unexpected
    assert set(missing) == {"embed_tokens.weight", "lm_head.weight"}
    torch.nn.init.normal_(oracle.embed_tokens.weight)
    features, ids = torch.randn(1, 32, TAP_WIDTH), torch.randint(120, (1, 32))
    embeds = oracle.embed_tokens(block_inputs(ids[:, anchors], G, config.mask_token_id))
    ours = train_blocks(drafter, features, embeds, [anchors])
    for block, anchor in enumerate(anchors):
        with torch.no_grad():
            theirs = oracle._forward_backbone(
                position_ids=torch.arange(anchor + G)[None],
                attention_mask=None,
                noise_embedding=embeds[:, block],
                target_hidden_states=features[:, :anchor],
            )
        assert_close(ours[:, block], theirs, limit=1e-5, what=f"anchor {anchor}")
        drafted = draft(drafter, features[:, :anchor], embeds[:, block])
        assert_close(drafted, theirs, limit=1e-5, what=f"drafting at {anchor}")


def _nemo_config(config: DraftConfig) -> SimpleNamespace:
    """The oracle's configuration object, of which it reads attributes."""
    shape = config.mla
    return SimpleNamespace(
        **{name: getattr(shape, name) for name in (
            "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
        )},
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        rms_norm_eps=config.rms_norm_eps,
        mla_use_nope=True,
        mla_use_output_gate=True,
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        target_layer_ids=list(config.target_layer_ids),
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        num_anchors=8,
        markov_rank=config.markov_rank,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        pad_token_id=0,
    )  # fmt: skip


def test_context_holds_the_latent_and_the_shared_key_alone() -> None:
    drafter = make_drafter(MLA)
    context = drafter.new_context(2, 32)
    rows = 32 + G
    assert context.nbytes == 4 * MLA.num_layers * 2 * rows * (16 + 8)
    drafter.extend(context, torch.randn(2, 7, TAP_WIDTH))
    latent = context.latents[0][0, 0, :7, :16]
    weight = drafter.layers[0].self_attn.kv_a_layernorm.weight
    # Normed: without its weight, every row has a mean square of one.
    assert_close((latent / weight).square().mean(-1), torch.ones(7), limit=1e-4)


def test_names_and_shapes_of_the_published_drafter() -> None:
    """2,387,907,841 parameters besides the embedding copy, in 67 tensors (Kimi-K3-DSpark)."""
    config = replace(
        MLA, hidden_size=7168, num_layers=5, num_attention_heads=64, num_key_value_heads=64,
        intermediate_size=14336, vocab_size=163840, num_target_layers=93, markov_rank=256,
        target_layer_ids=(2, 23, 47, 71, 89), mla=MLAShape(1536, 512, 128, 64, 128),
    )  # fmt: skip
    with torch.device("meta"):
        state = DSparkDrafter(config).state_dict()
    assert sum(tensor.numel() for tensor in state.values()) == 2_387_907_841
    assert len(state) == 67
    expected = {
        "q_a_proj": (1536, 7168), "q_a_layernorm": (1536,), "q_b_proj": (12288, 1536),
        "kv_a_proj_with_mqa": (576, 7168), "kv_a_layernorm": (512,), "kv_b_proj": (16384, 512),
        "o_proj": (7168, 8192),
    }  # fmt: skip
    prefix = "layers.4.self_attn."
    found = {
        name.removeprefix(prefix).removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in state.items()
        if name.startswith(prefix)
    }
    assert found == expected
