"""`dspark report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dspark.commands.app import app
from dspark.commands.options import PrintJson, print_json


@app.command(epilog="Example: `dspark report runs/family runs/mine bench.json --out report`")
def report(
    found: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders, studies, or single JSON files."),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for report.html, .json, .md and the pictures.")
    ] = Path("report"),
    as_json: PrintJson = False,
) -> None:
    """Put what other commands measured on one page: tables and plots, from their JSON files."""
    from dspark_eval.reporting import run_report

    written = run_report(found, out)
    if as_json:
        print_json(written)
    else:
        typer.echo(written["report"])
