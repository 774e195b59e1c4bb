"""Phrases that several sections share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.wording import counted
from dspark_eval.cells import number

LABEL = 32


def name(drafter: str) -> str:
    """A drafter or a target without the folders it lies in."""
    return Path(drafter).name or drafter


def label(text: str) -> str:
    """As much of a name as a picture's legend has room for."""
    return text if len(text) <= LABEL else f"{text[: LABEL - 1]}…"


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
        f"{key}: " + " ".join(number(chance, 2) for chance in curve["conditional_acceptance"])
        for key, curve in curves.items()
    )
