"""The study on real text, step by step; every step may be run again and goes on where it stopped.

    python -m dspark_eval.real_text answer  OUT --prompts DIR    prompts are written and answered
    python -m dspark_eval.real_text warm    OUT --prompts DIR    kernels are compiled beforehand
    python -m dspark_eval.real_text train   OUT --prompts DIR --arm deep --seconds 200
    python -m dspark_eval.real_text measure OUT --prompts DIR --arm deep
    python -m dspark_eval.real_text speed   OUT --prompts DIR    one prompt at a time, all ways
    python -m dspark_eval.real_text table   OUT                  the table, from what is there
    python -m dspark_eval.real_text all     OUT --prompts DIR --device cuda --budget 1250

DIR holds `train/*.jsonl` and `test/*.jsonl` (`turns` in each line). No test prompt, nor a near copy
of one, is trained on: `prompts.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

from dspark.console import Parser, module_command
from dspark.devices import find_device
from dspark.errors import UserError
from dspark.files import read_json
from dspark.runtime.loading import LoadedTarget, load_target
from dspark_eval.real_text.answers import Asked, answer, check_asked, is_answered, read_rows
from dspark_eval.real_text.arms import (
    CANDIDATES,
    CHOSEN,
    FROM_TARGET,
    LIKE_CHOSEN,
    REFERENCE,
    TRIED,
    arm_config,
    find_arm,
    like,
)
from dspark_eval.real_text.chosen import choose, real_name
from dspark_eval.real_text.measuring import TEMPERATURES, measure, measured_path
from dspark_eval.real_text.reuse import ASKED, is_there
from dspark_eval.real_text.schedule import Study, jobs
from dspark_eval.real_text.speed import is_timed, measure_speed
from dspark_eval.real_text.table import write_table
from dspark_eval.real_text.training import TRAINED, train_for, warm
from dspark_eval.study.processes import visible_gpus

SPEED_PROMPTS, SPEED_TOKENS = 2, 64
"""Prompts of each set, and the longest answer, that speed is measured with."""


def _answer(options: argparse.Namespace) -> None:
    asked = _asked(options)
    check_asked(options.out, asked)
    if not is_answered(options.out, asked):
        answer(_target(options), options.prompts, options.out, asked, options.answer_batch)


def _asked(options: argparse.Namespace) -> Asked:
    return Asked(
        options.answer_tokens, options.samples, options.generated, options.written, options.parts
    )


def _warm(options: argparse.Namespace) -> None:
    arms = options.beside or (REFERENCE, *TRIED)
    coming = [name for name in arms if not (options.out / name / TRAINED).is_file()]
    if coming:
        loaded, more = _target(options), _overrides(options.set)
        warm(loaded, [arm_config(find_arm(name), loaded, more) for name in coming])


def _train(options: argparse.Namespace) -> None:
    arm, folder = find_arm(options.arm), options.out / options.arm
    more, chosen = _overrides(options.set), choose(options.out)
    asked = {
        "seconds": options.seconds,
        "settings": {**like(arm, chosen).settings, **more},
        "answers": asdict(_asked(options)),
    }
    if is_there(folder / TRAINED, asked):
        return
    loaded = _target(options)
    rows, held_out = read_rows(options.out, options.prompts)
    train_for(
        loaded,
        rows,
        held_out,
        arm_config(arm, loaded, more, chosen),
        options.seconds,
        folder,
        asked=asked,
        from_target=(chosen if arm.name in LIKE_CHOSEN else arm.name) in FROM_TARGET,
        beside=[options.out / find_arm(name).name for name in options.beside],
    )


def _measure(options: argparse.Namespace) -> None:
    name = find_arm(real_name(options.out, options.arm)).name
    folder = options.out / name
    if not (folder / TRAINED).is_file():
        raise UserError(f"{folder}: not trained yet; run the step train with --arm {name}")
    asked = {
        "per_set": options.per_set,
        "max_new_tokens": options.new_tokens,
        "dtype": options.dtype,
        "trained": read_json(folder / TRAINED)[ASKED],
    }
    for temperature in options.temperature or TEMPERATURES:
        if not is_there(measured_path(folder, temperature), asked):
            measure(
                _target(options),
                folder,
                options.prompts,
                temperature,
                asked=asked,
                per_set=options.per_set,
                max_new_tokens=options.new_tokens,
                batch=options.batch,
            )


def _speed(options: argparse.Namespace) -> None:
    named = [name for name in (REFERENCE, choose(options.out)) if name is not None]
    arms = [name for name in named if (options.out / name / TRAINED).is_file()]
    asked = {
        "per_set": options.per_set or SPEED_PROMPTS,
        "max_new_tokens": min(options.new_tokens, SPEED_TOKENS),
        "dtype": options.dtype,
        "arms": arms,
    }
    if not is_timed(options.out, asked):
        measure_speed(
            _target(options),
            options.out,
            options.prompts,
            arms,
            asked=asked,
            per_set=asked["per_set"],
            max_new_tokens=asked["max_new_tokens"],
        )


def _table(options: argparse.Namespace) -> None:
    print(write_table(options.out))


def _all(options: argparse.Namespace) -> None:
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {line}", flush=True)

    common = ["--prompts", str(options.prompts), "--target", options.target]
    common += ["--device", options.device]
    for key in ("answer_tokens", "samples", "generated", "written", "parts"):
        common += [f"--{key.replace('_', '-')}", str(getattr(options, key))]
    training = [part for pair in options.set for part in ("--set", pair)]
    last = options.pass_on.split()
    study = Study(options.out, common, options.budget, say, training, last, options.without)
    ended = study.run(jobs(max(1, len(visible_gpus())), options.seconds, options.candidates))
    _table(options)
    missing = [name for name, done in ended.items() if not done and name not in options.without]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(ended)} jobs are not done ({', '.join(missing)}); their lines "
            "say why, the same command goes on with them"
        )


def _target(options: argparse.Namespace) -> LoadedTarget:
    device = find_device(options.device, "--device")
    return load_target(options.target, dtype=getattr(torch, options.dtype), device=device)


def _overrides(pairs: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign:
            raise UserError(f"--set {pair}: expected key=value")
        found[key] = yaml.safe_load(value)
    return found


STEPS = {
    "answer": _answer,
    "warm": _warm,
    "train": _train,
    "measure": _measure,
    "speed": _speed,
    "table": _table,
    "all": _all,
}


@module_command
def main(arguments: Sequence[str]) -> None:
    """One step of the study, or all of it."""
    parser = Parser(
        prog="python -m dspark_eval.real_text",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("out", type=Path, help="folder of the study")
    parser.add_argument("--prompts", type=Path, default=Path("prompts"), help="train/ and test/")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--device", default="cpu", help="cpu | cuda")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--arm", default=CHOSEN, help="a drafter; chosen: our best candidate")
    parser.add_argument("--seconds", type=float, default=200.0, help="of training")
    parser.add_argument("--beside", nargs="+", default=[], help="train, warm: arms together")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--samples", type=int, default=5, help="answers to each public prompt")
    parser.add_argument("--generated", type=int, default=500, help="problems of the generator")
    parser.add_argument("--written", type=int, default=14000, help="prompts the target may write")
    parser.add_argument("--answer-tokens", type=int, default=192, help="longest answer trained on")
    parser.add_argument("--parts", type=int, default=3, help="files of answers")
    parser.add_argument("--new-tokens", type=int, default=160, help="longest answer measured")
    parser.add_argument("--temperature", type=float, nargs="+", choices=TEMPERATURES)
    parser.add_argument("--answer-batch", type=int, default=5120, help="answered side by side")
    parser.add_argument("--batch", type=int, default=256, help="prompts measured side by side")
    parser.add_argument("--per-set", type=int, help="prompts of each set; all if left out")
    parser.add_argument("--budget", type=float, default=1250.0, help="all: seconds in all")
    parser.add_argument(
        "--candidates", nargs="+", default=TRIED, choices=CANDIDATES, help="all: recipes of ours"
    )
    parser.add_argument("--without", nargs="+", default=[], help="all: jobs to leave out")
    parser.add_argument("--pass-on", default="", help="all: further options of every step")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    STEPS[options.step](options)


if __name__ == "__main__":
    sys.exit(main())
