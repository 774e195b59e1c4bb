"""The study on real text, step by step; every step may be run again and goes on where it stopped.

    python -m dspark_eval.real_text answer  OUT --prompts DIR    prompts are written and answered
    python -m dspark_eval.real_text warm    OUT --prompts DIR    kernels are compiled beforehand
    python -m dspark_eval.real_text train   OUT --prompts DIR --arm deep --seconds 200
    python -m dspark_eval.real_text measure OUT --prompts DIR --arm deep
    python -m dspark_eval.real_text speed   OUT --prompts DIR    one prompt at a time, all ways,
                                                                 of one --arm or several
    python -m dspark_eval.real_text table   OUT                  the table, from what is there
    python -m dspark_eval.real_text all     OUT --prompts DIR --device cuda --budget 1250
    python -m dspark_eval.real_text repeat  OUT --prompts DIR --device cuda --seeds 1 2 --arm early

`repeat` is the comparison from other seeds, and ten minutes of both recipes beside it.

DIR holds `train/*.jsonl` and `test/*.jsonl` (`turns` in each line). No test prompt, nor a near copy
of one, is trained on: `prompts.py`.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from dspark.console import Parser, module_command
from dspark.devices import find_device
from dspark.errors import UserError
from dspark.files import read_json
from dspark.runtime.loading import LoadedTarget, load_target
from dspark.seeds import seed_argument
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
    overrides,
)
from dspark_eval.real_text.chosen import choose, real_name, timed_arms
from dspark_eval.real_text.measuring import TEMPERATURES, measure, measured_path
from dspark_eval.real_text.repeats import repeats
from dspark_eval.real_text.reuse import ASKED, is_there
from dspark_eval.real_text.runs import find_run, waits_for
from dspark_eval.real_text.schedule import LONGEST, Job, Study, jobs
from dspark_eval.real_text.speed import is_timed, measure_speed
from dspark_eval.real_text.states import StatesOnce
from dspark_eval.real_text.table import write_table
from dspark_eval.real_text.training import TRAINED, train_for, warm
from dspark_eval.study.processes import visible_gpus

SPEED_PROMPTS, SPEED_TOKENS = 2, 64
"""Prompts of each set, and the longest answer, that speed is measured with if nothing is said."""
MEASURED_TOKENS = 160
"""The longest answer of everything else that is measured."""


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
    runs = [find_run(name) for name in options.beside or (REFERENCE, *TRIED)]
    coming = {run.arm: run for run in runs if not (options.out / run.name / TRAINED).is_file()}
    if coming:
        loaded, more = _target(options), overrides(options.set)
        warm(loaded, [arm_config(find_arm(name), loaded, more) for name in coming])


def _train(options: argparse.Namespace) -> None:
    named, chosen = find_run(options.arm), choose(options.out)
    arm, more = named.recipe, overrides(options.set)
    runs = [replace(named, seed=seed) for seed in options.seeds or [named.seed]]
    asked = {
        run: {
            "seconds": options.seconds,
            "settings": {**like(arm, chosen).settings, **run.settings, **more},
            "answers": asdict(_asked(options)),
        }
        for run in runs
    }
    coming = [run for run in runs if not is_there(options.out / run.name / TRAINED, asked[run])]
    if not coming:
        return
    loaded = _target(options)
    rows, held_out = read_rows(options.out, options.prompts)
    held = StatesOnce(loaded.target, rows)
    for run in coming:
        gc.collect()  # what the last one trained with goes before the next one comes
        train_for(
            loaded,
            held,
            held_out,
            arm_config(arm, loaded, {**run.settings, **more}, chosen),
            options.seconds,
            options.out / run.name,
            asked=asked[run],
            from_target=(chosen if arm.name in LIKE_CHOSEN else arm.name) in FROM_TARGET,
            beside=[
                options.out / other.name for other in waits_for(run, options.beside, runs[0].seed)
            ],
        )


def _measure(options: argparse.Namespace) -> None:
    name = find_run(real_name(options.out, options.arm)).name
    folder = options.out / name
    if not (folder / TRAINED).is_file():
        raise UserError(f"{folder}: not trained yet; run the step train with --arm {name}")
    asked = {
        "per_set": options.per_set,
        "max_new_tokens": options.new_tokens or MEASURED_TOKENS,
        "dtype": options.dtype,
        "trained": read_json(folder / TRAINED)[ASKED],
    }
    coming = [
        temperature
        for temperature in options.temperature or TEMPERATURES
        if not is_there(measured_path(folder, temperature), asked)
    ]
    loaded = _target(options) if coming else None
    for temperature in coming:
        assert loaded is not None
        measure(
            loaded,
            folder,
            options.prompts,
            temperature,
            asked=asked,
            per_set=options.per_set,
            max_new_tokens=asked["max_new_tokens"],
            batch=options.batch,
        )


def _speed(options: argparse.Namespace) -> None:
    arms = timed_arms(options.out, options.arm)
    asked = {
        "per_set": options.per_set or SPEED_PROMPTS,
        "slow_per_set": options.slow_per_set,
        "max_new_tokens": options.new_tokens or SPEED_TOKENS,
        "dtype": options.dtype,
        "arms": arms,
        "frames": True,
        "loops": not options.without_loops,
    }
    if not is_timed(options.out, asked):
        measure_speed(
            _target(options),
            options.out,
            options.prompts,
            arms,
            asked=asked,
            per_set=asked["per_set"],
            slow_per_set=options.slow_per_set,
            loops=not options.without_loops,
            arguments=options.arguments,
            max_new_tokens=asked["max_new_tokens"],
        )


def _table(options: argparse.Namespace) -> None:
    print(write_table(options.out, options.add))


def _all(options: argparse.Namespace) -> None:
    gpus = max(1, len(visible_gpus()))
    _play(options, jobs(gpus, options.seconds, options.candidates))


def _repeat(options: argparse.Namespace) -> None:
    named = find_run(options.arm if options.arm != CHOSEN else TRIED[0])
    _play(options, repeats(named.arm, options.seeds or [1, 2], options.seconds, options.memory))


def _play(options: argparse.Namespace, lanes: list[list[Job]]) -> None:
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {line}", flush=True)

    common = ["--prompts", str(options.prompts), "--target", options.target]
    common += ["--device", options.device]
    for key in ("answer_tokens", "samples", "generated", "written", "parts"):
        common += [f"--{key.replace('_', '-')}", str(getattr(options, key))]
    training = [part for pair in options.set for part in ("--set", pair)]
    last = options.pass_on.split()
    shared = (common, options.budget, say, training, last, options.without, options.long_seconds)
    study = Study(options.out, *shared)
    ended = study.run(lanes)
    _table(options)
    missing = [name for name, done in ended.items() if not done and name not in options.without]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(ended)} jobs are not done ({', '.join(missing)}); their lines "
            "say why, the same command goes on with them"
        )


def _target(options: argparse.Namespace) -> LoadedTarget:
    device = find_device(options.device, "--device")
    if device.type == "cuda" and options.memory:
        index = device.index or 0
        there = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.memory * 1e9 / there), index)
    return load_target(options.target, dtype=getattr(torch, options.dtype), device=device)


STEPS = {
    "answer": _answer,
    "warm": _warm,
    "train": _train,
    "measure": _measure,
    "speed": _speed,
    "table": _table,
    "all": _all,
    "repeat": _repeat,
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
    parser.add_argument("--arm", nargs="+", default=[CHOSEN],
                        help="a drafter, speed: several; chosen: our best candidate")  # fmt: skip
    parser.add_argument("--seeds", type=seed_argument, nargs="+", help="train, repeat: in turn")
    parser.add_argument("--seconds", type=float, default=200.0, help="of training")
    parser.add_argument("--long-seconds", type=float, default=LONGEST, help="of long training")
    parser.add_argument("--beside", nargs="+", default=[], help="train, warm: arms together")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--samples", type=int, default=5, help="answers to each public prompt")
    parser.add_argument("--generated", type=int, default=500, help="problems of the generator")
    parser.add_argument("--written", type=int, default=14000, help="prompts the target may write")
    parser.add_argument("--answer-tokens", type=int, default=192, help="longest answer trained on")
    parser.add_argument("--parts", type=int, default=3, help="files of answers")
    parser.add_argument(
        "--new-tokens", type=int, help="longest answer: 160 if left out, 64 where speed is measured"
    )
    parser.add_argument("--temperature", type=float, nargs="+", choices=TEMPERATURES)
    parser.add_argument("--answer-batch", type=int, default=5120, help="answered side by side")
    parser.add_argument("--batch", type=int, default=256, help="prompts measured side by side")
    parser.add_argument("--memory", type=float, help="GB of the GPU that a process may take")
    parser.add_argument("--per-set", type=int, help="prompts of each set; else all, 2 for speed")
    parser.add_argument(
        "--slow-per-set", type=int, help="speed: those of all ways but recorded frames; 0: none"
    )
    parser.add_argument("--without-loops", action="store_true", help="speed: drafters in frames")
    parser.add_argument("--budget", type=float, default=1250.0, help="all: seconds in all")
    parser.add_argument(
        "--candidates", nargs="+", default=TRIED, choices=CANDIDATES, help="all: recipes of ours"
    )
    parser.add_argument("--without", nargs="+", default=[], help="all: jobs to leave out")
    parser.add_argument("--add", type=Path, help="table: results of an earlier study of its arms")
    parser.add_argument("--pass-on", default="", help="all: further options of every step")
    options = parser.parse_args(arguments)
    options.arguments = arguments
    if options.step != "speed":
        if len(options.arm) > 1:
            raise UserError(f"--arm: {options.step} takes one drafter; got {len(options.arm)}")
        options.arm = options.arm[0]
    if options.step != "table":  # which reads alone, and may refuse
        options.out.mkdir(parents=True, exist_ok=True)
    STEPS[options.step](options)


if __name__ == "__main__":
    sys.exit(main())
