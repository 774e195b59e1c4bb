"""The measurement itself: intervals, repeats, grouping, independence of batches, the command."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from scipy.stats import binomtest
from transformers import PreTrainedTokenizerBase

from dspark.k3.checkpoint import save_k3
from dspark.nano import evaluate as measuring
from dspark.nano.corpus import load_tokenizer
from dspark.nano.evaluate import (
    Answer,
    answer_problems,
    held_out,
    main,
    prompt_ids,
    summarise,
    wilson,
)
from dspark.nano.generate import problem, problem_identity, split_of
from dspark.runtime.loading import load_target
from dspark.runtime.sampling import SamplingParams
from tests.k3_tiny import TINY, tiny_model


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer()


@pytest.fixture(scope="module")
def untrained(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random K3 that speaks the nano tokenizer."""
    folder = tmp_path_factory.mktemp("untrained")
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    save_k3(folder, tiny_model(replace(TINY, vocab_size=len(tokenizer), **ids)))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("correct", "total"), [(0, 1), (1, 1), (0, 40), (28, 40), (497, 500)])
def test_wilson_equals_scipy(correct: int, total: int) -> None:
    expected = binomtest(correct, total).proportion_ci(0.95, method="wilson")
    assert wilson(correct, total) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_problems_are_held_out_and_a_prefix_of_any_larger_set() -> None:
    asked = held_out(60)
    assert asked[:20] == held_out(20)
    assert asked == [problem(77, i, "test") for i in range(60)]
    assert {split_of(problem_identity(p.family, p.question)) for p in asked} == {"test"}
    assert held_out(5, seed=1) != asked[:5]


def test_prompt_ends_with_the_assistant_header(tokenizer: PreTrainedTokenizerBase) -> None:
    asked = held_out(3)
    for made, ids in zip(asked, prompt_ids(tokenizer, asked), strict=True):
        text = tokenizer.decode(ids)
        assert text.startswith('[BOS]<|open|>message role="user"<|sep|>' + made.question)
        assert text.endswith('<|end_of_msg|><|open|>message role="assistant"<|sep|>')


def test_summary_of_known_answers(tokenizer: PreTrainedTokenizerBase) -> None:
    asked = held_out(6)
    right = [
        Answer(p, tuple(tokenizer.encode(p.solution)), p.solution, ended=True) for p in asked[:4]
    ]
    late = Answer(asked[4], (5,) * 30, f"#### {asked[4].answer}0", ended=False)
    silent = Answer(asked[5], (6, 7), "no mark", ended=True)
    result = summarise([*right, late, silent], tokenizer)
    assert result["exact"] | {"ci95": None} == {
        "correct": 4, "total": 6, "rate": 0.6667, "ci95": None,
    }  # fmt: skip
    assert result["ended_share"] == 0.8333
    assert result["loop_share"] == 0.1667
    assert [(w["index"], w["given"], w["right"]) for w in result["wrong"]] == [
        (4, f"{asked[4].answer}0", asked[4].answer),
        (5, None, asked[5].answer),
    ]
    for groups in (result["steps"], result["families"]):
        assert sum(group["total"] for group in groups.values()) == 6
        assert sum(group["correct"] for group in groups.values()) == 4
    assert list(result["steps"]) == sorted(result["steps"])
    assert {p.family for p in asked} == set(result["families"])


def test_an_answer_does_not_depend_on_its_batch(
    untrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_target(untrained)
    asked = held_out(7)
    runs = []
    for batch in (7, 3):
        monkeypatch.setattr(measuring, "_BATCH", batch)
        runs.append(answer_problems(loaded, asked, SamplingParams(1.0), max_new_tokens=16))
    assert runs[0] == runs[1]
    assert len({answer.tokens for answer in runs[0]}) == 7


def test_the_command_prints_and_writes(
    untrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    arguments = ["--target", str(untrained), "--problems", "3", "--temperature", "1"]
    assert main([*arguments, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "3 held-out problems (split test, seed 77) at temperature 1" in printed
    assert "all problems" in printed
    result = json.loads(out.read_text("utf-8"))
    assert result["exact"]["total"] == 3
    assert len(result["wrong"]) == 3 - result["exact"]["correct"]
    assert result["target"] == str(untrained)
    assert len(result["weights_sha256"]) == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--problems", "0"], "problems: expected at least 1, got 0"),
        (["--temperature", "-1"], "temperature: expected a finite number"),
        (["--target", "nowhere"], "nowhere: no such target"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"error: {message}")


def test_a_target_without_chat_template_is_refused(
    untrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(untrained, folder, ignore=shutil.ignore_patterns("chat_template.jinja"))
    assert main(["--target", str(folder), "--problems", "1"]) == 2
    assert "no chat template" in capsys.readouterr().err
