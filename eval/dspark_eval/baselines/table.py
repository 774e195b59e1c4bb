"""The ordering of the DSpark paper's Table 1, at small scale, with intervals.

    OUT/table.json       every number, those of the search for learning rates too
    OUT/table.md         the tables

The paper's claim is that DSpark accepts more than DFlash and than EAGLE-3 while it drafts in one
pass as DFlash does. It holds here for a setting if the whole interval of the ratio lies above 1:
an interval over prompts and over training seeds (`intervals.over_seeds`), since a recipe is
compared and not one drafter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from dspark.devices import find_device
from dspark.errors import UserError
from dspark.files import atomic_write_json, atomic_write_text, read_json
from dspark_eval.baselines.jobs import Run, Say, best_rate, rate_runs, run_all, seed_runs
from dspark_eval.baselines.plan import ARMS, LOOKUP, REFERENCE, Plan
from dspark_eval.baselines.table_text import markdown
from dspark_eval.environment import describe_environment
from dspark_eval.intervals import over_seeds, ratio_ci95

TABLE_FILE, REPORT_FILE = "table.json", "table.md"
SCHEMA_VERSION = 2


def run_table(plan: Plan, say: Say) -> dict[str, Any]:
    """Train and measure what is missing, then build the table. Raises UserError as `run_all`."""
    run_all(plan, say)
    return build(plan)


def build(plan: Plan) -> dict[str, Any]:
    """The table of everything measured under `plan.out`, written there as JSON and markdown.

    Raises UserError if the first arm is not measured yet, or arms learned from different rows.
    """
    rates = {arm: best_rate(plan, arm) for arm in ARMS if arm != LOOKUP}
    found = {arm: _measured(seed_runs(plan, arm, rates.get(arm))) for arm in ARMS}
    arms = {arm: runs for arm, runs in found.items() if runs}
    if REFERENCE not in arms:
        raise UserError(
            f"{plan.out}: no run of {REFERENCE} is measured yet; the same command goes on"
        )
    facts = [_facts(plan, arm, runs, rates.get(arm)) for arm, runs in arms.items()]
    measured = {arm: [document for _, document in runs] for arm, runs in arms.items()}
    settings = range(len(measured[REFERENCE][0]["results"]))
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": "table1",
        **plan.document(),
        "rows": _rows(plan, arms),
        "arms": facts,
        "results": [_setting(measured, at) for at in settings],
        "rate_search": _search(plan),
        "environment": describe_environment(find_device(plan.device, "--device"), torch.float32),
    }
    atomic_write_json(plan.out / TABLE_FILE, document)
    atomic_write_text(plan.out / REPORT_FILE, markdown(document))
    return document


Measured = Sequence[tuple[Run, dict[str, Any]]]


def _measured(runs: Sequence[Run]) -> list[tuple[Run, dict[str, Any]]]:
    pairs = [(run, run.read()) for run in runs]
    return [(run, document) for run, document in pairs if document is not None]


def _facts(plan: Plan, arm: str, runs: Measured, rate: float | None) -> dict[str, Any]:
    first = runs[0][1]
    return {
        "arm": arm,
        "seeds": [run.seed for run, _ in runs] if arm != LOOKUP else [],
        "parameters": first["parameters"],
        "passes": first["passes"],
        "lr": rate,
        "steps": None if arm == LOOKUP else plan.steps,
        "seconds_per_seed": [_seconds(run) for run, _ in runs] if arm != LOOKUP else [],
    }


def _seconds(run: Run) -> float | None:
    """Of the training steps; None where the run's folder is gone."""
    history, baseline = run.folder / "training.json", run.folder / "baseline.json"
    if baseline.is_file():
        return float(read_json(baseline)["seconds"])
    return float(read_json(history)[-1]["train_s"]) if history.is_file() else None


