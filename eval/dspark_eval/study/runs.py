"""Running the arms of a study: one process per run, several at a time, each resumable.

    OUT/study.json            what is compared, written first
    OUT/first/                answers the prompts once; the other runs get a copy of its rows
    OUT/pace/ARM/             the trial run that measures an arm's pace, with equal seconds
    OUT/ARM/seed-N/           an ordinary run folder, with `measure.json` when it was measured

A run that is finished is not repeated, one that was killed goes on where it stopped, arms and seeds
may be added later, and a folder that holds another study is refused. Seeds change initial weights,
the order of rows and the anchors; rows and their answers are the same for all seeds.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dspark.distill.config import load_config
from dspark.errors import UserError
from dspark.files import atomic_write_json, atomic_write_text, read_json
from dspark.runtime.loading import LoadedTarget, load_target
from dspark.wording import counted
from dspark_eval.equal_size import count_parameters, matched_width
from dspark_eval.study.arms import Arm, Settings
from dspark_eval.study.drafting import DRAFTING_FILE
from dspark_eval.study.long import LONG_FILE
from dspark_eval.study.measure import MEASURE_FILE
from dspark_eval.study.plan import Plan
from dspark_eval.study.processes import Devices, call_module, together, visible_gpus

STUDY_FILE = "study.json"
FIRST = "first"
PACE = "pace"
CONFIG = "config.yaml"
PARAMETER_TOLERANCE = 0.02
TRIAL_STEPS = 400
"""Steps of the run that measures an arm's pace, half of which count."""

Say = Callable[[str], None]


