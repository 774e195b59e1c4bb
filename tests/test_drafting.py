"""Policies, bands, block verification and relaxation through `bench` and `eval`, on a tiny pair."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.errors import UserError
from dspark.runtime.policies import Auto, Bands, Confidence, Delayed, Entropy, Fixed, Throughput
from dspark.runtime.policies.choose import POLICIES, PolicyChoice, make_policy
from dspark.runtime.records import Generation, RoundRecord
from dspark.runtime.sampling import SamplingParams
from dspark_eval import outcomes, step_times
from dspark_eval.acceptance import run_eval
from dspark_eval.bench import run_bench
from dspark_eval.mismatches import find_mismatches
from dspark_eval.report import print_bench, print_eval
from dspark_eval.report_notes import outcome_lines
from dspark_eval.settings import BenchOptions, EvalOptions
from dspark_eval.speed import PromptTimings
from tests.test_policies import cost
from tests.tiny_pair import BLOCK_SIZE, TinyPair, write_pair
from tests.toy_target import ToyTarget


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    made = write_pair(tmp_path_factory.mktemp("pair"))
    costs = cost(3, 1).to_dict()
    (made.draft / "cost_model.json").write_text(json.dumps(costs), encoding="utf-8")
    return made


def bench(pair: TinyPair, **change: Any) -> dict[str, Any]:
    values = {"max_new_tokens": 12, "warmup": 1, "quiet": True, **change}
    options = BenchOptions(draft=pair.draft, target=pair.target, prompts=pair.prompts, **values)
    return run_bench(options)


def evaluate(pair: TinyPair, **change: Any) -> dict[str, Any]:
    values = {"max_new_tokens": 12, "quiet": True, **change}
    return run_eval(
        EvalOptions(draft=pair.draft, target=pair.target, suites=(str(pair.prompts),), **values)
    )


# ------------------------------------------------------------------ every policy, every option


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bands", [False, True], ids=["", "bands"])
def test_every_policy_decodes_the_targets_own_text(pair, policy, bands):
    """Greedy, float32: the same tokens as plain decoding, whatever was cut and whoever stood by."""
    extra = {"bands": True, "high": 1.0, "low": 0.1, "siblings": 2} if bands else {}
    run = bench(pair, policy=policy, **extra)
    assert run["greedy_mismatches"] == 0
    assert run["policy"] == policy
    settings = run["policy_settings"]
    assert settings["name"] == policy
    assert settings["draft_length"] == BLOCK_SIZE
    assert ("bands" in json.dumps(settings)) == bands
    assert sum(run["levels"].values()) == pytest.approx(1)
    assert sum(band["share"] for band in run["bands"].values()) == pytest.approx(1)
    if bands:
        assert run["rows_per_round"] > 1 + run["draft_length_mean"]  # siblings are rows
    else:
        assert run["sibling_rate"] == run["levels"]["sibling"] == 0


@pytest.mark.parametrize("verification", ["token", "block"])
def test_the_verification_method_is_named_in_every_document(pair, verification):
    run = bench(pair, verification=verification, temperature=(0.0, 1.0), n_prompts=2)
    assert [r["verification"] for r in run["runs"]] == [verification] * 2
    assert run["greedy_mismatches"] == 0
    document = evaluate(pair, verification=verification, temperature=1.0)
    assert document["suites"]["prompts"]["verification"] == verification


def test_the_draft_length_bounds_every_policy(pair):
    for policy in ("entropy", "confidence", "throughput", "throughput-delayed", "fixed"):
        run = bench(pair, policy=policy, draft_length=2, n_prompts=1)
        assert run["extra"]["draft_length"] == 2
        assert run["draft_length_mean"] <= 2
        assert len(run["conditional_acceptance"]) <= 2


def test_eval_takes_the_same_options(pair, capsys):
    document = evaluate(pair, policy="confidence", bands=True, siblings=1)
    suite = document["suites"]["prompts"]
    assert (document["policy"], suite["policy"]) == ("confidence", "confidence")
    assert suite["policy_settings"]["bands"]["siblings"] == 1
    assert suite["break_even"] is None  # plain decoding was not measured
    print_eval(document)
    shown = capsys.readouterr().out
    assert "confidence, s_stop 0.5" in shown
    assert "with 1 sibling," in shown
    assert "rounds ended" in shown
    assert "drafted positions by band" in shown


def test_profile_measures_writes_and_prints(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(step_times, "REPEATS", 1)
    monkeypatch.setattr(step_times, "BATCHES", (1, 2))
    path = tmp_path / "here.json"
    run = bench(pair, policy="throughput", profile=True, cost_model=path, n_prompts=2)
    written = json.loads(path.read_text())
    assert run["extra"]["profile"] == written
    assert [entry["batch"] for entry in written["batches"]] == [1, 2]
    assert run["policy_settings"]["cost"]["batches"] == [1, 2]
    assert run["break_even"] > 0
    print_bench([run])
    shown = capsys.readouterr().out
    assert "speculation pays above an accepted length of" in shown
    assert "speculation pays above tau = " in shown
    assert "throughput" in shown
    again = bench(pair, policy="throughput", cost_model=path, n_prompts=1)
    assert again["extra"]["profile"] is None
    assert not any("measured on another" in line for line in again["extra"]["warnings"])


def test_a_cost_model_of_another_machine_is_said(pair):
    run = bench(pair, policy="throughput", n_prompts=1)
    (said,) = (line for line in run["extra"]["warnings"] if "cost_model.json" in line)
    assert "measured with target" in said
    assert not any("cost_model" in line for line in bench(pair, n_prompts=1)["extra"]["warnings"])


def test_a_confidence_that_was_not_fitted_is_said_where_decisions_rest_on_it(pair):
    run = bench(pair, policy="confidence", n_prompts=1)
    assert any("not calibrated" in line for line in run["extra"]["warnings"])
    run = bench(pair, policy="entropy", n_prompts=1)
    assert not any("not calibrated" in line for line in run["extra"]["warnings"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"policy": "lucky"}, "--policy: expected one of fixed"),
        ({"high": 0.8}, "--high: a setting of the bands"),
        ({"low": 0.1}, "--low: "),
        ({"siblings": 2}, "--siblings: "),
        ({"bands": True, "siblings": -1}, "--siblings: expected 0 or more"),
        ({"verification": "tree"}, "--verification: expected token or block"),
        ({"relaxed": True, "verification": "block"}, "--relaxed: works with"),
        ({"draft_length": 0}, "--draft-length"),
        ({"cost_model": Path("c.json")}, "--cost-model: policy fixed reads no step times"),
    ],
)
@pytest.mark.parametrize("options", [BenchOptions, EvalOptions])
def test_what_cannot_be_is_refused_before_anything_is_loaded(options, change, named):
    with pytest.raises(UserError, match=named):
        options(draft="runs/mine", **change)


def test_a_missing_cost_model_is_named(pair, tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.json"):
        bench(pair, policy="throughput", cost_model=tmp_path / "nowhere.json")
    bare = write_pair(tmp_path)
    with pytest.raises(UserError, match=r"--policy throughput: needs step times"):
        bench(bare, policy="throughput")


# ------------------------------------------------------------------ relaxed acceptance


def test_relaxed_prints_its_distance_and_accuracy_beside_its_numbers(pair, capsys, monkeypatch):
    """An untrained head says 0.5 everywhere: relaxed from there on, most tokens are typical."""
    from dspark_eval import drafting

    loose = lambda: drafting_relaxed(high=0.0, epsilon=0.0, delta=0.0)  # noqa: E731
    drafting_relaxed = drafting.Relaxed
    monkeypatch.setattr(drafting, "Relaxed", loose)
    run = bench(pair, relaxed=True, temperature=(1.0,))
    found = run["relaxed"]
    assert 0 < found["tv_mean"] <= found["tv_max"] <= 1
    assert found["exact_answers"] is not None
    assert found["accuracy_change"] == found["exact_answers"] - found["exact_answers_lossless"]
    assert run["policy_settings"]["relaxed"] == {"high": 0.0, "epsilon": 0.0, "delta": 0.0}
    assert run["acceptance_rate"] == 1  # everything passes
    print_bench([run])
    shown = capsys.readouterr().out
    assert "…" not in shown  # nothing is cut at the 80 columns of a pipe
    assert "RELAXED: TV" in shown
    assert "RELAXED acceptance, not the target's distribution" in shown
    document = evaluate(pair, relaxed=True, temperature=1.0)
    assert document["suites"]["prompts"]["relaxed"]["tv_mean"] > 0
    assert document["suites"]["prompts"]["relaxed"]["accuracy_change"] is not None
    print_eval(document)
    assert "RELAXED: TV" in capsys.readouterr().out


def test_a_lossless_run_says_nothing_of_relaxation(pair, capsys):
    run = bench(pair, temperature=(1.0,), n_prompts=1)
    assert run["relaxed"] is None
    print_bench([run])
    assert "RELAXED" not in capsys.readouterr().out


# ------------------------------------------------------------------ outcomes by hand


def record(k: int, a: int, level: int, **more: Any) -> RoundRecord:
    emitted = a + 1 + more.get("sibling", 0)
    confidence = more.pop("confidence", (0.5,) * k)
    return RoundRecord(k, k, a, emitted, level, 0, 0, 0, confidence, (1.0,) * k, **more)


def test_levels_and_bands_by_hand():
    """Two rounds of three: 0.95 0.5 0.2, one accepted each before a rejection and a sibling."""
    rounds = [
        record(3, 1, 2, confidence=(0.95, 0.5, 0.2)),
        record(3, 1, 1, sibling=True, confidence=(0.95, 0.5, 0.2)),
        record(0, 0, 0),
        record(1, 1, 3, confidence=(0.95,)),
    ]
    assert outcomes.level_shares(rounds) == {
        "all_accepted": 0, "sibling": 0.25, "corrected": 0.25, "cut": 0.25, "plain": 0.25,
    }  # fmt: skip
    table = outcomes.band_table([rounds])
    sure = {"accepted": 1.0, "sibling": 0.0, "corrected": 0.0, "cut": 0.0}
    keys = ("share", "reached", "acceptance", "levels")
    assert [table["high"][key] for key in keys] == [3 / 7, 3, 1.0, sure]
    half = {"accepted": 0.0, "sibling": 0.5, "corrected": 0.5, "cut": 0.0}
    assert [table["mid"][key] for key in keys] == [2 / 7, 2, 0.0, half]
    assert [table["low"][key] for key in keys] == [2 / 7, 0, None, None]
    named = [dataclasses.replace(rounds[0], bands=("high", "high", "low"))]
    assert outcomes.band_table([named])["high"]["acceptance"] == 0.5
    assert outcomes.level_shares([]) is None
    assert outcomes.band_table([[record(2, 1, 2, confidence=())]]) is None


def test_distances_are_per_emitted_token():
    rounds = [record(2, 1, 2, distance=(0.2, 0.0)), record(2, 2, 0, distance=(0.1, 0.1))]
    assert outcomes.distances(rounds) == {
        "tv_mean": pytest.approx(0.4 / 5),
        "tv_max": 0.2,
    }
    assert outcomes.distances([record(2, 1, 2)]) is None


# ------------------------------------------------------------------ the policy of a name


def test_names_make_policies_with_fitted_values_and_defaults():
    greedy = SamplingParams()
    made = {name: make_policy(PolicyChoice(name), greedy, cost=cost()) for name in POLICIES}
    kinds = (Fixed, Entropy, Confidence, Throughput, Delayed, Auto)
    assert [type(policy) for policy in made.values()] == list(kinds)
    assert made["entropy"] == Entropy()
    assert make_policy(PolicyChoice("entropy", 1), greedy) == Entropy(1, 1)
    auto = made["auto"]
    assert isinstance(auto, Auto)
    assert isinstance(auto.inner, Entropy)  # nothing is calibrated
    bands = make_policy(PolicyChoice("auto", bands=True), greedy)
    assert isinstance(bands, Auto)
    assert isinstance(bands.inner, Bands)
    with pytest.raises(UserError, match="--bands: the drafter has no confidence head"):
        make_policy(PolicyChoice("fixed", bands=True), greedy, has_confidence=False)
    with pytest.raises(UserError, match="--policy confidence: the drafter has no"):
        make_policy(PolicyChoice("confidence"), greedy, has_confidence=False)
    silent = make_policy(PolicyChoice("auto"), greedy, has_confidence=False)
    assert isinstance(silent, Auto)
    assert isinstance(silent.inner, Entropy)


# ------------------------------------------------------------------ near-ties


def test_a_mismatch_at_a_near_tie_is_told_from_a_defect():
    """The gap against rounding of the target's own dtype."""
    target, prompt = ToyTarget(), [5, 6, 7]
    entry = PromptTimings(3)
    entry.plain.append(Generation([10, 11], "length", 0.1, 0.1))
    entry.speculative.append(Generation([10, 13], "length", 0.1, 0.1))
    (clear,) = find_mismatches(target, [prompt], [entry])
    assert not clear.near_tie
    assert clear.top2_gap > 1e-3
    real = target.logits

    def tied(hidden: torch.Tensor) -> torch.Tensor:
        logits = real(hidden)
        best = logits.topk(2, dim=-1)
        return logits.scatter(-1, best.indices[..., 1:], best.values[..., :1] - 1e-7)

    target.logits = tied  # type: ignore[method-assign]
    (near,) = find_mismatches(target, [prompt], [entry])
    assert near.near_tie


