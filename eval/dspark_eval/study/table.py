"""From the runs of a study to its table: means and spread over seeds, and paired intervals.

Per arm: the accepted length of each seed (pooled over prompts), their mean, and their lowest and
highest. Against the reference arm, the ratio of accepted lengths with a 95 % interval from a paired
bootstrap: prompts are resampled, and a prompt brings the counts of all seeds that both arms have.

The interval is about prompts alone: how far seeds move an arm is in its lowest and highest.

Letters: e emitted tokens, R rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark.errors import UserError
from dspark.files import atomic_write_json, atomic_write_text, read_json
from dspark_eval import metrics
from dspark_eval.intervals import ratio_of_ratios
from dspark_eval.study.drafting import DRAFTING_FILE
from dspark_eval.study.long import LONG_FILE
from dspark_eval.study.markdown import markdown
from dspark_eval.study.measure import MEASURE_FILE
from dspark_eval.study.runs import STUDY_FILE, run_folder

TABLE_FILE = "table.json"
REPORT_FILE = "table.md"


def build_table(out: Path) -> dict[str, Any]:
    """`read_table`, written into the study's folder as table.json and table.md too."""
    document = read_table(out)
    atomic_write_json(out / TABLE_FILE, document)
    atomic_write_text(out / REPORT_FILE, markdown(document))
    return document


def read_table(out: Path) -> dict[str, Any]:
    """The table of every measured run under `out`.

    Runs that are not measured yet are left out and listed under `missing`.
    Raises UserError if the folder holds no study, or no run of its reference is measured.
    """
    study = _read_study(out)
    measured = {
        arm["name"]: {seed: _read_run(out, arm["name"], seed) for seed in study["seeds"]}
        for arm in study["arms"]
    }
    found = {arm: [run for run in runs.values() if run] for arm, runs in measured.items()}
    reference = found[study["reference"]]
    if not reference:
        raise UserError(
            f"{out}: no run of the reference, {study['reference']}, is measured yet; "
            f"`dspark study {study['study']} --out {out}` goes on"
        )
    rows = [
        _row(arm, found[arm["name"]], reference, arm["name"] == study["reference"])
        for arm in study["arms"]
        if found[arm["name"]]
    ]
    missing = [
        f"{arm} seed {seed}" for arm, runs in measured.items() for seed in runs if not runs[seed]
    ]
    facts = reference[0].get("environment")  # of decoding; where runs were trained, their own say
    return {
        **study, "schema_version": 1, "environment": facts, "missing": missing, "rows": rows,
    }  # fmt: skip


def _read_study(out: Path) -> dict[str, Any]:
    path = out / STUDY_FILE
    if not path.is_file():
        raise UserError(f"{path}: no study here; `dspark study NAME --out {out}` runs one")
    return read_json(path)


def _read_run(out: Path, arm: str, seed: int) -> dict[str, Any] | None:
    folder = run_folder(out, arm, seed)
    if not (folder / MEASURE_FILE).is_file():
        return None
    last = read_json(folder / "training.json")[-1]
    timed, long = folder / DRAFTING_FILE, folder / LONG_FILE
    return {
        "seed": seed,
        **read_json(folder / MEASURE_FILE),
        "teacher_forced": last["held_out"],
        "steps": last["step"],
        "train_s": last["train_s"],
        "drafting": read_json(timed) if timed.is_file() else None,
        "long": read_json(long) if long.is_file() else None,
    }


def _row(
    arm: dict[str, Any],
    runs: Sequence[dict[str, Any]],
    reference: Sequence[dict[str, Any]],
    is_reference: bool,
) -> dict[str, Any]:
    settings = []
    ours, theirs = _same_seeds(runs, reference)
    for index, first in enumerate(runs[0]["results"]):
        results = [run["results"][index] for run in runs]
        each = [result["accepted_length"] for result in results]
        ratio = None
        if ours and not is_reference:
            ratio = paired_ratio(
                *([run["results"][index] for run in side] for side in (ours, theirs))
            )
        settings.append(
            {
                "suite": first["suite"],
                "temperature": first["temperature"],
                "accepted_length": float(np.mean(each)),
                "accepted_length_per_seed": each,
                "conditional_acceptance": _mean_lists(
                    [result["conditional_acceptance"] for result in results]
                ),
                "ratio": ratio,
            }
        )
    held_out = [run["teacher_forced"]["accepted_length"] for run in runs]
    timed = [run["drafting"] for run in runs if run["drafting"]]
    long = [run["long"]["results"] for run in runs if run["long"]]
    return {
        "arm": arm["name"],
        "note": arm["note"],
        "seeds": [run["seed"] for run in runs],
        "parameters": runs[0]["parameters"],
        "steps": runs[0]["steps"],
        "train_s": float(np.mean([run["train_s"] for run in runs])),
        "teacher_forced_accepted_length": float(np.mean(held_out)),
        "results": settings,
        "drafting": timed[0] if timed else None,
        "long": _long_row(long) if long else None,
    }


def _same_seeds(
    ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The runs of either arm whose seed the other has too: a seed has a luck of its own."""
    seeds = [{run["seed"] for run in side} for side in (theirs, ours)]
    first, second = (
        [run for run in side if run["seed"] in other]
        for side, other in zip((ours, theirs), seeds, strict=True)
    )
    return first, second


def paired_ratio(
    ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]
) -> dict[str, float | None]:
    """Accepted length over theirs, with the interval of a bootstrap over prompts."""
    columns = [
        np.sum([result[key] for result in side], axis=0)
        for side in (ours, theirs)
        for key in ("emitted", "rounds")
    ]
    rows = np.stack(columns, axis=1)  # prompts x (e, R, e', R')

    low, high = metrics.bootstrap_ci95(rows, ratio_of_ratios) or (None, None)
    return {"value": float(ratio_of_ratios(rows.sum(0))), "low": low, "high": high}


def _long_row(runs: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Per context of the runs that were measured there: the mean over seeds, and each seed."""
    rows = []
    for entries in zip(*runs, strict=True):
        each = [entry["accepted_length"] for entry in entries]
        rows.append(
            {
                "context": entries[0]["context"],
                "tokens": entries[0]["tokens"],
                "prompts": len(entries[0]["rounds"]),
                "exact_answers": entries[0]["exact_answers"],
                "accepted_length": float(np.mean(each)),
                "accepted_length_per_seed": each,
            }
        )
    return rows


def _mean_lists(lists: Sequence[Sequence[float | None]]) -> list[float | None]:
    width = min(map(len, lists))
    columns = [[values[k] for values in lists] for k in range(width)]
    known = [[value for value in column if value is not None] for column in columns]
    return [float(np.mean(column)) if column else None for column in known]
