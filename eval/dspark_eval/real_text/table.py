"""The study's tables, from what its folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dspark.draft.reliability import average
from dspark.errors import UserError
from dspark.files import atomic_write_json, atomic_write_text, read_json
from dspark_eval.real_text.arms import REFERENCE
from dspark_eval.real_text.chosen import choose
from dspark_eval.real_text.comparing import CLEAN, compare, compare_seeds, seeds_table
from dspark_eval.real_text.measuring import read_measured
from dspark_eval.real_text.runs import find_run, reference_of, trained_runs
from dspark_eval.real_text.speed import SPEED, speeds_table
from dspark_eval.real_text.training import TRAINED

RESULTS, TABLE = "real_text.json", "real_text.md"
SCHEMA_VERSION = 1


def write_table(out: Path, add: Path | None = None) -> str:
    """Everything measured in OUT as OUT/real_text.json and OUT/real_text.md; returns the latter.

    `add`: results of an earlier study, of which the runs of the recipes in OUT are taken in, those
    that OUT has not itself.

    Raises UserError where nothing was trained yet, or the earlier study's rows are others.
    """
    arms = {run.name: _arm(out / run.name) for run in trained_runs(out)}
    if not arms:
        raise UserError(f"{out}: no drafter was trained yet; run the steps answer and train")
    answers = [read_json(path) for path in sorted(out.glob("rows.*.json"))]
    if add is not None:
        arms = {**earlier(read_json(add), arms, answers), **arms}
    cells = {
        name: arm["measured"]["cells"] for name, arm in arms.items() if arm["measured"] is not None
    }
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "environment": next(iter(arms.values()))["trained"].get("environment"),
        "answers": answers,
        "arms": arms,
        "chosen": choose(out),
        "against": {name: reference_of(name, cells) for name in cells},
        "against_reference": {
            name: compare(own, cells[reference])
            for name, own in cells.items()
            if (reference := reference_of(name, cells)) in cells
        },
        "over_seeds": compare_seeds(cells),
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
    if document.get("over_seeds"):
        found["Over seeds and prompts"] = seeds_table(document["over_seeds"])
    if measured:
        found["Accepted length by prompt set"] = _cells(measured)
        found["Acceptance and calibration error, means over sets"] = _confidence(measured)
    if document["speed"]:
        found["Speed of one request"] = speeds_table(document["speed"])
    return found


def _arm(folder: Path) -> dict[str, Any]:
    return {"trained": read_json(folder / TRAINED), "measured": read_measured(folder)}


def earlier(
    results: dict[str, Any], arms: dict[str, Any], answers: list[dict[str, Any]]
) -> dict[str, Any]:
    """Runs of an earlier study of the recipes there are here.

    Raises UserError where its rows were asked for otherwise.
    """
    asked = [[part["settings"] for part in each] for each in (results["answers"], answers)]
    if asked[0] != asked[1]:
        raise UserError("--add: results on rows that were asked for otherwise")
    recipes = {find_run(name).arm for name in arms}
    return {name: arm for name, arm in results["arms"].items() if find_run(name).arm in recipes}


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


def _interval(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    low, high = found["ci95"]
    return f"{found['ratio']:.3f} [{low:.3f}, {high:.3f}]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
