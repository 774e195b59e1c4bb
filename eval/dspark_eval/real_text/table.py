"""The study's table, from what its folder holds, and the comparison that it is for.

Two drafters are compared on the same prompts: the ratio of their accepted lengths, tokens over
rounds of all cells at a temperature, with a 95 % interval that resamples prompts within their sets.
A prompt brings all its answers: where temperatures are pooled, those at each of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dspark.draft.reliability import average
from dspark.errors import UserError
from dspark.files import atomic_write_json, atomic_write_text, read_json
from dspark_eval.intervals import ratio_of_ratios
from dspark_eval.real_text.arms import ARMS, REFERENCE
from dspark_eval.real_text.chosen import choose
from dspark_eval.real_text.measuring import read_measured
from dspark_eval.real_text.speed import SPEED
from dspark_eval.real_text.training import TRAINED

RESAMPLES = 4000
CLEAN = "without loops"
RESULTS, TABLE = "real_text.json", "real_text.md"


def write_table(out: Path) -> str:
    """Everything measured in OUT as OUT/real_text.json and OUT/real_text.md; returns the latter.

    Raises UserError where nothing was trained yet.
    """
    arms = {name: _arm(out / name) for name in ARMS if (out / name / TRAINED).is_file()}
    measured = {name: arm for name, arm in arms.items() if arm["measured"] is not None}
    if not arms:
        raise UserError(f"{out}: no drafter was trained yet; run the steps answer and train")
    comparisons = {}
    if REFERENCE in measured:
        reference = measured[REFERENCE]["measured"]["cells"]
        comparisons = {
            name: compare(arm["measured"]["cells"], reference)
            for name, arm in measured.items()
            if name != REFERENCE
        }
    document: dict[str, Any] = {
        "answers": [read_json(path) for path in sorted(out.glob("rows.*.json"))],
        "arms": arms,
        "chosen": choose(out),
        "against_reference": comparisons,
        "speed": read_json(out / SPEED) if (out / SPEED).is_file() else None,
    }
    atomic_write_json(out / RESULTS, document)
    text = "\n\n".join(tables(document).values())
    atomic_write_text(out / TABLE, text + "\n")
    return text


def tables(document: dict[str, Any]) -> dict[str, str]:
    """What each table shows, and the table as Markdown."""
    arms = document["arms"]
    measured = {name: arm for name, arm in arms.items() if arm["measured"] is not None}
    found = {
        "Drafters, and their accepted length over the reference's": _summary(
            arms, document["against_reference"]
        ),
    }
    if measured:
        found["Accepted length by prompt set"] = _cells(measured)
        found["Acceptance and calibration error, means over sets"] = _confidence(measured)
    speed = _speeds(document["speed"])
    return {**found, "Speed of one request": speed[0]} if speed else found


def _arm(folder: Path) -> dict[str, Any]:
    return {"trained": read_json(folder / TRAINED), "measured": read_measured(folder)}


def compare(
    cells: list[dict[str, Any]], reference: list[dict[str, Any]], *, seed: int = 0
) -> dict[str, Any]:
    """Ratio of accepted lengths with its interval, by temperature, over both, and over both without
    the prompts that made one of the two loop; of what both were measured on.

    Raises UserError for cells of other prompts.
    """
    others = {(cell["set"], cell["temperature"]): cell for cell in reference}
    found: dict[str, Any] = {}
    cells = [cell for cell in cells if (cell["set"], cell["temperature"]) in others]
    temperatures = sorted({cell["temperature"] for cell in cells})
    parts = [(f"{t:g}", [t], True) for t in temperatures]
    for label, chosen, loops in (*parts, ("all", temperatures, True), (CLEAN, temperatures, False)):
        sets: dict[str, np.ndarray] = {}
        for cell in (cell for cell in cells if cell["temperature"] in chosen):
            counts = _counts(cell, others[cell["set"], cell["temperature"]], loops)
            sets[cell["set"]] = sets.get(cell["set"], 0) + counts
        pairs = [kept for counts in sets.values() if len(kept := counts[counts.any(axis=1)])]
        if not pairs:
            continue
        random = np.random.default_rng(seed)
        totals = sum(pair.sum(0) for pair in pairs)
        samples = sum(
            random.multinomial(len(pair), [1 / len(pair)] * len(pair), size=RESAMPLES) @ pair
            for pair in pairs
        )
        low, high = np.percentile(ratio_of_ratios(samples.T), (2.5, 97.5))
        found[label] = {"ratio": float(ratio_of_ratios(totals)), "ci95": [float(low), float(high)]}
    return found


def _counts(cell: dict[str, Any], other: dict[str, Any], loops: bool) -> np.ndarray:
    """[prompts, 4]: tokens and rounds of the one, then of the other; nothing of prompts that made
    one of the two loop, unless `loops`."""
    if cell["prompts"] != other["prompts"]:
        raise UserError(f"{cell['set']}: measured on other prompts than the reference")
    columns = (cell["emitted"], cell["rounds"], other["emitted"], other["rounds"])
    kept = loops | ~(np.array(cell["loops"]) | np.array(other["loops"]))
    return np.array(columns, dtype=np.float64).T * np.reshape(kept, (-1, 1))


def _cells(measured: dict[str, Any]) -> str:
    """Accepted lengths: a row for each set and temperature, a column for each drafter."""
    names = list(measured)
    lines = [
        f"| set | T | prompts | loops | {' | '.join(names)} |",
        "|---|---|--:|--:|" + "--:|" * len(names),
    ]
    by_place = {
        name: {(cell["set"], cell["temperature"]): cell for cell in arm["measured"]["cells"]}
        for name, arm in measured.items()
    }
    places = {place: cell for own in by_place.values() for place, cell in own.items()}
    for place, first in places.items():
        cells = [by_place[name].get(place) for name in names]
        head = f"| {first['set']} | {first['temperature']:g}"
        counts = f"{first['prompts']} | {_percent(first['loop_share'])}"
        lines.append(f"{head} | {counts} | {' | '.join(map(_length, cells))} |")
        if first["loop_share"]:
            lengths = " | ".join(_number(cell and cell["without_loops"]) for cell in cells)
            kept = first["prompts"] - sum(first["loops"])
            lines.append(f"{head}, without loops | {kept} | - | {lengths} |")
    return "\n".join(lines)


def _pooled(arm: dict[str, Any], temperature: float) -> float | None:
    """Accepted length over all sets at a temperature."""
    cells = [] if arm["measured"] is None else arm["measured"]["cells"]
    own = [cell for cell in cells if cell["temperature"] == temperature]
    rounds = sum(sum(cell["rounds"]) for cell in own)
    return sum(sum(cell["emitted"]) for cell in own) / rounds if rounds else None


def _length(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    low, high = cell["ci95"] or (None, None)
    return f"{_number(cell['accepted_length'])} [{_number(low)}, {_number(high)}]"


def _confidence(measured: dict[str, Any]) -> str:
    """Acceptance and calibration of each drafter: means over sets."""
    lines = [
        "| drafter | T | acceptance rate | ECE before | after | of a perfect forecast |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, arm in measured.items():
        cells = arm["measured"]["cells"]
        for temperature in sorted({cell["temperature"] for cell in cells}):
            own = [cell for cell in cells if cell["temperature"] == temperature]
            columns = [[cell["acceptance_rate"] for cell in own]]
            columns += [[cell["ece"][key] for cell in own] for key in ("before", "after", "floor")]
            means = " | ".join(_percent(average(column)) for column in columns)
            lines.append(f"| {name} | {temperature:g} | {means} |")
    return "\n".join(lines)


def _summary(arms: dict[str, Any], comparisons: dict[str, Any]) -> str:
    lines = [
        "| drafter | parameters | seconds | steps | steps/s | kept aside | "
        "accepted, T = 0 | T = 1 | ratio, T = 0 | T = 1 | both | no loops |",
        "|---|" + "--:|" * 11,
    ]
    for name, arm in arms.items():
        trained, ratios = arm["trained"], comparisons.get(name, {})
        columns = [_interval(ratios.get(key)) for key in ("0", "1", "all", CLEAN)]
        cells = " | ".join(["1"] * len(columns) if name == REFERENCE else columns)
        lines.append(
            f"| {name} | {trained['parameters']:,} | {trained['seconds']:.0f} | "
            f"{trained['steps']:,} | {trained['steps_per_second']:.2f} | "
            f"{_number(trained['held_out']['accepted_length'])} | {_number(_pooled(arm, 0.0))} | "
            f"{_number(_pooled(arm, 1.0))} | {cells} |"
        )
    return "\n".join(lines)


def _speeds(speed: dict[str, Any] | None) -> list[str]:
    if speed is None:
        return []
    lines = ["| way | tokens/s | against plain | same text |", "|---|--:|--:|--:|"]
    lines += [
        f"| {way} | {each['tokens_per_second']:.1f} | {each['speed_up']:.2f} | "
        f"{_same(each['same_text_as_plain'], speed['prompts'])} |"
        for way, each in speed["ways"].items()
    ]
    return ["\n".join(lines)]


def _same(count: int | None, prompts: int) -> str:
    return "-" if count is None else f"{count} of {prompts}"


def _interval(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    low, high = found["ci95"]
    return f"{found['ratio']:.3f} [{low:.3f}, {high:.3f}]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
