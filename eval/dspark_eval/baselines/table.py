"""The ordering of the DSpark paper's Table 1, at small scale, with intervals.

    OUT/first/           answers the prompts once
    OUT/ARM/seed-N/      a trained arm and what it was measured to be worth
    OUT/table.json       every number;  OUT/table.md  the tables

Arms: the run's own drafter (DeepSpec's recipe at its best rate on k3-nano), DFlash, an EAGLE-3
layer, a small causal LM, each trained on the same rows for the same steps from the same seeds and
made as wide as brings it to the first arm's number of parameters; and prompt lookup. All propose as
many tokens a round. Seeds change initial weights, order and anchors, never the rows.

The paper's claim is that DSpark accepts more than DFlash and than EAGLE-3 while it drafts in one
pass as DFlash does. It holds here for a setting if the interval of the ratio lies above 1.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dspark.distill.config import load_config
from dspark.errors import UserError
from dspark.files import atomic_write_json, atomic_write_text, read_json
from dspark_eval.baselines.folders import KINDS
from dspark_eval.compare_table import ratio_cell, table
from dspark_eval.intervals import paired
from dspark_eval.study.arms import DEEPSPEC, ROWS
from dspark_eval.study.plan import ENDLESS, OWNED
from dspark_eval.study.processes import Devices, call_module, together, visible_gpus

FIRST, MEASURED, TABLE_FILE, REPORT_FILE = "first", "measure.json", "table.json", "table.md"
SETTINGS_FILE = "settings.json"
REFERENCE, LOOKUP = "dspark", "lookup"
ARMS = (REFERENCE, *KINDS, LOOKUP)
BASE = DEEPSPEC | ROWS | {"train.lr": 2.5e-3}
"""DeepSpec's recipe; the rate is its best on k3-nano (eval/LOG.md)."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What to run. Raises UserError for what cannot be.

    Attributes:
        out: Folder of everything; the same one goes on.
        arms: Of `ARMS`; the first of those is always among them.
        steps, seeds, jobs, prompts, draft_length, target, device: As of a study.
        overrides: Settings of every trained arm.
    """

    out: Path
    arms: tuple[str, ...] = ARMS
    steps: int = 1200
    seeds: int = 3
    jobs: int = 2
    prompts: int = 60
    draft_length: int = 7
    target: str = "nano"
    device: str = "auto"
    overrides: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "seeds", "jobs", "draft_length"):
            value = getattr(self, name)
            if value < 1:
                raise UserError(f"--{name.replace('_', '-')} {value}: expected 1 or more")
        if self.prompts < 2:
            raise UserError(f"--prompts {self.prompts}: expected 2 or more")
        for arm in self.arms:
            if arm not in ARMS:
                raise UserError(f"--arm {arm}: expected one of {', '.join(ARMS)}")
        for key in set(self.overrides or {}) & set(OWNED):
            raise UserError(f"--set {key}: the table decides it; use {OWNED[key]}")
        block = load_config(None, self.settings(0)).drafter.block_size
        if self.draft_length > block:
            raise UserError(
                f"--draft-length {self.draft_length}: expected at most {block}, the block size"
            )

    def settings(self, seed: int) -> dict[str, Any]:
        """Dotted settings of the runs of a seed."""
        return {
            **BASE,
            **(self.overrides or {}),
            "target.name": self.target,
            "target.device": self.device,
            "train.max_steps": self.steps,
            "train.epochs": ENDLESS,
            "train.seed": seed,
        }

    def document(self) -> dict[str, Any]:
        """What all runs in a folder share."""
        shared = ("steps", "prompts", "draft_length", "target")
        return {**{name: getattr(self, name) for name in shared}, "settings": self.settings(0)}


def run_table(plan: Plan, say: Say) -> dict[str, Any]:
    """Train and measure what is missing, then build the table.

    Raises UserError for a folder of other settings, and for a run that fails, with its last line.
    """
    _claim(plan)
    devices = Devices(visible_gpus())
    if not (plan.out / FIRST / "training.json").is_file():
        say("answering the prompts, once for all runs")
        _distill(plan, plan.out / FIRST, {**plan.settings(0), "train.max_steps": 1}, devices)
    jobs = [
        partial(_run, plan, arm, seed, devices, say)
        for seed in range(plan.seeds)
        for arm in dict.fromkeys((REFERENCE, *plan.arms))
        if arm != LOOKUP or seed == 0
    ]
    together(jobs, plan.jobs)
    return build(plan)


def _claim(plan: Plan) -> None:
    path, wanted = plan.out / SETTINGS_FILE, plan.document()
    if path.is_file() and read_json(path) != wanted:
        raise UserError(f"{path}: a table of other settings lives here; choose another --out")
    plan.out.mkdir(parents=True, exist_ok=True)
    atomic_write_json(path, wanted)


def _distill(plan: Plan, folder: Path, settings: Mapping[str, Any], devices: Devices) -> None:
    if folder.name != FIRST and not (folder / "rows").is_dir():
        shutil.copytree(plan.out / FIRST / "rows", folder / "rows.partial", dirs_exist_ok=True)
        os.replace(folder / "rows.partial", folder / "rows")
    folder.mkdir(parents=True, exist_ok=True)
    config = load_config(None, {**settings, "out.dir": str(folder)})
    atomic_write_text(folder / "config.yaml", config.to_yaml())
    resume = ["--resume"] if (folder / "run.yaml").is_file() else []
    arguments = ["dspark", "distill", "--config", str(folder / "config.yaml"), *resume]
    with devices.one() as gpu:
        call_module(arguments, folder / "distill.log", gpu)


def _run(plan: Plan, arm: str, seed: int, devices: Devices, say: Say) -> None:
    """Train and measure one arm with one seed, each unless it is done."""
    folder = plan.out / arm / f"seed-{seed}"
    done = {REFERENCE: "training.json", LOOKUP: "."}.get(arm, "baseline.json")
    if arm == LOOKUP:
        folder.mkdir(parents=True, exist_ok=True)
    elif not (folder / done).exists() and arm == REFERENCE:
        _distill(plan, folder, plan.settings(seed), devices)
    elif not (folder / done).exists():
        log = plan.out / arm / f"seed-{seed}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        kept = ["--set", f"train.max_steps={plan.steps}", f"train.seed={seed}"]
        train = ["dspark_eval.baselines", "train", str(plan.out / FIRST), "--kind", arm]
        with devices.one() as gpu:
            call_module([*train, "--out", str(folder), *kept], log, gpu)
    file = plan.out / arm / f"seed-{seed}.{MEASURED}"
    if not file.is_file():
        name = LOOKUP if arm == LOOKUP else str(folder)
        given = {"out": file, "target": plan.target, "prompts": plan.prompts}
        given["draft-length"] = plan.draft_length
        options = [text for key, value in given.items() for text in (f"--{key}", str(value))]
        call_module(
            ["dspark_eval.baselines", "measure", name, *options],
            plan.out / arm / f"seed-{seed}.measure.log",
        )
    length = read_json(file)["results"][0]["accepted_length"]
    say(f"{arm} seed {seed}: accepted length {length:.3f}")


def build(plan: Plan) -> dict[str, Any]:
    """The table of everything measured under `plan.out`, written there as JSON and markdown."""
    found = {arm: _measured(plan.out, arm, plan.seeds) for arm in ARMS}
    arms = {arm: runs for arm, runs in found.items() if runs}
    if REFERENCE not in arms:
        raise UserError(
            f"{plan.out}: no run of {REFERENCE} is measured yet; the same command goes on"
        )
    document: dict[str, Any] = {
        "schema_version": 1,
        "kind": "table1",
        **plan.document(),
        "arms": [
            {
                "arm": arm,
                "seeds": len(runs),
                "parameters": runs[0]["parameters"],
                "passes": runs[0]["passes"],
            }
            for arm, runs in arms.items()
        ],
        "results": [_setting(arms, at) for at in range(len(arms[REFERENCE][0]["results"]))],
    }
    atomic_write_json(plan.out / TABLE_FILE, document)
    atomic_write_text(plan.out / REPORT_FILE, markdown(document))
    return document


def _measured(out: Path, arm: str, seeds: int) -> list[dict[str, Any]]:
    files = [out / arm / f"seed-{seed}.{MEASURED}" for seed in range(seeds)]
    return [read_json(file) for file in files if file.is_file()]


def _setting(arms: Mapping[str, Sequence[dict[str, Any]]], at: int) -> dict[str, Any]:
    """One prompt set and temperature: every arm, and the first one over each of the others."""
    held = {arm: [run["results"][at] for run in runs] for arm, runs in arms.items()}
    first = held[REFERENCE]
    rows = {}
    for arm, runs in held.items():
        each = [run["accepted_length"] for run in runs]
        over = None if arm == REFERENCE else asdict(paired(_counts(first), _counts(runs)))
        conditional = [run["conditional_acceptance"] for run in runs]
        rows[arm] = {
            "accepted_length": float(np.mean(each)),
            "accepted_length_per_seed": each,
            "conditional_acceptance": conditional,
            "dspark_over": over,
        }
    return {
        "suite": first[0]["suite"],
        "temperature": first[0]["temperature"],
        "n_prompts": len(first[0]["rounds"]),
        "arms": rows,
    }


def _counts(runs: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Emitted tokens and rounds of each prompt, all seeds together."""
    emitted, rounds = (np.sum([run[key] for run in runs], axis=0) for key in ("emitted", "rounds"))
    return list(zip(emitted.tolist(), rounds.tolist(), strict=True))


