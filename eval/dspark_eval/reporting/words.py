"""Phrases that several sections share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.wording import counted
from dspark_eval.cells import number

LABEL = 32


def short(source: str) -> str:
    """A file by its name and its folder's."""
    return "/".join(Path(source).parts[-2:])


def label(name: str) -> str:
    """A name as a picture's legend has room for it."""
    return name if len(name) <= LABEL else f"{name[: LABEL - 1]}…"


def machine(environment: Mapping[str, Any], *, short: bool = False) -> str:
    """Where it was measured, and with `short` no more than that."""
    text = (
        f"{environment['device_name']}, {counted(environment['threads'], 'thread')}, "
        f"{environment['dtype']}"
    )
    return text if short else f"{text}, torch {environment['torch']}, {environment['date'][:10]}"


def positions_alt(curves: Mapping[str, Mapping[str, Any]]) -> str:
    """Conditional acceptance, read out."""
    return "; ".join(
        f"{name}: " + " ".join(number(chance, 2) for chance in curve["conditional_acceptance"])
        for name, curve in curves.items()
    )
