"""The drafters of the study: DeepSpec's recipe, ours, and smaller ones of ours.

All read the same taps, draft blocks of seven and take batches of 32 rows with 64 anchors each. All
but the smaller ones have the parameters of the reference (within 2 %).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from dspark.distill.config import DistillConfig, load_config
from dspark.errors import UserError
from dspark.runtime.loading import LoadedTarget
from dspark_eval.equal_size import count_parameters, matched_width
from dspark_eval.study.arms import DEEPSPEC, Arm

REFERENCE = "deepspec"
CANDIDATES = ("wide", "wide-fast", "deep", "early", "late")
"""Recipes of ours; which is the best is decided on prompts kept aside, and measured on others."""
TRIED = ("wide-fast", "early", "late")
"""Those that train beside the reference unless others are named."""
CHOSEN = "chosen"
"""Stands for the best of the candidates."""
SIZES = ("middle", "small")
LIKE_CHOSEN = ("long", *SIZES)
"""Arms that take over the chosen candidate's recipe."""
TOLERANCE = 0.02
ENDLESS = 1_000_000

SHAPE: dict[str, Any] = {
    "drafter.num_layers": 5,
    "drafter.num_heads": 9,
    "drafter.num_kv_heads": 3,
    "drafter.head_dim": 64,
    "drafter.intermediate_size": 1536,
    "drafter.markov_rank": 256,
    "drafter.block_size": 7,
    "drafter.tap_ids": [1, 8, 14, 20, 26],
    "data.max_length": 384,
    "data.min_supervised": 14,
    "train.rows_per_step": 32,
    "train.micro_rows": 32,
    "train.anchors": 64,
    "train.precision": "bf16",
}
OURS: dict[str, Any] = {
    "train.optimizer": "muon",
    "train.lr": 1.5e-3,
    "train.beta2": 0.95,
    "train.ce": 0.0,
    "train.kl": 0.5,
    "train.tv": 0.9,
    "train.confidence_detach": True,
    "drafter.init_scale": "fan_in",
    "drafter.head": "rnn",
}
WIDE = {"drafter.markov_rank": 64}
"""A smaller table of previous tokens; the layers get its parameters."""
DEEP = {"drafter.num_layers": 10, "drafter.markov_rank": 72}
"""Twice the layers in the parameters of a large table; each has the shape of the target's."""
FAST = {"train.muon_lr": 4e-3}
"""A higher rate of the layers; tables and heads keep theirs."""
EARLY = {"train.muon_lr": 2.5e-3, "train.decay": 2.0}
"""Slots by what they add to the accepted length where every other proposal is refused: slot k adds
the product of the acceptances up to it, which falls by about half a slot."""
LATE = {"drafter.tap_ids": [8, 15, 21, 25, 28]}
"""Taps nearer to the target's end."""
SMALLER: dict[str, dict[str, Any]] = {
    "middle": {"drafter.num_layers": 3, "drafter.markov_rank": 64},
    "small": {"drafter.num_layers": 1, "drafter.markov_rank": 32},
}

ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(REFERENCE, DEEPSPEC | {"train.anchors": 64}, "DeepSpec's recipe"),
        Arm("wide", OURS | WIDE, "Muon, KL for CE, recurrent head, wider layers"),
        Arm("wide-fast", OURS | WIDE | FAST, "the same, the layers at 2.7 times the rate"),
        Arm("deep", OURS | DEEP, "the same as wide, ten layers that start as the target's"),
        Arm("early", OURS | WIDE | EARLY, "wide, its first slots weighing more"),
        Arm("late", OURS | WIDE | EARLY | LATE, "early, with taps nearer to the target's end"),
        Arm("long", {}, "the chosen recipe, longer"),
        *(Arm(name, shape, f"the chosen recipe, {name} size") for name, shape in SMALLER.items()),
    )
}
MATCHED = ("wide", "wide-fast", "early", "late")
"""Arms whose MLP is as wide as it takes to have the reference's parameters."""
FROM_TARGET = ("deep",)
"""Arms that start from layers of the target."""


def find_arm(name: str) -> Arm:
    """The arm of that name. Raises UserError with the known ones."""
    if name == CHOSEN:
        raise UserError(f"--arm: name the drafter to train, one of {', '.join(ARMS)}")
    if name not in ARMS:
        raise UserError(f"{name}: no such drafter; expected one of {', '.join(ARMS)}")
    return ARMS[name]


def like(arm: Arm, chosen: str | None) -> Arm:
    """The arm with the recipe it takes over, if it does. Raises UserError where none is chosen."""
    if arm.name not in LIKE_CHOSEN:
        return arm
    if chosen is None:
        raise UserError(f"{arm.name}: needs a candidate trained: {', '.join(CANDIDATES)}")
    return Arm(arm.name, {**ARMS[chosen].settings, **arm.settings}, arm.note)


def arm_config(
    arm: Arm, loaded: LoadedTarget, more: dict[str, Any], chosen: str | None = None
) -> DistillConfig:
    """Everything that decides an arm's drafter and steps; `more` overrides (a smaller trial, say).

    Raises UserError where no width of the MLP gives it the reference's parameters.
    """
    arm = like(arm, chosen)
    config = _config(arm, loaded, more)
    key = "drafter.intermediate_size"
    matched = arm.name in MATCHED or (arm.name == "long" and chosen in MATCHED)
    if not matched or key in more:
        return config
    goal = count_parameters(_config(ARMS[REFERENCE], loaded, more), loaded)
    width = matched_width(
        lambda w: count_parameters(_config(arm, loaded, more | {key: w}), loaded), goal
    )
    config = _config(arm, loaded, more | {key: width})
    found = count_parameters(config, loaded)
    if abs(found / goal - 1) > TOLERANCE:
        raise UserError(f"{arm.name}: {found} parameters at MLP width {width}, {goal} wanted")
    return config


def overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """Settings of `--set KEY=VALUE`. Raises UserError for one that is not of that form."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign:
            raise UserError(f"--set {pair}: expected key=value")
        found[key] = yaml.safe_load(value)
    return found


def _config(arm: Arm, loaded: LoadedTarget, more: dict[str, Any]) -> DistillConfig:
    settings = {**SHAPE, **arm.settings, "train.epochs": ENDLESS, **more}
    own = {key: value for key, value in settings.items() if value is not None}
    return load_config(None, {**own, "target.name": loaded.target.name})
