"""How a study is run, checked before anything is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.distill.config import load_config
from dspark.draft.kinds import BACKBONES
from dspark.errors import UserError
from dspark_eval.study.arms import Arm, Settings, Study

OWNED = {
    "target.name": "--target",
    "target.device": "--device",
    "train.max_steps": "--steps",
    "train.epochs": "--steps",
    "train.seed": "--seeds",
    "out.dir": "--out",
}
"""Settings that the study itself decides, and the option to decide them by."""
ENDLESS = 1_000_000
"""Epochs: the steps alone end a run, however few rows there are."""


@dataclass(frozen=True)
class Plan:
    """What to run, where, and how much of it. Raises UserError for what cannot be run.

    Attributes:
        study: What is compared.
        out: Folder of all runs.
        steps: Optimiser steps of every run.
        seeds: Seeds of every arm.
        jobs: Runs at a time.
        prompts: Prompts of each measurement.
        draft_length: Proposals per round when measuring.
        target: Name or folder of the target.
        device: Where runs train; measuring is on the CPU.
        overrides: Settings given on the command line, of every arm that has them; an arm's own
            come last.
        contexts: Context lengths at which drafts are timed, one run after the other; may be empty.
        equal_seconds: Give every arm the training time of the reference's steps, and not its steps.
        long: Prompts of each bucket of long contexts; 0: do not measure there.
    """

    study: Study
    out: Path
    steps: int = 1200
    seeds: tuple[int, ...] = (0, 1, 2)
    jobs: int = 2
    prompts: int = 60
    draft_length: int = 7
    target: str = "nano"
    device: str = "cpu"
    overrides: Settings | None = None
    contexts: tuple[int, ...] = ()
    equal_seconds: bool = False
    long: int = 0

    def __post_init__(self) -> None:
        for option in ("steps", "jobs", "draft_length"):
            value = getattr(self, option)
            name = option.replace("_", "-")
            _require(value >= 1, f"--{name} {value}: expected 1 or more")
        _require(bool(self.seeds), "--seeds: expected 1 or more")
        _require(self.prompts >= 2, f"--prompts {self.prompts}: expected 2 or more")
        _require(self.long >= 0, f"--long {self.long}: expected 0 or more")
        for length in self.contexts:
            _require(length >= 1, f"--contexts {length}: expected 1 or more")
        for key in self.overrides or {}:
            _require(
                key not in OWNED, f"--set {key}: the study decides it; use {OWNED.get(key, '')}"
            )
        for arm in self.study.arms:
            block = load_config(None, self.settings(arm)).drafter.block_size
            _require(
                self.draft_length <= block,
                f"--draft-length {self.draft_length}: expected at most {block}, "
                f"the block size of arm {arm.name}",
            )

    def settings(self, arm: Arm) -> dict[str, Any]:
        """All settings of an arm, before its size is matched and without a seed.

        A `--set` of a key that only one backbone has is for the arms of that backbone.
        """
        settings = {**self.study.base, **(self.overrides or {}), **arm.settings}
        backbone = settings.get("drafter.backbone", BACKBONES[0])
        others = tuple(f"drafter.{name}_" for name in BACKBONES if name != backbone)
        own = {key: value for key, value in settings.items() if not key.startswith(others)}
        return {
            **own,
            "target.name": self.target,
            "target.device": self.device,
            "train.max_steps": self.steps,
            "train.epochs": ENDLESS,
        }


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise UserError(problem)
