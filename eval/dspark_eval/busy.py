"""Said before a measurement starts: that others use the machine, so that it can be stopped."""

from __future__ import annotations

import torch
import typer

from dspark_eval.environment import busy_warnings, describe_environment


def say_if_busy() -> None:
    """A line on stderr if the load is above the cores, as the report page says of the environment.

    Before anything of ours is measured: at the end the load is partly our own. Shown with
    `--json` too, whose stdout stays JSON.
    """
    for text in busy_warnings(describe_environment(torch.device("cpu"), torch.float32)):
        typer.echo(f"warning: {text}", err=True)