def markdown(document: Mapping[str, Any]) -> str:
    """A table for each setting; `holds`: the whole interval lies above 1."""
    facts = {entry["arm"]: entry for entry in document["arms"]}
    lines = [
        f"Target {document['target']}, {document['steps']} steps, draft length "
        f"{document['draft_length']}; accepted length with bonus"
    ]
    head = (
        "arm", "parameters", "drafter passes for k tokens", "accepted length (seeds)",
        "dspark over it [95 %]", "dspark is ahead",
    )  # fmt: skip
    for setting in document["results"]:
        rows = [_line(arm, row, facts[arm]) for arm, row in setting["arms"].items()]
        title = (
            f"{setting['suite']}, T = {setting['temperature']:g}, {setting['n_prompts']} prompts"
        )
        lines += ["", title, "", *table(head, rows)]
    return "\n".join(lines) + "\n"


def _line(arm: str, row: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    each, over, size = row["accepted_length_per_seed"], row["dspark_over"], facts["parameters"]
    seeds = f" ({min(each):.2f} to {max(each):.2f})" if len(each) > 1 else ""
    ahead, ratio = "", ""
    if over is not None:
        ratio = ratio_cell(over["ratio"], over["ratio_ci95"])
        low, high = over["ratio_ci95"]
        ahead = "yes" if low > 1 else "no" if high < 1 else "not shown"
    return [
        arm,
        "" if size is None else f"{size / 1e6:.2f} M",
        facts["passes"],
        f"{row['accepted_length']:.2f}{seeds}",
        ratio,
        ahead,
    ]
