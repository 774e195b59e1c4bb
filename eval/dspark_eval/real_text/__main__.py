"""The study on real text, step by step; every step may be run again and goes on where it stopped.

    python -m dspark_eval.real_text answer  OUT --prompts DIR    the target answers training prompts
    python -m dspark_eval.real_text train   OUT --prompts DIR --arm best --seconds 200
    python -m dspark_eval.real_text measure OUT --prompts DIR --arm best
    python -m dspark_eval.real_text speed   OUT --prompts DIR    one prompt at a time, all ways
    python -m dspark_eval.real_text table   OUT                  the table, from what is there
    python -m dspark_eval.real_text all     OUT --prompts DIR --device cuda --budget 960

DIR holds `train/*.jsonl` and `test/*.jsonl` (`turns` in each line). No test prompt, nor a near copy
of one, is trained on: `prompts.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
import typer
import yaml

from dspark.devices import find_device
from dspark.errors import UserError
from dspark.files import read_json
from dspark.runtime.loading import LoadedTarget, load_target
from dspark_eval.real_text.answers import answer, read_rows
from dspark_eval.real_text.arms import BEST, FROM_TARGET, arm_config, find_arm
from dspark_eval.real_text.measuring import MEASURED, measure
from dspark_eval.real_text.schedule import Study, jobs
from dspark_eval.real_text.speed import SPEED, measure_speed
from dspark_eval.real_text.table import write_table
from dspark_eval.real_text.training import TRAINED, train_for
from dspark_eval.study.processes import visible_gpus


def _answer(options: argparse.Namespace) -> None:
    if options.shards < 1 or not 0 <= options.shard < options.shards:
        raise UserError(f"--shard {options.shard}: expected 0..{options.shards - 1} of --shards")
    if options.samples < 0 or options.generated < 0 or not options.samples + options.generated:
        raise UserError("--samples, --generated: expected 0 or more, and not 0 both")
    path = options.out / f"rows.{options.shard}.json"
    asked = {
        "max_new_tokens": options.new_tokens,
        "samples": options.samples,
        "generated": options.generated,
    }
    if path.is_file():
        if (known := read_json(path)["settings"]) != asked:
            raise UserError(f"{path}: answered with {known}, not {asked}; choose another folder")
    else:
        report = answer(
            _target(options),
            options.prompts,
            options.out,
            samples=options.samples,
            generated=options.generated,
            max_new_tokens=options.new_tokens,
            batch=options.batch,
            shard=options.shard,
            shards=options.shards,
        )
        print(f"{report['rows']} rows in {report['seconds']:.1f} s")


def _train(options: argparse.Namespace) -> None:
    arm, folder = find_arm(options.arm), options.out / options.arm
    if (folder / TRAINED).is_file():
        return
    loaded = _target(options)
    rows, held_out = read_rows(options.out, options.prompts)
    config = arm_config(arm, loaded, _overrides(options.set))
    train_for(
        loaded,
        rows,
        held_out,
        config,
        options.seconds,
        folder,
        from_target=arm.name in FROM_TARGET,
        beside=[options.out / find_arm(name).name for name in options.beside],
    )


def _measure(options: argparse.Namespace) -> None:
    find_arm(options.arm)
    folder = options.out / options.arm
    if not (folder / MEASURED).is_file():
        measure(
            _target(options),
            folder,
            options.prompts,
            per_set=options.per_set,
            max_new_tokens=options.new_tokens,
            batch=options.batch,
        )


def _speed(options: argparse.Namespace) -> None:
    if not (options.out / SPEED).is_file():
        measure_speed(
            _target(options),
            options.out,
            options.prompts,
            per_set=options.per_set or 1,
            max_new_tokens=min(options.new_tokens, 96),
        )


def _table(options: argparse.Namespace) -> None:
    print(write_table(options.out))


def _all(options: argparse.Namespace) -> None:
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {line}", flush=True)

    common = ["--prompts", str(options.prompts), "--target", options.target]
    common += ["--device", options.device]
    training = [part for pair in options.set for part in ("--set", pair)]
    study = Study(options.out, common, options.budget, say, training, options.pass_on.split())
    ended = study.run(jobs(max(1, len(visible_gpus())), options.seconds))
    _table(options)
    missing = [name for name, done in ended.items() if not done]
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
    "train": _train,
    "measure": _measure,
    "speed": _speed,
    "table": _table,
    "all": _all,
}


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
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
    parser.add_argument("--arm", default=BEST)
    parser.add_argument("--seconds", type=float, default=200.0, help="of training")
    parser.add_argument("--beside", nargs="+", default=[], help="train: arms to start with")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--samples", type=int, default=12, help="answers to each public prompt")
    parser.add_argument("--generated", type=int, default=1800, help="problems of the generator")
    parser.add_argument("--new-tokens", type=int, default=160, help="longest answer")
    parser.add_argument("--batch", type=int, default=220, help="prompts side by side")
    parser.add_argument("--per-set", type=int, help="prompts of each set; all if left out")
    parser.add_argument("--shard", type=int, default=0, help="which share of the prompts to answer")
    parser.add_argument("--shards", type=int, default=1, help="shares there are")
    parser.add_argument("--budget", type=float, default=960.0, help="all: seconds in all")
    parser.add_argument("--pass-on", default="", help="all: further options of every step")
    options = parser.parse_args(arguments)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        STEPS[options.step](options)
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
