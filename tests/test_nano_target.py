"""The shipped weights: every feature of K3 switched on and in use, few parameters, right answers.

Rates are measured on held-out problems (numbers no family showed in training) and compared through
the Wilson interval: what is asserted is what the measurement supports, not what it happened to be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from dspark.assets import assets_root, verify
from dspark.k3.checkpoint import load_k3
from dspark.k3.config import K3Config
from dspark.k3.model import K3ForCausalLM
from dspark.nano.chat import END_OF_MESSAGE
from dspark.nano.corpus import load_tokenizer
from dspark.nano.evaluate import answer_problems, evaluate, held_out, summarise
from dspark.runtime.loading import load_target
from dspark.runtime.sampling import SamplingParams

DATA = Path(__file__).resolve().parent.parent / "data"
NANO = DATA / "k3-nano"
PUBLISHED = json.loads((NANO / "config.json").read_text("utf-8"))
CONFIG = K3Config.from_dict(PUBLISHED)
MLA = (3, 7, 8)
KDA = (0, 1, 2, 4, 5, 6)


@pytest.fixture(scope="module")
def stored() -> dict[str, tuple[str, list[int]]]:
    """Name without the text prefix -> (dtype, shape) of every tensor in the file."""
    with safe_open(NANO / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
            name.removeprefix("language_model."): (s.get_dtype(), s.get_shape())
            for name, s in slices.items()
        }


# -- configuration and file ------------------------------------------------------------------------


def test_every_k3_feature_is_on() -> None:
    text = PUBLISHED["text_config"]
    linear = text["linear_attn_config"]
    assert PUBLISHED["model_type"] == "kimi_k3"
    # KDA: bounded gate, full-rank output gate, short convolution; three to one MLA, two MLA last
    assert linear["gate_lower_bound"] == -5.0
    assert linear["use_full_rank_gate"] is True
    assert linear["short_conv_kernel_size"] == 4
    assert linear["kda_layers"] == [i + 1 for i in KDA]
    assert linear["full_attn_layers"] == [i + 1 for i in MLA]
    # MLA: low-rank queries, no rotation although a shared key part exists, gated output
    assert text["mla_use_nope"] is True
    assert text["mla_use_output_gate"] is True
    assert text["q_lora_rank"] > 0
    assert text["qk_rope_head_dim"] > 0
    # LatentMoE: narrower than the model, normed, sigmoid router with bias, shared experts
    assert 0 < text["routed_expert_hidden_size"] < text["hidden_size"]
    assert text["latent_moe_use_norm"] is True
    assert text["num_shared_experts"] == 2
    assert 1 < text["num_experts_per_token"] < text["num_experts"]
    assert text["moe_router_activation_func"] == "sigmoid"
    assert text["topk_method"] == "noaux_tc"
    assert text["first_k_dense_replace"] == 1
    # SiTU, Attention Residuals over several blocks, separate head
    assert text["hidden_act"] == "situ"
    assert (text["activation_situ_beta"], text["activation_situ_linear_beta"]) == (4.0, 25.0)
    assert text["num_hidden_layers"] // text["attn_res_block_size"] == 3
    assert PUBLISHED["tie_word_embeddings"] is text["tie_word_embeddings"] is False


def test_the_end_token_is_end_of_message() -> None:
    tokenizer = load_tokenizer()
    end = tokenizer.convert_tokens_to_ids(END_OF_MESSAGE)
    assert PUBLISHED["eos_token_id"] == PUBLISHED["text_config"]["eos_token_id"] == end
    assert load_target("nano").target.end_token_ids == (end,)


def test_size(stored: dict[str, tuple[str, list[int]]]) -> None:
    # A_log is padded on disk: 128 numbers for 6 heads.
    padding = sum(128 - CONFIG.kda_num_heads for name in stored if name.endswith("A_log"))
    parameters = sum(math.prod(shape) for _, shape in stored.values()) - padding
    assert parameters == sum(p.numel() for p in load_k3(NANO).state_dict().values())
    assert parameters <= 5_000_000
    assert CONFIG.vocab_size == len(load_tokenizer()) <= 4096


def test_bfloat16_except_what_k3_stores_in_float32(
    stored: dict[str, tuple[str, list[int]]],
) -> None:
    """Convolutions, decay parameters, KDA's output norm and the router bias; nothing else."""
    expected = {
        f"model.layers.{layer}.self_attn.{name}"
        for layer in KDA
        for name in ("A_log", "dt_bias", "o_norm.weight", *(f"{x}_conv1d.weight" for x in "qkv"))
    } | {
        f"model.layers.{layer}.block_sparse_moe.gate.e_score_correction_bias"
        for layer in range(1, CONFIG.num_hidden_layers)
    }
    assert {name for name, (dtype, _) in stored.items() if dtype == "F32"} == expected
    assert {dtype for dtype, _ in stored.values()} == {"F32", "BF16"}


