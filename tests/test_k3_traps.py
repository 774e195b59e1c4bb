"""The fourteen ways to get Kimi K3 silently wrong, one test each.

Every test states the right formula in plain torch and, beside it, what falling into the trap would
give: the two must differ by far more than the limit, or the test would prove nothing. All of these
mistakes keep shapes, so only values can tell. Float32, limits 1e-5 relative.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer

from dspark.assets import asset
from dspark.draft.config_file import config_from_dict
from dspark.draft.shapes import Yarn
from dspark.errors import UserError
from dspark.files import read_json
from dspark.k3.checkpoint import load_k3, save_k3
from dspark.k3.config import K3Config
from dspark.k3.kda import KDA
from dspark.k3.mla import MLA
from dspark.k3.model import K3ForCausalLM
from dspark.k3.moe import LatentMoE
from dspark.k3.mxfp4 import dequantise
from dspark.taps import TapSet
from dspark_kernels import kda as kernel
from tests.k3_tiny import PLAIN, TINY, tiny_model, tiny_tokens
from tests.tolerance import assert_close, errors

LIMIT = 1e-5


def assert_trap_shows(wrong: Tensor, right: Tensor, by: float = 1e-2) -> None:
    """Falling into the trap must cost at least ``by``, a thousand times the limit."""
    assert errors(wrong, right).rms > by


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def read(
    prefix: Tensor | None, bank: list[Tensor], w_norm: Tensor, w_query: Tensor, values: str
) -> Tensor:
    """One Attention Residuals read by its formula; ``values="normed"`` is the wrong one."""
    entries = torch.stack([*bank, *([] if prefix is None else [prefix])], dim=-2)
    if not bank:
        return entries[..., 0, :]
    keys = norm(entries, w_norm, 1e-5)
    weights = (keys @ w_query.view(-1)).softmax(-1).unsqueeze(-1)
    return (weights * (entries if values == "raw" else keys)).sum(-2)


def decode(
    model: K3ForCausalLM, tokens: Tensor, *, resets: bool = True, values: str = "raw"
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The decoder's skeleton written out: final state, raw prefixes, mixtures, by layer."""
    core, size = model.model, model.config.attn_res_block_size
    prefix, bank = core.embed_tokens(tokens), []
    raw, mixtures = [], []
    for i, layer in enumerate(core.layers):
        attend = (layer.self_attention_res_norm.weight, layer.self_attention_res_proj.weight)
        h = read(prefix, bank, *attend, values)
        mixtures.append(h)
        if i % size == 0:
            bank.append(prefix)
            prefix = torch.zeros_like(prefix) if resets else prefix
        prefix = prefix + layer.self_attn(layer.input_layernorm(h), None, None)
        h = read(prefix, bank, layer.mlp_res_norm.weight, layer.mlp_res_proj.weight, values)
        prefix = prefix + layer.transform(h)
        raw.append(prefix)
    output = (core.output_attn_res_norm.weight, core.output_attn_res_proj.weight)
    last = read(prefix, bank, *output, values)
    return core.norm(last), raw, [*mixtures[1:], last]


def test_trap_01_tap_kind():
    """Two tensors of one shape compete for "the state after layer k"; the kind picks one."""
    model, tokens = tiny_model(), tiny_tokens(2, 12)
    _, raw, mixture = decode(model, tokens)
    layers = (0, 2, 3, 6)
    for kind, right, wrong in (
        ("raw_prefix", raw, mixture),
        ("attn_res_mixture", mixture, raw),
    ):
        _, taps = model(tokens, taps=TapSet(layers, kind))
        assert_close(taps, torch.cat([right[i] for i in layers], dim=-1), limit=LIMIT)
        assert_trap_shows(torch.cat([wrong[i] for i in layers], dim=-1), taps, by=0.3)
    with pytest.raises(ValueError, match="no residual taps"):
        model(tokens, taps=TapSet(layers, "residual"))
    with pytest.raises(ValueError, match="no raw_prefix taps"):
        tiny_model(PLAIN)(tokens, taps=TapSet(layers, "raw_prefix"))


