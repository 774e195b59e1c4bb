"""`python -m dspark_eval.baselines`: train baselines, measure a contender, make the table.

train RUN --kind eagle3 --out DIR     on the rows, steps and seed of a distillation run
measure CONTENDER --out FILE          on held-out prompts, for the table
table OUT                             DSpark, DFlash, EAGLE-3, a causal LM and lookup, by seeds
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dspark.commands.distill import parse_settings
from dspark.console import Parser, module_command
from dspark.distill.determinism import deterministic
from dspark.errors import UserError
from dspark_eval.baselines.folders import KINDS, save_ar, save_dflash, save_eagle
from dspark_eval.baselines.measure import VALIDATION_SETTINGS, measure
from dspark_eval.baselines.plan import ARMS, RATES, SIZES, Plan
from dspark_eval.baselines.rows import RunData, read_run
from dspark_eval.baselines.table import run_table
from dspark_eval.baselines.table_text import markdown
from dspark_eval.study.measure import SETTINGS


@module_command
def main(arguments: Sequence[str]) -> None:
    """Train, measure or compare; a table that was stopped goes on with the same command."""
    parser = Parser(
        prog="python -m dspark_eval.baselines",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _train_options(commands.add_parser("train", help="one baseline, on the rows of a run"))
    _measure_options(commands.add_parser("measure", help="a contender on held-out prompts"))
    _table_options(commands.add_parser("table", help="the ordering of the paper's Table 1"))
    options = parser.parse_args(arguments)
    {"train": _train, "measure": _measure, "table": _table}[options.command](options)


def _train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="folder of a distillation run")
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the baseline")
    parser.add_argument("--device", help="cpu or cuda; else the run's")
    parser.add_argument("--set", nargs="+", default=[], help="a setting of the run, changed")
    parser.add_argument("--any-size", action="store_true", help="do not match the run's parameters")


def _measure_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("contender", help="as of `dspark eval --compare`")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--target", default="nano")
    parser.add_argument("--draft-length", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=60, help="prompts of each set")
    parser.add_argument(
        "--validation", action="store_true", help="on prompts that choices may be made by"
    )


def _table_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, help="folder of all runs; the same one goes on")
    parser.add_argument("--arm", nargs="+", default=list(ARMS), help="only these, and dspark")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--prompts", type=int, default=60, help="prompts of each measurement")
    parser.add_argument("--draft-length", type=int, default=7)
    parser.add_argument(
        "--rates", nargs="+", type=float, default=list(RATES),
        help="learning rates each arm is tried with; one: no search",
    )  # fmt: skip
    parser.add_argument(
        "--sizes", default=SIZES[0],
        help="equal parameters, or own: DFlash with dspark's backbone, the rest as they are",
    )  # fmt: skip
    parser.add_argument("--rate-steps", type=int, default=400, help="steps of a trial")
    parser.add_argument("--rate-prompts", type=int, default=40, help="validation prompts of each")
    parser.add_argument("--target", default="nano")
    parser.add_argument(
        "--device", default="auto", help="where runs train; measuring is on the CPU"
    )
    parser.add_argument("--set", nargs="+", default=[], help="a setting of every arm, key=value")


def _train(options: argparse.Namespace) -> None:
    settings = parse_settings(options.set) or {}
    for key in settings:
        if not key.startswith(("train.", "drafter.")):
            raise UserError(
                f"--set {key}: the run's target and rows are taken as they are; expected train.KEY "
                "or drafter.KEY"
            )
    if options.out.exists() and not options.out.is_dir():
        raise UserError(f"--out {options.out}: expected a folder; this is a file")
    data = read_run(options.run, options.device)
    changed = data.changed(settings)
    data = RunData(changed, data.loaded, data.rows, data.processes)
    with deterministic(changed.train.deterministic):
        train_baseline(data, options.kind, options.out, match=not options.any_size)


def train_baseline(data: RunData, kind: str, out: Path, *, match: bool) -> dict[str, Any]:
    """Train one baseline and write its folder; returns what the folder says of it."""
    from dspark_eval.baselines import training

    goal = data.parameters() if match else None

    def facts(trained: training.Trained, parameters: int) -> dict[str, Any]:
        return {
            "target": data.config.target.name,
            "rows_digest": data.rows.digest,
            "rows": len(data.rows.training),
            "supervised_tokens": sum(row.supervised for row in data.rows.training),
            "steps": trained.steps,
            "seed": data.config.train.seed,
            "lr": data.config.train.lr,
            "seconds": trained.seconds,
            "loss": trained.loss,
            "parameters": parameters,
        }

    if kind == "dflash":
        drafter, trained = training.train_dflash(data, goal)
        said = facts(trained, training.count(drafter) - training.count(drafter.markov_head))
        save_dflash(out, drafter, said)
    elif kind == "eagle3":
        model, trained = training.train_eagle(data, goal)
        said = facts(trained, training.count(model))
        save_eagle(out, model, said)
    else:
        small, trained = training.train_ar(data, goal)
        said = facts(trained, training.count(small))
        save_ar(out, small, data.loaded, said)
    print(
        f"{kind}: {said['parameters']} parameters, {trained.steps} steps, loss {trained.loss:.4f}"
    )
    return said


def _measure(options: argparse.Namespace) -> None:
    if options.out.is_dir() or not options.out.resolve().parent.is_dir():
        raise UserError(f"--out {options.out}: expected a file in a folder that is there")
    torch.set_num_threads(1)
    document = measure(
        options.contender,
        options.out,
        target=options.target,
        draft_length=options.draft_length,
        prompts=options.prompts,
        settings=VALIDATION_SETTINGS if options.validation else SETTINGS,
    )
    for result in document["results"]:
        length = result["accepted_length"]
        print(f"{result['suite']} T={result['temperature']:g}: accepted length {length:.3f}")


def _table(options: argparse.Namespace) -> None:
    plan = Plan(
        out=options.out,
        arms=tuple(options.arm),
        steps=options.steps,
        seeds=options.seeds,
        jobs=options.jobs,
        prompts=options.prompts,
        draft_length=options.draft_length,
        rates=tuple(options.rates),
        rate_steps=options.rate_steps,
        rate_prompts=options.rate_prompts,
        sizes=options.sizes,
        target=options.target,
        device=options.device,
        overrides=parse_settings(options.set),
    )
    print(markdown(run_table(plan, lambda line: print(line, file=sys.stderr, flush=True))))


if __name__ == "__main__":
    sys.exit(main())
