"""What a prediction of speed is made from: acceptance by position, and step times by rows.

Acceptance   eval.json, a bench's JSON, training.json, calibration.json, or a plain list
Step times   the cost model of `dspark bench --profile`, SGLang's cost table as `dspark calibrate
             --sglang` writes it, or a bench's JSON
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.errors import UserError
from dspark.files import read_json
from dspark.runtime.cost_model import is_cost_model, load_cost_model

BESIDE = ("eval.json", "training.json", "calibration.json")
"""Files of a drafter folder that know its acceptance, the best first."""

Acceptance = dict[str, tuple[float, ...]]
"""Where it was measured -> C_1, C_2, ..."""


def acceptance_beside(folder: Path) -> Acceptance:
    """From the first file of the folder that knows; empty: none does."""
    for name in BESIDE:
        if (folder / name).is_file():
            found = _acceptance(read_json(folder / name), name)
            if found:
                return found
    return {}


def read_acceptance(text: str) -> Acceptance:
    """Conditional acceptance by position, from a file or as 0.9,0.8,0.7.

    Raises:
        UserError: No such file and no such numbers, or a file without any acceptance.
    """
    path = Path(text)
    if not path.exists():
        return _listed(text)
    found = _acceptance(read_json(path), path.name)
    if not found:
        raise UserError(
            f"{path}: no acceptance in it; expected eval.json, a bench's JSON, training.json, "
            "calibration.json, or a list of numbers in 0..1, one for each position"
        )
    return found


def read_cost_table(path: Path) -> dict[int, float]:
    """Rows of a step -> its seconds, 1 row among them. Raises UserError naming what is missing."""
    raw = read_json(path)
    if not isinstance(raw, Mapping):
        raise UserError(
            f"{path}: an object was expected: a cost model, SGLang's cost table or a bench's JSON"
        )
    if is_cost_model(raw):
        times = load_cost_model(path).step_times()
    elif "sample_batch_tokens" in raw:
        times = _cost_table(path, raw)
    elif "plain_tokens_per_s" in raw:
        times = _bench_times(path, raw)
    else:
        raise UserError(
            f"{path}: neither a cost model (`dspark bench --profile` writes one), SGLang's cost "
            "table (sample_batch_tokens, sample_steps_per_sec) nor the JSON of `dspark bench`"
        )
    if 1 not in times or len(times) < 2:
        raise UserError(
            f"{path}: rows {sorted(times)}: 1 row, a plain step, and at least one more are needed"
        )
    return times


def _listed(text: str) -> Acceptance:
    """Numbers behind an option."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = (-1.0,)
    if not all(0 <= value <= 1 for value in values):
        raise UserError(
            f"--acceptance {text}: neither a file nor numbers in 0..1, one for each position, as "
            "0.9,0.8,0.7"
        )
    return {"as given": values}


def _acceptance(raw: Any, name: str) -> Acceptance:
    """All that a document says, by where it was measured."""
    if isinstance(raw, list) and raw and all(isinstance(item, Mapping) for item in raw):
        return _training(raw)
    if isinstance(raw, list):
        return _named({name: raw})
    if not isinstance(raw, Mapping):
        return {}
    suites = raw.get("suites")
    if isinstance(suites, Mapping):
        return _named({key: _get(value, "conditional_acceptance") for key, value in suites.items()})
    if isinstance(raw.get("runs"), list):
        return _named(
            {
                f"{name}, temperature {_get(run, 'temperature')}": _get(
                    run, "conditional_acceptance"
                )
                for run in raw["runs"]
            }
        )
    if "conditional_acceptance" in raw:
        return _named({name: raw["conditional_acceptance"]})
    return _named({f"{name}, teacher-forced": raw.get("acceptance_per_slot")})


def _training(records: Sequence[Mapping[str, Any]]) -> Acceptance:
    """From the last evaluation of a run that decoded anything."""
    for record in reversed(records):
        decoded = record.get("decoded")
        if isinstance(decoded, list) and decoded:
            return _named(
                {
                    f"held-out rows, temperature {_get(entry, 'temperature')}": _get(
                        entry, "conditional_acceptance"
                    )
                    for entry in decoded
                }
            )
    return {}


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def _named(raw: Mapping[str, Any]) -> Acceptance:
    """Lists of chances, each up to the first position that nothing was measured at."""
    found: Acceptance = {}
    for name, values in raw.items():
        known: list[float] = []
        for value in values if isinstance(values, list) else ():
            if not _is_number(value) or not 0 <= value <= 1:
                break
            known.append(float(value))
        if known:
            found[name] = tuple(known)
    return found


def _cost_table(path: Path, raw: Mapping[str, Any]) -> dict[int, float]:
    rows, rates = raw["sample_batch_tokens"], raw.get("sample_steps_per_sec")
    good = (
        isinstance(rows, list)
        and isinstance(rates, list)
        and len(rows) == len(rates)
        and all(type(row) is int and row > 0 for row in rows)
        and all(_is_number(rate) and rate > 0 for rate in rates)
    )
    if not good or not isinstance(rates, list):
        raise UserError(
            f"{path}: sample_batch_tokens, sample_steps_per_sec: two lists of equal length, of "
            "whole numbers and of numbers above 0, were expected"
        )
    return {row: 1 / rate for row, rate in zip(rows, rates, strict=True)}


def _bench_times(path: Path, raw: Mapping[str, Any]) -> dict[int, float]:
    """A bench has one draft length: two points. A recorded frame has no parts."""
    length, graphs = (_get(raw.get("extra"), key) for key in ("draft_length", "graphs"))
    names: tuple[str, ...] = ("draft_ms", "verify_ms", "other_ms")
    found = raw
    if isinstance(graphs, Mapping):
        names, found = ("frame_ms_mean",), graphs
    rate = raw["plain_tokens_per_s"]
    numbers = [part for part in (rate, *map(found.get, names)) if _is_number(part) and part > 0]
    if raw.get("batch", 1) != 1:
        raise UserError(f"{path}: a bench of one prompt at a time was expected (--batch 1)")
    if type(length) is not int or len(numbers) != 1 + len(names):
        raise UserError(
            f"{path}: plain_tokens_per_s, {', '.join(names)} and extra.draft_length of a bench "
            "were expected"
        )
    return {1: 1 / numbers[0], 1 + length: sum(numbers[1:]) / 1e3}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
