"""Why a file is not shown, in words for whoever has it: where, what is wrong, what to do.

A number must not be missing from a page without a word, so a damaged file is refused whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dspark.errors import UserError

ADVICE = "measure again, or leave it out"
_OTHERWISE = (
    LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError,
    StopIteration,
)  # fmt: skip
_SORTS = {
    str: "a text", bool: "true or false", int: "a number", float: "a number", list: "a list",
    dict: "an object", type(None): "null",
}  # fmt: skip


class Unreadable(ValueError):
    """Of a value that is not as its kind is written; the text is for whoever reads the refusal."""


@contextmanager
def as_written(path: Path | str) -> Iterator[None]:
    """Inside, whatever a file's value lacks or has of another sort is a UserError naming it."""
    try:
        yield
    except _OTHERWISE as problem:
        raise UserError(
            f"{path}: not as this version of dspark writes it: {_in_words(problem)}; {ADVICE}"
        ) from None


def _in_words(problem: Exception) -> str:
    """What is missing or unexpected, as far as the exception knows."""
    if isinstance(problem, Unreadable):
        return str(problem)
    if isinstance(problem, KeyError):
        return f"`{problem.args[0]}` is missing, or a name that is not known here"
    if isinstance(problem, IndexError):
        return "a list in it is shorter than expected"
    if isinstance(problem, AttributeError):
        sort = _SORTS.get(type(problem.obj), "a value")
        return f"{sort} stands in it where an object or a list was expected"
    if isinstance(problem, StopIteration) or isinstance(problem.__cause__, StopIteration):
        return "a list or an object in it is empty"
    if isinstance(problem, ArithmeticError):
        return "a number in it is out of range"
    return "a value in it is of another sort than expected"


def check_contents(path: Path | str, value: Any) -> None:
    """Refuse what JSON has no word for, and a measurement of no prompt set."""
    place = next(_not_finite(value, ""), None)
    if place is not None:
        raise UserError(
            f"{path}: {place[0]} is {place[1]}, and no measurement writes that (what was not "
            f"measured is null); {ADVICE}"
        )
    if isinstance(value, Mapping) and value.get("suites") in ({}, []):
        raise UserError(f"{path}: `suites` is empty, so nothing was measured; {ADVICE}")


def _not_finite(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Where NaN or an infinity stands, and which."""
    if isinstance(value, float) and not math.isfinite(value):
        spelled = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        yield place.removeprefix(".") or "its value", spelled
    elif isinstance(value, Mapping):
        for key, own in value.items():
            yield from _not_finite(own, f"{place}.{key}")
    elif isinstance(value, list):
        for index, own in enumerate(value):
            yield from _not_finite(own, f"{place}[{index}]")


def check_schema(path: Path | str, value: Any, newest: int, *, versioned: bool) -> None:
    """Refuse a file of a newer schema, whose words may mean something else, and one that does not
    say its schema though every dspark writes it there (`versioned`)."""
    version = value.get("schema_version") if isinstance(value, Mapping) else None
    if version is None and not versioned:
        return
    if version is None:
        raise UserError(
            f"{path}: has no `schema_version`, so nobody can say what its numbers mean; {ADVICE}"
        )
    if type(version) is not int or version < 1:
        raise UserError(
            f"{path}: schema_version is {version!r}, expected a whole number from 1 on; {ADVICE}"
        )
    if version > newest:
        raise UserError(
            f"{path}: schema_version {version}, this dspark reads up to {newest}; update dspark, "
            "or leave the file out"
        )
