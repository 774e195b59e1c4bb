"""`dspark inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.commands.app import app
from dspark.commands.options import PrintJson, default_draft, print_json
from dspark.errors import UserError

if TYPE_CHECKING:
    from dspark.inspection import Inspection


@app.command(epilog="Example: `dspark inspect Kimi-K3-DSpark --acceptance eval.json --target K3`")
def inspect(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Drafter folder of any layout, or one with a config.json alone; without it, "
            "where `dspark distill` writes."
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="`nano` or the folder of a target: what its steps cost, in bytes."),
    ] = None,
    cost_table: Annotated[
        Path | None,
        typer.Option(help="Measured step times: from `dspark bench --profile` or `bench --json`."),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of context to count bytes at, beside 4k, 128k and 1M."),
    ] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(
            help="eval.json, training.json, ..., or 0.9,0.8,0.7; without it, what the folder says."
        ),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(help="GB/s of the memory, to make seconds of bytes (with --target)."),
    ] = None,
    as_json: PrintJson = False,
) -> None:
    """Show what a drafter is, the bytes of a draft step, and the speed-up they predict."""
    from dspark.inspection import inspect_drafter
    from dspark.inspection_inputs import acceptance_beside, read_acceptance, read_cost_table

    for length in context or ():
        if length < 1:
            raise UserError(f"--context {length}: expected 1 token or more")
    if bandwidth is not None and not 0 < bandwidth < float("inf"):
        raise UserError(f"--bandwidth {bandwidth}: expected GB/s above 0")
    if bandwidth is not None and (target is None or cost_table is not None):
        raise UserError(
            "--bandwidth: makes seconds of bytes; give --target with it and no --cost-table"
        )
    where = folder or default_draft()
    found = inspect_drafter(
        where,
        contexts=tuple(context or ()),
        target=target,
        acceptance=read_acceptance(acceptance) if acceptance else acceptance_beside(where),
        times=None if cost_table is None else read_cost_table(cost_table),
        bandwidth=None if bandwidth is None else bandwidth * 1e9,
    )
    if as_json:
        print_json(found.to_dict())
    else:
        _render(found)


def _render(found: Inspection) -> None:
    title = f"{found.folder}: layout {found.layout}"
    typer.echo(title + (f", {found.recognised}" if found.recognised else ""))
    for key, value in found.config.items():
        unknown = "not in the file" if key in found.undecided else value
        if unknown is not None:
            typer.echo(f"  {key:<24} {_words(unknown)}")
    typer.echo(f"parameters {found.parameters:,}")
    for group in found.groups:
        shape = " x ".join(map(str, group.shape))
        times = f"{group.count} of " if group.count > 1 else ""
        typer.echo(f"  {group.name:<48} {times}[{shape}]")
    typer.echo(f"bytes of a draft step, {found.dtype}")
    for name, size in found.step.items():
        typer.echo(f"  {name:<24} {_size(size)}")
    typer.echo(f"  {'context, each token':<24} {found.context_per_token:,} B")
    for length, size in found.context.items():
        typer.echo(f"  {f'context of {length:,}':<24} {_size(size)}")
    if found.target_step is not None:
        typer.echo(f"bytes of a plain step of the target, {found.dtype}")
        for name, part in found.target_step.items():
            typer.echo(f"  {name:<24} {_size(part)}")
    for text in found.calibration:
        typer.echo(f"calibrated for {text}")
    _render_predictions(found)


def _render_predictions(found: Inspection) -> None:
    from dspark.draft.speedup import best

    if not found.acceptance:
        typer.echo("no acceptance known: no speed-up predicted (--acceptance)")
        return
    for name, chances in found.acceptance.items():
        typer.echo(f"acceptance, {name}: {' '.join(f'{chance:.3f}' for chance in chances)}")
        predictions = found.predictions.get(name, [])
        if not predictions:
            typer.echo("  no step times known: no speed-up predicted (--cost-table or --target)")
            continue
        top = best(predictions)
        typer.echo(f"  predicted from {found.times_from}:")
        for entry in predictions:
            rate = f", {entry.tokens_per_s:,.1f} tokens/s" if entry.tokens_per_s else ""
            mark = "  <- best" if entry is top else ""
            typer.echo(
                f"  draft length {entry.draft_length}: {entry.accepted_length:.2f} tokens a "
                f"round, speed-up {entry.speed_up:.2f}{rate}{mark}"
            )


def _words(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {part}" for key, part in value.items() if part is not None)
    return str(value)


def _size(size: float) -> str:
    """Bytes in the unit that leaves three digits or so."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:,.3f} {unit}"
    return f"{size:,.0f} B"
