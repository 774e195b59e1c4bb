"""The whole decoder, layer by layer and end to end, against code written by other people.

NeMo runs all of K3 and reads our checkpoint; transformers runs Kimi-Linear and reads our
checkpoint; its Ling (bailing_hybrid) and GLM models have K3's KDA layer and gate; fla's naive file
has the recurrence. Everything in float32; limits are absolute on values of order one to five.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dspark.k3.checkpoint import save_k3
from dspark.k3.config import K3Config
from dspark.k3.kda import KDA
from dspark.k3.model import K3ForCausalLM
from dspark.taps import TapSet
from dspark_kernels import kda as kernel
from tests import k3_nemo
from tests.k3_tiny import PLAIN, TINY, tiny_model, tiny_tokens
from tests.oracles import fla_naive, require

pytestmark = pytest.mark.oracle

LOGITS = 1e-4
"""Largest accepted absolute error of a logit."""

SHAPES = {
    "every feature": TINY,
    "a block boundary at every layer": replace(TINY, attn_res_block_size=1, num_hidden_layers=7),
    "one block, deeper, many experts": replace(
        TINY,
        num_hidden_layers=9,
        full_attention_layers=(3, 7, 8),
        attn_res_block_size=12,
        num_experts=16,
        num_experts_per_token=5,
        routed_scaling_factor=1.0,
    ),
    "MLA first, weights not renormalised": replace(
        TINY,
        num_hidden_layers=4,
        full_attention_layers=(0, 3),
        attn_res_block_size=2,
        moe_renormalize=False,
        num_shared_experts=1,
        first_k_dense_replace=2,
    ),
    "low-rank gate, softplus decay, no latent norm": replace(
        TINY,
        kda_full_rank_output_gate=False,
        kda_gate_lower_bound=None,
        q_lora_rank=None,
        mla_output_gate=False,
    ),
}


def saved(folder: Path, config: K3Config, seed: int = 0) -> tuple[K3ForCausalLM, Path]:
    """A tiny random model and its checkpoint in float32, several shards."""
    model = tiny_model(config, seed)
    save_k3(folder, model, experts="plain", dtype=torch.float32, shard_bytes=300_000)
    return model, folder


def worst(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_nemo_gives_the_same_hidden_states_and_logits(tmp_path: Path, config: K3Config):
    model, folder = saved(tmp_path, config)
    nemo = k3_nemo.from_checkpoint(folder)
    tokens = tiny_tokens(2, 70)  # several chunks of the recurrence, the last one ragged
    hidden, logits = k3_nemo.hidden_and_logits(nemo, tokens)
    assert logits.std() > 0.5  # a limit on logits means nothing on a dead model
    ours, _ = model(tokens)
    assert worst(ours, hidden) < LOGITS
    assert worst(model.lm_head(ours), logits) < LOGITS
    cached, _ = model(tokens, model.new_cache(2, 70))
    assert worst(model.lm_head(cached), logits) < LOGITS


@pytest.mark.parametrize("block_size", [1, 3, 12])
def test_taps_are_the_tensors_inside_nemo(tmp_path: Path, block_size: int):
    """raw: what layer k returns; mixture: what layer k + 1 norms (the last: the model's norm)."""
    config = replace(TINY, attn_res_block_size=block_size)
    model, folder = saved(tmp_path, config)
    nemo = k3_nemo.from_checkpoint(folder)
    seen: dict[str, dict[int, Tensor]] = {"raw_prefix": {}, "attn_res_mixture": {}}

    def keep(kind: str, layer: int, tensor: Tensor) -> None:
        seen[kind][layer] = tensor.clone()

    last = config.num_hidden_layers - 1
    for i in range(last + 1):
        layer = nemo.model.layers[str(i)]
        layer.register_forward_hook(lambda m, a, out, i=i: keep("raw_prefix", i, out[0]))
        layer.input_layernorm.register_forward_pre_hook(
            lambda m, a, i=i: keep("attn_res_mixture", i - 1, a[0])
        )
    nemo.model.norm.register_forward_pre_hook(lambda m, a: keep("attn_res_mixture", last, a[0]))
    tokens = tiny_tokens(2, 20)
    k3_nemo.hidden_and_logits(nemo, tokens)
    for kind, expected in seen.items():
        taps = TapSet(tuple(range(last + 1)), kind)
        hidden, joined = model(tokens, taps=taps)
        for i, ours in enumerate(joined.split(config.hidden_size, dim=-1)):
            assert worst(ours, expected[i].view_as(ours)) < LOGITS, (kind, i)
        if kind == "attn_res_mixture":  # known from the head: the last mixture makes the logits
            assert worst(model.model.norm(joined[..., -config.hidden_size :]), hidden) == 0.0


def kimi_linear(folder: Path) -> nn.Module:
    """transformers' Kimi-Linear reading our checkpoint by itself."""
    module = require("transformers.models.kimi_linear.modeling_kimi_linear")
    model, info = module.KimiLinearForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


@torch.no_grad()
def advance(model: nn.Module, tokens: Tensor, cache: object | None) -> tuple[Tensor, object]:
    """One incremental forward; the cache argument was renamed during the 5.x series."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    out = model(tokens, use_cache=True, **{name: cache})
    return out.logits, getattr(out, name)


@pytest.mark.parametrize("q_lora_rank", [None, 20])
def test_transformers_kimi_linear_full_and_incremental(tmp_path: Path, q_lora_rank: int | None):
    model, folder = saved(tmp_path, replace(PLAIN, q_lora_rank=q_lora_rank))
    theirs = kimi_linear(folder)
    tokens = tiny_tokens(2, 75)
    with torch.no_grad():
        full = theirs(tokens).logits
    hidden, _ = model(tokens)
    assert full.std() > 0.5
    assert worst(model.lm_head(hidden), full) < LOGITS

    cache, their_cache, done = model.new_cache(2, 80), None, 0
    for rows in (50, 1, 1, 1, 20, 1, 1):
        piece = tokens[:, done : done + rows]
        expected, their_cache = advance(theirs, piece, their_cache)
        hidden, _ = model(piece, cache)
        assert worst(model.lm_head(hidden), expected) < LOGITS
        assert worst(expected, full[:, done : done + rows]) < LOGITS
        done += rows


def test_bailing_hybrid_has_the_same_kda_layer():
    modeling = require("transformers.models.bailing_hybrid.modeling_bailing_hybrid")
    configuration = require("transformers.models.bailing_hybrid.configuration_bailing_hybrid")
    layer = tiny_model(TINY).model.layers[0].self_attn
    config = configuration.BailingHybridConfig(
        hidden_size=TINY.hidden_size,
        linear_num_heads=TINY.kda_num_heads,
        linear_head_dim=TINY.kda_head_dim,
        linear_conv_kernel_dim=TINY.kda_conv_size,
        kda_safe_gate=True,
        kda_lower_bound=TINY.kda_gate_lower_bound,
        rms_norm_eps=TINY.rms_norm_eps,
    )
    theirs = modeling.BailingHybridDeltaAttention(config, layer_idx=0).requires_grad_(False)
    same = ("q_proj", "k_proj", "v_proj", "b_proj", "g_proj", "o_proj", "o_norm")
    state = {f"{name}.weight": getattr(layer, name).weight for name in same}
    convs = (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)
    state["conv1d.weight"] = torch.cat([conv.weight for conv in convs])
    state["forget_gate.f_proj.weight"] = layer.f_b_proj.weight @ layer.f_a_proj.weight
    state["forget_gate.A_log"], state["forget_gate.dt_bias"] = layer.A_log, layer.dt_bias
    theirs.load_state_dict(state)
    x = torch.randn(2, 70, TINY.hidden_size)
    assert worst(layer(x, None, None), theirs(x)) < 5e-5


@pytest.mark.parametrize("bound", [-5.0, None])
def test_glm5_next_has_the_same_forget_gate(bound: float | None):
    modeling = require("transformers.models.glm5_next.modeling_glm5_next")
    layer: KDA = tiny_model(replace(TINY, kda_gate_lower_bound=bound)).model.layers[0].self_attn

    class Sizes:
        hidden_size, linear_lower_bound = TINY.hidden_size, bound
        linear_head_dim, linear_num_heads = TINY.kda_head_dim, TINY.kda_num_heads

    theirs = modeling.Glm5NextTextForgetGate(Sizes()).requires_grad_(False)
    theirs.load_state_dict({name: layer.state_dict()[name] for name in theirs.state_dict()})
    x = 3 * torch.randn(2, 9, TINY.hidden_size)
    ours = layer._log_decay(layer.f_a_proj(x))
    assert ours.dtype == torch.float32
    if bound is None:  # they write softplus out by hand
        assert worst(ours, theirs(x)) < 1e-5
    else:
        assert torch.equal(ours, theirs(x))


def rows_of_kda(batch: int, rows: int, heads: int, width: int, lowest: float) -> tuple[Tensor, ...]:
    """Unit q and k, v of order one, log-decays down to ``lowest``, beta in (0, 1), a state."""
    q, k = (
        nn.functional.normalize(torch.randn(batch, rows, heads, width), dim=-1) for _ in range(2)
    )
    v = torch.randn(batch, rows, heads, width)
    g = lowest * torch.rand(batch, rows, heads, width)
    beta = torch.rand(batch, rows, heads)
    return q * width**-0.5, k, v, g, beta, torch.randn(batch, heads, width, width)


@pytest.mark.parametrize("lowest", [-0.01, -1.0, -5.0])
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 64, 130])
def test_fla_naive_recurrence_is_ours(rows: int, lowest: float):
    q, k, v, g, beta, state = rows_of_kda(2, rows, 3, 16, lowest)
    out, final = fla_naive().naive_recurrent_kda(
        q, k, v, g, beta, scale=1.0, initial_state=state, output_final_state=True
    )
    forms = {
        "recurrent": kernel.recurrent(q, k, v, g, beta, state),
        "chunk": kernel.chunk(q, k, v, g, beta, state),
        "step": kernel.step(q, k, v, g, beta, state, rows),
    }
    for name, (ours, ours_final) in forms.items():
        assert worst(ours, out) < 5e-6, name
        assert worst(ours_final, final) < 5e-6, name


@pytest.mark.parametrize("keep", [0, 1, 4, 8])
def test_step_keeps_what_fla_has_after_the_kept_rows(keep: int):
    q, k, v, g, beta, state = rows_of_kda(2, 8, 3, 16, -5.0)
    before = state.clone()
    out, final = kernel.step(q, k, v, g, beta, state, keep)
    cut = [x[:, :keep] for x in (q, k, v, g, beta)]
    expected = before
    if keep:
        _, expected = fla_naive().naive_recurrent_kda(
            *cut, scale=1.0, initial_state=before, output_final_state=True
        )
    assert worst(final, expected) < 2e-6
    assert torch.equal(state, before)  # the caller's tensor is not written to
    full, _ = fla_naive().naive_recurrent_kda(q, k, v, g, beta, scale=1.0, initial_state=before)
    assert worst(out, full) < 2e-6


def test_fla_naive_chunk_form_agrees_too():
    q, k, v, g, beta, state = rows_of_kda(2, 64, 3, 16, -1.0)
    out, final = fla_naive().naive_chunk_kda(
        q, k, v, g, beta, scale=1.0, initial_state=state, output_final_state=True, chunk_size=32
    )
    ours, ours_final = kernel.chunk(q, k, v, g, beta, state)
    assert worst(ours, out) < 5e-6
    assert worst(ours_final, final) < 5e-6
