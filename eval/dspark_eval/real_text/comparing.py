"""Drafters compared on the same prompts: the ratio of their accepted lengths.

Tokens over rounds of all cells at a temperature, with a 95 % interval that resamples prompts within
their sets. A prompt brings all its answers: where temperatures are pooled, those at each of them.
Over seeds, `intervals.over_seeds`: another seed would have given other drafters, of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from dspark.errors import UserError
from dspark_eval.intervals import over_seeds, ratio_of_ratios
from dspark_eval.real_text.arms import REFERENCE
from dspark_eval.real_text.runs import LONGER, find_run, pairs

RESAMPLES = 4000
CLEAN = "without loops"
Cells = list[dict[str, Any]]


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
    digests = {each["prompts_sha256"] for each in (cell, other) if "prompts_sha256" in each}
    if cell["prompts"] != other["prompts"] or len(digests) > 1:
        raise UserError(f"{cell['set']}: measured on other prompts than the reference")
    columns = (cell["emitted"], cell["rounds"], other["emitted"], other["rounds"])
    kept = loops | ~(np.array(cell["loops"]) | np.array(other["loops"]))
    return np.array(columns, dtype=np.float64).T * np.reshape(kept, (-1, 1))


def compare_seeds(cells: Mapping[str, Cells]) -> dict[str, dict[str, Any]]:
    """Recipes trained from several seeds over the reference, by temperature and over both.

    Of the seeds that both have, at least two; `cells` by the names of runs.
    """
    found: dict[str, dict[str, Any]] = {}
    kinds = {(run.arm, run.long): None for run in map(find_run, cells) if run.arm != REFERENCE}
    for arm, long in kinds:
        names = pairs(list(cells), arm, long)
        if len(names) < 2:
            continue
        sides = [np.array([_by_prompt(cells[pair[side]]) for pair in names]) for side in (0, 1)]
        temperatures = sorted({cell["temperature"] for cell in cells[names[0][0]]})
        labels = {f"{t:g}": [at] for at, t in enumerate(temperatures)}
        labels["all"] = list(range(len(temperatures)))
        found[arm + LONGER * long] = {
            "runs": names,
            **{
                label: asdict(over_seeds(*(side[:, at].sum(1) for side in sides)))
                for label, at in labels.items()
            },
        }
    return found


def _by_prompt(cells: Cells) -> np.ndarray:
    """[temperatures, prompts, 2]: tokens and rounds, sets one after the other."""
    by_temperature: dict[float, list[np.ndarray]] = {}
    for cell in cells:
        counts = np.array([cell["emitted"], cell["rounds"]], dtype=np.float64).T
        by_temperature.setdefault(cell["temperature"], []).append(counts)
    return np.array([np.concatenate(by_temperature[t]) for t in sorted(by_temperature)])


def seeds_table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each recipe and temperature: each seed's accepted lengths, and their ratio."""
    lines = [
        "| recipe | T | seeds | accepted, by seed | the reference's | ratio | "
        "standard error: prompts, seeds |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for name, labels in found.items():
        for label, each in ((key, each) for key, each in labels.items() if key != "runs"):
            low, high = each["ratio_ci95"] or (float("nan"), float("nan"))
            own, other = (", ".join(f"{v:.2f}" for v in side) for side in each["per_seed"])
            lines.append(
                f"| {name} | {label} | {len(labels['runs'])} | {own} | {other} | "
                f"{each['ratio']:.3f} [{low:.3f}, {high:.3f}] | "
                f"{_error(each['prompts_sd'])}, {_error(each['seeds_sd'])} |"
            )
    return "\n".join(lines)


def _error(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