def mla_by_hand(layer: MLA, x: Tensor, eps: float) -> Tensor:
    """Expanded gated NoPE attention; ``eps`` of the two low-rank norms."""
    H, n, p, v = layer.heads, TINY.qk_nope_head_dim, TINY.qk_rope_head_dim, TINY.v_head_dim
    B, T, _ = x.shape
    q = layer.q_b_proj(norm(layer.q_a_proj(x), layer.q_a_layernorm.weight, eps))
    c, k_p = layer.kv_a_proj_with_mqa(x).split((TINY.kv_lora_rank, p), dim=-1)
    kv = layer.kv_b_proj(norm(c, layer.kv_a_layernorm.weight, eps)).view(B, T, H, n + v)
    k = torch.cat((kv[..., :n], k_p.unsqueeze(2).expand(B, T, H, p)), dim=-1)
    scores = torch.einsum("bthx,bshx->bhts", q.view(B, T, H, n + p), k) * (n + p) ** -0.5
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
    out = torch.einsum("bhts,bshx->bthx", scores.softmax(-1), kv[..., n:]).reshape(B, T, H * v)
    return layer.o_proj(out * layer.g_proj(x).sigmoid())


def test_trap_02_low_rank_norms_have_their_own_eps():
    """q_a and kv_a norms keep 1e-6 although rms_norm_eps is 1e-5; seen on small activations."""
    layer = tiny_model().model.layers[2].self_attn
    x = torch.randn(1, 9, TINY.hidden_size)
    layer.q_a_proj.weight.mul_(1e-3)
    layer.kv_a_proj_with_mqa.weight[: TINY.kv_lora_rank].mul_(1e-3)
    right = mla_by_hand(layer, x, 1e-6)
    assert_close(layer(x, None, None), right, limit=LIMIT)
    assert_trap_shows(mla_by_hand(layer, x, TINY.rms_norm_eps), right)


def test_trap_03_the_prefix_starts_again_at_each_block():
    model, tokens = tiny_model(), tiny_tokens(2, 12)
    hidden, raw, _ = decode(model, tokens)
    assert_close(model(tokens)[0], hidden, limit=LIMIT)
    wrong, running, _ = decode(model, tokens, resets=False)
    assert_trap_shows(wrong, hidden, by=0.1)
    assert_trap_shows(running[3], raw[3], by=0.1)
    # an off-by-one boundary is another wrong place to start again
    shifted = replace(TINY, attn_res_block_size=4)
    other = K3ForCausalLM(shifted).eval().requires_grad_(False)
    other.load_state_dict(model.state_dict())
    assert_trap_shows(other(tokens)[0], hidden, by=0.1)


def test_trap_04_attention_residuals_mix_raw_values_by_normed_keys():
    model, tokens = tiny_model(), tiny_tokens(2, 12)
    hidden, _, _ = decode(model, tokens)
    assert_close(model(tokens)[0], hidden, limit=LIMIT)
    wrong, _, _ = decode(model, tokens, values="normed")
    assert_trap_shows(wrong, hidden, by=0.1)


def delta(q: float, k: float, v: float, g: float, beta: float, s: float, order: str) -> float:
    """The rule on a 1 x 1 state; ``order`` other than "decay first" is wrong."""
    decayed = s * float(torch.tensor(g).exp())
    match order:
        case "decay first":
            return q * (decayed + beta * k * (v - decayed * k))
        case "delta with the undecayed state":
            return q * (decayed + beta * k * (v - s * k))
        case "read before the update":
            return q * decayed
        case _:
            return q * (s + beta * k * (v - s * k)) * float(torch.tensor(g).exp())


