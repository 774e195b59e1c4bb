"""Recipes by name: values that replace the defaults of a run, below its YAML file and options.

A preset says how a drafter is built and trained. It leaves alone what has to fit the data and the
target at hand: prompts, answers, batch, epochs, layers, widths, markov rank.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from dspark.errors import UserError


@dataclass(frozen=True)
class Preset:
    """What it is, in a line, and its dotted keys."""

    doc: str
    values: dict[str, Any]


PRESETS = {
    "deepspec": Preset(
        "DeepSpec's recipe for DSpark: 0.1 CE + 0.9 L1 + confidence, AdamW 6e-4, block 7",
        {
            "drafter.backbone": "attention",
            "drafter.head": "vanilla",
            "drafter.confidence_with_markov": True,
            "drafter.block_size": 7,
            "drafter.sliding_window": None,
            "drafter.init_scale": "normal",
            "data.min_supervised": 14,
            "train.anchors": 512,
            "train.anchor_choice": "uniform",
            "train.optimizer": "adamw",
            "train.lr": 6e-4,
            "train.beta1": 0.9,
            "train.beta2": 0.999,
            "train.eps": 1e-8,
            "train.weight_decay": 0.0,
            "train.warmup": 0.04,
            "train.clip": 1.0,
            "train.moments": "fp32",
            "train.ema": 0.0,
            "train.ce": 0.1,
            "train.tv": 0.9,
            "train.confidence": 1.0,
            "train.confidence_detach": False,
            "train.kl": 0.0,
            "train.reverse_kl": 0.0,
            "train.nla": 0.0,
            "train.lk_hybrid": 0.0,
            "train.length": 0.0,
            "train.slot_weights": "decay",
            "train.decay": 4.0,
        },
    ),
    "kda-pruned": Preset(
        "Layers of the target, pruned to the drafter's size, linearised and distilled",
        {
            "drafter.backbone": "kda",
            "drafter.init": "target",
            "drafter.kda_order": "1",
        },
    ),
}


def preset_names() -> list[str]:
    """Every preset there is."""
    return list(PRESETS)


def preset_overrides(name: str) -> dict[str, Any]:
    """Dotted keys and values of a preset, as `load_config` takes them.

    Raises UserError, with the nearest name, for one that does not exist.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(PRESETS)}"
        raise UserError(f"preset {name!r} does not exist; {hint}")
    return dict(PRESETS[name].values)
