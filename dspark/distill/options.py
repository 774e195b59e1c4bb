"""Options of a run's settings: dataclass fields with a description, and checks of their values."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any

from dspark.errors import UserError


def option(default: Any, doc: str) -> Any:
    """A dataclass field that carries its one-line description into `run.yaml`."""
    return field(default=default, metadata={"doc": doc})


def check(condition: bool, what: str) -> None:
    """UserError that says `what` unless `condition` holds."""
    if not condition:
        raise UserError(what)


def check_at_least(section: str, settings: object, low: float, *names: str) -> None:
    """UserError for the first of `names` that is not finite or below `low`; None passes."""
    for name in names:
        value = getattr(settings, name)
        if value is not None:
            check(
                math.isfinite(value) and value >= low,
                f"{section}.{name} is {value}: expected at least {low}",
            )