def test_trap_05_decay_then_delta_then_read_and_the_scale_of_q():
    numbers = (0.7, -1.3, 2.0, -0.8, 0.6, 1.5)
    q, k, v, g, beta, s = (torch.tensor(x, dtype=torch.float64) for x in numbers)
    row = [x.view(1, 1, 1, 1) for x in (q, k, v, g)]
    right = delta(*numbers, "decay first")
    for form in (
        kernel.recurrent(*row, beta.view(1, 1, 1), s.view(1, 1, 1, 1)),
        kernel.chunk(*row, beta.view(1, 1, 1), s.view(1, 1, 1, 1)),
        kernel.step(*row, beta.view(1, 1, 1), s.view(1, 1, 1, 1), 1),
    ):
        assert form[0].item() == pytest.approx(right, rel=1e-6)
    for wrong in ("delta with the undecayed state", "read before the update", "decay last"):
        assert abs(delta(*numbers, wrong) - right) > 0.1

    # one row: o = beta (q.k) v with unit q, k and q scaled after it became a unit vector
    layer: KDA = tiny_model().model.layers[0].self_attn
    seen: list[Tensor] = []
    layer.o_norm.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    x = torch.randn(1, 1, TINY.hidden_size)
    layer(x, None, None)
    H, K = TINY.kda_num_heads, TINY.kda_head_dim
    last_tap = {name: getattr(layer, f"{name}_conv1d").weight[:, 0, -1] for name in "qkv"}
    q, k, v = (
        F.silu(getattr(layer, f"{name}_proj")(x[0, 0]) * last_tap[name]).view(H, K)
        for name in "qkv"
    )
    q, k = (u / (u.square().sum(-1, keepdim=True) + 1e-6).sqrt() for u in (q, k))
    beta = layer.b_proj(x[0, 0]).sigmoid().unsqueeze(-1)
    unscaled = beta * (q * k).sum(-1, keepdim=True) * v
    assert_close(seen[0][0, 0], unscaled * K**-0.5, limit=LIMIT)
    assert_trap_shows(unscaled, unscaled * K**-0.5)  # scaling before the norm cancels out


def test_trap_06_a_log_is_stored_padded_to_128(tmp_path: Path):
    """The first entries are the heads; whatever stands behind them is never read."""
    model = tiny_model()
    save_k3(tmp_path, model, experts="plain", dtype=torch.float32)
    stored = load_file(tmp_path / "model.safetensors")
    padded = [name for name in stored if name.endswith("A_log")]
    for name in padded:
        assert stored[name].shape == (128,)
        stored[name][TINY.kda_num_heads :] = 1e6
    save_file(stored, tmp_path / "model.safetensors")
    loaded, tokens = load_k3(tmp_path), tiny_tokens(1, 9)
    assert torch.equal(loaded(tokens)[0], model(tokens)[0])
    for layer in loaded.model.layers:
        if isinstance(layer.self_attn, KDA):
            assert layer.self_attn.A_log.shape == (TINY.kda_num_heads,)
    for name in padded:  # a size that is neither the heads nor the padding
        stored[name] = stored[name][:100].clone()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"A_log: shape \[100\]"):
        load_k3(tmp_path)


