"""`dspark prune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dspark.commands.app import app
from dspark.commands.distill import parse_settings
from dspark.commands.options import Draft, PrintJson, default_draft, print_json


@app.command(epilog="Example: `dspark prune --draft runs/mine --budget params=50% --out runs/half`")
def prune(
    draft: Draft = None,
    budget: Annotated[
        str | None,
        typer.Option(help="params=0.5M, params=50%, bytes=2M (per draft step) or ms=1.5."),
    ] = None,
    vocab: Annotated[
        int | None, typer.Option(help="Propose only so many of the target's most frequent ids.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of recovery by distillation; 0: none.")] = 300,
    out: Annotated[Path, typer.Option(help="Run folder; becomes the pruned drafter's.")] = Path(
        "runs/pruned"
    ),
    importance: Annotated[
        str, typer.Option(help="taylor or activation: which heads and channels go first.")
    ] = "taylor",
    rows: Annotated[int, typer.Option(help="Training rows that effects are measured on.")] = 48,
    context: Annotated[
        int, typer.Option(help="Tokens of context at which bytes and draft time are counted.")
    ] = 1024,
    target: Annotated[
        str | None, typer.Option(help="The target, if not that of the drafter's own run.")
    ] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option(help="JSONL files, if not those of the drafter's own run.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any key of the recovery run.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the pruning in the run folder.")
    ] = False,
    as_json: PrintJson = False,
) -> None:
    """Cut a trained drafter to a budget, then distil it again."""
    from dspark.distill.prune import run_prune
    from dspark.distill.prune_options import PruneOptions
    from dspark.distill.prune_report import summary

    named: dict[str, Any] = {
        "target.name": target,
        "data.prompts": [str(path) for path in prompts] if prompts else None,
    }
    given = {key: value for key, value in named.items() if value is not None}
    options = PruneOptions(
        draft=draft or default_draft(),
        out=out,
        budget=budget,
        vocab=vocab,
        steps=steps,
        importance=importance,
        rows=rows,
        context=context,
        settings=given | parse_settings(settings),
    )
    report = run_prune(options, resume=resume)
    if as_json:
        print_json(report)
    else:
        typer.echo(summary(report))
