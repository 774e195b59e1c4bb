"""The how-tos of docs/extend, run: each adds a part from outside, and what comes out is right."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dspark import SamplingParams, SpeculativeDecoder
from dspark.distill.config import load_config
from dspark.distill.run import run_distill
from dspark.draft import DraftConfig
from dspark.draft.checkpoint import load_drafter, save_drafter
from dspark.draft.cost import context_bytes
from dspark.draft.kinds import BackboneKind, register_backbone
from dspark.runtime.plain import plain_generate
from dspark.runtime.policies import plan_block
from dspark.runtime.records import Proposal
from dspark.taps import TapSet
from tests.tiny_drafters import draft, make_drafter, train_blocks

GREEDY = SamplingParams()
SHAPE = DraftConfig(
    hidden_size=24,
    num_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=12,
    intermediate_size=40,
    vocab_size=50,
    num_target_layers=4,
    target_layer_ids=(1, 2),
    target_tap_kind="residual",
    mask_token_id=0,
    block_size=5,
    markov_rank=8,
)


def example(repo: Path, name: str) -> ModuleType:
    """A module of docs/extend, run as a user's own file would be."""
    spec = importlib.util.spec_from_file_location(name, repo / "docs" / "extend" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["mean_backbone", "gru_target", "doubt_policy", "dice_suite"])
def test_examples_are_short(repo: Path, name: str) -> None:
    assert len((repo / "docs" / "extend" / f"{name}.py").read_text().splitlines()) < 100


@pytest.fixture
def mean(repo: Path) -> DraftConfig:
    example(repo, "mean_backbone")
    return replace(SHAPE, backbone="mean")


def test_a_registered_backbone_drafts_what_it_trains(mean: DraftConfig) -> None:
    """One training pass against drafting with a context that came in ragged pieces."""
    drafter = make_drafter(mean)
    features = torch.randn(2, 9, 2 * mean.hidden_size)
    embeds = torch.randn(2, 1, mean.block_size, mean.hidden_size)
    for at in ([4, 7], [0, 9]):
        trained = train_blocks(drafter, features, embeds, [[p] for p in at])[:, 0]
        context = drafter.new_context(2, 16)
        first = torch.tensor([min(3, at[0]), min(5, at[1])])
        drafter.extend(context, features, first)
        rest = torch.tensor(at) - first
        later = torch.zeros(2, 9, features.shape[-1])
        for row, (start, count) in enumerate(zip(first.tolist(), rest.tolist(), strict=True)):
            later[row, :count] = features[row, start : start + count]
        drafter.extend(context, later, rest)
        torch.testing.assert_close(
            drafter.block_hidden(embeds[:, 0], context), trained, rtol=1e-5, atol=1e-5
        )


def test_a_registered_backbone_is_saved_and_opened(mean: DraftConfig, tmp_path: Path) -> None:
    drafter = make_drafter(mean)
    save_drafter(tmp_path / "drafter", drafter)
    again = load_drafter(tmp_path / "drafter")
    features, embeds = torch.randn(1, 6, 2 * mean.hidden_size), torch.randn(1, 5, mean.hidden_size)
    assert again.config.backbone == "mean"
    torch.testing.assert_close(draft(again, features, embeds), draft(drafter, features, embeds))
    assert context_bytes(mean, 1_000_000, torch.bfloat16) == 4 * mean.hidden_size


def test_a_registered_backbone_is_distilled_and_lossless(mean: DraftConfig, tmp_path: Path) -> None:
    config = load_config(
        overrides={
            "drafter.backbone": "mean",
            "data.max_prompts": 8,
            "data.max_new_tokens": 24,
            "train.max_steps": 2,
            "train.rows_per_step": 2,
            "train.micro_rows": 2,
            "train.anchors": 4,
            "data.held_out": 2,
            "eval.prompts": 1,
            "out.dir": str(tmp_path / "run"),
        }
    )
    folder = run_distill(config)
    from dspark import load_target

    nano = load_target("nano")
    drafter = load_drafter(folder, nano.target)
    prompt = nano.tokenizer("Sam has 3 pens. How many pens?").input_ids
    given = {"max_new_tokens": 20, "sampling": GREEDY}
    spoken = SpeculativeDecoder(nano.target, drafter).generate(prompt, **given)
    assert spoken.tokens == plain_generate(nano.target, prompt, **given).tokens


def test_what_nobody_registered_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="backbone: 'unheard' is unknown, expected one of attent"):
        replace(SHAPE, backbone="unheard")