def test_what_ships_is_what_the_manifest_and_the_readme_say() -> None:
    report = verify()
    assert report.ok, report
    readme = (DATA / "README.md").read_text("utf-8")
    files = json.loads((assets_root() / "manifest.json").read_text("utf-8"))["files"]
    for entry in files:
        row = f"| `{entry['path']}` | {entry['bytes']:,} | `{entry['sha256']}` |"
        assert row in readme, entry["path"]
    assert report.total_bytes <= 12 * 10**6


# -- features in use -------------------------------------------------------------------------------

Edit = Callable[[str, Tensor], Tensor]


def _zero(suffix: str, layers: tuple[int, ...] = (*KDA, *MLA)) -> Edit:
    def edit(name: str, value: Tensor) -> Tensor:
        if not name.endswith(suffix):
            return value
        place = name.split(".")
        return value * 0 if place[1] != "layers" or int(place[2]) in layers else value

    return edit


@pytest.fixture(scope="module")
def trained() -> K3ForCausalLM:
    return load_k3(NANO).eval()


@pytest.fixture(scope="module")
def solved() -> tuple[Tensor, Tensor]:
    """16 held-out chats [16, T], right-padded, and which tokens the assistant wrote."""
    tokenizer = load_tokenizer()
    chats = [
        [{"role": "user", "content": p.question}, {"role": "assistant", "content": p.solution}]
        for p in held_out(16)
    ]

    def encode(rows: list[Any], prompt: bool) -> list[list[int]]:
        texts = tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=prompt)
        return tokenizer(texts, add_special_tokens=False)["input_ids"]

    rows, prompts = encode(chats, False), encode([chat[:1] for chat in chats], True)
    tokens = torch.full((len(rows), max(map(len, rows))), tokenizer.pad_token_id)
    written = torch.zeros(tokens.shape, dtype=torch.bool)
    for i, (ids, prompt) in enumerate(zip(rows, prompts, strict=True)):
        tokens[i, : len(ids)] = torch.tensor(ids)
        written[i, len(prompt) : len(ids)] = True
    return tokens, written


@pytest.fixture(scope="module")
def loss(trained: K3ForCausalLM, solved: tuple[Tensor, Tensor]) -> float:
    """Of the shipped weights as they are."""
    return _loss(trained, solved)


@torch.inference_mode()
def _loss(model: K3ForCausalLM, solved: tuple[Tensor, Tensor]) -> float:
    """Mean nats per token of the written solutions."""
    tokens, written = solved
    logits = model.lm_head(model(tokens[:, :-1])[0])
    return F.cross_entropy(logits[written[:, 1:]], tokens[:, 1:][written[:, 1:]]).item()


def _changed(model: K3ForCausalLM, edit: Edit | None, **changes: Any) -> K3ForCausalLM:
    other = K3ForCausalLM(replace(model.config, **changes)).eval()
    weights = {name: edit(name, v) if edit else v for name, v in model.state_dict().items()}
    wanted = other.state_dict().keys()
    other.load_state_dict({name: v for name, v in weights.items() if name in wanted})
    return other


