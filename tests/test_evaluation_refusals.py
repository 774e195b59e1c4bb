"""What the evaluation tools refuse before any work, each in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from dspark.distill.config import DistillConfig
from dspark.errors import UserError
from dspark_eval import decode_speed, k3_layers, offload_overlap
from dspark_eval.acceptance import run_eval
from dspark_eval.baselines.__main__ import main as baselines
from dspark_eval.baselines.rows import RunData
from dspark_eval.real_text.__main__ import main as real_text
from dspark_eval.settings import EvalOptions
from tests.tiny_pair import write_pair


def test_answers_longer_than_the_target_reads(tmp_path: Path) -> None:
    """It would be allocated before it is found too much."""
    pair = write_pair(tmp_path)
    options = EvalOptions(
        draft=pair.draft,
        target=pair.target,
        suites=(str(pair.prompts),),
        max_new_tokens=10**9,
        quiet=True,
    )
    with pytest.raises(UserError, match=r"--max-new-tokens 1000000000: target .* reads \d+ tokens"):
        run_eval(options)


@pytest.mark.parametrize("key", ["train.nope", "nope", "train.steps"])
def test_a_setting_that_no_run_has(key: str) -> None:
    nothing = cast(Any, None)
    run = RunData(DistillConfig(), nothing, nothing, nothing)
    with pytest.raises(UserError, match=f"--set {key}: no such setting"):
        run.changed({key: 1})
    assert run.changed({"train.lr": 0.5}).train.lr == 0.5


def test_places_of_baselines_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    assert baselines(["train", "no-run", "--kind", "ar", "--out", str(file)]) == 2
    assert "expected a folder; this is a file" in capsys.readouterr().err
    for place in (tmp_path, tmp_path / "none" / "m.json"):
        assert baselines(["measure", "lookup", "--out", str(place)]) == 2
        assert "expected a file in a folder that is there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["--parts", "0"], "--parts 0: expected 1 or more"),
        (["--samples", "-1"], "expected 0 or more"),
        (["--samples", "0", "--generated", "0", "--written", "0"], "not 0 all"),
    ],
)
def test_answers_of_the_real_text_study_that_cannot_be_asked_for(
    given: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert real_text(["answer", str(tmp_path), *given]) == 2
    assert what in capsys.readouterr().err


@pytest.mark.parametrize("module", [decode_speed, k3_layers, offload_overlap])
@pytest.mark.parametrize(
    ("device", "what"),
    [
        ("cuda", "--device cuda: torch sees no usable GPU"),
        ("gpu", "--device: expected cpu, cuda or cuda:N; got 'gpu'"),
    ],
)
def test_a_device_that_is_not_there(
    module: Any,
    device: str,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert module.main(["--device", device]) == 2
    assert what in capsys.readouterr().err