def test_the_table_shows_the_first_mismatches(pair, capsys):
    run = bench(pair, n_prompts=1)
    found = {"prompt": 3, "position": 17, "plain_token": 5, "speculative_token": 9}
    entry = {**found, "top2_gap": 0.00125, "near_tie": True}
    run["extra"]["mismatches"] = [entry] * 5
    print_bench([run])
    shown = capsys.readouterr().out
    assert "5 answers unlike plain decoding's, 5 of them first at a near-tie" in shown
    assert shown.count("prompt 3, token 17: plain 5, speculative 9, gap of the top") == 3
    assert "0.00125" in shown


def test_paths_are_not_required(tmp_path: Path) -> None:
    assert BenchOptions(draft=tmp_path).choice() == PolicyChoice()


def test_eval_measures_step_times_too(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(step_times, "REPEATS", 1)
    path = tmp_path / "here.json"
    evaluate(pair, policy="throughput", profile=True, cost_model=path, n_prompts=1)
    assert json.loads(path.read_text())["batches"][0]["batch"] == 1


def test_a_band_that_no_round_reached_has_no_rate() -> None:
    run = {
        "levels": {"all_accepted": 1.0}, "rows_per_round": 9.0, "draft_length_mean": 7.5,
        "bands": {"high": {"share": 0.25, "acceptance": None},
                  "mid": {"share": 0.75, "acceptance": 0.5, "reached": 90, "n_prompts": 40,
                          "few": False}},
    }  # fmt: skip
    assert list(outcome_lines(run, "x")) == [
        "x: rounds ended all accepted 100.0 %; 9.00 rows a round, 7.50 of them drafts that were "
        "judged",
        "x: drafted positions by band high 25.0 % (never reached), mid 75.0 % (accepted 50.0 % "
        "of 90)",
    ]
