"""Running the arms of a study: one process per run, several at a time, each resumable.

    OUT/study.json            what is compared, written first
    OUT/first/                answers the prompts once; the other runs get a copy of its rows
    OUT/ARM/seed-N/           an ordinary run folder, with `measure.json` when it was measured

A run that is finished is not repeated, one that was killed goes on where it stopped, and a folder
that holds another study is refused. Seeds change initial weights, the order of rows and the
anchors; rows and their answers are the same for all seeds.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dspark.distill.config import DistillConfig, load_config
from dspark.distill.fresh import new_drafter
from dspark.errors import UserError
from dspark.files import atomic_write_json, atomic_write_text, read_json
from dspark.runtime.k3_target import LoadedTarget, load_target
from dspark_eval.study.arms import Arm, Settings, Study
from dspark_eval.study.drafting import DRAFTING_FILE
from dspark_eval.study.measure import MEASURE_FILE

STUDY_FILE = "study.json"
FIRST = "first"
CONFIG = "config.yaml"
PARAMETER_TOLERANCE = 0.02
TRIAL_STEPS = 400
"""Steps of the run that measures an arm's pace, half of which count."""


_TURN = itertools.count()
"""Runs started so far, over all GPUs."""


@dataclass(frozen=True)
class Plan:
    """How a study is run.

    Attributes:
        study: What is compared.
        out: Folder of all runs.
        steps: Optimiser steps of every run.
        seeds: Seeds of every arm.
        jobs: Runs at a time.
        prompts: Prompts of each measurement.
        draft_length: Proposals per round when measuring.
        target: Name or folder of the target.
        device: Where runs train; measuring is on the CPU.
        overrides: Settings given on the command line, of every arm.
        contexts: Context lengths at which drafts are timed, one run after the other; may be empty.
        equal_seconds: Give every arm the training time of the reference's steps, and not its steps.
    """

    study: Study
    out: Path
    steps: int
    seeds: tuple[int, ...]
    jobs: int
    prompts: int
    draft_length: int
    target: str
    device: str
    overrides: Settings
    contexts: tuple[int, ...] = ()
    equal_seconds: bool = False


def run_study(plan: Plan, say: Callable[[str], None]) -> Path:
    """Run and measure everything that is missing; returns the study's folder.

    Raises UserError for another study in the folder, and for a run that fails, with its last line.
    """
    loaded = load_target(plan.target)
    configs = {arm.name: _matched(plan, arm, loaded, say) for arm in plan.study.arms}
    _claim(plan, configs)
    _answer(plan, say)
    if plan.equal_seconds:
        _same_seconds(plan, configs, say)
    pending = [
        (arm, seed)
        for seed in plan.seeds
        for arm in plan.study.arms
        if not (run_folder(plan.out, arm.name, seed) / MEASURE_FILE).is_file()
    ]
    say(f"{len(pending)} runs of {plan.steps} steps, {plan.jobs} at a time")
    _together(plan, [(_run, plan, configs[arm.name], arm, seed, say) for arm, seed in pending])
    _time_drafts(plan, say)
    return plan.out


