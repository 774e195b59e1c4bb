"""`dspark eval`: prompt sets, grading, and a whole run on a tiny random pair."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dspark.distill.prompts import PromptRow, read_prompts
from dspark.errors import UserError
from dspark.nano.instructions import FAMILIES as INSTRUCTIONS
from dspark.runtime.records import Generation
from dspark_eval.acceptance import EVAL_FILE, PLOT_FILE, exact_answers, run_eval
from dspark_eval.document import RUN_KEYS
from dspark_eval.pair import load_pair
from dspark_eval.report import print_eval
from dspark_eval.settings import EvalOptions
from dspark_eval.suites import Suite, draw_rows, load_suites
from tests.tiny_pair import BLOCK_SIZE, TinyPair, write_pair

EVALUATION_KEYS = {
    "level_estimates",
    "n_rounds", "n_turns", "prompts_available", "prompts_sha256", "prefix_survival",
    "accepted_length_without_bonus", "block_efficiency", "draft_share",
    "accepted_length_percentiles", "loop_share", "accepted_length_without_loops",
    "context_buckets", "warnings", "finished_share", "exact_answers", "confidence", "samples",
    "lengths_by_entropy", "estimates", "positions", "entropy", "thresholds", "goodput", "task",
    "plain", "lossless", "served", "emitted", "rounds",
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_pair(tmp_path_factory.mktemp("pair"))


def options(pair: TinyPair, **change) -> EvalOptions:
    values = {"suites": (str(pair.prompts),), "max_new_tokens": 8, "quiet": True, **change}
    return EvalOptions(draft=pair.draft, target=pair.target, **values)


# ------------------------------------------------------------------ prompt sets


def test_a_report_folder_that_cannot_be_made_is_refused_before_measuring():
    with pytest.raises(UserError, match=r"--out: .*test_eval\.py is a file"):
        EvalOptions(draft="runs/mine", out=Path(__file__, "report"))


def test_nano_is_two_sets_told_apart_by_family():
    problems, instructions = load_suites("nano", n_prompts=1000, seed=0)
    assert (problems.name, instructions.name) == ("nano-problems", "nano-instructions")
    families = {family.name for family in INSTRUCTIONS}
    assert all(row.metadata["family"] in families for row in instructions.rows)
    assert all(row.metadata["family"] not in families for row in problems.rows)
    assert all(str(row.metadata["answer"]).strip() for row in problems.rows)
    assert len(problems.rows) == problems.available >= 100
    for name in ("nano-problems", "nano-instructions", "nano-validation", "nano-long-512"):
        assert [suite.name for suite in load_suites(name, n_prompts=1, seed=0)] == [name]


def test_a_draw_is_seeded_mixed_and_a_prefix_of_a_larger_one():
    rows = tuple(PromptRow("f", line, ({"role": "user", "content": "x"},)) for line in range(50))
    drawn = draw_rows(rows, 20, seed=4)
    assert drawn == draw_rows(rows, 20, seed=4)
    assert drawn[:7] == draw_rows(rows, 7, seed=4)
    assert drawn != draw_rows(rows, 20, seed=5)
    assert [row.line for row in drawn] != sorted(row.line for row in drawn)
    assert sorted(row.line for row in draw_rows(rows, 99, seed=4)) == list(range(50))


def test_a_file_is_one_set_and_says_what_was_skipped(pair, tmp_path):
    (suite,) = load_suites(pair.prompts, n_prompts=10, seed=0)
    assert (suite.name, suite.available, suite.notes) == ("prompts", 3, ())
    path = tmp_path / "mixed.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": ""}\n', encoding="utf-8")
    (suite,) = load_suites(path, n_prompts=10, seed=0)
    assert suite.available == 1
    assert "1 skipped" in suite.notes[0]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UserError, match="nano-problems"):
        load_suites("nanoo", n_prompts=1, seed=0)


def test_wrong_options_are_named():
    with pytest.raises(UserError, match="--suite"):
        EvalOptions(draft="runs/mine", suites=())
    with pytest.raises(UserError, match="temperature"):
        EvalOptions(draft="runs/mine", temperature=-1.0)


# ------------------------------------------------------------------ grading


def test_answers_are_graded_without_their_end_token(pair):
    """Three rows: right, wrong, and one without a known answer, which is not counted."""
    loaded = load_pair(options(pair))
    tokenizer = loaded.chat.tokenizer
    end = tokenizer.convert_tokens_to_ids("<|end_of_msg|>")

    def answer(text: str) -> Generation:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return Generation([*ids, end], "end", 0.1, 0.1)

    user = ({"role": "user", "content": "?"},)
    rows = (
        PromptRow("f", 1, user, {"answer": "12"}),
        PromptRow("f", 2, user, {"answer": "12"}),
        PromptRow("f", 3, user),
    )
    answers = [answer("The total is 12 apples.\n#### 12"), answer("#### 13"), answer("#### 12")]
    assert exact_answers(loaded, Suite("s", rows, 3), answers) == 0.5
    assert exact_answers(loaded, Suite("s", rows[2:], 1), answers[2:]) is None


# ------------------------------------------------------------------ the whole command


@pytest.fixture(scope="module")
def evaluated(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    folder = tmp_path_factory.mktemp("eval")
    second = folder / "second.jsonl"
    second.write_text('{"prompt": "The total is 12 apples."}\n', encoding="utf-8")
    suites = (str(pair.prompts), str(second))
    out = folder / "out"
    return run_eval(options(pair, suites=suites, temperature=1.0, out=out)), out


def test_each_set_has_the_keys_of_a_bench_run_and_its_own(evaluated):
    document, out = evaluated
    assert list(document["suites"]) == ["prompts", "second"]
    for suite in document["suites"].values():
        assert list(suite)[: len(RUN_KEYS)] == list(RUN_KEYS)
        assert set(suite) - set(RUN_KEYS) == EVALUATION_KEYS
    assert json.loads((out / EVAL_FILE).read_text()) == json.loads(json.dumps(document))
    assert (out / PLOT_FILE).read_bytes().startswith(b"\x89PNG")


def test_values_of_a_set(evaluated):
    suite = evaluated[0]["suites"]["prompts"]
    assert suite["n_prompts"] == 3
    assert 1 <= suite["accepted_length"] <= BLOCK_SIZE + 1
    low, high = suite["accepted_length_ci95"]
    assert low <= suite["accepted_length"] <= high
    assert sum(bucket["rounds"] for bucket in suite["context_buckets"]) == suite["n_rounds"]
    assert 0 <= suite["loop_share"] <= 1
    assert suite["exact_answers"] in (0.0, 1.0)  # one of the three rows carries an answer
    assert evaluated[0]["suites"]["second"]["exact_answers"] is None


def test_the_interval_can_be_drawn_again_from_the_counts_of_prompts(evaluated):
    suite = evaluated[0]["suites"]["prompts"]
    emitted, rounds = np.array(suite["emitted"]), np.array(suite["rounds"])
    assert suite["accepted_length"] == pytest.approx(emitted.sum() / rounds.sum(), rel=1e-12)
    draws = np.random.default_rng(1).integers(3, size=(20_000, 3))
    low, high = np.quantile(emitted[draws].sum(1) / rounds[draws].sum(1), (0.025, 0.975))
    assert suite["accepted_length_ci95"] == pytest.approx([low, high], rel=0.02)


def test_plain_decoding_is_null_because_it_does_not_run(evaluated):
    suite = evaluated[0]["suites"]["prompts"]
    for key in ("plain_tokens_per_s", "speedup", "speedup_ci95", "greedy_mismatches"):
        assert suite[key] is None
    assert suite["speculative_tokens_per_s"] > 0


def test_a_run_repeats_itself(pair, evaluated):
    """Same seed, same prompts: the same rounds, whatever ran before in this process."""
    again = run_eval(options(pair, temperature=1.0))["suites"]["prompts"]
    before = evaluated[0]["suites"]["prompts"]
    for key in ("accepted_length", "acceptance_rate", "conditional_acceptance", "n_rounds"):
        assert again[key] == before[key]


def test_table_shows_every_set(evaluated, capsys):
    print_eval(evaluated[0])
    shown = capsys.readouterr().out
    assert "second" in shown
    assert "second: few prompts (1): below" in shown
    assert "conditional acceptance by position" in shown
    ends = {row.split()[0]: row.split() for row in shown.splitlines() if len(row.split()) > 8}
    right = "100.0" if evaluated[0]["suites"]["prompts"]["exact_answers"] else "0.0"
    assert ends["prompts"][-4:] == [right, "%", "of", "1"]  # of three prompts one has an answer
    assert ends["second"][-1] == "-"


def test_skipped_lines_reach_the_report(pair, tmp_path):
    path = tmp_path / "mixed.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": ""}\n', encoding="utf-8")
    assert len(read_prompts([path]).rows) == 1
    document = run_eval(options(pair, suites=(str(path),)))
    assert any("1 skipped" in line for line in document["warnings"])
