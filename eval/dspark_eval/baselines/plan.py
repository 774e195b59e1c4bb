"""What the table of ways to draft runs, checked before anything is.

Arms: the run's own drafter (DeepSpec's recipe), DFlash, an EAGLE-3 layer, a small causal LM, each
trained on the same rows for the same steps; and prompt lookup. Seeds change initial weights, order
and anchors, never the rows. `SIZES`:

    equal   every arm is made as wide as brings it to the first arm's number of parameters
    own     as in the paper: DFlash is the first arm's very backbone without the sequential head,
            EAGLE-3 and the causal LM are as large as they are
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.distill.config import load_config
from dspark.errors import UserError
from dspark_eval.baselines.folders import KINDS
from dspark_eval.study.arms import DEEPSPEC, ROWS
from dspark_eval.study.plan import ENDLESS, OWNED

REFERENCE, LOOKUP = "dspark", "lookup"
ARMS = (REFERENCE, *KINDS, LOOKUP)
BASE = DEEPSPEC | ROWS | {"train.anchors": 128}
"""DeepSpec's recipe. No answer to a shipped prompt has more tokens than these anchors; the recipe's
other 384 would be padding that is computed."""
RATES = (6e-4, 1.2e-3, 2.5e-3, 5e-3)
"""Peak learning rates that every arm may choose from: DeepSpec's own and doublings."""
SIZES = ("equal", "own")
RATE_SEED = 1000
"""Of the search: none of those measured, so that no seed is chosen for its luck."""

OWNED_HERE = OWNED | {"train.lr": "--rates"}


@dataclass(frozen=True)
class Plan:
    """What to run. Raises UserError for what cannot be.

    Attributes:
        out: Folder of everything; the same one goes on.
        arms: Of `ARMS`; the first of those is always among them.
        steps, seeds, jobs, prompts, draft_length, target, device: As of a study.
        rates: Learning rates each arm is tried with; one: that is taken.
        sizes: Of `SIZES`.
        rate_steps, rate_prompts: Steps of a trial, and validation prompts it is measured on.
        overrides: Settings of every trained arm.
    """

    out: Path
    arms: tuple[str, ...] = ARMS
    steps: int = 1200
    seeds: int = 3
    jobs: int = 2
    prompts: int = 60
    draft_length: int = 7
    rates: tuple[float, ...] = RATES
    rate_steps: int = 400
    rate_prompts: int = 40
    sizes: str = SIZES[0]
    target: str = "nano"
    device: str = "auto"
    overrides: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        lowest = {"steps": 1, "jobs": 1, "draft_length": 1, "rate_steps": 1, "prompts": 2}
        for name, low in (lowest | {"rate_prompts": 2, "seeds": 1}).items():
            value = getattr(self, name)
            if value < low:
                raise UserError(f"--{name.replace('_', '-')} {value}: expected {low} or more")
        if self.seeds > RATE_SEED:
            raise UserError(f"--seeds {self.seeds}: expected at most {RATE_SEED}")
        for arm in self.arms:
            if arm not in ARMS:
                raise UserError(f"--arm {arm}: expected one of {', '.join(ARMS)}")
        if self.sizes not in SIZES:
            raise UserError(f"--sizes {self.sizes}: expected one of {', '.join(SIZES)}")
        rates = self.rates
        if not rates or min(rates) <= 0 or len(set(rates)) < len(rates):
            given = " ".join(f"{rate:g}" for rate in rates)
            raise UserError(f"--rates {given}: expected learning rates above 0, each once")
        for key in set(self.overrides or {}) & set(OWNED_HERE):
            raise UserError(f"--set {key}: the table decides it; use {OWNED_HERE[key]}")
        block = load_config(None, self.settings(0, rates[0], 1)).drafter.block_size
        if self.draft_length > block:
            raise UserError(
                f"--draft-length {self.draft_length}: expected at most {block}, the block size"
            )

    @property
    def trained_arms(self) -> tuple[str, ...]:
        """Those of this call that are trained, the first one always among them."""
        return tuple(arm for arm in dict.fromkeys((REFERENCE, *self.arms)) if arm != LOOKUP)

    def settings(self, seed: int, rate: float, steps: int) -> dict[str, Any]:
        """Dotted settings of one run."""
        return {
            **BASE,
            **(self.overrides or {}),
            "target.name": self.target,
            "target.device": self.device,
            "train.max_steps": steps,
            "train.epochs": ENDLESS,
            "train.seed": seed,
            "train.lr": rate,
        }

    def document(self) -> dict[str, Any]:
        """What all runs in a folder share."""
        shared = ("steps", "prompts", "draft_length", "target", "rate_steps", "rate_prompts")
        settings = self.settings(0, self.rates[0], self.steps)
        own = {key: value for key, value in settings.items() if key not in OWNED_HERE}
        document = {name: getattr(self, name) for name in (*shared, "sizes")}
        document["rows_per_step"] = load_config(None, settings).train.rows_per_step
        return {**document, "rates": list(self.rates), "settings": own}
