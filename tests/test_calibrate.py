"""`dspark calibrate`: files written, what is refused, and that decoding and eval use the result."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark.draft.calibration import Fitted
from dspark.draft.checkpoint import load_drafter, save_drafter
from dspark.draft.curves import curved_survival
from dspark.errors import UserError
from dspark.runtime.confidence import collect_rounds, raw_confidence
from dspark.runtime.cost_model import load_cost_model
from dspark.runtime.draft_head import DraftHead
from dspark.runtime.policies.choose import POLICIES, PolicyChoice, make_policy
from dspark.runtime.proposal import propose
from dspark.runtime.sampling import SamplingParams, request_generator
from dspark.wording import counted
from dspark_eval import calibrate as calibrate_module
from dspark_eval import step_times
from dspark_eval.acceptance import run_eval
from dspark_eval.calibrate import run_calibrate
from dspark_eval.reliability import plot_reliability
from dspark_eval.report import print_calibration
from dspark_eval.settings import CalibrateOptions, EvalOptions
from dspark_eval.sglang_files import setting_name, sps_table, sts_table
from dspark_eval.suites import load_suites
from tests.table_target import TableDrafter, TableTarget
from tests.test_calibration import GOOD, GREEDY
from tests.tiny_pair import BLOCK_SIZE, TinyPair, write_pair

VOCAB, BLOCK = 6, 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    made = write_pair(tmp_path_factory.mktemp("pair"))
    rows = [{"prompt": f"What is {number} + 4?"} for number in range(6)]
    made.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return made


def options(pair: TinyPair, **change: Any) -> CalibrateOptions:
    values = {"suites": (str(pair.prompts),), "max_new_tokens": 12, "quiet": True, **change}
    return CalibrateOptions(draft=pair.draft, target=pair.target, **values)


@pytest.fixture(scope="module")
def calibrated(
    pair: TinyPair, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TinyPair, dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("calibrated")
    shutil.copytree(pair.draft, folder / "draft")
    copy = replace(pair, draft=folder / "draft")
    out = folder / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_times, "REPEATS", 1)
        return copy, run_calibrate(options(copy, out=out, sglang=out / "sglang", profile=True)), out


# ------------------------------------------------------------------ rounds and what they feed


def test_confidence_is_calibrated_where_it_is_drafted_and_never_reads_its_own_token() -> None:
    """Slot k: logit = largest block logit + previous token, in closed form; T and curve of k."""
    target = TableTarget.random(VOCAB, seed=0)
    drafter = TableDrafter.random(VOCAB, BLOCK, seed=1)
    drafter.calibration = GOOD
    head = DraftHead(target, None)
    sampling = SamplingParams(temperature=1.0)
    entry = GOOD.settings[1]
    anchor = torch.tensor([2])
    seen = set()
    for seed in range(30):
        generator = request_generator(seed, 0, target.device)
        context = drafter.new_context(1, 8)
        made = propose(drafter, head, context, anchor, BLOCK, sampling, generator)
        before = [2, *made.tokens[0, :-1].tolist()]
        logits = np.array([[float(drafter.slots[k, 2].amax()) + before[k] for k in range(BLOCK)]])
        survival = curved_survival(logits, entry.temperatures, entry.curves)[0]
        expected = survival / np.array([1.0, *survival[:-1]])
        assert made.confidence[0].numpy() == pytest.approx(expected, rel=1e-4)
        seen.add((made.tokens[0, 0].item(), made.confidence[0, 0].item()))
    assert len({token for token, _ in seen}) > 1  # x_1 differed
    assert len({confidence for _, confidence in seen}) == 1  # c_1 did not


def test_collected_rounds_hold_the_raw_head_whatever_the_drafter_carries() -> None:
    target = TableTarget.random(VOCAB, seed=0)
    drafter = TableDrafter.of(target, BLOCK, 0.5, seed=1)
    sampling = SamplingParams(temperature=1.0)

    def collect() -> Any:
        return collect_rounds(
            target, drafter, [[1, 2], [3]], sampling=sampling, max_new_tokens=30, seed=0
        )

    raw = collect()
    drafter.calibration = GOOD
    assert (collect().logits[:, :1] == raw.logits[:, :1]).all()
    assert drafter.calibration is GOOD
    assert set(raw.prompt) == {0, 1}
    with pytest.raises(RuntimeError), raw_confidence(drafter):
        raise RuntimeError
    assert drafter.calibration is GOOD  # an interrupted collection leaves it as it was


# ------------------------------------------------------------------ the command


def test_the_drafter_carries_what_was_fitted(calibrated: Any) -> None:
    pair, document, _ = calibrated
    calibration = load_drafter(pair.draft).calibration
    assert [entry.temperature for entry in calibration.settings] == [0.0, 1.0]
    for entry, report in zip(calibration.settings, document["settings"], strict=True):
        assert list(entry.temperatures) == report["temperatures"]
        assert (entry.rounds, entry.prompts) == (report["rounds"], 6)
        assert len(entry.temperatures) == BLOCK_SIZE


def test_the_report_holds_the_points_of_the_diagram(calibrated: Any) -> None:
    """The bins of `after` give back `ece_after`: what is drawn is what was measured."""
    _, document, out = calibrated
    assert json.loads((out / "reliability.json").read_text()) == json.loads(json.dumps(document))
    for report in document["settings"]:
        for slot, diagram in enumerate(report["diagram"]):
            for name in ("before", "after"):
                bins = diagram[name]
                gaps = np.abs(np.array(bins["predicted_sum"]) - np.array(bins["survived"]))
                count = sum(bins["rounds"])
                found = gaps.sum() / count if count else None
                assert report[f"ece_{name}"][slot] == (found and pytest.approx(found))
    for name in ("reliability-t0.png", "reliability-t1.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_files_for_sglang_have_exactly_its_keys(calibrated: Any) -> None:
    _, document, out = calibrated
    for report, name in zip(document["settings"], ("sts-t0.json", "sts-t1.json"), strict=True):
        table = json.loads((out / "sglang" / name).read_text())
        assert list(table) == [
            "temperatures", "dataset", "num_samples", "ece_before", "ece_after"
        ]  # fmt: skip
        assert table["temperatures"] == report["temperatures"]
        assert table["ece_after"] == report["ece_scaled"]
        assert table["num_samples"] == report["rounds"]
    costs = json.loads((out / "sglang" / "sps.json").read_text())
    assert list(costs) == ["sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens"]
    assert costs["sample_batch_tokens"] == list(range(1, BLOCK_SIZE + 2))
    assert costs["max_batch_tokens"] == BLOCK_SIZE + 1
    assert all(math.isfinite(rate) and rate > 0 for rate in costs["sample_steps_per_sec"])


def test_thresholds_are_fitted_on_the_step_times_and_used_by_their_policies(
    calibrated: Any,
) -> None:
    """In the file, in the drafter, in the policy of the setting; a later call may drop them."""
    pair, document, _ = calibrated
    cost = load_cost_model(pair.draft / "cost_model.json")
    assert [costs.batch for costs in cost.batches] == [1]
    drafter = load_drafter(pair.draft)
    for entry, report in zip(drafter.calibration.settings, document["settings"], strict=True):
        assert asdict(entry.stops) == report["stops"]
        rates = entry.stops.tokens_per_s
        assert set(rates) == {"plain", *(set(POLICIES) - {"auto"})}
        assert rates["plain"] == pytest.approx(1 / cost.plain_s())
        drafting = {name: rate for name, rate in rates.items() if name != "plain"}
        assert rates[entry.stops.best] == max(drafting.values())  # several may be as fast
        sampling = SamplingParams(entry.temperature)
        known = {"calibration": drafter.calibration, "cost": cost}
        entropy = make_policy(PolicyChoice("entropy"), sampling, **known)
        confidence = make_policy(PolicyChoice("confidence"), sampling, **known)
        assert entropy.h_stop == entry.stops.h_stop
        assert confidence.s_stop == entry.stops.s_stop
        asked = make_policy(PolicyChoice("confidence", s_stop=0.9), sampling, **known)
        assert asked.s_stop == 0.9
        auto = make_policy(PolicyChoice("auto"), sampling, **known)
        assert auto.inner.name == entry.stops.best


def test_without_step_times_nothing_is_fitted_and_that_is_said(
    pair: TinyPair, tmp_path: Path
) -> None:
    shutil.copytree(pair.draft, tmp_path / "draft")
    document = run_calibrate(options(replace(pair, draft=tmp_path / "draft")))
    assert [report["stops"] for report in document["settings"]] == [None, None]
    assert any("give --profile" in line for line in document["warnings"])
    assert any("few prompts (" in line for line in document["warnings"])


def test_eval_reports_the_calibrated_confidence(calibrated: Any) -> None:
    pair, _, _ = calibrated

    def evaluate(temperature: float) -> Any:
        return run_eval(
            EvalOptions(
                draft=pair.draft, target=pair.target, suites=(str(pair.prompts),),
                max_new_tokens=12, temperature=temperature, quiet=True,
            )
        )  # fmt: skip

    document = evaluate(1.0)
    found = document["suites"]["prompts"]["confidence"]
    assert (found["calibrated_for"], found["exact_setting"]) == ("temperature 1", True)
    assert len(found["ece"]) == len(found["auc"]) == len(found["brier"]) == BLOCK_SIZE
    assert 0 <= found["average_ece"] <= 1
    assert not any("calibrated" in line for line in document["warnings"])
    near = evaluate(0.8)
    assert near["suites"]["prompts"]["confidence"]["exact_setting"] is False
    assert any("not calibrated for temperature 0.8" in line for line in near["warnings"])


def test_eval_says_when_nothing_was_fitted(pair: TinyPair) -> None:
    document = run_eval(
        EvalOptions(draft=pair.draft, target=pair.target, suites=(str(pair.prompts),),
                    max_new_tokens=4, quiet=True)
    )  # fmt: skip
    assert document["suites"]["prompts"]["confidence"]["calibrated_for"] is None
    assert any("is not calibrated; run" in line for line in document["warnings"])


def test_a_second_call_adds_its_setting_and_keeps_the_others(calibrated: Any) -> None:
    pair, _, out = calibrated
    before = load_drafter(pair.draft).calibration
    run_calibrate(options(pair, temperature=(0.5,), out=out / "second"))
    after = load_drafter(pair.draft).calibration
    assert [entry.temperature for entry in after.settings] == [0.0, 0.5, 1.0]
    assert (after.settings[0], after.settings[2]) == before.settings


def entries(pair: TinyPair) -> dict[float, Fitted]:
    return {entry.temperature: entry for entry in load_drafter(pair.draft).calibration.settings}


def test_a_fit_on_fewer_prompts_replaces_none_on_more_unless_told(
    calibrated: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before target and drafter are read; another temperature may have any fit."""
    shutil.copytree(calibrated[0].draft, tmp_path / "draft")
    pair = replace(calibrated[0], draft=tmp_path / "draft")
    path = pair.draft / "calibration.json"
    before, text = entries(pair), path.read_bytes()
    few = {"n_prompts": 2, "max_new_tokens": 4, "out": tmp_path / "out"}
    with monkeypatch.context() as patch, pytest.raises(UserError) as refused:
        patch.setattr(calibrate_module, "load_pair", None)
        run_calibrate(options(pair, temperature=(0.25, 1.0), **few))
    said = str(refused.value)
    assert said.startswith(f"{path}: fitted on 6 prompts at temperature 1, which 2 would replace;")
    assert "--n-prompts" in said
    assert "--replace" in said
    assert "\n" not in said
    assert path.read_bytes() == text
    run_calibrate(options(pair, temperature=(0.25,), **few))
    beside = entries(pair)
    assert beside == before | {0.25: beside[0.25]}
    document = run_calibrate(options(pair, temperature=(1.0,), replace=True, **few))
    after = entries(pair)
    assert after == beside | {1.0: after[1.0]}
    assert after[1.0].prompts == document["settings"][0]["prompts"] == 2
    rounds = counted(after[1.0].rounds, "round")
    replaced = f"temperature 1: a fit on {rounds} has replaced one on {before[1.0].rounds}"
    assert replaced in document["warnings"]
    assert any("slots 1 to 4 reached by n = " in line for line in document["warnings"])
    assert document["settings"][0]["reached"] == list(after[1.0].reached)