ABLATIONS: dict[str, tuple[Edit | None, dict[str, Any]]] = {
    "gate without lower bound": (None, {"kda_gate_lower_bound": None}),
    "KDA output gate constant": (_zero("self_attn.g_proj.weight", KDA), {}),
    "MLA output gate constant": (_zero("self_attn.g_proj.weight", MLA), {}),
    "last two MLA layers silent": (_zero("self_attn.o_proj.weight", (7, 8)), {}),
    "no norm in the latent space": (None, {"latent_moe_norm": False}),
    "shared experts silent": (_zero("shared_experts.down_proj.weight"), {}),
    "routed experts silent": (_zero("routed_expert_up_proj.weight"), {}),
    "router without a choice": (_zero("block_sparse_moe.gate.weight"), {}),
    "ordinary residual stream": (None, {"attn_res_block_size": None}),
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_feature_is_in_use(
    trained: K3ForCausalLM, solved: tuple[Tensor, Tensor], loss: float, name: str
) -> None:
    """Switching one off costs at least a tenth of the loss: none is a flag without effect."""
    edit, changes = ABLATIONS[name]
    assert _loss(_changed(trained, edit, **changes), solved) > 1.1 * loss


def test_head_and_activation_are_their_own(
    trained: K3ForCausalLM, solved: tuple[Tensor, Tensor]
) -> None:
    """The head is no copy of the embedding. SiTU is SiLU for small inputs, and most are here, so
    its effect is asked for in the logits, not in the loss."""
    embedding = trained.model.embed_tokens.weight
    tied = _changed(trained, lambda name, v: embedding if name == "lm_head.weight" else v)
    assert _loss(tied, solved) > 1.0
    tokens = solved[0][:2]
    with torch.inference_mode():
        situ, silu = (
            model.lm_head(model(tokens)[0])
            for model in (trained, _changed(trained, None, hidden_act="silu"))
        )
    assert (situ - silu).abs().max() > 0.05


# -- answers ---------------------------------------------------------------------------------------


def test_solves_held_out_problems() -> None:
    """40 problems: 28 right is 70 %. The shipped weights solve all (see data/README.md)."""
    loaded = load_target("nano", dtype=torch.float32)
    answers = answer_problems(loaded, held_out(40), SamplingParams())
    result = summarise(answers, loaded.tokenizer)
    assert result["exact"]["rate"] >= 0.7, result["wrong"]
    assert result["ended_share"] == 1.0


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a minute of work; the machine may be shared
def test_exact_rate_of_500_held_out_problems() -> None:
    result = evaluate("nano", problems=500, temperature=0.0)
    assert result["exact"]["ci95"][0] >= 0.85
    assert result["ended_share"] >= 0.99
    assert result["loop_share"] == 0.0


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a minute of work; the machine may be shared
def test_not_degenerate_at_temperature_1() -> None:
    """Sampled text still ends, still solves, and repeats itself no more than solutions do."""
    result = evaluate("nano", problems=500, temperature=1.0)
    assert result["exact"]["ci95"][0] >= 0.85
    assert result["ended_share"] >= 0.99
    assert result["loop_share"] <= 0.01
    own, solutions = (result[f"repeated_4gram_share{of}"] for of in ("", "_of_solutions"))
    assert abs(own - solutions) < 0.02


@pytest.mark.parametrize("temperature", [0, 1])
def test_recorded_results_belong_to_the_shipped_weights(temperature: int, repo: Path) -> None:
    path = repo / "eval" / "results" / f"nano-target-t{temperature}.json"
    result = json.loads(path.read_text("utf-8"))
    listed = json.loads((DATA / "manifest.json").read_text("utf-8"))["files"]
    digests = {entry["path"]: entry["sha256"] for entry in listed}
    assert result["weights_sha256"] == digests["k3-nano/model.safetensors"]
    assert result["temperature"] == temperature
    assert result["exact"]["total"] == 500
    exact = result["exact"]["correct"]
    assert sum(family["correct"] for family in result["families"].values()) == exact
    assert f"{exact} / 500" in (DATA / "README.md").read_text("utf-8")
