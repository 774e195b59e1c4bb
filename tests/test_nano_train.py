"""The recipe behind the shipped weights: schedule, batches, loss, and resume to the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.errors import UserError
from dspark.k3.checkpoint import load_k3
from dspark.nano import train as recipe_module
from dspark.nano.architecture import nano_config
from dspark.nano.corpus import Corpus, load_tokenizer
from dspark.nano.generate import row
from dspark.nano.train import Recipe, Run, batch_rows, loss_of, parameter_groups

TINY = Recipe(steps=6, rows_per_step=4, corpus_rows=40, warmup_steps=2)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """k3-nano with three narrow layers, every feature still on."""

    def narrow(**ids: int) -> Any:
        return replace(
            nano_config(**ids), hidden_size=32, num_hidden_layers=3, full_attention_layers=(2,),
            kda_num_heads=2, kda_head_dim=16, num_attention_heads=2, q_lora_rank=16,
            kv_lora_rank=16, intermediate_size=48, num_experts=4, moe_intermediate_size=32,
            routed_expert_hidden_size=32, attn_res_block_size=2,
        )  # fmt: skip

    monkeypatch.setattr(recipe_module, "nano_config", narrow)


def start(out: Path, recipe: Recipe = TINY, resume: bool = False) -> Run:
    run = Run(recipe, out, torch.device("cpu"))
    if resume:
        run.resume()
    return run


def train(run: Run, stop_after_s: float | None = None) -> bool:
    return run.train(save_every=100, stop_after_s=stop_after_s, compiled=False)


def test_the_rate_rises_to_the_peak_and_falls_to_zero() -> None:
    recipe = Recipe(steps=100, warmup_steps=10, peak_lr=2.0)
    rates = [recipe.lr(step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert max(rates) == rates[9] == rates[10] == 2.0
    assert rates[55] == pytest.approx(1.0)  # half of the cosine
    assert rates[100] == pytest.approx(0.0, abs=1e-12)


def test_an_epoch_shows_every_row_at_most_once_in_a_new_order() -> None:
    recipe = Recipe(rows_per_step=8)
    first = torch.cat([batch_rows(recipe, 43, step) for step in range(5)])
    second = torch.cat([batch_rows(recipe, 43, step) for step in range(5, 10)])
    assert first.unique().numel() == second.unique().numel() == 40
    assert not torch.equal(first, second)
    assert torch.equal(batch_rows(recipe, 43, 7), second[16:24])


def test_the_corpus_is_the_training_split_in_the_chat_template() -> None:
    tokenizer = load_tokenizer()
    corpus = Corpus.build(tokenizer, seed=5, rows=30, length=120)
    texts = [row(5, i, "train").messages for i in range(30)]
    rendered = tokenizer.apply_chat_template(texts, tokenize=False)
    encoded = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    wanted = [ids for ids in encoded if len(ids) <= 121]
    assert len(corpus) == len(wanted)
    for tokens, prompt, ids in zip(corpus.tokens, corpus.prompt_lengths, wanted, strict=True):
        assert tokens[: len(ids)].tolist() == ids
        assert (tokens[len(ids) :] == tokenizer.pad_token_id).all()
        before = tokenizer.decode(ids[: int(prompt)])
        assert before.endswith('<|open|>message role="assistant"<|sep|>')
    assert corpus.mean_length == pytest.approx(sum(map(len, wanted)) / len(wanted))


def test_loss_weighs_the_prompt_less_and_padding_not_at_all(tiny: None, tmp_path: Path) -> None:
    run = start(tmp_path)
    tokens = torch.tensor([[3, 4, 5, 6, 7, run.pad], [9, 8, 7, 6, 5, 4]])
    prompts = torch.tensor([3, 2])
    with torch.no_grad():
        hidden, _ = run.model(tokens[:, :-1])
        logs = run.model.lm_head(hidden).double().log_softmax(-1)
        taken = -logs.gather(-1, tokens[:, 1:, None])[..., 0]
        weights = torch.tensor([[0.1, 0.1, 1, 1, 0], [0.1, 1, 1, 1, 1]], dtype=torch.float64)
        expected = (taken * weights).sum() / weights.sum()
        loss = loss_of(run.model, tokens, prompts, run.pad, 0.1)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_only_matrices_decay(tiny: None, tmp_path: Path) -> None:
    run = start(tmp_path)
    decayed, plain = parameter_groups(run.model, 0.1)
    names = {id(p): name for name, p in run.model.named_parameters()}
    assert all(".weight" in names[id(p)] or ".w" in names[id(p)] for p in decayed["params"])
    kept = {names[id(p)].rsplit(".", 2)[-2] for p in plain["params"]}
    assert {"q_conv1d", "o_norm", "mlp_res_proj", "input_layernorm"} <= kept
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


def test_stopped_and_resumed_ends_in_the_same_weights(tiny: None, tmp_path: Path) -> None:
    straight = start(tmp_path / "straight")
    before = straight.model.lm_head.weight.detach().clone()
    assert train(straight)
    assert not torch.equal(before, straight.model.lm_head.weight)

    broken = start(tmp_path / "broken")
    while not train(broken, stop_after_s=0.0):  # one step, then a state on disk
        broken = start(tmp_path / "broken", resume=True)
    for name, value in straight.model.state_dict().items():
        assert torch.equal(value, broken.model.state_dict()[name]), name


def test_another_recipe_does_not_continue_the_run(tiny: None, tmp_path: Path) -> None:
    train(start(tmp_path), stop_after_s=0.0)
    with pytest.raises(UserError, match="saved with another recipe"):
        start(tmp_path, replace(TINY, peak_lr=1.0), resume=True)


def test_the_export_is_a_checkpoint_with_a_tokenizer(tiny: None, tmp_path: Path) -> None:
    run = start(tmp_path)
    folder = run.export()
    loaded = load_k3(folder, dtype=torch.float32, device="cpu")
    assert loaded.config.num_experts == 4
    assert torch.equal(loaded.lm_head.weight, run.model.lm_head.weight.detach().bfloat16().float())
    assert (folder / "tokenizer.json").is_file()
