"""`dspark study`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dspark.commands.app import app
from dspark.commands.distill import parse_settings
from dspark.commands.options import PrintJson, Target, print_json

MOST_SEEDS = 1000
"""Runs of an arm; who asks for more meant a seed."""


@app.command(epilog="Example: `dspark study family --out runs/family --arm kda-0 mla --seeds 3`")
def study(
    name: Annotated[str, typer.Argument(help="Which study: family, recipe, moments.")],
    out: Annotated[Path, typer.Option(help="Folder of all runs; the same one goes on.")],
    arm: Annotated[
        list[str] | None, typer.Option(help="Only these arms and the reference.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimiser steps of every run.")] = 1200,
    seeds: Annotated[int, typer.Option(help="Runs of every arm, with seeds from 0.")] = 3,
    jobs: Annotated[int, typer.Option(help="Runs at a time.")] = 2,
    prompts: Annotated[int, typer.Option(help="Prompts of each measurement.")] = 60,
    draft_length: Annotated[int, typer.Option(help="Proposals per round when measuring.")] = 7,
    target: Target = "nano",
    device: Annotated[str, typer.Option(help="Where runs train: auto, cpu or cuda.")] = "auto",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of every arm, as `train.lr=1e-3`."),
    ] = None,
    contexts: Annotated[
        list[int] | None, typer.Option(help="Time a draft after contexts of so many tokens.")
    ] = None,
    equal_seconds: Annotated[
        bool,
        typer.Option("--equal-seconds", help="Every arm trains as long as the reference."),
    ] = False,
    long: Annotated[
        int, typer.Option(help="Also ask so many prompts behind contexts of up to 16k tokens.")
    ] = 0,
    as_json: PrintJson = False,
) -> None:
    """Compare drafters: short runs that differ in one thing, at equal rows and parameters."""
    from dspark_eval.study.arms import find_study
    from dspark_eval.study.plan import Plan

    if not 1 <= seeds <= MOST_SEEDS:
        raise typer.BadParameter(f"{seeds}: expected 1 to {MOST_SEEDS}", param_hint="--seeds")
    plan = Plan(
        study=find_study(name).only(tuple(arm or ())),
        out=out,
        steps=steps,
        seeds=tuple(range(seeds)),
        jobs=jobs,
        prompts=prompts,
        draft_length=draft_length,
        target=target,
        device=device,
        overrides=parse_settings(settings),
        contexts=tuple(contexts or ()),
        equal_seconds=equal_seconds,
        long=long,
    )
    from dspark_eval.study.markdown import markdown
    from dspark_eval.study.runs import run_study
    from dspark_eval.study.table import build_table

    run_study(plan, lambda line: typer.echo(line, err=True))
    table = build_table(out)
    if as_json:
        print_json(table)
    else:
        typer.echo(markdown(table))
