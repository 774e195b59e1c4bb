"""The runs behind the table of ways to draft, each a process of its own, each done once.

    OUT/first/              answers the prompts once
    OUT/rates/ARM/lr-X/     an arm trained with learning rate X, and lr-X.measure.json beside it:
                            what it is worth on validation prompts
    OUT/ARM/seed-N/         an arm trained with the rate that was best for it, and
                            seed-N.measure.json: what it is worth on held-out prompts

A call that is killed goes on with the same command. What is finished is not repeated; the first
arm's runs go on from their last checkpoint, a baseline's training begins anew: either way rows,
order, anchors and weights are functions of the settings and the seed, so that the table is that of
a call which was not killed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dspark.distill.config import load_config
from dspark.errors import UserError
from dspark.files import atomic_write_json, atomic_write_text, read_json
from dspark_eval.baselines.plan import LOOKUP, RATE_SEED, REFERENCE, Plan
from dspark_eval.study.processes import Devices, call_module, together, visible_gpus

FIRST, MEASURED, SETTINGS_FILE = "first", "measure.json", "settings.json"
NOT_FINITE = "not finite"
"""In the message of a run whose weights or gradients met NaN or infinity."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """One arm trained once, or nothing trained for prompt lookup: `rate` is None then.

    `validation`: of the search for a rate, measured on prompts that the table does not measure.
    """

    arm: str
    folder: Path
    seed: int
    rate: float | None
    steps: int
    validation: bool = False

    @property
    def measured(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.{MEASURED}")

    @property
    def label(self) -> str:
        return f"{self.arm} {self.folder.name}"

    def read(self) -> dict[str, Any] | None:
        """What it was measured to be worth; None: not yet, or its training failed."""
        found = read_json(self.measured) if self.measured.is_file() else {"failed": ""}
        return None if "failed" in found else found


def run_all(plan: Plan, say: Say) -> None:
    """Train and measure everything that is missing.

    Raises UserError for a folder of other settings, for an arm that trains with no rate, and for a
    run that fails, with its last line.
    """
    _claim(plan)
    devices = Devices(visible_gpus())
    if not (plan.out / FIRST / "training.json").is_file():
        say("answering the prompts, once for all runs")
        _distill(plan, plan.out / FIRST, plan.settings(0, plan.rates[0], 1), devices)
    if len(plan.rates) > 1:
        trials = [run for arm in plan.trained_arms for run in rate_runs(plan, arm)]
        together([partial(_run, plan, run, devices, say) for run in trials], plan.jobs)
    rates = {arm: best_rate(plan, arm) for arm in plan.trained_arms}
    for arm, rate in rates.items():
        if rate is None:
            raise UserError(f"--rates: {arm} met NaN with each of them; try lower ones")
    runs = [
        run
        for seed in range(plan.seeds)
        for arm in dict.fromkeys((REFERENCE, *plan.arms))
        for run in seed_runs(plan, arm, rates.get(arm))[seed : seed + 1]
    ]
    together([partial(_run, plan, run, devices, say) for run in runs], plan.jobs)


def rate_runs(plan: Plan, arm: str) -> list[Run]:
    """The trials of an arm, by rising rate."""
    folder = plan.out / "rates" / arm
    return [
        Run(arm, folder / f"lr-{rate:g}", RATE_SEED, rate, plan.rate_steps, validation=True)
        for rate in sorted(plan.rates)
    ]


def seed_runs(plan: Plan, arm: str, rate: float | None) -> list[Run]:
    """The runs that the table measures; prompt lookup has no seed, so one."""
    seeds = 1 if arm == LOOKUP else plan.seeds
    return [
        Run(arm, plan.out / arm / f"seed-{seed}", seed, rate, plan.steps) for seed in range(seeds)
    ]


def best_rate(plan: Plan, arm: str) -> float | None:
    """The rate whose trial accepts most; of equal ones the lower. None: no trial ended."""
    if len(plan.rates) == 1:
        return plan.rates[0]
    tried = [(run, run.read()) for run in rate_runs(plan, arm)]
    lengths = {
        run.rate: found["results"][0]["accepted_length"]
        for run, found in tried
        if found is not None and run.rate is not None
    }
    return max(lengths, key=lambda rate: (lengths[rate], -rate)) if lengths else None


def _claim(plan: Plan) -> None:
    path, wanted = plan.out / SETTINGS_FILE, plan.document()
    if path.is_file() and read_json(path) != wanted:
        raise UserError(f"{path}: a table of other settings lives here; choose another --out")
    plan.out.mkdir(parents=True, exist_ok=True)
    atomic_write_json(path, wanted)


def _run(plan: Plan, run: Run, devices: Devices, say: Say) -> None:
    """Train and measure, each unless it is done."""
    if run.measured.is_file():
        return
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        _train(plan, run, devices)
    except UserError as error:
        if not run.validation or NOT_FINITE not in str(error):
            raise
        atomic_write_json(run.measured, {"failed": str(error)})  # too high a rate is an answer
        say(f"{run.label}: {error}")
        return
    name = LOOKUP if run.arm == LOOKUP else str(run.folder)
    options: list[str] = ["--validation"] if run.validation else []
    prompts = plan.rate_prompts if run.validation else plan.prompts
    given = {"out": run.measured, "target": plan.target, "prompts": prompts}
    given["draft-length"] = plan.draft_length
    options += [text for key, value in given.items() for text in (f"--{key}", str(value))]
    log = run.folder.with_name(f"{run.folder.name}.measure.log")
    call_module(["dspark_eval.baselines", "measure", name, *options], log)
    length = read_json(run.measured)["results"][0]["accepted_length"]
    say(f"{run.label}: accepted length {length:.3f}")


def _train(plan: Plan, run: Run, devices: Devices) -> None:
    if run.rate is None:
        return
    if run.arm == REFERENCE:
        if not (run.folder / "training.json").is_file():
            settings = plan.settings(run.seed, run.rate, run.steps)
            _distill(plan, run.folder, settings, devices)
        return
    if (run.folder / "baseline.json").is_file():
        return
    own = {"train.max_steps": run.steps, "train.seed": run.seed, "train.lr": run.rate}
    train = ["dspark_eval.baselines", "train", str(plan.out / FIRST), "--kind", run.arm]
    train += ["--any-size"] if plan.sizes == "own" else []
    changed = [f"{key}={value}" for key, value in own.items()]
    with devices.one() as gpu:
        log = run.folder.with_name(f"{run.folder.name}.log")
        call_module([*train, "--out", str(run.folder), "--set", *changed], log, gpu)


def _distill(plan: Plan, folder: Path, settings: Mapping[str, Any], devices: Devices) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if folder.name != FIRST and not (folder / "rows").is_dir():
        shutil.copytree(plan.out / FIRST / "rows", folder / "rows.partial", dirs_exist_ok=True)
        os.replace(folder / "rows.partial", folder / "rows")
    config = load_config(None, {**settings, "out.dir": str(folder)})
    atomic_write_text(folder / "config.yaml", config.to_yaml())
    resume = ["--resume"] if (folder / "run.yaml").is_file() else []
    arguments = ["dspark", "distill", "--config", str(folder / "config.yaml"), *resume]
    with devices.one() as gpu:
        call_module(arguments, folder / "distill.log", gpu)
