"""Which of our recipes the study goes on with.

Decided on prompts that are neither trained on nor measured on: the candidate whose proposals for
those the target accepts most of, under teacher forcing. So the comparison on the test prompts is
of a recipe that was chosen without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dspark.errors import UserError
from dspark.files import read_json
from dspark_eval.real_text.arms import CANDIDATES, CHOSEN, REFERENCE
from dspark_eval.real_text.runs import find_run
from dspark_eval.real_text.training import TRAINED


def choose(out: Path) -> str | None:
    """The best candidate that is trained; None where none is."""
    lengths = {
        name: float(read_json(path)["held_out"]["accepted_length"])
        for name in CANDIDATES
        if (path := out / name / TRAINED).is_file()
    }
    return max(lengths, key=lambda name: lengths[name]) if lengths else None


def real_name(out: Path, name: str) -> str:
    """The arm's own name, where `chosen` is given. Raises UserError where nothing is trained."""
    if name != CHOSEN:
        return name
    found = choose(out)
    if found is None:
        raise UserError(f"{out}: none of {', '.join(CANDIDATES)} is trained; run the step train")
    return found


def timed_arms(out: Path, asked: Sequence[str]) -> list[str]:
    """The drafters that were asked for, each once, behind its counterpart of the reference's recipe
    where that is trained. Raises UserError for a name that is not."""
    arms: dict[str, None] = {}
    for name in asked:
        own = choose(out) if name == CHOSEN else find_run(name).name
        if name != CHOSEN and not (out / str(own) / TRAINED).is_file():
            raise UserError(f"{out / str(own)}: not trained yet; run the step train --arm {name}")
        beside = REFERENCE if own is None else find_run(own).counterpart.name
        there = [each for each in (beside, own) if each and (out / each / TRAINED).is_file()]
        arms |= dict.fromkeys(there)
    return list(arms)
