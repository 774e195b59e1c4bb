"""A text that is not the target's: the row says so, the exit code is 1, the numbers are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dspark import cli, console
from dspark.runtime.sampling import SamplingParams
from dspark_eval import speed, suite_report
from dspark_eval.compare_table import lossless_cell
from dspark_eval.conversations import hold_conversations
from dspark_eval.fidelity import Evidence, NotBest, judge
from dspark_eval.report import print_eval
from dspark_eval.report_notes import lossless_words
from dspark_eval.verdicts import exit_code, mismatch_warnings
from tests.tiny_pair import TinyPair, write_pair

GREEDY, ONE = SamplingParams(), SamplingParams(temperature=1.0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_pair(tmp_path_factory.mktemp("pair"))


def command(pair: TinyPair, name: str, prompts: str, *options: str) -> int:
    words = [name, "--draft", str(pair.draft), "--target", str(pair.target)]
    words += [prompts, str(pair.prompts), "--max-new-tokens", "8", *options]
    return console.run(cli.app, words)


@pytest.fixture
def third_token_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    real = hold_conversations

    def wrong(*args: Any, **kwargs: Any) -> Any:
        held = real(*args, **kwargs)
        for conversation in held:
            tokens = conversation.turns[0].answer.tokens
            tokens[2] = (tokens[2] + 1) % 50
        return held

    monkeypatch.setattr(suite_report, "hold_conversations", wrong)


def test_an_evaluation_of_right_texts_ends_with_0(pair: TinyPair, tmp_path: Path) -> None:
    assert command(pair, "eval", "--suite", "--out", str(tmp_path)) == 0
    suite = json.loads((tmp_path / "eval.json").read_text())["suites"]["prompts"]
    assert suite["lossless"]["verdict"] == "agrees"


def test_a_wrong_text_ends_with_1_and_the_numbers_are_kept(
    pair: TinyPair, tmp_path: Path, third_token_wrong: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(pair, "eval", "--suite", "--out", str(tmp_path)) == 1
    document = json.loads((tmp_path / "eval.json").read_text())
    found = document["suites"]["prompts"]["lossless"]
    assert found["verdict"].startswith("differs: ")
    wide = Console(width=200, record=True, markup=False)
    capsys.readouterr()
    print_eval(document, wide)
    rows = capsys.readouterr().out.splitlines()
    at = next(i for i, row in enumerate(rows) if row.split()[:2] == ["prompts", "3"])
    assert rows[at + 1].split() == ["NOT", "LOSSLESS"]


def test_greedy_text_that_leaves_plain_decoding_ends_a_bench_with_1(
    pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The speculative answers of one prompt lose their last token."""
    json_file = tmp_path / "bench.json"
    asked = ("--json", str(json_file), "--warmup", "1")
    assert command(pair, "bench", "--prompts", *asked) == 0
    from dspark_eval import bench

    def wrong(*args: Any, **kwargs: Any) -> list[speed.PromptTimings]:
        timings = speed.measure(*args, **kwargs)
        tokens = timings[0].speculative[0].tokens
        tokens[1] = (tokens[1] + 1) % 50
        return timings

    monkeypatch.setattr(bench, "measure", wrong)
    assert command(pair, "bench", "--prompts", *asked) == 1
    document = json.loads(json_file.read_text())
    assert document["greedy_mismatches"] == 1
    assert any("NOT LOSSLESS: 1 greedy" in text for text in document["extra"]["warnings"])


def test_any_row_of_a_comparison_counts() -> None:
    def document(*passed: bool | None) -> dict[str, Any]:
        entries = [{"lossless": None if p is None else {"passed": p}} for p in passed]
        return {"kind": "comparison", "suites": {"a": {"contenders": entries}}}

    assert exit_code(document(True, None, True)) == 0
    assert exit_code(document(True, False, True)) == 1


def test_near_ties_and_texts_lossy_by_demand_are_no_defect() -> None:
    near, far = {"near_tie": True, "top2_gap": 1e-7}, {"near_tie": False, "top2_gap": 2.5}
    assert mismatch_warnings([near], lossy=False) == []
    assert mismatch_warnings([near, far], lossy=True) == []
    rest = "more than rounding explains"
    assert mismatch_warnings([near, far], lossy=False) == [
        "NOT LOSSLESS: 1 greedy answer is not plain decoding's, by a gap of the top two logits of "
        f"2.5, {rest}"
    ]
    assert mismatch_warnings([{**far, "top2_gap": 0.5}, near, far], lossy=False) == [
        "NOT LOSSLESS: 2 greedy answers are not plain decoding's, by a gap of the top two logits "
        f"up to 2.5, {rest}"
    ]

    def run(*unlike: dict[str, Any], relaxed: bool = False) -> dict[str, Any]:
        extra = {"mismatches": list(unlike), "lossless": None}
        return {"relaxed": {"tv_mean": 0.1} if relaxed else None, "extra": extra}

    assert exit_code(run(near)) == 0
    assert exit_code(run(near, far)) == 1
    assert exit_code(run(near, far, relaxed=True)) == 0
    assert exit_code({**run(near), "runs": [run(near), run(far)]}) == 1


def test_an_agreement_says_what_it_could_have_seen() -> None:
    """Even ranks of 1,000 and of 4,000 tokens: the smallest error that is found halves with four
    times the tokens, and the words carry it everywhere the verdict goes."""
    seen = []
    for count in (1000, 4000):
        ranks = [(i + 0.5) / count for i in range(count)]
        found = judge(Evidence(count, ranks), ONE, tests=2)
        seen.append(found["rank"]["detectable_tv"])
        said = f"agrees; would have seen a TV of {seen[-1]:.3f} or more at 99 %"
        assert found["verdict"] == said
        assert said in lossless_words(found)
        assert lossless_cell(found) == f"{said}, {count:,} tokens"
    assert seen[0] / seen[1] == pytest.approx(2, rel=0.02)
    few = judge(Evidence(3, [0.1, 0.5, 0.9]), ONE, tests=2)
    assert few["verdict"] == "untested: too few tokens"
    one = NotBest(0, 1, 2, 3, 1.5, False)
    wrong = judge(Evidence(41, not_best=[one]), GREEDY, tests=2)
    assert wrong["verdict"] == "differs: 1 token is not the target's best"
    wrong = judge(Evidence(41, not_best=[one, one]), GREEDY, tests=2)
    assert wrong["verdict"] == "differs: 2 tokens are not the target's best"
