"""What `dspark prune` is asked for, and the settings of the run that recovers what it cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.distill.budget import Budget
from dspark.distill.config import DistillConfig, load_config
from dspark.distill.effects import IMPORTANCES
from dspark.distill.pruned_folder import REPORT, drafter_overrides
from dspark.distill.run import RUN_FILE
from dspark.draft.config import DraftConfig
from dspark.errors import UserError
from dspark.files import read_json

STEPS = 300


@dataclass(frozen=True)
class PruneOptions:
    """What to cut and how.

    Attributes:
        draft: Folder of a trained drafter.
        out: Run folder.
        budget: As `Budget.parse` reads it; None: only the vocabulary is reduced.
        vocab: Target ids that the drafter goes on proposing; None: those it has.
        steps: Optimiser steps of recovery; 0: none.
        importance: One of `IMPORTANCES`: which units of an axis go first.
        rows: Training rows that effects are measured on.
        context: Tokens before the anchor, where bytes and draft time are counted.
        settings: Dotted keys of the recovery run that differ from the drafter's own run.
    """

    draft: Path
    out: Path
    budget: str | None = None
    vocab: int | None = None
    steps: int = STEPS
    importance: str = "taylor"
    rows: int = 48
    context: int = 1024
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.budget is None and self.vocab is None:
            raise UserError("nothing to prune: give --budget (params=50%, say), --vocab, or both")
        if self.importance not in IMPORTANCES:
            raise UserError(f"--importance {self.importance}: expected {' or '.join(IMPORTANCES)}")
        for name, low in (("steps", 0), ("rows", 1), ("context", 1)):
            if getattr(self, name) < low:
                raise UserError(f"--{name} {getattr(self, name)}: expected at least {low}")
        if self.budget is not None:
            Budget.parse(self.budget)

    def document(self) -> dict[str, Any]:
        """As JSON; what a resumed pruning has to repeat."""
        return {
            "draft": str(self.draft),
            "budget": self.budget,
            "vocab": self.vocab,
            "steps": self.steps,
            "importance": self.importance,
            "rows": self.rows,
            "context": self.context,
            "settings": dict(self.settings),
        }


def check_folder(options: PruneOptions, resume: bool) -> None:
    path = options.out / REPORT
    if path.is_file():
        if not resume:
            raise UserError(
                f"{options.out}: a pruning lives here; continue it with --resume, or choose "
                "another --out"
            )
        stored = read_json(path)["options"]
        for key, value in options.document().items():
            if stored.get(key) != value:
                raise UserError(f"{path}: {key} was {stored.get(key)!r}, now {value!r}; repeat it")
    elif resume:
        raise UserError(f"{path}: no pruning to resume here; start one without --resume")
    elif (options.out / "config.json").exists() or (options.out / RUN_FILE).exists():
        raise UserError(f"{options.out}: a run lives here; choose another --out")


def base_config(options: PruneOptions, drafter: DraftConfig) -> DistillConfig:
    """The run that made the drafter, with this one's settings over it; else the defaults."""
    run, pruned = options.draft / RUN_FILE, options.draft / REPORT
    own: dict[str, Any] = {}
    if run.is_file():
        own = flat(load_config(run).to_dict())
    elif pruned.is_file():  # cut and not recovered: it knows how it would have been
        own = flat(read_json(pruned)["recovery"])
    if not own and drafter.target is not None:
        own["target.name"] = drafter.target.name
    shape = drafter_overrides(drafter)
    length = min(own.get("eval.draft_length", 7), drafter.block_size)
    fixed = {"eval.draft_length": length, "out.dir": str(options.out)}
    return load_config(None, own | shape | fixed | dict(options.settings))


def flat(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{name}.{key}": v for name, values in sections.items() for key, v in values.items()}