def published() -> dict[str, Any]:
    """The text part of the released config.json, quantization apart."""
    full = [*range(4, 93, 4), 93]
    linear = {
        "num_heads": 96,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
        "full_attn_layers": full,
        "kda_layers": [i for i in range(1, 94) if i not in full],
    }
    text = {
        "model_type": "kimi_linear",
        "vocab_size": 163840,
        "hidden_size": 7168,
        "num_hidden_layers": 93,
        "intermediate_size": 33792,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "max_position_embeddings": 1048576,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 12,
        "rms_norm_eps": 1e-5,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "linear_attn_config": linear,
    }
    top = {"bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839}
    return {"model_type": "kimi_k3", **top, "tie_word_embeddings": False, "text_config": text}


def test_trap_07_layer_lists_are_one_based_and_the_last_two_layers_are_mla():
    config = K3Config.from_dict(published())
    assert config.full_attention_layers == (*range(3, 92, 4), 92)
    with torch.device("meta"):
        model = K3ForCausalLM(config)
    kinds = [isinstance(layer.self_attn, MLA) for layer in model.model.layers]
    assert sum(kinds) == 24
    assert kinds[91] and kinds[92] and not kinds[90] and not kinds[4]  # noqa: PT018
    # the release has 2,779,484,478,208 text parameters, 32 per KDA layer of them padding of A_log
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count + 69 * (128 - 96) == 2_779_484_478_208
    zero_based = published()
    lists = zero_based["text_config"]["linear_attn_config"]
    for key in ("full_attn_layers", "kda_layers"):
        lists[key] = [i - 1 for i in lists[key]]
    with pytest.raises(UserError, match="1-based"):
        K3Config.from_dict(zero_based)


def moe_by_hand(
    moe: LatentMoE, x: Tensor, *, weigh_with_bias: bool = False, normed: str = "sum"
) -> Tensor:
    """LatentMoE token by token, with SiTU written out; the defaults are the right formula."""

    def situ(gate: Tensor, up: Tensor) -> Tensor:
        bounded = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate)
        return bounded * 25 * torch.tanh(up / 25)

    scores = (x @ moe.gate.weight.T).sigmoid()
    biased = scores + moe.gate.e_score_correction_bias
    out = torch.empty_like(x)
    w_norm = moe.routed_expert_norm.weight
    for t, row in enumerate(x):
        chosen = biased[t].topk(TINY.num_experts_per_token).indices
        weights = (biased if weigh_with_bias else scores)[t, chosen]
        weights = weights / weights.sum() * TINY.routed_scaling_factor
        z = moe.routed_expert_down_proj(row)
        experts = moe.experts
        each = [experts.w2[e] @ situ(experts.w1[e] @ z, experts.w3[e] @ z) for e in chosen]
        if normed == "each expert":
            each = [norm(y, w_norm, 1e-5) for y in each]
        y = sum(w * y for w, y in zip(weights, each, strict=True))
        if normed == "sum":
            y = norm(y, w_norm, 1e-5)
        shared = moe.shared_experts
        s = shared.down_proj(situ(shared.gate_proj(row), shared.up_proj(row)))
        out[t] = moe.routed_expert_up_proj(y) + s
    return out


def test_trap_08_the_correction_bias_chooses_and_does_not_weigh():
    moe: LatentMoE = tiny_model().model.layers[1].block_sparse_moe
    moe.gate.e_score_correction_bias.copy_(torch.tensor([0.0, 0.9, 0.0, 0.0, -0.9, 0.2]))
    x = torch.randn(20, TINY.hidden_size)
    right = moe_by_hand(moe, x)
    assert_close(moe(x.unsqueeze(0))[0], right, limit=LIMIT)
    assert_trap_shows(moe_by_hand(moe, x, weigh_with_bias=True), right)
    biased = right.clone()
    moe.gate.e_score_correction_bias.zero_()
    assert_trap_shows(moe_by_hand(moe, x), biased)  # and choosing without it is wrong too


@pytest.mark.parametrize("wrong", ["each expert", "nowhere"])
def test_trap_09_the_norm_stands_between_the_expert_sum_and_the_up_projection(wrong: str):
    moe: LatentMoE = tiny_model().model.layers[1].block_sparse_moe
    x = torch.randn(20, TINY.hidden_size)
    right = moe_by_hand(moe, x)
    assert_close(moe(x.unsqueeze(0))[0], right, limit=LIMIT)
    assert_trap_shows(moe_by_hand(moe, x, normed=wrong), right)


def test_trap_10_low_nibble_first_and_a_scale_bias_of_127():
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 0] = 0x72  # low nibble 2 = 1.0, high nibble 7 = 6.0
    w = dequantise(packed, torch.tensor([[126]], dtype=torch.uint8), torch.float32)
    assert w[0, :2].tolist() == [0.5, 3.0]  # high first: [3, 0.5]; bias 128: [0.25, 1.5]


