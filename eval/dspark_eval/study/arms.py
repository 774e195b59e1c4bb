"""What a study compares: named arms, each a set of distillation settings over a common base.

All arms of a study train on the same rows, in the same order, for the same number of steps, and
are measured on the same prompts. `match` names the arm whose number of parameters the others are
brought to by the width of their MLP, so that no arm wins by size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dspark.distill.presets import preset_overrides
from dspark.errors import UserError

Settings = Mapping[str, Any]
"""Dotted keys of a distillation run and their values."""


@dataclass(frozen=True)
class Arm:
    """One thing that is compared: a name, what it changes, and a remark for the table."""

    name: str
    settings: Settings
    note: str = ""


@dataclass(frozen=True)
class Study:
    """A question and its arms; the first arm is the one that the others are compared with.

    Attributes:
        name: As given on the command line, and the folder's name.
        question: What the table answers.
        base: Settings of every arm.
        match: Bring all arms to the first arm's number of parameters (within 2 %).
    """

    name: str
    question: str
    arms: tuple[Arm, ...]
    base: Settings = field(default_factory=dict)
    match: bool = True

    @property
    def reference(self) -> Arm:
        """The arm that the others are compared with."""
        return self.arms[0]

    def only(self, names: tuple[str, ...]) -> Study:
        """The same study with these arms, the reference always among them.

        Raises UserError for a name that is no arm.
        """
        if not names:
            return self
        known = [arm.name for arm in self.arms]
        for name in names:
            if name not in known:
                raise UserError(f"--arm {name}: expected one of {', '.join(known)}")
        kept = tuple(arm for arm in self.arms if arm is self.reference or arm.name in names)
        return Study(self.name, self.question, kept, self.base, self.match)


def _kda(order: str, **more: Any) -> dict[str, Any]:
    return {
        "drafter.backbone": "kda",
        "drafter.kda_order": order,
        **{f"drafter.{key}": value for key, value in more.items()},
    }


ROWS = {
    "data.seed": 0,
    "data.held_out": 160,
    "eval.prompts": 0,
    "eval.every": 1_000_000,
    "eval.calibrate": False,
}
"""One set of rows for all seeds; real rounds are measured after training and not during it."""

FAMILY = Study(
    "family",
    "Which backbone, order of the linearisation and sequential head, at equal parameters?",
    (
        Arm("attention", {}),
        Arm("attention-gated", {"drafter.head": "gated"}),
        Arm("attention-rnn", {"drafter.head": "rnn"}),
        Arm("attention-window-64", {"drafter.sliding_window": 64}),
        Arm("mla", {"drafter.backbone": "mla"}),
        Arm("mla-rnn", {"drafter.backbone": "mla", "drafter.head": "rnn"}),
        Arm("kda-gla", _kda("gla")),
        Arm("kda-0", _kda("0")),
        Arm("kda-1", _kda("1")),
        Arm("kda-2", _kda("2")),
        Arm("kda-exact", _kda("6"), "order 6 of 6"),
        Arm("kda-0-softmax", _kda("0", kda_block_softmax=True), "softmax inside the block"),
        Arm("kda-1-rnn", _kda("1", head="rnn")),
        Arm("kda-1-no-markov-confidence", _kda("1", confidence_with_markov=False)),
    ),
    {**ROWS, "drafter.block_size": 7},
)

BEST = _kda("1", init="target", head="rnn") | {"train.optimizer": "muon"}
"""The parts that won alone and cost next to no time, together."""

DEEPSPEC = {
    key: value for key, value in preset_overrides("deepspec").items() if not key.startswith("data.")
}
"""Preset `deepspec`, on the rows of every other arm."""

RECIPE = Study(
    "recipe",
    "What beats DeepSpec's recipe, and what does not? Block 7, equal parameters.",
    (
        Arm("deepspec", DEEPSPEC, "preset deepspec"),
        Arm("deepspec-2.5e-3", DEEPSPEC | {"train.lr": 2.5e-3}, "its best rate"),
        Arm("ours", {}, "the defaults, block 7"),
        Arm("confidence-flows", {"train.confidence_detach": False}),
        Arm("ce-0.1", {"train.ce": 0.1}),
        Arm("kl", {"train.ce": 0.0, "train.kl": 0.5}),
        Arm("nla", {"train.tv": 0.0, "train.nla": 0.9}),
        Arm("lk-hybrid", {"train.tv": 0.0, "train.lk_hybrid": 0.9}),
        Arm("length", {"train.length": 0.5}),
        Arm("dpace", {"train.slot_weights": "dpace"}),
        Arm("anchors-32", {"train.anchors": 32}),
        Arm("anchors-entropy", {"train.anchor_choice": "entropy"}),
        Arm("muon", {"train.optimizer": "muon"}),
        Arm("ema", {"train.ema": 0.99}),
        Arm("taps-late", {"drafter.tap_ids": [3, 4, 5, 6, 7]}),
        Arm("taps-wide", {"drafter.tap_ids": [1, 3, 5, 6, 7]}),
        Arm("taps-group-ends", {"drafter.tap_ids": [2, 5, 7]}, "K3's residual groups end there"),
        Arm("block-10", {"drafter.block_size": 10}, "drafts 7 of 10"),
        Arm("rnn", {"drafter.head": "rnn"}),
        Arm("kda", _kda("1")),
        Arm("kda-target", _kda("1", init="target"), "preset kda-pruned: from the target's layers"),
        Arm("kda-rnn", _kda("1", head="rnn")),
        Arm("kda-rnn-32", _kda("1", head="rnn") | {"train.anchors": 32}, "32 anchors"),
        Arm("best", BEST, "kda-target, rnn head, muon"),
    ),
    {**ROWS, "drafter.block_size": 7},
)

MOMENTS = Study(
    "moments",
    "Do moments of two bytes or one, rounded at random, cost accepted length?",
    (
        Arm("fp32", {"train.moments": "fp32"}, "8 bytes a parameter"),
        Arm("bf16", {"train.moments": "bf16"}, "4 bytes"),
        Arm("int8", {"train.moments": "int8"}, "2 bytes and scales"),
    ),
    {**ROWS, "drafter.block_size": 7},
)

STUDIES = {study.name: study for study in (FAMILY, RECIPE, MOMENTS)}


def find_study(name: str) -> Study:
    """The study of that name. Raises UserError with the known ones."""
    if name not in STUDIES:
        raise UserError(f"{name}: no such study; expected one of {', '.join(STUDIES)}")
    return STUDIES[name]