@pytest.mark.parametrize("name", ["kda", "Mean", "a-b"])
def test_names_that_cannot_be_registered(name: str) -> None:
    kind = BackboneKind(lambda config: torch.nn.ModuleList(), lambda *_: None, lambda *_: 0)
    with pytest.raises(ValueError, match=name):
        register_backbone(name, kind)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_of_ones_own(repo: Path, temperature: float) -> None:
    """Greedy: plain argmax over the model. Drawn: replayed with plain decoding's law elsewhere."""
    gru = example(repo, "gru_target")
    torch.manual_seed(3)
    model = gru.GRUModel(50, 24, 4)
    torch.nn.init.normal_(model.embed.weight, std=1.5)
    target = gru.GRUTarget(model, end_token_ids=[1])
    drafter = make_drafter(SHAPE)
    prompt = [5, 9, 2]
    sampling = SamplingParams(temperature=temperature)
    answer = SpeculativeDecoder(target, drafter).generate(
        prompt, max_new_tokens=30, sampling=sampling, end_token_ids=[]
    )
    assert len(answer.tokens) == 30
    assert sum(r.emitted for r in answer.rounds) == 29
    if temperature == 0:
        text = list(prompt)
        with torch.inference_mode():
            for _ in range(30):
                text.append(int(target.logits(model(torch.tensor([text]))[-1][0, -1]).argmax()))
        assert answer.tokens == text[3:]


def test_taps_of_a_target_of_ones_own(repo: Path) -> None:
    """Pending rows see what committed ones would have; a rejected row leaves no trace."""
    gru = example(repo, "gru_target")
    torch.manual_seed(0)
    target = gru.GRUTarget(gru.GRUModel(50, 24, 3), end_token_ids=[1])
    taps = TapSet((0, 1), "residual")
    text = torch.tensor([[4, 8, 15, 16, 23, 42]])
    with torch.inference_mode():
        whole = target.forward(text, target.new_cache(1, 8), taps=taps, commit=True)
        cache = target.new_cache(1, 8)
        target.forward(text[:, :2], cache, taps=taps, commit=True)
        target.forward(torch.tensor([[15, 7, 7]]), cache, taps=taps, commit=False)
        cache.commit(1)
        rest = target.forward(text[:, 3:], cache, taps=taps, commit=False)
    assert whole.taps is not None
    assert rest.taps is not None
    torch.testing.assert_close(rest.taps, whole.taps[:, 3:])
    with pytest.raises(ValueError, match="3 rows are pending"):
        cache.commit(4)


def test_a_policy_of_ones_own(repo: Path) -> None:
    """Cuts by hand: 0.1 + 0.2 fits into 0.35, another 0.1 does not; min_draft goes first."""
    doubt = example(repo, "doubt_policy").Doubt
    confidence = torch.tensor([[0.9, 0.8, 0.9, 1.0], [0.2, 0.9, 0.99, 0.99], [1.0, 1.0, 1.0, 0.7]])
    block = Proposal(torch.zeros(3, 4, dtype=torch.int64), None, confidence, confidence)
    assert plan_block(doubt(min_draft=0, budget=0.35), block).lengths.tolist() == [2, 0, 4]
    assert plan_block(doubt(min_draft=1, budget=0.35), block).lengths.tolist() == [2, 1, 4]
    assert plan_block(doubt(max_draft=3, budget=math.inf), block).lengths.tolist() == [3, 3, 3]


def test_a_policy_of_ones_own_is_lossless(repo: Path) -> None:
    doubt = example(repo, "doubt_policy").Doubt
    gru = example(repo, "gru_target")
    torch.manual_seed(4)
    target = gru.GRUTarget(gru.GRUModel(50, 24, 4), end_token_ids=[1])
    given = {"max_new_tokens": 24, "sampling": GREEDY, "end_token_ids": []}
    answer = SpeculativeDecoder(target, make_drafter(SHAPE)).generate(
        [3, 4], policy=doubt(min_draft=1, budget=0.6), **given
    )
    assert answer.tokens == plain_generate(target, [3, 4], **given).tokens
    lengths = {r.verified for r in answer.rounds}
    assert len(lengths) > 1, "a rule that always says the same was not tried"


def test_a_suite_of_ones_own(repo: Path, tmp_path: Path) -> None:
    """The file it writes is one that `dspark eval --suite` reads, each question with its answer."""
    written = tmp_path / "dice.jsonl"
    subprocess.run(
        [sys.executable, str(repo / "docs" / "extend" / "dice_suite.py"), str(written)],
        check=True,
    )
    from dspark_eval.suites import load_suites

    (suite,) = load_suites(written, n_prompts=20, seed=0)
    assert (suite.name, suite.available, len(suite.rows)) == ("dice", 200, 20)
    for row in suite.rows:
        count = int(str(row.messages[0]["content"]).split()[2])
        assert 1 <= count <= 9
        assert row.metadata["answer"] == str(3.5 * count)