def _rows(plan: Plan, arms: Mapping[str, Measured]) -> dict[str, Any] | None:
    """What all arms learned from, as the baselines say; None where there is none."""
    files = [run.folder / "baseline.json" for runs in arms.values() for run, _ in runs]
    said = [read_json(file) for file in files if file.is_file()]
    keys = ("rows_digest", "rows", "supervised_tokens")
    different = {tuple(entry[key] for key in keys) for entry in said}
    if len(different) > 1:
        raise UserError(f"{plan.out}: arms learned from different rows; start in another folder")
    return dict(zip(keys, different.pop(), strict=True)) if different else None


def _search(plan: Plan) -> dict[str, Any] | None:
    """Every trial of every arm; None where one rate was given."""
    if len(plan.rates) == 1:
        return None
    arms: dict[str, dict[str, Any]] = {}
    for arm in (arm for arm in ARMS if arm != LOOKUP):
        own = [_trial(run) for run in rate_runs(plan, arm) if run.measured.is_file()]
        if own:
            best = best_rate(plan, arm)
            edges = (min(plan.rates), max(plan.rates))
            arms[arm] = {"best": best, "at_the_edge": best in edges, "trials": own}
    trials = [trial for entry in arms.values() for trial in entry["trials"]]
    ended = [trial for trial in trials if trial["accepted_length"] is not None]
    shared = {key: ended[0][key] if ended else None for key in ("suite", "temperature")}
    return {"seed": rate_runs(plan, REFERENCE)[0].seed, **shared, "arms": arms}


def _trial(run: Run) -> dict[str, Any]:
    found = run.read()
    if found is None:
        return {"lr": run.rate, "accepted_length": None, **read_json(run.measured)}
    (result,) = found["results"]
    return {
        "lr": run.rate,
        "accepted_length": result["accepted_length"],
        "accepted_length_ci95": ratio_ci95(result["emitted"], result["rounds"]),
        "acceptance_rate": result["acceptance_rate"],
        "suite": result["suite"],
        "temperature": result["temperature"],
        "n_prompts": len(result["rounds"]),
        "seconds": _seconds(run),
    }


def _setting(arms: Mapping[str, Sequence[dict[str, Any]]], at: int) -> dict[str, Any]:
    """One prompt set and temperature: every arm, and the first one over each of the others."""
    held = {arm: [run["results"][at] for run in runs] for arm, runs in arms.items()}
    first = held[REFERENCE]
    rows = {}
    for arm, runs in held.items():
        over = None
        if arm != REFERENCE:
            over = asdict(over_seeds(_counts(first), _counts(runs)))
        each = [run["accepted_length"] for run in runs]
        rows[arm] = {
            "accepted_length": float(np.mean(each)),
            "accepted_length_per_seed": each,
            "acceptance_rate_per_seed": [run["acceptance_rate"] for run in runs],
            "conditional_acceptance": [run["conditional_acceptance"] for run in runs],
            "emitted": [run["emitted"] for run in runs],
            "rounds": [run["rounds"] for run in runs],
            "dspark_over": over,
            "verdict": None if over is None else _verdict(over, len(first), len(runs), arm),
        }
    return {
        "suite": first[0]["suite"],
        "temperature": first[0]["temperature"],
        "n_prompts": len(first[0]["rounds"]),
        "arms": rows,
    }


def _verdict(over: Mapping[str, Any], ours: int, theirs: int, arm: str) -> str:
    """ "ahead" and "behind" take the whole interval, and two seeds of whatever has seeds."""
    if min(ours, theirs if arm != LOOKUP else ours) < 2:
        return "one seed"
    low, high = over["ratio_ci95"]
    return "ahead" if low > 1 else "behind" if high < 1 else "not shown"


def _counts(runs: Sequence[dict[str, Any]]) -> np.ndarray:
    """[seeds, prompts, 2]: emitted tokens and rounds."""
    return np.array([np.stack([run["emitted"], run["rounds"]], axis=1) for run in runs], float)
