"""`dspark prune`, from a trained drafter to a recovered one: folders, reports, refusals."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dspark.distill import prune as prune_module
from dspark.distill.config import load_config
from dspark.distill.presets import preset_overrides
from dspark.distill.prune import run_prune
from dspark.distill.prune_options import PruneOptions
from dspark.distill.prune_report import summary
from dspark.distill.pruned_folder import drafter_overrides, read_prunings
from dspark.distill.run import run_distill
from dspark.draft.checkpoint import load_drafter, read_config
from dspark.draft.cost import context_bytes, parameters, weight_bytes
from dspark.errors import UserError
from dspark.files import read_json
from dspark.runtime.loading import load_target
from tests.tiny_pair import write_pair

pytest.importorskip("torch_pruning")

BUDGET = "params=60%"


def silent() -> Console:
    return Console(file=io.StringIO())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kda drafter that started from its target, trained for a few steps."""
    base = tmp_path_factory.mktemp("prune")
    pair = write_pair(base)
    prompts = [{"prompt": f"What is {i} + {j}?"} for i in range(6) for j in range(3)]
    (base / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    settings = preset_overrides("kda-pruned") | {
        "target.name": str(pair.target), "data.prompts": [str(base / "prompts.jsonl")],
        "data.max_prompts": None, "data.held_out": 4, "data.max_new_tokens": 20,
        "data.max_length": 64, "data.greedy": 1.0,
        "train.max_steps": 3, "train.epochs": 2, "train.anchors": 4,
        "eval.prompts": 1, "eval.max_new_tokens": 8, "eval.draft_length": 4,
        "drafter.block_size": 4, "drafter.num_heads": 3, "drafter.num_kv_heads": 3,
        "drafter.head_dim": 16, "drafter.intermediate_size": 48, "drafter.markov_rank": 16,
        "drafter.kda_gate_rank": 8, "drafter.mask_token_id": 0,
        "out.dir": str(base / "whole"),
    }  # fmt: skip
    return run_distill(load_config(None, settings), console=silent())


def options(trained: Path, out: Path, **changes: Any) -> PruneOptions:
    values = {"draft": trained, "out": out, "budget": BUDGET, "steps": 2, "rows": 6, "context": 32}
    return PruneOptions(**(values | changes))


def test_the_preset_starts_from_the_target(trained: Path) -> None:
    run = load_config(trained / "run.yaml")
    assert (run.drafter.init, run.drafter.backbone, run.drafter.kda_order) == ("target", "kda", "1")
    config = read_config(trained)
    assert config.hidden_act == "situ"
    assert load_drafter(trained, load_target(run.target.name).target).config == config


def test_a_drafter_of_another_tokenizer_is_refused_before_any_work(
    trained: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    path = other / "tokenizer.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    vocab = state["model"]["vocab"]
    first, second = (token for token, i in vocab.items() if i in (300, 310))
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(state), encoding="utf-8")
    with pytest.raises(UserError, match="token id 300 is "):
        run_prune(options(other, tmp_path / "out"), console=silent())
    assert not (tmp_path / "out").exists()


def test_from_a_trained_drafter_to_a_recovered_one(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "pruned"
    report = run_prune(options(trained, out), console=silent())
    before, cut, recovered = (read_config(f) for f in (trained, out / "pruned", out))
    assert cut == recovered
    assert report["before"]["parameters"] == parameters(before)
    for stage in ("pruned", "recovered"):
        assert report[stage]["parameters"] == parameters(cut) <= 0.6 * parameters(before)
        wanted = weight_bytes(cut, torch.float32).total + context_bytes(cut, 32, torch.float32)
        assert report[stage]["bytes_per_draft_step"] == wanted
        assert [each["temperature"] for each in report[stage]["decoded"]] == [0.0, 1.0]
        assert 1 <= report[stage]["accepted_length"] <= 5
    assert read_json(out / "prune.json") == json.loads(json.dumps(report))
    (entry,) = read_prunings(out)
    assert entry == read_prunings(out / "pruned")[0] == report["prunings"][0]
    assert entry["parameters"] == [parameters(before), parameters(cut)]
    records = read_json(out / "training.json")
    assert records[0] == {"step": 0, "pruned": entry}
    assert records[-1]["step"] == 2
    assert report["recovered"]["accepted_length"] == records[-1]["held_out"]["accepted_length"]
    recovered_from = load_config(out / "run.yaml")
    assert recovered_from.data == load_config(trained / "run.yaml").data
    assert recovered_from.drafter.init_from == str(out / "pruned")
    text = summary(report).splitlines()
    assert [line.split()[0] for line in text[1:]] == ["before", "pruned", "recovered"]
    with pytest.raises(UserError, match="a pruning lives here; continue it with --resume"):
        run_prune(options(trained, out), console=silent())


def test_pruning_again_keeps_the_history(trained: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    run_prune(options(trained, first, budget="bytes=80%", steps=0), console=silent())
    assert {"config.json", "model.safetensors", "pruning.json"} <= {p.name for p in first.iterdir()}
    second = tmp_path / "second"
    again = options(first, second, budget="params=90%", steps=0, importance="activation")
    report = run_prune(again, console=silent())
    assert report["recovered"] is None
    history = read_prunings(second)
    assert [entry["from"] for entry in history] == [str(trained), str(first)]
    assert [entry["importance"] for entry in history] == ["taylor", "activation"]
    assert history[0]["parameters"][1] == history[1]["parameters"][0]
    assert parameters(read_config(second)) == history[1]["parameters"][1]


def test_everything_kept_is_the_same_drafter(trained: Path, tmp_path: Path) -> None:
    run_prune(options(trained, tmp_path / "same", budget="params=100%", steps=0), console=silent())
    ours, theirs = load_drafter(tmp_path / "same"), load_drafter(trained)
    assert ours.config == theirs.config
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name])


def test_a_reduced_vocabulary_alone(trained: Path, tmp_path: Path) -> None:
    target = load_target(load_config(trained / "run.yaml").target.name).target
    report = run_prune(options(trained, tmp_path / "v", budget=None, vocab=50), console=silent())
    drafter = load_drafter(tmp_path / "v", target)
    assert drafter.config.draft_vocab_size == report["vocabulary"]["size"] == 50
    assert drafter.draft_ids is not None
    assert set(target.end_token_ids) <= set(drafter.draft_ids.tolist())
    assert 0 < report["vocabulary"]["coverage"] < 1
    # teacher forcing spreads over what p covers; it cannot pass the share by more than chance
    assert report["vocabulary"]["accepted_length_ceiling"] >= 1
    assert replace(drafter.config, draft_vocab_size=None) == read_config(trained)


def test_an_interrupted_recovery_goes_on(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "killed"

    def interrupted(*_arguments: Any, **_options: Any) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prune_module, "run_distill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_prune(options(trained, out), console=silent())
    cut = (out / "pruned" / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match=r"budget was 'params=60%', now 'params=50%'"):
        run_prune(options(trained, out, budget="params=50%"), resume=True, console=silent())
    report = run_prune(options(trained, out), resume=True, console=silent())
    assert (out / "pruned" / "model.safetensors").read_bytes() == cut
    assert report["recovered"] is not None
    again = run_prune(options(trained, out), resume=True, console=silent())
    assert again["recovered"] == report["recovered"]
    assert len([r for r in read_json(out / "training.json") if "pruned" in r]) == 1


@pytest.mark.parametrize(("changes", "message"), [
    ({"budget": None}, "nothing to prune"),
    ({"importance": "weight"}, "expected taylor or activation"),
    ({"steps": -1}, "--steps -1: expected at least 0"),
    ({"budget": "50%"}, "--budget 50%: expected params"),
])  # fmt: skip
def test_wrong_options_are_refused_before_anything_is_read(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        options(tmp_path / "none", tmp_path / "out", **changes)


@pytest.mark.parametrize(("changes", "message"), [
    ({"budget": "params=1%"}, "below the smallest drafter, which takes"),
    ({"budget": "ms=0.0001"}, r"which takes [\d.]+ ms"),
    ({"budget": None, "vocab": 0}, "--vocab 0: expected 2"),
    ({"budget": None, "vocab": 10**6}, "--vocab 1000000: expected"),
])  # fmt: skip
def test_what_cannot_be_reached_is_refused_and_nothing_is_left(
    trained: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    out = tmp_path / "refused"
    with pytest.raises(UserError, match=message):
        run_prune(options(trained, out, **changes), console=silent())
    assert not (out / "prune.json").exists()
    assert not (out / "pruned").exists()


def test_folders_that_hold_something_else(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a run lives here"):
        run_prune(options(trained, trained), console=silent())
    with pytest.raises(UserError, match="no pruning to resume here"):
        run_prune(options(trained, tmp_path / "new"), resume=True, console=silent())
    with pytest.raises(UserError, match="no such folder"):
        run_prune(options(tmp_path / "absent", tmp_path / "new"), console=silent())


def test_settings_follow_from_the_configuration(trained: Path) -> None:
    config = read_config(trained)
    built = load_config(None, {**drafter_overrides(config), "eval.draft_length": 4}).drafter
    assert (built.num_layers, built.num_heads, built.kda_order) == (2, 3, "1")
    assert (built.kda_gate_rank, built.markov_rank, built.intermediate_size) == (8, 16, 48)