class _Runs:
    """A plan under way: how its processes are started, and who is told."""

    def __init__(self, plan: Plan, say: Say) -> None:
        self.plan = plan
        self.say = say
        self.devices = Devices(visible_gpus())

    def distill(self, folder: Path, settings: Settings) -> None:
        """Train in `folder` unless that is done; the rows of `first/` are copied there before."""
        if (folder / "training.json").is_file():
            return
        if folder.name != FIRST:
            _take_rows(self.plan, folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = load_config(None, {**settings, "out.dir": str(folder)})
        atomic_write_text(folder / CONFIG, config.to_yaml())
        resume = ["--resume"] if (folder / "run.yaml").is_file() else []
        arguments = ["dspark", "distill", "--config", str(folder / CONFIG), *resume]
        with self.devices.one() as gpu:
            call_module(arguments, folder / "distill.log", gpu)

    def measure(self, module: str, folder: Path, *arguments: object) -> None:
        """Run one of the measurements of this package on a run."""
        call_module(
            [f"dspark_eval.study.{module}", str(folder), self.plan.target, *map(str, arguments)],
            folder / f"{module}.log",
        )


def run_study(plan: Plan, say: Say) -> Path:
    """Run and measure everything that is missing; returns the study's folder.

    Raises UserError for another study in the folder, and for a run that fails, with its last line.
    """
    loaded = load_target(plan.target)
    configs = {arm.name: _matched(plan, arm, loaded, say) for arm in plan.study.arms}
    _claim(plan, configs)
    runs = _Runs(plan, say)
    if not (plan.out / FIRST / "training.json").is_file():
        say("answering the prompts, once for all runs")
    runs.distill(plan.out / FIRST, plan.settings(plan.study.reference) | {"train.max_steps": 1})
    if plan.equal_seconds:
        _same_seconds(runs, configs)
    pending = [
        partial(_run, runs, configs[arm.name], arm, seed)
        for seed in plan.seeds
        for arm in plan.study.arms
        if not (run_folder(plan.out, arm.name, seed) / MEASURE_FILE).is_file()
    ]
    say(f"{counted(len(pending), 'run')}, {plan.jobs} at a time")
    together(pending, plan.jobs)
    _measure_long(runs)
    _time_drafts(runs)
    return plan.out


def run_folder(out: Path, arm: str, seed: int) -> Path:
    """Where the run of an arm and a seed lives."""
    return out / arm / f"seed-{seed}"


def _matched(plan: Plan, arm: Arm, loaded: LoadedTarget, say: Say) -> dict[str, Any]:
    """The arm's settings, its MLP as wide as it takes to have the reference's parameters."""
    settings, reference = plan.settings(arm), plan.study.reference
    if arm is reference or not plan.study.match:
        return settings
    goal = count_parameters(load_config(None, plan.settings(reference)), loaded)
    key = "drafter.intermediate_size"

    def size(width: int) -> int:
        return count_parameters(load_config(None, settings | {key: width}), loaded)

    width = matched_width(size, goal)
    found = size(width)
    settings |= {key: width}
    if abs(found / goal - 1) > PARAMETER_TOLERANCE:
        raise UserError(
            f"arm {arm.name}: {found} parameters at MLP width {width}, {goal} wanted; "
            "make its other parts smaller"
        )
    say(f"{arm.name}: {found} parameters, MLP width {width}")
    return settings


def _claim(plan: Plan, configs: dict[str, dict[str, Any]]) -> None:
    """Write study.json. A folder goes on with more arms and other seeds, and nothing else new."""
    path = plan.out / STUDY_FILE
    document: dict[str, Any] = {
        "study": plan.study.name,
        "question": plan.study.question,
        "reference": plan.study.reference.name,
        "matched": plan.study.match,
        "arms": [
            {"name": arm.name, "note": arm.note, "settings": configs[arm.name]}
            for arm in plan.study.arms
        ],
        "steps": plan.steps,
        "seeds": list(plan.seeds),
        "draft_length": plan.draft_length,
        "prompts": plan.prompts,
        "equal_seconds": plan.equal_seconds,
    }
    if path.is_file():
        old = read_json(path)
        _refuse_another(path, old, document)
        arms = {arm["name"]: arm for arm in (*old["arms"], *document["arms"])}
        document["arms"] = list(arms.values())
    atomic_write_json(path, document)


def _refuse_another(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    for key in new:
        if key not in ("arms", "seeds") and old.get(key) != new[key]:
            raise UserError(
                f"{path}: holds a study with {key} {old.get(key)!r}, not {new[key]!r}; "
                "choose another --out"
            )
    known = {arm["name"]: arm["settings"] for arm in old["arms"]}
    for arm in new["arms"]:
        settings = known.get(arm["name"], arm["settings"])
        for key in sorted({*settings, *arm["settings"]}):
            if settings.get(key) != arm["settings"].get(key):
                raise UserError(
                    f"{path}: arm {arm['name']} was run with {key} {settings.get(key)!r}, not "
                    f"{arm['settings'].get(key)!r}; choose another --out"
                )


def _same_seconds(runs: _Runs, configs: dict[str, dict[str, Any]]) -> None:
    """Steps of each arm that take as long as the reference's, by a trial run of every arm.

    The trials run side by side, as the runs will, and their last half counts: by then every row's
    target states are in memory. What the runs really took is in the table.
    """
    calls = [partial(_pace, runs, name, settings) for name, settings in configs.items()]
    paces = dict(zip(configs, together(calls, runs.plan.jobs), strict=True))
    goal = runs.plan.steps * paces[runs.plan.study.reference.name]
    for name, settings in configs.items():
        settings["train.max_steps"] = max(1, round(goal / paces[name]))
        runs.say(
            f"{name}: {1e3 * paces[name]:.0f} ms a step, "
            f"{counted(settings['train.max_steps'], 'step')}"
        )


def _pace(runs: _Runs, name: str, settings: Settings) -> float:
    """Seconds of a step in the last half of a trial run."""
    folder = runs.plan.out / PACE / name
    trial = {"train.max_steps": TRIAL_STEPS, "train.log_every": TRIAL_STEPS // 2}
    runs.distill(folder, {**settings, **trial, "eval.calibrate": False})
    return pace(read_json(folder / "training.json"))


def pace(records: list[dict[str, Any]]) -> float:
    """Seconds of a step, from the first record past the middle of a run to its last."""
    last = records[-1]
    middle = next(record for record in records if 2 * record["step"] >= last["step"])
    return float((last["train_s"] - middle["train_s"]) / (last["step"] - middle["step"]))


def _take_rows(plan: Plan, folder: Path) -> None:
    """Copy the answered rows into a run folder; none is left half copied."""
    if (folder / "rows").is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(plan.out / FIRST / "rows", folder / "rows.partial", dirs_exist_ok=True)
    os.replace(folder / "rows.partial", folder / "rows")


def _run(runs: _Runs, settings: Settings, arm: Arm, seed: int) -> None:
    """Train and measure one arm with one seed."""
    plan = runs.plan
    folder = run_folder(plan.out, arm.name, seed)
    runs.distill(folder, {**settings, "train.seed": seed})
    runs.measure("measure", folder, plan.draft_length, plan.prompts)
    tau = read_json(folder / MEASURE_FILE)["results"][0]["accepted_length"]
    runs.say(f"{arm.name} seed {seed}: accepted length {tau:.3f}")


def _measure_long(runs: _Runs) -> None:
    """Every run in contexts longer than its rows, where `--long` asks for it."""
    plan = runs.plan
    folders = [
        run_folder(plan.out, arm.name, seed) for arm in plan.study.arms for seed in plan.seeds
    ]
    pending = [
        partial(runs.measure, "long", folder, plan.draft_length, plan.long)
        for folder in folders
        if plan.long and _long_prompts(folder) != plan.long
    ]
    if pending:
        runs.say(f"{counted(len(pending), 'run')} in long contexts")
        together(pending, plan.jobs)


def _long_prompts(folder: Path) -> int | None:
    path = folder / LONG_FILE
    return read_json(path)["prompts"] if path.is_file() else None


def _time_drafts(runs: _Runs) -> None:
    """Nothing else may run meanwhile: one drafter of each arm, one after the other."""
    plan = runs.plan
    for arm in plan.study.arms if plan.contexts else ():
        folder = run_folder(plan.out, arm.name, plan.seeds[0])
        if _timed(folder) != sorted(plan.contexts):
            runs.say(f"{arm.name}: timing drafts")
            runs.measure("drafting", folder, *plan.contexts)


def _timed(folder: Path) -> list[int]:
    path = folder / DRAFTING_FILE
    return [entry["context"] for entry in read_json(path)] if path.is_file() else []
