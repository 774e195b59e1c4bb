"""How a drafter is trained: loss, batch and optimiser, each value checked.

Defaults are sized for the shipped nano target on two CPU cores; eval/LOG.md has the measurements
that chose them. (DeepSpec's recipe: `presets.py`.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dspark.distill.options import check, check_at_least, option
from dspark.distill.terms import SLOT_WEIGHTS
from dspark.draft.anchors import ANCHOR_CHOICES
from dspark.seeds import check_seed

TOKEN_TERMS = ("ce", "tv", "kl", "reverse_kl", "nla", "lk_hybrid", "length")
"""Weights in TrainSettings that teach the drafter tokens."""

_CHOICES = {
    "anchor_choice": ANCHOR_CHOICES,
    "optimizer": ("adamw", "muon"),
    "precision": ("fp32", "bf16"),
    "moments": ("fp32", "bf16", "int8"),
    "slot_weights": SLOT_WEIGHTS,
}
"""Values of the options of TrainSettings that are one of a few words."""


@dataclass(frozen=True)
class TrainSettings:
    """Loss, batch and optimiser. One optimiser step is one global batch of `rows_per_step` rows."""

    epochs: int = option(6, "passes over the training rows")
    max_steps: int | None = option(None, "end the schedule at this step; null: epochs only")
    rows_per_step: int = option(8, "rows in one optimiser step, over all processes")
    micro_rows: int = option(8, "rows in one forward pass; a memory limit, nothing else")
    anchors: int = option(16, "blocks trained per row")
    anchor_choice: str = option("uniform", "uniform | entropy | after_entropy: where blocks start")
    optimizer: str = option("adamw", "adamw | muon: for hidden matrices, AdamW for the rest")
    lr: float = option(2.5e-3, "peak learning rate")
    muon_lr: float | None = option(None, "muon: peak rate of its matrices; null: lr")
    muon_momentum: float = option(0.95, "muon: decay of the momentum")
    beta1: float = option(0.9, "AdamW decay of the first moment")
    beta2: float = option(0.95, "AdamW decay of the second moment")
    eps: float = option(1e-8, "AdamW epsilon")
    weight_decay: float = option(0.0, "decoupled weight decay")
    warmup: float = option(0.04, "share of all steps with a rising learning rate")
    clip: float = option(1.0, "largest gradient norm")
    precision: str = option("fp32", "fp32 | bf16: dtype of matmuls; master weights stay fp32")
    moments: str = option("fp32", "fp32 | bf16 | int8: how AdamW's moments are kept between steps")
    ema: float = option(0.0, "decay of a mean of the weights, which is what is written; 0: none")
    ce: float = option(0.5, "weight of the cross-entropy with the row's own tokens")
    tv: float = option(0.9, "weight of 2 TV between drafter and target")
    confidence: float = option(1.0, "weight of the confidence loss")
    kl: float = option(0.0, "weight of KL(target || drafter)")
    reverse_kl: float = option(0.0, "weight of KL(drafter || target)")
    nla: float = option(0.0, "weight of -log(1 - TV), the negative log acceptance")
    lk_hybrid: float = option(0.0, "weight of s KL + (1 - s) TV, s = exp(-3 (1 - TV))")
    length: float = option(0.0, "weight of minus the drafted tokens expected to be accepted")
    slot_weights: str = option("decay", "decay: exp(-k / decay) | dpace: by how far a block gets")
    confidence_detach: bool = option(True, "stop the confidence gradient before the backbone")
    decay: float = option(4.0, "slot k weighs exp(-k / decay)")
    keep_gib: float = option(2.0, "with several epochs: memory for target states; 0 keeps none")
    chunk: int | None = option(None, "supervised slots whose logits exist at once; null: by bytes")
    seed: int = option(0, "decides initial weights, row order, anchors and answers")
    sharded: bool = option(False, "share gradients and moments out among the processes")
    deterministic: bool = option(False, "GPU: kernels that give the same bits every time; slower")
    log_every: int = option(10, "steps between records in training.json")

    def __post_init__(self) -> None:
        check_at_least(
            "train", self, 1, "epochs", "max_steps", "rows_per_step", "micro_rows", "anchors",
            "chunk", "log_every",
        )  # fmt: skip
        check_at_least("train", self, 0, "weight_decay", "confidence", "keep_gib", *TOKEN_TERMS)
        check_seed("train.seed", self.seed)
        for name in ("lr", "muon_lr", "eps", "clip", "decay"):
            value = getattr(self, name)
            check(
                value is None or (math.isfinite(value) and value > 0),
                f"train.{name} is {value}: expected a finite number above 0",
            )
        for name in ("beta1", "beta2", "warmup", "muon_momentum", "ema"):
            value = getattr(self, name)
            check(0 <= value < 1, f"train.{name} is {value}: expected 0 <= {name} < 1")
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            check(value in known, f"train.{name} is {value!r}: expected {' or '.join(known)}")
        check(
            any(getattr(self, name) > 0 for name in TOKEN_TERMS),
            f"train.{', '.join(TOKEN_TERMS)} are all 0: the drafter would learn no tokens",
        )
        check(
            self.muon_lr is None or self.optimizer == "muon",
            f"train.muon_lr is {self.muon_lr}: expected null with train.optimizer adamw",
        )
        for name, plain in (("optimizer", "adamw"), ("moments", "fp32"), ("ema", 0.0)):
            value = getattr(self, name)
            check(
                not self.sharded or value == plain,
                f"train.{name} is {value!r}: expected {plain!r} with train.sharded, which shares "
                "out AdamW's own state only",
            )
