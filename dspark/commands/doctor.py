"""`dspark doctor`."""

from __future__ import annotations

import typer

from dspark.commands.app import app
from dspark.commands.options import PrintJson, print_json


@app.command(epilog="Example: `dspark doctor --json`")
def doctor(as_json: PrintJson = False) -> None:
    """Show versions, devices, usable kernel backends and whether the shipped files are intact."""
    from dspark.doctor import examine, render

    report = examine()
    if as_json:
        print_json(report.to_dict())
    else:
        render(report)
    raise typer.Exit(0 if report.ok else 1)
