"""Reading `calibration.json`, every value checked: a wrong temperature would only cost speed.

Version 2 is what `Calibration.to_dict` writes; version 1 had no fitted settings. Entries of version
2 that were written without `stops` or `reached` have none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise
from typing import Any

from dspark.draft.calibration import SCHEMA_VERSION, Calibration, Fitted, Stops, describe

METHODS = ("token",)
"""Verification rules whose acceptance an entry may describe."""


def calibration_from_dict(raw: Any, block_size: int) -> Calibration:
    """The inverse of `Calibration.to_dict`, for a drafter of that block size.

    Raises:
        ValueError: "key: what is wrong", for another schema, or slots that are not the drafter's.
    """
    if not isinstance(raw, dict):
        raise ValueError("a JSON object was expected")
    version = raw.get("schema_version")
    if version not in (1, SCHEMA_VERSION) or isinstance(version, bool):
        raise ValueError(f"schema_version: {version!r} given, 1 or {SCHEMA_VERSION} was expected")
    where, rows = raw.get("measured_on"), raw.get("rows")
    if where is not None and not isinstance(where, str):
        raise ValueError(f"measured_on: {where!r} given, a string or null was expected")
    settings = _no_settings(raw) if version == 1 else _settings(raw, block_size)
    return Calibration(
        where,
        _probabilities(raw, "confidence_per_slot", block_size),
        _probabilities(raw, "acceptance_per_slot", block_size),
        _count(rows, "rows"),
        settings,
    )


def _no_settings(raw: Mapping[str, Any]) -> tuple[Fitted, ...]:
    if raw.get("calibrated") is not False or raw.get("temperatures") is not None:
        raise ValueError("calibrated, temperatures: only false and null; version 1 had none")
    return ()


def _settings(raw: Mapping[str, Any], block_size: int) -> tuple[Fitted, ...]:
    entries = raw.get("settings")
    if not isinstance(entries, list):
        raise ValueError("settings: a list was expected, one object for each sampling setting")
    found: list[Fitted] = []
    for index, entry in enumerate(entries):
        try:
            found.append(_fitted(entry, block_size))
        except ValueError as error:
            raise ValueError(f"settings[{index}]: {error}") from None
    names = [describe(entry) for entry in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"settings: {twice} occurs twice")
    if raw.get("calibrated") is not bool(found):
        raise ValueError(
            f"calibrated: {raw.get('calibrated')!r} given, {bool(found)} was expected with "
            f"{len(found)} settings"
        )
    return tuple(found)


def _fitted(raw: Any, block_size: int) -> Fitted:
    if not isinstance(raw, dict):
        raise ValueError("an object was expected")
    names = [field.name for field in fields(Fitted)]
    unknown = sorted(set(raw) - set(names))
    if unknown:
        raise ValueError(f"{unknown[0]}: no such key; expected {', '.join(names)}")
    method = raw.get("method")
    if method not in METHODS:
        raise ValueError(f"method: {method!r} given, one of {', '.join(METHODS)} was expected")
    top_p = _number(raw.get("top_p"), "top_p")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: {top_p} given, 0 < top_p <= 1 was expected")
    return Fitted(
        temperature=_number(raw.get("temperature"), "temperature"),
        top_p=top_p,
        top_k=_count(raw.get("top_k"), "top_k"),
        method=method,
        temperatures=_temperatures(raw, block_size),
        curves=_curves(raw, block_size),
        ece_before=_probabilities(raw, "ece_before", block_size),
        ece_scaled=_probabilities(raw, "ece_scaled", block_size),
        ece_after=_probabilities(raw, "ece_after", block_size),
        ece_floor=_probabilities(raw, "ece_floor", block_size),
        auc=_probabilities(raw, "auc", block_size),
        brier=_probabilities(raw, "brier", block_size),
        average_ece_after_ci95=_interval(raw.get("average_ece_after_ci95")),
        rounds=_count(raw.get("rounds"), "rounds"),
        prompts=_count(raw.get("prompts"), "prompts"),
        stops=None if raw.get("stops") is None else _stops(raw["stops"], block_size),
        reached=None if raw.get("reached") is None else _reached(raw, block_size),
    )


def _stops(raw: Any, block_size: int) -> Stops:
    if not isinstance(raw, Mapping) or set(raw) != {field.name for field in fields(Stops)}:
        names = ", ".join(field.name for field in fields(Stops))
        raise ValueError(f"stops: an object with {names} was expected")
    h_stop, s_stop, length = raw["h_stop"], raw["s_stop"], raw["draft_length"]
    if not _is_number(h_stop) or not 0 <= h_stop < math.inf:
        raise ValueError(f"stops: h_stop: {h_stop!r} given, nats of 0 or more were expected")
    if s_stop is not None and not (_is_number(s_stop) and 0 <= s_stop <= 1):
        raise ValueError(f"stops: s_stop: {s_stop!r} given, a probability or null was expected")
    if type(length) is not int or not 1 <= length <= block_size:
        raise ValueError(f"stops: draft_length: {length!r} given, 1..{block_size} was expected")
    rates = raw["tokens_per_s"]
    if not isinstance(rates, Mapping) or not all(map(_is_number, rates.values())):
        raise ValueError("stops: tokens_per_s: an object of numbers was expected")
    if raw["best"] not in rates:
        raise ValueError(f"stops: best: {raw['best']!r} given, one of tokens_per_s was expected")
    where = raw["measured_on"]
    if where is not None and not isinstance(where, str):
        raise ValueError(f"stops: measured_on: {where!r} given, a string or null was expected")
    return Stops(float(h_stop), s_stop, length, raw["best"], dict(rates), where)


def _temperatures(raw: Mapping[str, Any], block_size: int) -> tuple[float, ...]:
    values = _slots(raw, "temperatures", block_size)
    for value in values:
        if not _is_number(value) or not 0 < value < math.inf:
            raise ValueError(f"temperatures: {value!r} given, a finite number above 0 was expected")
    return tuple(float(value) for value in values)


def _curves(raw: Mapping[str, Any], block_size: int) -> tuple[tuple[float, float, float], ...]:
    found = []
    for curve in _slots(raw, "curves", block_size):
        good = isinstance(curve, list) and len(curve) == 3 and all(map(_is_number, curve))
        if not (good and min(curve[:2]) >= 0 and all(map(math.isfinite, curve))):
            raise ValueError(f"curves: {curve!r} given, [a, b, d] with a, b >= 0 was expected")
        a, b, d = map(float, curve)
        found.append((a, b, d))
    return tuple(found)


def _probabilities(raw: Mapping[str, Any], key: str, block_size: int) -> tuple[float | None, ...]:
    values = _slots(raw, key, block_size)
    for value in values:
        if value is not None and not (_is_number(value) and 0 <= value <= 1):
            raise ValueError(f"{key}: {value!r} given, a probability or null was expected")
    return tuple(values)


def _reached(raw: Mapping[str, Any], block_size: int) -> tuple[int, ...]:
    values = tuple(_count(value, "reached") for value in _slots(raw, "reached", block_size))
    if any(later > earlier for earlier, later in pairwise(values)):
        raise ValueError(f"reached: {list(values)} given, counts that never rise were expected")
    return values


def _slots(raw: Mapping[str, Any], key: str, block_size: int) -> list[Any]:
    values = raw.get(key)
    if not isinstance(values, list) or len(values) != block_size:
        raise ValueError(f"{key}: a list of {block_size} numbers was expected, one per block slot")
    return values


def _interval(value: Any) -> tuple[float, float] | None:
    key = "average_ece_after_ci95"
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{key}: {value!r} given, two numbers or null was expected")
    low, high = (_number(bound, key) for bound in value)
    return low, high


def _number(value: Any, key: str) -> float:
    if not _is_number(value) or not 0 <= value < math.inf:
        raise ValueError(f"{key}: {value!r} given, a finite number of at least 0 was expected")
    return float(value)


def _count(value: Any, key: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{key}: {value!r} given, a whole number of at least 0 was expected")
    return value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