def draft_config(**changes: Any) -> dict[str, Any]:
    """A published GQA drafter for K3: the layout our reader supports, sizes of the release."""
    return {
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        "block_size": 7,
        "hidden_size": 7168,
        "intermediate_size": 14336,
        "num_hidden_layers": 5,
        "num_attention_heads": 64,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": 163840,
        "max_position_embeddings": 65536,
        "num_target_layers": 93,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
        "target_tap_kind": "attn_res_mixture",
        "layer_id_origin": "completed_layer_0_based",
        "rope_theta": 10000.0,
        "dflash_config": {"target_layer_ids": [7, 23, 51, 67, 83], "mask_token_id": 163824},
        **changes,
    }


def test_trap_11_an_mla_drafter_is_not_read_as_another_and_the_target_has_no_rope():
    """Its softmax scale carries mscale squared (`test_rotary.py` holds the number): its config is
    never taken for ours, and one that says its rope twice, differently, is refused."""
    with pytest.raises(ValueError, match="architectures"):
        config_from_dict(draft_config(architectures=["K3DSparkModel"], model_type="k3_dspark"))
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 32768}
    with pytest.raises(ValueError, match="does not agree with rope_theta"):
        config_from_dict(draft_config(rope_parameters={**yarn, "rope_theta": 50000.0}))
    # the target itself never rotates: attention sees a set, so swapping two earlier tokens'
    # inputs leaves a later row as it is
    layer = tiny_model().model.layers[2].self_attn
    x = torch.randn(1, 6, TINY.hidden_size)
    swapped = x[:, [1, 0, 2, 3, 4, 5]]
    assert_close(layer(swapped, None, None)[:, 2:], layer(x, None, None)[:, 2:], limit=LIMIT)
    rotated = published()
    rotated["text_config"]["mla_use_nope"] = False
    with pytest.raises(UserError, match="mla_use_nope"):
        K3Config.from_dict(rotated)


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_trap_12_revisions_of_one_drafter_differ_in_rope(key: str):
    """The older revision has theta 10000 and no scaling, the newer one YaRN: both are read as what
    they say, wherever they say it; `test_rotary.py` holds what that turns."""
    older = config_from_dict(draft_config())
    assert (older.rope_theta, older.yarn) == (10000.0, None)
    scaling = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536}
    raw = draft_config()
    if key == "rope_parameters":
        del raw["rope_theta"]
        scaling["rope_theta"] = 10000.0
    newer = config_from_dict({**raw, key: scaling})
    assert newer.yarn == Yarn(16.0, 65536)
    assert newer.rope_theta == 10000.0


@pytest.mark.parametrize("accepted", [0, 3, 7])
def test_trap_13_the_commit_count_includes_the_anchor(accepted: int):
    """A verify pass reads [anchor, x_1..x_7]. With a drafts accepted, a + 1 rows are committed: the
    state is the one after row a. The bonus token is the next anchor and not in the cache yet."""
    model = tiny_model()
    prompt, block = tiny_tokens(1, 9), tiny_tokens(1, 8, seed=5)

    def next_hidden(count: int) -> Tensor:
        held = model.new_cache(1, 32)
        model(prompt, held)
        model(block, held, commit=False)
        held.commit(count)
        return model(torch.tensor([[7]]), held)[0]

    text = torch.cat((prompt, block[:, : accepted + 1], torch.tensor([[7]])), dim=1)
    right = model(text)[0][:, -1:]
    assert_close(next_hidden(accepted + 1), right, limit=LIMIT)
    assert_trap_shows(next_hidden(accepted), right)


def test_trap_14_chats_end_with_end_of_msg_and_not_with_eos():
    assert K3Config.from_dict(published()).eos_token_id == 163586
    folder = asset("k3-nano")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|end_of_msg|>")
    assert tokenizer.eos_token_id == end
    assert tokenizer.convert_tokens_to_ids("[EOS]") not in (end, tokenizer.unk_token_id)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
        tokenize=True,
        return_dict=False,
    )
    assert ids[-1] == end


def test_trap_14_the_shipped_configuration_stops_there_too():
    folder = asset("k3-nano")
    config = K3Config.from_dict(read_json(folder / "config.json"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert config.eos_token_id == tokenizer.convert_tokens_to_ids("<|end_of_msg|>")