def test_as_many_prompts_replace_the_fit(calibrated: Any, tmp_path: Path) -> None:
    """Other sets may fill up the number, and about as many rounds are nothing to mention."""
    shutil.copytree(calibrated[0].draft, tmp_path / "draft")
    pair = replace(calibrated[0], draft=tmp_path / "draft")
    document = run_calibrate(options(pair, temperature=(1.0,), seed=1))
    assert not any("has replaced" in line for line in document["warnings"])
    half = pair.draft / "half.jsonl"
    half.write_text("".join(pair.prompts.read_text().splitlines(keepends=True)[:3]))
    sets = {"suites": (str(pair.prompts), str(half)), "max_new_tokens": 6}
    run_calibrate(options(pair, temperature=(0.0,), n_prompts=3, **sets))
    assert entries(pair)[0.0].prompts == 6
    assert entries(pair)[0.0].rounds < calibrated[1]["settings"][0]["rounds"]


def test_the_table_shows_before_after_and_what_chance_shows(calibrated: Any, capsys: Any) -> None:
    print_calibration(calibrated[1], "x/calibration.json")
    shown = capsys.readouterr().out
    for text in ("the head's own", "with temperatures and curves", "a perfect forecast",
                 "written to x/calibration.json"):  # fmt: skip
        assert text in shown


