"""`dspark eval` on a tiny random pair: conversations, plain decoding beside it, texts held against
the target, protocols and public sets, end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dspark.draft.checkpoint import read_config, save_drafter
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError
from dspark.runtime.cost_model import BatchCosts, CostModel
from dspark_eval import acceptance, suite_report
from dspark_eval.acceptance import run_eval
from dspark_eval.bench import bench_pair
from dspark_eval.pair import Pair, load_pair
from dspark_eval.protocols import Measured, departures, protocol_document
from dspark_eval.report import print_eval
from dspark_eval.settings import BenchOptions, EvalOptions
from dspark_eval.suites import load_suites
from tests.tiny_pair import BLOCK_SIZE, TinyPair, write_pair

CHATS = [
    {"turns": ["What is 3 + 4?", "Why?", "And then?"]},
    {"turns": ["How many apples?"], "answer": "12"},
    {"turns": ["Let me think.", "Go on."], "tests": "assert True"},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    made = write_pair(tmp_path_factory.mktemp("pair"))
    lines = "".join(json.dumps(row) + "\n" for row in CHATS)
    made.prompts.with_name("mt-bench.jsonl").write_text(lines, encoding="utf-8")
    return made


def options(tiny: TinyPair, **change) -> EvalOptions:
    values = {
        "suites": ("mt-bench",), "suite_dir": tiny.prompts.parent, "max_new_tokens": 10,
        "quiet": True, **change,
    }  # fmt: skip
    return EvalOptions(draft=tiny.draft, target=tiny.target, **values)


@pytest.fixture(scope="module")
def greedy(tiny: TinyPair) -> dict:
    return run_eval(options(tiny, plain=9))


def test_conversations_are_pooled_and_every_turn_counts(greedy):
    suite = greedy["suites"]["mt-bench"]
    broken = [w for w in suite["warnings"] if "ended before their last turn" in w]
    assert suite["n_prompts"] == 3
    assert 3 <= suite["n_turns"] <= 6
    assert (suite["n_turns"] == 6) == (not broken)
    assert suite["estimates"]["loop_share"]["n"] == suite["n_turns"]
    assert suite["estimates"]["accepted_length"]["n"] == suite["n_rounds"]
    assert suite["estimates"]["accepted_length"]["n_prompts"] == 3
    assert suite["estimates"]["accepted_length"]["value"] == suite["accepted_length"]
    assert sum(b["rounds"] for b in suite["context_buckets"]) == suite["n_rounds"]


def test_one_turn_is_what_later_turns_are_left_out_of(tiny, greedy):
    suite = run_eval(options(tiny, turns=1))["suites"]["mt-bench"]
    assert (suite["n_turns"], suite["plain"]) == (3, None)
    assert suite["n_rounds"] < greedy["suites"]["mt-bench"]["n_rounds"]


def test_plain_decoding_says_the_same_after_the_same_history(greedy):
    suite = greedy["suites"]["mt-bench"]
    plain = suite["plain"]
    assert (plain["n_prompts"], plain["n_answers"]) == (3, suite["n_turns"])
    assert (plain["greedy_mismatches"], plain["mismatches"]) == (0, [])
    assert suite["greedy_mismatches"] == 0
    # one row of three has an answer, which a random target does not know
    assert suite["task"]["n"] == plain["task"]["n"] == 1
    assert suite["task"]["value"] == plain["task"]["value"] == suite["exact_answers"]
    assert plain["against_speculative"]["difference"] == 0
    assert suite["plain_tokens_per_s"] is None  # speeds are bench's to compare


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_text_is_held_against_the_target(tiny, temperature):
    suite = run_eval(options(tiny, temperature=temperature))["suites"]["mt-bench"]
    found = suite["lossless"]
    assert found["passed"] is not False
    assert found["method"] == ("sampling" if temperature else "greedy")
    passes = suite["estimates"]["block_efficiency"]
    assert found["tokens"] == pytest.approx(passes["value"] * passes["n"])
    off = run_eval(options(tiny, temperature=temperature, check_texts=False, n_prompts=1))
    assert off["suites"]["mt-bench"]["lossless"] is None
    lossy = run_eval(options(tiny, temperature=temperature, relaxed=True, n_prompts=1))
    assert lossy["suites"]["mt-bench"]["lossless"] is None


def test_a_decoder_that_is_not_the_targets_is_told(tiny, monkeypatch, capsys):
    """The second best token at one place of every answer."""
    real = suite_report.hold_conversations

    def wrong(*args, **kwargs):
        held = real(*args, **kwargs)
        for conversation in held:
            tokens = conversation.turns[0].answer.tokens
            tokens[2] = (tokens[2] + 1) % 50
        return held

    monkeypatch.setattr(suite_report, "hold_conversations", wrong)
    document = run_eval(options(tiny, plain=3, turns=1))
    suite = document["suites"]["mt-bench"]
    assert suite["lossless"]["passed"] is False
    assert suite["greedy_mismatches"] == 3
    assert {entry["position"] for entry in suite["plain"]["mismatches"]} == {2}
    assert any("mt-bench: NOT LOSSLESS" in warning for warning in document["warnings"])
    print_eval(document)
    assert "NOT LOSSLESS" in capsys.readouterr().out


def test_code_is_not_run_unless_asked_and_that_is_said(greedy, tiny):
    said = [w for w in greedy["warnings"] if "--run-code" in w]
    assert said == [
        "mt-bench: the tests of 1 answer were not run; --run-code runs model-written code, in a "
        "container best"
    ]
    ran = run_eval(options(tiny, run_code=True, turns=1))
    assert ran["suites"]["mt-bench"]["task"]["n"] == 2
    assert not [w for w in ran["warnings"] if "--run-code" in w]


def test_figures_of_confidence_entropy_and_thresholds_are_there(greedy):
    suite = greedy["suites"]["mt-bench"]
    assert len(suite["confidence"]["positions"]) == len(suite["confidence"]["diagram"])
    assert suite["thresholds"][0]["threshold"] == 0
    drafting = sum(bins["rounds"] for bins in suite["lengths_by_entropy"])
    assert suite["entropy"]["positions"][0]["n"] == drafting
    assert len(suite["positions"]["conditional_acceptance"]) == len(suite["conditional_acceptance"])
    assert suite["goodput"] is None  # no step times were measured
    assert 1 <= suite["block_efficiency"] <= suite["accepted_length"]
    assert 0 < suite["draft_share"] < 1


def test_step_times_beside_the_drafter_give_goodput(tiny):
    """A verify pass that costs as much as a plain step per row: the batch gains nothing."""
    sizes = tuple(
        BatchCosts(b, plain=0.01 * b, draft={4: 0.0}, verify={1: 0.01 * b, 5: 0.05 * b}, other=0.0)
        for b in (1, 4)
    )
    path = tiny.draft / "cost_model.json"
    path.write_text(json.dumps(CostModel(sizes, "t", "d", 8).to_dict()), encoding="utf-8")
    try:
        document = run_eval(options(tiny, turns=1, n_prompts=2))
    finally:
        path.unlink()
    points = document["suites"]["mt-bench"]["goodput"]
    assert [p["concurrency"] for p in points] == [1, 2, 4]
    assert [p["plain"] for p in points] == pytest.approx([100] * 3)
    assert len({round(p["speculative"], 6) for p in points}) == 1
    assert all(p["speedup"] <= 1 for p in points)
    assert any("cost_model.json: measured" in warning for warning in document["warnings"])


def test_rounds_of_block_verification_are_not_cut_after_the_fact(tiny):
    """The same blocks one by one tell; judged as a whole, a shorter one is judged otherwise."""
    token, block = (
        run_eval(options(tiny, turns=1, verification=method, temperature=1.0, check_texts=False))
        for method in ("token", "block")
    )
    assert len(token["suites"]["mt-bench"]["thresholds"]) == 10
    assert block["suites"]["mt-bench"]["thresholds"] is None
    assert block["suites"]["mt-bench"]["goodput"] is None


def test_a_concurrency_that_a_later_set_is_too_small_for_is_refused_at_once(tiny, monkeypatch):
    monkeypatch.setattr(acceptance, "load_pair", lambda options: pytest.fail("something is loaded"))
    small = tiny.prompts.with_name("one.jsonl")
    small.write_text('{"prompt": "Hm?"}\n', encoding="utf-8")
    with pytest.raises(UserError, match="--concurrency 2: one has 1 prompts"):
        run_eval(options(tiny, suites=("mt-bench", str(small)), concurrency=(2,)))


def test_both_ways_are_timed_at_every_concurrency(tiny):
    """Three prompts: three groups of one, one of two, and the same texts in every batch."""
    served = run_eval(options(tiny, turns=1, concurrency=(1, 2)))["suites"]["mt-bench"]["served"]
    assert [(p["concurrency"], p["groups"], p["answers"]) for p in served] == [(1, 3, 3), (2, 1, 2)]
    assert [p["same_text"] for p in served] == [3, 2]
    for point in served:
        assert point["speedup"] == pytest.approx(point["speculative"] / point["plain"])
    assert [p["speedup_ci95"] for p in served] == [None, None]  # three groups and one say nothing
    with pytest.raises(UserError, match="--concurrency 4: mt-bench has 3 prompts"):
        run_eval(options(tiny, concurrency=(4,)))
    with pytest.raises(UserError, match="--concurrency: expected 1 or more; got 0"):
        options(tiny, concurrency=(0,))


# ------------------------------------------------------------------ protocol and suites


def test_a_protocol_needs_its_block_and_states_what_differs(tiny):
    paper = options(
        tiny, protocol="dspark-paper", temperature=1.0, draft_length=7, turns=1, n_prompts=None
    )
    with pytest.raises(UserError, match=f"--draft-length 7: .*block size {BLOCK_SIZE}"):
        run_eval(paper)
    document = protocol_document("dspark-paper", paper)
    assert document["fixed"]["draft_length"] == 7
    assert document["departures"] == [
        "protocol dspark-paper: max_new_tokens is 10 here, 2048 there",
        "protocol dspark-paper: dtype is float32 here, bfloat16 there",
    ]
    exact = replace(paper, max_new_tokens=2048, dtype="bfloat16")
    assert protocol_document("dspark-paper", exact)["departures"] == []
    assert protocol_document(None, paper) is None


def test_another_block_and_fewer_prompts_than_the_papers_are_departures(tiny, tmp_path):
    """A drafter of block 8 cut to 7, on three rows of mt-bench's 80 and on a set of our own."""
    torch.manual_seed(0)
    drafter = DSparkDrafter(replace(read_config(tiny.draft), block_size=8))
    save_drafter(tmp_path / "eight", drafter)
    asked = options(
        tiny, protocol="dspark-paper", temperature=1.0, draft_length=7, turns=1, n_prompts=None,
        suites=("mt-bench", str(tiny.prompts)),
    )  # fmt: skip
    document = run_eval(replace(asked, draft=tmp_path / "eight"))
    said = [
        f"protocol dspark-paper: {tmp_path / 'eight'} was trained with block 8, 7 there",
        "protocol dspark-paper: mt-bench has 3 prompts here, 80 there",
        "protocol dspark-paper: prompts is none of the paper's sets",
    ]
    assert document["protocol"]["departures"][-3:] == said
    assert set(said) <= set(document["warnings"])
    exact = Measured({"seven": 7}, {"mt-bench": 80, "gsm8k": 500})
    quiet = replace(asked, max_new_tokens=2048, dtype="bfloat16")
    assert list(departures("dspark-paper", quiet, exact)) == []


