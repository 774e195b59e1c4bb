"""`dspark export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dspark.commands.app import app
from dspark.commands.options import Draft, PrintJson, default_draft, print_json


@app.command(epilog="Example: `dspark export --draft runs/mine --format sglang --out for-sglang`")
def export(
    layout: Annotated[
        str,
        typer.Option("--format", help="deepspec|speculators|sglang|vllm|modelopt|k3-mla."),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist yet.")],
    draft: Draft = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="The drafter's target (`nano` or a folder), for layouts that store its tables "
            "(deepspec, and a reduced vocabulary anywhere) or say where it is (speculators)."
        ),
    ] = None,
    as_json: PrintJson = False,
) -> None:
    """Write a drafter for another tool, or say why its engines could not run it."""
    from dspark.commands.exchange import describe, print_fields, target_at_hand
    from dspark.interop.exporting import export_drafter
    from dspark.interop.formats import format_named
    from dspark.interop.importing import require_new

    require_new(out)
    format_named(layout)
    folder = draft or default_draft()
    facts, copies = target_at_hand(target)
    verifier = None if facts is None else facts.folder
    done = export_drafter(folder, out, layout=layout, target_copies=copies, verifier=verifier)
    if as_json:
        print_json(
            {
                "format": done.format.name,
                "engines": done.format.engines,
                "copies": list(done.copies),
                "verifier": done.verifier,
                "left_out": list(done.left_out),
            }
        )
        return
    fields = [("format", done.format.title), ("read by", done.format.engines)]
    fields += describe(done.config)
    if done.copies:
        fields.append(("copied along", ", ".join(done.copies)))
    if done.format.name == "speculators":
        fields.append(("verifier", done.verifier or "none named: give --target"))
    if done.left_out:
        fields.append(("left out", f"{', '.join(done.left_out)} (keys of the layout it came from)"))
    print_fields(f"{folder} -> {out}", fields)
