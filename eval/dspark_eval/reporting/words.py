"""Phrases that several sections share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.wording import counted
from dspark_eval.cells import number
from dspark_eval.intervals import MIN_PROMPTS

LABEL = 32
HOW_SURE = f"Shaded: 95 % over prompts; hollow: fewer than {MIN_PROMPTS} prompts got there."


def name(drafter: str) -> str:
    """A drafter or a target without the folders it lies in."""
    return Path(drafter).name or drafter


def names(drafters: Sequence[str]) -> dict[str, str]:
    """Each with as few of its folders as tell it from the others: `a/run` and `b/run` stay two."""
    parts = {full: Path(full).parts or (full,) for full in drafters}
    short = {}
    for full, own in parts.items():
        others = [other for it, other in parts.items() if it != full]
        enough = (n for n in range(1, len(own)) if all(o[-n:] != own[-n:] for o in others))
        short[full] = str(Path(*own[-next(enough, len(own)) :]))
    return short


def label(text: str) -> str:
    """As much of a name as a picture's legend has room for: its beginning and its end."""
    if len(text) <= LABEL:
        return text
    return f"{text[: LABEL // 2]}…{text[LABEL // 2 + 1 - LABEL :]}"


def labels(texts: Sequence[str]) -> dict[str, str]:
    """`label` of each; where two would look alike, numbered."""
    short = {text: label(text) for text in texts}
    alike = Counter(short.values())
    return {
        text: shown if alike[shown] == 1 else f"{shown} ({number})"
        for number, (text, shown) in enumerate(short.items(), start=1)
    }


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
