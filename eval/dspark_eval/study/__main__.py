"""`python -m dspark_eval.study NAME --out DIR`: run a study or go on with one, print its table.

python -m dspark_eval.study family --out runs/family --steps 1200 --seeds 3
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import typer
import yaml

from dspark.distill.config import load_config
from dspark.errors import UserError
from dspark_eval.study.arms import STUDIES, find_study
from dspark_eval.study.runs import Plan, default_device, run_study
from dspark_eval.study.table import build_table, markdown


def main(arguments: list[str]) -> int:
    """Parse, run, print; 2 and one line for a wrong input."""
    parser = argparse.ArgumentParser(prog="python -m dspark_eval.study", description=__doc__)
    parser.add_argument("study", help=f"one of {', '.join(STUDIES)}")
    parser.add_argument("--out", type=Path, required=True, help="folder of all runs")
    parser.add_argument("--arm", nargs="*", default=[], help="only these arms and the reference")
    parser.add_argument("--steps", type=int, default=1200, help="optimiser steps of every run")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of every arm")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--prompts", type=int, default=60, help="prompts of each measurement")
    parser.add_argument("--draft-length", type=int, default=7, help="proposals per round")
    parser.add_argument("--target", default="nano", help="target of all runs")
    parser.add_argument("--device", default=default_device(), help="where runs train")
    parser.add_argument("--set", nargs="*", default=[], help="settings of every arm, a.b=c")
    parser.add_argument("--contexts", type=int, nargs="*", default=[], help="time drafts there")
    parser.add_argument(
        "--equal-seconds", action="store_true", help="each arm trains as long as the first one"
    )
    options = parser.parse_args(arguments)
    try:
        plan = Plan(
            study=find_study(options.study).only(tuple(options.arm)),
            out=options.out,
            steps=options.steps,
            seeds=tuple(range(options.seeds)),
            jobs=options.jobs,
            prompts=options.prompts,
            draft_length=options.draft_length,
            target=options.target,
            device=options.device,
            overrides=_overrides(options.set),
            contexts=tuple(options.contexts),
            equal_seconds=options.equal_seconds,
        )
        run_study(plan, lambda line: typer.echo(line, err=True))
        typer.echo(markdown(build_table(plan.out)))
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        return 2
    return 0


def _overrides(pairs: list[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for text in pairs:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set {text}: expected section.key=value, such as train.lr=1e-3")
        found[key] = yaml.safe_load(value)
    load_config(None, found)  # unknown keys and bad values are refused before anything runs
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
