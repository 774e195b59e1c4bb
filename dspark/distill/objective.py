"""From a batch of rows to the sums of its loss, and from sums to the numbers that are reported.

    batch -> taps, hidden (target, no gradient) -> blocks -> drafter -> LossSums

Training, evaluation under teacher forcing and every test of either go through `batch_sums`.

Letters: B batch, S sequence, A anchors, G block slots, D hidden.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from dspark.distill.batches import Batch
from dspark.distill.loss import LossSums, LossWeights, distill_loss
from dspark.distill.settings import TrainSettings
from dspark.distill.taps import FeatureSource, target_features
from dspark.draft.anchors import block_inputs, blocks
from dspark.draft.model import DSparkDrafter
from dspark.runtime.target import Target

SCALARS = ("accepted_length", "blocks")
"""Fields of LossSums without a position."""


def loss_weights(settings: TrainSettings) -> LossWeights:
    """Coefficients of the terms. The settings speak of TV: the loss takes 2 TV, as DeepSpec's."""
    return LossWeights(settings.ce, settings.tv, settings.confidence)


def batch_sums(
    target: Target,
    drafter: DSparkDrafter,
    batch: Batch,
    settings: TrainSettings,
    source: FeatureSource | None = None,
) -> LossSums:
    """Loss sums of a batch on the target's device; differentiable in the drafter's weights.

    `source` gives the target's states; without one the target runs over the padded batch. Raises
    BadFeatures when the states are not finite.
    """
    config = drafter.config
    features = source(batch) if source else target_features(target, batch, drafter.taps)
    block = blocks(batch.ids, batch.loss_mask, batch.anchors, config.block_size)
    inputs = block_inputs(block.prev[..., 0], config.block_size, config.mask_token_id)
    autocast = torch.autocast(
        batch.ids.device.type, torch.bfloat16, enabled=settings.precision == "bf16"
    )
    with autocast:
        hidden = drafter.train_hidden(
            features.taps,
            batch.valid,
            target.embed(inputs),
            batch.anchors.positions,
            batch.anchors.valid,
        )
    # Outside autocast: logits come in the target's dtype, as they do at run time, and the rest in
    # float32.
    return distill_loss(
        hidden.float(),
        _rows_at(features.hidden, block.rows),
        block.prev,
        block.labels,
        block.supervised,
        to_logits=lambda states: target.logits(states.to(target.dtype)),
        markov_head=drafter.markov_head,
        confidence_head=drafter.confidence_head if settings.confidence > 0 else None,
        decay=settings.decay,
        chunk=settings.chunk,
        confidence_detach=settings.confidence_detach,
    )


def _rows_at(hidden: Tensor, rows: Tensor) -> Tensor:
    """[B, S, D] at positions [B, A, G] -> [B, A, G, D]."""
    batch = torch.arange(len(hidden), device=hidden.device)[:, None, None]
    return hidden[batch, rows]


def zero_sums(block_size: int, device: torch.device) -> LossSums:
    """Sums of nothing, float64."""
    shapes = [() if field.name in SCALARS else (block_size,) for field in fields(LossSums)]
    return LossSums(*(torch.zeros(s, dtype=torch.float64, device=device) for s in shapes))


def to_vector(sums: LossSums) -> Tensor:
    """All sums in one float64 vector, to be reduced in one call."""
    return torch.cat([getattr(sums, f.name).detach().double().reshape(-1) for f in fields(sums)])


def from_vector(vector: Tensor, block_size: int) -> LossSums:
    """The inverse of `to_vector`."""
    shapes = [() if field.name in SCALARS else (block_size,) for field in fields(LossSums)]
    sizes = [block_size if shape else 1 for shape in shapes]
    parts = vector.split(sizes)
    return LossSums(*(part.reshape(s) for part, s in zip(parts, shapes, strict=True)))


def report(sums: LossSums, weights: LossWeights) -> dict[str, Any]:
    """Averages as they stand in training.json; None where nothing was supervised.

    `ce`, `tv` and `confidence_bce` are means by slot weight, as in the loss; lists are per slot.
    `accepted_length` is tokens per round under teacher forcing.
    """
    total = float(sums.weight.sum())
    weight, count = sums.weight.tolist(), sums.count.tolist()
    ce, l1, bce = sums.ce.tolist(), sums.l1.tolist(), sums.bce.tolist()
    return {
        "loss": _ratio(float(sums.loss(weights, 1.0)), total),
        "ce": _ratio(sum(ce), total),
        "tv": _ratio(sum(l1) / 2, total),
        "confidence_bce": _ratio(sum(bce), total),
        "accepted_length": _ratio(float(sums.accepted_length), float(sums.blocks)),
        "acceptance": _ratios(sums.acceptance.tolist(), count),
        "ce_per_slot": _ratios(ce, weight),
        "tv_per_slot": _ratios([value / 2 for value in l1], weight),
        "confidence_bce_per_slot": _ratios(bce, weight),
        "confidence_per_slot": _ratios(sums.confidence.tolist(), count),
    }


def _ratio(total: float, weight: float) -> float | None:
    return total / weight if weight else None


def _ratios(totals: list[float], weights: list[float]) -> list[float | None]:
    return [_ratio(t, w) for t, w in zip(totals, weights, strict=True)]
