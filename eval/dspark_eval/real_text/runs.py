"""One training of a drafter: a recipe, from a seed, for the study's seconds or for ten minutes.

    early            seed 0            early-long       ten minutes
    early.2          seed 2            early-long.2     ten minutes, seed 2

The name is that of its folder. Seeds change initial weights, the order of rows and anchors, never
the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dspark.errors import UserError
from dspark_eval.real_text.arms import ARMS, REFERENCE, find_arm
from dspark_eval.real_text.training import TRAINED
from dspark_eval.study.arms import Arm

LONGER = "-long"


@dataclass(frozen=True)
class Run:
    """A recipe's name, its seed, and whether it trains for the longer time."""

    arm: str
    seed: int = 0
    long: bool = False

    @property
    def name(self) -> str:
        """What its folder is called."""
        return self.arm + LONGER * self.long + (f".{self.seed}" if self.seed else "")

    @property
    def recipe(self) -> Arm:
        """The recipe. Raises UserError where there is none of that name."""
        return find_arm(self.arm)

    @property
    def settings(self) -> dict[str, Any]:
        """What a seed adds to the recipe's settings; nothing for seed 0, which is the default."""
        return {"train.seed": self.seed} if self.seed else {}

    @property
    def counterpart(self) -> Run:
        """The reference's run of the same seed and time."""
        return replace(self, arm=REFERENCE)


def find_run(name: str) -> Run:
    """The run of that name. Raises UserError for another recipe or what is no seed."""
    head, dot, seed = name.partition(".")
    if dot and not (seed.isdecimal() and int(seed)):
        raise UserError(f"{name}: expected a seed of 1 or more after the dot")
    long = head.endswith(LONGER)
    arm = head.removesuffix(LONGER)
    return Run(find_arm(arm).name, int(seed or 0), long)


def waits_for(run: Run, beside: Sequence[str], first: int) -> list[Run]:
    """Runs that start with this one, of its seed: those beside it, the longer ones only where it is
    the `first` seed, since they train on beside the next."""
    others = [replace(find_run(name), seed=run.seed) for name in beside]
    return [other for other in others if not other.long or run.seed == first]


def trained_runs(out: Path) -> list[Run]:
    """All runs trained in a folder, by recipe, the longer ones last, seed by seed."""
    names = [path.parent.name for path in out.glob(f"*/{TRAINED}")]
    runs = [find_run(name) for name in names if name.partition(".")[0].removesuffix(LONGER) in ARMS]
    order = list(ARMS)
    return sorted(runs, key=lambda run: (run.long, order.index(run.arm), run.seed))


def pairs(runs: Sequence[str], arm: str, long: bool) -> list[tuple[str, str]]:
    """Names of a recipe's runs and of the reference's beside them, of the seeds that both have."""
    own = [run for run in map(find_run, runs) if run.arm == arm and run.long == long]
    return [(run.name, run.counterpart.name) for run in own if run.counterpart.name in runs]


def reference_of(name: str, runs: Mapping[str, Any]) -> str | None:
    """The reference's run that one is compared with: its counterpart, else the first one's."""
    run = find_run(name)
    found = run.counterpart.name
    if run.arm == REFERENCE:
        return None if not run.long else Run(REFERENCE, run.seed).name
    return found if found in runs else REFERENCE
