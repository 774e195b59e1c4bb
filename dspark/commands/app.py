"""The typer application that every command registers with."""

from __future__ import annotations

from typing import Annotated

import typer

from dspark import __version__

app = typer.Typer(
    name="dspark",
    help="Distil, run and measure DSpark drafters: lossless speculative decoding at batch 1.",
    epilog="Start here: `dspark distill`, then `dspark bench --batch 1`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dspark {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass
