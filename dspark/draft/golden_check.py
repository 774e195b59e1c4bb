"""Does a drafter still compute, and still mean, what it did when its folder was written?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dspark.draft.folder import CONFIG_FILE
from dspark.draft.golden import POSITIONS, chosen_ids, first_difference, read_golden
from dspark.draft.golden_file import GOLDEN_FILE, Golden, changed_meaning, meaning, read_golden_file
from dspark.draft.model import DSparkDrafter
from dspark.errors import UserError

QUICK = (1, 100)
"""Positions that are replayed before every measurement: together less than one prompt."""


def check_meaning(golden: Golden, drafter: DSparkDrafter) -> list[str]:
    """A sentence for every key of the configuration that is not what it was."""
    return [
        f"{CONFIG_FILE}: {change}"
        for change in changed_meaning(golden.meaning, meaning(drafter.config))
    ]


def check_readings(
    golden: Golden, drafter: DSparkDrafter, positions: Sequence[int] = POSITIONS
) -> list[str]:
    """A sentence for the first number that the drafter computes otherwise; empty: none."""
    if chosen_ids(drafter) != golden.ids:
        return [
            f"{GOLDEN_FILE}: holds logits of ids {list(golden.ids)[:3]}..., the drafter's "
            "vocabulary has others in their place: its map is not the one it was written with"
        ]
    kept = {position: golden.readings[position] for position in positions}
    dtype = drafter.fc.weight.dtype
    found = first_difference(kept, read_golden(drafter, positions), dtype)
    if found is None:
        return []
    agreed = [position for position in positions if position < found.position]
    where = (
        f"; {' and '.join(map(str, agreed))} agree, so look at what changes with length: "
        "rotary positions, windows, recurrent state"
        if agreed
        else ""
    )
    return [f"golden vector: {found}{where}"]


def golden_warnings(folder: Path | str, drafter: DSparkDrafter) -> list[str]:
    """What to say before numbers of this drafter are believed; nothing for folders without one."""
    try:
        golden = read_golden_file(folder)
    except UserError as error:
        return [str(error)]
    if golden is None:
        return []
    found = [*check_meaning(golden, drafter), *check_readings(golden, drafter, QUICK)]
    return [f"{text}; `dspark doctor {folder}` says more" for text in found]