@pytest.mark.parametrize(
    "change", [{"temperature": 0.0}, {"draft_length": 5}, {"turns": None}, {"top_k": 3}]
)
def test_what_a_protocol_fixes_cannot_be_changed(tiny, change):
    values = {"temperature": 1.0, "draft_length": 7, "turns": 1, **change}
    (name,) = change
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')}: protocol dspark-paper has"):
        options(tiny, protocol="dspark-paper", **values)


def test_two_sets_of_one_name_are_refused(tiny, tmp_path):
    other = tmp_path / "mt-bench.jsonl"
    other.write_text('{"prompt": "a"}\n', encoding="utf-8")
    with pytest.raises(UserError, match="two sets are called mt-bench"):
        run_eval(options(tiny, suites=("mt-bench", str(other))))


def test_bench_asks_first_turns_and_says_so(tiny):
    path = tiny.prompts.with_name("mt-bench.jsonl")
    bench = BenchOptions(
        draft=tiny.draft, target=tiny.target, prompts=path, max_new_tokens=4, warmup=1, quiet=True
    )
    (suite,) = load_suites(path, n_prompts=3, seed=0)
    pair: Pair = load_pair(bench)
    warnings = bench_pair(pair, suite, bench)["extra"]["warnings"]
    assert "mt-bench: 2 prompts with later turns: only the first is asked" in warnings


def test_wrong_numbers_are_named(tiny):
    with pytest.raises(UserError, match="--turns: expected 1 or more"):
        options(tiny, turns=0)
    with pytest.raises(UserError, match="--plain: expected 0 or more"):
        options(tiny, plain=-1)
    with pytest.raises(UserError, match="expected a folder"):
        run_eval(options(tiny, suite_dir=Path("nowhere")))
