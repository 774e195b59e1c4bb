"""`dspark distill`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark.commands.app import app
from dspark.commands.options import PrintJson, print_json
from dspark.errors import UserError


@app.command(epilog="Example: `dspark distill --prompts mine.jsonl --out runs/mine --steps 500`")
def distill(
    config: Annotated[
        Path | None, typer.Option(help="YAML file; the options here override it.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="A recipe by name, below the YAML file: deepspec, kda-pruned."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="`nano`, `smollm2`, or a checkpoint's folder.")
    ] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option(help="JSONL files with `prompt`, `turns` or `messages`.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; becomes the drafter's checkpoint.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="End after this many optimiser steps.")] = None,
    init_from: Annotated[
        Path | None, typer.Option(help="Start from the weights of this drafter folder.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Decides every draw of the run.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any other key, as `train.lr=1e-3`.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in the run folder.")
    ] = False,
    as_json: PrintJson = False,
) -> None:
    """Train a drafter for a target (defaults: the shipped target and prompts)."""
    from dspark.distill.config import load_config

    overrides: dict[str, Any] = {
        "target.name": target,
        "data.prompts": [str(path) for path in prompts] if prompts else None,
        "out.dir": None if out is None else str(out),
        "drafter.init_from": None if init_from is None else str(init_from),
        "train.max_steps": steps,
        "train.seed": seed,
    }
    given = {key: value for key, value in overrides.items() if value is not None}
    more = parse_settings(settings)
    for key in given.keys() & more.keys():
        raise UserError(f"{key} is given twice, by an option and by --set; keep one")
    loaded = load_config(config, given | more, preset)
    from dspark.distill.run import run_distill

    folder = run_distill(loaded, resume=resume)
    if as_json:
        from dspark.files import read_json

        print_json({"drafter": str(folder), "last": read_json(folder / "training.json")[-1]})


def parse_settings(settings: Sequence[str] | None) -> dict[str, Any]:
    """Dotted keys and values of `--set` options. Raises UserError for what is none."""
    import yaml

    parsed = {}
    for text in settings or ():
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set {text}: expected section.key=value, such as train.lr=1e-3")
        try:
            parsed[key] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError):  # ValueError: an impossible date
            raise UserError(f"--set {text}: the value is not YAML; quote it") from None
    return parsed
