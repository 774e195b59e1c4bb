"""`calibration.json`: what is written, and what loads: a folder with it, or without it.

Temperatures are not fitted yet. The file says so, and says how far off the raw confidence is.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dspark.draft import DraftConfig, DSparkDrafter
from dspark.draft.calibration import Calibration, calibration_from_dict, measured
from dspark.draft.checkpoint import load_drafter, read_calibration, save_drafter
from dspark.errors import UserError
from dspark.files import json_text

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
GOOD = measured(HELD_OUT, CONFIG, 7)


def folder_with(tmp_path: Path, text: str | None) -> Path:
    folder = tmp_path / "draft"
    texts = None if text is None else {"calibration.json": text}
    save_drafter(folder, DSparkDrafter(CONFIG), texts=texts)
    return folder


def test_what_is_known_is_written_and_what_is_not_is_said() -> None:
    assert GOOD.to_dict() == {
        "schema_version": 1,
        "calibrated": False,
        "temperatures": None,
        "measured_on": "held-out rows, teacher-forced, temperature 1",
        "confidence_per_slot": [0.8, 0.625, None],
        "acceptance_per_slot": [0.75, 0.5, None],
        "rows": 7,
    }
    none = (None, None, None)
    assert measured(None, CONFIG, 7) == Calibration(None, none, none, 0)


def test_a_drafter_without_a_confidence_head_has_said_nothing() -> None:
    """The report holds zeros for it, and a confidence of 0 would be a statement."""
    silent = measured(
        HELD_OUT | {"confidence_per_slot": [0.0, 0.0, None]},
        replace(CONFIG, enable_confidence_head=False),
        7,
    )
    assert silent.confidence_per_slot == (None, None, None)
    assert silent.acceptance_per_slot == (0.75, 0.5, None)


@pytest.mark.parametrize("calibration", [GOOD, measured(None, CONFIG, 0)])
def test_a_folder_loads_with_it_and_gives_it_back(tmp_path: Path, calibration: Any) -> None:
    folder = folder_with(tmp_path, json_text(calibration.to_dict()))
    assert read_calibration(folder, load_drafter(folder).config) == calibration


def test_a_folder_loads_without_it(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, None)
    assert read_calibration(folder, load_drafter(folder).config) is None


BAD = {
    "schema_version: 2 given": {"schema_version": 2},
    "schema_version: None given": {"schema_version": None},
    "calibrated, temperatures: only false": {"calibrated": True},
    "temperatures: only false and null": {"temperatures": [1.0, 1.0, 1.0]},
    "confidence_per_slot: a list of 3": {"confidence_per_slot": [0.5, 0.5]},
    "acceptance_per_slot: a list of 3": {"acceptance_per_slot": [0.5] * 4},
    "acceptance_per_slot: a list of 3 numbers": {"acceptance_per_slot": "0.5"},
    "confidence_per_slot: 1.5 given": {"confidence_per_slot": [0.5, 1.5, 0.5]},
    "confidence_per_slot: nan given": {"confidence_per_slot": [0.5, float("nan"), 0.5]},
    "confidence_per_slot: True given": {"confidence_per_slot": [True, 0.5, 0.5]},
    "rows: -1 given": {"rows": -1},
    "measured_on: 3 given": {"measured_on": 3},
}


@pytest.mark.parametrize("message", BAD)
def test_a_malformed_file_is_refused_by_name(tmp_path: Path, message: str) -> None:
    changed = GOOD.to_dict() | BAD[message]
    folder = folder_with(tmp_path, json.dumps(changed))
    with pytest.raises(UserError, match=rf"calibration\.json: .*{message}"):
        load_drafter(folder)


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


def test_reading_is_the_inverse_of_writing() -> None:
    assert calibration_from_dict(json.loads(json_text(GOOD.to_dict())), 3) == GOOD
