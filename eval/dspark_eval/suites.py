"""Prompt sets by name, or from any JSONL file.

The shipped held-out prompts of the nano target come as two sets, since how predictable a text is
decides how much of a draft is accepted: word problems with a worked solution (rows with an
`answer`) and plain instructions (rows without).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dspark.assets import asset
from dspark.distill.prompts import PromptRow, read_prompts
from dspark.errors import UserError

_NANO_FILE = "prompts/test.jsonl"


def _is_problem(row: PromptRow) -> bool:
    return "answer" in row.metadata


def _is_instruction(row: PromptRow) -> bool:
    return not _is_problem(row)


_NANO_SETS: dict[str, Callable[[PromptRow], bool]] = {
    "nano-problems": _is_problem,
    "nano-instructions": _is_instruction,
}
SUITE_NAMES = ("nano", *_NANO_SETS)


@dataclass(frozen=True)
class Suite:
    """Prompts that are reported together, and how many rows they were drawn from."""

    name: str
    rows: tuple[PromptRow, ...]
    available: int


def load_suites(name: str | Path, *, n_prompts: int, seed: int) -> list[Suite]:
    """The sets behind a suite name ("nano" is two) or the one in a JSONL file.

    At most `n_prompts` rows of each, drawn without replacement by `seed`: files tend to be sorted
    by topic, so the first rows of one are no sample of it.

    Raises `UserError` for a name that is neither, and for what `read_prompts` refuses.
    """
    if str(name) in SUITE_NAMES:
        rows = read_prompts([asset(_NANO_FILE)], strict=True).rows
        wanted = _NANO_SETS if name == "nano" else {str(name): _NANO_SETS[str(name)]}
        sets = {label: tuple(filter(keep, rows)) for label, keep in wanted.items()}
    else:
        path = Path(name)
        if not path.is_file():
            raise UserError(
                f"{name}: neither a suite ({', '.join(SUITE_NAMES)}) nor a JSONL file with "
                "`prompt`, `turns` or `messages` in each line"
            )
        sets = {path.stem: read_prompts([path], strict=False).rows}
    return [
        Suite(label, draw_rows(rows, n_prompts, seed), len(rows)) for label, rows in sets.items()
    ]


def draw_rows(rows: tuple[PromptRow, ...], count: int, seed: int) -> tuple[PromptRow, ...]:
    """`count` rows in an order that `seed` decides; all of them if there are no more."""
    return tuple(random.Random(seed).sample(rows, min(count, len(rows))))
