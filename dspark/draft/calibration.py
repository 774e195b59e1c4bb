"""`calibration.json`: how far a drafter's confidence may be believed, slot by slot.

    confidence_k   what the confidence head says of slot k: accepted, given that all before are
    acceptance_k   what became of it, 1 - TV
    both are means over the same held-out blocks; the gap between them is the error of c_k

Temperatures that close the gap are not fitted yet: `calibrated` is false, `temperatures` is null,
and the confidence that a drafter reports is its head's raw one. A file that claims otherwise is
refused, since what it promises would not be applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspark.draft.config import DraftConfig

CALIBRATION_FILE = "calibration.json"
SCHEMA_VERSION = 1
TEACHER_FORCED = "held-out rows, teacher-forced, temperature 1"


@dataclass(frozen=True)
class Calibration:
    """Means per block slot; None where nothing was measured.

    measured_on says how, and is None if nothing was measured at all; rows is the number of rows.
    """

    measured_on: str | None
    confidence_per_slot: tuple[float | None, ...]
    acceptance_per_slot: tuple[float | None, ...]
    rows: int

    def to_dict(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {
            "schema_version": SCHEMA_VERSION,
            "calibrated": False,
            "temperatures": None,
            "measured_on": self.measured_on,
            "confidence_per_slot": list(self.confidence_per_slot),
            "acceptance_per_slot": list(self.acceptance_per_slot),
            "rows": self.rows,
        }


def measured(held_out: Mapping[str, Any] | None, config: DraftConfig, rows: int) -> Calibration:
    """From the teacher-forced report of an evaluation on `rows` rows; None: there was none.

    `held_out` has `acceptance` and `confidence_per_slot`; a drafter without a confidence head says
    nothing, whatever stands there.
    """
    nothing = (None,) * config.block_size
    if held_out is None:
        return Calibration(None, nothing, nothing, 0)
    confidence = held_out["confidence_per_slot"] if config.enable_confidence_head else nothing
    return Calibration(TEACHER_FORCED, tuple(confidence), tuple(held_out["acceptance"]), rows)


def calibration_from_dict(raw: Any, block_size: int) -> Calibration:
    """The inverse of `Calibration.to_dict`.

    Raises:
        ValueError: "key: what is wrong", for another schema, or slots that are not the drafter's.
    """
    if not isinstance(raw, dict):
        raise ValueError("a JSON object was expected")
    version = raw.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema_version: {version!r} given, {SCHEMA_VERSION} was expected")
    if raw.get("calibrated") is not False or raw.get("temperatures") is not None:
        raise ValueError("calibrated, temperatures: only false and null; none are applied yet")
    where, rows = raw.get("measured_on"), raw.get("rows")
    if where is not None and not isinstance(where, str):
        raise ValueError(f"measured_on: {where!r} given, a string or null was expected")
    if type(rows) is not int or rows < 0:
        raise ValueError(f"rows: {rows!r} given, a number of rows was expected")
    return Calibration(
        where,
        _slots(raw, "confidence_per_slot", block_size),
        _slots(raw, "acceptance_per_slot", block_size),
        rows,
    )


def _slots(raw: Mapping[str, Any], key: str, block_size: int) -> tuple[float | None, ...]:
    values = raw.get(key)
    if not isinstance(values, list) or len(values) != block_size:
        raise ValueError(f"{key}: a list of {block_size} numbers was expected, one per block slot")
    for value in values:
        if value is not None and not (type(value) in (int, float) and 0 <= value <= 1):
            raise ValueError(f"{key}: {value!r} given, a probability or null was expected")
    return tuple(values)