def test_a_slot_without_rounds_is_drawn_and_printed(
    calibrated: Any, tmp_path: Path, capsys: Any
) -> None:
    document = json.loads(json.dumps(calibrated[1]))
    report = document["settings"][0]
    for name in ("before", "after"):
        report["diagram"][-1][name] = {"rounds": [0], "predicted_sum": [0], "survived": [0]}
    for key in ("ece_before", "ece_scaled", "ece_after", "ece_floor", "auc"):
        report[key][-1] = None
    plot_reliability(document, report, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    print_calibration(document, "x")
    assert ", - (0 of 0)" in " ".join(capsys.readouterr().out.split())


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_prompts": 1}, "--n-prompts: expected 2 or more"),
        ({"temperature": ()}, "--temperature: expected at least one"),
        ({"temperature": (1.0, 1.0)}, "--temperature: each value once"),
        ({"temperature": (-1.0,)}, "temperature"),
        ({"suites": ()}, "--suite"),
        ({"profile": True, "cost_model": Path(__file__).parent}, "--cost-model .*a folder"),
        ({"out": Path(__file__, "x")}, "--out: .* is a file"),
        ({"sglang": Path(__file__, "x")}, "--sglang: .* is a file"),
    ],
)
def test_wrong_options_are_named(pair: TinyPair, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        options(pair, **change)


def test_a_drafter_without_a_confidence_head_is_refused(pair: TinyPair, tmp_path: Path) -> None:
    from dspark.draft.model import DSparkDrafter

    config = replace(load_drafter(pair.draft).config, enable_confidence_head=False)
    save_drafter(tmp_path / "silent", DSparkDrafter(config))
    with pytest.raises(UserError, match="no confidence head"):
        run_calibrate(options(replace(pair, draft=tmp_path / "silent")))


def test_one_prompt_or_answers_without_rounds_are_refused(pair: TinyPair, tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text('{"prompt": "a"}\n', encoding="utf-8")
    with pytest.raises(UserError, match="--suite: 1 prompt; at least 2"):
        run_calibrate(options(pair, suites=(str(path),)))
    with pytest.raises(UserError, match="0 of the prompts had a round"):
        run_calibrate(options(pair, max_new_tokens=2))  # one token after the first: a plain step


def test_sglangs_format_has_no_word_for_an_unmeasured_slot() -> None:
    with pytest.raises(UserError, match="slot 3 was never verified at temperature 0"):
        sts_table(GREEDY, "x")
    whole = replace(GREEDY, ece_before=(0.1, 0.2, 0.3), ece_scaled=(0.1, 0.1, 0.2))
    assert sts_table(whole, "mine") == {
        "temperatures": [2.0, 0.5, 1.0], "dataset": "mine", "num_samples": 900,
        "ece_before": [0.1, 0.2, 0.3], "ece_after": [0.1, 0.1, 0.2],
    }  # fmt: skip
    assert sps_table({2: 0.5, 1: 0.25}) == {
        "sample_batch_tokens": [1, 2], "sample_steps_per_sec": [4.0, 2.0], "max_batch_tokens": 2
    }  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "name"),
    [((0.0, 0.9, 5), "t0"), ((1.0, 1.0, 0), "t1"), ((0.7, 0.95, 50), "t0.7-p0.95-k50")],
)
def test_file_names_tell_the_setting(setting: tuple[float, float, int], name: str) -> None:
    keys = ("temperature", "top_p", "top_k")
    assert setting_name(dict(zip(keys, setting, strict=True))) == name


def test_the_validation_suite_is_as_large_as_asked_and_ships_nowhere() -> None:
    (suite,) = load_suites("nano-validation", n_prompts=300, seed=980406)
    asked = {row.prompt[0]["content"] for row in suite.rows}
    assert len(asked) == 300
    assert load_suites("nano-validation", n_prompts=300, seed=980406)[0].rows == suite.rows
    from dspark.assets import asset
    from dspark.distill.prompts import read_prompts

    for name in ("train", "test"):
        shipped = read_prompts([asset(f"prompts/{name}.jsonl")], strict=True).rows
        assert not asked & {row.prompt[0]["content"] for row in shipped}
