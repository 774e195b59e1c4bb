"""`python -m dspark_eval.policies`: a whole report on a tiny pair, and its targets by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark.runtime.policies.choose import PolicyChoice, make_policy
from dspark.runtime.sampling import SamplingParams
from dspark_eval import step_times
from dspark_eval.policies import report
from dspark_eval.policies.__main__ import main
from dspark_eval.policies.measure import Runs, figures
from dspark_eval.policies.page import targets
from dspark_eval.policies.sets import WRITING, prompt_sets
from dspark_eval.report_notes import policy_words
from tests.test_policies import cost
from tests.tiny_pair import BLOCK_SIZE, write_pair


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pair = write_pair(tmp_path_factory.mktemp("pair"))
    out = tmp_path_factory.mktemp("out") / "report"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_times, "REPEATS", 1)
        patch.setattr(report, "FIT_PROMPTS", 2)
        options = report.ReportOptions(
            out, pair.draft, str(pair.target), n_prompts=2, max_new_tokens=10, quiet=True
        )
        assert report.run_report(options) == out / "policies.md"
    return out


def test_every_policy_is_a_row_of_every_set(written: Path) -> None:
    document = json.loads((written / "policies.json").read_text())
    assert list(document["sets"]) == ["nano-problems", "nano-instructions", "nano-mix"]
    for found in document["sets"].values():
        names = [row["policy"] for row in found["rows"]]
        assert names[: BLOCK_SIZE + 1] == [
            "plain",
            *(f"fixed {g}" for g in range(1, BLOCK_SIZE + 1)),
        ]
        rules = [name.split()[0].rstrip(",") for name in names[BLOCK_SIZE + 1 :]]
        assert set(rules) == {"entropy", "confidence", "throughput", "throughput-delayed", "auto"}
        assert any("bands" in name for name in names)
        for row in found["rows"]:
            assert row["mismatches"] == 0  # greedy, float32: plain decoding's own text
            assert row["tokens_per_s"] > 0
            assert row["modelled_tokens_per_s"] > 0
        fixed = found["rows"][2]
        assert fixed["verified"] <= fixed["drafted"] <= 2
    assert set(document["sweeps"]["nano-mix"]) == {"entropy", "confidence"}
    assert [row["verification"] for row in document["block_verification"]] == ["token", "block"]
    assert len(document["break_even"]) == BLOCK_SIZE


def test_page_picture_and_step_times_lie_beside_it(written: Path) -> None:
    text = (written / "policies.md").read_text()
    assert "Warning: nano-mix: few prompts (2)" in text
    for part in ("# Draft-length policies", "## nano-mix", "## Targets", "| fixed 1 |",
                 "speculation pays above", "not calibrated", "threshold-sweep.png"):  # fmt: skip
        assert part in text
    assert (written / "threshold-sweep.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((written / "cost_model.json").read_text())["kind"] == "dspark cost model"


def test_the_mix_is_half_of_each_kind() -> None:
    problems, _, mix = prompt_sets(10, 1)
    assert [row in problems.rows for row in mix.rows] == [True, False] * 5
    assert {row.metadata["family"] for row in mix.rows[1::2]} <= WRITING


def test_plain_decoding_is_modelled_by_its_own_step() -> None:
    from dspark.runtime.records import Generation

    runs = Runs("plain", answers=[Generation(list(range(11)), "length", 0.0, 1.0)], spent=[2.0])
    row = figures(runs, runs, cost(10, 1), greedy=True, seed=0)
    assert row["tokens_per_s"] == 5
    assert row["modelled_tokens_per_s"] == pytest.approx(1 / 11)
    assert row["accepted_length"] is None


def row(name: str, acceptance: float, speed: float) -> dict[str, Any]:
    return {
        "policy": name, "constant": name.startswith("fixed"), "acceptance_rate": acceptance,
        "modelled_tokens_per_s": speed, "tokens_per_s": speed,
    }  # fmt: skip


def test_targets_by_hand() -> None:
    easy = [row("plain", 0, 50), row("fixed 2", 0.92, 90), row("fixed 8", 0.7, 100)]
    mix = [row("plain", 0, 50), row("fixed 2", 0.8, 60), row("auto", 0.8, 61)]
    document = {
        "mix": "nano-mix",
        "sets": {
            "nano-problems": {"rows": [*easy, row("rule", 0.9, 95)]},
            "nano-mix": {"rows": mix},
        },
    }
    lines = list(targets(document))
    assert len(lines) == 4
    assert "**met**, rule with 90.0 % at 95.0 %" in lines[0]
    assert "**met**, auto 61.0 against fixed 2 60.0" in lines[2]
    document["sets"]["nano-problems"]["rows"] = [*easy, row("rule", 0.9, 94)]
    document["sets"]["nano-mix"]["rows"] = [*mix[:2], row("auto", 0.8, 60)]
    lines = list(targets(document))
    assert "**not met**, fixed 2 with 92.0 % at 90.0 %" in lines[0]
    assert "**not met**" in lines[2]


def test_a_missing_drafter_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "x"), "--draft", str(tmp_path / "no")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "x").exists()


def test_a_headline_names_the_bands_wherever_they_lie() -> None:
    """`auto` carries them inside the policy it speculates with."""
    choice = PolicyChoice("auto", draft_length=5, bands=True, high=0.8, low=0.2, siblings=1)
    settings = {**make_policy(choice, SamplingParams()).settings(), "draft_length": 5}
    run = {"policy": "auto", "policy_settings": settings, "verification": "token"}
    assert policy_words(run) == (
        "auto, around entropy, h_stop 1, at most 5, bands at 0.8 and 0.2 with 1 sibling, "
        "token verification"
    )