def _together(plan: Plan, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Results of (function, arguments...), `jobs` at a time."""
    with ThreadPoolExecutor(plan.jobs) as pool:
        return [job.result() for job in [pool.submit(*call) for call in calls]]


def run_folder(out: Path, arm: str, seed: int) -> Path:
    """Where the run of an arm and a seed lives."""
    return out / arm / f"seed-{seed}"


def count_parameters(config: DistillConfig, loaded: LoadedTarget) -> int:
    """Trainable parameters of the drafter that a configuration describes."""
    drafter = new_drafter(config, loaded.target, loaded.tokenizer)
    return sum(p.numel() for p in drafter.parameters())


def _settings(plan: Plan, arm: Arm) -> dict[str, Any]:
    return {
        **plan.study.base,
        **plan.overrides,
        **arm.settings,
        "target.name": plan.target,
        "target.device": plan.device,
        "train.max_steps": plan.steps,
    }


def _matched(
    plan: Plan, arm: Arm, loaded: LoadedTarget, say: Callable[[str], None]
) -> dict[str, Any]:
    """The arm's settings, its MLP as wide as it takes to have the reference's parameters."""
    settings = _settings(plan, arm)
    if not plan.study.match:
        return settings
    goal = count_parameters(load_config(None, _settings(plan, plan.study.reference)), loaded)
    key = "drafter.intermediate_size"
    low, high = (
        count_parameters(load_config(None, settings | {key: width}), loaded) for width in (8, 16)
    )
    # parameters are linear in the width, which stays a multiple of 8
    width = 8 * max(1, round(1 + (goal - low) / (high - low)))
    settings |= {key: width}
    found = count_parameters(load_config(None, settings), loaded)
    if abs(found / goal - 1) > PARAMETER_TOLERANCE:
        raise UserError(
            f"arm {arm.name}: {found} parameters at MLP width {width}, {goal} wanted; "
            "make its other parts smaller"
        )
    say(f"{arm.name}: {found} parameters, MLP width {width}")
    return settings


def _claim(plan: Plan, configs: dict[str, dict[str, Any]]) -> None:
    path = plan.out / STUDY_FILE
    document = {
        "study": plan.study.name,
        "question": plan.study.question,
        "reference": plan.study.reference.name,
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
    if path.is_file() and read_json(path) != document:
        raise UserError(f"{path}: another study, or other settings; choose another --out")
    atomic_write_json(path, document)


def _answer(plan: Plan, say: Callable[[str], None]) -> None:
    """Have the prompts answered by a run of one step, whose rows all others use."""
    folder = plan.out / FIRST
    if (folder / "training.json").is_file():
        return
    say("answering the prompts, once for all runs")
    settings = _settings(plan, plan.study.reference) | {"train.max_steps": 1, "eval.prompts": 0}
    _distill(plan, folder, settings)


def _same_seconds(
    plan: Plan, configs: dict[str, dict[str, Any]], say: Callable[[str], None]
) -> None:
    """Steps of each arm that take as long as the reference's, by a trial run of every arm.

    The trials run side by side, as the runs will, and their last half counts: by then every row's
    target states are in memory. What the runs really took is in the table.
    """
    paces = dict(
        zip(
            configs,
            _together(plan, [(_pace, plan, name, settings) for name, settings in configs.items()]),
            strict=True,
        )
    )
    goal = plan.steps * paces[plan.study.reference.name]
    for name, settings in configs.items():
        settings["train.max_steps"] = round(goal / paces[name])
        say(f"{name}: {1e3 * paces[name]:.0f} ms a step, {settings['train.max_steps']} steps")


def _pace(plan: Plan, name: str, settings: dict[str, Any]) -> float:
    """Seconds of a step in the last half of a trial run."""
    folder = plan.out / "pace" / name
    if not (folder / "training.json").is_file():
        _take_rows(plan, folder)
        _distill(plan, folder, settings | {"train.max_steps": TRIAL_STEPS})
    records = read_json(folder / "training.json")
    middle = next(record for record in records if 2 * record["step"] >= TRIAL_STEPS)
    last = records[-1]
    return (last["train_s"] - middle["train_s"]) / (last["step"] - middle["step"])


def _take_rows(plan: Plan, folder: Path) -> None:
    """Copy the answered rows into a run folder; none is left half copied."""
    if (folder / "rows").is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(plan.out / FIRST / "rows", folder / "rows.partial", dirs_exist_ok=True)
    os.replace(folder / "rows.partial", folder / "rows")


def _run(
    plan: Plan, settings: dict[str, Any], arm: Arm, seed: int, say: Callable[[str], None]
) -> None:
    folder = run_folder(plan.out, arm.name, seed)
    if not (folder / "training.json").is_file():
        _take_rows(plan, folder)
        _distill(plan, folder, settings | {"train.seed": seed})
    arguments = [str(folder), plan.target, str(plan.draft_length), str(plan.prompts)]
    _call(["-m", "dspark_eval.study.measure", *arguments], folder, "measure.log")
    tau = read_json(folder / MEASURE_FILE)["results"][0]["accepted_length"]
    say(f"{arm.name} seed {seed}: accepted length {tau:.3f}")


def _time_drafts(plan: Plan, say: Callable[[str], None]) -> None:
    """Nothing else may run meanwhile: one drafter of each arm, one after the other."""
    for arm in plan.study.arms if plan.contexts else ():
        folder = run_folder(plan.out, arm.name, plan.seeds[0])
        if not (folder / DRAFTING_FILE).is_file():
            say(f"{arm.name}: timing drafts")
            arguments = [str(folder), plan.target, *map(str, plan.contexts)]
            _call(["-m", "dspark_eval.study.drafting", *arguments], folder, "drafting.log")


def _distill(plan: Plan, folder: Path, settings: Settings) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = load_config(None, {**settings, "out.dir": str(folder)})
    atomic_write_text(folder / CONFIG, config.to_yaml())
    resume = ["--resume"] if (folder / "run.yaml").is_file() else []
    arguments = ["-m", "dspark", "distill", "--config", str(folder / CONFIG), *resume]
    _call(arguments, folder, "distill.log")


def _call(arguments: Sequence[str], folder: Path, log: str) -> None:
    """Run a Python module, its output in a file of the folder."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    gpus = torch.cuda.device_count()
    if gpus > 1:  # the runs go round the GPUs
        environment["CUDA_VISIBLE_DEVICES"] = str(next(_TURN) % gpus)
    with (folder / log).open("w") as output:
        done = subprocess.run(
            [sys.executable, *arguments], stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    if done.returncode:
        lines = (folder / log).read_text().strip().splitlines() or ["no output"]
        raise UserError(f"{folder / log}: the run failed: {lines[-1]}")


def default_device() -> str:
    """Where runs train if nothing is said."""
    return "cuda" if torch.cuda.is_available() else "cpu"
