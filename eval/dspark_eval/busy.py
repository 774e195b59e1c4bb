"""Said before a measurement starts: that others use the machine, so that it can be stopped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import typer

from dspark_eval.environment import busy_warnings, describe_environment


def say_if_busy() -> None:
    """A line on stderr if the load is above the cores, as the report page says of the environment.

    Before anything of ours is measured: at the end the load is partly our own. Shown with
    `--json` too, whose stdout stays JSON.
    """
    facts = describe_environment(torch.device("cpu"), torch.float32)
    say_warnings({"warnings": busy_warnings(facts)})


def say_warnings(document: Mapping[str, Any]) -> None:
    """Those of a document that begins with `environment.heading`, on stderr."""
    for text in document["warnings"]:
        typer.echo(f"warning: {text}", err=True)
