"""`calibration.json`: what is written, what loads, and which entry a sampling setting gets."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.draft import DraftConfig, DSparkDrafter
from dspark.draft.calibration import Calibration, Fitted, Stops, measured
from dspark.draft.calibration_file import calibration_from_dict
from dspark.draft.checkpoint import load_drafter, read_calibration, save_drafter
from dspark.errors import UserError
from dspark.files import json_text
from dspark.runtime.sampling import SamplingParams

CONFIG = DraftConfig(
    hidden_size=16,
    num_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=24,
    vocab_size=50,
    num_target_layers=6,
    target_layer_ids=(1, 3),
    target_tap_kind="attn_res_mixture",
    mask_token_id=49,
    block_size=3,
    markov_rank=6,
)
HELD_OUT = {"acceptance": [0.75, 0.5, None], "confidence_per_slot": [0.8, 0.625, None], "loss": 1.0}
RAW = measured(HELD_OUT, CONFIG, 7)
GREEDY = Fitted(
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    method="token",
    temperatures=(2.0, 0.5, 1.0),
    curves=((1.0, 1.0, 0.0), (0.5, 1.5, -0.25), (1.0, 1.0, 0.0)),
    ece_before=(0.06, 0.07, None),
    ece_scaled=(0.02, 0.03, None),
    ece_after=(0.01, 0.02, None),
    ece_floor=(0.01, 0.015, None),
    auc=(0.8, None, None),
    brier=(0.2, 0.1, None),
    average_ece_after_ci95=(0.008, 0.02),
    rounds=900,
    prompts=60,
    reached=(900, 700, 0),
)
WARM = replace(GREEDY, temperature=1.0, temperatures=(1.5, 1.25, 3.0), average_ece_after_ci95=None)
NUCLEUS = replace(WARM, top_p=0.9, temperatures=(4.0, 4.0, 4.0))
GOOD = RAW.with_fitted(GREEDY, WARM)


def folder_with(tmp_path: Path, text: str | None) -> Path:
    folder = tmp_path / "draft"
    save_drafter(folder, DSparkDrafter(CONFIG))
    if text is not None:
        (folder / "calibration.json").write_text(text, encoding="utf-8")
    return folder


def sampling(temperature: float, top_p: float = 1.0, top_k: int = 0) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)


# ------------------------------------------------------------------ what is written


def test_what_is_known_is_written_and_what_is_not_is_said() -> None:
    assert RAW.to_dict() == {
        "schema_version": 2,
        "calibrated": False,
        "measured_on": "held-out rows, teacher-forced, temperature 1",
        "confidence_per_slot": [0.8, 0.625, None],
        "acceptance_per_slot": [0.75, 0.5, None],
        "rows": 7,
        "settings": [],
    }
    none = (None, None, None)
    assert measured(None, CONFIG, 7) == Calibration(None, none, none, 0)


def test_a_fitted_entry_stands_in_the_file_as_it_is() -> None:
    written = GOOD.to_dict()
    assert written["calibrated"] is True
    assert written["settings"][0] == {
        "temperature": 0.0, "top_p": 1.0, "top_k": 0, "method": "token",
        "temperatures": [2.0, 0.5, 1.0],
        "curves": [[1.0, 1.0, 0.0], [0.5, 1.5, -0.25], [1.0, 1.0, 0.0]],
        "ece_before": [0.06, 0.07, None], "ece_scaled": [0.02, 0.03, None],
        "ece_after": [0.01, 0.02, None], "ece_floor": [0.01, 0.015, None],
        "auc": [0.8, None, None], "brier": [0.2, 0.1, None],
        "average_ece_after_ci95": [0.008, 0.02], "rounds": 900, "prompts": 60, "stops": None,
        "reached": [900, 700, 0],
    }  # fmt: skip


def test_a_drafter_without_a_confidence_head_has_said_nothing() -> None:
    """The report holds zeros for it, and a confidence of 0 would be a statement."""
    silent = measured(
        HELD_OUT | {"confidence_per_slot": [0.0, 0.0, None]},
        replace(CONFIG, enable_confidence_head=False),
        7,
    )
    assert silent.confidence_per_slot == (None, None, None)
    assert silent.acceptance_per_slot == (0.75, 0.5, None)


def test_a_new_entry_replaces_the_one_for_its_setting() -> None:
    again = replace(WARM, temperatures=(9.0, 9.0, 9.0))
    assert GOOD.with_fitted(NUCLEUS, again).settings == (GREEDY, NUCLEUS, again)
    with pytest.raises(ValueError, match="4 temperatures for 3 slots"):
        GOOD.with_fitted(replace(WARM, temperatures=(1.0,) * 4))
    with pytest.raises(ValueError, match="2 curves for 3 slots"):
        GOOD.with_fitted(replace(WARM, curves=WARM.curves[:2]))


# ------------------------------------------------------------------ which entry is used


def test_the_nearest_entry_is_used_and_known_to_be_only_near() -> None:
    calibration = GOOD.with_fitted(NUCLEUS)
    assert calibration.nearest(sampling(1.0)) == (WARM, True)
    assert calibration.nearest(sampling(0.0)) == (GREEDY, True)
    assert calibration.nearest(sampling(0.4)) == (GREEDY, False)
    assert calibration.nearest(sampling(0.6)) == (WARM, False)
    assert calibration.nearest(sampling(1.0, top_p=0.91)) == (NUCLEUS, False)
    assert calibration.nearest(sampling(1.0, top_k=50)) == (WARM, False)
    assert RAW.nearest(sampling(1.0)) is None


def test_greedy_decoding_has_one_setting_whatever_the_filters() -> None:
    assert GOOD.nearest(sampling(0.0, top_p=0.5, top_k=3)) == (GREEDY, True)


def test_an_unknown_setting_says_which_entry_stands_in() -> None:
    assert GOOD.warning(sampling(1.0)) is None
    said = GOOD.warning(sampling(0.7, top_p=0.9))
    assert said is not None
    assert "not calibrated for temperature 0.7, top-p 0.9: the entry for temperature 1 is" in said
    assert "not calibrated; run `dspark calibrate`" in str(RAW.warning(sampling(1.0)))


def test_confidence_is_the_step_of_the_calibrated_survival() -> None:
    """By hand: slot 1 has the identity curve; slot 2 bends the product P of both."""
    logits = torch.tensor([[2.0, -1.0], [0.0, 3.0]])
    expected = []
    for first, second in logits.tolist():
        one = 1 / (1 + math.exp(-first / 2.0))
        product = one / (1 + math.exp(-second / 0.5))
        score = 0.5 * math.log(product) - 1.5 * math.log(1 - product) - 0.25
        two = min(one, 1 / (1 + math.exp(-score)))
        expected.append([one, two / one])
    found = GOOD.confidence(logits, sampling(0.0))
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=0)
    assert torch.equal(RAW.confidence(logits, sampling(0.0)), torch.sigmoid(logits))
    assert GOOD.confidence(logits.bfloat16(), sampling(1.0)).dtype == torch.float32


def test_slots_that_few_rounds_reached_are_named() -> None:
    assert WARM.sparse == "slot 3 reached by n = 0 rounds: corrected as slot 2"
    several = replace(WARM, reached=(10, 9, 0)).sparse
    assert several == "slots 2 to 3 reached by n = 9, 0 rounds: corrected as slot 1"
    none = replace(WARM, reached=(5, 1, 0)).sparse
    assert none == "slots 1 to 3 reached by n = 5, 1, 0 rounds: not corrected"
    assert replace(WARM, reached=(900, 100, 10)).sparse is None
    assert replace(WARM, reached=None).sparse is None  # written before it was kept


# ------------------------------------------------------------------ what loads


@pytest.mark.parametrize("calibration", [RAW, GOOD, measured(None, CONFIG, 0)])
def test_a_drafter_carries_it_through_save_and_load(tmp_path: Path, calibration: Any) -> None:
    drafter = DSparkDrafter(CONFIG)
    drafter.calibration = calibration
    save_drafter(tmp_path / "a", drafter)
    loaded = load_drafter(tmp_path / "a")
    assert loaded.calibration == calibration
    assert read_calibration(tmp_path / "a", CONFIG) == calibration
    save_drafter(tmp_path / "b", loaded)
    first, second = (tmp_path / name / "calibration.json" for name in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_a_drafter_without_one_writes_none(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, None)
    assert not (folder / "calibration.json").exists()
    assert load_drafter(folder).calibration is None


def test_its_name_is_not_free_for_other_texts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'calibration\.json' is not a free file name"):
        save_drafter(tmp_path / "a", DSparkDrafter(CONFIG), texts={"calibration.json": "{}"})


def test_version_1_is_read_as_uncalibrated(tmp_path: Path) -> None:
    old = {
        "schema_version": 1,
        "calibrated": False,
        "temperatures": None,
        "measured_on": "held-out rows, teacher-forced, temperature 1",
        "confidence_per_slot": [0.8, 0.625, None],
        "acceptance_per_slot": [0.75, 0.5, None],
        "rows": 7,
    }
    assert load_drafter(folder_with(tmp_path, json.dumps(old))).calibration == RAW
    claims = old | {"calibrated": True, "temperatures": [1.0, 1.0, 1.0]}
    with pytest.raises(UserError, match="version 1 had none"):
        load_drafter(folder_with(tmp_path, json.dumps(claims)))


BAD = {
    "schema_version: 3 given": {"schema_version": 3},
    "schema_version: None given": {"schema_version": None},
    "schema_version: True given": {"schema_version": True},
    "calibrated: False given, True was expected with 2": {"calibrated": False},
    "settings: a list was": {"settings": None},
    "confidence_per_slot: a list of 3": {"confidence_per_slot": None},
    "acceptance_per_slot: a list of 3": {"acceptance_per_slot": [0.5] * 4},
    "acceptance_per_slot: a list of 3 numbers": {"acceptance_per_slot": "0.5"},
    "confidence_per_slot: 1.5 given": {"confidence_per_slot": [0.5, 1.5, 0.5]},
    "confidence_per_slot: nan given": {"confidence_per_slot": [0.5, float("nan"), 0.5]},
    "confidence_per_slot: True given": {"confidence_per_slot": [True, 0.5, 0.5]},
    "rows: -1 given": {"rows": -1},
    "measured_on: 3 given": {"measured_on": 3},
    "settings: temperature 0 occurs twice": {"settings": [GOOD.to_dict()["settings"][0]] * 2},
}
BAD_ENTRIES = {
    "temperatures: 0 given": {"temperatures": [1.0, 0, 1.0]},
    "temperatures: -1.0 given": {"temperatures": [1.0, -1.0, 1.0]},
    "temperatures: inf given": {"temperatures": [1.0, math.inf, 1.0]},
    "temperatures: None given": {"temperatures": [1.0, None, 1.0]},
    "temperatures: a list of 3": {"temperatures": [1.0, 1.0]},
    "curves: a list of 3": {"curves": [[1.0, 1.0, 0.0]]},
    "curves: .*a, b >= 0 was": {"curves": [[1.0, -1.0, 0.0]] * 3},
    "curves: 1.0 given": {"curves": [1.0, 1.0, 1.0]},
    "temperature: -1 given": {"temperature": -1},
    "temperature: nan given": {"temperature": math.nan},
    "top_p: 0.0 given": {"top_p": 0},
    "top_k: 1.5 given": {"top_k": 1.5},
    "method: 'relaxed' given": {"method": "relaxed"},
    "ece_after: 2 given": {"ece_after": [2, 0.1, 0.1]},
    "auc: a list of 3": {"auc": None},
    "average_ece_after_ci95: 0.1 given": {"average_ece_after_ci95": 0.1},
    "rounds: True given": {"rounds": True},
    "biases: no such key": {"biases": [0.0, 0.0, 0.0]},
    "reached: a list of 3": {"reached": [900, 700]},
    "reached: -1 given": {"reached": [900, 700, -1]},
    r"reached: \[7, 9, 0\] given, counts that never rise": {"reached": [7, 9, 0]},
}


@pytest.mark.parametrize("message", BAD)
def test_a_malformed_file_is_refused_by_name(tmp_path: Path, message: str) -> None:
    folder = folder_with(tmp_path, json.dumps(GOOD.to_dict() | BAD[message]))
    with pytest.raises(UserError, match=rf"calibration\.json: .*{message}"):
        load_drafter(folder)


@pytest.mark.parametrize("message", BAD_ENTRIES)
def test_a_malformed_entry_is_refused_by_name(tmp_path: Path, message: str) -> None:
    raw = GOOD.to_dict()
    raw["settings"][1] |= BAD_ENTRIES[message]
    folder = folder_with(tmp_path, json.dumps(raw))
    with pytest.raises(UserError, match=rf"calibration\.json: settings\[1\]: {message}"):
        load_drafter(folder)


NEWER = {"stops", "reached"}
"""Entries were written without them."""


@pytest.mark.parametrize("key", sorted(set(GOOD.to_dict()["settings"][0]) - NEWER))
def test_an_entry_without_a_key_is_refused(key: str) -> None:
    raw = GOOD.to_dict()
    del raw["settings"][1][key]
    if key == "average_ece_after_ci95":  # null where one prompt was all there was
        assert calibration_from_dict(raw, 3).settings[1] == WARM
        return
    with pytest.raises(ValueError, match=rf"settings\[1\]: {key}: "):
        calibration_from_dict(raw, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", r"calibration\.json:1: expected JSON"), ("[]", r"calibration\.json: a JSON object")],
)
def test_what_is_not_json_or_no_object_is_refused(tmp_path: Path, text: str, message: str) -> None:
    folder = folder_with(tmp_path, text)
    with pytest.raises(UserError, match=message):
        load_drafter(folder)


def test_it_is_not_read_from_elsewhere(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, None)
    (tmp_path / "other.json").write_text(json_text(GOOD.to_dict()))
    (folder / "calibration.json").symlink_to(tmp_path / "other.json")
    with pytest.raises(UserError, match="outside the drafter folder"):
        load_drafter(folder)


@pytest.mark.parametrize("calibration", [RAW, GOOD])
def test_reading_is_the_inverse_of_writing(calibration: Calibration) -> None:
    assert calibration_from_dict(json.loads(json_text(calibration.to_dict())), 3) == calibration


def test_entries_written_without_counts_load_and_have_none() -> None:
    raw = GOOD.to_dict()
    for entry in raw["settings"]:
        del entry["reached"]
    old = calibration_from_dict(raw, 3)
    assert old.settings == tuple(replace(entry, reached=None) for entry in (GREEDY, WARM))


# ------------------------------------------------------------------ thresholds of policies


STOPS = Stops(0.75, 0.3, 2, "entropy", {"plain": 90.0, "fixed": 95.0, "entropy": 101.5}, "a CPU")


def test_thresholds_go_there_and_back_and_old_entries_have_none(tmp_path: Path) -> None:
    made = RAW.with_fitted(replace(GREEDY, stops=STOPS), WARM)
    raw = json.loads(json.dumps(made.to_dict()))
    assert calibration_from_dict(raw, 3) == made
    assert raw["settings"][1]["stops"] is None
    for entry in raw["settings"]:
        del entry["stops"]  # as files were written before
    assert calibration_from_dict(raw, 3) == GOOD
    silent = replace(STOPS, s_stop=None)
    raw = json.loads(json.dumps(RAW.with_fitted(replace(GREEDY, stops=silent)).to_dict()))
    assert calibration_from_dict(raw, 3).settings[0].stops == silent


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"h_stop": -1}, "h_stop: -1 given"),
        ({"s_stop": 1.5}, "s_stop: 1.5 given"),
        ({"draft_length": 4}, r"draft_length: 4 given, 1\.\.3"),
        ({"best": "luck"}, "best: 'luck' given"),
        ({"tokens_per_s": [1]}, "tokens_per_s"),
        ({"measured_on": 3}, "measured_on: 3 given"),
        ({"more": 1}, "an object with h_stop, s_stop"),
    ],
)
def test_wrong_thresholds_are_named(change: dict[str, Any], message: str) -> None:
    raw = json.loads(json.dumps(RAW.with_fitted(replace(GREEDY, stops=STOPS)).to_dict()))
    raw["settings"][0]["stops"].update(change)
    with pytest.raises(ValueError, match=rf"settings\[0\]: stops: .*{message}|{message}"):
        calibration_from_dict(raw, 3)
