"""`run_distill` as a user meets it: a folder in, a drafter out, one clear line when it cannot."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import dspark
from dspark.assets import asset
from dspark.distill import loop
from dspark.distill.config import DistillConfig, load_config
from dspark.distill.evaluate import decoding_prompts
from dspark.distill.run import new_drafter, run_distill
from dspark.distill.trainer import Trainer
from dspark.draft.checkpoint import load_drafter, read_calibration, read_config
from dspark.errors import UserError
from dspark.k3.checkpoint import save_k3
from dspark.runtime.decode import SpeculativeDecoder
from dspark.runtime.loading import load_target
from dspark.runtime.sampling import SamplingParams
from dspark_eval.reporting.headline import environment
from dspark_eval.reporting.sources import find
from tests.k3_tiny import TINY, tiny_model

PROMPTS = 20


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random K3 with the shipped tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("target")
    shipped = asset("k3-nano")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(shipped / name, folder / name)
    vocab = len(json.loads((shipped / "tokenizer.json").read_text())["model"]["vocab"])
    added = json.loads((shipped / "tokenizer.json").read_text())["added_tokens"]
    size = max(vocab, 1 + max(token["id"] for token in added))
    save_k3(folder, tiny_model(replace(TINY, vocab_size=size)))
    return folder


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    lines = [json.dumps({"prompt": f"What is {n} plus {n + 1}?"}) for n in range(PROMPTS)]
    path.write_text("\n".join(lines) + "\n")
    return path


def settings(target: Path, prompts: Path, out: Path, **changes: Any) -> DistillConfig:
    values = {
        "target.name": str(target), "target.device": "cpu", "data.prompts": [str(prompts)],
        "data.max_new_tokens": 16, "data.max_length": 64, "data.held_out": 4,
        "drafter.num_heads": 2, "drafter.num_kv_heads": 1, "drafter.head_dim": 16,
        "drafter.num_layers": 1, "drafter.intermediate_size": 32, "drafter.markov_rank": 8,
        "drafter.block_size": 4, "train.rows_per_step": 4, "train.anchors": 4, "train.epochs": 2,
        "train.log_every": 2, "eval.every": 4, "eval.prompts": 2, "eval.max_new_tokens": 8,
        "eval.draft_length": 4, "out.dir": str(out), "out.checkpoint_every": 3,
    }  # fmt: skip
    return load_config(None, values | {k.replace("__", "."): v for k, v in changes.items()})


def distill(config: DistillConfig, resume: bool = False) -> str:
    text = io.StringIO()
    assert run_distill(config, resume, Console(file=text, width=200)) == Path(config.out.dir)
    return text.getvalue()


@pytest.fixture(scope="module")
def finished(
    target_folder: Path, prompt_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[DistillConfig, str]:
    """A whole run and what it printed."""
    out = tmp_path_factory.mktemp("runs") / "mine"
    config = settings(target_folder, prompt_file, out)
    return config, distill(config)


def test_a_run_leaves_a_drafter_that_loads_and_drafts(finished: Any, target_folder: Path) -> None:
    config, text = finished
    out = Path(config.out.dir)
    loaded = load_target(target_folder)
    drafter = load_drafter(out, loaded.target)
    assert drafter.config.target is not None
    assert drafter.config.target.name == str(target_folder)
    assert drafter.config.mask_token_id == loaded.tokenizer.mask_token_id
    generation = SpeculativeDecoder(loaded.target, drafter).generate(
        [5, 6, 7], max_new_tokens=6, sampling=SamplingParams(), draft_length=4
    )
    assert len(generation.tokens) <= 6
    assert load_config(out / "run.yaml") == config
    assert f"drafter written to {out}" in text
    assert "16 rows with" in text  # 20 prompts, 4 held out
    assert {path.name for path in out.iterdir()} == {
        "README.md", "calibration.json", "chat_template.jinja", "checkpoints", "config.json",
        "golden.json", "model.safetensors", "rows", "run.yaml", "tokenizer.json",
        "tokenizer_config.json", "training.json",
    }  # fmt: skip


def test_training_json_holds_the_agreed_keys(finished: Any) -> None:
    train = finished[0].train
    history = json.loads((Path(finished[0].out.dir) / "training.json").read_text())
    assert [record["step"] for record in history] == [2, 4, 6, 8]
    keys = {"step", "loss", "ce", "tv", "confidence_bce", "accepted_length", "tokens_per_s"}
    for record in history:
        assert keys <= record.keys()
        assert all(isinstance(record[key], int | float) for key in keys)
        terms = (record["ce"], 2 * record["tv"], record["confidence_bce"])
        weights = (train.ce, train.tv, train.confidence)
        expected = sum(w * term for w, term in zip(weights, terms, strict=True))
        assert record["loss"] == pytest.approx(expected, rel=1e-6)
        assert 1 <= record["accepted_length"] <= 5
        for name in ("acceptance", "ce_per_slot", "tv_per_slot", "confidence_bce_per_slot"):
            assert len(record[name]) == 4
    for record in (history[1], history[3]):
        assert [result["temperature"] for result in record["decoded"]] == [0.0, 1.0]
        assert record["held_out"]["accepted_length"] >= 1
    assert "decoded" not in history[0]
    assert [record for record in history if "environment" in record] == history[-1:]
    origin = history[-1]["environment"]
    assert (origin["torch"], origin["dspark"]) == (torch.__version__, dspark.__version__)
    (found,) = (f for f in find(Path(finished[0].out.dir)) if f.kind.name == "training")
    assert environment(found) == origin  # what the report's table of origins shows


def test_calibration_is_what_the_last_evaluation_measured(finished: Any) -> None:
    out = Path(finished[0].out.dir)
    calibration = read_calibration(out, read_config(out))
    assert calibration is not None
    last = json.loads((out / "training.json").read_text())[-1]["held_out"]
    assert calibration.confidence_per_slot == tuple(last["confidence_per_slot"])
    assert calibration.acceptance_per_slot == tuple(last["acceptance"])
    assert calibration.rows == 4
    assert 0 < min(calibration.confidence_per_slot) < max(calibration.confidence_per_slot) < 1
    raw = json.loads((out / "calibration.json").read_text())
    assert (raw["calibrated"], raw["settings"]) == (False, [])  # 4 rows: too few to fit


@pytest.mark.parametrize(
    ("key", "value", "other"),
    [
        ("sample_from_anchor", True, False),
        ("layer_id_origin", "completed_layer_0_based", "hidden_states_index"),
        ("target_tap_kind", "attn_res_mixture", "hidden"),
    ],
)
def test_what_a_loader_could_guess_wrong_is_in_the_file_and_is_not_guessed(
    finished: Any, tmp_path: Path, key: str, value: Any, other: Any
) -> None:
    """Slot layout, origin of layer ids, kind of tap: each wrong guess costs acceptance only."""
    out = tmp_path / "copy"
    out.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(finished[0].out.dir) / name, out / name)
    raw = json.loads((out / "config.json").read_text())
    assert raw[key] == value
    load_drafter(out)
    for place in (raw, raw["dflash_config"]):  # engines look in either
        place.pop(key, None)
    (out / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=f"{key}: missing"):
        load_drafter(out)
    (out / "config.json").write_text(json.dumps(raw | {key: other}))
    with pytest.raises(UserError, match=key):
        load_drafter(out)


def test_the_card_says_what_it_came_from(finished: Any, prompt_file: Path) -> None:
    card = (Path(finished[0].out.dir) / "README.md").read_text()
    digest = hashlib.sha256(prompt_file.read_bytes()).hexdigest()
    assert "| started with | fresh weights |" in card
    for fact in (digest, "chat template", "tokenizer", "8 in 2 epochs", "torch", "decoded, temp"):
        assert fact in card


def test_a_second_start_needs_resume_and_a_resume_needs_a_run(finished: Any) -> None:
    config, _ = finished
    with pytest.raises(UserError, match="a run lives here; continue it with --resume"):
        distill(config)
    before = (Path(config.out.dir) / "model.safetensors").read_bytes()
    assert "continuing after step 8" in distill(config, resume=True)
    assert (Path(config.out.dir) / "model.safetensors").read_bytes() == before
    changed = replace(config, train=replace(config.train, lr=1.0))
    with pytest.raises(UserError, match=r"train\.lr was 0\.0025, now 1\.0"):
        distill(changed, resume=True)


def test_nothing_to_resume_is_said(target_folder: Path, prompt_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run to resume here"):
        distill(settings(target_folder, prompt_file, tmp_path / "absent"), resume=True)


@pytest.mark.parametrize("below", ["", "run"])
def test_a_file_where_the_run_should_live_is_refused_at_once(
    target_folder: Path, prompt_file: Path, tmp_path: Path, below: str
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="no folder that can be written"):
        run_distill(settings(target_folder, prompt_file, tmp_path / "file" / below))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_broken_tokenizer_is_named(target_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(target_folder, tmp_path / "target")
    for text, message in (("{", "tokenizer.json:1: expected JSON"), ("{}", "tokenizer cannot be")):
        (folder / "tokenizer.json").write_text(text)
        with pytest.raises(UserError, match=message):
            load_target(folder)


def test_ctrl_c_and_resume_give_the_same_drafter(
    finished: Any, target_folder: Path, prompt_file: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = settings(target_folder, prompt_file, tmp_path / "cut")
    step = Trainer.run_step

    def interrupted(self: Trainer, number: int) -> Any:
        if number == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, number)

    monkeypatch.setattr(Trainer, "run_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        distill(config)
    assert not (tmp_path / "cut" / "config.json").exists()
    monkeypatch.setattr(Trainer, "run_step", step)
    # The rows are not answered again.
    monkeypatch.setattr("dspark.distill.answers.build_rows", None)
    assert "continuing after step 5" in distill(config, resume=True)
    whole = Path(finished[0].out.dir) / "model.safetensors"
    assert (tmp_path / "cut" / "model.safetensors").read_bytes() == whole.read_bytes()


def test_a_changed_prompt_file_is_noticed_on_resume(
    finished: Any, prompt_file: Path, target_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished[0].out.dir, out)
    config, before = settings(target_folder, prompt_file, out), prompt_file.read_text()
    (out / "run.yaml").write_text(config.to_yaml())
    prompt_file.write_text(before.replace("plus 1?", "minus 1?", 1))
    try:
        with pytest.raises(UserError, match="made with another prompts"):
            distill(config, resume=True)
    finally:
        prompt_file.write_text(before)


def test_the_warning_reaches_the_screen_and_the_history(
    target_folder: Path, prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.distill.run.disagreement", lambda *_: "look at the loss mask")
    config = settings(target_folder, prompt_file, tmp_path / "run", train__max_steps=1)
    assert "warning: look at the loss mask" in distill(config)
    history = json.loads((tmp_path / "run" / "training.json").read_text())
    assert history[-1]["warning"] == "look at the loss mask"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafter__tap_ids": [0, 6]}, r"target_layer_ids: 6 is outside"),
        ({"drafter__tap_kind": "residual"}, r"drafter\.tap_kind is 'residual': target .* has attn"),
        ({"drafter__mask_token_id": 10**6}, "mask_token_id: 1000000"),
        ({"data__held_out": 20, "data__max_prompts": None}, "only 20 rows are left"),
        ({"target__name": "absent"}, "absent: no such target"),
        ({"data__prompts": ["absent.jsonl"]}, r"absent\.jsonl"),
    ],
)
def test_wrong_settings_end_in_one_line(
    target_folder: Path, prompt_file: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        distill(settings(target_folder, prompt_file, tmp_path / "run", **changes))


def test_a_mistake_does_not_occupy_the_folder_and_answers_are_kept(
    target_folder: Path, prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with pytest.raises(UserError, match="tap_kind"):
        distill(settings(target_folder, prompt_file, out, drafter__tap_kind="residual"))
    assert not out.exists()
    with pytest.raises(UserError, match="only 20 rows"):
        distill(settings(target_folder, prompt_file, out, data__held_out=30))
    monkeypatch.setattr("dspark.distill.answers.build_rows", None)
    distill(settings(target_folder, prompt_file, out, train__max_steps=1))


def test_confidence_weight_zero_builds_no_head(
    target_folder: Path, prompt_file: Path, tmp_path: Path
) -> None:
    config = settings(
        target_folder, prompt_file, tmp_path / "run",
        train__confidence=0.0, train__tv=0.0, train__ce=1.0, train__max_steps=3,
    )  # fmt: skip
    distill(config)
    drafter = load_drafter(tmp_path / "run")
    assert drafter.confidence_head is None
    calibration = read_calibration(tmp_path / "run", drafter.config)
    assert calibration is not None
    assert calibration.confidence_per_slot == (None,) * 4  # not 0: nothing was predicted
    history = json.loads((tmp_path / "run" / "training.json").read_text())
    assert history[-1]["loss"] == pytest.approx(history[-1]["ce"])


def test_initial_weights_depend_on_the_seed_alone(target_folder: Path, prompt_file: Path) -> None:
    loaded = load_target(target_folder)
    made = []
    for ambient, seed in ((1, 0), (2, 0), (1, 5)):
        torch.manual_seed(ambient)
        config = settings(target_folder, prompt_file, Path("unused"), train__seed=seed)
        made.append(new_drafter(config, loaded.target, loaded.tokenizer).fc.weight)
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_decoding_starts_where_answers_begin() -> None:
    from dspark.distill.chat import TrainingRow

    rows = [
        TrainingRow((1, 2, 3, 4), (False, False, True, True)),
        TrainingRow((1, 2), (False, False)),
        TrainingRow((5, 6), (True, True)),
        TrainingRow((7, 8, 9), (False, True, False)),
    ]
    assert decoding_prompts(rows, 10) == [[1, 2], [7]]
    assert decoding_prompts(rows, 1) == [[1, 2]]


def test_a_terminal_gets_a_bar_and_a_log_gets_lines_only(
    target_folder: Path, prompt_file: Path, tmp_path: Path
) -> None:
    screen = io.StringIO()
    config = settings(target_folder, prompt_file, tmp_path / "a", train__max_steps=2)
    run_distill(config, console=Console(file=screen, force_terminal=True, width=160))
    for piece in ("answering", "distilling", "2/2", "loss", "accepted", "tok/s", "left"):
        assert piece in screen.getvalue()
    log = distill(settings(target_folder, prompt_file, tmp_path / "b", train__max_steps=2))
    assert "\x1b" not in log
    assert len([line for line in log.splitlines() if line.startswith("step ")]) == 1


def test_sections_that_may_change_are_the_ones_without_effect_on_weights() -> None:
    assert loop.FREE_SETTINGS == ("out", "eval", "cache.dir", "cache.max_gib", "train.sharded")
